"""Where the pixels of a new image come from: gathers of whole pixels, and bilinear sampling made of them."""

from __future__ import annotations

from typing import Any

from keras import ops

from modelyard.data.draws import index_type


def take_rows(images: Any, rows: Any) -> Any:
    """Images made of whole rows of images: ``rows`` is of type `index_type()`, of shape [batch, new height]."""
    count, height, width, channels = images.shape
    first = ops.arange(count, dtype=index_type())[:, None] * height
    taken = ops.take(ops.reshape(images, (count * height, width * channels)), first + rows, axis=0)
    return ops.reshape(taken, (count, rows.shape[1], width, channels))


def take_pixels(images: Any, rows: Any, columns: Any) -> Any:
    """Images made of the pixels where rows and columns cross: `index_type()` of shape [batch or 1, new size]."""
    count, height, width, channels = images.shape
    # One gather of whole pixels: example, row and column as one number.
    first = ops.arange(count, dtype=index_type())[:, None] * height
    pixels = (first + rows)[:, :, None] * width + columns[:, None, :]
    return ops.take(ops.reshape(images, (-1, channels)), pixels, axis=0)


def resize_boxes(images: Any, top: Any, left: Any, height: Any, width: Any) -> Any:
    """A box of each image, resized to the size of the images by bilinear sampling within the box. Gives float32.

    Args:
        images: a batch of images.
        top, left, height, width: the boxes in pixels, whole numbers as float32 of shape [batch].
    """
    rows, more_rows, down = _places(top, height, images.shape[1])
    columns, more_columns, right = _places(left, width, images.shape[2])
    upper, lower = (ops.cast(take_rows(images, r), "float32") for r in (rows, more_rows))
    mixed = _between(upper, lower, down[:, :, None, None])
    every = ops.arange(images.shape[1], dtype=index_type())[None, :]
    near, far = (take_pixels(mixed, every, c) for c in (columns, more_columns))
    return _between(near, far, right[:, None, :, None])


def warp(images: Any, matrices: Any) -> Any:
    """Every image as seen through an affine map, by bilinear sampling; black outside. Gives float32.

    Args:
        images: a batch of images.
        matrices: six float32 of shape [batch]: with y and x counted from the centre of the image, the new pixel at
            (y, x) is the old one at (m0 y + m1 x + m2, m3 y + m4 x + m5).
    """
    count, height, width, channels = images.shape
    # One black pixel all around, and no place beyond it: edges fade and the outside is black without masks.
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
    place = first + ops.cast(low_y, index_type()) * wide + ops.cast(low_x, index_type())
    right, down = (old_x - low_x)[..., None], (old_y - low_y)[..., None]
    corners = [ops.cast(ops.take(padded, place + step, axis=0), "float32") for step in (0, 1, wide, wide + 1)]
    return _between(_between(corners[0], corners[1], right), _between(corners[2], corners[3], right), down)


def _places(start: Any, length: Any, size: int) -> tuple[Any, Any, Any]:
    """For each of ``size`` places spread over a stretch: the two old ones next to it, and the way between them."""
    start, length = start[:, None], length[:, None]
    old = start + (ops.arange(size, dtype="float32") + 0.5)[None, :] * (length / size) - 0.5
    old = ops.minimum(ops.maximum(old, start), start + length - 1.0)
    low = ops.floor(old)
    high = ops.minimum(low + 1.0, start + length - 1.0)
    return ops.cast(low, index_type()), ops.cast(high, index_type()), old - low


def _between(one: Any, other: Any, way: Any) -> Any:
    return one + (other - one) * way
