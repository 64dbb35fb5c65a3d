"""Which runs a matrix has: every combination of its axes, without the excluded ones, each with its resolved config."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.config import Config, resolve
from modelyard.config.resolve import COMMAND_LINE
from modelyard.config.schema import CORE_FIELDS, EXCLUSIVE, is_free, is_path
from modelyard.config.yaml_file import Value, inline, read_flat
from modelyard.errors import ConfigError, Problem, unknown
from modelyard.loop.start import with_absolute_paths

MODEL, DATASET, SEED = "model", "dataset", "random_seed"
MOST_CELLS = 5000
NAME = re.compile(r"[A-Za-z0-9_][\w.+=,@-]*")
"""What a cell may be called: it is the name of a folder."""
_OF_THE_MATRIX = ("model_dir", "runs_dir", "run_name", "resume", "best_model_dir")
_ALWAYS = {"test_at_end": True, "cluster": "none"}
"""Unless the plan says otherwise: the test score is what is compared, and a cell never looks for other processes."""
_RESULTS = (
    "train_steps", "train_epochs", "eval_every", "epochs_between_evals", "eval_throttle_secs",
    "test_time_augmentation", "test_at_end",
)  # fmt: skip
"""A run may change these when it goes on; in a matrix they would make cells that can't be compared."""
_SECTIONS = ("axes", "exclude", "options")


@dataclass(frozen=True)
class Request:
    """What was asked for, before it is checked.

    Args:
        axes: for each option that varies, its values.
        exclude: combinations to leave out.
        options: options that all cells have.
        source: where this was said, for error messages.
        pick_up_files: whether ./project.yaml counts, as for a run from the command line.
    """

    axes: Mapping[str, Sequence[Any]]
    exclude: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = COMMAND_LINE
    pick_up_files: bool = False


@dataclass(frozen=True)
class Cell:
    """One run of a matrix: its name, what it has of each axis, and its config."""

    name: str
    axes: dict[str, Any]
    config: Config

    @property
    def identity(self) -> str:
        """The same for cells that would learn and measure the same."""
        return json.dumps(counted(self.config), sort_keys=True)


def counted(config: Config) -> dict[str, Any]:
    """The options that decide what comes out of a run."""
    return {key: value for key, value in config.flat().items() if counts(key)}


def counts(key: str) -> bool:
    """Whether an option has a part in what comes out of a run."""
    return key in _RESULTS or not is_free(key)


def read_request(path: Path, more: Request) -> Request:
    """The matrix that a YAML file asks for; axes and options of ``more`` take the place of the file's.

    Raises:
        ConfigError: with everything that is wrong with the file.
    """
    problems: list[Problem] = []
    found = read_flat(path, problems)
    for key, value in found.items():
        if key not in _SECTIONS:
            problems.append(Problem(value.where, key, unknown("section", key, _SECTIONS)))
    file_axes = _mapping(found, "axes", problems)
    for key, values in file_axes.items():
        if not isinstance(values, list) or not values:
            problems.append(Problem(found["axes"].where, key, f"must be a list of values, got {inline(values)}."))
    file_options = _mapping(found, "options", problems)
    exclude = found["exclude"].value if "exclude" in found else []
    if not isinstance(exclude, list) or not all(isinstance(one, dict) and one for one in exclude):
        problems.append(Problem(found["exclude"].where, "exclude", "must be a list of combinations of the axes."))
    if problems:
        raise ConfigError(problems)
    for pair in EXCLUSIVE:
        if set(pair) & set(more.options):
            file_options = {key: value for key, value in file_options.items() if key not in pair}
    return Request(
        {**file_axes, **more.axes},
        [*exclude, *more.exclude],
        {**file_options, **more.options},
        f"{path} or {more.source}" if more.options or more.axes else str(path),
        more.pick_up_files,
    )


def _mapping(found: Mapping[str, Value], section: str, problems: list[Problem]) -> dict[str, Any]:
    value = found[section].value if section in found else {}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key.replace("-", "_"): item for key, item in value.items()}
    if value is not None:
        problems.append(Problem(found[section].where, section, "must hold 'option: value' lines."))
    return {}


