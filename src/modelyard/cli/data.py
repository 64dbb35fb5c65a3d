"""The commands on datasets: call the library and print."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any, get_args, get_type_hints

from rich.table import Table

import modelyard
from modelyard.cli.commands import print_json, stdout
from modelyard.config.resolve import COMMAND_LINE
from modelyard.data.dataset import SPLITS
from modelyard.data.records.reader import read_dataset_json
from modelyard.errors import DataError, unknown
from modelyard.system.console import console, show_log


def convert(source: str, to: str, settings: dict[str, Any], options: dict[str, Any], *, as_json: bool) -> None:
    """Converts, shows what was made."""
    hints = get_type_hints(modelyard.convert)
    for key in ("encoding", "on_bad"):
        choices = get_args(hints[key])
        if settings[key] not in choices:
            raise DataError(unknown(key, settings[key], choices))
    fraction = settings["validation_fraction"]
    if fraction is not None and not 0 < fraction < 1:
        raise DataError(f"validation_fraction {fraction} must be between 0 and 1.")
    show_log()
    try:
        report = modelyard.convert(source, to, origin=COMMAND_LINE, **settings, **options)
    except KeyboardInterrupt:
        console().print("[bold]stopped.[/] Finished shards are kept: run the same command again to go on.")
        raise
    if as_json:
        print_json({**asdict(report), "folder": str(report.folder)})
        return
    table = Table("split", "examples", "shards", title=str(report.folder), title_justify="left")
    for split, count in report.examples.items():
        table.add_row(split, f"{count:,}", str(report.shards[split]))
    out = stdout()
    out.print(table)
    made = "was there already" if report.already_done else f"{report.bytes / 1e6:,.1f} MB"
    went_on = f", {report.kept_shards} shards from an earlier start" if report.kept_shards else ""
    out.print(f"{made}{went_on}")
    if report.reencoded:
        out.print(f"{report.reencoded:,} images were larger than max_edge; they were made smaller and encoded again.")
    if report.bad:
        out.print(
            f"{len(report.bad)} images can't be read and were left out: {report.folder / 'bad.txt'}", soft_wrap=True
        )
    size = " --image_size 224" if read_dataset_json(report.folder).shape is None else ""
    out.print(f"train on it: modelyard train-and-evaluate --dataset {shlex.quote(to)}{size}", soft_wrap=True)


def fetch(name: str, data_dir: str, archive: str | None) -> None:
    """Fetches, shows where the files are."""
    show_log()
    for path in modelyard.fetch(name, data_dir, archive):
        stdout().print(str(path), soft_wrap=True)


def info(source: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Shows what is in a dataset."""
    show_log()
    found = modelyard.data_info(source, origin=COMMAND_LINE, **options)
    if as_json:
        print_json(found)
        return
    out = stdout()
    table = Table("class", *found["splits"], title=source, title_justify="left")
    for number, name in enumerate(found["classes"][:50]):
        counts = [split["classes"] for split in found["splits"].values()]
        table.add_row(name, *("" if of is None else f"{of[number]:,}" for of in counts))
    if len(found["classes"]) > 50:
        table.add_row(f"… {len(found['classes']) - 50} more", *("" for _ in found["splits"]))
    table.add_section()
    table.add_row("all", *(f"{split['examples']:,}" for split in found["splits"].values()))
    out.print(table)
    image, sizes = found["image"], found["sizes"]
    if sizes and sizes[0] != sizes[1]:
        low, high = sizes
        out.print(f"sizes differ (of 100 images, heights {low[0]} to {high[0]}, widths {low[1]} to {high[1]}):")
        out.print("to train on them, give one: --image_size 224, for example")
    elif image is not None:
        out.print(f"an example: {'×'.join(map(str, image['shape']))} {image['dtype']}")
    if found["record"]:
        out.print("a record has:", *found["record"], sep="\n  ", markup=False, soft_wrap=True)


def verify(source: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Checks a dataset; problems are an error."""
    show_log()
    report = modelyard.verify_data(source, origin=COMMAND_LINE, **options)
    if as_json:
        found = {**asdict(report), "shared": [[*pair, count] for pair, count in report.shared.items()]}
        print_json(found)
    else:
        columns = ("split", "examples", "classes", "fewest", "most", "bad", "heights", "widths")
        table = Table(*columns, title=source, title_justify="left")
        for name, split in report.splits.items():
            counts = [count for count in split.class_counts if count] or [0]
            sizes = ["–" if size is None else f"{size[0]} to {size[1]}" for size in (split.heights, split.widths)]
            numbers = (split.examples, len(counts), min(counts), max(counts), split.bad)
            table.add_row(name, *(f"{number:,}" for number in numbers), *sizes)
        stdout().print(table)
        for warning in report.warnings:
            stdout().print(f"note: {warning}", soft_wrap=True)
    if not report.ok:
        shown = [*report.problems, *(["…"] if report.problem_count > len(report.problems) else [])]
        raise DataError("\n  ".join([f"{source}: {report.problem_count} problem(s)", *shown]))
    notes = f" See the {len(report.warnings)} note(s)." if report.warnings and not as_json else ""
    console().print(f"everything was read; nothing is damaged.{notes}")


def show(source: str, output: str, split: str, examples: int, copies: int, options: dict[str, Any]) -> None:
    """Makes the picture, says where it is."""
    if split not in SPLITS:
        raise DataError(unknown("split", split, SPLITS))
    show_log()
    path = modelyard.show_data(
        source, output, split=split, examples=examples, copies=copies, origin=COMMAND_LINE, **options
    )
    stdout().print(str(path), soft_wrap=True)
