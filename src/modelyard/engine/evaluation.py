"""The result of an evaluation, from the results of its batches: sums, metrics by name, values of each example.

It imports no engine: the predictions of an export are measured here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modelyard.config.calls import Call
from modelyard.data.dataset import LABEL
from modelyard.errors import UserError
from modelyard.models.metric import MetricSet, added, build_metric
from modelyard.models.metric_types import standard_metrics

if TYPE_CHECKING:
    from modelyard.models.task import Task

Arrays = dict[str, NDArray[Any]]
PREDICTION, FEATURE = "prediction/", "feature/"
"""Prefixes of the inputs of metrics by name, among the values of each example."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Args:
        metrics: the metrics over the split.
        examples: values of each example in storage order, by name: loss, other metrics, the label if it is one number.
    """

    metrics: dict[str, float]
    examples: Arrays


class BatchResult(NamedTuple):
    """The evaluation of one batch, which may still be on the device."""

    sums: dict[str, Any]
    """Of each statistic times the example's weight, over the parts of all processes."""
    examples: dict[str, Any]
    """Values of each example of the whole batch, padding included."""


class LabelledBatch(NamedTuple):
    """The evaluation of one batch of a table of predictions."""

    sums: Arrays
    """Of each statistic, over the examples that are used."""
    examples: Arrays
    """Values of each example: its loss, what metrics read."""
    used: NDArray[np.bool_]
    """Which examples could be read."""


class EvaluationSums:
    """Adds up the batches of an evaluation, in storage order.

    Args:
        task: the task, with its own metrics; None if there are only predictions.
        metrics: the metrics of predictions.
        size: the number of examples; what comes after them is padding.
    """

    def __init__(self, task: Task | None, metrics: MetricSet, size: int) -> None:
        self._task, self._metrics, self._size = task, metrics, size
        self._totals: Arrays = {}
        self._kept: dict[str, list[NDArray[Any]]] = {}
        self._count = self._left_out = 0
        self._sums_values = task is not None and _is_built_in(task, "example_values")

    @property
    def count(self) -> int:
        """The number of examples that count."""
        return self._count - self._left_out

    def add(self, sums: Arrays, examples: Arrays, used: NDArray[np.bool_] | None = None) -> None:
        """Adds a batch.

        Args:
            sums: of the statistics of the task, without the examples that are not used.
            examples: values of each example.
            used: which examples count; by default all.
        """
        values = {name: array[: self._size - self._count] for name, array in examples.items()}
        count = len(next(iter(values.values()), ()))
        # A task may keep no values of examples: then all that is known is their number at the end.
        self._count = self._count + count if examples else self._size
        if used is not None:
            values = {name: array[used[:count]] for name, array in values.items()}
            self._left_out += int((~used[:count]).sum())
        for name, value in sums.items():
            if self._sums_values and name in values and not np.ndim(value):  # does not depend on the batches
                self._totals[name] = added(self._totals.get(name), values[name])
            else:
                self._totals[name] = self._totals.get(name, 0.0) + value.astype(np.float64)
        self._metrics.add(_with_prefix(values, PREDICTION), _with_prefix(values, FEATURE))
        for name, array in values.items():
            if not name.startswith((PREDICTION, FEATURE)):
                self._kept.setdefault(name, []).append(array)

    def result(self) -> Evaluation:
        """Returns the result. A metric that a user's own task defines is not replaced by one of the same name."""
        if not self.count:
            return Evaluation({}, {})
        by_name = self._metrics.results()
        if self._task is None:
            return Evaluation(by_name, {})
        means: dict[str, Any] = {name: total / self.count for name, total in self._totals.items()}
        own = {"loss": float(means.pop("loss")), **self._task.summarize(means)}
        if not _is_built_in(self._task, "metrics"):  # else they are computed from the predictions
            by_name = {name: value for name, value in by_name.items() if name not in own}
        return Evaluation({**own, **by_name}, {name: np.concatenate(parts) for name, parts in self._kept.items()})


def metrics_of(task: Task, metrics: Sequence[Call]) -> MetricSet:
    """Returns the metrics of every evaluation of a task: its standard ones, and those by name."""
    return MetricSet([build_metric(call) for call in metrics], task.standard_metrics())


def standard_metrics_and(metrics: Sequence[Call], task_type: str) -> MetricSet:
    """Returns the metrics of predictions without their task: the standard ones of its type, and those by name."""
    made = [build_metric(call) for call in metrics]
    for metric in made if task_type in ("classification", "multi_label", "regression") else ():
        if metric.tasks and task_type not in metric.tasks:
            raise UserError(f"the metric {metric.name!r} is for {' and '.join(metric.tasks)}; this is {task_type}.")
    return MetricSet(made, standard_metrics(task_type))


def _is_built_in(task: Task, method: str) -> bool:
    """Returns whether a method of a task is not a user's own."""
    return str(getattr(type(task), method).__module__).startswith("modelyard.models.")


def predictions_of(values: Arrays) -> Arrays:
    """Returns the predictions among the values of each example."""
    return _with_prefix(values, PREDICTION)


def without_unread(values: Arrays, metrics: MetricSet) -> Arrays:
    """Returns the values of each example without predictions that no metric reads."""
    wanted = metrics.predictions
    unread = [] if wanted is None else [PREDICTION + name for name in predictions_of(values) if name not in wanted]
    return {name: array for name, array in values.items() if name not in unread}


def values_to_measure(predictions: Arrays, labels: NDArray[Any]) -> Arrays:
    """Returns the values of each example for `EvaluationSums`, if there are only predictions and labels."""
    return {**{PREDICTION + name: array for name, array in predictions.items()}, FEATURE + LABEL: labels}


def _with_prefix(values: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in values.items() if name.startswith(prefix)}
