"""The result of an evaluation, from the results of its batches: sums, metrics by name, values of each example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from modelyard.config.calls import Call
from modelyard.models.metric import MetricSet, build_metric
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


class EvaluationSums:
    """Adds up the batches of an evaluation, in storage order.

    Args:
        task: the task, which makes metrics of the means.
        metrics: the metrics by name.
        size: the number of examples; what comes after them is padding.
    """

    def __init__(self, task: Task, metrics: Sequence[Call], size: int) -> None:
        self._task, self._size = task, size
        self._metrics = MetricSet([build_metric(call) for call in metrics])
        self._totals: Arrays = {}
        self._kept: dict[str, list[NDArray[Any]]] = {}
        self._count = 0

    def add(self, sums: Arrays, examples: Arrays) -> None:
        """Adds a batch."""
        for name, value in sums.items():
            self._totals[name] = self._totals.get(name, 0.0) + value.astype(np.float64)
        values = {name: array[: self._size - self._count] for name, array in examples.items()}
        self._count += len(next(iter(values.values()), ()))
        self._metrics.add(_with_prefix(values, PREDICTION), _with_prefix(values, FEATURE))
        for name, array in values.items():
            if not name.startswith((PREDICTION, FEATURE)):
                self._kept.setdefault(name, []).append(array)

    def result(self) -> Evaluation:
        """Returns the result. A metric that the task has is not replaced by one of the same name."""
        means: dict[str, Any] = {name: total / self._size for name, total in self._totals.items()}
        own = {"loss": float(means.pop("loss")), **self._task.summarize(means)}
        by_name = {name: value for name, value in self._metrics.results().items() if name not in own}
        return Evaluation({**own, **by_name}, {name: np.concatenate(parts) for name, parts in self._kept.items()})


def _with_prefix(values: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): array for name, array in values.items() if name.startswith(prefix)}
