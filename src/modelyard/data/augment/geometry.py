"""Augmentations that move pixels: crops, flips, rotation."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from modelyard.data.augment.aligned import Corners, MovesPixels, per_example
from modelyard.data.augment.build import Batch, ImageInfo
from modelyard.data.catalog import (
    FlipLeftRightOptions,
    FlipOptions,
    PadAndCropOptions,
    RandomResizedCropOptions,
    RotationOptions,
)
from modelyard.data.dataset import IMAGE
from modelyard.data.draws import Draws, crop_box, index_type
from modelyard.errors import DataError

_ANGLES = 4096


class PadAndCrop(MovesPixels):
    """Pads with black or by reflection, and crops at random to the original size."""

    def __init__(self, options: PadAndCropOptions) -> None:
        self.padding, self.fill = options.padding, options.fill

    def prepare(self, info: ImageInfo) -> None:
        """Raises a `DataError` if the padding is larger than the reflected image."""
        super().prepare(info)
        least = min(info.shape[:2])
        if self.fill == "reflect" and self.padding >= least:
            raise DataError(
                f"{info.name}: images of {info.shape[0]}×{info.shape[1]} can be reflected by {least - 1} pixels at "
                f"most; padding is {self.padding}."
            )

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images = batch[IMAGE]
        _, height, width, _ = images.shape
        pad = self.padding
        offsets = ops.cast(draws.integers(2 * pad + 1, 2), index_type())
        rows = offsets[:, 0:1] + ops.arange(height, dtype=index_type())
        columns = offsets[:, 1:2] + ops.arange(width, dtype=index_type())
        shifts = per_example(offsets[:, 0] - pad) / height, per_example(offsets[:, 1] - pad) / width

        def corners(old: Corners) -> Corners:
            return old[0] - shifts[0], old[1] - shifts[1], old[2] - shifts[0], old[3] - shifts[1]

        if self.fill == "reflect":  # reflecting indices saves the padding
            rows, columns = _reflected(rows - pad, height), _reflected(columns - pad, width)
            moved = take_pixels(images, rows, columns)
            return self.moved(batch, moved, lambda values, _: take_pixels(values, rows, columns), corners)
        padded = ops.pad(images, [[0, 0], [pad, pad], [pad, pad], [0, 0]])
        moved = take_pixels(padded, rows, columns)
        return self.moved(batch, moved, lambda v, outside: take_or(v, rows - pad, columns - pad, outside), corners)


def _reflected(indices: Any, size: int) -> Any:
    """Reflects indices below 0 and above ``size`` - 1."""
    return (size - 1) - ops.abs((size - 1) - ops.abs(indices))


class FlipLeftRight(MovesPixels):
    """Mirrors images at random, or every other epoch."""

    def __init__(self, options: FlipLeftRightOptions) -> None:
        self.probability, self.alternate = options.probability, options.alternate

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images = batch[IMAGE]
        _, height, width, _ = images.shape
        columns = ops.arange(width, dtype=index_type())[None, :]
        mirrored = self._every_other_epoch(draws) if self.alternate else ops.less(draws.uniform(), self.probability)
        columns = ops.where(mirrored, width - 1 - columns, columns)
        rows = ops.arange(height, dtype=index_type())[None, :]

        def corners(old: Corners) -> Corners:
            return old[0], ops.where(mirrored, 1 - old[3], old[1]), old[2], ops.where(mirrored, 1 - old[1], old[3])

        moved = take_pixels(images, rows, columns)
        return self.moved(batch, moved, lambda values, _: take_pixels(values, rows, columns), corners)

    def _every_other_epoch(self, draws: Draws) -> Any:
        if draws.rows is None or draws.epochs is None:
            raise DataError("flip_left_right(alternate=true) needs the rows and epochs of its examples.")
        turns = ops.add(draws.row_words(), ops.cast(draws.epochs, "uint32"))
        return ops.cast(ops.bitwise_and(turns, ops.convert_to_tensor(np.uint32(1))), "bool")[:, None]


class FlipUpDown(MovesPixels):
    """Turns images upside down at random."""

    def __init__(self, options: FlipOptions) -> None:
        self.probability = options.probability

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images = batch[IMAGE]
        rows = ops.arange(images.shape[1], dtype=index_type())[None, :]
        turned = ops.less(draws.uniform(), self.probability)
        rows = ops.where(turned, images.shape[1] - 1 - rows, rows)

        def corners(old: Corners) -> Corners:
            return ops.where(turned, 1 - old[2], old[0]), old[1], ops.where(turned, 1 - old[0], old[2]), old[3]

        return self.moved(batch, take_rows(images, rows), lambda values, _: take_rows(values, rows), corners)


class Rotation(MovesPixels):
    """Rotates images about their center, by an angle from -degrees to degrees.

    Sine and cosine come from a table, since devices differ in the last bit of a sine.
    """

    def __init__(self, options: RotationOptions) -> None:
        angles = np.deg2rad(options.degrees * ((np.arange(_ANGLES) + 0.5) / (_ANGLES / 2) - 1))
        self.table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        turn = ops.take(
            ops.convert_to_tensor(self.table), ops.cast(draws.integers(_ANGLES), index_type())[:, 0], axis=0
        )
        cosine, sine = turn[:, 0], turn[:, 1]
        zero = ops.zeros_like(cosine)
        return warped(self, batch, [cosine, -sine, zero, sine, cosine, zero])


class RandomResizedCrop(MovesPixels):
    """Takes a part of an image, of random area and ratio, and resizes it to the original size."""

    def __init__(self, options: RandomResizedCropOptions) -> None:
        self.scale, self.ratio = options.scale, options.ratio

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images = batch[IMAGE]
        u = draws.uniform(4)
        box = crop_box([u[:, i] for i in range(4)], images.shape[1], images.shape[2], self.scale, self.ratio, ops)
        _, height, width, _ = images.shape
        top, left, tall, wide = (per_example(value) for value in box)

        def corners(old: Corners) -> Corners:
            y, x = ((old[i] * height - top) / tall for i in (0, 2)), ((old[i] * width - left) / wide for i in (1, 3))
            (y_min, y_max), (x_min, x_max) = y, x
            return y_min, x_min, y_max, x_max

        rows, columns = _nearest(box[0], box[2], height), _nearest(box[1], box[3], width)
        moved = resize_boxes(images, *box)
        return self.moved(batch, moved, lambda values, _: take_pixels(values, rows, columns), corners)


# -- moving pixels ----------------------------------------------------------------------------------------------------


def take_rows(images: Any, rows: Any) -> Any:
    """Gathers whole rows of each image: ``rows`` is `index_type()` of shape [batch, new height]."""
    count, height, width, channels = images.shape
    first = ops.arange(count, dtype=index_type())[:, None] * height
    taken = ops.take(ops.reshape(images, (count * height, width * channels)), first + rows, axis=0)
    return ops.reshape(taken, (count, rows.shape[1], width, channels))


def take_pixels(images: Any, rows: Any, columns: Any) -> Any:
    """Gathers the pixels at the crossings of rows and columns: `index_type()` of shape [batch or 1, new size]."""
    count, height, width, channels = images.shape
    # One gather of whole pixels: example, row and column as one number.
    first = ops.arange(count, dtype=index_type())[:, None] * height
    pixels = (first + rows)[:, :, None] * width + columns[:, None, :]
    return ops.take(ops.reshape(images, (-1, channels)), pixels, axis=0)


def take_or(images: Any, rows: Any, columns: Any, outside: float) -> Any:
    """`take_pixels`, but rows and columns may be outside of the image; pixels there have the value ``outside``."""
    height, width = images.shape[1:3]
    inside = ops.logical_and(
        ops.logical_and(rows >= 0, rows < height)[:, :, None], ops.logical_and(columns >= 0, columns < width)[:, None]
    )
    taken = take_pixels(images, ops.clip(rows, 0, height - 1), ops.clip(columns, 0, width - 1))
    return ops.where(inside[..., None], taken, ops.cast(outside, images.dtype))


def resize_boxes(images: Any, top: Any, left: Any, height: Any, width: Any) -> Any:
    """Resizes a box of each image to the size of the image, with bilinear sampling within the box. Returns float32.

    Args:
        images: a batch of images.
        top, left, height, width: the boxes in pixels, integers as float32 of shape [batch].
    """
    rows, more_rows, down = _neighbours(top, height, images.shape[1])
    columns, more_columns, right = _neighbours(left, width, images.shape[2])
    upper, lower = (ops.cast(take_rows(images, r), "float32") for r in (rows, more_rows))
    mixed = _between(upper, lower, down[:, :, None, None])
    every = ops.arange(images.shape[1], dtype=index_type())[None, :]
    near, far = (take_pixels(mixed, every, c) for c in (columns, more_columns))
    return _between(near, far, right[:, None, :, None])


def warp(images: Any, matrices: Any) -> Any:
    """Applies an affine map to each image, with bilinear sampling; black outside. Returns float32.

    Args:
        images: a batch of images.
        matrices: six float32 of shape [batch]. With y and x counted from the center of the image, the new pixel at
            (y, x) is the old one at (m0 y + m1 x + m2, m3 y + m4 x + m5).
    """
    count, height, width, channels = images.shape
    # With a border of one black pixel, edges fade and the outside is black without masks.
    padded = ops.reshape(ops.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]]), (-1, channels))
    middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
    y = (ops.arange(height, dtype="float32") - middle_y)[None, :, None]
    x = (ops.arange(width, dtype="float32") - middle_x)[None, None, :]
    m = [value[:, None, None] for value in matrices]
    old_y = ops.clip(m[0] * y + m[1] * x + (m[2] + (middle_y + 1)), 0.0, height + 1.0)
    old_x = ops.clip(m[3] * y + m[4] * x + (m[5] + (middle_x + 1)), 0.0, width + 1.0)
    low_y, low_x = ops.minimum(ops.floor(old_y), float(height)), ops.minimum(ops.floor(old_x), float(width))
    wide = width + 2
    first = ops.arange(count, dtype=index_type())[:, None, None] * ((height + 2) * wide)
    index = first + ops.cast(low_y, index_type()) * wide + ops.cast(low_x, index_type())
    right, down = (old_x - low_x)[..., None], (old_y - low_y)[..., None]
    corners = [ops.cast(ops.take(padded, index + step, axis=0), "float32") for step in (0, 1, wide, wide + 1)]
    return _between(_between(corners[0], corners[1], right), _between(corners[2], corners[3], right), down)


def warp_nearest(images: Any, matrices: Any, outside: float) -> Any:
    """Applies the map of `warp` with the value of the nearest pixel; ``outside`` where there is none."""
    count, height, width, channels = images.shape
    middle_y, middle_x = (height - 1) / 2, (width - 1) / 2
    y = (ops.arange(height, dtype="float32") - middle_y)[None, :, None]
    x = (ops.arange(width, dtype="float32") - middle_x)[None, None, :]
    m = [value[:, None, None] for value in matrices]
    old_y = ops.floor(m[0] * y + m[1] * x + (m[2] + (middle_y + 0.5)))
    old_x = ops.floor(m[3] * y + m[4] * x + (m[5] + (middle_x + 0.5)))
    inside = ops.logical_and(
        ops.logical_and(old_y >= 0.0, old_y < height), ops.logical_and(old_x >= 0.0, old_x < width)
    )
    rows, columns = (
        ops.cast(ops.clip(old, 0.0, size - 1.0), index_type()) for old, size in ((old_y, height), (old_x, width))
    )
    first = ops.arange(count, dtype=index_type())[:, None, None] * height
    taken = ops.take(ops.reshape(images, (-1, channels)), (first + rows) * width + columns, axis=0)
    return ops.where(inside[..., None], taken, ops.cast(outside, images.dtype))


def warped(step: MovesPixels, batch: Batch, matrices: Any) -> Batch:
    """Returns the batch after `warp`, with maps, and the upright boxes around the turned ones."""
    _, height, width, _ = batch[IMAGE].shape

    def corners(old: Corners) -> Corners:
        m = [per_example(value) for value in matrices]
        area = m[0] * m[4] - m[1] * m[3]
        ys, xs = [], []
        for i, j in ((0, 1), (0, 3), (2, 1), (2, 3)):
            y, x = (old[i] - 0.5) * height - m[2], (old[j] - 0.5) * width - m[5]
            ys.append((m[4] * y - m[1] * x) / area / height + 0.5)
            xs.append((m[0] * x - m[3] * y) / area / width + 0.5)
        low = [ops.min(ops.stack(each), axis=0) for each in (ys, xs)]
        high = [ops.max(ops.stack(each), axis=0) for each in (ys, xs)]
        return low[0], low[1], high[0], high[1]

    moved = warp(batch[IMAGE], matrices)
    return step.moved(batch, moved, lambda values, outside: warp_nearest(values, matrices, outside), corners)


def _nearest(start: Any, length: Any, size: int) -> Any:
    """Returns for each of ``size`` new pixels the old index that is nearest: `index_type()` of shape [batch, size]."""
    start, length = start[:, None], length[:, None]
    old = ops.floor(start + (ops.arange(size, dtype="float32") + 0.5)[None, :] * (length / size))
    return ops.cast(ops.minimum(ops.maximum(old, start), start + length - 1.0), index_type())


def _neighbours(start: Any, length: Any, size: int) -> tuple[Any, Any, Any]:
    """Returns for each of ``size`` new pixels the two old indices next to it, and the weight of the second."""
    start, length = start[:, None], length[:, None]
    old = start + (ops.arange(size, dtype="float32") + 0.5)[None, :] * (length / size) - 0.5
    old = ops.minimum(ops.maximum(old, start), start + length - 1.0)
    low = ops.floor(old)
    high = ops.minimum(low + 1.0, start + length - 1.0)
    return ops.cast(low, index_type()), ops.cast(high, index_type()), old - low


def _between(one: Any, other: Any, way: Any) -> Any:
    return one + (other - one) * way
