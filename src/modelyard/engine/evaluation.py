"""Evaluates and predicts whole splits with an engine, and averages outputs over views of each image.

Test-time augmentation: ``flip`` is the image and its mirror image. ``shift`` is the image, which counts half, and two
that are moved by one pixel, up and left, and down and right, the border reflected. Both together: every shifted
view and its mirror image.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.data.dataset import IMAGE
from modelyard.errors import DataError

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


# -- test-time augmentation -----------------------------------------------------------------------------------------


def views_of(images: Any, names: Sequence[str]) -> list[tuple[Any, float]]:
    """Returns views of a batch of images, with the weight of each.

    Raises:
        DataError: if the examples are not images.
    """
    if len(images.shape) != 4 or min(images.shape[1:3]) < 2:
        raise DataError(
            f"test_time_augmentation needs images of height × width × channels; these have shape {images.shape[1:]}."
        )
    views = [(images, 1.0)]
    if "shift" in names:
        views = [(images, 0.5), *((moved, 0.25) for moved in _shifted(images))]
    if "flip" in names:
        views = [(view, share / 2) for image, share in views for view in (image, image[:, :, ::-1, :])]
    return views


def averaged(forward: Callable[[Batch], Any], batch: Batch, names: Sequence[str], *, one_by_one: bool = False) -> Any:
    """Returns the outputs of ``forward`` for a batch, averaged over the views of its images that ``names`` asks for.

    Args:
        forward: from a batch to outputs (or a nest of them) whose first axis is the batch; called once.
        batch: named tensors, among them the images.
        names: "flip", "shift", both or none.
        one_by_one: send the views through the network in a loop, each as a batch, not all in one batch.
    """
    if not names:
        return forward(batch)
    views = views_of(batch[IMAGE], names)
    images, shares = [view for view, _ in views], [share for _, share in views]
    if one_by_one:
        outputs = ops.map(lambda image: forward({**batch, IMAGE: image}), ops.stack(images))
    else:
        together = {name: ops.concatenate([value] * len(views)) for name, value in batch.items() if name != IMAGE}
        outputs = forward({**together, IMAGE: ops.concatenate(images)})

    def mean(output: Any) -> Any:
        parts = output if one_by_one else ops.split(output, len(views))
        return sum(parts[number] * share for number, share in enumerate(shares))

    return keras.tree.map_structure(mean, outputs)


def _shifted(images: Any) -> list[Any]:
    # Slices put together, not a reflecting pad, which backends don't have for every type.
    rows = [
        ops.concatenate([images[:, 1:2], images[:, :-1]], axis=1),
        ops.concatenate([images[:, 1:], images[:, -2:-1]], axis=1),
    ]
    return [
        ops.concatenate([rows[0][:, :, 1:2], rows[0][:, :, :-1]], axis=2),
        ops.concatenate([rows[1][:, :, 1:], rows[1][:, :, -2:-1]], axis=2),
    ]
