"""Scores of a split with their uncertainty, by class, and the examples that a model gets wrong. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.models.metric_types import (
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    AveragePrecision,
    class_average,
    f1_ratio,
)
from modelyard.registry import Options

Array = NDArray[Any]
RESAMPLES = 1000
SEED = 0
_MOST_WORK = 40_000_000
"""Of more examples × resamples, fewer resamples are drawn."""
_AT_ONCE = 50
_SURE, _EXCLUDED = 0.95, 0.01
"""A label is doubtful if another class has at least the first probability, and the label at most the second."""
_ORDERED_BEST = 200
"""Of more classes, the order is that of the clusters, without the search for the best one."""


@dataclass(frozen=True)
class Predictions:
    """The predictions of a split.

    Args:
        task: classification, multi_label, regression, or empty for others.
        labels: the labels, [examples] or [examples, numbers].
        outputs: class and probabilities; labels and probabilities; or values.
        metrics: the metrics of the split, as `evaluate` has them.
        values: values of each example by name, such as its loss.
        classes: the names of the classes, or of the numbers.
    """

    task: str
    labels: Array
    outputs: Mapping[str, Array]
    metrics: Mapping[str, float]
    values: Mapping[str, Array]
    classes: Sequence[str]

    def __len__(self) -> int:
        return len(self.labels)


# -- uncertainty ------------------------------------------------------------------------------------------------------

_Functional = tuple[Array, Callable[[Array], float]]
"""Statistics of each example, and what makes a metric of their mean."""


def intervals(found: Predictions) -> dict[str, tuple[float, float]]:
    """Returns 95 % bootstrap intervals of the metrics: examples are drawn again, with replacement.

    Metrics that are no function of means over the examples have none.
    """
    functionals = _functionals(found)
    functionals = {name: each for name, each in functionals.items() if _agrees(each, found.metrics[name])}
    if not functionals or len(found) < 2:
        return {}
    statistics = np.concatenate([each[0] for each in functionals.values()], axis=1)
    samples: dict[str, list[float]] = {name: [] for name in functionals}
    for means in _resampled_means(statistics):
        first = 0
        for name, (own, functional) in functionals.items():
            part = means[:, first : first + own.shape[1]]
            samples[name] += [functional(row) for row in part]
            first += own.shape[1]
    ends = {name: np.quantile(values, (0.025, 0.975)) for name, values in samples.items()}
    return {name: (float(low), float(high)) for name, (low, high) in ends.items() if math.isfinite(low + high)}


def interval_of_mean(values: Array) -> tuple[float, float] | None:
    """Returns the 95 % bootstrap interval of the mean of some values."""
    if len(values) < 2:
        return None
    means = np.concatenate([part[:, 0] for part in _resampled_means(values.astype(np.float64)[:, None])])
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def _resampled_means(statistics: Array) -> Iterator[Array]:
    """Yields the means of resamples, [resamples, statistics], some at a time."""
    size = len(statistics)
    random = np.random.default_rng(SEED)
    left = int(max(100, min(RESAMPLES, _MOST_WORK // size)))
    while left:
        count = min(left, _AT_ONCE)
        drawn = [np.bincount(random.integers(0, size, size), minlength=size) for _ in range(count)]
        yield np.stack(drawn).astype(np.float64) @ statistics / size
        left -= count


def _agrees(functional: _Functional, value: float) -> bool:
    """Returns whether a metric is what it is taken for: a metric of one's own may have a known name."""
    statistics, function = functional
    return math.isclose(function(statistics.mean(axis=0)), value, rel_tol=1e-3, abs_tol=1e-6)


