"""Which part of an image a random resized crop takes. The same arithmetic on the host (NumPy) and on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np

SCALARS = SimpleNamespace(floor=math.floor, maximum=max, minimum=min, round=round, sqrt=math.sqrt)
"""The arithmetic for one image, where calls of NumPy would take longer than the work."""


def crop_box(
    u: Sequence[Any],
    height: int,
    width: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ops: Any = np,
) -> tuple[Any, Any, Any, Any]:
    """A random box in each image, for crops that are then resized.

    Area (a share of the image, uniform) and ratio of width to height (uniform in its logarithm) are drawn once, without
    trying again. Where a box of that area and ratio would reach over the image, the ratio gives way as far as ``ratio``
    allows, then the area.

    Args:
        u: four uniform numbers in [0, 1), for area, ratio, top and left: numbers, arrays or tensors.
        height, width: size of the images.
        scale: the least and greatest area.
        ratio: the least and greatest ratio.
        ops: `SCALARS` where these are plain numbers, NumPy for arrays, `keras.ops` for tensors.

    Returns:
        Top, left, height and width in pixels: whole numbers as floats, wholly inside the image.
    """
    tall, wide = float(height), float(width)
    narrowest, widest = ratio
    area = scale[0] + u[0] * (scale[1] - scale[0])
    shape = _exp(log(narrowest) + u[1] * (log(widest) - log(narrowest)))
    # The ratios at which a box of this area is as high, or as wide, as the image.
    shape = ops.minimum(ops.maximum(shape, area * (wide / tall)), (wide / tall) / area)
    shape = ops.minimum(ops.maximum(shape, narrowest), widest)
    box_width = ops.minimum(ops.sqrt(area * shape * (tall * wide)), wide)
    box_height = ops.minimum(ops.sqrt(area / shape * (tall * wide)), tall)
    box_width = ops.maximum(ops.round(ops.minimum(box_width, box_height * widest)), 1.0)
    box_height = ops.maximum(ops.round(ops.minimum(box_height, box_width / narrowest)), 1.0)
    box_height = ops.minimum(box_height, tall)
    # The product may round up to the number of places itself.
    top = ops.minimum(ops.floor(u[2] * (tall - box_height + 1.0)), tall - box_height)
    left = ops.minimum(ops.floor(u[3] * (wide - box_width + 1.0)), wide - box_width)
    return top, left, box_height, box_width


def _exp(x: Any) -> Any:
    """The exponential from products and sums alone, which have the same bits everywhere; good to 1e-5 for |x| < 4."""
    small = x * (1 / 64)
    result = 1.0 + small * (1.0 + small * (1 / 2 + small * (1 / 6 + small * (1 / 24))))
    for _ in range(6):
        result = result * result
    return result
