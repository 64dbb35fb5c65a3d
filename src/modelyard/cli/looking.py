"""Commands that look: what may stand behind each word."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from modelyard.cli.given import Json, given, resolved


def config(ctx: typer.Context, json: Json = False) -> None:
    """Print the resolved config, and of every value where it came from."""
    from modelyard.cli import commands

    commands.show_config(resolved(given(ctx)), as_json=json)


def models(
    ctx: typer.Context,
    name: Annotated[Optional[str], typer.Argument(metavar="[NAME]", help="the one to look at")] = None,  # noqa: UP045
    image_shape: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--image_shape", metavar="H,W,C", help="build it for such images (default: its usual ones)"),
    ] = None,
    classes: Annotated[Optional[int], typer.Option(help="and so many classes", min=1)] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """List the models with parameters and FLOPs, or show the layers and options of one."""
    from modelyard.cli import models as listing

    options = given(ctx)
    if name is None:
        listing.show_all(options, as_json=json)
    else:
        listing.show(name, image_shape, classes, options, as_json=json)


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


def leaderboard(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="folder with runs, at any depth")],
    metric: Annotated[Optional[str], typer.Option(help="what to compare (default: accuracy if there is)")] = None,  # noqa: UP045
    split: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="test|validation", help="on which split (default: test if all runs have it)"),
    ] = None,
    output: Annotated[Optional[str], typer.Option(metavar="FOLDER", help="where to write (default: there)")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """Compare runs: mean and spread over seeds for each model and dataset, ranks, costs; as CSV, Markdown, HTML too."""
    from modelyard.cli import matrix as many

    many.leaderboard(folder, metric, split, output, as_json=json)


def doctor(json: Json = False) -> None:
    """Check this machine: versions, engine, CPU, GPUs, memory, disk, and its place in a cluster."""
    from modelyard.cli import doctor as examination

    examination.run(as_json=json)
