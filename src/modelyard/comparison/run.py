"""A matrix from what was asked for to its leaderboard."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelyard.comparison.board import Leaderboard, leaderboard
from modelyard.comparison.folder import MatrixFolder, settle
from modelyard.comparison.plan import DATASET, MODEL, SEED
from modelyard.comparison.request import Request, read_request
from modelyard.comparison.view import shown
from modelyard.comparison.work import DONE, FAILED, Work, cores_here, slots_of
from modelyard.config.calls import parse_list
from modelyard.config.resolve import COMMAND_LINE
from modelyard.errors import ConfigError, Problem, UserError
from modelyard.system.log import log_to

NAME = "matrix"
"""The name of its log and pid file, by which `modelyard stop` finds it."""
_MOST_JOBS, _MOST_SEEDS = 256, 1000
log = logging.getLogger("modelyard")


@dataclass(frozen=True)
class CellResult:
    """What became of a cell.

    Args:
        name: of the cell.
        axes: its value on each axis.
        state: done or failed.
        reason: why it failed.
        model_dir: its run folder.
        log: what its process wrote.
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
    """What came out of a matrix: its cells, and the leaderboard if any cell has a result."""

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

    Called again with the same ``output`` it goes on: finished cells are left as they are, interrupted ones are resumed,
    failed ones are tried again.

    Args:
        file: a YAML file with ``axes``, ``exclude`` and ``options``.
        output: the folder of the matrix; alone, the matrix that is there goes on.
        models: the axis ``model``.
        datasets: the axis ``dataset``.
        seeds: the axis ``random_seed``: how many, or which.
        axes: any options as axes, each with its values.
        exclude: combinations of the axes to leave out.
        jobs: how many cells run side by side; each gets its share of cores and GPUs.
        program: what understands the commands of the cells; by default Modelyard itself.
        source: where this comes from, for error messages.
        **options: options that all cells have.

    Raises:
        ConfigError: with every mistake, before anything is started.
        Interrupted: after SIGTERM or SIGINT, when all cells have saved and ended.

    Example:
        >>> modelyard.matrix(models=["mlp", "simple_cnn"], datasets=["digits"], seeds=2, output="m", train_epochs=2)
    """
    given = _axes(models, datasets, seeds, axes or {}, source)
    if not 1 <= jobs <= _MOST_JOBS:
        raise ConfigError([Problem(source, "jobs", f"must be 1 to {_MOST_JOBS}, got {jobs}.")])
    options = {key.replace("-", "_"): value for key, value in options.items() if value is not None}
    request = Request(given, exclude, options, source, pick_up_files=source == COMMAND_LINE)
    if file is not None:
        request = read_request(Path(file), request)
    folder = MatrixFolder(output)
    settle(folder, request)  # mistakes are shown before a folder is made
    folder.create()
    with log_to(folder.logs, NAME):
        cells = settle(folder, request)
        folder.write(cells)
        program = [sys.executable, "-m", "modelyard"] if program is None else list(program)
        slots = slots_of(jobs, os.environ, cores_here())
        for note in dict.fromkeys(note for cell in cells for note in cell.notes):
            log.info("%s", note)
        log.info("%d cell%s in %s, %d at a time", len(cells), "s" if len(cells) != 1 else "", folder.path, jobs)
        with shown(folder, len(cells)) as view:
            states = Work(folder, cells, slots, program, view).run()
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
    """All axes, those with names of their own first."""
    found: dict[str, Sequence[Any]] = {}
    for key, values in ((MODEL, models), (DATASET, datasets)):
        if values is not None:
            found[key] = [str(value) for value in (parse_list(values) if isinstance(values, str) else values)]
    rest: dict[str, Sequence[Any]] = {key.replace("-", "_"): list(values) for key, values in axes.items()}
    if seeds is not None:
        rest[SEED] = _seeds(seeds, source)
    return {**found, **rest}


def _seeds(seeds: int | Sequence[int] | str, source: str) -> list[int]:
    """A number is how many; several are the seeds themselves."""
    try:
        numbers = [int(text) for text in str(seeds).split(",")] if isinstance(seeds, int | str) else list(seeds)
    except ValueError:
        numbers = []
    if isinstance(seeds, int) or (isinstance(seeds, str) and len(numbers) == 1):
        if 1 <= numbers[0] <= _MOST_SEEDS:
            return list(range(numbers[0]))
        numbers = []
    if not numbers:
        message = f"must be how many (1 to {_MOST_SEEDS}), or the seeds themselves such as 0,7,11; got {seeds!r}."
        raise ConfigError([Problem(source, "seeds", message)])
    return numbers
