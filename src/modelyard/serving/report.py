"""`modelyard report`: what is known of a run, on one page. The predictions are made by the code of `evaluate`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from modelyard import storage
from modelyard.config import Config
from modelyard.data.dataset import IMAGE, LABEL, SPLITS, TEST, VALIDATION, Dataset, label_kind
from modelyard.data.open_dataset import load_dataset
from modelyard.engine.evaluation import EvaluationSums, metrics_of
from modelyard.errors import CheckpointError, ConfigError, DataError, UntrustedPluginError, UserError, unknown
from modelyard.loop.existing_run import check_data_of_run, find_checkpoint, resume_config
from modelyard.loop.run import build, create_engine, run_length
from modelyard.models.metric_types import CLASSIFICATION, MULTI_LABEL, REGRESSION
from modelyard.reporting import scores as analysis
from modelyard.reporting.calibration import calibration, with_temperature
from modelyard.reporting.facts import (
    Facts,
    Missing,
    NumberScore,
    Regression,
    RunFacts,
    Score,
    SplitFacts,
    number,
    text,
)
from modelyard.reporting.findings import find, main_score
from modelyard.reporting.folder import read_run_facts
from modelyard.reporting.page import MARKER, page_text
from modelyard.reporting.pictures import Pictures
from modelyard.reporting.scores import Mistake, Predictions
from modelyard.run.checkpoint import Checkpoint, list_saved, read_checkpoint, select_checkpoint
from modelyard.run.directory import RunDirectory, find_run_folder
from modelyard.run.examples import read_example_values
from modelyard.serving.loaded_run import Run
from modelyard.serving.prediction.table import TASK_OF_OUTPUT, output_type
from modelyard.serving.run_model import OpenRun
from modelyard.system.files import explain, write_text
from modelyard.system.process import random_state_kept

if TYPE_CHECKING:
    from modelyard.engine.base import Engine

log = logging.getLogger("modelyard")
T = TypeVar("T")
PAGE = "report.html"
_MOST_MISTAKES, _MOST_MAPS, _MOST_DOUBTFUL, _MOST_SHOWN = 18, 9, 100, 24
_MOST_SAMPLED = 2000
"""The examples of a regression that are drawn as points."""
_MOST_VALUES = 12
_BEGINNING = 2000
"""The first characters of a file say whether it is a report."""


@dataclass(frozen=True)
class Report:
    """The result of `report`.

    Args:
        path: the page, a path or URL.
        facts: what it shows, as plain values; report.json beside the page has them.
    """

    path: str
    facts: dict[str, Any]

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Findings of the rules, the most severe first: rule, level, text, advice, numbers."""
        found: list[dict[str, Any]] = self.facts["findings"]
        return found

    def __str__(self) -> str:
        marks = {"problem": "✖", "warning": "▲", "note": "●"}
        lines = [f"{marks[one['level']]} {one['text']}" for one in self.findings if one["level"] in marks]
        lines += [f"no {one['what']}: {one['why']}" for one in self.facts["missing"]]
        return "\n".join([self.facts["verdict"], *lines, f"written: {self.path}"])


@random_state_kept()
def report(
    model_dir: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    checkpoint: str | int | None = None,
    split: str | None = None,
    source: str = "Python",
    **options: Any,
) -> Report:
    """Writes a page that says how good the model of a run is and what is wrong with it, and the facts as JSON.

    Args:
        model_dir: the run folder or its URL, or the result of the run.
        output: the .html file to write; by default report.html in the run folder.
        checkpoint: best, latest or a step; by default best if there is one.
        split: validation, test or train; by default test if the run was tested, else validation.
        source: where the options come from, for error messages.
        **options: options that do not change what was trained, such as eval_batch_size or engine. ``dataset`` may be
            the arrays of the run.

    Example:
        >>> print(modelyard.report("runs/first"))
    """
    model_dir = os.fspath(model_dir)
    if split is not None and split not in SPLITS:
        raise DataError(unknown("split", split, SPLITS))
    directory = find_run_folder(model_dir, options.get("cache_dir"))
    target = _target(directory, output)
    config = _config_of(model_dir, options, source)
    run = read_run_facts(directory, config)
    missing = list(run.missing)
    found, pictures = _split_facts(model_dir, directory, run, checkpoint, split, options, source, missing)
    facts = Facts(run, found, find(run, found), tuple(missing), verdict(run, found))
    plain = facts.as_json()
    _write(target, page_text(facts, pictures))
    _write(_beside(target), json.dumps(plain, indent=1, ensure_ascii=False) + "\n")
    return Report(target, plain)


