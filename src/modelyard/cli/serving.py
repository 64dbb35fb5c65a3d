"""Commands for trained models: predict, report, export, serve."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from modelyard.cli.output import Json, keywords, prose, show, table, width
from modelyard.cli.training import Checkpoint
from modelyard.errors import COMMAND_LINE, UserError

_MOST_CLASSES = 20
_LIMITS = "Limits"


def predict(
    options: dict[str, Any],
    run: str,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILES", help="images, folders, 'patterns*.jpg'; or one .csv, .npz, records"),
    ] = None,
    output: Annotated[str, typer.Option(metavar="FILE", help="a .csv or .jsonl file to write")] = "predictions.csv",
    checkpoint: Checkpoint = None,
    split: Annotated[
        str | None,
        typer.Option(metavar="train|validation|test", help="predict this split of the run's data instead of files"),
    ] = None,
    top: Annotated[int, typer.Option(help="number of classes to list per example", min=1)] = 1,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="add the probability of every class")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an existing output")] = False,
    on_bad: Annotated[
        str,
        typer.Option("--on_bad", metavar="fail|skip", help="an unreadable file: fail, or write the reason to its row"),
    ] = "fail",
    json: Json = False,
) -> None:
    """Predict images or values in files, and write a table.

    If interrupted, run the same command again to resume.
    """
    from modelyard.serving.prediction.predict import predict as predict_files
    from modelyard.system.console import console

    if on_bad not in ("fail", "skip"):
        raise UserError(f"--on_bad must be fail or skip, got {on_bad}.")
    try:
        done = predict_files(
            run, *(files or ()), checkpoint=checkpoint, split=split, output=output, top=top,
            probabilities=probabilities, overwrite=overwrite, on_bad=on_bad,  # type: ignore[arg-type] # checked above
            source=COMMAND_LINE, **keywords(options, predict_files),
        )  # fmt: skip
    except KeyboardInterrupt:
        console().print("stopped. Run the same command again to resume.")
        raise
    confusion = done.scores.get("confusion")
    text: list[Any] = []
    if confusion is not None and len(confusion) <= _MOST_CLASSES:
        names = done.scores["classes"]
        columns = names
        if sum(map(len, names)) + max(map(len, names)) + 3 * len(names) + 4 > width():
            columns = [str(number) for number in range(1, len(names) + 1)]
            names = [f"{number} {name}" for number, name in zip(columns, names, strict=True)]
        rows = [(name, *(count or "·" for count in row)) for name, row in zip(names, confusion, strict=True)]
        text = ["labels (rows) and predictions (columns)", table(("", *columns), rows, right=columns)]
    text += [f"{name} {value:.4f}" for name, value in done.metrics.items()]
    skipped = f", {done.skipped} of them not readable" if done.skipped else ""
    count = f"{done.examples:,} prediction{'s' if done.examples != 1 else ''}"
    text.append(f"{count} by the model of step {done.step} in {done.path}{skipped}")
    show(asdict(done), text, as_json=json)


def export(
    options: dict[str, Any],
    run: str,
    checkpoint: Checkpoint = None,
    format: Annotated[  # noqa: A002 - the name of the option
        str, typer.Option(metavar="saved_model|keras|onnx|tflite", help="format to write")
    ] = "saved_model",
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="folder for numbered versions (default: export in RUN)")
    ] = None,
    version: Annotated[int | None, typer.Option(help="number of the version (default: the next one)")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="replace that version; without --version, the newest")
    ] = False,
    json: Json = False,
) -> None:
    """Export a model for TensorFlow Serving, Keras, ONNX or TensorFlow Lite.

    The predictions of the export are compared with those of the run.
    """
    from modelyard.serving.exporting.export import export as export_model

    exported = export_model(
        run, checkpoint=checkpoint, format=format,  # type: ignore[arg-type] # the library checks it
        output=output, version=version, overwrite=overwrite, source=COMMAND_LINE,
        **keywords(options, export_model),
    )  # fmt: skip
    differences = ", ".join(f"{name} {value:.1e}" for name, value in exported.differences.items())
    text = [
        f"{exported.format} of step {exported.step}: {exported.path}",
        f"largest difference on {exported.checked_on}: {differences}",
    ]
    show(asdict(exported), text, as_json=json, text_too=True)


def serve(
    options: dict[str, Any],
    run: str | None = None,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="serve a folder that `modelyard export` wrote, not a run; new versions are loaded"
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the model in URLs (default: name of the folder)")] = None,
    host: Annotated[str, typer.Option(help="address to listen on; by default only this machine can connect")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="port to listen on; 0: the system chooses")] = 8501,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed_host",
            metavar="NAME",
            help="another name by which clients may call the server, such as a proxy's; may be repeated; *: any",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    max_batch: Annotated[int, typer.Option("--max_batch", help="images per batch")] = 32,
    max_delay_ms: Annotated[
        float, typer.Option("--max_delay_ms", help="how long a request waits for others to share a batch")
    ] = 5.0,
    max_queue: Annotated[
        int, typer.Option("--max_queue", help="images in the queue; others get status 429", rich_help_panel=_LIMITS)
    ] = 1024,
    max_body_mb: Annotated[
        float, typer.Option("--max_body_mb", help="megabytes per request", rich_help_panel=_LIMITS)
    ] = 16.0,
    max_pixels: Annotated[
        int, typer.Option("--max_pixels", help="pixels per image file", rich_help_panel=_LIMITS)
    ] = 32_000_000,
    max_instances: Annotated[
        int, typer.Option("--max_instances", help="images per request", rich_help_panel=_LIMITS)
    ] = 256,
    max_connections: Annotated[
        int,
        typer.Option(
            "--max_connections", help="open connections; the oldest idle one is closed", rich_help_panel=_LIMITS
        ),
    ] = 512,
    timeout_secs: Annotated[
        float,
        typer.Option(
            "--timeout_secs",
            help="seconds to receive a request, then to start predicting",
            rich_help_panel=_LIMITS,
        ),
    ] = 30.0,
) -> None:
    """Serve a run or an export over HTTP, with the REST API of TensorFlow Serving.

    A page for image uploads is at /.
    """
    from modelyard.serving.http.server import serve as serve_model
    from modelyard.system.console import visible

    def tell(text: str) -> None:
        typer.echo(visible(text))

    if run is None and export is None:
        raise UserError(
            "no run and no export is given. Give a run: modelyard serve RUN, or modelyard serve --model_dir RUN; "
            "or an export: modelyard serve --export FOLDER"
        )
    serve_model(
        run, export, name=name, host=host, port=port, allowed_host=allowed_host, checkpoint=checkpoint,
        max_batch=max_batch, max_delay_ms=max_delay_ms, max_queue=max_queue, max_body_mb=max_body_mb,
        max_pixels=max_pixels, max_instances=max_instances, max_connections=max_connections,
        timeout_secs=timeout_secs, ready=tell, source=COMMAND_LINE, **keywords(options, serve_model),
    )  # fmt: skip


def report(
    options: dict[str, Any],
    run: str,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="the .html file to write (default: report.html in RUN)")
    ] = None,
    checkpoint: Checkpoint = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="test|validation|train",
            help="split to report on (default: test if RUN was tested, else validation)",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a page that says how good a model is and what is wrong with it.

    The page is one file. The facts are in a JSON file beside it.
    """
    from modelyard.serving.report import report as make_report

    made = make_report(
        run, output=output, checkpoint=checkpoint, split=split, source=COMMAND_LINE, **keywords(options, make_report)
    )
    show(made.facts, [prose(line) for line in str(made).splitlines()], as_json=json, text_too=True)
