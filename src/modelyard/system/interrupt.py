"""Ctrl-C before training begins. Python drops the exception in callbacks, such as those of its import system."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_interrupted = False


@contextlib.contextmanager
def note_interrupts() -> Iterator[None]:
    """Remembers Ctrl-C while the block runs, and hides the traceback of one that Python drops."""
    global _interrupted
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # nohup, or a user's
        yield
        return
    report = sys.unraisablehook
    sys.unraisablehook = lambda dropped: None if dropped.exc_type is KeyboardInterrupt else report(dropped)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        exec("")  # if Ctrl-C hit code of another `exec`, `python -m` would end with SIGINT, not with our status
        _interrupted = False
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, signal.default_int_handler)


def check_interrupted() -> None:
    """Raises KeyboardInterrupt if it was dropped."""
    if _interrupted:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: Any) -> None:
    global _interrupted
    _interrupted = True
    raise KeyboardInterrupt
