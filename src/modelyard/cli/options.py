"""The parameters of commands: flags for the options of the config, and the run as RUN or --model_dir."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo

from modelyard.cli.help import Topic, group_name, group_of_part, is_few
from modelyard.config.resolve import field_kind, without_exponents
from modelyard.config.schema import (
    COMPONENTS,
    CORE_FIELDS,
    GROUPS,
    TRUST,
    Experiment,
    Hooks,
    Saving,
    Training,
    is_mutable,
)
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, UserError, nearest
from modelyard.registry import DATASETS, MODELS
from modelyard.storage import is_remote, is_same

_OWNERS_SHOWN = 5
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
_FOR_NEW_RUNS = (
    *("config_file", "config_set", "hyperparameter_file", "hyperparameter_set"),
    *("runs_dir", "run_name", "model_dir", "resume"),
)
_ONLY_TRAINING = ("eval_every", "epochs_between_evals", "eval_throttle_secs", "test_at_end", "shuffle", "augment")
"""Options in groups of data and evaluation that have an effect in training only."""
_OF_TRAINING = {
    *_ONLY_TRAINING,
    *(name for group in (Training, Saving, Hooks) for name in group.model_fields if is_mutable(name)),
}
_RUN = Annotated[str | None, typer.Argument(metavar="RUN", help="folder of the run, or give --model_dir")]
_MODEL_DIR = Annotated[str | None, typer.Option("--model_dir", metavar="RUN", help="folder of the run, instead of RUN")]


@lru_cache
def part_fields(parts: tuple[str, ...] = tuple(COMPONENTS)) -> dict[str, tuple[FieldInfo, str, list[str]]]:
    """The options of all built-in components, each with its panel in the help and the components that have it."""
    found: dict[str, tuple[FieldInfo, str, list[str]]] = {}
    for part in parts:
        for entry in COMPONENTS[part].entries():
            for name, info in entry.options.model_fields.items():
                panel = f"Options of the chosen {part.replace('_', ' ')}"
                found.setdefault(name, (info, panel, []))[2].append(entry.name)
    return found


def is_flag(name: str) -> bool:
    """Whether an option of the config needs no value on the command line."""
    info = CORE_FIELDS.get(name) or (part_fields().get(name) or (None,))[0]
    return info is not None and field_kind(info.annotation) == "flag"


def normalize(arguments: Iterable[str]) -> list[str]:
    """Returns the words with one spelling per option: ``--xla false``, ``--xla=false``, ``--no-xla`` are --no_xla."""
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


def as_typer_command(
    function: Callable[..., Any],
    core: Collection[str] | None = (),
    parts: tuple[str, ...] = (),
    topic: Topic = Topic(),  # noqa: B008 - it can't be changed
) -> Callable[..., Any]:
    """Returns a command as typer calls it.

    The command's parameter ``run`` becomes the argument RUN and the option --model_dir. Its parameter ``options``
    becomes one flag per option of the config, and receives those that were typed. With ``run``, the help shows only
    options that may change for an existing run.

    Args:
        function: the command.
        core: names of the core options of the config that it takes, or of classes of their groups; None for all.
        parts: it takes the options of all components of these kinds, such as model.
        topic: what its help is about.
    """
    own = dict(inspect.signature(function, eval_str=True).parameters)
    parameters = {"context": _parameter("context", typer.Context, inspect.Parameter.empty)}
    for name, parameter in own.items():
        if name == "run":
            parameters |= {"run": _parameter("run", _RUN), "model_dir": _parameter("model_dir", _MODEL_DIR)}
        elif name != "options":
            parameters[name] = _parameter(name, _with_placeholder(parameter.annotation), parameter.default)
    flags: dict[str, inspect.Parameter] = {}
    of_run = "run" in own
    if "options" in own:
        flags = _core_flags(core, topic, of_run) | _part_flags(parts, topic, of_run)
    flags = {name: flag for name, flag in flags.items() if name not in parameters}
    if "options" in own and (core is None or of_run or "model_dir" in own):  # it may read the config of a run
        flags[TRUST] = _flag_of_trust(hidden=not topic.shows(TRUST, group_name(Experiment), few=of_run))

    def command(context: typer.Context, **values: Any) -> Any:
        others: dict[str, Any] = {}
        try:
            return call(context, values, others)
        except ConfigError:  # with these mistakes
            raise
        except UserError as error:
            mistakes = [mistake for name in others if (mistake := _certain_mistake(name, function)) is not None]
            if mistakes:
                raise ConfigError([*mistakes, Problem(COMMAND_LINE, "", str(error))]) from error
            raise

    def call(context: typer.Context, values: dict[str, Any], others: dict[str, Any]) -> Any:
        # Commands without options of the config, such as launch, take options as arguments behind "--".
        unknown = [*_taken_for_arguments(context, values), *context.args] if "options" in own else []
        arguments = {name: values[name] for name in own if name in values}
        if "options" in own:
            typed = {
                name: values[name] for name in flags if values[name] is not None and (name != TRUST or values[name])
            }
            found = unknown_options(unknown)
            if of_run or "source" in own:  # nothing is trained
                found = {f"'--{name}'" if name in _OF_TRAINING else name: value for name, value in found.items()}
            others.update(found)
            arguments["options"] = typed | others
        if "run" in own:
            run, model_dir = values["run"], values["model_dir"]
            if "files" in own and run and model_dir and not is_same(run, model_dir) and not _is_run(run):
                run, arguments["files"] = None, [run, *(values["files"] or ())]
            if run is not None and model_dir is not None and not is_same(run, model_dir):
                raise UserError(f"two different runs are given, {run} and --model_dir {model_dir}. Give one of them.")
            arguments["run"] = run if run is not None else model_dir
            if arguments["run"] is None and own["run"].default is inspect.Parameter.empty:
                call = f"modelyard {context.info_name}"
                raise UserError(f"no run is given. Give its folder: {call} RUN, or {call} --model_dir RUN")
        return function(**arguments)

    parameters |= flags
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return command


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_placeholder(annotation: Any) -> Any:
    """Returns the annotation of an option of the command with a placeholder in the style of those of the config."""
    kind, *marks = get_args(annotation)
    kinds = get_args(kind) or (kind,)
    option = next((copy(mark) for mark in marks if isinstance(mark, OptionInfo)), None)
    if option is None or bool in kinds or option.metavar is not None:
        return annotation
    option.metavar = "NUMBER" if {int, float} & set(kinds) else "TEXT"
    return Annotated[kind, option]


def _flag_of_trust(hidden: bool) -> inspect.Parameter:
    text = "import the plugins that the config of somebody else's run names, and remember that"
    shown: dict[str, Any] = {"help": text, "rich_help_panel": Experiment.title, "show_default": False}
    return _parameter(TRUST, Annotated[bool | None, typer.Option(f"--{TRUST}", hidden=hidden, **shown)])


def _core_flags(core: Collection[str] | None, topic: Topic, of_run: bool) -> dict[str, inspect.Parameter]:
    named = {
        name: group
        for group in GROUPS
        for name in group.model_fields
        if core is None or name in core or (group.__name__ in core and name not in _ONLY_TRAINING)
    }
    few = is_few([name for name in named if _may_change(name) or not of_run])
    flags = {}
    for name, group in named.items():
        hidden = (of_run and not _may_change(name)) or not topic.shows(name, group_name(group), few)
        default = "" if of_run else shown_default(group.model_fields[name])  # a run has its own
        flags[name] = _flag(name, group.model_fields[name], default, group.title, hidden)
    return flags


def _part_flags(parts: tuple[str, ...], topic: Topic, of_run: bool) -> dict[str, inspect.Parameter]:
    """The options of components: first those of the chosen ones, which may be the user's own."""
    flags = {}
    for part in parts:
        entry = topic.chosen.get(part)
        fields = entry.options.model_fields if entry is not None else {}
        for name, info in fields.items():
            title = f"{part.replace('_', ' ').capitalize()} {entry.name if entry else ''}"
            flags[name] = _flag(
                name, info, "" if of_run else shown_default(info), title, of_run and not _may_change(name)
            )
    for part in parts:
        for name, (info, panel, owners) in part_fields((part,)).items():
            hidden = (of_run and not _may_change(name)) or not topic.shows(name, group_of_part(part))
            default = shown_default(info) if len(owners) == 1 and not of_run else ""
            flags.setdefault(name, _flag(name, info, default, panel, hidden, f" – of {shown_owners(owners)}"))
    return flags


