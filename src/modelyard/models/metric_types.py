"""The built-in metrics: of classes, of several classes per example, of numbers. They need no engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from modelyard.config.calls import Call
from modelyard.data.dataset import LABEL
from modelyard.errors import UserError
from modelyard.models.metric import Arrays, Metric, build_metric
from modelyard.registry import METRICS
from modelyard.registry import Options as BaseOptions

_NO_CLASS = 255
_OF_MAPS = ("accuracy", "balanced_accuracy", "precision", "recall", "f1", "iou")
"""Metrics of labels that are maps: each pixel is a decision."""
CLASSIFICATION, MULTI_LABEL, REGRESSION = "classification", "multi_label", "regression"


# -- of classes --------------------------------------------------------------------------------------------------------


def _class_of(labels: NDArray[Any], found: NDArray[Any]) -> NDArray[Any]:
    """Returns class indices; of class probabilities, as mixup makes them, the most likely.

    Args:
        labels: one per example; or maps, with a class for each pixel.
        found: the predicted classes.
    """
    if labels.ndim == found.ndim:
        return labels.astype(np.int64)
    one = labels.shape[-1] == 1 and found.ndim > 1  # a map with a channel
    classes: NDArray[Any] = labels[..., 0].astype(np.int64) if one else labels.argmax(axis=-1)
    return classes


def _class_counts(predictions: Arrays, examples: Arrays) -> tuple[NDArray[np.int64], ...]:
    """Returns hits, predictions and labels of each class of each example, [examples, classes].

    Of maps they are numbers of pixels. Pixels whose label is no class, such as 255, do not count.
    """
    found, true = predictions["class"], _class_of(examples[LABEL], predictions["class"])
    number = predictions["probabilities"].shape[-1]
    counts = np.zeros((3, len(found), number), np.int64)
    for row, (mine, label) in enumerate(zip(found.reshape(len(found), -1), true.reshape(len(found), -1), strict=True)):
        used = (label >= 0) & (label < number)
        mine, label = mine[used], label[used]
        for part, kept in enumerate((label[mine == label], mine, label)):
            counts[part, row] = np.bincount(kept, minlength=number)
    return tuple(counts)


class _OfClasses(Metric):
    """A metric of classifiers, of one class or of several per example."""

    tasks: tuple[str, ...] = (CLASSIFICATION, MULTI_LABEL)
    lower_is_better = False

    def flags(self, predictions: Arrays, examples: Arrays) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Returns the predicted and the true classes as flags, [examples, classes]."""
        if "labels" in predictions:
            return predictions["labels"].astype(bool), examples[LABEL].astype(bool)
        classes = np.arange(predictions["probabilities"].shape[1])
        found, true = predictions["class"], self.labels(predictions, examples)
        return found[:, None] == classes, true[:, None] == classes

    def labels(self, predictions: Arrays, examples: Arrays) -> NDArray[Any]:
        """Returns the class of each example.

        Raises:
            UserError: if labels are maps.
        """
        true = _class_of(examples[LABEL], predictions["class"])
        if true.ndim > 1:
            raise UserError(f"the metric {self.name!r} is not supported for maps. Supported: {', '.join(_OF_MAPS)}.")
        return true


@METRICS.register("accuracy")
class Accuracy(Metric):
    """the fraction of examples whose most likely class is right; of maps, of pixels"""

    tasks, predictions, lower_is_better = (CLASSIFICATION,), ("class", "probabilities"), False

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns whether the class is right, and which labels are classes."""
        found = predictions["class"]
        true = _class_of(examples[LABEL], found)
        if found.ndim == 1:
            return found == true
        known = predictions["probabilities"].shape[-1] if "probabilities" in predictions else _NO_CLASS
        used = (true >= 0) & (true < known)
        axes = tuple(range(1, found.ndim))
        return {"hits": ((found == true) & used).sum(axis=axes), "labels": used.sum(axis=axes)}

    def result(self, totals: Any, count: int) -> float:
        """Returns the mean; of maps, over all pixels."""
        return totals["hits"] / totals["labels"] if isinstance(totals, dict) else float(totals / count)


class TopOptions(BaseOptions):
    """Options of top-k accuracy."""

    k: int = Field(5, ge=1, description="how many of the most likely classes count")


@METRICS.register("top_k")
class TopK(_OfClasses):
    """the fraction of examples whose class is among the k most likely; of equal ones, the first"""

    tasks, Options, lower_is_better = (CLASSIFICATION,), TopOptions, False
    options: TopOptions

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns whether fewer than k classes come before the right one."""
        scores, true = predictions["probabilities"], self.labels(predictions, examples)[:, None]
        own = np.take_along_axis(scores, true, axis=1)
        before = (scores > own) | ((scores == own) & (np.arange(scores.shape[1]) < true))
        return before.sum(axis=1) < self.options.k


