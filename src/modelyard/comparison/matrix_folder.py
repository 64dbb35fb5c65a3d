"""The folder of a matrix: its plan, the configs of its cells, their runs and logs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.comparison.plan import CELL_NAME, Cell, MatrixRequest, affects_results, make_cells, result_options
from modelyard.config import resolve
from modelyard.config.schema import TRUST
from modelyard.config.yaml_file import dump, inline, read_flat
from modelyard.errors import ConfigError, Problem, RunError
from modelyard.run.directory import LOGS, RunDirectory, check_own_files, config_text, read_json
from modelyard.run.metrics import read_metrics
from modelyard.run.summary import summarize
from modelyard.system.files import explain, remove_partial, write_text

PLAN, CONFIGS, CELLS, FAILED = "matrix.yaml", "configs", "cells", "failed.json"
_VERSION, _VERSION_KEY = 1, "matrix_version"


class MatrixFolder:
    """The files in the folder of a matrix.

    Args:
        path: the folder; it need not exist.

    Raises:
        RunError: if it is a URL, a file, or a folder with other files.
    """

    def __init__(self, path: str | Path) -> None:
        if storage.is_remote(str(path)):
            raise RunError(f"{path}: a matrix must be in a folder on this machine; only single runs can be at a URL.")
        self.path = Path(path).expanduser()
        self.plan = self.path / PLAN
        self.logs = self.path / LOGS
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{path} is a file; --output must be a folder.")
        if self.path.is_dir() and not self.plan.exists():
            expected = (LOGS, CONFIGS, CELLS)
            unexpected = sorted(p.name for p in self.path.iterdir() if p.name not in expected and p.name[0] != ".")
            if unexpected:
                listed = ", ".join(unexpected[:3])
                raise RunError(f"{path} is not empty and not a matrix: it holds {listed}. Choose another --output.")

    def config(self, name: str) -> Path:
        """Returns the config file of a cell."""
        return self.path / CONFIGS / f"{name}.yaml"

    def run(self, name: str) -> RunDirectory:
        """Returns the run folder of a cell."""
        return RunDirectory(self.path / CELLS / name)

    def log(self, name: str) -> Path:
        """Returns the log of the process of a cell."""
        return self.logs / f"{name}.log"

    def create(self) -> None:
        """Creates the folders, and removes incomplete files that a killed process left."""
        self.create_folders()
        for folder in (self.path, self.path / CONFIGS):
            remove_partial(folder)

    def create_folders(self) -> None:
        """Creates the folders. Other processes may be writing files in them.

        Raises:
            RunError: if there is a link among the logs: a stranger's may lead to the user's files.
        """
        with explain(self.path, "read"):
            check_own_files([self.logs, *self.logs.rglob("*")], "a matrix")
        with explain(self.path, "make the folder"):
            for folder in (self.path / CONFIGS, self.path / CELLS, self.logs):
                folder.mkdir(parents=True, exist_ok=True)

    def cells(self, options: Mapping[str, Any] | None = None, source: str = "", *, trust: bool = False) -> list[Cell]:
        """Reads the cells of the plan, with ``options`` changed.

        Raises:
            ConfigError: if the plan or a config is damaged.
            UntrustedPluginError: if the configs name plugins that the user does not ``trust`` yet.
        """
        problems: list[Problem] = []
        cells = []
        for name, axes in self.cell_axes().items():
            given = {**(options or {}), "config_file": str(self.config(name)), TRUST: trust}
            try:
                config = resolve(given, source=source or str(self.plan), pick_up_files=False, own_files=False)
                cells.append(Cell(name, axes, config.model_copy(update={"config_file": None})))
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        return cells

    def cell_axes(self) -> dict[str, dict[str, Any]]:
        """Reads the names of the cells of the plan, and the values of each on the axes.

        Raises:
            ConfigError: if the plan is damaged.
        """
        if not self.plan.exists():
            return {}
        problems: list[Problem] = []
        found = read_flat(self.plan, problems)
        listed = found["cells"].value if "cells" in found else None
        version = found[_VERSION_KEY].value if _VERSION_KEY in found else None
        if not problems and (version != _VERSION or not isinstance(listed, dict)):
            message = f"is not a plan of version {_VERSION}, the only supported one."
            problems.append(Problem(str(self.plan), "", message))
        for name, axes in listed.items() if isinstance(listed, dict) else ():
            if not CELL_NAME.fullmatch(str(name)) or not isinstance(axes, dict):
                problems.append(Problem(str(self.plan), str(name)[:80], "is not a valid name of a cell."))
        if problems or not isinstance(listed, dict):
            raise ConfigError(problems)
        return {str(name): axes for name, axes in listed.items()}

    def write(self, cells: list[Cell]) -> None:
        """Writes the configs, and then the plan that lists them."""
        for cell in cells:
            self.write_config(cell)
        # Cells keep their numbers, by which jobs of a cluster name them.
        places = {name: number for number, name in enumerate(self.cell_axes())}
        cells = sorted(cells, key=lambda cell: places.get(cell.name, len(places)))
        head = "# The cells of this matrix; their complete configs are in configs/, their runs in cells/.\n"
        plan = {_VERSION_KEY: _VERSION, "cells": {cell.name: cell.axes for cell in cells}}
        write_text(self.plan, head + dump(plan))

    def add(self, cell: Cell) -> None:
        """Writes the config of another cell, and adds the cell to the plan. The time hardly depends on its size.

        Args:
            cell: the cell, which is not in the plan yet.
        """
        self.write_config(cell)
        text = self.plan.read_text(encoding="utf-8").replace("cells: {}\n", "cells:\n")
        lines = dump({cell.name: cell.axes}).splitlines(keepends=True)
        write_text(self.plan, text + "".join(f"  {line}" for line in lines))

    def write_config(self, cell: Cell) -> None:
        """Writes the config of a cell."""
        write_text(self.config(cell.name), config_text(cell.config))

    def failures(self) -> dict[str, str]:
        """Reads which cells failed when they were last started, and why."""
        return {str(name): str(reason) for name, reason in read_json(self.path / FAILED).items()}

    def write_failures(self, failures: Mapping[str, str]) -> None:
        """Replaces the recorded failures."""
        write_text(self.path / FAILED, json.dumps(dict(failures), indent=1) + "\n")


def holds_cells(folder: str) -> bool:
    """Returns whether a folder is that of a matrix or a search."""
    return not storage.is_remote(folder) and (Path(folder).expanduser() / PLAN).is_file()


def cells_folder(folder: str) -> Path:
    """Returns the folder with the runs of a matrix or a search."""
    return Path(folder).expanduser() / CELLS


def merge_plan(folder: MatrixFolder, request: MatrixRequest) -> list[Cell]:
    """Returns the cells to run: those of the plan in the folder, and new ones. Writes nothing.

    Raises:
        ConfigError: with every problem, and with every option that would change existing cells.
    """
    if not request.axes and not request.problems:
        known = folder.cells(trust=request.trust)
        if not known:
            message = (
                "there are none, and this folder has no plan yet. Give --models, --datasets and --seeds, or a file."
            )
            raise ConfigError([Problem(request.source, "axes", message)])
        options = request.options
        changed = folder.cells(options, request.source, trust=request.trust) if options else known
        _refuse_changes(request, known, changed)
        return changed
    known, wanted = folder.cells(trust=request.trust), make_cells(request)
    names = {cell.identity: cell.name for cell in known}
    wanted = [replace(cell, name=names.get(cell.identity, cell.name)) for cell in wanted]
    _refuse_changes(request, known, wanted)
    _refuse_new_defaults(request, known, wanted)
    wanted_names = {cell.name for cell in wanted}
    return [*wanted, *(cell for cell in known if cell.name not in wanted_names)]


def _refuse_changes(request: MatrixRequest, known: list[Cell], wanted: list[Cell]) -> None:
    before = {cell.name: result_options(cell.config) for cell in known}
    problems: dict[str, Problem] = {}
    for cell in wanted:
        new = result_options(cell.config)
        old = before.get(cell.name, new)
        for key in {**old, **new}:
            if old.get(key) != new.get(key):
                there, here = inline(old.get(key)), inline(new.get(key))
                message = f"is {here} here, but {there} in the cell {cell.name} of the plan."
                problems.setdefault(key, Problem(request.where(key), key, message))
    if problems:
        error = ConfigError(problems.values())
        error.add_hint("A plan can grow, but its cells do not change. Choose another --output for other options.")
        raise error


def _refuse_new_defaults(request: MatrixRequest, known: list[Cell], wanted: list[Cell]) -> None:
    """Refuses new cells with a default that no earlier cell has: the results could not be compared."""
    flats = [cell.config.flat() for cell in known]
    chosen = dict.fromkeys(key for cell in known for key in cell.config.changed() if affects_results(key))
    before = {key: list(dict.fromkeys(inline(flat.get(key)) for flat in flats)) for key in chosen}
    known_names = {cell.name for cell in known}
    problems: dict[str, Problem] = {}
    for cell in wanted:
        new = cell.config.flat()
        for key, found in before.items() if cell.name not in known_names else ():
            values = [value for value in found if value != inline(None)]
            is_new = key in new and inline(new[key]) not in found
            if values and is_new and cell.config.origin(key) == "default":
                listed = " or ".join(values[:3]) + (" …" if len(values) > 3 else "")
                message = f"is {listed} in the cells of this plan, but the new cell {cell.name} has the default"
                problems.setdefault(key, Problem(request.source, key, f"{message}, {inline(new[key])}."))
    if problems:
        error = ConfigError(problems.values())
        error.add_hint(
            "To add cells to this plan, give these options again, or extend the axes in its file. "
            "To use the defaults, give their values. For a new comparison, choose another --output."
        )
        raise error


def is_finished(directory: RunDirectory, tests: bool, exports: Sequence[str] = ()) -> bool:
    """Returns whether a run has nothing left to do, including the test and the exports at its end."""
    if not directory.exists() or summarize(directory)["status"] not in ("finished", "stopped early"):
        return False
    if not all(any(directory.export(form).glob("[0-9]*")) for form in exports):
        return False
    sizes = read_json(directory.manifest).get("dataset", {}).get("sizes", {})
    return (
        not tests or "test" not in sizes or any(row.get("split") == "test" for row in read_metrics(directory.metrics))
    )
