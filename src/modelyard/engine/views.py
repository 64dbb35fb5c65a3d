"""Test-time augmentation: a network's outputs averaged over views of each image.

``flip`` is the image and its mirror image. ``shift`` is the image, which counts half, and two that are moved by one
pixel, up and left, and down and right, the border reflected. Both together: every shifted view and its mirror image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from modelyard.data.dataset import IMAGE
from modelyard.errors import DataError

Batch = dict[str, Any]


def views_of(images: Any, names: Sequence[str]) -> list[tuple[Any, float]]:
    """Views of a batch of images, and how much each counts.

    Raises:
        DataError: if the examples are no images.
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
    """What ``forward`` gives for a batch, averaged over the views of its images that ``names`` asks for.

    Args:
        forward: from a batch to outputs (or a nest of them) whose first axis is the batch; called once.
        batch: named tensors, among them the images.
        names: "flip", "shift", both or none.
        one_by_one: the views go through the network in a loop, each a batch of its own, not all in one batch.
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
