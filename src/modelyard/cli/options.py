"""Every option of the config as a flag, and what was typed as a dictionary."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Optional, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from modelyard.config.resolve import COMMAND_LINE, field_kind
from modelyard.config.schema import COMPONENTS, CORE_FIELDS, GROUPS
from modelyard.errors import ConfigError, Problem, nearest
from modelyard.registry import MODELS

_OWNERS_SHOWN = 5
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


@lru_cache
def part_fields(parts: tuple[str, ...] = tuple(COMPONENTS)) -> dict[str, tuple[FieldInfo, str, list[str]]]:
    """The options of all built-in parts, each with the panel of the help it stands in and the parts that have it."""
    found: dict[str, tuple[FieldInfo, str, list[str]]] = {}
    for part in parts:
        for entry in COMPONENTS[part].entries():
            for name, info in entry.options.model_fields.items():
                panel = f"Options of the chosen {part.replace('_', ' ')}"
                found.setdefault(name, (info, panel, []))[2].append(entry.name)
    return found


def is_flag(name: str) -> bool:
    """Whether an option may stand alone on the command line."""
    info = CORE_FIELDS.get(name) or (part_fields().get(name) or (None,))[0]
    return info is not None and field_kind(info.annotation) == "flag"


def normalize(arguments: Iterable[str]) -> list[str]:
    """Dashes and underscores are the same; ``--xla false``, ``--xla=false`` and ``--no-xla`` too."""
    done: list[str] = []
    pending = list(arguments)
    while pending:
        word = pending.pop(0)
        if word == "--":
            return [*done, word, *pending]
        if not word.startswith("--"):
            done.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if is_flag(name):
            if not equals and pending and pending[0].lower() in _TRUE | _FALSE:
                equals, value = "=", pending.pop(0)
            if equals and value.lower() in _FALSE:
                name = f"no_{name}"
            elif equals and value.lower() not in _TRUE:
                done.append(f"--{name}_value={value}")  # reported with the other mistakes
                continue
            done.append(f"--{name}")
        else:
            done.append(f"--{name}{equals}{value}")
    return done


@dataclass(frozen=True)
class Taken:
    """Which options of the config a command takes: core options by name (None: all), and those of some parts."""

    core: tuple[str, ...] | None = None
    parts: tuple[str, ...] = tuple(COMPONENTS)


def with_config_options(function: Callable[..., Any], which: Taken) -> Callable[..., Any]:
    """Gives a command, which takes a context and its own parameters, options of the config."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    taken = {parameter.name for parameter in own}
    parameters = own[:]
    for group in GROUPS:
        for name, info in group.model_fields.items():
            if name not in taken and (which.core is None or name in which.core):
                parameters.append(_parameter(name, info, group.title))
    for name, (info, panel, owners) in part_fields(which.parts).items():
        parameters.append(_parameter(name, info, panel, owners))

    def command(**values: Any) -> Any:
        mine = {name: values.pop(name) for name in taken}
        mine["ctx"].obj = {name: value for name, value in values.items() if value is not None}
        return function(**mine)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def given_options(context: typer.Context) -> dict[str, Any]:
    """What the user typed: known flags, and options of a user's own parts.

    Raises:
        ConfigError: for words that are no options.
    """
    options: dict[str, Any] = dict(context.obj or {})
    problems = []
    extra = list(context.args)
    while extra:
        word = extra.pop(0)
        if not word.startswith("--"):
            near = nearest(word, [f"--{name}" for name in CORE_FIELDS], most=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            if context.info_name == "serve":  # other commands take the run without an option
                hint = f" A run is --model_dir {word}, an export --export {word}."
            problems.append(Problem(COMMAND_LINE, word, f"is not an option.{hint}"))
            continue
        name, equals, value = word[2:].partition("=")
        if name.endswith("_value") and is_flag(name.removesuffix("_value")):
            options[name.removesuffix("_value")] = value
        elif equals:
            options[name] = value
        else:
            options[name] = extra.pop(0) if extra and not extra[0].startswith("--") else True
    if problems:
        raise ConfigError(problems)
    return options


def _parameter(name: str, info: FieldInfo, panel: str, owners: Sequence[str] = ()) -> inspect.Parameter:
    kind = field_kind(info.annotation)
    default = _shown_default(info) if len(owners) <= 1 else ""  # others may have others
    text = (info.description or "") + (f" (default: {default})" if default else "")
    text += f" – of {_shortened(owners)}" if owners else ""
    if kind == "flag":
        flags = typer.Option(f"--{name}/--no_{name}", help=text, rich_help_panel=panel, show_default=False)
        annotation: Any = Annotated[Optional[bool], flags]  # noqa: UP045 - typer reads it at run time
    else:
        shown = "|".join(_choices(info.annotation)) if kind == "CHOICE" else kind
        flags = typer.Option(f"--{name}", help=text, rich_help_panel=panel, metavar=shown, show_default=False)
        annotation = Annotated[Optional[str], flags]  # noqa: UP045
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shortened(owners: Sequence[str]) -> str:
    if set(MODELS.names()) <= set(owners):
        return "every model"
    rest = len(owners) - _OWNERS_SHOWN
    return ", ".join(owners[:_OWNERS_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in (_choices(part) if get_args(part) else ["N"])]


def _shown_default(info: FieldInfo) -> str:
    default = info.default
    if (
        info.is_required()
        or default is None
        or default == ""
        or default == ()
        or "default:" in (info.description or "")
    ):
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)
