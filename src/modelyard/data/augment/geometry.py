"""Augmentations that move pixels: crops, flips, rotation."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from modelyard.data.augment.build import Batch, ImageInfo
from modelyard.data.augment.crop_box import crop_box
from modelyard.data.augment.pixels import resize_boxes, take_pixels, take_rows, warp
from modelyard.data.catalog import (
    FlipLeftRightOptions,
    FlipOptions,
    PadAndCropOptions,
    RandomResizedCropOptions,
    RotationOptions,
)
from modelyard.data.dataset import IMAGE
from modelyard.data.draws import Draws, index_type
from modelyard.errors import DataError

_ANGLES = 4096


class PadAndCrop:
    """Pads with black, or with the image reflected at its border, and crops at random to the old size."""

    def __init__(self, options: PadAndCropOptions) -> None:
        self.padding, self.fill = options.padding, options.fill

    def prepare(self, info: ImageInfo) -> None:
        """An image can be reflected once only."""
        least = min(info.shape[:2])
        if self.fill == "reflect" and self.padding >= least:
            raise DataError(
                f"{info.name}: images of {info.shape[0]}×{info.shape[1]} can be reflected by {least - 1} pixels at "
                f"most; padding is {self.padding}."
            )

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One offset in each direction an example."""
        images = batch[IMAGE]
        _, height, width, _ = images.shape
        pad = self.padding
        offsets = ops.cast(draws.integers(2 * pad + 1, 2), index_type())
        rows = offsets[:, 0:1] + ops.arange(height, dtype=index_type())
        columns = offsets[:, 1:2] + ops.arange(width, dtype=index_type())
        if self.fill == "reflect":  # places that lie outside are folded back: nothing is padded
            return {**batch, IMAGE: take_pixels(images, _folded(rows - pad, height), _folded(columns - pad, width))}
        padded = ops.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
        return {**batch, IMAGE: take_pixels(padded, rows, columns)}


def _folded(places: Any, size: int) -> Any:
    """Places before the first and after the last, reflected there."""
    return (size - 1) - ops.abs((size - 1) - ops.abs(places))


class FlipLeftRight:
    """Mirrors images at random, or every other epoch."""

    def __init__(self, options: FlipLeftRightOptions) -> None:
        self.probability, self.alternate = options.probability, options.alternate

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One coin an example; if they alternate, one for all epochs, turned over in each."""
        images = batch[IMAGE]
        _, height, width, _ = images.shape
        columns = ops.arange(width, dtype=index_type())[None, :]
        mirrored = self._every_other_epoch(draws) if self.alternate else ops.less(draws.uniform(), self.probability)
        columns = ops.where(mirrored, width - 1 - columns, columns)
        return {**batch, IMAGE: take_pixels(images, ops.arange(height, dtype=index_type())[None, :], columns)}

    def _every_other_epoch(self, draws: Draws) -> Any:
        if draws.rows is None or draws.epochs is None:
            raise DataError("flip_left_right(alternate=true) must know which examples it has, and in which epoch.")
        turns = ops.add(draws.row_words(), ops.cast(draws.epochs, "uint32"))
        return ops.cast(ops.bitwise_and(turns, ops.convert_to_tensor(np.uint32(1))), "bool")[:, None]


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
