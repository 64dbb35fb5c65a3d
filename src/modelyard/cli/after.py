"""Commands for what comes after training: what may stand behind each word."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from modelyard.cli.given import Json, given

_PREDICT = "Predict"


def predict(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(metavar="RUN", help="the run folder")],
    sources: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[FILES …]", help="images, folders, 'patterns*.jpg'; or one .csv, .npz, records"),
    ] = None,
    output: Annotated[
        str, typer.Option(metavar="FILE", help="a .csv or .jsonl file", rich_help_panel=_PREDICT)
    ] = "predictions.csv",
    checkpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="best, latest or a step (default: best if there is one)", rich_help_panel=_PREDICT),
    ] = None,
    split: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="train|validation|test", help="of the run's own data, instead of files", rich_help_panel=_PREDICT
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="classes to list of each example", min=1, rich_help_panel=_PREDICT)] = 1,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="list the probability of every class", rich_help_panel=_PREDICT)
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace an output that is there", rich_help_panel=_PREDICT)
    ] = False,
    on_bad: Annotated[
        str,
        typer.Option(
            "--on_bad",
            metavar="fail|skip",
            help="what can't be read: end, or say so in its row",
            rich_help_panel=_PREDICT,
        ),
    ] = "fail",
    json: Json = False,
) -> None:
    """Predict images or values in files, into a table. Started again after a kill it goes on where it was."""
    from modelyard.cli import predicting

    # What looks like an option and is none was taken for a file; the config says what is wrong with it.
    files = sources or []
    end = next((place for place, word in enumerate(files) if word.startswith("--")), len(files))
    files, ctx.args = files[:end], [*files[end:], *ctx.args]
    settings = {"checkpoint": checkpoint, "split": split, "output": output, "top": top}
    settings |= {"probabilities": probabilities, "overwrite": overwrite, "on_bad": on_bad}
    predicting.predict(run, files, settings, given(ctx), as_json=json)
