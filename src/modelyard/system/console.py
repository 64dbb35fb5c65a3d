"""What people see while a run goes on. Everything for people goes to standard error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

log = logging.getLogger("modelyard")


@lru_cache(maxsize=1)
def console() -> Console:
    """The terminal."""
    return Console(stderr=True, highlight=False)


class _Marked(logging.Formatter):
    """Says ``warning:`` before what is one: among many lines it would be overlooked."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The line of a record."""
        if record.levelno >= logging.WARNING:
            record = logging.makeLogRecord(
                {**vars(record), "message": f"{record.levelname.lower()}: {record.message}"}  # others have it as it was
            )
        return super().formatMessage(record)


def show_log() -> None:
    """Sends the log to the terminal too."""
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
        handler.setFormatter(_Marked())
    else:  # a file or a pipe: nothing is wrapped
        handler = logging.StreamHandler()
        handler.setFormatter(_Marked("%(asctime)s %(message)s", "%H:%M:%S"))
    handler.name = "terminal"
    handler.setLevel(logging.INFO)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False


@contextlib.contextmanager
def bar(description: str, total: int | None) -> Iterator[Any]:
    """A progress bar for something that is counted, up to ``total`` if that is known.

    Call what it yields with the number done.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(), transient=True, disable=not console().is_terminal) as progress:
        task = progress.add_task(description, total=total)

        def update(done: int, total: int | None = total, description: str = description) -> None:
            progress.update(task, completed=done, total=total, description=description)

        yield update


@contextlib.contextmanager
def late_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """A `bar` that appears when something is told: for work that was mostly done at an earlier start.

    Call what it yields with the number done and the number of all.
    """
    with contextlib.ExitStack() as stack:
        update: Any = None

        def tell(done: int, total: int) -> None:
            nonlocal update
            if update is None:
                update = stack.enter_context(bar(description, total))
            update(done, total)

        yield tell
