"""What people see of a cluster: one table on a terminal, lines with names before them elsewhere."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator

from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from modelyard.launcher.processes import Process
from modelyard.launcher.supervise import View
from modelyard.system.console import console

_STAMP = re.compile(r"^\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d+ [A-Z]+ +")
"""Date, fractions of seconds and level would take the room that the line needs."""
_STYLES = {"running": "green", "done": "bold green"}


class Lines:
    """Every new line of every log, with the name of its process before it."""

    def __init__(self, width: int) -> None:
        self._width = width

    def lines(self, name: str, lines: list[str]) -> None:
        """Writes them to standard error."""
        with contextlib.suppress(OSError):  # a terminal that was closed, a pipe nobody reads: training goes on
            for line in lines:
                sys.stderr.write(f"{name:<{self._width}} | {line}\n")
            sys.stderr.flush()

    def show(self, processes: list[Process]) -> None:
        """Lines say it all."""


class LiveTable:
    """A table of the processes with the last line of each."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def lines(self, name: str, lines: list[str]) -> None:
        """Only the last is shown, by `show`."""

    def show(self, processes: list[Process]) -> None:
        """Draws the table."""
        if processes:
            with contextlib.suppress(OSError):
                self._live.update(table_of(processes), refresh=True)


def table_of(processes: list[Process]) -> Table:
    """Process, pid, state, last line."""
    last = Column("last line", no_wrap=True, overflow="ellipsis", ratio=1)
    table = Table("process", Column("pid", justify="right"), Column("state", no_wrap=True), last, expand=True)
    for process in processes:
        lines = process.last_lines
        state = Text(process.state, style=_STYLES.get(process.state, "red"))
        line = _STAMP.sub(r"\1  ", lines[-1]) if lines else ""
        table.add_row(process.spec.name, str(process.pid), state, Text(line))
    return table


def is_live() -> bool:
    """Whether people look at a terminal."""
    return console().is_terminal


@contextlib.contextmanager
def shown(width: int) -> Iterator[View]:
    """The view for where standard error goes.

    Args:
        width: of the longest name.
    """
    if not is_live():
        yield Lines(width)
        return
    live = Live(console=console(), auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    live.start()
    try:
        yield LiveTable(live)
    finally:
        with contextlib.suppress(OSError):
            live.stop()
