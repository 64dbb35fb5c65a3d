"""The runs of a matrix: every combination of its axes except the excluded ones, each with its resolved config.

A `MatrixRequest` comes from a YAML file, the command line or Python. `make_cells` checks it and returns its cells.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelyard.config import Config, resolve
from modelyard.config.calls import parse_list
from modelyard.config.named_files import SAVED_MODEL_PATH
from modelyard.config.resolve import relative_to_file
from modelyard.config.schema import CORE_FIELDS, EXCLUSIVE, TRUST, is_mutable, is_path
from modelyard.config.trust import is_own_file, trust_plugins, trust_saved_model
from modelyard.config.yaml_file import Value, inline, read_sections
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, nearest, unknown
from modelyard.loop.start import with_absolute_paths

MODEL, DATASET, SEED, FOLDS, FOLD = "model", "dataset", "random_seed", "folds", "fold"
PAUSE_AT = "pause_at"
MAX_CELLS = 5000
CELL_NAME = re.compile(r"[A-Za-z0-9_][\w.+=,@-]*")
"""A valid name of a cell, which is also the name of its folder."""
_SHORT = {MODEL: "", DATASET: "", SEED: "seed", FOLD: "fold"}
"""Axes whose names are shorter in the names of cells."""
_SECTIONS = ("axes", "exclude", "options")
_SET_BY_THE_MATRIX = ("model_dir", "runs_dir", "run_name", "resume", "best_model_dir")
_AFFECT_RESULTS = (
    "train_steps", "train_epochs", "eval_every", "epochs_between_evals", "eval_throttle_secs",
    "test_time_augmentation", "test_time_augmentation_below", "test_at_end",
)  # fmt: skip
"""A resumed run may change these options. In a matrix they would make cells that can't be compared."""


# -- the request ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatrixRequest:
    """A matrix as the user describes it, not checked yet.

    Args:
        axes: for each option that varies, its values.
        exclude: combinations to leave out.
        options: options of all cells.
        source: where the request comes from, for error messages.
        pick_up_files: whether ./project.yaml is read, as for a run from the command line.
        locations: file and line of single keys, if known: options, sections, ``exclude 0`` and so on.
        problems: errors found so far; they are raised together with all others.
        trust: plugins may be imported, whichever file names them.
        check_files: whether the files that options name must exist here.
        own_files: files with options, such as a recipe, may be the user's own; those that a stranger names are not.
    """

    axes: Mapping[str, Sequence[Any]]
    exclude: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = COMMAND_LINE
    pick_up_files: bool = False
    locations: Mapping[str, str] = field(default_factory=dict)
    problems: Sequence[Problem] = ()
    trust: bool = False
    check_files: bool = True
    own_files: bool = True

    def where(self, key: str) -> str:
        """Returns where ``key`` was set."""
        return self.locations.get(key, self.source)


def read_request(path: Path | str, overrides: MatrixRequest) -> MatrixRequest:
    """Reads a request from a YAML file. Axes and options of ``overrides`` replace those of the file.

    Errors in the file are added to ``problems`` of the result. Everything that could be read is kept.
    """
    problems: list[Problem] = []
    found = read_sections(path, problems)
    for key in [key for key in found if key not in _SECTIONS]:
        problems.append(Problem(found[key].where, key, unknown("section", key, _SECTIONS)))
        near = nearest(key, _SECTIONS, 1)
        if near:  # the section is misspelt; its contents are checked all the same
            found.setdefault(near[0], found[key])
    axes, options = (_options(found, section, problems) for section in ("axes", "options"))
    for key, value in axes.items():
        if not isinstance(value.value, list):
            problems.append(Problem(value.where, key, f"must be a list of values, got {inline(value.value)}."))
            axes[key] = Value([value.value], value.where)
    for pair in EXCLUSIVE:
        if set(pair) & set(overrides.options):
            options = {key: value for key, value in options.items() if key not in pair}
    if "plugins" not in {*overrides.options, *overrides.axes}:
        _locate_plugins(path, options, axes, overrides.trust)
    if not is_own_file(path) and SAVED_MODEL_PATH not in {*overrides.options, *overrides.axes}:
        _check_saved_models([*options.items(), *axes.items()], overrides.trust)
    exclude = _exclusions(found, problems)
    locations = {"axes": str(path), "exclude": str(path)}
    locations |= {key: value.where for key, value in {**found, **options, **axes}.items()}
    locations |= {f"exclude {number}": value.where for number, value in enumerate(exclude)}
    locations |= dict.fromkeys((*overrides.options, *overrides.axes), overrides.source)
    return MatrixRequest(
        {**{key: value.value for key, value in axes.items()}, **overrides.axes},
        [*(value.value for value in exclude), *overrides.exclude],
        {**{key: value.value for key, value in options.items()}, **overrides.options},
        f"{path} or {overrides.source}" if overrides.options or overrides.axes else str(path),
        overrides.pick_up_files,
        locations,
        [*overrides.problems, *problems],
        overrides.trust,
        overrides.check_files,
    )


