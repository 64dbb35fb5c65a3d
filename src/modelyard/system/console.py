"""The terminal: log and progress bars. Text for people goes to standard error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

log = logging.getLogger("modelyard")


@lru_cache(maxsize=1)
def console() -> Console:
    """Returns the console of standard error."""
    return Console(stderr=True, highlight=False)


class _LevelFormatter(logging.Formatter):
    """Writes ``warning:`` or ``error:`` before such messages."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """Returns the line of a record."""
        if record.levelno >= logging.WARNING:  # a copy: other handlers get the record unchanged
            message = f"{record.levelname.lower()}: {record.message}"
            record = logging.makeLogRecord({**vars(record), "message": message})
        return super().formatMessage(record)


def show_log() -> None:
    """Shows the log on the terminal."""
    if any(handler.name == "terminal" for handler in log.handlers):
        return
    handler: logging.Handler
    if console().is_terminal:
        handler = RichHandler(
            console=console(),
            show_path=False,
            show_level=False,
            log_time_format="%H:%M:%S",
            omit_repeated_times=False,
            keywords=["warning: ", "error: "],
        )
        handler.setFormatter(_LevelFormatter())
    else:  # a file or a pipe: lines are not wrapped
        handler = logging.StreamHandler()
        handler.setFormatter(_LevelFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.name = "terminal"
    handler.setLevel(logging.INFO)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False


@contextlib.contextmanager
def bar(description: str, total: int | None = None) -> Iterator[Any]:
    """Shows a progress bar; call what it yields with the number done.

    If ``total`` is not known yet, the bar appears with the first call, which may give it as its second argument. Work
    that an earlier start did already then shows none.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console(), transient=True, disable=not console().is_terminal)
    task = progress.add_task(description, total=total)

    def update(done: int, total: int | None = total, description: str = description) -> None:
        progress.start()  # has no effect on one that is started
        progress.update(task, completed=done, total=total, description=description)

    try:
        if total is not None:
            progress.start()
        yield update
    finally:
        progress.stop()
