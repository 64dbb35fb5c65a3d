"""Pid files that can be trusted: the process holds a lock on its file while it lives.

The first line is the bare pid; then the host and the pid namespace, since a pid means nothing elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from modelyard.errors import RunError
from modelyard.system.files import explain
from modelyard.system.machine import pid_space

SUFFIX = ".pid"
_LOCK_SECONDS = 0.5
"""Someone who only looks holds the lock for a moment."""


@dataclass(frozen=True)
class Holder:
    """A living process that holds a pid file.

    Args:
        name: the name of the file, such as worker-0.
        pid: its process id, on its own host.
        host: where it runs.
        space: within which its pid means that process; containers have their own.
        path: the file.
    """

    name: str
    pid: int
    host: str
    space: str
    path: Path

    @property
    def is_here(self) -> bool:
        """Whether its pid means that process here."""
        return (self.host, self.space) == (socket.gethostname(), pid_space())

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid}{'' if self.is_here else f' on {self.host}'})"

    def signal(self, number: signal.Signals) -> bool:
        """Signals the process, if it still is the one that holds the file; returns whether it did."""
        if not self.is_here:
            return False
        try:
            handle = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        except OSError:
            return False
        try:
            # It holds the file now, and the handle is older than that: the handle can't be of a later process.
            if read_holder(self.path) != self or not _has_open(self.pid, self.path):
                return False
            if handle >= 0:
                signal.pidfd_send_signal(handle, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        finally:
            if handle >= 0:
                os.close(handle)
        return True


@contextlib.contextmanager
def hold_pid_file(path: Path) -> Iterator[None]:
    """While the block runs, ``path`` holds the id of this process, locked.

    Raises:
        RunError: if another living process holds it.
    """
    with explain(path, "write"):
        file = _open_locked(path)
    try:
        with explain(path, "write"):
            # Past the buffer, which a full disk would make fail once more when the file is closed.
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n{socket.gethostname()}\n{pid_space()}\n".encode())
        yield
    finally:
        # Removed before it is let go, and only if it still is ours: the folder may have been made anew.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                path.unlink()
        file.close()


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
        except OSError:  # no locks on this file system: nobody can be told apart from the dead, so nobody is signalled
            return file


def _in_use(path: Path) -> str:
    holder = read_holder(path)
    who = f"process {holder.pid} on {holder.host}" if holder else "another process"
    run = path.parent.parent
    return f"{path.stem} of {run} is running already: {who}. Wait for it, or stop it: modelyard stop {run}"


def read_holder(path: Path) -> Holder | None:
    """The living process that holds ``path``; None if there is none, or a dead one left the file behind."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                lines = file.read(1000).splitlines()
    except OSError:
        return None
    if len(lines) < 3 or not lines[0].isdecimal() or int(lines[0]) < 2:
        return None
    return Holder(path.stem, int(lines[0]), lines[1], lines[2], path)


def holders(folder: Path) -> list[Holder]:
    """The living processes with pid files in ``folder``, by name."""
    found = (read_holder(path) for path in sorted(folder.glob(f"*{SUFFIX}")))
    return [holder for holder in found if holder is not None]


def _has_open(pid: int, path: Path) -> bool:
    """Whether the process has the file open: a new holder may not yet have written over the pid of a dead one."""
    try:
        file = path.stat()
        handles = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return not Path("/proc/self/fd").is_dir()
    for handle in handles:
        with contextlib.suppress(OSError):
            if os.path.samestat(handle.stat(), file):
                return True
    return False