def _config_of(model_dir: str, options: Mapping[str, Any], source: str) -> Config | None:
    """Returns the config of the run; None if it is damaged.

    Raises:
        UserError: if the user's own options are wrong, or the run's plugins are not trusted.
    """
    try:
        return resume_config(model_dir, options, source, check_files=False)[0]
    except UntrustedPluginError:
        raise
    except ConfigError as error:
        if any(problem.where == source for problem in error.problems):
            raise
        return None
    except UserError:
        return None


# -- files ------------------------------------------------------------------------------------------------------------


def _target(directory: RunDirectory, output: str | os.PathLike[str] | None) -> str:
    """Returns the path or URL of the page.

    Raises:
        UserError: if it can't be written, or another file would be replaced.
    """
    given = storage.inside(directory.address, PAGE) if output is None else os.fspath(output)
    target = storage.absolute(given) if storage.is_remote(given) else str(Path(given).expanduser())
    if not target.lower().endswith((".html", ".htm")):
        raise UserError(f"the output {target} must end in .html.")
    if not storage.is_remote(target) and not Path(target).parent.is_dir():
        raise UserError(f"there is no folder {Path(target).parent} for the output.")
    for path, mark in ((target, MARKER), (_beside(target), '"modelyard_report"')):
        where = path if storage.is_remote(path) else Path(path)
        if storage.exists(where) and mark.encode() not in storage.read_bytes(where)[:_BEGINNING]:
            raise UserError(f"{path} exists and is no report. Name another --output, or move it away.")
    return target


def _beside(page: str) -> str:
    """Returns the path or URL of the facts."""
    return f"{page.rpartition('.')[0]}.json"


def _write(target: str, content: str) -> None:
    if storage.is_remote(target):
        storage.write_bytes(target, content.encode())
    else:
        with explain(Path(target), "write"):
            write_text(Path(target), content)


# -- the verdict ------------------------------------------------------------------------------------------------------


def verdict(run: RunFacts, split: SplitFacts | None) -> str:
    """Returns the score in words."""
    score = main_score(run, split)
    if split is None or score is None:
        goal = f" of {run.total_steps:,}" if run.total_steps else ""
        return f"There is no score yet: the run is at step {run.step:,}{goal}."
    of = f"on {split.examples:,} {split.split} examples" if split.examples else f"on {split.split}"
    words = f"{score.name} {number(score.value)} {of}"
    if score.low is not None:
        words += f", 95 % interval {number(score.low)} to {number(score.high)}"
    words = f"{words[0].upper() if score.name in ('accuracy', 'loss') else words[0]}{words[1:]}."
    if score.baseline is not None:
        verb = "scores" if split.task != CLASSIFICATION else "is right for"
        words += f" A model that always says {split.baseline} {verb} {number(score.baseline)}."
    if split.split == VALIDATION and run.best_step == split.step and run.looks > 1:
        words += f" The model was chosen on these examples, the best of {run.looks} evaluations: the score flatters it."
    return words


# -- predictions ------------------------------------------------------------------------------------------------------


def _split_facts(
    model_dir: str,
    directory: RunDirectory,
    run: RunFacts,
    checkpoint: str | int | None,
    split: str | None,
    options: dict[str, Any],
    source: str,
    missing: list[Missing],
) -> tuple[SplitFacts | None, Pictures]:
    """Returns what predictions say; without the data, what the run has recorded. Adds to ``missing`` what failed."""
    chosen = split or (TEST if "test" in run.scores else VALIDATION)
    pictures = Pictures()
    if checkpoint is not None:
        select_checkpoint(directory.checkpoints, directory.best, checkpoint)  # raises, if the user names another one
    try:
        if not any(step > 0 for step in list_saved(directory.checkpoints, directory.best)):
            raise CheckpointError("no checkpoint of a trained model is saved yet.")
        directory, config, path = find_checkpoint(model_dir, checkpoint, options, source)
        loaded = read_checkpoint(path)
        dataset = load_dataset(config)
        check_data_of_run(directory, config, dataset)
        if chosen not in dataset.sizes():
            if split is not None:
                raise _MissingSplitError(f"the dataset has no {split} split. It has: {', '.join(dataset.sizes())}.")
            raise DataError(f"the dataset has no {chosen} split.")
        from modelyard.compat.keras import precision_kept

        with precision_kept(), closing(_built(config, dataset, loaded)) as engine:
            found = _predicted(engine, dataset, chosen, config)
            facts = _analysed(found, chosen, loaded.step, run, dataset)
            work = _Work(directory, config, path, loaded, dataset, engine)
            _tried("pictures of the training data", missing, lambda: _show_training(work, pictures))
            _tried("pictures of the mistakes", missing, lambda: _show_mistakes(work, facts, found, pictures))
        return facts, pictures
    except (_MissingSplitError, UntrustedPluginError):
        raise
    except UserError as error:
        missing.append(Missing("predictions and pictures", text(error, 1000)))
    except Exception as error:  # of the user's own model or dataset, of a framework, of a damaged file
        log.warning("the report has no predictions: %s: %s", type(error).__name__, error)
        missing.append(Missing("predictions and pictures", text(f"{type(error).__name__}: {error}", 1000)))
    return _recorded(directory, chosen, run), pictures


class _MissingSplitError(DataError):
    """The user names a split that there is not."""


@dataclass(frozen=True)
class _Work:
    """Images and predictions for the pictures."""

    directory: RunDirectory
    config: Config
    path: Path
    checkpoint: Checkpoint
    dataset: Dataset
    engine: Engine


def _tried(what: str, missing: list[Missing], make: Callable[[], None]) -> None:
    """Makes a part of the page that it can do without."""
    try:
        make()
    except Exception as error:  # of the user's own code, of a framework, of a damaged file
        log.warning("the report has no %s: %s", what, error)
        missing.append(Missing(what, text(error, 1000)))


def _built(config: Config, dataset: Dataset, checkpoint: Checkpoint) -> Engine:
    engine = create_engine(config)
    build(engine, config, dataset, run_length(config, dataset))
    engine.load(checkpoint, weights_only=True)
    return engine


def _predicted(engine: Engine, dataset: Dataset, split: str, config: Config) -> Predictions:
    """Evaluates a split, and keeps its predictions."""
    from modelyard.system.console import bar

    size = dataset.size(split)
    total = EvaluationSums(engine.task, metrics_of(engine.task, config.metrics), size)
    parts: list[Mapping[str, NDArray[Any]]] = []
    with bar(f"predicting {split}", size) as progress:
        for outputs, batch in engine.predict_labelled(split):
            total.add(batch.sums, batch.examples, batch.used)
            parts.append(outputs)
            progress(min(total.count, size))
    result = total.result()
    outputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    kind = TASK_OF_OUTPUT[output_type(outputs)]
    wanted = {CLASSIFICATION: "class", MULTI_LABEL: "flags", REGRESSION: "values"}
    if kind and label_kind(dataset.features.get(LABEL)) != wanted[kind]:  # of a task of one's own
        kind = ""
    labels = _labels(dataset, split) if kind else np.zeros(size, np.int32)
    classes = [text(name) for name in dataset.classes] or _label_names(config)
    return Predictions(kind, labels, outputs, result.metrics, result.examples, classes)


