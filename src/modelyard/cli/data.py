"""The commands on datasets: call the library and print."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

from rich.table import Table

from modelyard.cli.commands import print_json, stdout
from modelyard.config.resolve import COMMAND_LINE
from modelyard.data import manage
from modelyard.data.dataset import SPLITS
from modelyard.errors import DataError, unknown
from modelyard.run.console import console, show_log


def convert(source: str, to: str, settings: dict[str, Any], options: dict[str, Any], *, as_json: bool) -> None:
    """Converts, shows what was made."""
    hints = get_type_hints(manage.convert)
    for key in ("encoding", "on_bad"):
        choices = get_args(hints[key])
        if settings[key] not in choices:
            raise DataError(unknown(key, settings[key], choices))
    fraction = settings["validation_fraction"]
    if fraction is not None and not 0 < fraction < 1:
        raise DataError(f"validation_fraction {fraction} must be between 0 and 1.")
    show_log()
    report = manage.convert(source, to, origin=COMMAND_LINE, **settings, **options)
    if as_json:
        print_json(report.as_json())
        return
    table = Table("split", "examples", "shards", "bytes", title=f"{report.name}: {to}", title_justify="left")
    for split, made in report.splits.items():
        table.add_row(split, f"{made.examples:,}", str(made.shards), f"{made.bytes:,}")
    stdout().print(table)
    if report.bad:
        stdout().print(
            f"{len(report.bad)} images could not be read and were left out; they are listed in {to}/bad.txt."
        )
    stdout().print(f"train on it: modelyard train-and-evaluate --dataset {to} --image_size 224", soft_wrap=True)


def fetch(name: str, data_dir: str, archive: str | None) -> None:
    """Fetches, shows where the files are."""
    show_log()
    for path in manage.fetch(name, data_dir, archive):
        stdout().print(str(path), soft_wrap=True)


def info(source: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Shows what is in a dataset."""
    show_log()
    found = manage.data_info(source, origin=COMMAND_LINE, **options)
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
    image = found["image"]
    if image is not None:
        out.print(f"an example: {'×'.join(map(str, image['shape']))} {image['dtype']}")
    if found["sizes"]:
        low, high = found["sizes"]
        out.print(f"stored sizes (height×width): from {low[0]}×{low[1]} to {high[0]}×{high[1]}")


def verify(source: str, options: dict[str, Any], *, as_json: bool) -> None:
    """Checks a dataset; problems are an error."""
    show_log()
    report = manage.verify_data(source, origin=COMMAND_LINE, **options)
    if as_json:
        print_json(report.as_json())
    else:
        table = Table("split", "examples", "fewest of a class", "most of a class", title=source, title_justify="left")
        for split, counts in report.histograms.items():
            table.add_row(split, f"{sum(counts):,}", f"{min(counts):,}", f"{max(counts):,}")
        stdout().print(table)
        for warning in report.warnings:
            stdout().print(f"note: {warning}", soft_wrap=True)
    if report.problems:
        raise DataError("\n  ".join([f"{source}: {report.problem_count} problems", *report.problems]))
    console().print("everything was read; nothing is wrong.")


def show(source: str, output: str, split: str, examples: int, copies: int, options: dict[str, Any]) -> None:
    """Makes the picture, says where it is."""
    if split not in SPLITS:
        raise DataError(unknown("split", split, SPLITS))
    show_log()
    path = manage.show_data(
        source, output, split=split, examples=examples, copies=copies, origin=COMMAND_LINE, **options
    )
    stdout().print(str(path), soft_wrap=True)