def _locate_plugins(path: Path | str, options: dict[str, Value], axes: dict[str, Value], trust: bool) -> None:
    """Makes the paths of plugins relative to the file that names them.

    Raises:
        UntrustedPluginError: if that file is not the user's own.
    """

    def located(value: Any) -> list[str]:
        return list(relative_to_file(tuple(map(str, parse_list(value))), path))

    for section, is_axis in ((options, False), (axes, True)):
        if "plugins" in section:
            given, where = section["plugins"].value, section["plugins"].where
            found = [located(value) for value in given] if is_axis else located(given)
            names = [name for value in found for name in value] if is_axis else found
            trust_plugins([str(name) for name in names], where, named_by_user=is_own_file(path), trust=trust)
            section["plugins"] = Value(found, where)


def _check_saved_models(given: Sequence[tuple[str, Value]], trust: bool) -> None:
    """Refuses SavedModels that the plan of somebody else names, even if no cell may use them.

    Raises:
        UntrustedPluginError: if the user has not trusted them.
    """
    for key, value in given:
        if key == SAVED_MODEL_PATH:
            for folder in value.value if isinstance(value.value, list) else [value.value]:
                folder = folder.value if isinstance(folder, Value) else folder
                trust_saved_model(str(folder), value.where, named_by_user=False, trust=trust)


def _options(found: Mapping[str, Value], section: str, problems: list[Problem]) -> dict[str, Value]:
    if section not in found or found[section].value is None:
        return {}
    if isinstance(found[section].value, dict):
        return dict(found[section].value)
    problems.append(Problem(found[section].where, section, "must hold 'option: value' lines."))
    return {}


def _exclusions(found: Mapping[str, Value], problems: list[Problem]) -> list[Value]:
    if "exclude" not in found or found["exclude"].value is None:
        return []
    listed: Any = found["exclude"].value
    valid = [v for v in listed if isinstance(v.value, dict) and v.value] if isinstance(listed, list) else []
    invalid = [v for v in listed if v not in valid] if isinstance(listed, list) else [found["exclude"]]
    for value in invalid:
        problems.append(Problem(value.where, "exclude", "must be a list of combinations of the axes."))
    return [Value({str(key).replace("-", "_"): one for key, one in v.value.items()}, v.where) for v in valid]


# -- its cells ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run of a matrix. ``axes`` has its value on each axis, ``notes`` the options that have no effect on it."""

    name: str
    axes: dict[str, Any]
    config: Config
    notes: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """A text that is the same for cells with the same results."""
        return json.dumps(result_options(self.config), sort_keys=True)


def result_options(config: Config) -> dict[str, Any]:
    """Returns the options that affect the results of a run."""
    return {key: value for key, value in config.flat().items() if affects_results(key)}


def affects_results(key: str) -> bool:
    """Returns whether an option affects the results of a run."""
    return key in _AFFECT_RESULTS or not is_mutable(key)


