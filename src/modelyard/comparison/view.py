"""What people see of a matrix that runs: a live table on a terminal, a line for every change elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from modelyard.comparison.folder import MatrixFolder
from modelyard.comparison.work import DONE, FAILED, RUNNING, WAITING, State, View
from modelyard.system.console import console

_STYLES = {RUNNING: "green", DONE: "bold green", FAILED: "red", WAITING: "dim"}
_TAIL_BYTES = 1 << 14
_MOST_ROWS = 40


def last_rows(path: Path) -> list[dict[str, Any]]:
    """The last rows of a metrics file, which may be long."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def progress(folder: MatrixFolder, state: State) -> tuple[str, str]:
    """Step and epoch of a cell, and its accuracy (its loss, where it has none)."""
    rows = last_rows(folder.run(state.cell.name).metrics) if state.state != WAITING else []
    if not rows:
        return "", ""
    newest = max(rows, key=lambda row: row.get("step") or 0)  # the last is of the best model, which may be older
    epoch = newest.get("epoch")
    step = f"{newest.get('step')}" + (f" / {epoch:.3g}" if isinstance(epoch, int | float) else "")
    for split in ("test", "validation", "train"):
        for row in reversed(rows):
            for metric in ("accuracy", "loss"):
                if row.get("split") == split and isinstance(row.get(metric), int | float):
                    return step, f"{split} {metric} {row[metric]:.4g}"
    return step, ""


class Lines:
    """A line whenever a cell begins or ends."""

    def __init__(self, folder: MatrixFolder, total: int) -> None:
        self._folder, self._total, self._ended = folder, total, 0

    def began(self, states: Sequence[State]) -> None:
        """Counts on from what is done."""
        self._ended = sum(state.was_done for state in states)

    def changed(self, state: State) -> None:
        """Writes it to standard error."""
        text = f"{state.cell.name}: {state.state}"
        if state.state not in (RUNNING, WAITING):
            _, value = progress(self._folder, state)
            text += f" after {state.seconds:.0f} s" + (f", {value}" if value else "")
        if state.state in (DONE, FAILED):
            self._ended += 1
            text = f"[{self._ended}/{self._total}] {text}"
        if state.state == FAILED:
            text += f": {state.reason} ({self._folder.log(state.cell.name)})"
        with contextlib.suppress(OSError):
            console().print(text, soft_wrap=True, markup=False)

    def show(self, states: Sequence[State]) -> None:
        """Lines say it all."""


class LiveTable:
    """A table of the cells."""

    def __init__(self, folder: MatrixFolder, live: Live) -> None:
        self._folder, self._live = folder, live

    def began(self, states: Sequence[State]) -> None:
        """The table shows it."""

    def changed(self, state: State) -> None:
        """The table shows it."""

    def show(self, states: Sequence[State]) -> None:
        """Draws it again."""
        with contextlib.suppress(OSError):
            self._live.update(cell_table(self._folder, states), refresh=True)


def cell_table(folder: MatrixFolder, states: Sequence[State]) -> Table:
    """Cell, state, step and epoch, accuracy, time; of many, those that run and the last that ended."""
    shown = list(states)
    if len(shown) > _MOST_ROWS:
        order = {RUNNING: 0, FAILED: 1, DONE: 2}
        shown = sorted(shown, key=lambda state: order.get(state.state, 3))[:_MOST_ROWS]
    counts = ", ".join(f"{sum(s.state == kind for s in states)} {kind}" for kind in (DONE, RUNNING, WAITING, FAILED))
    title = f"{len(states)} cells: {counts}"
    right = Column("time", justify="right", no_wrap=True)
    table = Table("cell", "state", Column("step / epoch", justify="right"), "so far", right, title=title)
    for state in shown:
        step, value = progress(folder, state)
        seconds = time.monotonic() - state.began if state.state == RUNNING else state.seconds
        told = Text(state.state, style=_STYLES.get(state.state, ""))
        spent = "before" if state.was_done else f"{seconds:.0f} s" if seconds else ""
        table.add_row(Text(state.cell.name), told, step, Text(state.reason[:80] or value), spent)
    return table


@contextlib.contextmanager
def shown(folder: MatrixFolder, total: int) -> Iterator[View]:
    """The view for where standard error goes."""
    if not console().is_terminal:
        yield Lines(folder, total)
        return
    live = Live(console=console(), auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    live.start()
    try:
        yield LiveTable(folder, live)
    finally:
        with contextlib.suppress(OSError):
            live.stop()
