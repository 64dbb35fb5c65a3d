"""Runs the cells of a matrix, each in its own process, some in parallel, and shows their progress.

A cell that fails does not stop the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from modelyard.comparison.matrix_folder import MatrixFolder, is_finished
from modelyard.comparison.plan import Cell
from modelyard.errors import Interrupted
from modelyard.launcher.command import TRAIN_AND_EVALUATE
from modelyard.launcher.processes import (
    NO_GPU,
    VISIBLE_GPUS,
    Process,
    ProcessSpec,
    available_gpus,
    describe_status,
    divide_gpus,
)
from modelyard.run.directory import is_running, run_options
from modelyard.system.console import console
from modelyard.system.process import handle_signals

WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"
_GPU_SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
"""Processes that share a GPU must not reserve all of its memory."""
_POLL_SECONDS = 0.5
_RELEASE_SECONDS = 20.0
"""How long to wait for processes of a killed matrix: they die with it, but not in the same moment."""
_STYLES = {RUNNING: "green", DONE: "bold green", FAILED: "red", WAITING: "dim"}
_TAIL_BYTES = 1 << 14
_MAX_ROWS = 40
log = logging.getLogger("modelyard")


@dataclass
class CellState:
    """The state of a cell.

    Args:
        cell: the cell.
        state: waiting, running, done, failed or stopped.
        reason: why it failed.
        was_done: whether it was finished before this start.
        began: when its process was started, on the monotonic clock.
        seconds: how long its process ran.
    """

    cell: Cell
    state: str = WAITING
    reason: str = ""
    was_done: bool = False
    began: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Slot:
    """A part of the machine for one process: its environment variables and its number of threads."""

    environ: dict[str, str]
    threads: int


def make_slots(jobs: int, environ: Mapping[str, str], cores: int) -> list[Slot]:
    """Divides cores and GPUs between ``jobs`` processes; if there are fewer GPUs than processes, they are shared."""
    gpus = available_gpus(environ)
    threads = max(1, cores // jobs)
    if not gpus:
        hidden = {VISIBLE_GPUS: NO_GPU} if VISIBLE_GPUS in environ else {}
        return [Slot(hidden, threads)] * jobs
    if len(gpus) >= jobs:
        parts, _ = divide_gpus(gpus, jobs)
        return [Slot({VISIBLE_GPUS: ",".join(mine)}, threads) for mine in parts]
    sharing = {name: value for name, value in _GPU_SHARING.items() if name not in environ}
    return [Slot({VISIBLE_GPUS: gpus[number % len(gpus)], **sharing}, threads) for number in range(jobs)]


class Scheduler:
    """Runs the cells of a matrix.

    Args:
        folder: the folder of the matrix.
        cells: the cells, in the order in which they run.
        slots: one per process that may run at the same time.
        program: the program that runs Modelyard's commands.
        live: a live display for the table of the cells; None prints a line per change instead.
    """

    def __init__(
        self,
        folder: MatrixFolder,
        cells: Sequence[Cell],
        slots: Sequence[Slot],
        program: Sequence[str],
        live: Live | None = None,
    ) -> None:
        self.folder = folder
        self.states = {cell.name: CellState(cell) for cell in cells}
        self._free = list(reversed(slots))
        self._program = tuple(program)
        self._live = live
        self._running: dict[Process, tuple[CellState, Slot]] = {}
        self._ended: queue.SimpleQueue[Process] = queue.SimpleQueue()
        self._signals: list[int] = []
        self._failures = folder.failures()

    def run(self) -> list[CellState]:
        """Runs the cells that are not finished. Failures are recorded.

        Raises:
            Interrupted: after SIGINT or SIGTERM, when all have saved and exited; not if all cells are finished.
        """
        states = list(self.states.values())
        for state in states:
            if self._is_finished(state.cell):
                state.state, state.was_done = DONE, True
        waiting = [state for state in states if state.state == WAITING]
        if len(waiting) < len(states):
            log.info("%d of %d cells are done already", len(states) - len(waiting), len(states))
        with handle_signals(lambda number, frame: self._signals.append(number)):
            try:
                self._loop(waiting)
            finally:
                for process in self._running:  # after an error here: no process may stay behind
                    process.signal(signal.SIGKILL)
        if self._signals and any(state.state in (WAITING, STOPPED) for state in states):
            done = sum(state.state == DONE for state in states)
            raise Interrupted(self._signals[0], done, str(self.folder.path))
        return states

    def _loop(self, waiting: list[CellState]) -> None:
        handled = 0
        while self._running or (waiting and not self._signals):
            while waiting and self._free and not self._signals:
                self._start(waiting.pop(0))
            if len(self._signals) > handled:
                self._stop(final=handled > 0)
                handled = len(self._signals)
            with contextlib.suppress(queue.Empty):
                self._conclude(self._ended.get(timeout=_POLL_SECONDS))
            for process in self._running:
                process.read_log()
            if self._live is not None:
                with contextlib.suppress(OSError):
                    self._live.update(cell_table(self.folder, list(self.states.values())), refresh=True)

    def _stop(self, final: bool) -> None:
        number = signal.SIGKILL if final else signal.SIGTERM
        for process in self._running:
            process.signal(number)
        if self._running and not final:
            log.info("stopping: %d running cells save and exit; signal again to kill them", len(self._running))

    def _start(self, state: CellState) -> None:
        directory = self.folder.run(state.cell.name)
        deadline = time.monotonic() + _RELEASE_SECONDS
        while is_running(directory):
            if self._signals:
                return
            if time.monotonic() > deadline:
                self._fail(state, "another process uses its run folder.")
                return
            time.sleep(0.1)
        slot = self._free.pop()
        spec = ProcessSpec(state.cell.name, self._command(state.cell, slot), slot.environ)
        state.began = time.monotonic()
        self._running[Process(spec, self.folder.logs, self._ended.put)] = (state, slot)
        self._change(state, RUNNING)

    def _command(self, cell: Cell, slot: Slot) -> tuple[str, ...]:
        directory = self.folder.run(cell.name)
        words = ("--config_file", str(self.folder.config(cell.name)), "--model_dir", str(directory.path))
        threads: Any = cell.config.threads or slot.threads
        if directory.exists():  # the number of threads decides the last bits: a resumed run keeps it
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
        # A signal that arrives while a run exits changes its status; the run is finished all the same.
        if (status == 0 or self._signals) and self._is_finished(state.cell):
            if self._failures.pop(state.cell.name, None) is not None:
                self.folder.write_failures(self._failures)
            self._change(state, DONE)
        elif self._signals:
            self._change(state, STOPPED)
        else:
            self._fail(state, failure_reason(status, process.last_lines))

    def _fail(self, state: CellState, reason: str) -> None:
        state.reason = reason
        self._failures[state.cell.name] = reason
        self.folder.write_failures(self._failures)
        self._change(state, FAILED)

    def _change(self, state: CellState, new: str) -> None:
        """Sets the state of a cell, and prints a line where there is no table."""
        state.state = new
        if self._live is not None:
            return
        text = f"{state.cell.name}: {new}"
        if new != RUNNING:
            _, value = progress(self.folder, state)
            text += f" after {state.seconds:.0f} s" + (f", {value}" if value else "")
        if new in (DONE, FAILED):
            ended = sum(other.state in (DONE, FAILED) for other in self.states.values())
            text = f"[{ended}/{len(self.states)}] {text}"
        if new == FAILED:
            text += f": {state.reason} ({self.folder.log(state.cell.name)})"
        with contextlib.suppress(OSError):
            console().print(text, soft_wrap=True, markup=False)


def failure_reason(status: int, lines: Sequence[str]) -> str:
    """Returns why a process failed, in one line: its own error message, or how it ended.

    Args:
        status: its exit status, or minus a signal.
        lines: the end of its log.
    """
    if status < 0:
        hint = " – perhaps out of memory" if -status == signal.SIGKILL else ""
        return f"{describe_status(status)}{hint}"
    for number, line in reversed(list(enumerate(lines))):
        if line.startswith("error: "):
            text = line.removeprefix("error: ")
            more = lines[number + 1].strip() if text.endswith(":") and number + 1 < len(lines) else ""
            return f"{text} {more}".strip()[:500]
    for line in reversed(lines):
        if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line):
            return line[:500]
    return f"exited with {describe_status(status)}" if status else "exited before it was finished"


# -- the table ------------------------------------------------------------------------------------------------------


def cell_table(folder: MatrixFolder, states: Sequence[CellState]) -> Table:
    """Returns a table of the cells: state, step and epoch, accuracy, time. Of many cells, running ones come first."""
    shown = list(states)
    if len(shown) > _MAX_ROWS:
        order = {RUNNING: 0, FAILED: 1, DONE: 2}
        shown = sorted(shown, key=lambda state: order.get(state.state, 3))[:_MAX_ROWS]
    counts = ", ".join(f"{sum(s.state == name for s in states)} {name}" for name in (DONE, RUNNING, WAITING, FAILED))
    title = f"{len(states)} cells: {counts}"
    right = Column("time", justify="right", no_wrap=True)
    table = Table("cell", "state", Column("step / epoch", justify="right"), "so far", right, title=title)
    for state in shown:
        step, value = progress(folder, state)
        seconds = time.monotonic() - state.began if state.state == RUNNING else state.seconds
        label = Text(state.state, style=_STYLES.get(state.state, ""))
        spent = "before" if state.was_done else f"{seconds:.0f} s" if seconds else ""
        table.add_row(Text(state.cell.name), label, step, Text(state.reason[:80] or value), spent)
    return table


def progress(folder: MatrixFolder, state: CellState) -> tuple[str, str]:
    """Returns step and epoch of a cell, and its accuracy (its loss, if it has none)."""
    rows = _last_rows(folder.run(state.cell.name).metrics) if state.state != WAITING else []
    if not rows:
        return "", ""
    newest = max(rows, key=lambda row: row.get("step") or 0)  # the last is of the best model, which may be older
    epoch = newest.get("epoch")
    step = f"{newest.get('step')}" + (f" / {epoch:.3g}" if isinstance(epoch, int | float) else "")
    for split in ("test", "validation", "train"):
        for row in reversed(rows):
            for metric in ("accuracy", "loss"):
                if row.get("split") == split and isinstance(row.get(metric), int | float):
                    return step, f"{split} {metric} {row[metric]:.4g}"
    return step, ""


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the last rows of a metrics file, which may be long."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows
