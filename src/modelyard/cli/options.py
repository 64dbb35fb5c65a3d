"""The parameters of commands: flags for the options of the config, and the run as RUN or --model_dir."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo

from modelyard.config.resolve import field_kind
from modelyard.config.schema import COMPONENTS, CORE_FIELDS, GROUPS, TRUST, is_mutable
from modelyard.errors import COMMAND_LINE, Problem, UserError, nearest
from modelyard.registry import MODELS
from modelyard.storage import is_remote, is_same

_OWNERS_SHOWN = 5
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
_FOR_NEW_RUNS = (
    *("config_file", "config_set", "hyperparameter_file", "hyperparameter_set"),
    *("runs_dir", "run_name", "model_dir", "resume"),
)
_RUN = Annotated[str | None, typer.Argument(metavar="RUN", help="folder of the run, or give --model_dir")]
_TRUST = Annotated[
    bool | None,
    typer.Option(
        f"--{TRUST}",
        help="import the plugins that the config of somebody else's run names, and remember that",
        rich_help_panel="Experiment",
        show_default=False,
    ),
]
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
    function: Callable[..., Any], core: Collection[str] | None = (), parts: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Returns a command as typer calls it.

    The command's parameter ``run`` becomes the argument RUN and the option --model_dir. Its parameter ``options``
    becomes one flag per option of the config, and receives those that were typed. With ``run``, the help shows only
    options that may change for an existing run.

    Args:
        function: the command.
        core: names of the core options of the config that it takes; None for all.
        parts: it takes the options of all components of these kinds, such as model.
    """
    own = dict(inspect.signature(function, eval_str=True).parameters)
    parameters = {"context": _parameter("context", typer.Context, inspect.Parameter.empty)}
    for name, parameter in own.items():
        if name == "run":
            parameters |= {"run": _parameter("run", _RUN), "model_dir": _parameter("model_dir", _MODEL_DIR)}
        elif name != "options":
            parameters[name] = _parameter(name, parameter.annotation, parameter.default)
    flags: dict[str, inspect.Parameter] = {}
    if "options" in own:
        for group in GROUPS:
            for name in [name for name in group.model_fields if core is None or name in core]:
                flags[name] = _flag(name, group.model_fields[name], group.title, of_run="run" in own)
        for name, (info, panel, owners) in part_fields(parts).items():
            flags[name] = _flag(name, info, panel, owners, of_run="run" in own)
    flags = {name: flag for name, flag in flags.items() if name not in parameters}
    if "options" in own and (core is None or "run" in own):  # it may read the config of a run
        flags[TRUST] = _parameter(TRUST, _TRUST)

    def command(context: typer.Context, **values: Any) -> Any:
        unknown = [*_taken_for_arguments(context, values), *context.args]
        arguments = {name: values[name] for name in own if name in values}
        if "options" in own:
            typed = {
                name: values[name] for name in flags if values[name] is not None and (name != TRUST or values[name])
            }
            arguments["options"] = typed | unknown_options(unknown)
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


def _flag(name: str, info: FieldInfo, panel: str, owners: Sequence[str] = (), *, of_run: bool) -> inspect.Parameter:
    kind = field_kind(info.annotation)
    default = _shown_default(info) if len(owners) <= 1 and not of_run else ""  # a run and other owners have their own
    text = (info.description or "") + (f" (default: {default})" if default else "")
    text += f" – of {_shortened(owners)}" if owners else ""
    shown: dict[str, Any] = {"help": text, "rich_help_panel": panel, "show_default": False}
    shown["hidden"] = of_run and not _may_change(name)
    if kind == "flag":
        return _parameter(name, Annotated[bool | None, typer.Option(f"--{name}/--no_{name}", **shown)])
    metavar = "|".join(_choices(info.annotation)) if kind == "CHOICE" else kind
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
    if stray is not None:
        word = stray[1]
        near = nearest(word.lstrip("-"), [*own, *CORE_FIELDS], most=1)
        hint = f" Did you mean --{near[0]}?" if near else ""
        return replace(problem, where=COMMAND_LINE, key=word, message=f"is not an option.{hint}")
    near = nearest(problem.key, own, 1) if problem.message.startswith("there is no such option") else []
    if not near:
        return problem
    if near[0] == problem.key:
        return replace(problem, message=f"is an option of {function.__name__}. Write it before --.")
    return replace(problem, message=f"there is no such option. Did you mean '{near[0]}'?")


def _is_run(word: str) -> bool:
    return not is_remote(word) and (Path(word).expanduser() / "config.yaml").is_file()


def _shortened(owners: Sequence[str]) -> str:
    if set(MODELS.names()) <= set(owners):
        return "every model"
    rest = len(owners) - _OWNERS_SHOWN
    return ", ".join(owners[:_OWNERS_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    return ["N"] if annotation is int else [choice for part in get_args(annotation) for choice in _choices(part)]


def _shown_default(info: FieldInfo) -> str:
    default = info.default
    if info.is_required() or default in (None, "", ()) or "default:" in (info.description or ""):
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)
