"""The terminal: the log, and below it one live display with all progress bars and tables of this process.

Text for people goes to standard error. Whatever it contains, it can't control the terminal: names of runs, classes and
files may be a stranger's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group, RenderableType, RenderHook, RenderResult
from rich.control import Control
from rich.file_proxy import FileProxy
from rich.logging import RichHandler
from rich.segment import ControlType, Segment

log = logging.getLogger("modelyard")

_REFRESH_SECONDS = 0.1
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and those that change the direction of text."""


# -- text -----------------------------------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Returns text with control characters as escapes: ``\\x1b[2J`` does not clear the screen, it can be read."""
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class SafeConsole(Console):
    """A console that shows text as it is: no markup, no emoji codes, and control characters visible."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders what is printed, also inside tables."""
        for segment in super().render(renderable, options):
            if segment.control is None and _INVISIBLE.search(segment.text):
                segment = Segment(visible(segment.text), segment.style)
            yield segment

    def print(self, *objects: Any, **settings: Any) -> None:
        """Prints, one thread after the other: with the live display, what is written depends on what is there."""
        with _lock:
            super().print(*objects, **settings)


@lru_cache(maxsize=1)
def console() -> Console:
    """Returns the console of standard error."""
    return SafeConsole(stderr=True)


# -- log ------------------------------------------------------------------------------------------------------------


class VisibleFormatter(logging.Formatter):
    """Writes control characters as escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the lines of a record."""
        return visible(super().format(record))


class _LevelFormatter(VisibleFormatter):
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


# -- live display ---------------------------------------------------------------------------------------------------


_lock = threading.RLock()
_display: _Display | None = None
"""The display of this process, while there is something to show. Two on one terminal would overwrite the log."""
os.register_at_fork(after_in_child=lambda: _forget_display())


def _forget_display() -> None:
    """Leaves the terminal to the parent, in a forked process: its thread is not here, and it may hold the lock."""
    global _lock, _display
    _lock = threading.RLock()
    if _display is not None:
        _display.is_shown = False
        _display = None


def _control(codes: str) -> Segment:
    return Segment(codes, None, [(ControlType.CARRIAGE_RETURN,)])  # any code: it says that this is no text


class _Erased:
    """Nothing, in place of the display."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _control("\r\x1b[J")


class _Redirected(FileProxy):
    """A standard stream whose lines are printed above the display."""

    def write(self, text: str) -> int:
        """Prints complete lines."""
        with _lock:
            return super().write(text)


class _Region:
    """The lines of the display, below an empty one where the cursor stays.

    All of it is below the cursor, so that it can be erased without knowing its height, which differs where a bar was
    added or the window was resized since. What other libraries write to the terminal is written to the empty line.
    """

    def __init__(self, parts: list[RenderableType]) -> None:
        self._parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(console.size.height - 2, 1)
        lines = console.render_lines(Group(*self._parts), console.options, pad=False)[:room]
        yield _control("\x1b[?7l")  # a line that is too long since the window was resized is cut, not wrapped
        for line in lines:
            yield Segment.line()
            yield _control("\x1b[K")  # before the line: after one of full width it would erase its last character
            yield from line
        up = f"\x1b[{len(lines)}A" if lines else ""  # "0 lines up" is one
        yield _control(f"{up}\r\x1b[?7h")


class _Display(RenderHook):
    """Tables and progress bars at the bottom of the terminal. Everything that is printed goes above them."""

    def __init__(self, screen: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        self.console, self.is_shown = screen, True
        self.tables: list[list[RenderableType]] = []
        text, note = (TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[note]"))
        time = TimeElapsedColumn(), TextColumn("/"), TimeRemainingColumn()
        columns = (
            text,
            BarColumn(None, table_column=Column(ratio=1)),
            MofNCompleteColumn(),
            note,
            *time,
        )  # the bar takes the room that is left
        self.bars = Progress(*columns, console=screen, auto_refresh=False, expand=True)
        self._ended = threading.Event()
        self._streams = (sys.stdout, sys.stderr)
        # What is printed elsewhere goes above the display, too. Standard output may be a file.
        if self._streams[0].isatty():
            sys.stdout = cast(TextIO, _Redirected(screen, sys.stdout))
        sys.stderr = cast(TextIO, _Redirected(screen, sys.stderr))
        screen.push_render_hook(self)
        threading.Thread(target=self._refresh_often, daemon=True).start()

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Erases the display, and draws it again below what is printed."""
        if not self.is_shown:
            return renderables
        return [_Erased(), *renderables, _Region(self._parts())]

    def refresh(self) -> None:
        """Draws the display."""
        with _lock, contextlib.suppress(OSError):  # the terminal may have been closed
            if self.is_shown:
                self.console.print(Control())

    def stop(self) -> None:
        """Erases the display."""
        with _lock:
            self._ended.set()
            sys.stdout, sys.stderr = self._streams
            self.is_shown = False
            self.console.pop_render_hook()
            with contextlib.suppress(OSError):
                self.console.print(_Erased())

    def _parts(self) -> list[RenderableType]:
        # One table for each bar: columns of one table are as wide as the widest.
        bars = [self.bars.make_tasks_table([task]) for task in self.bars.tasks if task.visible]
        return [*(table[0] for table in self.tables), *bars]

    def _refresh_often(self) -> None:
        while not self._ended.wait(_REFRESH_SECONDS):
            self.refresh()


