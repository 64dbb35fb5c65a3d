"""The log of a process: to the terminal, and to its file under runlogs/ with a pid file beside it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from modelyard.system.files import explain
from modelyard.system.pid_file import SUFFIX, hold_pid_file

log = logging.getLogger("modelyard")
_FORMAT = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """A log that can't be written must not drown the error that says why."""


@contextlib.contextmanager
def log_to(folder: Path, role: str) -> Iterator[None]:
    """While the block runs, the log also goes to ``ROLE.log`` in ``folder``, and ``ROLE.pid`` holds the process id.

    Where standard error is that file already, as under `modelyard launch`, every line is still written once.

    Raises:
        RunError: if the process of that role is running already.
    """
    file = folder / f"{role}.log"
    with explain(folder, "write the log in"):
        folder.mkdir(parents=True, exist_ok=True)
    with hold_pid_file(folder / f"{role}{SUFFIX}"):
        with explain(folder, "write the log in"):
            handler = _LogFile(file, encoding="utf-8")
        handler.setFormatter(_FORMAT)
        shown = [other for other in log.handlers if other.name == "terminal"] if _is_standard_error(file) else []
        for other in shown:
            log.removeHandler(other)
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            log.removeHandler(handler)
            handler.close()
            for other in shown:
                log.addHandler(other)


def _is_standard_error(file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(2), file.stat())
    except OSError:
        return False
