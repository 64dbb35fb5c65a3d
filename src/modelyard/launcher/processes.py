"""The processes of a cluster on this machine, each with its log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from modelyard.system.files import explain

_CHILD = Path(__file__).with_name("child.py")
_KEPT_LINES, _MOST_BYTES = 20, 1 << 18
_DEBUG = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} DEBUG ")  # for whoever opens the file
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Spec:
    """A process to start.

    Args:
        name: its name, which is also that of its log.
        words: the command.
        environ: what is different in its environment.
        cores: the cores it may run on; none: all.
        leads: it decides for all.
        shows_result: its standard output is shown.
        is_awaited: its work is done only when it has ended well.
        restarts_alone: when it crashes, the others go on without it until it is back.
    """

    name: str
    words: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    leads: bool = False
    shows_result: bool = False
    is_awaited: bool = False
    restarts_alone: bool = False


class Tail:
    """What is added to a log from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._file = open(path, "rb")  # noqa: SIM115 - open while the process lives
        self._file.seek(0, os.SEEK_END)
        self._rest = b""

    def read(self) -> list[str]:
        """The new lines."""
        lines: list[str] = []
        while data := self._file.read(_MOST_BYTES):
            *whole, self._rest = (self._rest + data).split(b"\n")
            lines += [clean(line) for line in whole if not _DEBUG.match(line)]
            if len(self._rest) > _MOST_BYTES:
                lines.append(clean(self._rest))
                self._rest = b""
        self.last.extend(line for line in lines if line.strip())
        return lines

    def close(self) -> list[str]:
        """The last new lines, an unfinished one too."""
        if self._file.closed:
            return []
        lines = self.read()
        if self._rest:
            lines.append(clean(self._rest))
            self.last.append(lines[-1])
        self._file.close()
        return lines


def clean(line: bytes) -> str:
    """A line of a log as text that does nothing to a terminal; of what overwrites itself, the end."""
    text = line.decode("utf-8", "replace").rstrip("\r\n").rpartition("\r")[2]
    return _CONTROL.sub("", text.expandtabs())


class Process:
    """A process that was started.

    Args:
        spec: what to start.
        logs: the folder of the logs.
        ended: is called with this object when it has ended, from another thread.
        output: where the standard output of the lead goes; None: where ours goes.
    """

    def __init__(
        self, spec: Spec, logs: Path, ended: Callable[[Process], None], output: IO[bytes] | None = None
    ) -> None:
        self.spec = spec
        self.log = logs / f"{spec.name}.log"
        self.status: int | None = None
        words = [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), ",".join(map(str, spec.cores)), *spec.words]
        with explain(self.log, "write"):
            logs.mkdir(parents=True, exist_ok=True)
            with open(self.log, "ab") as file:
                self._tail = Tail(self.log)
                self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=output if spec.shows_result else file,
                    stderr=file,
                    env={**os.environ, **spec.environ},
                    start_new_session=True,  # a terminal's Ctrl-C is for the launcher only
                )
        self._waiter = threading.Thread(target=self._wait, args=(ended,), daemon=True, name=f"wait for {spec.name}")
        self._waiter.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether `reap` was not called yet."""
        return self.status is None

    def _wait(self, ended: Callable[[Process], None]) -> None:
        # Not reaped here: as long as it is not, its pid is nobody else's and may be signalled.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        ended(self)

    def signal(self, number: signal.Signals) -> None:
        """Signals it; SIGKILL is for whatever it has started, too."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)

    @property
    def last_lines(self) -> list[str]:
        """The end of its log, as far as it was read."""
        return list(self._tail.last)

    @property
    def state(self) -> str:
        """What it does, or how it ended."""
        return "running" if self.status is None else "done" if self.status == 0 else how_it_ended(self.status)

    def read_log(self) -> list[str]:
        """New lines of its log."""
        return self._tail.read() if self.is_alive else self._tail.close()

    def reap(self) -> int:
        """How it ended: its exit status, or minus a signal. What it left behind is killed."""
        if self.status is None:
            self._waiter.join()
            self.signal(signal.SIGKILL)
            self.status = self._process.wait()
        return self.status


def how_it_ended(status: int) -> str:
    """``status 1`` or ``killed by SIGKILL``."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


@dataclass(frozen=True)
class Failure:
    """A process that ended badly: how, and with which last lines."""

    name: str
    status: int
    log: Path
    lines: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """As a shell gives it."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def how(self) -> str:
        """In words."""
        return f"{self.name} {'ended with' if self.status >= 0 else 'was'} {how_it_ended(self.status)}"

    def __str__(self) -> str:
        if not self.lines:
            return f"{self.how}, and wrote nothing to {self.log}."
        return "\n".join([f"{self.how}. The end of {self.log}:", *(f"  {line}" for line in self.lines)])
