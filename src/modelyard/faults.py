"""Faults on purpose: kills, hangs, full disks, failing reads, slow storage, lost networks.

``MODELYARD_FAULTS="kill@step=100, eio@read=0.01"`` turns them on; docs/failures.md has the table. Without the variable,
`reach` does nothing. Which of many reads fail is a hash of a seed, a count and the number of the start, so a campaign
can be repeated and a restart meets other errors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelyard.errors import ConfigError, Problem, unknown

VARIABLE = "MODELYARD_FAULTS"
SUFFIX = ".faults"
KILL, CRASH, HANG, SLOW, ENOSPC, EIO, NETWORK = "kill", "crash", "hang", "slow", "enospc", "eio", "network"
STEP, SAVE, FILE, READ, EVALUATE = "step", "save", "file", "read", "evaluate"
UPLOAD, DOWNLOAD, JOIN, MESSAGE, TIME = "upload", "download", "join", "message", "time"

_CALLS = (STEP, SAVE, FILE, READ, EVALUATE, UPLOAD, DOWNLOAD, JOIN, MESSAGE)
_PLACES = {
    KILL: (*_CALLS, TIME),
    HANG: (*_CALLS, TIME),
    CRASH: _CALLS,
    SLOW: _CALLS,
    ENOSPC: (SAVE, FILE, DOWNLOAD),
    EIO: (SAVE, FILE, READ),
    NETWORK: (UPLOAD, DOWNLOAD, JOIN, MESSAGE),
}
"""The places where each fault can happen."""
_FINAL = (KILL, CRASH, HANG)
_ERRORS = {ENOSPC: errno.ENOSPC, EIO: errno.EIO, NETWORK: errno.ECONNRESET}
_ROLES = ("chief", "worker", "ps", "evaluator")
_SUPERVISORS = ("launch", "matrix")
"""Processes that only start others. A fault happens there if they are named."""
_ENTRY = re.compile(r"([^@=:]*)@([^@=:]*)=([^@=:]*)((?::[^:]*)*)")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(rf"(\d{{1,6}}(?:\.\d{{1,6}})?) ?({'|'.join(_SECONDS)})")
_NUMBER, _CHANCE = re.compile(r"\d{1,12}"), re.compile(r"0?\.\d{1,12}|1\.0+")
_PROCESS = re.compile(rf"(?:{'|'.join((*_ROLES, *_SUPERVISORS))})(?:-\d{{1,6}})?")
_FORM = "A fault is FAULT@PLACE=WHEN, such as kill@step=100 or eio@read=0.01:worker-1."
_SCANNED = 1000
_STARTED = "started "
log = logging.getLogger("modelyard")


class InjectedCrashError(RuntimeError):
    """A crash on purpose."""


@dataclass(frozen=True)
class Fault:
    """One entry of the variable.

    Args:
        text: as it is written.
        kind: kill, crash, hang, slow, enospc, eio or network.
        place: where it happens.
        number: at which count of the place; at which step.
        chance: or with which probability at every count.
        seconds: how long `slow` lasts; the time of a fault that waits for one.
        always: again at every start of the process; else once per run.
        seed: of a probability.
        processes: names or roles of the processes; empty for all that work on the run.
        run: the name of the run folder, or None for any.
    """

    text: str
    kind: str
    place: str
    number: int | None = None
    chance: float | None = None
    seconds: float = 0.0
    always: bool = False
    seed: int = 0
    processes: tuple[str, ...] = ()
    run: str | None = None

    @property
    def happens_once(self) -> bool:
        """Whether it happens once per run at a count; errors with a probability happen again after a restart."""
        return not self.always and self.kind != SLOW and (self.chance is None or self.kind in _FINAL)

    def hits(self, count: int, process: str, start: int) -> bool:
        """Returns whether it happens at this count of its place, in this start of the process."""
        if self.chance is None:
            return self.number is None or self.number == count
        text = f"{self.seed}/{self.text}/{process}/{count}"
        if not self.happens_once:  # what does is remembered: each restart gets farther
            text += f"/{start}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self.chance * 2.0**64


class _Plan:
    """The faults of one process.

    Args:
        faults: what the variable says.
        process: the name of the process, such as worker-1; empty outside of a run.
        folder: the folder of the run's logs, where a process writes down what has happened; None outside of a run.
    """

    def __init__(self, faults: list[Fault], process: str = "", folder: Path | None = None) -> None:
        self.every = faults
        self.mine = [fault for fault in faults if _concerns(fault, process, folder)]
        self.process = process
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._memory = memory(folder, process) if folder is not None else None
        self._done: set[str] = set()
        if self._memory is not None:
            with contextlib.suppress(OSError):
                self._done = set(self._memory.read_text(encoding="utf-8").splitlines())
        self._start = 1 + sum(line.startswith(_STARTED) for line in self._done)
        if any(fault.chance is not None for fault in self.mine):
            self._is_first(f"{_STARTED}{self._start}")

    def reach(self, place: str) -> None:
        with self._lock:
            self._counts[place] += 1
            count = self._counts[place]
        for fault in self.mine:
            if fault.place == place and fault.hits(count, self.process, self._start):
                self._inject(fault, count)

    def trained(self, step: int, count: int) -> None:
        for fault in self.mine:
            if fault.place == STEP:
                for at in range(step + 1, step + count + 1):
                    if fault.hits(at, self.process, self._start):
                        self._inject(fault, at)

    def next_step(self, step: int) -> int | None:
        found = []
        for fault in self.every:  # the coordinator decides where the chunks of all processes end
            if fault.place == STEP and fault.number is not None and fault.number > step:
                found.append(fault.number)
            elif fault.place == STEP and fault.number is None:
                ahead = range(step + 1, step + _SCANNED)
                found.append(next((at for at in ahead if fault.hits(at, self.process, self._start)), step + _SCANNED))
        return min(found, default=None)

    def timers(self) -> list[threading.Timer]:
        waiting = [fault for fault in self.mine if fault.place == TIME]
        return [threading.Timer(fault.seconds, self._inject, (fault, round(fault.seconds))) for fault in waiting]

    def _inject(self, fault: Fault, count: int) -> None:
        if fault.happens_once and not self._is_first(f"{fault.text} {count}"):
            return
        first = self._is_first(f"said {fault.text}", keep=False)
        level = logging.WARNING if first or fault.kind != SLOW else logging.DEBUG
        log.log(level, "FAULT INJECTED: %s, at %s %s", fault.text, fault.place, count)
        if fault.kind == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == HANG:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == CRASH:
            raise InjectedCrashError(f"{fault.text} in {VARIABLE}")
        elif fault.kind == SLOW:
            time.sleep(fault.seconds)
        else:
            number = _ERRORS[fault.kind]
            raise OSError(number, f"{os.strerror(number)} ({fault.text} in {VARIABLE})")

    def _is_first(self, key: str, keep: bool = True) -> bool:
        """Returns whether it has not happened in this run before, and writes it down where a kill can't undo it."""
        with self._lock:
            if key in self._done:
                return False
            self._done.add(key)
            if keep and self._memory is not None:
                with contextlib.suppress(OSError):
                    self._memory.parent.mkdir(parents=True, exist_ok=True)
                    with open(self._memory, "a", encoding="utf-8") as file:
                        file.write(f"{key}\n")
            return True


