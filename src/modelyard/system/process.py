"""A process of a run: its pid file, its log file, its signals, its random state.

A process holds a lock on its pid file while it lives, so that a stale file is recognized. The file has the pid only,
for ``kill $(cat chief.pid)``. Without host and pid namespace a pid means nothing: a hidden file beside it has them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil

from modelyard import faults
from modelyard.errors import RunError, UserError
from modelyard.system.files import explain
from modelyard.system.machine import pid_space

log = logging.getLogger("modelyard")
SUFFIX = ".pid"
_LOCK_SECONDS = 0.5
"""How long to wait for the lock: a process that only reads the file holds it for a moment."""
_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


@dataclass(frozen=True)
class Holder:
    """A living process that holds a pid file.

    Args:
        name: the name of the file, such as worker-0.
        pid: its process id, on its own host.
        host: the host that it runs on.
        space: the pid namespace that it runs in; containers have their own.
        path: the pid file.
    """

    name: str
    pid: int
    host: str
    space: str
    path: Path

    @property
    def is_here(self) -> bool:
        """Whether the process runs on this host and in this pid namespace."""
        return (self.host, self.space) == (socket.gethostname(), pid_space())

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}{'' if self.is_here else f' on {self.host}'})"

    def signal(self, number: signal.Signals) -> bool:
        """Signals the process and returns True, unless it is elsewhere or no longer holds the file."""
        if not self.is_here:
            return False
        try:
            process = psutil.Process(self.pid)  # knows when it started: a later process of this pid is not signalled
            # A new holder may not have overwritten the pid of a dead one yet, so the file must be open, too.
            files = [file.path for file in process.open_files()]
            if read_holder(self.path) != self or str(self.path.resolve()) not in files:
                return False
            process.send_signal(number)
        except (psutil.Error, OSError):
            return False
        return True


@contextlib.contextmanager
def hold_pid_file(path: Path) -> Iterator[None]:
    """Holds ``path`` with the pid of this process, locked, while the block runs.

    Raises:
        RunError: if another living process holds it.
    """
    with explain(path, "write"):
        file = _open_locked(path)
    try:
        with explain(path, "write"):
            host_file(path).write_text(f"{socket.gethostname()}\n{pid_space()}\n", encoding="utf-8")
            # Without a buffer: on a full disk, it would fail again when the file is closed.
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield
    finally:
        # Removed before the lock is released, and only if it is still ours: the folder may have been replaced.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                host_file(path).unlink(missing_ok=True)
                path.unlink()
        file.close()


def host_file(path: Path) -> Path:
    """The file beside a pid file that has the host and the pid namespace of the process."""
    return path.with_name(f".{path.name}-host")


def _open_locked(path: Path) -> IO[str]:
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held while the process lives
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
            file.close()  # its last holder removed it in between
        except BlockingIOError:
            file.close()
            if time.monotonic() > deadline:
                raise RunError(_in_use(path)) from None
            time.sleep(0.05)
        except OSError:  # this file system has no locks: read_holder finds nobody, so nobody is signalled
            return file


def _in_use(path: Path) -> str:
    holder = read_holder(path)
    who = f"process {holder.pid} on {holder.host}" if holder else "another process"
    run = path.parent.parent
    return f"{path.stem} of {run} is running already: {who}. Wait for it, or stop it: modelyard stop {run}"


def read_holder(path: Path) -> Holder | None:
    """Returns the living process that holds ``path``, or None."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                lines = file.read(1000).splitlines()
        if len(lines) == 1:  # an earlier Modelyard wrote all in one file
            lines += host_file(path).read_text(encoding="utf-8", errors="replace")[:1000].splitlines()
    except OSError:
        return None
    if len(lines) < 3 or not lines[0].isdecimal() or int(lines[0]) < 2:
        return None
    return Holder(path.stem, int(lines[0]), lines[1], lines[2], path)


def holders(folder: Path) -> list[Holder]:
    """Returns the living processes with pid files in ``folder``, by name."""
    found = (read_holder(path) for path in sorted(folder.glob(f"*{SUFFIX}")))
    return [holder for holder in found if holder is not None]


@contextlib.contextmanager
def log_to(folder: Path, role: str) -> Iterator[None]:
    """Writes the log also to ``ROLE.log`` in ``folder`` while the block runs, and holds ``ROLE.pid``.

    If standard error is that file already, as under `modelyard launch`, every line is still written once.

    Raises:
        RunError: if a process of that role is running.
    """
    from modelyard.system.console import VisibleFormatter

    file = folder / f"{role}.log"
    with explain(folder, "write the log in"):
        folder.mkdir(parents=True, exist_ok=True)
    with hold_pid_file(folder / f"{role}{SUFFIX}"):
        with explain(folder, "write the log in"):
            handler = _LogFile(file, encoding="utf-8")
        handler.setFormatter(VisibleFormatter(_LOG_FORMAT))
        replaced = [other for other in log.handlers if other.name == "terminal"] if _is_standard_error(file) else []
        for other in replaced:
            log.removeHandler(other)
        level, recorder = log.level, _Recorder(handler, log.level)
        log.filters.insert(0, recorder)  # before that of a run around this one, which may stop a record
        log.setLevel(logging.DEBUG)
        faults.announce()
        try:
            yield
        except Exception as error:
            if not replaced:  # else the error itself goes there
                _record_error(handler, error)
            raise
        finally:
            log.removeFilter(recorder)
            log.setLevel(level)
            handler.close()
            for other in replaced:
                log.addHandler(other)


def _record_error(handler: logging.Handler, error: Exception) -> None:
    """Writes why the process ends into its log file only: the terminal shows the error itself."""
    known = isinstance(error, UserError)
    text, trace = (
        (str(error), None) if known else (f"{type(error).__name__}: {error}", (type(error), error, error.__traceback__))
    )
    handler.handle(logging.LogRecord(log.name, logging.ERROR, __file__, 0, text, None, trace))


class _Recorder(logging.Filter):
    """Writes every record to a file. Other handlers get those of the level that the program has set, and no others.

    The file needs all records, so the logger lets all pass meanwhile.

    Args:
        handler: writes to the file.
        level: the level of the logger before; 0 is that of its parents.
    """

    def __init__(self, handler: logging.Handler, level: int) -> None:
        super().__init__()
        self.handler, self._level = handler, level

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether other handlers get the record."""
        self.handler.handle(record)
        above = log.parent
        level = self._level or (above.getEffectiveLevel() if above is not None else 0)
        return record.levelno >= level


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Ignores a full disk, so that it does not hide the error that is logged."""

    def close(self) -> None:
        """Closes the file; what a full disk does not take is lost."""
        with contextlib.suppress(OSError):
            super().close()


def _is_standard_error(file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(2), file.stat())
    except OSError:
        return False


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Calls ``handler`` for SIGINT and SIGTERM while the block runs. Python allows it in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores the global random state of Python and NumPy after the block, which seeds it to make a model."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