def make_cells(request: MatrixRequest) -> list[Cell]:
    """Returns all cells in the order in which they run: the first ones cover every model and every dataset.

    Raises:
        ConfigError: with every problem of every cell.
    """
    problems = [*request.problems, *_axis_problems(request), *_exclusion_problems(request)]
    usable = {key: values for key, values in request.axes.items() if values}
    excluded = [one for one in request.exclude if set(one) <= set(usable)]
    combinations = [one for one in _combinations(usable) if not any(_matches(one, x) for x in excluded)]
    if not combinations:
        problems.append(Problem(request.where("exclude"), "exclude", "leaves no cell."))
    if len(combinations) > MAX_CELLS:
        message = f"these make {len(combinations):,} runs; a matrix has at most {MAX_CELLS:,}."
        raise ConfigError([*problems, Problem(request.where("axes"), "axes", message)])
    cells = []
    for name, axes in zip(_cell_names(combinations), combinations, strict=True):
        try:
            config = _resolve_cell(request, axes)
            cells.append(Cell(name, axes, config, _ignored_options(request, config)))
        except ConfigError as error:
            problems += [_located(request, problem) for problem in error.problems]
    problems = problems or list(_options_without_effect(request, cells)) or list(_repeated_runs(request, cells))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return cells


def make_cell(request: MatrixRequest, name: str, axes: Mapping[str, Any]) -> Cell:
    """Returns one cell, whose options are not checked against those of others.

    Raises:
        ConfigError: with every problem.
    """
    problems = list(_option_problems(request, axes))
    try:
        cell = Cell(name, dict(axes), _resolve_cell(request, axes))
    except ConfigError as error:
        raise ConfigError(dict.fromkeys([*problems, *error.problems])) from None
    problems += _axes_without_effect(request, cell)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return cell


def with_folds(request: MatrixRequest) -> MatrixRequest:
    """Returns the request with the axis ``fold``, if all cells have ``folds`` and it does not say which of them."""
    try:
        folds = int(request.options.get(FOLDS) or 0)
    except (TypeError, ValueError):
        return request  # an error of every cell
    if not 2 <= folds <= MAX_CELLS or FOLD in {*request.axes, *request.options}:
        return request
    axes = {key: values for key, values in request.axes.items() if key != SEED}
    axes[FOLD] = list(range(1, folds + 1))
    axes |= {key: values for key, values in request.axes.items() if key == SEED}
    return replace(request, axes=axes, locations={**request.locations, FOLD: request.where(FOLDS)})


def _located(request: MatrixRequest, problem: Problem) -> Problem:
    """Adds the line of its option, if it is in a file."""
    return replace(problem, where=request.where(problem.key)) if problem.where == request.source else problem


def _resolve_cell(request: MatrixRequest, axes: Mapping[str, Any]) -> Config:
    given = {key: value for key, value in {**request.options, **axes}.items() if key != TRUST}
    given |= {TRUST: request.trust}
    config = resolve(
        given,
        source=request.source,
        pick_up_files=request.pick_up_files,
        shared=True,
        own_files=request.own_files,
        check_files=request.check_files,
    )
    if config.best_model_dir is not None and "best_model_dir" not in given:
        message = "would be the same for all cells. Leave it out: each cell has its own."
        raise ConfigError([Problem(config.origin("best_model_dir"), "best_model_dir", message)])
    defaults: dict[str, Any] = {}
    if config.origin("test_at_end") == "default":  # test scores are compared, unless the user says otherwise
        defaults["test_at_end"] = True
    if "cluster" not in given:  # a cell is one process, even if project.yaml names a cluster for single runs
        defaults["cluster"] = "none"
    return with_absolute_paths(config.model_copy(update=defaults))


def _ignored_options(request: MatrixRequest, config: Config) -> tuple[str, ...]:
    where = config.origin("cluster")
    if where in ("default", request.source):
        return ()
    return (f"{where}: cluster has no effect here: every cell is a run of one process.",)


def _axis_problems(request: MatrixRequest) -> Iterator[Problem]:
    if not request.axes and not request.problems:  # a file that can't be read may have some
        message = "there are none. Give the options that vary: models, datasets, seeds."
        yield Problem(request.where("axes"), "axes", message)
    for key, values in request.axes.items():
        where = request.where(key)
        texts = [inline(value) for value in values]
        if not values:
            yield Problem(where, key, "has no values.")
        for text in dict.fromkeys(text for text in texts if texts.count(text) > 1):
            yield Problem(where, key, f"lists {text} twice; the cells would be identical.")
        if key in request.options:
            yield Problem(where, key, "is both an axis of this matrix and an option of all cells; give only one.")
    yield from _option_problems(request, request.axes)


