"""Trains a matrix of runs: checks the request, runs its cells, and writes the leaderboard."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelyard.comparison.leaderboard import Leaderboard, leaderboard
from modelyard.comparison.matrix_folder import MatrixFolder, merge_plan
from modelyard.comparison.plan import DATASET, MODEL, SEED, MatrixRequest, read_request
from modelyard.comparison.scheduler import DONE, FAILED, Scheduler, make_slots
from modelyard.config.calls import parse_list
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, UserError
from modelyard.launcher.supervise import live_display
from modelyard.system.machine import available_cores
from modelyard.system.process import log_to

NAME = "matrix"
"""The name of its log and pid file, by which `modelyard stop` finds it."""
_MAX_JOBS, _MAX_SEEDS = 256, 1000
log = logging.getLogger("modelyard")


@dataclass(frozen=True)
class CellResult:
    """The outcome of a cell.

    Args:
        name: its name.
        axes: its value on each axis.
        state: done or failed.
        reason: why it failed.
        model_dir: its run folder.
        log: the log of its process.
        seconds: how long its process ran this time; 0 if it was finished before.
    """

    name: str
    axes: dict[str, Any]
    state: str
    reason: str
    model_dir: str
    log: str
    seconds: float


@dataclass(frozen=True)
class MatrixResult:
    """The outcome of a matrix: its cells, and the leaderboard if any cell has a result."""

    output: str
    cells: tuple[CellResult, ...]
    leaderboard: Leaderboard | None

    @property
    def failed(self) -> tuple[CellResult, ...]:
        """The cells that failed."""
        return tuple(cell for cell in self.cells if cell.state == FAILED)


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
        **options: options of all cells.

    Raises:
        ConfigError: with every problem, before anything is started.
        Interrupted: after SIGTERM or SIGINT, when all cells have saved and exited.

    Example:
        >>> modelyard.matrix(models=["mlp", "simple_cnn"], datasets=["digits"], seeds=2, output="m", train_epochs=2)
    """
    given = _axes(models, datasets, seeds, axes or {}, source)
    if not 1 <= jobs <= _MAX_JOBS:
        raise ConfigError([Problem(source, "jobs", f"must be 1 to {_MAX_JOBS}, got {jobs}.")])
    options = {key.replace("-", "_"): value for key, value in options.items() if value is not None}
    request = MatrixRequest(given, exclude, options, source, pick_up_files=source == COMMAND_LINE)
    if file is not None:
        request = read_request(Path(file), request)
    folder = MatrixFolder(output)
    merge_plan(folder, request)  # raises before a folder is made
    folder.create()
    with log_to(folder.logs, NAME):
        cells = merge_plan(folder, request)
        folder.write(cells)
        program = [sys.executable, "-m", "modelyard"] if program is None else list(program)
        slots = make_slots(jobs, os.environ, available_cores())
        for note in dict.fromkeys(note for cell in cells for note in cell.notes):
            log.info("%s", note)
        log.info("%d cell%s in %s, %d at a time", len(cells), "s" if len(cells) != 1 else "", folder.path, jobs)
        with live_display() as live:
            states = Scheduler(folder, cells, slots, program, live).run()
        results = tuple(
            CellResult(
                state.cell.name,
                state.cell.axes,
                state.state,
                state.reason,
                str(folder.run(state.cell.name).path),
                str(folder.log(state.cell.name)),
                round(state.seconds, 1),
            )
            for state in states
        )
        board = None
        if any(state.state == DONE for state in states):
            try:
                board = leaderboard(folder.path)
            except UserError as error:
                log.warning("no leaderboard: %s", error)
    return MatrixResult(str(folder.path), results, board)


def _axes(
    models: Sequence[str] | str | None,
    datasets: Sequence[str] | str | None,
    seeds: int | Sequence[int] | str | None,
    axes: Mapping[str, Sequence[Any]],
    source: str,
) -> dict[str, Sequence[Any]]:
    """Returns all axes, model and dataset first."""
    found: dict[str, Sequence[Any]] = {}
    for key, values in ((MODEL, models), (DATASET, datasets)):
        if values is not None:
            found[key] = [str(value) for value in (parse_list(values) if isinstance(values, str) else values)]
    rest: dict[str, Sequence[Any]] = {key.replace("-", "_"): list(values) for key, values in axes.items()}
    if seeds is not None:
        rest[SEED] = _seeds(seeds, source)
    return {**found, **rest}


def _seeds(seeds: int | Sequence[int] | str, source: str) -> list[int]:
    """Returns the seeds: the first so many for a number, else those listed."""
    try:
        numbers = [int(text) for text in str(seeds).split(",")] if isinstance(seeds, int | str) else list(seeds)
    except ValueError:
        numbers = []
    if isinstance(seeds, int) or (isinstance(seeds, str) and len(numbers) == 1):
        if 1 <= numbers[0] <= _MAX_SEEDS:
            return list(range(numbers[0]))
        numbers = []
    if not numbers:
        message = f"must be the number of seeds (1 to {_MAX_SEEDS}), or a list such as 0,7,11; got {seeds!r}."
        raise ConfigError([Problem(source, "seeds", message)])
    return numbers
