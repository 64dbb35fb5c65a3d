"""Commands that train: what may stand behind each word."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from modelyard.cli.given import Json, Run, given, resolved
from modelyard.errors import UserError

_FINDER = "Learning rates"


def train_and_evaluate(ctx: typer.Context, json: Json = False) -> None:
    """Train, evaluate on validation on the way, and keep the best (also: train_and_eval).

    Alone, it trains simple_cnn on digits. A --model_dir that exists is gone on with.
    """
    from modelyard.cli import commands

    commands.train(resolved(given(ctx)), evaluates=True, as_json=json)


def train(ctx: typer.Context, json: Json = False) -> None:
    """Train and save, without evaluating."""
    from modelyard.cli import commands

    commands.train(resolved(given(ctx)), evaluates=False, as_json=json)


def resume(ctx: typer.Context, run: Run, json: Json = False) -> None:
    """Go on with a run from its own config; options may change its length, cadences, hooks and devices."""
    from modelyard.cli import commands

    commands.resume(run, given(ctx), as_json=json)


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

    options = given(ctx)
    folder = run or options.pop("model_dir", None)
    if folder is None:
        raise UserError("which run? Give its folder: modelyard evaluate RUN")
    commands.evaluate(str(folder), checkpoint, split, options, as_json=json)


def find_learning_rate(
    ctx: typer.Context,
    lowest: Annotated[float, typer.Option(help="learning rate of the first step", rich_help_panel=_FINDER)] = 1e-6,
    highest: Annotated[float, typer.Option(help="learning rate of the last step", rich_help_panel=_FINDER)] = 1.0,
    steps: Annotated[int, typer.Option(help="how many steps at most", rich_help_panel=_FINDER)] = 100,
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="folder for table and plot (default: a new one in runs_dir)", rich_help_panel=_FINDER),
    ] = None,
    json: Json = False,
) -> None:
    """Train a few steps with a growing learning rate and suggest one; takes the options of a run."""
    from modelyard.cli import learning_rate

    settings = {"lowest": lowest, "highest": highest, "steps": steps, "output": output}
    learning_rate.find(resolved(given(ctx)), settings, as_json=json)


def matrix(
    ctx: typer.Context,
    file: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[FILE.yaml]", help="axes, exclude and options of the matrix"),
    ] = None,
    output: Annotated[
        str, typer.Option(metavar="FOLDER", help="folder of the matrix; one that exists is gone on with")
    ] = "",
    models: Annotated[Optional[str], typer.Option(metavar="LIST", help="models, separated by commas")] = None,  # noqa: UP045
    datasets: Annotated[Optional[str], typer.Option(metavar="LIST", help="datasets, by name or path")] = None,  # noqa: UP045
    seeds: Annotated[Optional[str], typer.Option(metavar="NUMBER", help="how many seeds, or which: 0,7,11")] = None,  # noqa: UP045
    jobs: Annotated[int, typer.Option(help="cells side by side, each with its share of cores and GPUs")] = 1,
    json: Json = False,
) -> None:
    """Train every combination of models, datasets and seeds, and compare them; started again, it goes on."""
    from modelyard.cli import matrix as many

    if not output:
        raise UserError("where to? Name the folder of the matrix: modelyard matrix --output FOLDER …")
    settings = {"output": output, "models": models, "datasets": datasets, "seeds": seeds, "jobs": jobs}
    many.matrix(file, settings, given(ctx), as_json=json)
