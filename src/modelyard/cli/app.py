"""The command line: each command parses, calls one function of the library, and prints."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelyard.cli import cluster, comparison, components, dashboard, data, doctor, serving, training
from modelyard.cli.output import program, writing_stdout
from modelyard.errors import ConfigError, UntrustedPluginError, UserError
from modelyard.system.interrupt import note_interrupts

if TYPE_CHECKING:
    from modelyard.cli.help import Topic

_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
_HELP_FLAGS = {"-h", "--help"}
_HELP = {"help_option_names": sorted(_HELP_FLAGS)}
_WIDEST_HELP = 100
_NUMBER = re.compile(r"[0-9][eE]")
_ALIASES = {
    "train_and_evaluate": "train-and-evaluate",
    "train_and_eval": "train-and-evaluate",
    "train-and-eval": "train-and-evaluate",
    "find_learning_rate": "find-learning-rate",
}


@dataclass(frozen=True)
class ConfigFlags:
    """The options of the config that a command takes.

    Args:
        core: names of core options, or of classes of their groups (`config/schema.py`); None for all.
        parts: all options of all components of these kinds.
    """

    core: tuple[str, ...] | None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command: its function, its panel in the help, and the options of the config that it takes.

    A function with a parameter ``run`` takes a run as RUN or --model_dir. A function
    with a parameter ``options`` gets the options of ``flags`` that were typed, as a dictionary (`cli/options.py`).
    """

    function: Callable[..., None]
    panel: str
    flags: ConfigFlags | None = None


_ALL = ConfigFlags(None, ("model", "dataset", "optimizer", "learning_rate_schedule"))
_USED = ConfigFlags(("plugins", "dataset", "Data", "Evaluation", "Devices"), ("dataset",))
_DATASET = ("plugins", "data_dir", "cache_dir", "split_seed")
_SPLITS = ("validation_fraction", "test_fraction", "split_group", "folds", "fold")
_SHOWN_DATASET = (*_DATASET, *_SPLITS, "augment", "preprocess", "random_seed")
_SERVED = ("plugins", "engine", "num_gpus", "gpu_id", "threads", "data_dir", "cache_dir")
_EXPORTED = ("plugins", "data_dir", "cache_dir", "threads")
COMMANDS = {
    "train-and-evaluate": Command(training.train_and_evaluate, "Run", _ALL),
    "train": Command(training.train, "Run", _ALL),
    "resume": Command(training.resume, "Run", _ALL),
    "evaluate": Command(training.evaluate, "Run", _USED),
    "matrix": Command(comparison.matrix, "Run", _ALL),
    "tune": Command(comparison.tune, "Run", _ALL),
    "find-learning-rate": Command(training.find_learning_rate, "Run", _ALL),
    "predict": Command(serving.predict, "After training", _USED),
    "report": Command(serving.report, "After training", _USED),
    "export": Command(serving.export, "After training", ConfigFlags(_EXPORTED)),
    "serve": Command(serving.serve, "After training", ConfigFlags(_SERVED)),
    "convert": Command(data.convert, "Data", ConfigFlags((*_DATASET, "test_fraction", "split_group"), ("dataset",))),
    "data fetch": Command(data.data_fetch, "Data"),
    "data info": Command(data.data_info, "Data", ConfigFlags((*_DATASET, *_SPLITS), ("dataset",))),
    "data verify": Command(data.data_verify, "Data", ConfigFlags(_DATASET, ("dataset",))),
    "data check": Command(data.data_check, "Data", ConfigFlags((*_DATASET, "split_group", "engine"), ("dataset",))),
    "data show": Command(data.data_show, "Data", ConfigFlags(_SHOWN_DATASET, ("dataset",))),
    "launch": Command(cluster.launch, "Cluster"),
    "stop": Command(cluster.stop, "Cluster"),
    "submit": Command(cluster.submit, "Cluster"),
    "config": Command(components.config, "Information", _ALL),
    "models": Command(components.models, "Information", ConfigFlags(("plugins", "engine"), ("model",))),
    "datasets": Command(components.datasets, "Information"),
    "hooks": Command(components.hooks, "Information"),
    "metrics": Command(components.metrics, "Information"),
    "runs": Command(comparison.runs, "Information"),
    "leaderboard": Command(comparison.leaderboard, "Information"),
    "dashboard": Command(dashboard.dashboard, "Information"),
    "doctor": Command(doctor.doctor, "Information"),
}
"""By name; two words are a command of a group."""


def root(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit", is_eager=True)] = False,
) -> None:
    """Train many models on many datasets from one config. A killed run resumes bit for bit.

    `modelyard COMMAND --help` lists the options of a command.
    """
    if version:
        from modelyard import __version__

        with writing_stdout():
            typer.echo(__version__)
        raise typer.Exit


