"""Augmentation on the device, inside the compiled step, per example, from draws that are arithmetic.

An augmentation is called with a batch (named arrays) and its draws, and returns the batch changed. One of your own:

    @modelyard.register_augmentation("darken")
    class Darken:
        def __init__(self, options): ...
        def __call__(self, batch, draws):
            return {**batch, "image": batch["image"] * draws.uniform()[:, :, None, None]}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from modelyard.config.calls import Call
from modelyard.data.catalog import FlipOptions, PadAndCropOptions
from modelyard.data.dataset import IMAGE, Dataset
from modelyard.data.draws import Draws, fold
from modelyard.errors import DataError
from modelyard.registry import AUGMENTATIONS

Batch = dict[str, Any]
Augmentation = Callable[[Batch, Draws], Batch]


class PadAndCrop:
    """Pads with black and crops at random to the old size."""

    def __init__(self, options: PadAndCropOptions) -> None:
        self.padding = options.padding

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One offset in each direction an example."""
        images = batch[IMAGE]
        count, height, width, channels = images.shape
        pad = self.padding
        padded = ops.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
        offsets = draws.integers(2 * pad + 1, 2)
        rows = offsets[:, 0:1] + ops.arange(height, dtype="int32")
        columns = offsets[:, 1:2] + ops.arange(width, dtype="int32")
        tall, wide = height + 2 * pad, width + 2 * pad
        # One gather of whole pixels: example, row and column as one number.
        first = ops.arange(count, dtype="int32")[:, None] * tall
        pixels = (first + rows)[:, :, None] * wide + columns[:, None, :]
        return {**batch, IMAGE: ops.take(ops.reshape(padded, (-1, channels)), pixels, axis=0)}


class FlipLeftRight:
    """Mirrors images at random."""

    def __init__(self, options: FlipOptions) -> None:
        self.probability = options.probability

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One coin an example."""
        images = batch[IMAGE]
        flipped = ops.less(draws.uniform()[:, :, None, None], self.probability)
        return {**batch, IMAGE: ops.where(flipped, ops.flip(images, axis=2), images)}


def build_augmentation(
    calls: Sequence[Call], dataset: Dataset, seed: int, share: int = 0, skip_first: bool = False
) -> Callable[[Batch, Any, Any], Batch]:
    """All augmentations of a config, as one function of (batch, low and high words of the positions)."""
    shape = dataset.features[IMAGE].shape if IMAGE in dataset.features else ()
    if calls and len(shape) != 3:
        raise DataError(f"augmentation needs images of height × width × channels; these examples have shape {shape}.")
    steps: list[Augmentation] = [AUGMENTATIONS.get(call.name).load()(call.options(AUGMENTATIONS)) for call in calls]

    def augment(batch: Batch, low: Any, high: Any) -> Batch:
        for number, step in enumerate(steps):
            batch = step(batch, Draws(fold(seed, number), low, high))
        return batch

    return augment
