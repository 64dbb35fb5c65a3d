"""The command serve."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from modelyard.cli.given import given

_LIMITS = "Limits"


def serve(
    ctx: typer.Context,
    model_dir: Annotated[Optional[str], typer.Option("--model_dir", metavar="RUN", help="serve this run; or")] = None,  # noqa: UP045
    export: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="FOLDER", help="versions that `modelyard export` wrote; new ones are taken up"),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="of the model in the paths (default: that of the folder)"),
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on; by default only this machine reaches it")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0: one that the system chooses")] = 8501,
    checkpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="best|latest|STEP", help="of a run (default: best, if there is one)"),
    ] = None,
    max_batch: Annotated[int, typer.Option("--max_batch", help="the most images the model is given at a time")] = 32,
    max_delay_ms: Annotated[
        float, typer.Option("--max_delay_ms", help="how long a request waits for others to share a batch")
    ] = 5.0,
    max_queue: Annotated[int, typer.Option("--max_queue", help="images that may wait", rich_help_panel=_LIMITS)] = 1024,
    max_body_mb: Annotated[
        float, typer.Option("--max_body_mb", help="megabytes of a request", rich_help_panel=_LIMITS)
    ] = 16.0,
    max_pixels: Annotated[
        int, typer.Option("--max_pixels", help="of an image file", rich_help_panel=_LIMITS)
    ] = 32_000_000,
    max_instances: Annotated[
        int, typer.Option("--max_instances", help="images of a request", rich_help_panel=_LIMITS)
    ] = 256,
    timeout_secs: Annotated[
        float,
        typer.Option("--timeout_secs", help="for sending a request, and for its turn to come", rich_help_panel=_LIMITS),
    ] = 30.0,
) -> None:
    """Serve a run or an export over HTTP, as TensorFlow Serving does, with a page to try it."""
    from modelyard.config.resolve import COMMAND_LINE
    from modelyard.serving.http.server import serve as run_server
    from modelyard.system.console import show_log

    options = given(ctx)
    show_log()
    run_server(
        model_dir,
        export,
        name=name,
        host=host,
        port=port,
        checkpoint=checkpoint,
        max_batch=max_batch,
        max_delay_ms=max_delay_ms,
        max_queue=max_queue,
        max_body_mb=max_body_mb,
        max_pixels=max_pixels,
        max_instances=max_instances,
        timeout_secs=timeout_secs,
        ready=typer.echo,
        source=COMMAND_LINE,
        **options,
    )