def build_app(command: str | None = None, topic: Topic | None = None) -> typer.Typer:
    """Returns the application.

    Args:
        command: the only command that gets its parameters, which takes time; None gives them to all.
        topic: what the help is about; by default, all.
    """
    app = typer.Typer(
        name="modelyard",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings=_HELP,
    )
    app.callback(invoke_without_command=True)(root)
    group = typer.Typer(no_args_is_help=True, help="Fetch, show and check datasets.", rich_markup_mode="rich")
    for name, entry in COMMANDS.items():
        function, flags = entry.function, entry.flags
        shown: dict[str, Any] = {"rich_help_panel": entry.panel}
        if command not in (name, None):
            function = _only_help(function)
        else:
            from modelyard.cli.help import COMMON, GroupedHelp, Topic, topics
            from modelyard.cli.options import as_typer_command

            core, parts = (flags.core, flags.parts) if flags else ((), ())
            function = as_typer_command(function, core, parts, topic or Topic())
            shown["cls"] = GroupedHelp
            if (core is None or parts) and topic is not None and topic.name == COMMON:
                shown["epilog"] = f"More options: --help GROUP. Groups: {', '.join(topics(core, parts))}."
        *above, last = name.split()
        settings = {**_HELP, **(_EXTRA if flags else {}), "max_content_width": _WIDEST_HELP}
        (group if above else app).command(last, context_settings=settings, **shown)(function)
    app.add_typer(group, name="data", rich_help_panel="Data")
    return app


def _only_help(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a command that is listed in the help and never called."""

    def command() -> None:
        raise AssertionError(f"{function.__name__} was built without its parameters")

    command.__doc__ = function.__doc__
    return command


def replace_alias(words: list[str]) -> list[str]:
    """Returns the words with today's name of the command, where they have an old one."""
    first = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    return [*words[:first], *(_ALIASES.get(word, word) for word in words[first : first + 1]), *words[first + 1 :]]


def _help_first(words: list[str]) -> list[str]:
    """Returns the words with a request for help behind the command that it is about: ``launch -- train -h`` too."""
    if words and words[0] in _HELP_FLAGS and len(words) > 1:
        words = [*words[1:], words[0]]
    if words[:1] in (["launch"], ["submit"]) and "--" in words:
        other = words[words.index("--") + 1 :]
        if _HELP_FLAGS & set(other):
            return replace_alias(other)
    return words


def _command_name(words: list[str]) -> str:
    named = [word for word in words if not word.startswith("-")][:2]
    return " ".join(named) if " ".join(named) in COMMANDS else " ".join(named[:1])


@note_interrupts()
def main(arguments: list[str] | None = None) -> None:
    """The command ``modelyard``. A user's own script gets every command and option by calling it.

    Example:
        A file with ``@modelyard.register_model`` functions ends with ``modelyard.main()``; then
        ``python my_file.py train-and-evaluate --model my_model`` works.
    """
    words = _help_first(replace_alias(sys.argv[1:] if arguments is None else arguments))
    name = _command_name(words)
    command, topic = COMMANDS.get(name), None
    completing = any(variable.endswith("_COMPLETE") and variable.startswith("_") for variable in os.environ)
    try:
        if command is not None and _HELP_FLAGS & {word.partition("=")[0] for word in words}:
            from modelyard.cli.help import Topic, chosen_components, take_topic

            words, about = take_topic(words)
            if about is not None:
                topic = Topic(about, chosen_components(words) if command.flags is not None else {})
        if command is not None and command.flags is not None:
            from modelyard.cli.options import normalize

            words = normalize(words)
        elif command is not None:
            own = words.index("--") if "--" in words else len(words)  # the rest is for another command
            words = [_underscored(word) for word in words[:own]] + words[own:]
            if name in ("launch", "submit"):
                cluster.check_order(name, command.function, words)
        if command is not None and topic is None and any(_NUMBER.search(word) for word in words):
            from modelyard.cli.options import whole_numbers

            words = whole_numbers(words, command.function)
        if command is not None and topic is None:
            from modelyard.system.console import show_log

            show_log()
            if "MODELYARD_FAULTS" in os.environ:
                from modelyard import faults

                faults.load()
        build_app(None if completing else name, topic)(words, standalone_mode=True)
    except UserError as error:
        if isinstance(error, ConfigError) and command is not None:
            from modelyard.cli.options import reworded

            error.problems[:] = [reworded(problem, command.function) for problem in error.problems]
        if isinstance(error, UntrustedPluginError):
            error.hint = f"with --trust:\n  {_trusting(sys.argv[1:] if arguments is None else arguments, name)}"
        _print_error(error)
        sys.exit(error.exit_status)
    except MemoryError as error:
        _print_error(UserError(f"there is not enough memory: {error}. Try smaller batches or fewer processes."))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _trusting(words: list[str], command: str) -> str:
    """Returns the command that was typed, with --trust."""
    of_another = command in ("launch", "submit")  # what follows "--" is the command that opens the run
    end = words.index("--") if "--" in words and not of_another else len(words)
    return f"{program()} {shlex.join([*words[:end], '--trust', *words[end:]])}"


def _underscored(word: str) -> str:
    """Returns an option with underscores for dashes in its name."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if word.startswith("--") else word


def _print_error(error: UserError) -> None:
    from rich.text import Text

    from modelyard.system.console import SafeConsole

    console = SafeConsole(stderr=True, soft_wrap=True)
    console.print(Text("error: ", style="bold red") + Text(str(error)))
