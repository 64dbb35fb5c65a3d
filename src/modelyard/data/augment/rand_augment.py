"""RandAugment (Cubuk et al., 2019): a few random operations per example.

Strengths are those of torchvision, magnitude 0 to 30. Its operation equalize is missing: it needs a histogram of every
image. Computing every operation and choosing one would be slow. Operations that move pixels are therefore one affine
map per example: their maps are multiplied, and images are sampled once, first of all. Operations that change values are
one pass each: a weighted sum of the image, its grey, its blurred version and a constant, then a threshold and a step,
which change nothing if they are not chosen.
"""

from __future__ import annotations

from math import cos, radians, sin
from typing import Any

import numpy as np
from keras import ops

from modelyard.data.augment.aligned import MovesPixels
from modelyard.data.augment.build import Batch, ImageInfo
from modelyard.data.augment.colour import to_grey
from modelyard.data.augment.geometry import warped
from modelyard.data.catalog import RandAugmentOptions
from modelyard.data.dataset import IMAGE
from modelyard.data.draws import Draws

MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
COLOURS = ("brightness", "contrast", "sharpness", "posterize", "solarize", "autocontrast")
STRONGEST = 30


class RandAugment(MovesPixels):
    """A few random operations per example, each with a random sign."""

    info: ImageInfo

    def __init__(self, options: RandAugmentOptions) -> None:
        self.operations = options.operations
        self.strength = options.magnitude / STRONGEST

    def prepare(self, info: ImageInfo) -> None:
        """Leaves saturation out for grey images."""
        super().prepare(info)
        self.info = info
        self.names = ("identity", *MOVES, *COLOURS, *(("saturation",) if info.shape[2] == 3 else ()))

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        choices = ops.cast(draws.integers(len(self.names), self.operations), "float32")
        signs = 1.0 - 2.0 * ops.cast(ops.less(draws.uniform(self.operations), 0.5), "float32")
        batch = warped(self, batch, self._map(choices, signs))
        images = batch[IMAGE]
        for number in range(self.operations):
            images = self._recolour(images, choices[:, number], signs[:, number])
        return {**batch, IMAGE: images}

    def _chosen(self, choice: Any, name: str) -> Any:
        """Returns 1 where ``name`` is chosen, else 0."""
        number = self.names.index(name) if name in self.names else -1
        return ops.cast(ops.equal(choice, float(number)), "float32")

    def _map(self, choices: Any, signs: Any) -> list[Any]:
        """Returns the product of the affine maps of all operations."""
        height, width, _ = self.info.shape
        angle = radians(30 * self.strength)
        one = ops.ones_like(signs[:, 0])
        total = [one, one * 0.0, one * 0.0, one * 0.0, one, one * 0.0]
        for number in range(self.operations):
            on = {name: self._chosen(choices[:, number], name) for name in MOVES}
            sign = signs[:, number]
            straight = 1.0 + on["rotate"] * (cos(angle) - 1.0)
            turn = on["rotate"] * sign * sin(angle)
            m = [
                straight,
                on["shear_y"] * sign * (0.3 * self.strength) - turn,
                on["translate_y"] * sign * float(int(150 / 331 * height * self.strength)),
                on["shear_x"] * sign * (0.3 * self.strength) + turn,
                straight,
                on["translate_x"] * sign * float(int(150 / 331 * width * self.strength)),
            ]
            # A map goes from new positions to old, so that of a later operation comes first.
            t = total
            total = [
                t[0] * m[0] + t[1] * m[3],
                t[0] * m[1] + t[1] * m[4],
                t[0] * m[2] + t[1] * m[5] + t[2],
                t[3] * m[0] + t[4] * m[3],
                t[3] * m[1] + t[4] * m[4],
                t[3] * m[2] + t[4] * m[5] + t[5],
            ]
        return total

    def _recolour(self, images: Any, choice: Any, sign: Any) -> Any:
        """Applies one operation on values per example."""
        scale, whole = self.info.scale, self.info.dtype == "uint8"
        on = {name: self._chosen(choice, name)[:, None, None, None] for name in (*COLOURS, "saturation")}
        change = (sign * (0.9 * self.strength))[:, None, None, None]
        low = ops.min(images, axis=(1, 2), keepdims=True)
        spread = ops.max(images, axis=(1, 2), keepdims=True) - low
        stretch = ops.where(
            ops.greater(spread, 0.0), scale / ops.where(ops.greater(spread, 0.0), spread, 1.0) - 1.0, 0.0
        )
        grey = to_grey(images)
        # Each term is a change of the image, so an operation that is not chosen adds exactly 0.
        mean = ops.mean(grey, axis=(1, 2), keepdims=True)
        blends = on["brightness"] + on["contrast"] + on["saturation"] + on["sharpness"]
        factor = 1.0 + blends * change + on["autocontrast"] * stretch
        constant = -on["contrast"] * change * mean - on["autocontrast"] * low * (1.0 + stretch)
        images = (
            images * factor
            + (constant - on["saturation"] * change * grey)
            - (on["sharpness"] * change) * _blurred(images)
        )
        # As operations on uint8 do: an error in the last bit must not move a value over a threshold below.
        images = ops.round(self.info.clip(images)) if whole else images
        threshold = ops.where(ops.greater(on["solarize"], 0.0), scale * (1.0 - self.strength), np.float32(np.inf))
        images = ops.where(ops.greater(images, threshold), scale - images, images)
        # If posterize is not chosen, the step is too fine to change anything.
        fine, lost_bits = (1.0 if whole else 2.0**-24), round(4 * self.strength)
        coarse = 2.0**lost_bits * (1.0 if whole else 1 / 256)
        if not lost_bits:
            return images
        # All are powers of two, and exact. TensorFlow's compiler would make a division inexact.
        step = fine + on["posterize"] * (coarse - fine)
        inverse = 1 / fine + on["posterize"] * (1 / coarse - 1 / fine)
        return ops.floor(images * inverse) * step


def _blurred(images: Any) -> Any:
    """Returns the mean of each pixel, counted five times, and its eight neighbours. Edges do not change."""
    _, height, width, channels = images.shape
    if height < 3 or width < 3:
        return images
    kernel = np.ones((3, 3, channels, 1), np.float32) / 13
    kernel[1, 1] = 5 / 13
    inner = ops.depthwise_conv(images, ops.convert_to_tensor(kernel), padding="valid", data_format="channels_last")
    middle = ops.concatenate([images[:, 1:-1, :1], inner, images[:, 1:-1, -1:]], axis=2)
    return ops.concatenate([images[:, :1], middle, images[:, -1:]], axis=1)
