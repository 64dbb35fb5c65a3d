"""Runs the cells of a matrix: each in a process of its own, some side by side. None stops the others."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from modelyard.comparison.folder import MatrixFolder, is_finished
from modelyard.comparison.plan import Cell
from modelyard.errors import Interrupted
from modelyard.launcher.command import TRAIN_AND_EVALUATE
from modelyard.launcher.processes import Process, Spec, how_it_ended
from modelyard.launcher.shares import NO_GPU, VISIBLE, deal_gpus, found_cores, found_gpus
from modelyard.run.directory import is_running, run_options
from modelyard.system.signals import signals_go_to

WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"
_SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
"""Processes that share a GPU must not take all of its memory."""
_LOOK_SECONDS = 0.5
_LET_GO_SECONDS = 20.0
"""How long to wait for processes of a matrix that was killed: they die with it, but not in the same moment."""
log = logging.getLogger("modelyard")


@dataclass
class State:
    """How it stands with a cell.

    Args:
        cell: which one.
        state: waiting, running, done, failed or stopped.
        reason: why it failed.
        was_done: it was finished before this start.
        began: when its process was started, on the monotonic clock.
        seconds: how long its process ran.
    """

    cell: Cell
    state: str = WAITING
    reason: str = ""
    was_done: bool = False
    began: float = 0.0
    seconds: float = 0.0


class View(Protocol):
    """Shows people how it goes."""

    def began(self, states: Sequence[State]) -> None:
        """Nothing has been started yet; some may be done from before."""

    def changed(self, state: State) -> None:
        """A cell has another state."""

    def show(self, states: Sequence[State]) -> None:
        """Time has passed."""


@dataclass(frozen=True)
class Slot:
    """Room for one process: its share of the machine."""

    environ: dict[str, str]
    threads: int


def slots_of(jobs: int, environ: Mapping[str, str], cores: int) -> list[Slot]:
    """The shares of ``jobs`` processes: cores as threads, GPUs dealt out; where there are fewer, they are shared."""
    gpus = found_gpus(environ)
    threads = max(1, cores // jobs)
    if not gpus:
        hidden = {VISIBLE: NO_GPU} if VISIBLE in environ else {}
        return [Slot(hidden, threads)] * jobs
    if len(gpus) >= jobs:
        dealt, _ = deal_gpus(gpus, jobs)
        return [Slot({VISIBLE: ",".join(mine)}, threads) for mine in dealt]
    sharing = {name: value for name, value in _SHARING.items() if name not in environ}
    return [Slot({VISIBLE: gpus[number % len(gpus)], **sharing}, threads) for number in range(jobs)]


class Work:
    """The cells of a matrix on their way.

    Args:
        folder: where they are.
        cells: in the order in which they are to run.
        slots: one for each process that may run at a time.
        program: what understands the commands of Modelyard.
        view: shows how it goes.
    """

    def __init__(
        self, folder: MatrixFolder, cells: Sequence[Cell], slots: Sequence[Slot], program: Sequence[str], view: View
    ) -> None:
        self.folder = folder
        self.states = {cell.name: State(cell) for cell in cells}
        self._free = list(reversed(slots))
        self._program = tuple(program)
        self._view = view
        self._running: dict[Process, tuple[State, Slot]] = {}
        self._ended: queue.SimpleQueue[Process] = queue.SimpleQueue()
        self._signals: list[int] = []
        self._failures = folder.failures()

    def run(self) -> list[State]:
        """Runs what is not finished. A cell that fails is noted, and does not stop the others.

        Raises:
            Interrupted: after SIGINT or SIGTERM, when all have saved and ended; not if none was left to stop.
        """
        for state in self.states.values():
            if self._is_finished(state.cell):
                state.state, state.was_done = DONE, True
        waiting = [state for state in self.states.values() if state.state == WAITING]
        if len(waiting) < len(self.states):
            log.info("%d of %d cells are done already", len(self.states) - len(waiting), len(self.states))
        self._view.began(list(self.states.values()))
        with signals_go_to(lambda number, frame: self._signals.append(number)):
            try:
                self._loop(waiting)
            finally:
                for process in self._running:  # only if something is wrong here: nobody is left behind
                    process.signal(signal.SIGKILL)
        states = [state.state for state in self.states.values()]
        if self._signals and {WAITING, STOPPED} & set(states):
            raise Interrupted(self._signals[0], states.count(DONE), str(self.folder.path))
        return list(self.states.values())

    def _loop(self, waiting: list[State]) -> None:
        heard = 0
        while self._running or (waiting and not self._signals):
            while waiting and self._free and not self._signals:
                self._start(waiting.pop(0))
            if len(self._signals) > heard:
                self._stop(final=heard > 0)
                heard = len(self._signals)
            with contextlib.suppress(queue.Empty):
                self._conclude(self._ended.get(timeout=_LOOK_SECONDS))
            for process in self._running:
                process.read_log()
            self._view.show(list(self.states.values()))

    def _stop(self, final: bool) -> None:
        number = signal.SIGKILL if final else signal.SIGTERM
        for process in self._running:
            process.signal(number)
        if self._running and not final:
            log.info("stopping; cells that save and end: %d; once more to kill them", len(self._running))

    def _start(self, state: State) -> None:
        directory = self.folder.run(state.cell.name)
        deadline = time.monotonic() + _LET_GO_SECONDS
        while is_running(directory):
            if self._signals:
                return
            if time.monotonic() > deadline:
                self._fail(state, "another process works in its run folder.")
                return
            time.sleep(0.1)
        slot = self._free.pop()
        spec = Spec(state.cell.name, self._words(state.cell, slot), slot.environ)
        state.state, state.began = RUNNING, time.monotonic()
        self._running[Process(spec, self.folder.logs, self._ended.put)] = (state, slot)
        self._view.changed(state)

    def _words(self, cell: Cell, slot: Slot) -> tuple[str, ...]:
        directory = self.folder.run(cell.name)
        words = ("--config_file", str(self.folder.config(cell.name)), "--model_dir", str(directory.path))
        threads: Any = cell.config.threads or slot.threads
        if directory.exists():  # it goes on with as many as it began with: they decide the last bits
            threads = run_options(directory).get("threads") or threads
        return (*self._program, TRAIN_AND_EVALUATE, *words, "--threads", str(threads))

    def _is_finished(self, cell: Cell) -> bool:
        return is_finished(self.folder.run(cell.name), cell.config.test_at_end, cell.config.export_at_end)

    def _conclude(self, process: Process) -> None:
        state, slot = self._running.pop(process)
        status = process.reap()
        process.read_log()
        self._free.append(slot)
        state.seconds = time.monotonic() - state.began
        cell = state.cell
        # A stop that comes while a run ends changes its status, not that it is finished.
        if (status == 0 or self._signals) and self._is_finished(cell):
            state.state = DONE
            if self._failures.pop(cell.name, None) is not None:
                self.folder.write_failures(self._failures)
            self._view.changed(state)
        elif self._signals:
            state.state = STOPPED
            self._view.changed(state)
        else:
            self._fail(state, reason_of(status, process.last_lines))

    def _fail(self, state: State, reason: str) -> None:
        state.state, state.reason = FAILED, reason
        self._failures[state.cell.name] = reason
        self.folder.write_failures(self._failures)
        self._view.changed(state)


def reason_of(status: int, lines: Sequence[str]) -> str:
    """Why a process failed, in a line: its own words, or how it ended."""
    if status < 0:
        hint = " – perhaps out of memory" if -status == signal.SIGKILL else ""
        return f"{how_it_ended(status)}{hint}"
    for number, line in reversed(list(enumerate(lines))):
        if line.startswith("error: "):
            text = line.removeprefix("error: ")
            more = lines[number + 1].strip() if text.endswith(":") and number + 1 < len(lines) else ""
            return f"{text} {more}".strip()[:500]
    for line in reversed(lines):
        if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line):
            return line[:500]
    return f"ended with {how_it_ended(status)}" if status else "ended before it was finished"


def cores_here() -> int:
    """How many cores this process may use."""
    return len(found_cores()) or os.cpu_count() or 1