def _functionals(found: Predictions) -> dict[str, _Functional]:
    functionals: dict[str, _Functional] = {}
    for name in found.metrics:
        values = found.values.get(name)
        if values is not None and values.ndim == 1 and len(values) == len(found):
            functionals[name] = (values.astype(np.float64)[:, None], lambda mean: float(mean[0]))
    if found.task == CLASSIFICATION and "accuracy" in found.metrics:
        right = (found.outputs["class"] == found.labels).astype(np.float64)
        functionals["accuracy"] = (right[:, None], lambda mean: float(mean[0]))
    flags = _flags(found)
    if flags is not None and flags[1].shape[1] <= _ORDERED_BEST:
        predicted, true = flags
        hits = (predicted & true).astype(np.float64)
        statistics = np.concatenate([hits, predicted, true], axis=1)
        every = found.task == MULTI_LABEL

        def f1(mean: Array) -> float:
            hits, found, true = np.split(mean, 3)
            return class_average(hits, found, true, f1_ratio, "macro", every)

        functionals |= {name: (statistics, f1) for name in ("macro_f1", "f1") if name in found.metrics}
        if every and "binary_accuracy" in found.metrics:
            right = (predicted == true).mean(axis=1)[:, None]
            functionals["binary_accuracy"] = (right, lambda mean: float(mean[0]))
    if found.task == REGRESSION:
        functionals |= {name: each for name, each in _of_errors(found).items() if name in found.metrics}
    return functionals


def _of_errors(found: Predictions) -> dict[str, _Functional]:
    values, labels = numbers(found)
    errors = values - labels
    centre = labels.mean(axis=0)  # squares of labels far from 0 would cancel
    squares = np.concatenate([errors**2, labels - centre, (labels - centre) ** 2], axis=1)

    def r2(mean: Array) -> float:
        error, first, second = np.split(mean, 3)
        spread = second - first**2
        known = spread > 0
        return float(np.where(known, 1 - error / np.where(known, spread, 1), error == 0).mean())

    mean_squares = (errors**2).mean(axis=1)[:, None]
    return {
        "mae": (np.abs(errors).mean(axis=1)[:, None], lambda mean: float(mean[0])),
        "mse": (mean_squares, lambda mean: float(mean[0])),
        "rmse": (mean_squares, lambda mean: math.sqrt(mean[0])),
        "r2": (squares, r2),
    }


def numbers(found: Predictions) -> tuple[Array, Array]:
    """Returns predicted and true numbers of a regression, [examples, numbers]."""
    labels = found.labels.astype(np.float64).reshape(len(found.labels), -1)
    return found.outputs["values"].astype(np.float64).reshape(labels.shape), labels


def _flags(found: Predictions) -> tuple[Array, Array] | None:
    """Returns the predicted and the true classes as flags, [examples, classes]."""
    if found.task == MULTI_LABEL:
        return found.outputs["labels"].astype(bool), found.labels.astype(bool)
    if found.task != CLASSIFICATION or not {"f1", "macro_f1"} & {*found.metrics}:
        return None
    classes = np.arange(found.outputs["probabilities"].shape[1])
    return found.outputs["class"][:, None] == classes, found.labels[:, None] == classes


# -- a model that ignores its input -----------------------------------------------------------------------------------


def baseline(found: Predictions, train_counts: Sequence[int] | None) -> tuple[str, dict[str, float]]:
    """Returns what a model that ignores its input scores, and its name.

    Args:
        found: the predictions, for their labels.
        train_counts: the training examples of each class, if they are known.
    """
    labels = found.labels
    if found.task == CLASSIFICATION:
        counts = np.bincount(labels, minlength=len(found.classes))
        known = train_counts is not None and len(train_counts) == len(counts)
        guess = int(np.argmax(train_counts if known else counts))  # type: ignore[arg-type] # it is known
        return "the most frequent class", {"accuracy": float(counts[guess] / len(labels))}
    if found.task == MULTI_LABEL:
        true = labels.astype(bool)
        guess_of = np.broadcast_to(true.mean(axis=0) > 0.5, true.shape)
        right = guess_of == true
        hits, said, there = ((guess_of & true).sum(axis=0), guess_of.sum(axis=0), true.sum(axis=0))
        scores = {
            "exact_match": float(right.all(axis=1).mean()),
            "binary_accuracy": float(right.mean()),
            "macro_f1": class_average(hits, said, there, f1_ratio),
        }
        return "the labels of more than half of the examples", scores
    if found.task == REGRESSION:
        _, values = numbers(found)
        errors = values - values.mean(axis=0)
        squared = float((errors**2).mean())
        return "the mean of the labels", {
            "mae": float(np.abs(errors).mean()), "mse": squared, "rmse": math.sqrt(squared), "r2": 0.0,
        }  # fmt: skip
    return "", {}