def _labels(dataset: Dataset, split: str) -> NDArray[Any]:
    labels = dataset.labels(split)
    if labels is not None:
        return labels
    parts = np.array_split(np.arange(dataset.size(split)), max(1, dataset.size(split) // 1024))
    return np.concatenate([np.asarray(dataset.read(split, part)[LABEL]) for part in parts])


def _label_names(config: Config) -> list[str]:
    """Returns the names of the columns of labels, if the data is a table."""
    column = getattr(config.options_of("dataset"), "label_column", None)
    return [text(name.strip()) for name in column.split(",")] if isinstance(column, str) else []


def _analysed(found: Predictions, split: str, step: int, run: RunFacts, dataset: Dataset) -> SplitFacts:
    """Returns the facts about predictions."""
    counts = run.counts.get("train")
    baseline, levels = analysis.baseline(found, counts)
    calibrated = calibration(found)
    facts = SplitFacts(
        split, found.task, step, len(found), _scores(found.metrics, analysis.intervals(found), levels, found.task, run),
        baseline, calibration=calibrated,
    )  # fmt: skip
    if found.task in (CLASSIFICATION, MULTI_LABEL):
        facts = replace(facts, classes=tuple(analysis.by_class(found, counts)))
    suspects: set[int] = set()
    if found.task == CLASSIFICATION and calibrated is not None:
        matrix = analysis.confusion(found)
        doubtful = analysis.doubtful(found.labels, with_temperature(found, calibrated.temperature))
        facts = replace(
            facts,
            order=tuple(analysis.order_of_confusions(matrix)),
            matrix=tuple(map(tuple, matrix.tolist())),
            confused=tuple(analysis.most_confused(matrix, found.classes)),
            doubtful=tuple(_mistake(found, row, True, dataset, split) for row in doubtful[:_MOST_DOUBTFUL]),
            doubtful_count=len(doubtful),
            wrong=int((found.outputs["class"] != found.labels).sum()),
        )
        suspects = set(doubtful)
    if found.task == MULTI_LABEL:
        wrong = found.outputs["labels"].astype(bool) != found.labels.astype(bool)
        facts = replace(facts, thresholds=analysis.threshold_curves(found), wrong=int(wrong.any(axis=1).sum()))
    if found.task == REGRESSION:
        facts = replace(facts, regression=_regression(found))
    rows = analysis.worst(found, _MOST_MISTAKES)
    return replace(facts, mistakes=tuple(_mistake(found, row, row in suspects, dataset, split) for row in rows))


def _scores(
    metrics: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]],
    levels: Mapping[str, float],
    task: str,
    run: RunFacts,
) -> tuple[Score, ...]:
    """Returns the metrics, the most important one first."""
    first = [run.best_metric] if run.best_metric not in ("", "loss", "accuracy") else []
    usual = {CLASSIFICATION: ("accuracy",), MULTI_LABEL: ("macro_f1",), REGRESSION: ("r2", "mae", "rmse")}
    names = [*first, *usual.get(task, ()), "accuracy", *(name for name in metrics if name != "loss"), "loss"]
    found = []
    for name in dict.fromkeys(name for name in names if name in metrics):
        low, high = intervals.get(name, (None, None))
        found.append(Score(text(name), metrics[name], low, high, levels.get(name), run.lower_is_better(name)))
    return tuple(found)


def _recorded(directory: RunDirectory, split: str, run: RunFacts) -> SplitFacts | None:
    """Returns what the run folder has of a split, without predictions."""
    metrics = run.scores.get(split)
    if not metrics:
        return None
    kept = None
    try:
        kept = read_example_values(directory, split)
    except (UserError, OSError, ValueError) as error:
        log.warning("%s", error)
    values = {} if kept is None else {n: v for n, v in kept.values.items() if v.ndim == 1 and v.dtype.kind in "biuf"}
    rows = [row for row in run.rows if row.get("split") == split]
    steps = [row["step"] for row in rows if run.best_step is None or row.get("step") == run.best_step]
    step = kept.step if kept is not None else (steps or [row.get("step", 0) for row in rows])[-1]
    size = len(next(iter(values.values()), ())) or run.sizes.get(split, 0)
    intervals = {
        name: ends
        for name in metrics
        if name in values and abs(float(values[name].mean()) - metrics[name]) < 1e-3 * max(1, abs(metrics[name]))
        for ends in [analysis.interval_of_mean(values[name])]
        if ends is not None
    }
    counts, train = run.counts.get(split), run.counts.get("train")
    levels, baseline = {}, ""
    task = CLASSIFICATION if "accuracy" in metrics else MULTI_LABEL if "exact_match" in metrics else ""
    task = REGRESSION if "rmse" in metrics and "mae" in metrics else task
    if counts and train and sum(counts):
        levels, baseline = {"accuracy": counts[int(np.argmax(train))] / sum(counts)}, "the most frequent class"
    classes = _recorded_classes(values, run)
    scores = _scores(metrics, intervals, levels, task, run)
    return SplitFacts(split, task, int(step), size, scores, baseline, classes=classes, from_records=True)


def _recorded_classes(values: Mapping[str, NDArray[Any]], run: RunFacts) -> tuple[analysis.ClassScore, ...]:
    """Returns the recall of each class, which the recorded values of examples give."""
    labels, right = values.get("label"), values.get("accuracy")
    if labels is None or right is None or not run.classes or labels.dtype.kind not in "iu":
        return ()
    train = run.counts.get("train")
    found = []
    for n, name in enumerate(run.classes):
        own = right[labels == n]
        recall = float(own.mean()) if len(own) else None
        found.append(analysis.ClassScore(name, len(own), train[n] if train else None, None, recall, None, None))
    return tuple(found)


def _regression(found: Predictions) -> Regression:
    values, labels = analysis.numbers(found)
    names = found.classes if len(found.classes) == values.shape[1] else [str(n + 1) for n in range(values.shape[1])]
    names = ["value"] if names == ["1"] else names
    rows = np.arange(len(values))
    if len(rows) > _MOST_SAMPLED:
        rows = np.sort(np.random.default_rng(analysis.SEED).choice(rows, _MOST_SAMPLED, replace=False))
    scores, histograms = [], []
    for n, name in enumerate(names):
        error, true = values[:, n] - labels[:, n], labels[:, n]
        around = float(((true - true.mean()) ** 2).sum())
        scores.append(
            NumberScore(
                name, float(np.abs(error).mean()), float(np.sqrt((error**2).mean())),
                1 - float((error**2).sum()) / around if around else None, float(error.mean()), float(true.mean()),
                float(true.std()),
            )
        )  # fmt: skip
        counts, edges = np.histogram(error, bins=25)
        histograms.append(tuple(zip(((edges[1:] + edges[:-1]) / 2).tolist(), counts.tolist(), strict=True)))
    as_rows = [tuple(tuple(row) for row in array[rows].tolist()) for array in (labels, values)]
    return Regression(tuple(scores), as_rows[0], as_rows[1], tuple(histograms))


def _mistake(found: Predictions, row: int, doubtful: bool, dataset: Dataset, split: str) -> Mistake:
    name = text(dataset.name(split, row))
    loss = found.values.get("loss")
    own_loss = float(loss[row]) if loss is not None and loss.ndim == 1 else None
    if found.task == CLASSIFICATION:
        probabilities = found.outputs["probabilities"][row]
        label, said = int(found.labels[row]), int(found.outputs["class"][row])
        own, best = float(probabilities[label]), float(probabilities[said])
        return Mistake(row, name, found.classes[label], found.classes[said], best, own, doubtful, own_loss)
    if found.task == MULTI_LABEL:
        true, found_here = (
            ", ".join(name for name, on in zip(found.classes, flags[row], strict=False) if on) or "none"
            for flags in (found.labels, found.outputs["labels"])
        )
        return Mistake(row, name, text(true), text(found_here), loss=own_loss)
    if found.task == REGRESSION:
        values, labels = (array[row] for array in analysis.numbers(found))
        true, found_here = (", ".join(f"{value:.6g}" for value in each[:_MOST_VALUES]) for each in (labels, values))
        worst = int(np.argmax(np.abs(values - labels)))
        return Mistake(row, name, true, found_here, loss=own_loss, error=float((values - labels)[worst]))
    return Mistake(row, name, "", "", loss=own_loss)


