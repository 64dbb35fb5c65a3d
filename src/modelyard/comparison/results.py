"""The results of runs, read from their folders, and the entrants of a leaderboard that they belong to."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard import storage
from modelyard.comparison.matrix_folder import PLAN, MatrixFolder, is_finished
from modelyard.comparison.plan import DATASET, FOLD, FOLDS, MODEL, SEED, affects_results
from modelyard.config.schema import is_path
from modelyard.config.yaml_file import inline, is_run_config
from modelyard.errors import RunError, UserError
from modelyard.registry import DATASETS
from modelyard.run.checkpoint import list_best, step_of
from modelyard.run.directory import BIN, CONFIG, RunDirectory, find_run_folder, open_run_folder, run_options
from modelyard.run.examples import read_example_values
from modelyard.run.manifest import read_manifest
from modelyard.run.metrics import read_metrics
from modelyard.run.summary import summarize

_NOT_METRICS = ("step", "epoch", "split", "seconds")
Array = NDArray[Any]
_ENDED = ("finished", "stopped early")
_SPLIT_OPTIONS = (FOLDS, "split_seed", "split_group", "validation_fraction", "test_fraction")
_NOT_DISTINGUISHING = (
    MODEL, DATASET, SEED, FOLD, FOLDS, "recipe", "best_model_dir", "best_metric", "test_at_end", "split_seed",
)  # fmt: skip


@dataclass(frozen=True)
class RunResult:
    """The results of a run that has ended. Its name is its folder, relative to the folder of all runs.

    ``scores`` are the metrics of each split, of the best model if one was kept, and ``steps`` those of the models.
    ``looks`` counts the evaluations of each split that they are the best of. ``fingerprint`` is that of the data, which
    all folds of a division have in common. ``splits`` has the number of examples of each split by class. ``started`` is
    when it was first started, as text that sorts by time. ``modes`` says what is better of its metrics, min or max.
    """

    name: str
    directory: RunDirectory
    options: Mapping[str, Any]
    fingerprint: str
    scores: Mapping[str, Mapping[str, float]]
    steps: Mapping[str, int]
    looks: Mapping[str, int]
    sizes: Mapping[str, int]
    splits: Mapping[str, Sequence[int] | None]
    parameters: int | None
    flops: int | None
    seconds: float | None
    images_per_second: float | None
    started: str
    modes: Mapping[str, str]

    @property
    def fold(self) -> int | None:
        """Which fold its validation split is; None without cross-validation."""
        fold: int | None = self.options.get(FOLD)
        return fold


@dataclass(frozen=True)
class Unfinished:
    """A run that is not counted: its name, its status, and the reason if known."""

    name: str
    status: str
    reason: str = ""


def read_results(folder: str) -> tuple[list[RunResult], list[Unfinished]]:
    """Reads all runs in a folder and below, finished and unfinished ones, by name.

    Args:
        folder: the folder, or its URL.

    Raises:
        RunError: if there is no such folder.
    """
    if storage.is_remote(folder):
        return _read_remote(folder)
    top = Path(folder)
    if not top.is_dir():
        raise RunError(f"{top} is not a folder. Give a folder of runs, such as runs or the output of a matrix.")
    results: list[RunResult] = []
    others: list[Unfinished] = []
    found, matrices = _find_runs(top)
    failures = _failures(top, matrices)
    for path in found:
        reason = failures.pop(path.resolve(), "")
        one = read_run(str(path), str(path.relative_to(top)), reason)
        (results if isinstance(one, RunResult) else others).append(one)  # type: ignore[arg-type] # by its type
    others += [
        Unfinished(str(path.relative_to(top.resolve())), "failed" if reason else "not begun", reason)
        for path, reason in failures.items()
        if not (path / CONFIG).exists()
    ]
    return results, sorted(others, key=lambda one: one.name)


def _read_remote(url: str) -> tuple[list[RunResult], list[Unfinished]]:
    """Reads the runs below a URL. Configs of other runs may be in a run folder, so the upper ones count."""
    results: list[RunResult] = []
    others: list[Unfinished] = []
    found: list[str] = []
    for name in sorted(storage.names_below(url), key=lambda name: name.count("/")):
        folder, _, file = f"/{name}".rpartition("/")
        if file == CONFIG and not any(f"{folder}/".startswith(f"{above}/") for above in found):
            found.append(folder)
    for folder in found:
        run = storage.join(url, folder) if folder else url.rstrip("/")
        one = read_run(run, folder.strip("/") or run.rpartition("/")[2], "")
        (results if isinstance(one, RunResult) else others).append(one)  # type: ignore[arg-type] # by its type
    return results, sorted(others, key=lambda one: one.name)


def read_run(run: str, name: str, reason: str) -> RunResult | Unfinished:
    """Reads one run.

    Args:
        run: its folder or URL.
        name: what it is called.
        reason: why it failed, if that is known.
    """
    try:
        directory = find_run_folder(run)
        status = summarize(directory)["status"]
        if status in _ENDED:
            if is_finished(directory, bool(run_options(directory).get("test_at_end"))):
                return _read_result(open_run_folder(run) if directory.mirror is None else directory, name)
            status = "interrupted"  # before the test
    except (UserError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        status, reason = "damaged", reason or str(error)
    status, _, more = str(status).partition(": ")
    return Unfinished(name, "failed" if reason and status != "damaged" else status, reason or more)


def _find_runs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the run folders and the folders of matrices; does not search inside run folders."""
    runs, matrices = [], []
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != BIN)
        if CONFIG in files and is_run_config(Path(path) / CONFIG):
            folders.clear()
            runs.append(Path(path))
        elif PLAN in files:
            matrices.append(Path(path))
    return runs, matrices


