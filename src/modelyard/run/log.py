"""The log of a process: to the terminal, and to its file under runlogs/ with a pid file beside it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from modelyard.run.files import explain

log = logging.getLogger("modelyard")
_FORMAT = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """A log that can't be written must not drown the error that says why."""


@contextlib.contextmanager
def log_to(folder: Path, role: str) -> Iterator[None]:
    """While the block runs, the log also goes to ``ROLE.log`` in ``folder``, and ``ROLE.pid`` holds the process id."""
    pid = folder / f"{role}.pid"
    with explain(folder, "write the log in"):
        folder.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(folder / f"{role}.log", encoding="utf-8")
        pid.write_text(f"{os.getpid()}\n", encoding="utf-8")
    handler.setFormatter(_FORMAT)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
        with contextlib.suppress(OSError):
            pid.unlink()