# -- pictures ---------------------------------------------------------------------------------------------------------


def _is_picture(dataset: Dataset) -> bool:
    feature = dataset.features.get(IMAGE)
    return feature is not None and len(feature.shape) == 3 and min(feature.shape[:2]) > 1


def _show_training(work: _Work, pictures: Pictures) -> None:
    """Adds training images as the network receives them."""
    if not _is_picture(work.dataset):
        return
    batch = work.engine.training_batch(0)
    images = np.asarray(batch[IMAGE])[:_MOST_SHOWN]
    if images.ndim != 4:
        return
    labels = np.asarray(batch[LABEL])[: len(images)] if LABEL in batch else None
    pictures.add_training(images, [_label(label, work.dataset) for label in labels] if labels is not None else None)


def _label(label: Any, dataset: Dataset) -> str:
    """Returns a label of a training batch in words, also one that mixup has mixed."""
    names = dataset.classes
    if np.ndim(label) == 0:
        is_class = names and np.asarray(label).dtype.kind in "iu" and 0 <= int(label) < len(names)
        return text(names[int(label)]) if is_class else f"{float(label):.4g}"
    if np.ndim(label) == 1 and len(label) == len(names):
        parts = [(float(share), name) for share, name in zip(label, names, strict=True) if share > 0.005]
        shares = [
            text(name) if share > 0.995 else f"{text(name)} {share:.0%}" for share, name in sorted(parts, reverse=True)
        ]
        return ", ".join(shares[:3])
    return ""


def _show_mistakes(work: _Work, facts: SplitFacts, found: Predictions, pictures: Pictures) -> None:
    """Adds the images of the mistakes, with class-activation maps of some."""
    rows = [one.row for one in facts.mistakes]
    if not rows:
        return
    examples = work.dataset.read(facts.split, np.array(rows))
    if not _is_picture(work.dataset):
        pictures.values = _values(examples, rows, work)
        return
    pictures.add_mistakes(rows, np.asarray(examples[IMAGE]))
    if facts.task != CLASSIFICATION:
        return
    first = rows[:_MOST_MAPS]
    arrays = {name: np.asarray(array)[: len(first)] for name, array in examples.items()}
    found_maps = _maps(work, arrays, found.outputs["class"][first])
    if found_maps is not None:
        pictures.add_maps(first, *found_maps)


def _maps(
    work: _Work, examples: Mapping[str, NDArray[Any]], classes: NDArray[Any]
) -> tuple[str, NDArray[np.float32]] | None:
    from modelyard.data.dataset import ID
    from modelyard.engine.class_activation import class_activation_maps

    def preprocess(arrays: Mapping[str, Any]) -> Any:
        from keras import ops

        return work.engine.functions.preprocess({n: ops.convert_to_tensor(a) for n, a in arrays.items()}, False)

    given = {name: array for name, array in examples.items() if name != ID}
    seen = {name: np.asarray(value) for name, value in work.engine.run_on_host(preprocess, given).items()}
    model = Run(OpenRun(work.directory, work.config, work.path, work.checkpoint), {}).model
    return class_activation_maps(model, {tensor.name: seen[tensor.name] for tensor in model.inputs}, classes)


def _values(examples: Mapping[str, NDArray[Any]], rows: Sequence[int], work: _Work) -> dict[int, str]:
    """Returns the values of examples that are no images, in words."""
    feature = work.dataset.features.get(IMAGE)
    if feature is None or len(feature.shape) != 1:
        return {}
    columns = getattr(work.config.options_of("dataset"), "value_columns", ())
    names = OpenRun(work.directory, work.config, work.path, work.checkpoint).value_columns or columns
    found = {}
    for row, values in zip(rows, np.asarray(examples[IMAGE]), strict=True):
        named = [f"{text(name, 40)}=" for name in names] if len(names) == len(values) else [""] * len(values)
        listed = [f"{name}{value:.4g}" for name, value in list(zip(named, values, strict=True))[:_MOST_VALUES]]
        found[row] = ", ".join(listed) + (" …" if len(values) > _MOST_VALUES else "")
    return found