def make_cells(request: Request) -> list[Cell]:
    """All cells, in the order in which they run: the first ones cover every model and every dataset.

    Raises:
        ConfigError: with every mistake, of all cells.
    """
    problems = [*_wrong_axes(request), *_wrong_exclusions(request)]
    if problems:
        raise ConfigError(problems)
    combinations = [one for one in _in_turn(request.axes) if not any(_matches(one, x) for x in request.exclude)]
    if not combinations:
        raise ConfigError([Problem(request.source, "exclude", "leaves no cell over.")])
    if len(combinations) > MOST_CELLS:
        message = f"these make {len(combinations):,} runs; {MOST_CELLS:,} are the most."
        raise ConfigError([Problem(request.source, "axes", message)])
    configs: list[Config] = []
    for axes in combinations:
        try:
            configs.append(_resolved(request, axes))
        except ConfigError as error:
            problems += error.problems
    if not problems:
        problems = [*_unused(request, combinations, configs), *_missing_files(request, configs)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return _named(request, combinations, configs)


def _resolved(request: Request, axes: Mapping[str, Any]) -> Config:
    given = {**_ALWAYS, **request.options, **axes}
    config = resolve(given, source=request.source, pick_up_files=request.pick_up_files, shared=True)
    if config.best_model_dir is not None:
        message = "would be the same for all cells; leave it out, and each has its own."
        raise ConfigError([Problem(config.origin("best_model_dir"), "best_model_dir", message)])
    return with_absolute_paths(config)


def _wrong_axes(request: Request) -> Iterator[Problem]:
    if not request.axes:
        yield Problem(request.source, "axes", "there are none. Say what varies: models, datasets, seeds.")
    for key, values in request.axes.items():
        texts = [inline(value) for value in values]
        if not values:
            yield Problem(request.source, key, "has no values.")
        for text in dict.fromkeys(text for text in texts if texts.count(text) > 1):
            yield Problem(request.source, key, f"names {text} twice; then cells would be the same.")
        if key in request.options:
            yield Problem(request.source, key, "is an axis of this matrix and an option for all; give one of the two.")
    for key in (*request.axes, *request.options):
        if key in _OF_THE_MATRIX:
            yield Problem(request.source, key, "has no use here: every cell has a run folder of its own, in --output.")


def _wrong_exclusions(request: Request) -> Iterator[Problem]:
    for combination in request.exclude:
        for key, value in combination.items():
            if key not in request.axes:
                yield Problem(request.source, "exclude", unknown("axis", str(key), request.axes))
                continue
            known = [inline(one) for one in request.axes[key]]
            asked = [value] if inline(value) in known or not isinstance(value, list) else value
            for one in asked:
                if inline(one) not in known:
                    yield Problem(request.source, "exclude", unknown(f"value of {key}", inline(one), known))


def _matches(axes: Mapping[str, Any], exclusion: Mapping[str, Any]) -> bool:
    def fits(mine: Any, other: Any) -> bool:
        if inline(mine) == inline(other):
            return True
        return isinstance(other, list) and any(inline(mine) == inline(one) for one in other)

    return all(fits(axes[key], value) for key, value in exclusion.items())


def _in_turn(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """All combinations: seed by seed, and models and datasets diagonally, so that early results cover all of them."""
    models, datasets = axes.get(MODEL, (None,)), axes.get(DATASET, (None,))
    others = [key for key in axes if key not in (MODEL, DATASET, SEED)]
    many, few = max(len(models), len(datasets)), (len(models), len(datasets))
    diagonal = sorted(itertools.product(range(few[0]), range(few[1])), key=lambda at: ((at[1] - at[0]) % many, at))
    for seed in axes.get(SEED, (None,)):
        for values in itertools.product(*(axes[key] for key in others)):
            rest = dict(zip(others, values, strict=True))
            for i, j in diagonal:
                one = {MODEL: models[i], DATASET: datasets[j], **rest, SEED: seed}
                yield {key: one[key] for key in axes}


def _unused(request: Request, combinations: list[dict[str, Any]], configs: list[Config]) -> Iterator[Problem]:
    """Options of parts that a cell does not have: such an axis makes cells that are the same."""
    for axes, config in zip(combinations, configs, strict=True):
        has = config.flat()
        for key in axes:
            if key not in has:
                message = f"has no use with model {config.model} and dataset {config.dataset}; exclude them."
                yield Problem(request.source, key, message)
    for key in request.options:
        if key not in CORE_FIELDS and not any(key in config.part_options for config in configs):
            yield Problem(request.source, key, "has no use here: no cell has the part whose option it is.")


def _missing_files(request: Request, configs: list[Config]) -> Iterator[Problem]:
    for name in dict.fromkeys(config.dataset for config in configs):
        if is_path(name) and not storage.is_remote(name) and not set("*?[") & set(name) and not Path(name).exists():
            yield Problem(request.source, DATASET, f"there is no file or folder {name}.")


def _named(request: Request, combinations: list[dict[str, Any]], configs: list[Config]) -> list[Cell]:
    names = [_name(axes) for axes in combinations]
    cells = []
    for name, axes, config in zip(names, combinations, configs, strict=True):
        if names.count(name) > 1:  # files of the same name in two folders
            name = f"{name}-{hashlib.sha256(inline(axes).encode()).hexdigest()[:6]}"
        cells.append(Cell(name, axes, config))
    seen: dict[str, Cell] = {}
    problems = []
    for cell in cells:
        twin = seen.setdefault(cell.identity, cell)
        if twin is not cell:
            problems.append(Problem(request.source, cell.name, f"is the same run as {twin.name}; leave one out."))
    if problems:
        raise ConfigError(problems)
    return cells


def _name(axes: Mapping[str, Any]) -> str:
    """A name of a folder that people can read: simple_cnn-digits-optimizer=sgd-seed0."""
    parts = []
    for key, value in axes.items():
        text = value if isinstance(value, str) else inline(value)
        if key == DATASET and is_path(text):
            text = Path(text.rstrip("/")).stem
        text = re.sub(r"[^\w.+=,@-]+", "_", text, flags=re.ASCII).strip("_.-")[:60] or "value"
        parts.append(text if key in (MODEL, DATASET) else f"seed{text}" if key == SEED else f"{key}={text}")
    return "-".join(parts)[:180].lstrip("-=+,@.") or "cell"