def _failures(folder: Path, matrices: list[Path]) -> dict[Path, str]:
    """Returns the cells of these matrices, and of one that contains the folder: why they failed, if they did."""
    found: dict[Path, str] = {}
    around = [path for path in folder.resolve().parents[:2] if (path / PLAN).is_file()]
    for path in (*around, *matrices):
        with contextlib.suppress(UserError):  # an unreadable plan; the runs of its cells are found without it
            matrix = MatrixFolder(path)
            failed = matrix.failures()
            for name in matrix.cell_axes():
                cell = matrix.run(name).path.resolve()
                if cell.is_relative_to(folder.resolve()):
                    found[cell] = failed.get(name, "")
    return found


def _read_result(directory: RunDirectory, name: str) -> RunResult:
    manifest = read_manifest(directory)
    data = manifest.get("dataset") or {}
    rows = [*read_metrics(directory.metrics), *read_metrics(directory.evaluations)]
    best, options = list_best(directory.best), run_options(directory)
    chosen = rows_of_best(rows, best)
    looks = dict.fromkeys(chosen, 1)
    if best and "validation" in chosen:  # by which the best model was chosen
        looks["validation"] = len({row.get("step") for row in rows if row.get("split") == "validation"})
    fingerprint = str(data.get("undivided") or data.get("fingerprint", ""))
    if data.get("undivided"):
        division = [fingerprint, *(inline(options.get(key)) for key in _SPLIT_OPTIONS)]
        fingerprint = hashlib.sha256("/".join(division).encode()).hexdigest()
    speeds = [row["average_examples_per_second"] for row in rows if row.get("average_examples_per_second")]
    size, starts = manifest.get("model") or {}, manifest.get("starts") or [{}]
    return RunResult(
        name,
        directory,
        options,
        fingerprint,
        {split: metrics_of(row) for split, row in chosen.items()},
        {split: int(row.get("step", 0)) for split, row in chosen.items()},
        looks,
        data.get("sizes") or {},
        {split: found.get("classes") for split, found in (data.get("splits") or {}).items()},
        _integer(size.get("parameters")),
        _integer(size.get("flops")),
        max((float(r["seconds"]) for r in rows if r.get("split") != "test" and r.get("seconds")), default=None),
        float(speeds[-1]) if speeds else None,
        str(starts[0].get("time", "")),
        manifest.get("metrics") or {},
    )


