"""Metrics by name: NumPy functions of predictions and labels, the same in training, `evaluate` and `predict`.

The shortest way to your own is a function that returns one value per example; the metric is their mean:

    @modelyard.register_metric("near_miss")
    def near_miss(predictions, examples):
        "The fraction whose class is at most one off."
        return abs(predictions["class"] - examples["label"]) <= 1

For a metric that is no mean, subclass `Metric`; `metric_types.py` has the built-in ones. Values are added example by
example in the order of the split, so a metric does not depend on the batch size, the devices or the processes.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config.calls import Call
from modelyard.data.dataset import LABEL
from modelyard.errors import UserError
from modelyard.registry import METRICS
from modelyard.registry import Options as BaseOptions

log = logging.getLogger("modelyard")
Arrays = Mapping[str, NDArray[Any]]


class Metric:
    """A metric of a split.

    Args:
        options: its typed options.
    """

    Options: type[BaseOptions] = BaseOptions
    tasks: tuple[str, ...] = ()
    """The built-in tasks that have it: classification, multi_label, regression. Empty: any task."""
    features: tuple[str, ...] = (LABEL,)
    """The features of an example that it reads."""
    predictions: tuple[str, ...] = ()
    """The predictions that it reads; only these are copied from the device. Empty: all."""
    whole = False
    """Whether `result` needs the statistics of all examples, and not their sums."""
    lower_is_better: bool | None = None
    """Whether lower is better. None: by its name, as for losses and errors."""
    undefined = ""
    """Why its value may be NaN, in words. It is logged then."""
    name = ""
    """Its name in results: the registered name, with the arguments that were given."""

    def __init__(self, options: BaseOptions) -> None:
        self.options = options

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns an array for some examples, first axis the examples; or several, by name.

        Args:
            predictions: what the task predicts: ``class`` and ``probabilities``; ``labels`` and ``probabilities`` for
                multi-label; ``values`` for a regression.
            examples: the features of the examples that are named in `features`, by default ``label``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define statistics().")

    def result(self, totals: Any, count: int) -> float:
        """Returns the metric; by default the mean.

        Args:
            totals: what `statistics` returned, summed over all examples; if `whole`, of all examples.
            count: the number of examples.
        """
        return float(totals / count)


class _Function(Metric):
    """A function that returns one value per example."""

    def __init__(self, function: Callable[[Arrays, Arrays], Any], options: BaseOptions) -> None:
        super().__init__(options)
        self._function = function
        self.lower_is_better = getattr(function, "lower_is_better", None)

    def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
        """Returns what the function returns."""
        return self._function(predictions, examples)


def build_metric(call: Call) -> Metric:
    """Makes the metric that a call names."""
    target, options = METRICS.get(call.name).load(), call.options(METRICS)
    metric = target(options) if isinstance(target, type) else _Function(target, options)
    if not isinstance(metric, Metric):
        raise UserError(f"the metric {call.name!r} must be a function or a subclass of modelyard.Metric.")
    metric.name = metric_name(call)
    return metric


def metric_name(call: Call) -> str:
    """Returns the name of a metric in results: ``top_k(k=3)`` is ``top_k_3``."""
    return re.sub(r"\W+", "_", "_".join([call.name, *map(str, call.arguments.values())]))


def metric_modes(metrics: Iterable[Metric]) -> dict[str, str]:
    """Returns what is better of each metric that says so, "min" or "max"."""
    return {
        metric.name: "min" if metric.lower_is_better else "max"
        for metric in metrics
        if metric.lower_is_better is not None
    }


class MetricSet:
    """Metrics over a split, updated batch by batch. Every score of a model comes from here.

    Args:
        metrics: the metrics.
        standard: those that every run of the task has. They are left out if predictions or examples lack what they
            read, as those of a user's own task may. One with the name of a metric is not computed twice.
    """

    def __init__(self, metrics: Sequence[Metric], standard: Sequence[Metric] = ()) -> None:
        named = {metric.name for metric in metrics}
        self._standard = tuple(metric for metric in standard if metric.name not in named)
        self.metrics = (*self._standard, *metrics)
        self.count = 0
        self._totals: dict[str, dict[str, Any]] = {}

    @property
    def features(self) -> tuple[str, ...]:
        """The features of an example that some metric reads."""
        return tuple(dict.fromkeys(name for metric in self.metrics for name in metric.features))

    @property
    def predictions(self) -> tuple[str, ...] | None:
        """The predictions that some metric reads; None if one may read all."""
        if not all(metric.predictions for metric in self.metrics):
            return None
        return tuple(dict.fromkeys(name for metric in self.metrics for name in metric.predictions))

    def add(self, predictions: Arrays, examples: Arrays) -> None:
        """Adds the examples of a batch.

        Raises:
            UserError: if a metric fails.
        """
        absent = [each for each in self._standard if not {*each.predictions} <= {*predictions}]
        absent += [each for each in self._standard if not {*each.features} <= {*examples}]
        self.metrics = tuple(metric for metric in self.metrics if metric not in absent)
        count = len(next(iter({**predictions, **examples}.values()), ()))
        if not count:
            return
        for metric in self.metrics:
            try:
                found = metric.statistics(predictions, examples)
                named = found if isinstance(found, Mapping) else {"": found}
                arrays = {name: np.asarray(array) for name, array in named.items()}
            except UserError:
                raise
            except Exception as error:
                raise _failed(metric, error, predictions, examples) from error
            wrong = next((array for array in arrays.values() if array.shape[:1] != (count,)), None)
            if wrong is not None:
                raise UserError(
                    f"the metric {metric.name!r} must return one value per example, {count} here; "
                    f"it returned an array of shape {wrong.shape}."
                )
            totals = self._totals.setdefault(metric.name, {})
            for name, array in arrays.items():
                totals[name] = _appended(totals.get(name), array) if metric.whole else added(totals.get(name), array)
        self.count += count

    def results(self) -> dict[str, float]:
        """Returns the metrics by name; none without examples."""
        found = {}
        for metric in self.metrics if self.count else ():
            totals: Any = self._totals[metric.name]
            if metric.whole:
                totals = {name: np.concatenate(parts) for name, parts in totals.items()}
            try:
                found[metric.name] = float(metric.result(totals.get("") if set(totals) == {""} else totals, self.count))
            except Exception as error:
                raise _failed(metric, error, {}, {}) from error
            if math.isnan(found[metric.name]):
                _say_undefined(metric.name, metric.undefined)
        return found


@functools.cache
def _say_undefined(name: str, why: str) -> None:
    """Logs, once in a process, that a metric is NaN."""
    log.warning("the metric %s is NaN%s", name, f": {why}" if why else "")


def _failed(metric: Metric, error: Exception, predictions: Arrays, examples: Arrays) -> UserError:
    known = [f"{what} {', '.join(given)}" for what, given in (("predictions", predictions), ("examples", examples))]
    has = f" It gets the {' and the '.join(known)}." if predictions else ""
    return UserError(f"the metric {metric.name!r} failed: {type(error).__name__}: {error}.{has}")


def added(total: Any, array: NDArray[Any]) -> Any:
    """Returns the total with the rows of an array, added one by one: the sum does not depend on the batches."""
    if array.dtype.kind in "biu":
        return array.sum(axis=0, dtype=np.int64) + (0 if total is None else total)
    first = np.zeros((1, *array.shape[1:])) if total is None else np.asarray(total, np.float64)[None]
    return np.add.accumulate(np.concatenate([first, array.astype(np.float64)]), axis=0)[-1]


def _appended(parts: list[NDArray[Any]] | None, array: NDArray[Any]) -> list[NDArray[Any]]:
    return [*(parts or []), array.copy()]
