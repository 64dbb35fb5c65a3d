"""Processes on this machine: the cores, GPUs and ports that each gets, and their logs."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from modelyard.system.activity import PIPE, Activity, read_reports
from modelyard.system.files import explain
from modelyard.system.machine import gpus

HOST = "127.0.0.1"
VISIBLE_GPUS, NO_GPU = "CUDA_VISIBLE_DEVICES", "-1"
_CHILD = Path(__file__).with_name("child.py")
_POLL_SECONDS = 0.05
_KEPT_LINES, _MAX_BYTES = 20, 1 << 18
_DEBUG = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} DEBUG ")  # only for those who open the file
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


# -- cores, GPUs and ports ------------------------------------------------------------------------------------------


def bindable_cores() -> list[int]:
    """Returns the cores that this process may run on; none where processes can't be bound to cores."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def available_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    listed = environ.get(VISIBLE_GPUS)
    if listed is None:
        return [str(number) for number in range(len(gpus()))]
    names = [name.strip() for name in listed.split(",")]
    # CUDA ignores everything after an invalid one.
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def divide_cores(cores: list[int], processes: int) -> list[list[int]]:
    """Returns the cores of each process: neighbours, as evenly as possible; scarce cores are shared."""
    if len(cores) < processes:
        return [[cores[i % len(cores)]] for i in range(processes)]
    ends = [len(cores) * i // processes for i in range(processes + 1)]
    return [cores[begin:end] for begin, end in itertools.pairwise(ends)]


def divide_gpus(found: list[str], processes: int) -> tuple[list[list[str]], list[str]]:
    """Returns the GPUs of each process, the same number for all, and those left over."""
    each = len(found) // processes
    return [found[i * each : (i + 1) * each] for i in range(processes)], found[each * processes :]


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[str]]:
    """Yields host:port of free ports of this machine, which are reserved while the block runs.

    The sockets are bound, but do not listen, and have both options for sharing an address. A server that uses either,
    as TensorFlow's does, can listen there, while the system gives the ports to no other process.
    """
    with contextlib.ExitStack() as sockets:
        addresses = []
        for _ in range(count):
            reserved = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind((HOST, 0))
            addresses.append(f"{HOST}:{reserved.getsockname()[1]}")
        yield addresses


# -- processes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start.

    Args:
        name: its name, which is also that of its log.
        words: the command.
        environ: environment variables that differ from this process's.
        cores: the cores that it may run on; empty for all.
        is_coordinator: whether it coordinates the others.
        shows_result: whether its standard output is shown.
        is_awaited: whether the run is done only when it has exited with status 0.
        restarts_alone: whether it is restarted alone after a crash, while the others continue.
    """

    name: str
    words: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict, repr=False)  # with the secret
    cores: tuple[int, ...] = ()
    is_coordinator: bool = False
    shows_result: bool = False
    is_awaited: bool = False
    restarts_alone: bool = False


class Tail:
    """Reads the lines that are appended to a log from now on."""

    def __init__(self, path: Path) -> None:
        self.last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._file = open(path, "rb")  # noqa: SIM115 - open while the process lives
        self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def read(self, final: bool = False) -> list[str]:
        """Returns the new lines. The last time, it includes an incomplete line and closes the log."""
        lines: list[bytes] = []
        while not self._file.closed and (data := self._file.read(_MAX_BYTES)):
            *complete, self._rest = (self._rest + data).split(b"\n")
            lines += [line for line in complete if not _DEBUG.match(line)]
            if len(self._rest) > _MAX_BYTES:
                lines.append(self._rest)
                self._rest = b""
        if final:
            self._file.close()
            lines += [self._rest] if self._rest else []
            self._rest = b""
        texts = [printable(line) for line in lines]
        self.last.extend(text for text in texts if text.strip())
        return texts


def printable(line: bytes) -> str:
    """Returns a line of a log without control characters; of a line that overwrites itself, the end."""
    text = line.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
    return _CONTROL.sub("", text.expandtabs())


class Process:
    """A process that was started.

    ``ended`` is called with this object, from another thread, when the process has ended. If the spec shows its
    standard output, that goes to ``output``, by default to that of this process. It gets the files ``pass_fds``.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        logs: Path,
        ended: Callable[[Process], None],
        output: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.spec = spec
        self.log = logs / f"{spec.name}.log"
        self.status: int | None = None
        self.activity = Activity()
        """The last activity that it reported."""
        self.silent: list[str] = []
        """Processes that do not answer, as this one has reported."""
        self.why_killed = ""
        """Why this launcher has killed it, if it has."""
        words = [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), ",".join(map(str, spec.cores)), *spec.words]
        with explain(self.log, "write"):
            logs.mkdir(parents=True, exist_ok=True)
            with open(self.log, "ab") as file:
                self._tail = Tail(self.log)
                self._reports, theirs = os.pipe()
                try:
                    os.set_blocking(self._reports, False)
                    self._process = subprocess.Popen(
                        words,
                        stdin=subprocess.DEVNULL,
                        stdout=output if spec.shows_result else file,
                        stderr=file,
                        env={**os.environ, **spec.environ, PIPE: str(theirs)},
                        pass_fds=[theirs, *pass_fds],
                        start_new_session=True,  # a terminal's Ctrl-C is for the launcher only
                    )
                except BaseException:
                    os.close(self._reports)
                    raise
                finally:
                    os.close(theirs)
        self._incomplete = b""
        self.pid = self._process.pid
        self._waiter = threading.Thread(target=self._wait, args=(ended,), daemon=True, name=f"wait for {spec.name}")
        self._waiter.start()

    why_lost = ""
    """This machine is not lost."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def is_alive(self) -> bool:
        """Whether `reap` was not called yet."""
        return self.status is None

    def _wait(self, ended: Callable[[Process], None]) -> None:
        # Not reaped here: until it is, no other process gets its pid, and it can be signalled.
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:  # macOS before Python 3.13
            with contextlib.suppress(psutil.Error):
                while psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
                    time.sleep(_POLL_SECONDS)
        ended(self)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; SIGKILL goes to its children, too."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)

    def kill(self, why: str) -> None:
        """Kills it, and records why."""
        if self.is_alive:
            self.why_killed = why
            self.signal(signal.SIGKILL)

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its log that were read."""
        return list(self._tail.last)

    def read_log(self) -> list[str]:
        """Returns the new lines of its log, and reads what it has reported."""
        self._read_reports()
        return self._tail.read(final=not self.is_alive)

    def _read_reports(self) -> None:
        if self._reports < 0:
            return
        with contextlib.suppress(BlockingIOError):  # nothing new
            while data := os.read(self._reports, _MAX_BYTES):
                *lines, self._incomplete = (self._incomplete[-_MAX_BYTES:] + data).split(b"\n")
                activity, silent = read_reports(lines)
                self.activity = activity or self.activity
                self.silent += silent
        if not self.is_alive:
            os.close(self._reports)
            self._reports = -1

    def reap(self) -> int:
        """Waits for its end and kills its children; returns the exit status, or minus a signal."""
        if self.status is None:
            self._waiter.join()
            self.signal(signal.SIGKILL)
            self.status = self._process.wait()
        return self.status


def describe_status(status: int) -> str:
    """Returns ``status 1`` or ``killed by SIGKILL``."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