def _flag(name: str, info: FieldInfo, default: str, panel: str, hidden: bool, owners: str = "") -> inspect.Parameter:
    kind = field_kind(info.annotation)
    text = (info.description or "") + (f" (default: {default})" if default else "") + owners
    shown: dict[str, Any] = {"help": text, "rich_help_panel": panel, "show_default": False, "hidden": hidden}
    if kind == "flag":
        return _parameter(name, Annotated[bool | None, typer.Option(f"--{name}/--no_{name}", **shown)])
    metavar = "|".join(choices(info.annotation)) if kind == "CHOICE" else kind
    return _parameter(name, Annotated[str | None, typer.Option(f"--{name}", metavar=metavar, **shown)])


def _may_change(name: str) -> bool:
    """Whether an option may change for an existing run. Options of a dataset may: its files may have moved."""
    return (is_mutable(name) and name not in _FOR_NEW_RUNS) or name == "dataset" or name in part_fields(("dataset",))


def _taken_for_arguments(context: typer.Context, values: dict[str, Any]) -> list[str]:
    """Removes from arguments, and returns, an option that only a plugin knows and all words after it."""
    unknown: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        if parameter.param_type_name != "argument" or parameter.required or values[name] is None:
            continue
        words = [values[name]] if isinstance(values[name], str) else list(values[name])
        end = 0 if unknown else next((i for i, word in enumerate(words) if _looks_like_option(word)), len(words))
        if end < len(words):
            unknown += words[end:]
            values[name] = words[:end] or None
    return unknown


