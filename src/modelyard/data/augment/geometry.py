"""Augmentations that move pixels: crops, flips, rotation."""

from __future__ import annotations

import numpy as np
from keras import ops

from modelyard.data.augment.build import Batch
from modelyard.data.augment.crop_box import crop_box
from modelyard.data.augment.pixels import resize_boxes, take_pixels, take_rows, warp
from modelyard.data.catalog import FlipOptions, PadAndCropOptions, RandomResizedCropOptions, RotationOptions
from modelyard.data.dataset import IMAGE
from modelyard.data.draws import Draws, index_type

_ANGLES = 4096


class PadAndCrop:
    """Pads with black and crops at random to the old size."""

    def __init__(self, options: PadAndCropOptions) -> None:
        self.padding = options.padding

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One offset in each direction an example."""
        images = batch[IMAGE]
        _, height, width, _ = images.shape
        pad = self.padding
        padded = ops.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
        offsets = ops.cast(draws.integers(2 * pad + 1, 2), index_type())
        rows = offsets[:, 0:1] + ops.arange(height, dtype=index_type())
        columns = offsets[:, 1:2] + ops.arange(width, dtype=index_type())
        return {**batch, IMAGE: take_pixels(padded, rows, columns)}


class FlipLeftRight:
    """Mirrors images at random."""

    def __init__(self, options: FlipOptions) -> None:
        self.probability = options.probability

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One coin an example."""
        images = batch[IMAGE]
        _, height, width, _ = images.shape
        columns = ops.arange(width, dtype=index_type())[None, :]
        columns = ops.where(ops.less(draws.uniform(), self.probability), width - 1 - columns, columns)
        return {**batch, IMAGE: take_pixels(images, ops.arange(height, dtype=index_type())[None, :], columns)}


class FlipUpDown:
    """Turns images upside down at random."""

    def __init__(self, options: FlipOptions) -> None:
        self.probability = options.probability

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One coin an example."""
        images = batch[IMAGE]
        rows = ops.arange(images.shape[1], dtype=index_type())[None, :]
        rows = ops.where(ops.less(draws.uniform(), self.probability), images.shape[1] - 1 - rows, rows)
        return {**batch, IMAGE: take_rows(images, rows)}


class Rotation:
    """Turns images about their centre, by an angle from -degrees to degrees."""

    def __init__(self, options: RotationOptions) -> None:
        angles = np.deg2rad(options.degrees * ((np.arange(_ANGLES) + 0.5) / (_ANGLES / 2) - 1))
        self.table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One of 4096 angles an example: out of a table, since devices differ in the last bit of a sine."""
        turn = ops.take(
            ops.convert_to_tensor(self.table), ops.cast(draws.integers(_ANGLES), index_type())[:, 0], axis=0
        )
        cosine, sine = turn[:, 0], turn[:, 1]
        still = ops.zeros_like(cosine)
        return {**batch, IMAGE: warp(batch[IMAGE], [cosine, -sine, still, sine, cosine, still])}


class RandomResizedCrop:
    """Takes a part of an image, of random area and ratio, and resizes it to the old size."""

    def __init__(self, options: RandomResizedCropOptions) -> None:
        self.scale, self.ratio = options.scale, options.ratio

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One box an example."""
        images = batch[IMAGE]
        u = draws.uniform(4)
        box = crop_box([u[:, i] for i in range(4)], images.shape[1], images.shape[2], self.scale, self.ratio, ops)
        return {**batch, IMAGE: resize_boxes(images, *box)}
