"""Evaluates and predicts whole splits with an engine."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from modelyard.engine.base import Engine

Batch = dict[str, Any]
_IN_FLIGHT = 2
"""Batches that the device works on while the results of earlier ones are fetched."""


def evaluate(engine: Engine, split: str, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
    """Returns the metrics over ``split``, every example counted exactly once.

    Args:
        engine: a built engine.
        split: the split.
        progress: called with the number of examples done and of all.
    """
    size, batch_size = engine.dataset.size(split), engine.evaluation_batch_size(split)
    totals: dict[str, NDArray[np.float64]] = {}
    waiting: deque[dict[str, Any]] = deque()

    def add() -> None:
        for name, value in engine.fetch(waiting.popleft()).items():
            totals[name] = totals.get(name, 0.0) + value.astype(np.float64)

    with contextlib.closing(engine.evaluation_sums(split)) as batches:
        for number, sums in enumerate(batches, start=1):
            waiting.append(sums)
            if len(waiting) > _IN_FLIGHT:
                add()
            if progress is not None:
                progress(min(number * batch_size, size), size)
    while waiting:
        add()
    return _summary(engine, {name: total / size for name, total in totals.items()})


def metric_names(engine: Engine, split: str) -> list[str]:
    """Returns the names of the metrics of ``split``, from an evaluation of its first batch."""
    size = min(engine.evaluation_batch_size(split), engine.dataset.size(split))
    with contextlib.closing(engine.evaluation_sums(split)) as batches:
        sums = engine.fetch(next(batches))
    return list(_summary(engine, {name: total.astype(np.float64) / size for name, total in sums.items()}))


def _summary(engine: Engine, means: dict[str, Any]) -> dict[str, float]:
    loss = float(means.pop("loss"))
    return {"loss": loss, **engine.task.summarize(means)}


def predict(engine: Engine, split: str, first: int = 0) -> Generator[dict[str, NDArray[Any]], None, None]:
    """Yields the predictions for the examples of ``split``, one batch after the other in storage order.

    Args:
        engine: a built engine.
        split: the split.
        first: the example to begin with.
    """
    waiting: deque[tuple[int, dict[str, Any]]] = deque()

    def fetched() -> dict[str, NDArray[Any]]:
        count, found = waiting.popleft()
        return {name: values[:count] for name, values in engine.fetch(found).items()}

    for batch, weights in engine.pipeline.evaluation(split, engine.evaluation_batch_size(split), first=first):
        waiting.append((int(weights.sum()), engine.predict_batch(batch)))
        if len(waiting) > _IN_FLIGHT:
            yield fetched()
    while waiting:
        yield fetched()