def _looks_like_option(word: str) -> bool:
    return word.startswith("-") and word.strip("-") != "" and not word[1:2].isdecimal()


def unknown_options(words: Sequence[str]) -> dict[str, Any]:
    """Returns the options of a user's own components in ``words``, which typer does not know.

    A word that is no option is one in quotes, which no component has: it is reported with the other mistakes in the
    config, and `reworded` says what it is.
    """
    options: dict[str, Any] = {}
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if not word.startswith("--"):
            options[f"'{word}'"] = True
            continue
        name, equals, value = word[2:].partition("=")
        if name.endswith("_value") and is_flag(name.removesuffix("_value")):
            options[name.removesuffix("_value")] = value
        elif equals:
            options[name] = value
        else:
            options[name] = pending.pop(0) if pending and not _looks_like_option(pending[0]) else True
    return options


def _certain_mistake(key: str, function: Callable[..., Any]) -> Problem | None:
    """Returns the problem of a word that no plugin can know: it is no option, or like one of Modelyard."""
    problem = Problem(COMMAND_LINE, key, "there is no such option.")
    wording = reworded(problem, function)
    if wording != problem or key.startswith("'"):
        return wording
    near = nearest(key, CORE_FIELDS, most=1)
    return replace(problem, message=f"there is no such option. Did you mean {near[0]!r}?") if near else None


def whole_numbers(words: Sequence[str], function: Callable[..., Any]) -> list[str]:
    """Returns the words with ``1e3`` as 1000 behind the options of a command that are whole numbers."""
    parameters = inspect.signature(function, eval_str=True).parameters
    names = {name for name in own_options(function) if name in parameters and _is_integer(parameters[name].annotation)}
    done: list[str] = []
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if equals and word.startswith("--") and name in names:
            word = f"--{name}={without_exponents(value)}"
        elif done and done[-1].startswith("--") and done[-1][2:] in names:
            word = without_exponents(word)
        done.append(word)
    return done


def _is_integer(annotation: Any) -> bool:
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return int in (get_args(kind) or (kind,))


def own_options(function: Callable[..., Any]) -> list[str]:
    """Returns the options of a command that are not of the config."""
    parameters = inspect.signature(function, eval_str=True).parameters
    arguments = {
        name
        for name, parameter in parameters.items()
        if any(isinstance(mark, ArgumentInfo) for mark in getattr(parameter.annotation, "__metadata__", ()))
    }
    return [name for name in (*parameters, "model_dir") if name not in {"options", "run", *arguments}]


def reworded(problem: Problem, function: Callable[..., Any]) -> Problem:
    """Returns a problem in the words of a command: what is not an option, and what is one of the command."""
    own = own_options(function)
    stray = re.fullmatch("'(.*)'", problem.key, re.DOTALL)
    if stray is not None and problem.where == COMMAND_LINE:
        word = stray[1]
        if word.removeprefix("--") in _OF_TRAINING and word.startswith("--"):
            return replace(problem, key=word[2:], message="has no effect here: it is for training.")
        near = nearest(word.lstrip("-"), [*own, *CORE_FIELDS], most=1)
        meant = f"--{near[0]}" if near else _as_option(word, function)
        hint = f" Did you mean {meant}?" if meant else ""
        return replace(problem, key=word, message=f"is not an option.{hint}")
    near = nearest(problem.key, own, 1) if problem.message.startswith("there is no such option") else []
    if not near:
        return problem
    if near[0] == problem.key:
        return replace(problem, message=f"is an option of {function.__name__}. Write it before --.")
    return replace(problem, message=f"there is no such option. Did you mean '{near[0]}'?")


def _as_option(word: str, function: Callable[..., Any]) -> str | None:
    """Returns a word with the option that was probably forgotten before it: it names a run, a dataset or a model."""
    if {"run", "source", "files"} & set(inspect.signature(function).parameters):  # these have words without an option
        return None
    if _is_run(word):
        return f"--model_dir {shlex.quote(word)}"
    if word in DATASETS.names() or Path(word).expanduser().exists():
        return f"--dataset {shlex.quote(word)}"
    return f"--model {word}" if word in MODELS.names() else None


def _is_run(word: str) -> bool:
    return not is_remote(word) and (Path(word).expanduser() / "config.yaml").is_file()


def shown_owners(owners: Sequence[str]) -> str:
    """Returns the components that have an option; the first of many."""
    if set(MODELS.names()) <= set(owners):
        return "every model"
    rest = len(owners) - _OWNERS_SHOWN
    return ", ".join(owners[:_OWNERS_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def choices(annotation: Any) -> list[str]:
    """Returns the words that an option takes; N for a number."""
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is Annotated:
        return choices(get_args(annotation)[0])
    return ["N"] if annotation is int else [choice for part in get_args(annotation) for choice in choices(part)]


def shown_default(info: FieldInfo) -> str:
    """Returns the default of an option as text; empty if it is none or in the help of the option."""
    default = info.default
    if info.is_required() or default in (None, "", ()) or "default:" in (info.description or ""):
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)
