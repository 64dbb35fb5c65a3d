"""Runs the cells of a matrix or a search in their order, and shows them in a table. An executor decides where.

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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from modelyard.comparison.executor import CellJob, Executor, RunningCell, Slot
from modelyard.comparison.matrix_folder import MatrixFolder, is_finished
from modelyard.comparison.plan import FOLD, Cell
from modelyard.comparison.results import default_metrics, metrics_of, rows_of_best
from modelyard.errors import Interrupted, counted
from modelyard.launcher.job import TRAIN_AND_EVALUATE
from modelyard.launcher.processes import describe_status
from modelyard.run.checkpoint import list_best, list_checkpoints, step_of
from modelyard.run.directory import RunDirectory, is_running, run_options
from modelyard.run.metrics import read_metrics
from modelyard.system.console import console
from modelyard.system.process import handle_signals

WAITING, RUNNING, DONE, FAILED, STOPPED, PAUSED = "waiting", "running", "done", "failed", "stopped", "paused"
_MAX_ROWS = 40
_POLL_SECONDS = 0.5
_RELEASE_SECONDS = 20.0
"""How long to wait for processes of a killed matrix: they die with it, but not in the same moment."""
_LOSSES = 10
"""How often a cell may lose its node, which is not its fault."""
_STYLES = {RUNNING: "green", DONE: "bold green", FAILED: "red", WAITING: "dim"}
_TAIL_BYTES = 1 << 14
log = logging.getLogger("modelyard")


@dataclass(kw_only=True)
class CellResult:
    """The state of a cell, and its outcome.

    Args:
        name: its name.
        axes: its value on each axis.
        state: waiting, running, done, failed, stopped or paused.
        reason: why it failed.
        model_dir: its run folder.
        log: the log of its process.
        seconds: how long its process ran this time; 0 if it was finished before.
        metric: the metric that is shown while it runs; empty for the one of the leaderboard.
    """

    name: str
    axes: dict[str, Any]
    state: str = WAITING
    reason: str = ""
    model_dir: str
    log: str
    seconds: float = 0.0
    metric: str = ""


class Scheduler:
    """Runs the cells of a matrix in their order, one per slot at a time. Without a live display, it prints changes.

    Args:
        folder: the folder of the matrix.
        cells: the cells.
        slots: the room for cells: as many run at a time.
        executor: runs them.
        live: shows a table of the cells.
        propose: returns a cell to start when a slot is free and all others have started: a new one, or a paused one.
            None if there is none now. It is asked again when a cell has ended.
        retries: whether cells that failed before are tried again.
        restarts: how often a cell whose process was killed is resumed at once, without having come further.
        state_of: returns done or paused for the name of a cell that needs no process now; by default, done for a
            finished run.
        pause_at: returns where a cell that is started pauses; None if it trains to its end.
        deadline: when all cells save and exit, in the seconds of `time.monotonic`.
        metric: the metric that is shown of running cells.
        noun: what messages call a cell.
        watch: called with the cells, often, while any run.
    """

    def __init__(
        self,
        folder: MatrixFolder,
        cells: Sequence[Cell],
        slots: Sequence[Slot],
        executor: Executor,
        live: Callable[[RenderableType], None] | None = None,
        propose: Callable[[], Cell | None] | None = None,
        retries: bool = True,
        restarts: int = 0,
        watch: Callable[[Sequence[CellResult]], None] | None = None,
        state_of: Callable[[str], str | None] | None = None,
        pause_at: Callable[[str], str | None] | None = None,
        deadline: float | None = None,
        metric: str = "",
        noun: str = "cell",
    ) -> None:
        self._folder, self._propose, self._retries, self._restarts = folder, propose, retries, restarts
        self._state_of, self._pause_at, self._deadline, self._metric = state_of, pause_at, deadline, metric
        self._watch, self._noun = watch, noun
        self._kills: dict[str, tuple[int, int]] = {}
        """For each cell that was killed, the step that it had come to, and how often that was."""
        self._losses: Counter[str] = Counter()
        self._cells: dict[str, Cell] = {}
        self._results: dict[str, CellResult] = {}
        for cell in cells:
            self._add(cell)
        self._free = list(reversed(slots))
        self._executor = executor
        self._live = live
        self._running: dict[RunningCell, tuple[Slot, float]] = {}  # and when it was started
        self._ended: queue.SimpleQueue[RunningCell] = queue.SimpleQueue()
        self._signals: list[int] = []
        self._failures = folder.failures()
        self._has_more = propose is not None
        """Whether there may be cells that are not proposed yet."""
        self._expired = False
        """Whether the cells were told that the deadline has passed."""
        self._asks = True
        """Whether something has happened since `propose` had none."""

    def _add(self, cell: Cell) -> CellResult:
        directory, log_file = self._folder.run(cell.name), self._folder.log(cell.name)
        result = CellResult(
            name=cell.name, axes=cell.axes, model_dir=str(directory.path), log=str(log_file), metric=self._metric
        )
        self._cells[cell.name], self._results[cell.name] = cell, result
        return result

    def run(self) -> list[CellResult]:
        """Runs the cells that are not finished, then those that are proposed. Failures are recorded.

        Raises:
            Interrupted: after SIGINT or SIGTERM, when all have saved and exited; not if all cells are finished.
        """
        results = list(self._results.values())
        for result in results:
            ended = self._ended_as(result)
            if ended is not None:
                result.state = ended
            elif result.name in self._failures and not self._retries:
                result.state, result.reason = FAILED, self._failures[result.name]
        waiting = [result for result in results if result.state == WAITING]
        if len(waiting) < len(results):
            log.info("%d of %d %ss are done already", len(results) - len(waiting), len(results), self._noun)
        with handle_signals(lambda number, frame: self._signals.append(number)):
            try:
                self._loop(waiting)
            finally:
                for process in self._running:  # after an error here: no process may stay behind
                    process.signal(signal.SIGKILL)
        results = list(self._results.values())
        if self._signals and (self._has_more or any(result.state in (WAITING, STOPPED) for result in results)):
            done = sum(result.state == DONE for result in results)
            raise Interrupted(self._signals[0], done, str(self._folder.path))
        return results

    def _loop(self, waiting: list[CellResult]) -> None:
        handled = 0
        while self._running or ((waiting or self._has_more) and not self._is_stopping()):
            while self._free and not self._is_stopping():
                if not waiting:
                    cell = self._propose() if self._asks and self._propose is not None else None
                    self._asks = cell is not None
                    self._has_more = cell is not None or (self._propose is not None and bool(self._running))
                    if cell is None:
                        break
                    waiting.append(self._results.get(cell.name) or self._add(cell))
                self._start(waiting.pop(0))
            if not self._running:
                continue
            if self._is_late() and not self._expired:
                self._expired = True
                self._stop(final=False)
            if len(self._signals) > handled:
                self._stop(final=handled > 0)
                handled = len(self._signals)
            with contextlib.suppress(queue.Empty):
                self._conclude(self._ended.get(timeout=_POLL_SECONDS))
            for process, (_, began) in self._running.items():
                process.read_log()
                self._results[process.name].seconds = time.monotonic() - began
            if self._live is not None:
                self._live(cell_table(list(self._results.values()), self._noun))
            if self._watch is not None:
                self._watch(list(self._results.values()))

    def _is_stopping(self) -> bool:
        return bool(self._signals) or self._is_late()

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _stop(self, final: bool) -> None:
        number = signal.SIGKILL if final else signal.SIGTERM
        for process in self._running:
            process.signal(number)
        if self._running and not final:
            why = "stopping" if self._signals else "the time is over"
            many = counted(len(self._running), f"running {self._noun}")
            more = "; signal again to kill them" if self._signals else ""
            log.info("%s: waiting for %s to save and exit%s", why, many, more)

    def _start(self, result: CellResult) -> None:
        cell, directory = self._cells[result.name], self._folder.run(result.name)
        deadline = time.monotonic() + _RELEASE_SECONDS
        while is_running(directory):
            if self._signals:
                return
            if time.monotonic() > deadline:
                self._fail(result, "another process uses its run folder.")
                return
            time.sleep(0.1)
        slot = self._free.pop()
        threads: Any = cell.config.threads or slot.threads
        if directory.exists():  # the number of threads decides the last bits: a resumed run keeps it
            threads = run_options(directory).get("threads") or threads
        words = ("--config_file", str(self._folder.config(cell.name)), "--model_dir", str(directory.path))
        pause = self._pause_at(cell.name) if self._pause_at is not None else None
        pauses = ("--pause_at", pause) if pause is not None else ()
        # What is trusted here: the process can't ask.
        trust = ("--trust",) if cell.config.plugins or cell.config.cache_dir else ()
        command = (TRAIN_AND_EVALUATE, *words, "--threads", str(threads), *pauses, *trust)
        job = CellJob(cell.name, command, cell.config, int(threads), slot, self._folder.logs)
        self._running[self._executor.start(job, self._ended.put)] = (slot, time.monotonic())
        self._change(result, RUNNING)

    def _ended_as(self, result: CellResult) -> str | None:
        """Returns the state of a cell that needs no process now: done or paused."""
        if self._state_of is not None:
            return self._state_of(result.name)
        config = self._cells[result.name].config
        return DONE if is_finished(self._folder.run(result.name), config.test_at_end, config.export_at_end) else None

    def _conclude(self, process: RunningCell) -> None:
        slot, began = self._running.pop(process)
        result = self._results[process.name]
        status = process.reap()
        process.read_log()
        self._free.append(slot)
        result.seconds = round(time.monotonic() - began, 1)
        self._asks = True
        # A signal that arrives while a run exits changes its status; the run is finished all the same.
        ended = self._ended_as(result) if status == 0 or self._is_stopping() else None
        if ended is not None:
            if self._failures.pop(result.name, None) is not None:
                self._folder.write_failures(self._failures)
            self._change(result, ended)
        elif self._is_stopping():
            self._change(result, STOPPED)
        elif process.why_lost and self._losses[result.name] < _LOSSES:
            self._losses[result.name] += 1
            result.state = WAITING
            log.info("%s lost its node (%s) and goes on elsewhere", result.name, process.why_lost)
            self._start(result)
        elif process.why_lost:
            self._fail(result, f"lost its node {_LOSSES + 1} times ({process.why_lost})")
        elif status < 0 and self._may_go_on(result):
            log.info("%s was %s and goes on", result.name, describe_status(status))
            self._start(result)
        else:
            self._fail(result, failure_reason(status, process.last_lines))

    def _may_go_on(self, result: CellResult) -> bool:
        """Returns whether a cell that was killed is resumed."""
        directory = self._folder.run(result.name)
        step = max((step_of(path) for path in list_checkpoints(directory.checkpoints).values()), default=0)
        before, kills = self._kills.get(result.name, (-1, 0))
        kills = kills + 1 if step == before else 1
        self._kills[result.name] = step, kills
        return kills <= self._restarts

    def _fail(self, result: CellResult, reason: str) -> None:
        result.reason = self._failures[result.name] = reason
        self._folder.write_failures(self._failures)
        self._change(result, FAILED)

    def _change(self, result: CellResult, state: str) -> None:
        """Sets the state of a cell, and prints a line where there is no table."""
        result.state = state
        if self._live is not None:
            return
        text = f"{result.name}: {state}"
        if state != RUNNING:
            _, value = progress(result)
            text += f" after {result.seconds:.0f} s" + (f", {value}" if value else "")
        if state in (DONE, FAILED):
            ended = sum(other.state in (DONE, FAILED) for other in self._results.values())
            text = f"[{ended}/{len(self._results)}] {text}"
        if state == FAILED:
            text += f": {result.reason} ({result.log})"
        with contextlib.suppress(OSError):
            console().print(text, soft_wrap=True)


def failure_reason(status: int, lines: Sequence[str]) -> str:
    """Returns why a process failed, in one line: the error message in the end of its log, or how it ended."""
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


def cell_table(results: Sequence[CellResult], noun: str = "cell") -> Table:
    """Returns a table of the cells: state, step and epoch, accuracy, time. Of many cells, running ones come first."""
    shown = list(results)
    if len(shown) > _MAX_ROWS:
        order = {RUNNING: 0, FAILED: 1, DONE: 2}
        shown = sorted(shown, key=lambda result: order.get(result.state, 3))[:_MAX_ROWS]
    counts = ", ".join(
        f"{sum(one.state == name for one in results)} {name}"
        for name in (DONE, RUNNING, PAUSED, WAITING, FAILED)
        if name != PAUSED or any(one.state == PAUSED for one in results)
    )
    right = Column("time", justify="right", no_wrap=True)
    steps = Column("step / epoch", justify="right")
    table = Table(noun, "state", steps, "so far", right, title=f"{counted(len(results), noun)}: {counts}")
    for result in shown:
        step, value = progress(result)
        spent = f"{result.seconds:.0f} s" if result.seconds else "before" if result.state == DONE else ""
        state = Text(result.state, style=_STYLES.get(result.state, ""))
        table.add_row(Text(result.name), state, step, Text(result.reason[:80] or value), spent)
    return table


def progress(result: CellResult) -> tuple[str, str]:
    """Returns step and epoch of a cell, and its score so far: the one that the leaderboard would show."""
    directory = RunDirectory(Path(result.model_dir))
    rows = _last_rows(directory.metrics) if result.state != WAITING else []
    if not rows:
        return "", ""
    newest = max(rows, key=lambda row: row.get("step") or 0)  # the last is of the best model, which may be older
    epoch = newest.get("epoch")
    step = f"{newest.get('step')}" + (f" / {epoch:.3g}" if isinstance(epoch, int | float) else "")
    best = _best_models(directory, result.state == DONE)
    if best and not any(row.get("step") == step_of(best[0]) and row.get("split") == "validation" for row in rows):
        rows = read_metrics(directory.metrics)
    chosen = rows_of_best(rows, best)
    for split in sorted(chosen, reverse=FOLD in result.axes):  # with folds, validation comes before test
        metrics = metrics_of(chosen[split])
        for metric in [result.metric] if result.metric in metrics else default_metrics(metrics)[:1]:
            return step, f"{split} {metric} {metrics[metric]:.4g}"
    for row in reversed(rows):
        for metric in ("accuracy", "loss"):
            if row.get("split") == "train" and isinstance(row.get(metric), int | float):
                return step, f"train {metric} {row[metric]:.4g}"
    return step, ""


def _best_models(directory: RunDirectory, ended: bool) -> list[Path]:
    """Returns the folders of the best models, the best first. While a run may replace them, only a single one."""
    if ended:
        return list_best(directory.best)
    found = list(list_checkpoints(directory.best).values())
    return found if len(found) == 1 else []


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Reads the last rows of a metrics file, which may be long."""
    rows: list[Any] = []
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]