# -- by class ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassScore:
    """Scores of one class on the split. A ratio without a denominator is None.

    Args:
        name: its name.
        examples: the examples of the split with this label.
        train_examples: the training examples, if known.
        precision, recall, f1, average_precision: its scores, as scikit-learn has them.
        threshold, threshold_f1: of multi-label, the threshold with the highest F1 on this split, and that F1.
    """

    name: str
    examples: int
    train_examples: int | None
    precision: float | None
    recall: float | None
    f1: float | None
    average_precision: float | None
    threshold: float | None = None
    threshold_f1: float | None = None


def by_class(found: Predictions, train_counts: Sequence[int] | None) -> list[ClassScore]:
    """Returns the scores of each class."""
    probabilities = found.outputs["probabilities"]
    count = probabilities.shape[1]
    if found.task == MULTI_LABEL:
        predicted, true = found.outputs["labels"].astype(bool), found.labels.astype(bool)
        hits, said, there = (predicted & true).sum(axis=0), predicted.sum(axis=0), true.sum(axis=0)
    else:
        matrix = confusion(found)
        hits, said, there = matrix.diagonal(), matrix.sum(axis=0), matrix.sum(axis=1)
        true = found.labels[:, None] == np.arange(count) if count <= _ORDERED_BEST else np.zeros((0, 0), bool)
    ranking = AveragePrecision(Options())
    scores = []
    for n in range(count):
        precise = None
        if len(true) and 0 < there[n] < len(found):
            precise = ranking.of_class(probabilities[:, n], true[:, n])
        threshold, best = (None, None)
        if found.task == MULTI_LABEL and there[n]:
            threshold, best = _best_threshold(probabilities[:, n], true[:, n])
        scores.append(
            ClassScore(
                found.classes[n] if n < len(found.classes) else str(n),
                int(there[n]),
                int(train_counts[n]) if train_counts is not None and len(train_counts) == count else None,
                _ratio(hits[n], said[n]),
                _ratio(hits[n], there[n]),
                _ratio(2 * hits[n], said[n] + there[n]),
                precise,
                threshold,
                best,
            )
        )
    return scores


def _ratio(above: Any, below: Any) -> float | None:
    return float(above / below) if below else None


def _best_threshold(scores: Array, true: Array) -> tuple[float, float]:
    """Returns the threshold with the highest F1, in the middle between two scores, and that F1."""
    order = np.argsort(-scores, kind="stable")
    hits, said = np.cumsum(true[order]), np.arange(1, len(order) + 1)
    f1 = 2 * hits / (said + true.sum())
    ends = np.append(np.diff(scores[order]) != 0, True)  # of equal scores, all are said or none
    best = int(np.argmax(np.where(ends, f1, -1)))
    low = float(scores[order[best + 1]]) if best + 1 < len(order) else 0.0
    return (float(scores[order[best]]) + low) / 2, float(f1[best])


THRESHOLDS = tuple(round(0.05 * n, 2) for n in range(1, 20))


def threshold_curves(found: Predictions) -> dict[str, list[float]]:
    """Returns macro precision, recall and F1 of a multi-label model over `THRESHOLDS`."""
    true = found.labels.astype(bool)
    there, curves = true.sum(axis=0), {"precision": [], "recall": [], "F1": []}  # type: ignore[var-annotated]
    for threshold in THRESHOLDS:
        predicted = found.outputs["probabilities"] > threshold
        hits, said = (predicted & true).sum(axis=0), predicted.sum(axis=0)
        for name, above, below in (("precision", hits, said), ("recall", hits, there), ("F1", 2 * hits, said + there)):
            curves[name].append(float(np.divide(above, below, out=np.zeros(len(hits)), where=below > 0).mean()))
    return curves


# -- confusions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Confused:
    """Two classes: so many examples of the first are predicted as the second, a share of those of the first."""

    label: str
    predicted: str
    count: int
    share: float


def confusion(found: Predictions) -> NDArray[np.int64]:
    """Returns the confusion matrix. Rows are the labels, columns the predictions."""
    count = found.outputs["probabilities"].shape[1]
    matrix = np.zeros((count, count), np.int64)
    used = (found.labels >= 0) & (found.labels < count)
    np.add.at(matrix, (found.labels[used].astype(np.int64), found.outputs["class"][used].astype(np.int64)), 1)
    return matrix