_plan: _Plan | None = None


def reach(place: str) -> None:
    """Injects what the variable has for this place. Called where the place is reached, before anything is done there.

    Raises:
        OSError: a full disk, a failed read, a lost connection.
        InjectedCrashError: a crash.
    """
    if _plan is not None:
        _plan.reach(place)


def trained(step: int, count: int) -> None:
    """Injects the faults of ``count`` steps after ``step``, which have just been trained and are not saved yet."""
    if _plan is not None:
        _plan.trained(step, count)


def happen_at(place: str) -> bool:
    """Returns whether this process has faults at a place."""
    return _plan is not None and any(fault.place == place for fault in _plan.mine)


def next_step(step: int) -> int | None:
    """Returns the first step after ``step`` with a fault, at which a chunk has to end; None if there is none."""
    return None if _plan is None else _plan.next_step(step)


def load() -> None:
    """Reads the variable. A command calls it when it starts.

    Raises:
        ConfigError: with all mistakes in it.
    """
    global _plan
    faults = parse(os.environ.get(VARIABLE, ""))
    _plan = _Plan(faults) if faults else None


@contextlib.contextmanager
def injected(folder: Path, process: str) -> Iterator[None]:
    """Injects the faults of a process of a run while the block runs.

    Args:
        folder: the folder of the run's logs.
        process: the name of the process.

    Raises:
        ConfigError: with all mistakes in the variable.
    """
    global _plan
    faults, before = parse(os.environ.get(VARIABLE, "")), _plan
    _plan = _Plan(faults, process, folder) if faults else None
    timers = [] if _plan is None else _plan.timers()
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        _plan = before