class AverageOptions(BaseOptions):
    """The average over the classes."""

    average: Literal["macro", "weighted", "micro"] = Field(
        "macro", description="macro: the mean of the classes; weighted: by their examples; micro: all decisions as one"
    )


class _ByClass(_OfClasses):
    Options = AverageOptions
    options: AverageOptions

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns hits, predictions and labels of each class."""
        kept = np.broadcast_to("labels" in predictions, len(examples[LABEL]))
        if "labels" not in predictions and predictions["class"].ndim > 1:
            hits, found, true = _class_counts(predictions, examples)
            return {"hits": hits, "found": found, "true": true, "all_classes": kept}
        predicted, labels = self.flags(predictions, examples)
        return {"hits": predicted & labels, "found": predicted, "true": labels, "all_classes": kept}

    def result(self, totals: Any, count: int) -> float:
        """Returns the average of the ratio over the classes; 0 where nothing was predicted or labelled."""
        hits, found, true = totals["hits"], totals["found"], totals["true"]
        average, all_classes = self.options.average, bool(totals["all_classes"])
        return class_average(hits, found, true, self.ratio, average, all_classes)

    @staticmethod
    def ratio(hits: NDArray[Any], found: NDArray[Any], true: NDArray[Any]) -> tuple[Any, Any]:
        """Returns numerator and denominator."""
        raise NotImplementedError


def class_average(
    hits: NDArray[Any],
    found: NDArray[Any],
    true: NDArray[Any],
    ratio: Callable[..., tuple[Any, Any]],
    average: str = "macro",
    all_classes: bool = True,
) -> float:
    """Returns a ratio of counts, averaged over the classes.

    Args:
        hits: right predictions of each class.
        found: predictions of each class.
        true: labels of each class.
        ratio: returns numerator and denominator for counts; a ratio without denominator is 0.
        average: macro, weighted or micro.
        all_classes: whether classes that are neither predicted nor labelled count, as 0.
    """
    if average == "micro":
        hits, found, true = (np.asarray([counts.sum()]) for counts in (hits, found, true))
    elif not all_classes:
        present = (found > 0) | (true > 0)
        hits, found, true = hits[present], found[present], true[present]
    above, below = (np.asarray(part, np.float64) for part in ratio(hits, found, true))
    scores = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    weights = np.asarray(true, np.float64) if average == "weighted" else np.ones(len(scores))
    return float(scores @ weights / weights.sum()) if weights.sum() else 0.0


def f1_ratio(hits: NDArray[Any], found: NDArray[Any], true: NDArray[Any]) -> tuple[Any, Any]:
    """Returns F1 as numerator and denominator."""
    return 2 * hits, found + true


@METRICS.register("precision")
class Precision(_ByClass):
    """right predictions of a class, divided by its predictions; averaged over the classes"""

    @staticmethod
    def ratio(hits: NDArray[Any], found: NDArray[Any], true: NDArray[Any]) -> tuple[Any, Any]:
        """Returns hits and predictions."""
        return hits, found


@METRICS.register("recall")
class Recall(_ByClass):
    """right predictions of a class, divided by its examples; averaged over the classes"""

    @staticmethod
    def ratio(hits: NDArray[Any], found: NDArray[Any], true: NDArray[Any]) -> tuple[Any, Any]:
        """Returns hits and labels."""
        return hits, true


@METRICS.register("f1")
class F1(_ByClass):
    """the harmonic mean of precision and recall of a class; averaged over the classes"""

    ratio = staticmethod(f1_ratio)


@METRICS.register("iou")
class IntersectionOverUnion(_ByClass):
    """examples of a class that are predicted as such, divided by those that are either; averaged over the classes"""

    @staticmethod
    def ratio(hits: NDArray[Any], found: NDArray[Any], true: NDArray[Any]) -> tuple[Any, Any]:
        """Returns intersection and union."""
        return hits, found + true - hits


@METRICS.register("balanced_accuracy")
class BalancedAccuracy(_OfClasses):
    """the mean recall of the classes that have examples"""

    tasks = (CLASSIFICATION,)

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns hits and labels of each class."""
        if predictions["class"].ndim > 1:
            hits, _, labels = _class_counts(predictions, examples)
            return {"hits": hits, "true": labels}
        found, true = self.flags(predictions, examples)
        return {"hits": found & true, "true": true}

    def result(self, totals: Any, count: int) -> float:
        """Returns the mean over the classes with examples."""
        present = totals["true"] > 0
        return float((totals["hits"][present] / totals["true"][present]).mean())


