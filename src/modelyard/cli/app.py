"""The command line: each command parses, calls one function of the library, and prints."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from modelyard.cli import after, export, looking, machines, sources, training
from modelyard.cli.serve import serve
from modelyard.errors import ConfigError, UserError, nearest

_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
_ALIASES = {
    "train_and_evaluate": "train-and-evaluate",
    "train_and_eval": "train-and-evaluate",
    "train-and-eval": "train-and-evaluate",
    "find_learning_rate": "find-learning-rate",
}


@dataclass(frozen=True)
class Command:
    """A command: its function, its panel in the help, and which options of the config it takes.

    Those are all, data, show, model, where or serve.
    """

    function: Callable[..., None]
    panel: str | None = None
    takes: str = ""


def root(
    version: Annotated[bool, typer.Option("--version", help="print the version and leave", is_eager=True)] = False,
) -> None:
    """Train many models on many datasets from one config. A killed run goes on bit for bit."""
    if version:
        from modelyard import __version__

        typer.echo(__version__)
        raise typer.Exit


_RUN, _AFTER, _DATA, _CLUSTER, _LOOK = "Run", "After training", "Data", "Cluster", "Look"
_OF_DATA = ("plugins", "data_dir", "cache_dir", "split_seed")
COMMANDS: dict[str, Command] = {
    "train-and-evaluate": Command(training.train_and_evaluate, _RUN, "all"),
    "train": Command(training.train, _RUN, "all"),
    "resume": Command(training.resume, _RUN, "all"),
    "evaluate": Command(training.evaluate, _RUN, "all"),
    "matrix": Command(training.matrix, _RUN, "all"),
    "find-learning-rate": Command(training.find_learning_rate, _RUN, "all"),
    "predict": Command(after.predict, _AFTER, "all"),
    "export": Command(export.export, _AFTER, "where"),
    "serve": Command(serve, _AFTER, "serve"),
    "convert": Command(sources.convert, _DATA, "data"),
    "data fetch": Command(sources.data_fetch),
    "data info": Command(sources.data_info, takes="data"),
    "data verify": Command(sources.data_verify, takes="data"),
    "data show": Command(sources.data_show, takes="show"),
    "launch": Command(machines.launch, _CLUSTER),
    "stop": Command(machines.stop, _CLUSTER),
    "submit": Command(machines.submit, _CLUSTER),
    "config": Command(looking.config, _LOOK, "all"),
    "models": Command(looking.models, _LOOK, "model"),
    "datasets": Command(looking.datasets, _LOOK),
    "hooks": Command(looking.hooks, _LOOK),
    "runs": Command(looking.runs, _LOOK),
    "leaderboard": Command(looking.leaderboard, _LOOK),
    "doctor": Command(looking.doctor, _LOOK),
}
"""By name; two words are a command of a group."""


def build_app(command: str | None = None) -> typer.Typer:
    """The application. Only ``command`` gets the options of the config: for all of them, that takes longer than the
    rest of the start; None gives them to all.
    """
    app = typer.Typer(
        name="modelyard",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(root)
    group = typer.Typer(no_args_is_help=True, help="Fetch, look at and check datasets.", rich_markup_mode="rich")
    for name, entry in COMMANDS.items():
        function = entry.function
        if entry.takes and command in (name, None):
            from modelyard.cli.options import Taken, with_config_options

            taken = {
                "all": Taken(),
                "data": Taken(_OF_DATA, ("dataset",)),
                "show": Taken((*_OF_DATA, "augment", "preprocess", "random_seed"), ("dataset",)),
                "model": Taken(("plugins", "engine"), ("model",)),
                "where": Taken(("plugins", "data_dir", "cache_dir", "threads"), ()),
                "serve": Taken(("plugins", "engine", "num_gpus", "gpu_id", "threads", "data_dir", "cache_dir"), ()),
            }
            function = with_config_options(function, taken[entry.takes])
        *above, last = name.split()
        place = group if above else app
        place.command(last, context_settings=_EXTRA if entry.takes else None, rich_help_panel=entry.panel)(function)
    app.add_typer(group, name="data", rich_help_panel=_DATA)
    return app


def command_of(words: list[str]) -> str:
    """The command that ``words`` call; an old spelling in them is replaced by today's."""
    places = [i for i, word in enumerate(words) if not word.startswith("-")][:2]
    if not places:
        return ""
    words[places[0]] = _ALIASES.get(words[places[0]], words[places[0]])
    named = [words[place] for place in places]
    return " ".join(named) if " ".join(named) in COMMANDS else named[0]


def _underscored(word: str) -> str:
    """Dashes in the name of an option are underscores."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if word.startswith("--") else word


def main(arguments: list[str] | None = None) -> None:
    """The command ``modelyard``. A user's own script gets every command and option by calling it.

    Example:
        A file with ``@modelyard.register_model`` functions ends with ``modelyard.main()``; then
        ``python my_file.py train-and-evaluate --model my_model`` works.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = command_of(words)
    completing = any(name.endswith("_COMPLETE") and name.startswith("_") for name in os.environ)
    try:
        if command in COMMANDS and COMMANDS[command].takes:
            from modelyard.cli.options import normalize

            words = normalize(words)
        elif command in COMMANDS:
            own = words.index("--") if "--" in words else len(words)  # what follows is for another command
            words = [_underscored(word) for word in words[:own]] + words[own:]
        build_app(None if completing else command)(words, standalone_mode=True)
    except UserError as error:
        if isinstance(error, ConfigError) and command in COMMANDS:
            _look_among_own_options(error, COMMANDS[command].function)
        _print_error(error)
        sys.exit(error.status)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _look_among_own_options(error: ConfigError, function: Callable[..., None]) -> None:
    """What is misspelt may be an option of the command, of which the config knows nothing."""
    own = [name for name in inspect.signature(function).parameters if name not in ("ctx", "run", "files")]
    for place, problem in enumerate(error.problems):
        near = nearest(problem.key, own, 1) if problem.message.startswith("there is no such option") else []
        if near:
            told = f"there is no such option. Did you mean '{near[0]}'?"
            error.problems[place] = replace(problem, message=told)


def _print_error(error: UserError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text("error: ", style="bold red") + Text(str(error)))
