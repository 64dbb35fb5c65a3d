"""Commands for datasets: convert, and data fetch, info, verify, check, show."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Annotated, Any, get_args, get_type_hints

import typer

from modelyard.cli.output import Json, keywords, show, table, text_of
from modelyard.errors import COMMAND_LINE, DataError, unknown

Source = Annotated[str, typer.Argument(metavar="DATASET", help="a path, or the name of a dataset")]
_CLASSES_SHOWN = 50


def convert(
    options: dict[str, Any],
    source: Annotated[str, typer.Option("--from", metavar="SOURCE", help="a path, or the name of a dataset")],
    to: Annotated[str, typer.Option(metavar="FOLDER", help="folder to make")],
    encoding: Annotated[
        str, typer.Option(metavar="keep|jpeg|raw", help="keep the original bytes, or store JPEG or pixels")
    ] = "keep",
    max_edge: Annotated[
        int | None, typer.Option("--max_edge", help="shrink images whose longer edge is longer, in pixels", min=1)
    ] = None,
    quality: Annotated[int, typer.Option(help="quality of JPEGs that are encoded", min=1, max=100)] = 95,
    shards: Annotated[
        int | None, typer.Option(help="number of files per split (default: about 128 MB per file)", min=1)
    ] = None,
    validation_fraction: Annotated[
        float | None,
        typer.Option("--validation_fraction", help="share of each class for validation (default: keep the splits)"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="name of the dataset (default: name of the folder)")] = None,
    shard_name: Annotated[
        str | None, typer.Option("--shard_name", help="first part of the names of the files (default: none)")
    ] = None,
    processes: Annotated[
        int, typer.Option(help="number of processes; 0: one per core. The result is the same", min=0)
    ] = 0,
    on_bad: Annotated[
        str, typer.Option("--on_bad", metavar="fail|skip", help="an unreadable image: fail, or skip it")
    ] = "fail",
    json: Json = False,
) -> None:
    """Convert a dataset to records with an index.

    If interrupted, run the same command again to resume.
    """
    import modelyard
    from modelyard.storage import inside
    from modelyard.system.console import console

    hints = get_type_hints(modelyard.convert)
    for key, value in (("encoding", encoding), ("on_bad", on_bad)):
        if value not in get_args(hints[key]):
            raise DataError(unknown(key, value, get_args(hints[key])))
    if validation_fraction is not None and not 0 < validation_fraction < 1:
        raise DataError(f"validation_fraction {validation_fraction} must be between 0 and 1.")
    chosen: dict[str, Any] = {"encoding": encoding, "on_bad": on_bad}
    try:
        report = modelyard.convert(
            source, to, max_edge=max_edge, quality=quality, shards=shards, validation_fraction=validation_fraction,
            name=name, shard_name=shard_name, processes=processes, origin=COMMAND_LINE, **chosen,
            **keywords(options, modelyard.convert),
        )  # fmt: skip
    except KeyboardInterrupt:
        console().print("stopped. Finished shards are kept. Run the same command again to resume.")
        raise
    rows = [(split, f"{count:,}", report.shards[split]) for split, count in report.examples.items()]
    kept = f", {report.kept_shards} shards from an earlier start" if report.kept_shards else ""
    text: list[Any] = [table(("split", "examples", "shards"), rows, title=str(report.folder))]
    text.append(f"{'exists already' if report.already_done else f'{report.bytes / 1e6:,.1f} MB'}{kept}")
    if report.reencoded:
        text.append(f"{report.reencoded:,} images were larger than max_edge; they were made smaller and encoded again.")
    if report.bad:
        text.append(
            f"{len(report.bad)} images can't be read and were left out: {inside(str(report.folder), 'bad.txt')}"
        )
    size = " --image_size 224" if report.shape is None else ""
    text.append(f"train on it: modelyard train-and-evaluate --dataset {shlex.quote(to)}{size}")
    show({**asdict(report), "folder": str(report.folder)}, text, as_json=json)


def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="mnist, fashion_mnist, cifar10 or cifar100")],
    data_dir: Annotated[str, typer.Option("--data_dir", help="folder for the files")] = "data",
    archive: Annotated[
        str | None,
        typer.Option("--from", metavar="ARCHIVE", help="a local copy: the file, or a folder with the files"),
    ] = None,
) -> None:
    """Download the official files of a dataset, and check them.

    A broken download is resumed.
    """
    from modelyard.data.sources.fetch import fetch

    show(None, [str(path) for path in fetch(name, data_dir, archive)], as_json=False)


def data_info(options: dict[str, Any], source: Source, json: Json = False) -> None:
    """Show splits, classes and sizes; of records, also their features."""
    import modelyard

    found = modelyard.data_info(source, origin=COMMAND_LINE, **keywords(options, modelyard.data_info))
    counts = [split["classes"] for split in found["splits"].values()]
    names = found["classes"]
    rows = [[name, *("" if of is None else f"{of[number]:,}" for of in counts)] for number, name in enumerate(names)]
    if len(names) > _CLASSES_SHOWN:
        rows[_CLASSES_SHOWN:] = [[f"… {len(names) - _CLASSES_SHOWN} more"]]
    classes = table(("class", *found["splits"]), rows, title=source)
    classes.add_section()
    classes.add_row("all", *(f"{split['examples']:,}" for split in found["splits"].values()))
    groups = [split.get("groups") for split in found["splits"].values()]
    if any(groups):
        classes.add_row("groups", *("" if count is None else f"{count:,}" for count in groups))
    text: list[Any] = [classes]
    image, sizes = found["image"], found["sizes"]
    if sizes and sizes[0] != sizes[1]:
        low, high = sizes
        of = f"{found['measured']} of {found['splits']['train']['examples']:,} training images"
        heights, widths = (_span(*ends) for ends in zip(low, high, strict=True))
        text.append(f"sizes differ (of {of}, heights {heights}, widths {widths}):")
        text.append("to train on them, give one size, such as --image_size 224")
    elif image is not None:
        text.append(f"one example: {'×'.join(map(str, image['shape']))} {image['dtype']}")
    if found["bad"]:
        bad = found["bad"]
        of = f"{len(bad)} of {found['measured'] + len(bad)} training images that were read"
        text.append(f"{of} can't be decoded: {bad[0]}")
        text.append(f"`modelyard data verify {shlex.quote(source)}` lists all; --on_bad skip trains without them.")
    if found["record"]:
        text.append("\n  ".join(["features of a record:", *found["record"]]))
    show(found, text, as_json=json)


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def data_verify(options: dict[str, Any], source: Source, json: Json = False) -> None:
    """Read everything: checksums, images, labels. List what is damaged."""
    from modelyard.data.inspection import verify_data
    from modelyard.system.console import console

    report = verify_data(source, origin=COMMAND_LINE, **keywords(options, verify_data))
    columns = ("split", "examples", "classes", "fewest", "most", "bad", "heights", "widths")
    rows = []
    for name, split in report.splits.items():
        counts = [count for count in split.class_counts if count] or [0]
        sizes = [size and _span(*size) for size in (split.heights, split.widths)]
        numbers = (split.examples, len(counts), min(counts), max(counts), split.bad)
        rows.append((name, *(f"{number:,}" for number in numbers), *sizes))
    text = [table(columns, rows, title=source), *(f"note: {warning}" for warning in report.warnings)]
    show(asdict(report), text, as_json=json)
    if not report.ok:
        more = ["…"] if report.problem_count > len(report.problems) else []
        raise DataError("\n  ".join([f"{source}: {report.problem_count} problem(s)", *report.problems, *more]))
    notes = f" See the {len(report.warnings)} note(s)." if report.warnings and not json else ""
    console().print(f"everything was read; nothing is damaged.{notes}")
    console().print("`modelyard data check` finds duplicates, images in two splits and wrong labels.")


def data_check(
    options: dict[str, Any],
    source: Source,
    model_dir: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="a run: list labels that its predictions contradict")
    ] = None,
    trained_on: Annotated[
        bool, typer.Option("--trained_on", help="with --run: also examples that the run was trained on")
    ] = False,
    skip: Annotated[str, typer.Option(metavar="NAMES", help="checks to leave out, such as classes,size")] = "",
    most: Annotated[int, typer.Option(metavar="NUMBER", help="how many of each check to print", min=1)] = 3,
    output: Annotated[str | None, typer.Option(metavar="FILE", help=".csv file to write, with everything")] = None,
    sheet: Annotated[str | None, typer.Option(metavar="FILE", help="PNG file to draw, with pairs side by side")] = None,
    json: Json = False,
) -> None:
    """Find duplicates, images in two splits, wrong labels and odd images.

    The exit status is 0 if nothing was found, 1 if something was, 2 after an error.
    """
    import modelyard
    from modelyard.data.check import CHECKS

    report = modelyard.check_data(
        source, run=model_dir, trained_on=trained_on, skip=skip.replace(" ", "").split(",") if skip else (),
        output=output, sheet=sheet, origin=COMMAND_LINE, **keywords(options, modelyard.check_data),
    )  # fmt: skip
    rows = []
    for check, count in report.counts.items():
        found = [str(finding) for finding in report.of(check)[:most]]
        more = [f"… {count - most:,} more"] if count > most else []
        rows.append((CHECKS[check], f"{count:,}", text_of([*found, *more])))
    examples = ", ".join(f"{count:,} {split}" for split, count in report.examples.items())
    text: list[Any] = [table(("found", "count", "where"), rows, right=("count",), title=f"{source}: {examples}")]
    if not rows:
        text = [f"{source}: {examples}. Nothing was found."]
    text += [f"note: {note}" for note in report.notes]
    text += [path for path in (output, sheet) if path is not None and rows]
    show(report.as_json(), text, as_json=json)
    if rows:
        raise typer.Exit(1)


def data_show(
    options: dict[str, Any],
    source: Source,
    output: Annotated[str, typer.Option(metavar="FILE", help="PNG file to write")] = "sheet.png",
    split: Annotated[str, typer.Option(metavar="train|validation|test", help="split to show")] = "train",
    examples: Annotated[int, typer.Option(help="number of examples", min=1, max=200)] = 8,
    which: Annotated[
        str,
        typer.Option(
            metavar="random|first|NUMBERS",
            help="examples to show: random ones of each class, by --random_seed; the first ones; or 3,17,40",
        ),
    ] = "random",
    copies: Annotated[int, typer.Option(help="augmented copies of each example", min=0, max=20)] = 5,
) -> None:
    """Make a picture of examples, as they are stored and as they are augmented in training."""
    from modelyard.data.dataset import SPLITS
    from modelyard.data.sheet import show_data

    if split not in SPLITS:
        raise DataError(unknown("split", split, SPLITS))
    path = show_data(
        source, output, split=split, examples=examples, which=which, copies=copies, origin=COMMAND_LINE,
        **keywords(options, show_data),
    )  # fmt: skip
    show(None, [str(path)], as_json=False)
