"""The command line: each command parses, calls one function of the library, and prints."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any, Optional

import typer

from modelyard.errors import UserError

USER_ERROR = 2
_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
_ALIASES = {
    "train_and_evaluate": "train-and-evaluate",
    "train_and_eval": "train-and-evaluate",
    "train-and-eval": "train-and-evaluate",
}
Json = Annotated[
    bool,
    typer.Option("--json", help="print one JSON object as the last line of standard output", rich_help_panel="Output"),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="the run folder")]


def root(
    version: Annotated[bool, typer.Option("--version", help="print the version and leave", is_eager=True)] = False,
) -> None:
    """Train many models on many datasets from one config. A killed run goes on bit for bit."""
    if version:
        from modelyard import __version__

        typer.echo(__version__)
        raise typer.Exit


def train_and_evaluate(ctx: typer.Context, json: Json = False) -> None:
    """Train, evaluate on validation on the way, and keep the best (also: train_and_eval).

    Alone, it trains simple_cnn on digits. A --model_dir that exists is gone on with.
    """
    from modelyard.cli import commands

    commands.train(_resolve(_given(ctx)), evaluates=True, as_json=json)


def train(ctx: typer.Context, json: Json = False) -> None:
    """Train and save, without evaluating."""
    from modelyard.cli import commands

    commands.train(_resolve(_given(ctx)), evaluates=False, as_json=json)


def resume(ctx: typer.Context, run: Run, json: Json = False) -> None:
    """Go on with a run from its own config; options may change its length, cadences, hooks and devices."""
    from modelyard.cli import commands

    commands.resume(run, _given(ctx), as_json=json)


def evaluate(
    ctx: typer.Context,
    run: Annotated[Optional[str], typer.Argument(metavar="RUN", help="the run folder (or --model_dir)")] = None,  # noqa: UP045
    checkpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="best, latest or a step (default: best if there is one)", rich_help_panel="Evaluate"),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="validation|test|train", help="split to evaluate on", rich_help_panel="Evaluate")
    ] = "validation",
    json: Json = False,
) -> None:
    """Evaluate a checkpoint of a run."""
    from modelyard.cli import commands

    options = _given(ctx)
    folder = run or options.pop("model_dir", None)
    if folder is None:
        raise UserError("which run? Give its folder: modelyard evaluate RUN")
    commands.evaluate(str(folder), checkpoint, split, options, as_json=json)


def config(ctx: typer.Context, json: Json = False) -> None:
    """Print the resolved config, and of every value where it came from."""
    from modelyard.cli import commands

    commands.show_config(_resolve(_given(ctx)), as_json=json)


def models(
    plugins: Annotated[Optional[str], typer.Option(help="your own modules or .py files")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """List the models with their options."""
    from modelyard.cli import commands

    commands.list_parts("model", plugins, as_json=json)


def datasets(
    plugins: Annotated[Optional[str], typer.Option(help="your own modules or .py files")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """List the datasets with their options."""
    from modelyard.cli import commands

    commands.list_parts("dataset", plugins, as_json=json)


def hooks(
    plugins: Annotated[Optional[str], typer.Option(help="your own modules or .py files")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """List the hooks with their arguments."""
    from modelyard.cli import commands

    commands.list_parts("hook", plugins, as_json=json)


def runs(
    folders: Annotated[Optional[list[str]], typer.Argument(metavar="[RUN …]", help="runs to compare")] = None,  # noqa: UP045
    runs_dir: Annotated[str, typer.Option("--runs_dir", help="folder of the runs")] = "runs",
    json: Json = False,
) -> None:
    """List all runs, or compare some: their different options and their results side by side."""
    from modelyard.cli import commands

    commands.runs(folders or [], runs_dir, as_json=json)


def doctor(json: Json = False) -> None:
    """Check this machine: versions, engine, CPU, GPUs, memory, disk."""
    from modelyard.cli import doctor as examination

    examination.run(as_json=json)


def _given(context: typer.Context) -> dict[str, Any]:
    from modelyard.cli.options import given_options

    return given_options(context)


def _resolve(options: dict[str, Any]) -> Any:
    from modelyard.config import resolve

    return resolve(options)


_RUN, _LOOK = "Run", "Look"
COMMANDS: dict[str, tuple[Callable[..., None], str, bool]] = {
    "train-and-evaluate": (train_and_evaluate, _RUN, True),
    "train": (train, _RUN, True),
    "resume": (resume, _RUN, True),
    "evaluate": (evaluate, _RUN, True),
    "config": (config, _LOOK, True),
    "models": (models, _LOOK, False),
    "datasets": (datasets, _LOOK, False),
    "hooks": (hooks, _LOOK, False),
    "runs": (runs, _LOOK, False),
    "doctor": (doctor, _LOOK, False),
}
"""Each command's function, its panel in the help, and whether it takes the options of the config."""


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
    for name, (function, panel, takes_config) in COMMANDS.items():
        if takes_config and command in (name, None):
            from modelyard.cli.options import with_config_options

            function = with_config_options(function)
        app.command(name, context_settings=_EXTRA if takes_config else None, rich_help_panel=panel)(function)
    return app


def main(arguments: list[str] | None = None) -> None:
    """The command ``modelyard``. A user's own script gets every command and option by calling it.

    Example:
        A file with ``@modelyard.register_model`` functions ends with ``modelyard.main()``; then
        ``python my_file.py train-and-evaluate --model my_model`` works.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    place = next((i for i, word in enumerate(words) if not word.startswith("-")), None)
    command = "" if place is None else _ALIASES.get(words[place], words[place])
    if place is not None:
        words[place] = command
    completing = any(name.endswith("_COMPLETE") and name.startswith("_") for name in os.environ)
    try:
        if COMMANDS.get(command, (None, None, False))[2]:
            from modelyard.cli.options import normalize

            words = normalize(words)
        build_app(None if completing else command)(words, standalone_mode=True)
    except UserError as error:
        _print_error(error)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _print_error(error: UserError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text("error: ", style="bold red") + Text(str(error)))
