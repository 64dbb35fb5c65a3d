"""SIGTERM and Ctrl-C while something runs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def signals_go_to(note: Callable[[int, Any], None]) -> Iterator[None]:
    """While the block runs, SIGINT and SIGTERM call ``note``. Python allows that in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