def announce() -> None:
    """Logs that faults are on, if they are."""
    if _plan is not None:
        log.warning("FAULTS ARE ON: %s; this process is %s", ", ".join(f.text for f in _plan.every), _plan.process)


def memory(folder: Path, process: str) -> Path:
    """Returns the file in which a process writes down which faults have happened in this run."""
    return folder / f".{process}{SUFFIX}"


# -- the variable -----------------------------------------------------------------------------------------------------


def parse(text: str) -> list[Fault]:
    """Returns the faults in ``text``, separated by commas.

    Raises:
        ConfigError: with all mistakes.
    """
    faults: list[Fault] = []
    problems = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        try:
            fault = _fault(entry)
            if any(other.text == fault.text for other in faults):
                raise ValueError("is named twice.")
            faults.append(fault)
        except ValueError as error:
            shown = entry if entry.isprintable() and len(entry) <= 80 else f"{entry[:80]!r}"
            problems.append(Problem(VARIABLE, shown, str(error)))
    if problems:
        mistakes = ConfigError(problems)
        mistakes.heading = f"{len(problems)} mistake{'s' if len(problems) > 1 else ''} in the environment:"
        mistakes.add_hint(f"  {_FORM}")
        raise mistakes
    return faults


def _fault(entry: str) -> Fault:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError("is not a fault.")
    kind, place, when = (part.strip() for part in match.group(1, 2, 3))
    arguments = [part.strip() for part in match[4].split(":")[1:]]
    if kind not in _PLACES:
        raise ValueError(unknown("fault", kind, _PLACES))
    if place in _ROLES:  # hang@worker=1: with its first step
        if place in ("ps", "evaluator") or not _NUMBER.fullmatch(when):
            raise ValueError(f"has no steps. Give a time instead: {kind}@time=30s:{place}-0.")
        arguments, place, when = [place if place == "chief" else f"{place}-{int(when)}", *arguments], STEP, "1"
    if place not in _PLACES[kind]:
        known = any(place in places for places in _PLACES.values())
        problem = f"there is no {kind} at {place}." if known else unknown("place", place, _PLACES[kind])
        raise ValueError(f"{problem} Places of {kind}: {', '.join(_PLACES[kind])}.")
    values = _read_when(kind, place, when)
    processes: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if argument == "always":
            values["always"] = True
        elif name == "seed" and _NUMBER.fullmatch(value):
            values["seed"] = int(value)
        elif name == "run" and value:
            values["run"] = value
        elif _PROCESS.fullmatch(argument):
            processes.append(argument)
        else:
            raise ValueError(
                f"{argument!r} must be always, seed=NUMBER, run=NAME, or a process: {', '.join(_ROLES)}, one of them "
                f"such as worker-1, or {' or '.join(_SUPERVISORS)}."
            )
    return Fault(re.sub(r"\s+", "", entry), kind, place, processes=tuple(processes), **values)  # type: ignore[arg-type]


def _read_when(kind: str, place: str, when: str) -> dict[str, int | float | str | bool]:
    """Returns the fields of a `Fault` that say when it happens."""
    if kind == SLOW or place == TIME:
        match = _DURATION.fullmatch(when)
        if match is None:
            raise ValueError(f"{when!r} must be a time such as 5s, 200ms or 2min.")
        return {"seconds": float(match[1]) * _SECONDS[match[2]]}
    if _NUMBER.fullmatch(when) and int(when) > 0:
        return {"number": int(when)}
    if _CHANCE.fullmatch(when) and float(when) > 0:
        return {"chance": float(when)}
    what = "a step" if place == STEP else f"a count (the second {place}: 2)"
    raise ValueError(f"{when!r} must be {what} from 1 on, or a probability such as 0.01.")


def _concerns(fault: Fault, process: str, folder: Path | None) -> bool:
    if folder is None and fault.happens_once:  # without a memory, it would happen at every start
        return False
    if fault.run is not None and (folder is None or folder.parent.name != fault.run):
        return False
    if fault.processes:
        return process in fault.processes or process.partition("-")[0] in fault.processes
    return process not in _SUPERVISORS