@contextlib.contextmanager
def _shared_display() -> Iterator[_Display]:
    """Yields the display, which is shown as long as anything uses it."""
    global _display
    with _lock:
        if _display is None:
            _display = _Display(console())
        display = _display
    try:
        yield display
    finally:
        with _lock:
            if display is _display and not display.tables and not display.bars.tasks:
                _display = None
                display.stop()


def _has_display() -> bool:
    return console().is_terminal and not console().is_dumb_terminal


@contextlib.contextmanager
def bar(description: str, total: int | None = None, *, done: int = 0, note: str = "") -> Iterator[Callable[..., None]]:
    """Shows a progress bar; call what it yields with the number done.

    If ``total`` is not known yet, the bar appears with the first call, which may give it as its second argument. Work
    that an earlier start did already then shows none.

    Args:
        description: what is under way; a later call may change it.
        total: how much there is to do.
        done: how much is done already.
        note: text beside the bar; a later call may change it.
    """
    if not _has_display():
        yield lambda done, total=None, description=None, note=None: None
        return
    with contextlib.ExitStack() as used:
        task: Any = None
        display: Any = None

        def start(size: int | None) -> None:
            nonlocal task, display
            with _lock:
                if task is not None:  # another thread was first
                    return
                display = used.enter_context(_shared_display())
                task = display.bars.add_task(description, total=size, completed=done, note=note)
                used.callback(end)
            display.refresh()

        def end() -> None:
            display.refresh()  # the last numbers
            display.bars.remove_task(task)

        def update(
            done: int, total: int | None = total, description: str | None = None, note: str | None = None
        ) -> None:
            if task is None:
                start(total)
            fields = {} if note is None else {"note": note}
            display.bars.update(task, completed=done, total=total, description=description, **fields)

        if total is not None:
            start(total)
        yield update


@contextlib.contextmanager
def live_table(keep: bool = True) -> Iterator[Callable[[RenderableType], None] | None]:
    """Yields a function that shows a table, or anything else, in place of the last; None if there is no terminal.

    Args:
        keep: whether the last one stays on the terminal.
    """
    if not _has_display():
        yield None
        return
    last: list[RenderableType] = [""]
    with _shared_display() as display:

        def show(shown: RenderableType) -> None:
            last[0] = shown
            display.refresh()

        display.tables.append(last)
        try:
            yield show
        finally:
            with _lock:
                display.tables = [table for table in display.tables if table is not last]
                with contextlib.suppress(OSError):
                    if keep:
                        display.console.print(last[0])
