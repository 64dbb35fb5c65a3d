"""Which runs a matrix has: every combination of its axes, without the excluded ones, each with its resolved config."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.comparison.request import Request
from modelyard.config import Config, resolve
from modelyard.config.schema import CORE_FIELDS, is_free, is_path
from modelyard.config.yaml_file import inline
from modelyard.errors import ConfigError, Problem, unknown
from modelyard.loop.start import with_absolute_paths

MODEL, DATASET, SEED = "model", "dataset", "random_seed"
MOST_CELLS = 5000
NAME = re.compile(r"[A-Za-z0-9_][\w.+=,@-]*")
"""What a cell may be called: it is the name of a folder."""
_OF_THE_MATRIX = ("model_dir", "runs_dir", "run_name", "resume", "best_model_dir")
_RESULTS = (
    "train_steps", "train_epochs", "eval_every", "epochs_between_evals", "eval_throttle_secs",
    "test_time_augmentation", "test_at_end",
)  # fmt: skip
"""A run may change these when it goes on; in a matrix they would make cells that can't be compared."""


@dataclass(frozen=True)
class Cell:
    """One run of a matrix.

    Args:
        name: its name.
        axes: what it has of each axis.
        config: its config.
        notes: what was set for it and has no effect.
    """

    name: str
    axes: dict[str, Any]
    config: Config
    notes: tuple[str, ...] = ()

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


def make_cells(request: Request) -> list[Cell]:
    """All cells, in the order in which they run: the first ones cover every model and every dataset.

    Raises:
        ConfigError: with every mistake, of all cells.
    """
    problems = [*request.problems, *_wrong_axes(request), *_wrong_exclusions(request)]
    usable = {key: values for key, values in request.axes.items() if values}
    excluded = [one for one in request.exclude if set(one) <= set(usable)]
    combinations = [one for one in _in_turn(usable) if not any(_matches(one, x) for x in excluded)]
    if not combinations:
        problems.append(Problem(request.where("exclude"), "exclude", "leaves no cell over."))
    if len(combinations) > MOST_CELLS:
        message = f"these make {len(combinations):,} runs; {MOST_CELLS:,} are the most."
        raise ConfigError([*problems, Problem(request.where("axes"), "axes", message)])
    configs: list[Config] = []
    for axes in combinations:
        try:
            configs.append(_resolved(request, axes))
        except ConfigError as error:
            problems += [_placed(request, problem) for problem in error.problems]
    problems += _missing_files(request, configs)
    if not problems:
        problems = list(_unused(request, combinations, configs))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return _named(request, combinations, configs)


def _placed(request: Request, problem: Problem) -> Problem:
    """The problem with the line of its option, where a file has one."""
    return replace(problem, where=request.where(problem.key)) if problem.where == request.source else problem


def _resolved(request: Request, axes: Mapping[str, Any]) -> Config:
    given = {**request.options, **axes}
    config = resolve(given, source=request.source, pick_up_files=request.pick_up_files, shared=True)
    if config.best_model_dir is not None and "best_model_dir" not in given:
        message = "would be the same for all cells; leave it out, and each has its own."
        raise ConfigError([Problem(config.origin("best_model_dir"), "best_model_dir", message)])
    ours: dict[str, Any] = {}
    if config.origin("test_at_end") == "default":  # the test score is what is compared, unless somebody says otherwise
        ours["test_at_end"] = True
    if "cluster" not in given:  # a cell must not look for other processes, whatever single runs of this project do
        ours["cluster"] = "none"
    return with_absolute_paths(config.model_copy(update=ours))


def _overruled(request: Request, config: Config) -> tuple[str, ...]:
    """What somebody set for runs and a cell does not have."""
    where = config.origin("cluster")
    if where in ("default", request.source):
        return ()
    return (f"{where}: cluster has no effect here: every cell is a run of one process.",)


def _wrong_axes(request: Request) -> Iterator[Problem]:
    if not request.axes and not request.problems:  # a file that can't be read may have meant some
        yield Problem(request.where("axes"), "axes", "there are none. Say what varies: models, datasets, seeds.")
    for key, values in request.axes.items():
        where = request.where(key)
        texts = [inline(value) for value in values]
        if not values:
            yield Problem(where, key, "has no values.")
        for text in dict.fromkeys(text for text in texts if texts.count(text) > 1):
            yield Problem(where, key, f"names {text} twice; then cells would be the same.")
        if key in request.options:
            yield Problem(where, key, "is an axis of this matrix and an option for all; give one of the two.")
    for key in dict.fromkeys((*request.axes, *request.options)):
        if key in _OF_THE_MATRIX:
            message = "has no use here: every cell has a run folder of its own, in --output."
            yield Problem(request.where(key), key, message)


def _wrong_exclusions(request: Request) -> Iterator[Problem]:
    for number, combination in enumerate(request.exclude):
        where = request.where(f"exclude {number}")
        for key, value in combination.items():
            if key not in request.axes:
                yield Problem(where, "exclude", unknown("axis", str(key), request.axes))
                continue
            known = [inline(one) for one in request.axes[key]]
            asked = [value] if inline(value) in known or not isinstance(value, list) else value
            for one in asked:
                if inline(one) not in known:
                    yield Problem(where, "exclude", unknown(f"value of {key}", inline(one), known))


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
                yield Problem(request.where(key), key, message)
    for key in request.options:
        if key not in CORE_FIELDS and not any(key in config.part_options for config in configs):
            yield Problem(request.where(key), key, "has no use here: no cell has the part whose option it is.")


def _missing_files(request: Request, configs: list[Config]) -> Iterator[Problem]:
    for name in dict.fromkeys(config.dataset for config in configs):
        if is_path(name) and not storage.is_remote(name) and not set("*?[") & set(name) and not Path(name).exists():
            yield Problem(request.where(DATASET), DATASET, f"there is no file or folder {name}.")


def _named(request: Request, combinations: list[dict[str, Any]], configs: list[Config]) -> list[Cell]:
    names = [_name(axes) for axes in combinations]
    cells = []
    for name, axes, config in zip(names, combinations, configs, strict=True):
        if names.count(name) > 1:  # files of the same name in two folders
            name = f"{name}-{hashlib.sha256(inline(axes).encode()).hexdigest()[:6]}"
        cells.append(Cell(name, axes, config, _overruled(request, config)))
    seen: dict[str, Cell] = {}
    problems = []
    for cell in cells:
        twin = seen.setdefault(cell.identity, cell)
        if twin is not cell:
            message = f"is the same run as {twin.name}; leave one out."
            problems.append(Problem(request.where("axes"), cell.name, message))
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