def order_of_confusions(matrix: NDArray[np.int64]) -> list[int]:
    """Returns the classes in an order in which those that are confused stand together.

    Classes are clustered by how often one is taken for the other (average linkage, optimal order of the leaves).
    """
    size = len(matrix)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    both = shares + shares.T
    np.fill_diagonal(both, 0)
    if size < 3 or not both.any():
        return list(range(size))
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    distances = both.max() - both
    np.fill_diagonal(distances, 0)
    tree = linkage(squareform(distances, checks=False), "average", optimal_ordering=size <= _ORDERED_BEST)
    order = [int(n) for n in leaves_list(tree)]
    return order if order[0] <= order[-1] else order[::-1]  # of the two directions always the same


def most_confused(matrix: NDArray[np.int64], classes: Sequence[str], most: int = 20) -> list[Confused]:
    """Returns the pairs of classes with the most mistakes."""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    totals = matrix.sum(axis=1)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = [divmod(int(n), len(matrix)) for n in order]
    return [
        Confused(classes[a], classes[b], int(wrong[a, b]), float(wrong[a, b] / totals[a]))
        for a, b in pairs
        if wrong[a, b]
    ]


# -- examples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """An example that a model gets wrong.

    Args:
        row: its number in the split.
        name: its file or position.
        label: its label.
        predicted: what is predicted.
        probability: of what is predicted.
        label_probability: of the label.
        doubtful: whether the label is probably wrong.
        loss: its loss.
        error: of a regression, prediction minus label.
        values: its values, if it is no image.
    """

    row: int
    name: str
    label: str
    predicted: str
    probability: float | None = None
    label_probability: float | None = None
    doubtful: bool = False
    loss: float | None = None
    error: float | None = None
    values: dict[str, str] = field(default_factory=dict)


def contradicted(labels: Array, probabilities: Array) -> list[int]:
    """Returns the examples whose label a model contradicts with confidence, the most certain first.

    A class is predicted with confidence if its probability is at least the mean over the examples with that label
    (confident learning, Northcutt et al. 2021).
    """
    chosen = probabilities.argmax(axis=1)
    rows = np.arange(len(labels))
    own, best = probabilities[rows, labels], probabilities[rows, chosen]
    count = probabilities.shape[1]
    totals = np.bincount(labels, minlength=count)
    usual = np.where(totals > 0, np.bincount(labels, own, count) / np.maximum(totals, 1), 1.0)
    doubtful = np.flatnonzero((chosen != labels) & (best >= usual[chosen]))
    return [int(n) for n in doubtful[np.argsort(own[doubtful] - best[doubtful], kind="stable")]]


def doubtful(labels: Array, probabilities: Array) -> list[int]:
    """Returns the examples of `contradicted` whose label is all but excluded, the most certain first.

    Args:
        labels: the label of each example.
        probabilities: calibrated ones, so that an overconfident model does not contradict more labels.
    """
    rows = np.arange(len(labels))
    sure = (probabilities.max(axis=1) >= _SURE) & (probabilities[rows, labels] <= _EXCLUDED)
    return [n for n in contradicted(labels, probabilities) if sure[n]]


def worst(found: Predictions, most: int) -> list[int]:
    """Returns the examples that are most wrong: of classes those that are wrong with most certainty."""
    if found.task == CLASSIFICATION:
        probabilities, labels = found.outputs["probabilities"].astype(np.float64), found.labels
        rows = np.arange(len(labels))
        margin = probabilities[rows, labels] - probabilities[rows, found.outputs["class"]]
        wrong = np.flatnonzero(found.outputs["class"] != labels)
        order = wrong[np.argsort(margin[wrong], kind="stable")]
    elif found.task == MULTI_LABEL:
        losses = found.values.get("loss", (found.outputs["labels"] != found.labels).sum(axis=1))
        wrong = np.flatnonzero((found.outputs["labels"].astype(bool) != found.labels.astype(bool)).any(axis=1))
        order = wrong[np.argsort(-losses[wrong], kind="stable")]
    elif found.task == REGRESSION:
        values, labels = numbers(found)
        spread = labels.std(axis=0)
        order = np.argsort(-(np.abs(values - labels) / np.where(spread > 0, spread, 1)).max(axis=1), kind="stable")
    else:
        losses = found.values.get("loss", np.zeros(0))
        order = np.argsort(-losses, kind="stable") if losses.ndim == 1 else np.zeros(0, np.int64)
    return [int(n) for n in order[:most]]