def rows_of_best(rows: Sequence[Mapping[str, Any]], best: Sequence[Path]) -> dict[str, Mapping[str, Any]]:
    """Returns the row of each evaluated split that is a run's score: of the best model, if one was kept, or the last.

    Args:
        rows: the rows of its metrics.
        best: the folders of its best models, the best first.
    """
    chosen = {}
    for split in ("test", "validation"):
        mine = [row for row in rows if row.get("split") == split]
        of_best = [row for row in mine if best and row.get("step") == step_of(best[0])]
        if mine:
            chosen[split] = (of_best or mine)[-1]
    return chosen


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a row that are finite numbers."""
    return {
        key: float(value)
        for key, value in row.items()
        if key not in _NOT_METRICS and isinstance(value, int | float) and math.isfinite(value)
    }


def example_values(run: RunResult, split: str, metric: str) -> tuple[Array, Array | None] | None:
    """Returns values of each example whose mean is the metric of a run, and the labels if they are numbers.

    None if the run has no such values, or if the metric is not a mean over examples.
    """
    found = read_example_values(run.directory, split, run.steps[split])
    if found is None:
        return None
    numbers = {name: array for name, array in found.values.items() if array.ndim == 1 and array.dtype.kind in "biuf"}
    labels, squares = numbers.get("label"), numbers.get("squared_error")
    values = numbers.get(metric)
    if values is None and squares is not None and (mean := float(squares.mean(dtype=np.float64))) > 0:
        if metric == "rmse":  # to first order a mean, too
            values = math.sqrt(mean) + (squares - mean) / (2 * math.sqrt(mean))
        elif metric == "r2" and labels is not None and labels.var() > 0:
            values = 1 - squares / labels.var()
    score = run.scores[split][metric]
    if values is None or not math.isclose(values.mean(dtype=np.float64), score, rel_tol=1e-3, abs_tol=1e-5):
        return None
    return values, labels


def default_metrics(names: Iterable[str]) -> list[str]:
    """Returns metrics in the order in which they are preferred as the score: accuracy, others, loss."""
    known = dict.fromkeys(names)
    others = [name for name in known if name not in ("accuracy", "loss")]
    return [name for name in ("accuracy", *others, "loss") if name in known]


def baseline(runs: Sequence[RunResult], metric: str, split: str) -> tuple[str, float] | None:
    """Returns the name and the score of a model that ignores its input; None if there is none for this metric.

    Args:
        runs: a run on this dataset; with folds, one of each.
        metric: the metric.
        split: the split.
    """
    if metric == "accuracy":
        right = total = 0
        for run in runs:
            train, mine = run.splits.get("train"), run.splits.get(split)
            if not train or not mine or len(train) != len(mine):
                return None
            right, total = right + mine[int(np.argmax(train))], total + sum(mine)
        return ("majority class", right / total) if total else None
    if metric not in ("mae", "rmse", "r2"):
        return None
    found = [example_values(run, split, metric) for run in runs]
    labels = [pair[1] for pair in found if pair is not None and pair[1] is not None]
    if len(labels) < len(runs):
        return None
    values = np.concatenate(labels).astype(np.float64)
    errors = values - values.mean()
    scores = {"mae": np.abs(errors).mean(), "rmse": math.sqrt(np.square(errors).mean()), "r2": 0.0}
    return "mean of the labels", float(scores[metric])


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# -- entrants and datasets ------------------------------------------------------------------------------------------


def group_by_entrant(
    runs: Sequence[RunResult], datasets: Mapping[str, str], notes: list[str]
) -> tuple[dict[str, str], dict[str, tuple[str, dict[str, Any]]]]:
    """Returns the entrant of each run, by name, and the model and distinguishing options of each entrant.

    Only options that differ on the same dataset make another entrant. An option that a model has different on each
    dataset, as recipes set it, does not; it is added to ``notes``.
    """
    ignored = {*_NOT_DISTINGUISHING, *_dataset_options()}
    names: dict[str, str] = {}
    entrants: dict[str, tuple[str, dict[str, Any]]] = {}
    by_model: dict[str, list[RunResult]] = defaultdict(list)
    for run in runs:
        by_model[str(run.options.get(MODEL))].append(run)
    for model, mine in by_model.items():
        by_dataset: dict[str, list[RunResult]] = defaultdict(list)
        for run in mine:
            by_dataset[datasets[run.name]].append(run)
        known = dict.fromkeys(key for run in mine for key in run.options if key not in ignored)
        keys = [key for key in known if affects_results(key) and _varies(mine, key)]
        distinguishing: list[str] = []
        for key in keys:
            if any(_varies(group, key) for group in by_dataset.values()) and not _follows(mine, key, distinguishing):
                distinguishing.append(key)
        silent = [key for key in keys if key not in distinguishing and not _follows(mine, key, distinguishing)]
        if silent:
            notes.append(f"{model} does not have the same {', '.join(silent)} on all datasets.")
        for run in mine:
            own = {key: run.options.get(key) for key in distinguishing}
            more = ", ".join(f"{key}={inline(value)}" for key, value in own.items())
            names[run.name] = f"{model} ({more})" if more else model
            entrants[names[run.name]] = (model, own)
    return names, entrants


def _dataset_options() -> set[str]:
    return {key for entry in DATASETS.entries() for key in entry.options.model_fields}


def _varies(runs: Sequence[RunResult], key: str) -> bool:
    return len({inline(run.options.get(key)) for run in runs}) > 1


def _follows(runs: Sequence[RunResult], key: str, others: Sequence[str]) -> bool:
    """Returns whether an option follows from ``others``, such as the momentum that only SGD has."""
    values: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for run in runs:
        values[tuple(inline(run.options.get(other)) for other in others)].add(inline(run.options.get(key)))
    return bool(others) and all(len(found) == 1 for found in values.values())


def dataset_labels(runs: Sequence[RunResult]) -> dict[str, str]:
    """Returns the label of the dataset of each run, by the name of the run. Different data has different labels."""
    by_name: dict[str, dict[str, RunResult]] = defaultdict(dict)  # the first run on each data of a name
    for run in runs:
        by_name[_dataset_name(run)].setdefault(run.fingerprint, run)
    labels = {}
    for run in runs:
        name = _dataset_name(run)
        firsts = by_name[name]
        if len(firsts) > 1:
            difference = _difference(firsts[run.fingerprint], list(firsts.values()))
            name = f"{name} ({difference or run.fingerprint[:8]})"
        labels[run.name] = name
    return labels


def _dataset_name(run: RunResult) -> str:
    name = str(run.options.get(DATASET, "–"))
    return (Path(name.rstrip("/")).stem or name) if is_path(name) else name


def _difference(run: RunResult, others: Sequence[RunResult]) -> str:
    """Returns the options of data and splits, or the folder, that only this run has; empty if it has none."""
    known = {*_dataset_options(), *_SPLIT_OPTIONS}
    keys = [key for key in run.options if key in known and _varies(others, key)]

    def describe(one: RunResult) -> str:
        listed = ", ".join(f"{key}={inline(one.options.get(key))}" for key in keys)
        return listed or Path(str(one.options.get(DATASET))).parent.name

    return describe(run) if sum(describe(other) == describe(run) for other in others) == 1 else ""
