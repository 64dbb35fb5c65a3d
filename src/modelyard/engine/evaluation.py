"""Evaluates and predicts whole splits with an engine."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.data.augment.build import neighbours
from modelyard.data.draws import halves

if TYPE_CHECKING:
    from modelyard.engine.base import Engine

_IN_FLIGHT = 2
"""Batches that the device computes while the results of earlier ones are fetched."""


def batch_size(engine: Engine, split: str) -> int:
    """Returns the batch size of the config, rounded up so that every replica has an equal part."""
    size = min(engine.config.eval_batch_size, engine.dataset.size(split))
    return -(-size // engine.replicas) * engine.replicas


def evaluate(engine: Engine, split: str, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
    """Returns the metrics over ``split``, every example counted exactly once.

    Args:
        engine: a built engine.
        split: the split.
        progress: called with the number of examples done and of all.
    """
    size, examples = engine.dataset.size(split), batch_size(engine, split)
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
                progress(min(number * examples, size), size)
    while waiting:
        add()
    return _summary(engine, {name: total / size for name, total in totals.items()})


def metric_names(engine: Engine, split: str) -> list[str]:
    """Returns the names of the metrics of ``split``, from an evaluation of its first batch."""
    size = min(batch_size(engine, split), engine.dataset.size(split))
    with contextlib.closing(engine.evaluation_sums(split)) as batches:
        sums = engine.fetch(next(batches))
    return list(_summary(engine, {name: total.astype(np.float64) / size for name, total in sums.items()}))


def _summary(engine: Engine, means: dict[str, Any]) -> dict[str, float]:
    loss = float(means.pop("loss"))
    return {"loss": loss, **engine.task.summarize(means)}


def predict(engine: Engine, split: str, first: int = 0) -> Generator[dict[str, NDArray[Any]], None, None]:
    """Yields the predictions for the examples of ``split``, batch by batch in storage order.

    Args:
        engine: a built engine.
        split: the split.
        first: the index of the first example.
    """
    waiting: deque[tuple[int, dict[str, Any]]] = deque()

    def fetched() -> dict[str, NDArray[Any]]:
        count, found = waiting.popleft()
        return {name: values[:count] for name, values in engine.fetch(found).items()}

    for batch, weights in engine.pipeline.evaluation(split, batch_size(engine, split), first=first):
        waiting.append((int(weights.sum()), engine.predict_batch(batch)))
        if len(waiting) > _IN_FLIGHT:
            yield fetched()
    while waiting:
        yield fetched()


def training_batch(engine: Engine, step: int, most: int = 32) -> dict[str, NDArray[Any]]:
    """Returns the first examples of a global batch as the network sees them, augmented and preprocessed."""
    together = neighbours(engine.config.augment)
    examples, positions = engine.pipeline.training_examples(step, max(most - most % together, together))
    rows = engine.pipeline.rows(step, 1)[0, : len(positions)].astype(np.int32)
    epochs = (positions // engine.pipeline.run.examples).astype(np.int32)

    def preprocess(examples: dict[str, Any], *numbers: Any) -> dict[str, Any]:
        batch = {name: ops.convert_to_tensor(array) for name, array in examples.items()}
        return engine.functions.preprocess(batch, True, *map(ops.convert_to_tensor, numbers))

    seen = engine.run_on_host(preprocess, examples, *halves(positions), rows, epochs)
    return {name: ops.convert_to_numpy(value) for name, value in seen.items()}
