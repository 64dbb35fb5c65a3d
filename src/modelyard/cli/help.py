"""The help of a command: its layout, and which of the many options of the config it shows.

``--help`` shows the options that most runs need, and those of the model, dataset, optimizer and schedule that are
named. ``--help all`` shows all, ``--help data`` those of a group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typer.core import TyperCommand

from modelyard.config import Config, resolve
from modelyard.config.schema import COMPONENTS, CORE_FIELDS, GROUPS, Group, registered_name
from modelyard.errors import UserError, unknown
from modelyard.registry import Entry

ALL, COMMON = "all", "common"
FLAGS = ("-h", "--help")
_COMMON = (
    *("model", "dataset", "recipe", "random_seed", "plugins", "augment", "image_size", "train_batch_size"),
    *("train_epochs", "train_steps", "optimizer", "learning_rate", "learning_rate_schedule", "test_at_end"),
    *("engine", "num_gpus", "precision", "model_dir", "checkpoint_path", "hooks"),
)
"""What most runs need. A command with few options shows all of them."""
_FEW = 20
_GROUP_OF_PARTS = {"model": "model", "dataset": "data", "optimizer": "training", "learning_rate_schedule": "training"}
_FIRST_COLUMN = 30


# -- what is shown ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topic:
    """What the help is about.

    Args:
        name: `ALL`, `COMMON`, or the name of a group.
        chosen: for each part that the command or the project names, such as model, its component.
    """

    name: str = ALL
    chosen: Mapping[str, Entry] = field(default_factory=dict)

    def shows(self, option: str, group: str, few: bool = False) -> bool:
        """Whether the help shows an option of a group. A command with ``few`` options shows all of the core."""
        return self.name in (ALL, group) or (self.name == COMMON and (few or option in _COMMON))


def group_name(group: type[Group]) -> str:
    """Returns the name of a group of core options, for ``--help``."""
    return group.__name__.lower()


def group_of_part(part: str) -> str:
    """Returns the name of the group that has the options of the components of a part, such as model."""
    return _GROUP_OF_PARTS[part]


def topics(core: Collection[str] | None = None, parts: Collection[str] = tuple(COMPONENTS)) -> list[str]:
    """Returns what may follow ``--help`` of a command, with arguments as for `as_typer_command`."""
    groups = [group_name(group) for group in GROUPS if core is None or group.__name__ in core]
    return list(dict.fromkeys([ALL, *map(group_of_part, parts), *groups]))


def is_few(names: Sequence[str]) -> bool:
    """Whether these options are so few that the help shows all of them."""
    return len(names) <= _FEW


def take_topic(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Returns the words of a command without the topic of its help, and that topic; None if no help is asked for.

    Raises:
        UserError: for a topic that does not exist.
    """
    own = list(words[: words.index("--")] if "--" in words else words)
    asked = next((at for at, word in enumerate(own) if word.partition("=")[0] in FLAGS), None)
    if asked is None:
        return list(words), None
    name = own[asked].partition("=")[2]
    rest = own[asked + 1 :]
    if not name and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
    if name and name not in topics():
        raise UserError(f"--help: {unknown('group of options', name, topics())}")
    return [*own[:asked], *rest, "--help"], name or COMMON


def chosen_components(words: Sequence[str]) -> dict[str, Entry]:
    """Returns the components that words of a command and files of the project name. Mistakes are left for later."""
    from modelyard.cli.options import normalize

    typed: dict[str, Any] = {}
    pending, arguments = normalize(words), list[str]()
    while pending:
        name, equals, value = pending.pop(0).partition("=")
        if not name.startswith("-"):
            arguments.append(name)
        elif name[2:] in CORE_FIELDS and (equals or (pending and pending[0][:1] != "-")):
            typed[name[2:]] = value if equals else pending.pop(0)
    if arguments[:1] == ["data"] and len(arguments) > 2:  # data info DATASET
        typed["dataset"] = arguments[2]
    names = {part: str(typed[part]) for part in COMPONENTS if part in typed}
    try:
        config = resolve(typed, check_files=False)
    except UserError:
        pass
    else:
        names = {part: getattr(config, part) for part in COMPONENTS if not _is_default(config, part)}
    found = {part: registered_name(part, name) for part, name in names.items()}
    return {part: COMPONENTS[part].get(name) for part, name in found.items() if name in COMPONENTS[part].names()}


def _is_default(config: Config, part: str) -> bool:
    origin: str = config.origin(part)
    return origin == "default" or config.origin("recipe").startswith("default,")  # the recipe that nobody has named


# -- layout -----------------------------------------------------------------------------------------------------------


class GroupedHelp(TyperCommand):
    """A command whose help has a section for each group of options. Names are never cut."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if not getattr(parameter, "hidden", False):
                is_argument = parameter.param_type_name == "argument"
                title = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
                sections.setdefault(title, []).append((_shown_name(parameter, is_argument), _shown_text(parameter)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=_FIRST_COLUMN)
        self.format_epilog(ctx, formatter)


def _shown_name(parameter: Any, is_argument: bool) -> str:
    if is_argument:
        return str(parameter.metavar or parameter.name.upper())
    names = ", ".join(sorted(parameter.opts, key=len, reverse=True))
    if parameter.is_flag or "--help" in parameter.opts:
        return names.replace("--", "--[no_]", 1) if parameter.secondary_opts else names
    return f"{names} {parameter.metavar}"


def _shown_text(parameter: Any) -> str:
    text = parameter.help or ""
    if "--help" in getattr(parameter, "opts", ()):
        return "show this help"
    default = parameter.default
    if "default:" in text or not getattr(parameter, "show_default", False) or default in (None, False, "", ()):
        return text
    return f"{text} (default: {default})"
