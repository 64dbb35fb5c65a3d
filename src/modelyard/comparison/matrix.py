"""Trains a matrix of runs: each cell in its own process, some in parallel, and then the leaderboard.

A cell that fails does not stop the others.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelyard import faults
from modelyard.comparison.leaderboard import Leaderboard, leaderboard
from modelyard.comparison.matrix_folder import MatrixFolder, merge_plan
from modelyard.comparison.places import LOCAL, Place
from modelyard.comparison.plan import (
    DATASET,
    MODEL,
    SEED,
    MatrixRequest,
    make_cells,
    read_request,
    with_folds,
)
from modelyard.comparison.scheduler import DONE, FAILED, CellResult, Scheduler
from modelyard.config.calls import parse_list
from modelyard.config.resolve import option_name
from modelyard.config.yaml_file import config_path
from modelyard.errors import COMMAND_LINE, Problem, UserError
from modelyard.system.console import live_table
from modelyard.system.process import log_to

NAME = "matrix"
"""The name of its log and pid file, by which `modelyard stop` finds it."""
SEARCH = "search.yaml"
"""The file by which the folder of a search differs from that of a matrix."""
_MAX_SEEDS = 1000
log = logging.getLogger("modelyard")


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
    jobs: int | None = None,
    on: str = LOCAL,
    ray_address: str | None = None,
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
        jobs: how many cells run in parallel; each gets a part of the cores and GPUs. By default one, and on a cluster
            as many as it has room for.
        on: where cells run: local, or ray.
        ray_address: the address of a Ray cluster; by default RAY_ADDRESS, or one of this machine.
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
    place = Place(on, jobs, ray_address)
    folder, request = requested(
        file, output=output, models=models, datasets=datasets, seeds=seeds, axes=axes, exclude=exclude, source=source,
        trust=trust, problems=place.problems(source), **options,
    )  # fmt: skip
    folder.create()
    with faults.injected(folder.logs, NAME), log_to(folder.logs, NAME):
        cells = merge_plan(folder, request)
        folder.write(cells)
        for note in dict.fromkeys(note for cell in cells for note in cell.notes):
            log.info("%s", note)
        most = max((cell.config.threads for cell in cells), default=0)
        with place.open(program, folder.path, most) as (executor, slots), live_table() as live:
            count = f"{len(cells)} cell{'s' if len(cells) != 1 else ''}"
            log.info("%s in %s, %d at a time", count, folder.path, len(slots))
            results = Scheduler(folder, cells, slots, executor, live).run()
        board = None
        if any(result.state == DONE for result in results):
            try:
                board = leaderboard(folder.path)
            except UserError as error:
                log.warning("no leaderboard: %s", error)
    return MatrixResult(str(folder.path), tuple(results), board)


def requested(
    file: str | Path | None = None,
    *,
    output: str | Path,
    models: Sequence[str] | str | None = None,
    datasets: Sequence[str] | str | None = None,
    seeds: int | Sequence[int] | str | None = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    exclude: Sequence[Mapping[str, Any]] = (),
    source: str = "Python",
    trust: bool = False,
    check_files: bool = True,
    problems: Iterable[Problem] = (),
    **options: Any,
) -> tuple[MatrixFolder, MatrixRequest]:
    """Returns the folder and the request of a matrix, which has no mistakes. Arguments as for `matrix`.

    Args:
        check_files: whether the files that options name must exist here.
        problems: mistakes that were found before.

    Raises:
        ConfigError: with every problem, before a folder is made.
    """
    found = list(problems)
    if not str(output):
        found.append(Problem(source, "output", "is missing: the folder of the matrix, such as runs/compared."))
    given = _axes(models, datasets, seeds, axes or {}, source, found)
    options = {option_name(key): value for key, value in options.items() if value is not None}
    picks_up = source == COMMAND_LINE
    request = MatrixRequest(
        given, exclude, options, source, picks_up, problems=found, trust=trust, check_files=check_files
    )
    if file is not None:
        request = read_request(config_path(str(file)), request)
    request = with_folds(request)
    if found:
        make_cells(request)  # raises them with all others
    folder = MatrixFolder(output)
    if request.axes and (folder.path / SEARCH).exists():
        raise UserError(f"{output} is a search, to which `modelyard tune` adds trials. Choose another --output.")
    merge_plan(folder, request)
    return folder, request


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
