"""`modelyard predict`: calls the library and prints what came out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from modelyard.cli.commands import stdout
from modelyard.config.resolve import COMMAND_LINE
from modelyard.errors import UserError
from modelyard.serving.prediction.predict import Predictions
from modelyard.serving.prediction.predict import predict as run_it
from modelyard.system.console import console, show_log

_MOST_CLASSES = 20


def predict(
    run: str, sources: Sequence[str], settings: Mapping[str, Any], options: Mapping[str, Any], *, as_json: bool
) -> None:
    """Writes the table and says how good it is, where that is known."""
    if settings["on_bad"] not in ("fail", "skip"):
        raise UserError(f"--on_bad {settings['on_bad']} is neither fail nor skip.")
    show_log()
    try:
        done = run_it(run, *sources, **settings, source=COMMAND_LINE, **options)
    except KeyboardInterrupt:
        console().print("stopped. The same command goes on from what is written.")
        raise
    if as_json:
        stdout().print_json(json.dumps(asdict(done)))
        return
    show(done)


def show(done: Predictions) -> None:
    """A line, and tables of what it is worth."""
    out = stdout()
    confusion = done.scores.get("confusion")
    if confusion is not None and len(confusion) <= _MOST_CLASSES:
        out.print("truth (rows) and predictions (columns)")
        table = Table()
        table.add_column("")
        classes = done.scores["classes"]
        for name in classes:
            table.add_column(Text(name), justify="right")
        for name, row in zip(classes, confusion, strict=True):
            table.add_row(Text(name), *(str(count) if count else "·" for count in row))
        out.print(table)
    for name, value in done.metrics.items():
        out.print(f"{name} {value:.4f}")
    skipped = f", {done.skipped} of them not readable" if done.skipped else ""
    out.print(f"{done.examples:,} predictions by the model of step {done.step} in {done.path}{skipped}", soft_wrap=True)
