"""Trains a matrix of runs: each cell in its own process, some in parallel, and then the leaderboard.

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
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from modelyard import faults
from modelyard.comparison.leaderboard import Leaderboard, leaderboard
from modelyard.comparison.matrix_folder import MatrixFolder, is_finished, merge_plan
from modelyard.comparison.plan import (
    DATASET,
    FOLD,
    MODEL,
    SEED,
    Cell,
    MatrixRequest,
    make_cells,
    read_request,
    with_folds,
)
from modelyard.comparison.results import default_metrics, metrics_of, rows_of_best
from modelyard.config.calls import parse_list
from modelyard.config.resolve import option_name
from modelyard.config.yaml_file import config_path
from modelyard.errors import COMMAND_LINE, Interrupted, Problem, UserError
from modelyard.launcher.job import TRAIN_AND_EVALUATE
from modelyard.launcher.processes import (
    NO_GPU,
    VISIBLE_GPUS,
    Process,
    ProcessSpec,
    available_gpus,
    describe_status,
    divide_gpus,
)
from modelyard.run.checkpoint import list_best, list_checkpoints, step_of
from modelyard.run.directory import RunDirectory, is_running, run_options
from modelyard.run.metrics import read_metrics
from modelyard.system.console import console, live_table
from modelyard.system.machine import available_cores
from modelyard.system.process import handle_signals, log_to

NAME = "matrix"
"""The name of its log and pid file, by which `modelyard stop` finds it."""
SEARCH = "search.yaml"
"""The file by which the folder of a search differs from that of a matrix."""
WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"
MAX_JOBS, _MAX_SEEDS, _MAX_ROWS = 256, 1000, 40
_GPU_SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
"""Processes that share a GPU must not reserve all of its memory."""
_POLL_SECONDS = 0.5
_RELEASE_SECONDS = 20.0
"""How long to wait for processes of a killed matrix: they die with it, but not in the same moment."""
_STYLES = {RUNNING: "green", DONE: "bold green", FAILED: "red", WAITING: "dim"}
_TAIL_BYTES = 1 << 14
log = logging.getLogger("modelyard")


@dataclass(kw_only=True)
class CellResult:
    """The state of a cell, and its outcome.

    Args:
        name: its name.
        axes: its value on each axis.
        state: waiting, running, done, failed or stopped.
        reason: why it failed.
        model_dir: its run folder.
        log: the log of its process.
        seconds: how long its process ran this time; 0 if it was finished before.
    """

    name: str
    axes: dict[str, Any]
    state: str = WAITING
    reason: str = ""
    model_dir: str
    log: str
    seconds: float = 0.0


@dataclass(frozen=True)
class MatrixResult:
    """The outcome of a matrix: its cells, and the leaderboard if any cell has a result. It prints as text."""

    output: str
    cells: tuple[CellResult, ...]
    leaderboard: Leaderboard | None

    @property
    def failed(self) -> tuple[CellResult, ...]:
        """The cells that failed."""
        return tuple(cell for cell in self.cells if cell.state == FAILED)

    def __str__(self) -> str:
        states = Counter(cell.state for cell in self.cells)
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        lines = [f"{self.output}: {len(self.cells)} cells, {counts}"]
        lines += [f"{cell.name}: {cell.reason}" for cell in self.failed]
        return "\n".join(lines + ([] if self.leaderboard is None else [str(self.leaderboard)]))


def matrix(
    file: str | Path | None = None,
    *,
    output: str | Path,
    models: Sequence[str] | str | None = None,
    datasets: Sequence[str] | str | None = None,
    seeds: int | Sequence[int] | str | None = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    exclude: Sequence[Mapping[str, Any]] = (),
    jobs: int = 1,
    program: Sequence[str] | None = None,
    source: str = "Python",
    trust: bool = False,
    **options: Any,
) -> MatrixResult:
    """Trains every combination of models, datasets, seeds and other options, each as an ordinary run in a process.

    If ``output`` exists, the matrix is resumed: finished cells are kept, interrupted ones are resumed, and failed ones
    are tried again.

    Args:
        file: a YAML file with ``axes``, ``exclude`` and ``options``.
        output: the folder of the matrix; given alone, the matrix in it is resumed.
        models: the axis ``model``.
        datasets: the axis ``dataset``.
        seeds: the axis ``random_seed``: a number of seeds, or a list of them.
        axes: any other options as axes, each with its values.
        exclude: combinations of the axes to leave out.
        jobs: how many cells run in parallel; each gets a part of the cores and GPUs.
        program: the program that runs the commands of the cells; by default Modelyard itself.
        source: where the request comes from, for error messages.
        trust: import the plugins that the configs in ``output`` name, even if they are not the user's.
        **options: options of all cells.

    Raises:
        ConfigError: with every problem, before anything is started.
        UntrustedPluginError: for plugins of a matrix of somebody else, without ``trust``.
        Interrupted: after SIGTERM or SIGINT, when all cells have saved and exited.

    Example:
        >>> modelyard.matrix(models=["mlp", "simple_cnn"], datasets=["digits"], seeds=2, output="m", train_epochs=2)
    """
    problems: list[Problem] = []
    if not str(output):
        problems.append(Problem(source, "output", "is missing: the folder of the matrix, such as runs/compared."))
    if not 1 <= jobs <= MAX_JOBS:
        problems.append(Problem(source, "jobs", f"must be 1 to {MAX_JOBS}, got {jobs}."))
    given = _axes(models, datasets, seeds, axes or {}, source, problems)
    options = {option_name(key): value for key, value in options.items() if value is not None}
    picks_up = source == COMMAND_LINE
    request = MatrixRequest(given, exclude, options, source, picks_up, problems=problems, trust=trust)
    if file is not None:
        request = read_request(config_path(str(file)), request)
    request = with_folds(request)
    if problems:
        make_cells(request)  # raises them with all others
    folder = MatrixFolder(output)
    if request.axes and (folder.path / SEARCH).exists():
        raise UserError(f"{output} is a search, to which `modelyard tune` adds trials. Choose another --output.")
    merge_plan(folder, request)  # raises before a folder is made
    folder.create()
    with faults.injected(folder.logs, NAME), log_to(folder.logs, NAME):
        cells = merge_plan(folder, request)
        folder.write(cells)
        program = [sys.executable, "-m", "modelyard"] if program is None else list(program)
        slots = make_slots(jobs, os.environ, available_cores())
        for note in dict.fromkeys(note for cell in cells for note in cell.notes):
            log.info("%s", note)
        log.info("%d cell%s in %s, %d at a time", len(cells), "s" if len(cells) != 1 else "", folder.path, jobs)
        with live_table() as live:
            results = Scheduler(folder, cells, slots, program, live).run()
        board = None
        if any(result.state == DONE for result in results):
            try:
                board = leaderboard(folder.path)
            except UserError as error:
                log.warning("no leaderboard: %s", error)
    return MatrixResult(str(folder.path), tuple(results), board)


def _axes(
    models: Sequence[str] | str | None,
    datasets: Sequence[str] | str | None,
    seeds: int | Sequence[int] | str | None,
    axes: Mapping[str, Sequence[Any]],
    source: str,
    problems: list[Problem],
) -> dict[str, Sequence[Any]]:
    """Returns all axes, model and dataset first. Seeds that are wrong are a problem, and one seed stands for them."""
    found: dict[str, Sequence[Any]] = {}
    for key, values in ((MODEL, models), (DATASET, datasets)):
        if values is not None:
            found[key] = [str(value) for value in (parse_list(values) if isinstance(values, str) else values)]
    found |= {key.replace("-", "_"): list(values) for key, values in axes.items()}
    if seeds is not None:
        found[SEED] = _seeds(seeds, source, problems)
    return found


def _seeds(given: int | Sequence[int] | str, source: str, problems: list[Problem]) -> list[int]:
    """Returns the seeds: the first so many for a number, else those listed."""
    seeds = given
    if isinstance(seeds, str):
        with contextlib.suppress(ValueError):
            numbers = [int(text) for text in seeds.split(",")]
            seeds = numbers if len(numbers) > 1 else numbers[0]
    if isinstance(seeds, int) and 1 <= seeds <= _MAX_SEEDS:
        return list(range(seeds))
    if not seeds or isinstance(seeds, int | str):
        message = f"must be the number of seeds (1 to {_MAX_SEEDS}), or a list such as 0,7,11; got {given!r}."
        problems.append(Problem(source, "seeds", message))
        return [0]
    return list(seeds)


# -- the processes of the cells --------------------------------------------------------------------------------------


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
    """Runs the cells of a matrix in their order, one per slot at a time. Without a live display, it prints changes.

    Args:
        folder: the folder of the matrix.
        cells: the cells.
        slots: the parts of the machine.
        program: the program that runs the commands of the cells.
        live: shows a table of the cells.
        propose: returns another cell when a slot is free and all cells have started; None if there are no more.
        retries: whether cells that failed before are tried again.
        restarts: how often a cell whose process was killed is resumed at once, without having come further.
        watch: called with the cells, often, while any run.
    """

    def __init__(
        self,
        folder: MatrixFolder,
        cells: Sequence[Cell],
        slots: Sequence[Slot],
        program: Sequence[str],
        live: Callable[[RenderableType], None] | None = None,
        propose: Callable[[], Cell | None] | None = None,
        retries: bool = True,
        restarts: int = 0,
        watch: Callable[[Sequence[CellResult]], None] | None = None,
    ) -> None:
        self._folder, self._propose, self._retries, self._restarts = folder, propose, retries, restarts
        self._watch = watch
        self._kills: dict[str, tuple[int, int]] = {}
        """For each cell that was killed, the step that it had come to, and how often that was."""
        self._cells: dict[str, Cell] = {}
        self._results: dict[str, CellResult] = {}
        for cell in cells:
            self._add(cell)
        self._free = list(reversed(slots))
        self._program = tuple(program)
        self._live = live
        self._running: dict[Process, tuple[Slot, float]] = {}  # and when it was started
        self._ended: queue.SimpleQueue[Process] = queue.SimpleQueue()
        self._signals: list[int] = []
        self._failures = folder.failures()
        self._has_more = propose is not None
        """Whether there may be cells that are not proposed yet."""

    def _add(self, cell: Cell) -> CellResult:
        directory, log_file = self._folder.run(cell.name), self._folder.log(cell.name)
        result = CellResult(name=cell.name, axes=cell.axes, model_dir=str(directory.path), log=str(log_file))
        self._cells[cell.name], self._results[cell.name] = cell, result
        return result

    def run(self) -> list[CellResult]:
        """Runs the cells that are not finished, then those that are proposed. Failures are recorded.

        Raises:
            Interrupted: after SIGINT or SIGTERM, when all have saved and exited; not if all cells are finished.
        """
        results = list(self._results.values())
        for result in results:
            if self._is_finished(result):
                result.state = DONE
            elif result.name in self._failures and not self._retries:
                result.state, result.reason = FAILED, self._failures[result.name]
        waiting = [result for result in results if result.state == WAITING]
        if len(waiting) < len(results):
            log.info("%d of %d cells are done already", len(results) - len(waiting), len(results))
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
        while self._running or ((waiting or self._has_more) and not self._signals):
            while self._free and not self._signals:
                if not waiting:
                    cell = self._propose() if self._has_more and self._propose is not None else None
                    self._has_more = cell is not None
                    if cell is None:
                        break
                    waiting.append(self._add(cell))
                self._start(waiting.pop(0))
            if not self._running:
                continue
            if len(self._signals) > handled:
                self._stop(final=handled > 0)
                handled = len(self._signals)
            with contextlib.suppress(queue.Empty):
                self._conclude(self._ended.get(timeout=_POLL_SECONDS))
            for process, (_, began) in self._running.items():
                process.read_log()
                self._results[process.spec.name].seconds = time.monotonic() - began
            if self._live is not None:
                self._live(cell_table(list(self._results.values())))
            if self._watch is not None:
                self._watch(list(self._results.values()))

    def _stop(self, final: bool) -> None:
        number = signal.SIGKILL if final else signal.SIGTERM
        for process in self._running:
            process.signal(number)
        if self._running and not final:
            log.info("stopping: %d running cells save and exit; signal again to kill them", len(self._running))

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
        # What is trusted here: the process can't ask.
        trust = ("--trust",) if cell.config.plugins or cell.config.cache_dir else ()
        command = (*self._program, TRAIN_AND_EVALUATE, *words, "--threads", str(threads), *trust)
        process = Process(ProcessSpec(cell.name, command, slot.environ), self._folder.logs, self._ended.put)
        self._running[process] = (slot, time.monotonic())
        self._change(result, RUNNING)

    def _is_finished(self, result: CellResult) -> bool:
        config = self._cells[result.name].config
        return is_finished(self._folder.run(result.name), config.test_at_end, config.export_at_end)

    def _conclude(self, process: Process) -> None:
        slot, began = self._running.pop(process)
        result = self._results[process.spec.name]
        status = process.reap()
        process.read_log()
        self._free.append(slot)
        result.seconds = round(time.monotonic() - began, 1)
        # A signal that arrives while a run exits changes its status; the run is finished all the same.
        if (status == 0 or self._signals) and self._is_finished(result):
            if self._failures.pop(result.name, None) is not None:
                self._folder.write_failures(self._failures)
            self._change(result, DONE)
        elif self._signals:
            self._change(result, STOPPED)
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


def cell_table(results: Sequence[CellResult]) -> Table:
    """Returns a table of the cells: state, step and epoch, accuracy, time. Of many cells, running ones come first."""
    shown = list(results)
    if len(shown) > _MAX_ROWS:
        order = {RUNNING: 0, FAILED: 1, DONE: 2}
        shown = sorted(shown, key=lambda result: order.get(result.state, 3))[:_MAX_ROWS]
    counts = ", ".join(
        f"{sum(one.state == name for one in results)} {name}" for name in (DONE, RUNNING, WAITING, FAILED)
    )
    right = Column("time", justify="right", no_wrap=True)
    steps = Column("step / epoch", justify="right")
    table = Table("cell", "state", steps, "so far", right, title=f"{len(results)} cells: {counts}")
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
        for metric in default_metrics(metrics)[:1]:
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