@METRICS.register("log_loss")
class LogLoss(_OfClasses):
    """the cross-entropy of labels and probabilities, without label smoothing, focal loss or class weights"""

    lower_is_better = True

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns the loss of each example; of several classes per example, their mean."""
        given, labels = predictions["probabilities"], examples[LABEL]
        least = np.finfo(given.dtype).eps  # of a float32 probability no more is known
        scores = np.clip(given.astype(np.float64), least, 1 - least)
        if "class" in predictions:
            self.labels(predictions, examples)
        if "labels" in predictions:
            return -np.where(labels.astype(bool), np.log(scores), np.log1p(-scores)).mean(axis=1)
        if labels.ndim == 2:
            return -(labels * np.log(scores)).sum(axis=1)
        return -np.log(np.take_along_axis(scores, labels.astype(np.int64)[:, None], axis=1)[:, 0])


class _Ranking(_OfClasses):
    whole = True
    undefined = "it needs a class that some examples have and others have not"

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns the score and the label of each class."""
        true = self.flags(predictions, examples)[1]
        return {"scores": predictions["probabilities"], "true": true}

    def result(self, totals: Any, count: int) -> float:
        """Returns the mean over the classes that some examples have and others have not; NaN without any."""
        scores, true = totals["scores"], totals["true"]
        ranked = [self.of_class(scores[:, n], true[:, n]) for n in range(true.shape[1]) if 0 < true[:, n].sum() < count]
        return float(np.mean(ranked)) if ranked else float("nan")

    def of_class(self, scores: NDArray[Any], true: NDArray[np.bool_]) -> float:
        """Returns the metric of one class."""
        raise NotImplementedError


@METRICS.register("auc")
class Auc(_Ranking):
    """the area under the ROC curve, exact; one class against the others, averaged over the classes"""

    def of_class(self, scores: NDArray[Any], true: NDArray[np.bool_]) -> float:
        """Returns the probability that an example of the class has a higher score than another; a tie is half."""
        values, where, counts = np.unique(scores, return_inverse=True, return_counts=True)
        del values
        positive = np.bincount(where[true], minlength=len(counts))
        negative = counts - positive
        below = np.cumsum(negative) - negative
        wins = int((positive * (2 * below + negative)).sum())  # in halves, so that all are whole numbers
        return wins / (2 * int(positive.sum()) * int(negative.sum()))


@METRICS.register("average_precision")
class AveragePrecision(_Ranking):
    """the area under the precision-recall curve, as a sum over the thresholds; averaged over the classes (mAP)"""

    def of_class(self, scores: NDArray[Any], true: NDArray[np.bool_]) -> float:
        """Returns the sum of precision times the step of recall, over all thresholds."""
        _, where, counts = np.unique(-scores, return_inverse=True, return_counts=True)
        hits = np.bincount(where[true], minlength=len(counts))
        precision = np.cumsum(hits) / np.cumsum(counts)
        return float((precision * hits).sum() / hits.sum())


class BinsOptions(BaseOptions):
    """Options of the calibration error."""

    bins: int = Field(15, ge=1, description="number of equal bins of the probability")


@METRICS.register("calibration_error")
class CalibrationError(_OfClasses):
    """how far the probability of the predicted class is from its accuracy, over bins of the probability (ECE)"""

    tasks, Options, lower_is_better = (CLASSIFICATION,), BinsOptions, True
    options: BinsOptions

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns how far each example moves the bin it is in."""
        most = predictions["probabilities"].max(axis=1).astype(np.float64)
        right = predictions["class"] == self.labels(predictions, examples)
        bins = self.options.bins
        number = np.clip(np.ceil(most * bins).astype(np.int64) - 1, 0, bins - 1)
        return (number[:, None] == np.arange(bins)) * (right - most)[:, None]

    def result(self, totals: Any, count: int) -> float:
        """Returns the mean over the examples."""
        return float(np.abs(totals).sum() / count)


# -- of several classes per example -----------------------------------------------------------------------------------


class _OfFlags(Metric):
    tasks, predictions, lower_is_better = (MULTI_LABEL,), ("labels",), False

    def right(self, predictions: Arrays, examples: Arrays) -> NDArray[np.bool_]:
        """Returns which decisions are right, [examples, classes]."""
        right: NDArray[np.bool_] = predictions["labels"].astype(bool) == examples[LABEL].astype(bool)
        return right


@METRICS.register("exact_match")
class ExactMatch(_OfFlags):
    """the fraction of examples with all classes right"""

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns whether all classes are right."""
        return self.right(predictions, examples).all(axis=1)


