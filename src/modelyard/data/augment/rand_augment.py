"""RandAugment (Cubuk et al., 2019): a few operations out of a list, chosen anew for each example.

Strengths are those of torchvision, magnitude 0 to 30. Of its list, equalize is left out: it needs a histogram of every
image. Computing every operation and choosing one would be slow. So all that move pixels are one affine map an example:
the maps of its operations are multiplied, and images are sampled once, before all else. All that change values are one
pass an operation: a weighted sum of the image, its grey, its blurred version and a constant, then a threshold and a
step, which do nothing where they are not chosen.
"""

from __future__ import annotations

from math import cos, radians, sin
from typing import Any

import numpy as np
from keras import ops

from modelyard.data.augment.build import Batch, ImageInfo
from modelyard.data.augment.colour import to_grey
from modelyard.data.augment.geometry import warp
from modelyard.data.catalog import RandAugmentOptions
from modelyard.data.dataset import IMAGE
from modelyard.data.draws import Draws

MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
COLOURS = ("brightness", "contrast", "sharpness", "posterize", "solarize", "autocontrast")
STRONGEST = 30


class RandAugment:
    """A few random operations an example."""

    info: ImageInfo

    def __init__(self, options: RandAugmentOptions) -> None:
        self.operations = options.operations
        self.strength = options.magnitude / STRONGEST

    def prepare(self, info: ImageInfo) -> None:
        """Grey images have no saturation to change."""
        self.info = info
        self.names = ("identity", *MOVES, *COLOURS, *(("saturation",) if info.shape[2] == 3 else ()))

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """An operation and a sign, as often as asked for."""
        choices = ops.cast(draws.integers(len(self.names), self.operations), "float32")
        signs = 1.0 - 2.0 * ops.cast(ops.less(draws.uniform(self.operations), 0.5), "float32")
        images = warp(batch[IMAGE], self._map(choices, signs))
        for number in range(self.operations):
            images = self._recolour(images, choices[:, number], signs[:, number])
        return {**batch, IMAGE: images}

    def _chosen(self, choice: Any, name: str) -> Any:
        """1 where ``name`` is the choice, else 0; where ``name`` is not on the list, 0 everywhere."""
        number = self.names.index(name) if name in self.names else -1
        return ops.cast(ops.equal(choice, float(number)), "float32")

    def _map(self, choices: Any, signs: Any) -> list[Any]:
        """The affine maps of all operations, multiplied."""
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
            # A later operation sees the result of the earlier: its map, from new places to old, comes first.
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
        """One operation on values an example."""
        scale, whole = self.info.scale, self.info.dtype == "uint8"
        on = {name: self._chosen(choice, name)[:, None, None, None] for name in (*COLOURS, "saturation")}
        change = (sign * (0.9 * self.strength))[:, None, None, None]
        low = ops.min(images, axis=(1, 2), keepdims=True)
        spread = ops.max(images, axis=(1, 2), keepdims=True) - low
        stretch = ops.where(
            ops.greater(spread, 0.0), scale / ops.where(ops.greater(spread, 0.0), spread, 1.0) - 1.0, 0.0
        )
        grey = to_grey(images)
        # What is added of each is taken from the image, so that an operation that is not chosen adds exactly nothing.
        mean = ops.mean(grey, axis=(1, 2), keepdims=True)
        blends = on["brightness"] + on["contrast"] + on["saturation"] + on["sharpness"]
        factor = 1.0 + blends * change + on["autocontrast"] * stretch
        constant = -on["contrast"] * change * mean - on["autocontrast"] * low * (1.0 + stretch)
        images = (
            images * factor
            + (constant - on["saturation"] * change * grey)
            - (on["sharpness"] * change) * _blurred(images)
        )
        # As between operations on uint8: an error in the last place must not move a value over an edge below.
        images = ops.round(self.info.clip(images)) if whole else images
        threshold = ops.where(ops.greater(on["solarize"], 0.0), scale * (1.0 - self.strength), np.float32(np.inf))
        images = ops.where(ops.greater(images, threshold), scale - images, images)
        # Where it is not chosen, the step is too fine to change anything.
        fine, lost_bits = (1.0 if whole else 2.0**-24), round(4 * self.strength)
        coarse = 2.0**lost_bits * (1.0 if whole else 1 / 256)
        if not lost_bits:
            return images
        # All are powers of two, and exact. TensorFlow's compiler would take a quotient here for an inexact one.
        step = fine + on["posterize"] * (coarse - fine)
        inverse = 1 / fine + on["posterize"] * (1 / coarse - 1 / fine)
        return ops.floor(images * inverse) * step


def _blurred(images: Any) -> Any:
    """The mean of a pixel, counted five times, and its eight neighbours; edges stay as they are."""
    _, height, width, channels = images.shape
    if height < 3 or width < 3:
        return images
    kernel = np.ones((3, 3, channels, 1), np.float32) / 13
    kernel[1, 1] = 5 / 13
    inner = ops.depthwise_conv(images, ops.convert_to_tensor(kernel), padding="valid", data_format="channels_last")
    middle = ops.concatenate([images[:, 1:-1, :1], inner, images[:, 1:-1, -1:]], axis=2)
    return ops.concatenate([images[:, :1], middle, images[:, -1:]], axis=1)
