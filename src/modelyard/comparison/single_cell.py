"""One cell of a matrix, as a job of a cluster runs it while other jobs run the others."""

from __future__ import annotations

import logging
from typing import Any

from modelyard.comparison.leaderboard import leaderboard
from modelyard.comparison.matrix_folder import MatrixFolder, is_finished, merge_plan
from modelyard.comparison.plan import Cell, MatrixRequest
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, RunError, UserError, unknown
from modelyard.run.directory import run_options
from modelyard.system.process import log_to

log = logging.getLogger("modelyard")


def write_plan(folder: MatrixFolder, request: MatrixRequest, name: str) -> list[Cell]:
    """Writes the plan of a matrix without running it, and returns its cells in the order of their numbers.

    Args:
        folder: the folder of the matrix.
        request: the request.
        name: the name of the pid file, so that nobody else writes the plan meanwhile.
    """
    folder.create_folders()
    with log_to(folder.logs, name):
        folder.write(merge_plan(folder, request))
        return folder.cells(trust=request.trust)


def choose_cell(folder: MatrixFolder, request: MatrixRequest, only: str) -> Cell:
    """Returns a cell by its name or number. If the plan lacks cells of the request, it is written.

    Several jobs may do this at the same time: all of them write the same.

    Raises:
        ConfigError: if there is no such cell.
    """
    cells = merge_plan(folder, request)
    chosen = {cell.name: cell for cell in cells}.get(only)
    if chosen is None and only.isdecimal() and int(only) < len(cells):
        chosen = cells[int(only)]
    if chosen is None:
        names = [cell.name for cell in cells]
        numbers = f"is {only}, but the plan has the cells 0 to {len(cells) - 1}."
        reason = numbers if only.isdecimal() else unknown("cell", only, names)
        raise ConfigError([Problem(COMMAND_LINE, "only", reason)])
    if chosen.name not in folder.cell_axes():
        folder.create_folders()
        folder.write(cells)
    return chosen


def options_of(folder: MatrixFolder, cell: Cell) -> dict[str, Any] | None:
    """Returns the options of the command that runs a cell; None if it is finished."""
    directory, config = folder.run(cell.name), cell.config
    if is_finished(directory, config.test_at_end, config.export_at_end):
        return None
    options: dict[str, Any] = {"config_file": str(folder.config(cell.name)), "model_dir": str(directory.path)}
    threads = run_options(directory).get("threads") if directory.exists() else None
    if threads:  # a resumed run keeps it
        options["threads"] = threads
    if config.plugins or config.cache_dir:  # what was trusted where the plan was made
        options["trust"] = True
    return options


def compare_if_complete(folder: MatrixFolder, trust: bool) -> bool:
    """Writes the leaderboard if all cells are finished; returns whether it is written."""
    for cell in reversed(folder.cells(trust=trust)):  # the last are finished last
        if not is_finished(folder.run(cell.name), cell.config.test_at_end, cell.config.export_at_end):
            return False
    try:
        leaderboard(folder.path)
    except (UserError, RunError) as error:
        log.warning("no leaderboard: %s", error)
        return False
    return True