def _option_problems(request: MatrixRequest, axes: Mapping[str, Any]) -> Iterator[Problem]:
    for key in dict.fromkeys((*axes, *request.options)):
        if key == TRUST:
            message = "has no effect inside a file; give it on the command line or in Python."
            yield Problem(request.where(key), key, message)
        if key == PAUSE_AT:
            message = "is not supported here: the runs of a matrix end with their last step."
            yield Problem(request.where(key), key, message)
        if key in _SET_BY_THE_MATRIX:
            message = "has no effect here: every cell has its own run folder in --output."
            yield Problem(request.where(key), key, message)


def _exclusion_problems(request: MatrixRequest) -> Iterator[Problem]:
    for number, combination in enumerate(request.exclude):
        where = request.where(f"exclude {number}")
        for key, value in combination.items():
            if key not in request.axes:
                yield Problem(where, "exclude", unknown("axis", str(key), request.axes))
                continue
            known = [inline(one) for one in request.axes[key]]
            excluded = [value] if inline(value) in known or not isinstance(value, list) else value
            for one in excluded:
                if inline(one) not in known:
                    yield Problem(where, "exclude", unknown(f"value of {key}", inline(one), known))


def _matches(axes: Mapping[str, Any], exclusion: Mapping[str, Any]) -> bool:
    for key, value in exclusion.items():
        excluded = [value, *(value if isinstance(value, list) else ())]  # several values, or one that is a list
        if inline(axes[key]) not in map(inline, excluded):
            return False
    return True


def _combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yields seed by seed, and models and datasets diagonally, so that early results cover all of them."""
    models, datasets = axes.get(MODEL, (None,)), axes.get(DATASET, (None,))
    others = [key for key in axes if key not in (MODEL, DATASET, SEED)]
    period = max(len(models), len(datasets))
    pairs = itertools.product(range(len(models)), range(len(datasets)))
    diagonal = sorted(pairs, key=lambda at: ((at[1] - at[0]) % period, at))
    for seed in axes.get(SEED, (None,)):
        for values in itertools.product(*(axes[key] for key in others)):
            rest = dict(zip(others, values, strict=True))
            for i, j in diagonal:
                one = {MODEL: models[i], DATASET: datasets[j], **rest, SEED: seed}
                yield {key: one[key] for key in axes}


def _options_without_effect(request: MatrixRequest, cells: list[Cell]) -> Iterator[Problem]:
    """Yields options of parts that a cell does not have: such an axis makes identical cells."""
    for cell in cells:
        yield from _axes_without_effect(request, cell)
    for key in request.options:
        if key not in CORE_FIELDS and not any(key in cell.config.component_options for cell in cells):
            message = "has no effect here: no cell has the model, dataset or other part that it belongs to."
            yield Problem(request.where(key), key, message)


def _axes_without_effect(request: MatrixRequest, cell: Cell) -> Iterator[Problem]:
    has = cell.config.flat()
    for key in cell.axes:
        if key not in has:
            message = f"has no effect with model {cell.config.model} and dataset {cell.config.dataset}; exclude them."
            yield Problem(request.where(key), key, message)


def _repeated_runs(request: MatrixRequest, cells: list[Cell]) -> Iterator[Problem]:
    seen: dict[str, Cell] = {}
    for cell in cells:
        twin = seen.setdefault(cell.identity, cell)
        if twin is not cell:
            yield Problem(request.where("axes"), cell.name, f"is the same run as {twin.name}; leave one out.")


def _cell_names(combinations: list[dict[str, Any]]) -> list[str]:
    """Returns readable names for folders, such as simple_cnn-digits-optimizer=sgd-seed0."""
    names = []
    for axes in combinations:
        parts = []
        for key, value in axes.items():
            text = value if isinstance(value, str) else inline(value)
            if key == DATASET and is_path(text):
                text = Path(text.rstrip("/")).stem
            text = re.sub(r"[^\w.+=,@-]+", "_", text, flags=re.ASCII).strip("_.-")[:60] or "value"
            parts.append(f"{_SHORT.get(key, key + '=')}{text}")
        names.append("-".join(parts)[:180].lstrip("-=+,@.") or "cell")
    count = Counter(names)  # a name may be that of files in two folders
    return [
        name if count[name] == 1 else f"{name}-{hashlib.sha256(inline(axes).encode()).hexdigest()[:6]}"
        for name, axes in zip(names, combinations, strict=True)
    ]