@METRICS.register("binary_accuracy")
class BinaryAccuracy(_OfFlags):
    """the fraction of decisions, for each class of each example, that are right"""

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns which decisions are right."""
        return self.right(predictions, examples)

    def result(self, totals: Any, count: int) -> float:
        """Returns the fraction of all decisions."""
        return float(totals.sum() / (count * len(totals)))


# -- of numbers --------------------------------------------------------------------------------------------------------


class _OfNumbers(Metric):
    """A metric of the errors of numbers, averaged over the numbers of a label."""

    tasks, predictions = (REGRESSION,), ("values",)
    lower_is_better = True

    def both(self, predictions: Arrays, examples: Arrays) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns the predicted and the true numbers, [examples, numbers]."""
        label = examples[LABEL].astype(np.float64)
        label = label.reshape(len(label), -1)
        return predictions["values"].astype(np.float64).reshape(label.shape), label

    def error(self, predictions: Arrays, examples: Arrays) -> NDArray[np.float64]:
        """Returns prediction minus label, [examples, numbers]."""
        found, label = self.both(predictions, examples)
        return found - label


@METRICS.register("mae")
class MeanAbsoluteError(_OfNumbers):
    """the mean absolute error, in the units of the labels"""

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns the error of each example."""
        return np.abs(self.error(predictions, examples)).mean(axis=1)


@METRICS.register("mse")
class MeanSquaredError(_OfNumbers):
    """the mean squared error"""

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns the squared error of each example."""
        return (self.error(predictions, examples) ** 2).mean(axis=1)


@METRICS.register("rmse")
class RootMeanSquaredError(MeanSquaredError):
    """the root of the mean squared error, in the units of the labels"""

    def result(self, totals: Any, count: int) -> float:
        """Returns the root of the mean."""
        return float(np.sqrt(totals / count))


@METRICS.register("mape")
class MeanAbsolutePercentageError(_OfNumbers):
    """the mean absolute error as a fraction of the label; labels of 0 are left out"""

    undefined = "all labels are 0"

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns the relative errors, and which labels are not 0."""
        found, label = self.both(predictions, examples)
        used = label != 0
        return {"error": np.where(used, np.abs(found - label) / np.where(used, np.abs(label), 1), 0), "used": used}

    def result(self, totals: Any, count: int) -> float:
        """Returns the mean over all labels that are not 0."""
        used = totals["used"].sum()
        return float(totals["error"].sum() / used) if used else float("nan")


@METRICS.register("median_absolute_error")
class MedianAbsoluteError(_OfNumbers):
    """the median of the absolute errors, in the units of the labels; robust to outliers"""

    whole = True

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns the absolute errors."""
        return np.abs(self.error(predictions, examples))

    def result(self, totals: Any, count: int) -> float:
        """Returns the median, averaged over the numbers of a label."""
        return float(np.median(totals, axis=0).mean())


@METRICS.register("r2")
class R2(_OfNumbers):
    """1 minus the squared error divided by the variance of the labels, averaged over the numbers of a label"""

    lower_is_better, whole = False, True
    undefined = "it needs two examples or more"

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns squared errors and labels."""
        found, label = self.both(predictions, examples)
        return {"squared": (found - label) ** 2, "label": label}

    def result(self, totals: Any, count: int) -> float:
        """Returns the mean over the numbers of a label; for one whose labels are all the same, 1 if exact, else 0."""
        if count < 2:
            return float("nan")
        squared, label = totals["squared"].sum(axis=0), totals["label"]
        differs = label.min(axis=0) < label.max(axis=0)
        around = ((label - label.mean(axis=0)) ** 2).sum(axis=0)
        return float(np.where(differs, 1 - squared / np.where(differs, around, 1), squared == 0).mean())


# -- of a task ---------------------------------------------------------------------------------------------------------


class MacroF1(F1):
    """Macro F1, under the name that multi-label runs have for it."""

    name, predictions = "macro_f1", ("labels",)


def standard_metrics(task: str) -> list[Metric]:
    """Returns the metrics that a task of this type always has, besides its loss."""
    names = {
        CLASSIFICATION: ("accuracy",),
        MULTI_LABEL: ("exact_match", "binary_accuracy"),
        REGRESSION: ("mae", "rmse", "r2"),
    }
    found = [build_metric(Call(name)) for name in names.get(task, ())]
    for metric in found:
        metric.predictions = metric.predictions[:1]  # the classes, not the probabilities
    return [*found, MacroF1(AverageOptions.model_construct())] if task == MULTI_LABEL else found
