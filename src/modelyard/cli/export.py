"""The command that exports: what may stand behind the word, and what it prints."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from modelyard.cli.given import Json, Run, given

_PANEL = "Export"


def export(
    ctx: typer.Context,
    run: Run,
    checkpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="best, latest or a step (default: best if there is one)", rich_help_panel=_PANEL),
    ] = None,
    format: Annotated[  # noqa: A002 - the name of the option
        str,
        typer.Option(metavar="saved_model|keras|onnx|tflite", help="what to write", rich_help_panel=_PANEL),
    ] = "saved_model",
    output: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FOLDER", help="folder for numbered versions (default: export in RUN)", rich_help_panel=_PANEL
        ),
    ] = None,
    version: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="number of the version (default: the next one)", rich_help_panel=_PANEL),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace that version, or the newest", rich_help_panel=_PANEL)
    ] = False,
    json: Json = False,
) -> None:
    """Write a run's model for TensorFlow Serving, Keras, ONNX or TensorFlow Lite, checked against the run."""
    from dataclasses import asdict
    from typing import Any, cast

    from modelyard.cli.commands import print_json, stdout
    from modelyard.config.resolve import COMMAND_LINE
    from modelyard.serving.exporting.export import export as write
    from modelyard.system.console import console, show_log

    show_log()
    chosen = cast(Any, format)  # the library says which there are
    exported = write(
        run,
        checkpoint=checkpoint,
        format=chosen,
        output=output,
        version=version,
        overwrite=overwrite,
        source=COMMAND_LINE,
        **given(ctx),
    )
    out = console() if json else stdout()
    out.print(f"{exported.format} of step {exported.step}: {exported.path}", soft_wrap=True, markup=False)
    shown = ", ".join(f"{name} {value:.1e}" for name, value in exported.differences.items())
    out.print(f"largest difference on {exported.checked_on}: {shown}", soft_wrap=True, markup=False)
    if json:
        print_json(asdict(exported))
