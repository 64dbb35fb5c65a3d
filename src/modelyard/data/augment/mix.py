"""Augmentations that hide a part of an image or mix two: cutout, mixup, cutmix.

Partners are neighbours in the stream: positions 2i and 2i + 1, which are random examples since the order is shuffled.
If each share of a batch is even (``group``), they stay together. Each of the two has its own weight or box. Labels
become class probabilities, float32 of shape [batch, classes].
"""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.data.augment.aligned import Aligned
from modelyard.data.augment.build import Batch, ImageInfo
from modelyard.data.catalog import CutoutOptions, MixOptions
from modelyard.data.dataset import IMAGE, LABEL
from modelyard.data.draws import Draws, index_type
from modelyard.errors import DataError

_QUANTILES = 4096


def beta_table(alpha: float, size: int = _QUANTILES) -> NDArray[np.float32]:
    """Returns quantiles of the distribution Beta(alpha, alpha), in order."""
    # Half of it, as x = t**power / 2 with t from 0 to 1: for alpha < 1 the density in t is finite, unlike that in x.
    power = max(1.0, 1.0 / alpha)
    t = (np.arange(200_000) + 0.5) / 200_000
    x = 0.5 * t**power
    exponent = (alpha - 1) * power + power - 1  # of t, where x**(alpha - 1) dx is written with t
    logs = exponent * np.log(t) + (alpha - 1) * np.log1p(-x)
    share = np.cumsum(np.exp(logs - logs.max()))
    share = (share - share[0] / 2) / share[-1] / 2
    lower = 0.5 * np.interp((np.arange(size // 2) + 0.5) / size, share, t) ** power
    return np.concatenate([lower, 1 - lower[::-1]]).astype(np.float32)


def _index(draws: Draws, high: int) -> Any:
    """Returns an integer below ``high`` for each example."""
    return ops.cast(draws.integers(high), index_type())[:, 0]


def _inside(centre: Any, before: Any, after: Any, size: int) -> tuple[Any, Any]:
    """Returns which of ``size`` indices are in [centre - before, centre + after), and how many."""
    start, stop = ops.maximum(centre - before, 0), ops.minimum(centre + after, size)
    indices = ops.arange(size, dtype=index_type())[None, :]
    inside = ops.logical_and(indices >= start[:, None], indices < stop[:, None])
    return inside, stop - start


def _partners(values: Any) -> Any:
    """Swaps neighbours."""
    shape = tuple(values.shape)
    paired = ops.flip(ops.reshape(values, (shape[0] // 2, 2, *shape[1:])), axis=1)
    return ops.reshape(paired, shape)


class Cutout:
    """Paints a square black or grey at a random position. Part of it may be outside of the image."""

    moves_pixels = False

    def __init__(self, options: CutoutOptions) -> None:
        self.size, self.fill, self.inside = options.size, options.fill, options.inside

    def prepare(self, info: ImageInfo) -> None:
        """Raises a `DataError` if the square must be inside, but is larger than the image."""
        self.grey = int(info.scale / 2) if info.dtype == "uint8" else info.scale / 2
        if self.inside and self.size > min(info.shape[:2]):
            height, width = info.shape[:2]
            raise DataError(
                f"{info.name}: a square of {self.size} pixels does not fit into images of {height}×{width}."
            )

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images = batch[IMAGE]
        _, height, width, _ = images.shape
        before, after = self.size // 2, self.size - self.size // 2
        rows, _ = _inside(self._centre(draws, height), before, after, height)
        columns, _ = _inside(self._centre(draws, width), before, after, width)
        hidden = ops.logical_and(rows[:, :, None, None], columns[:, None, :, None])
        colour = ops.cast(self.grey if self.fill == "grey" else 0, images.dtype)
        return {**batch, IMAGE: ops.where(hidden, colour, images)}

    def _centre(self, draws: Draws, size: int) -> Any:
        return _index(draws, size - self.size + 1) + self.size // 2 if self.inside else _index(draws, size)


class _Mix:
    """The base of mixup and cutmix: the weight of an example, and the labels."""

    group = 2
    moves_pixels = True
    aligned = Aligned()
    pastes = False
    """Whether each pixel is of one image, so that maps can be mixed as well."""

    def __init__(self, options: MixOptions) -> None:
        self.probability = options.probability if options.alpha > 0 else 0.0
        self.table = beta_table(options.alpha) if options.alpha > 0 else np.ones(1, np.float32)

    def prepare(self, info: ImageInfo) -> None:
        self.aligned = info.aligned
        impossible = () if self.pastes else tuple(info.aligned.maps)
        if impossible or info.aligned.boxes:
            names = " and ".join(map(repr, (*impossible, *info.aligned.boxes)))
            raise DataError(
                f"augmentation {info.name!r} mixes two images, and {names} can't be mixed. Leave it out"
                + ("." if info.aligned.boxes else ", or take cutmix, which pastes maps with the image.")
            )
        if not info.classes and not (self.pastes and LABEL in info.aligned.maps):
            raise DataError(
                f"augmentation {info.name!r} mixes labels, but the labels of these examples are not classes."
            )
        self.classes = info.classes

    def own_share(self, draws: Draws) -> Any:
        """Returns the weight of each example, from 0 to 1: float32 of shape [batch]."""
        share = ops.take(ops.convert_to_tensor(self.table), _index(draws, len(self.table)), axis=0)
        return ops.where(ops.less(draws.uniform()[:, 0], self.probability), share, 1.0)

    def mixed_labels(self, labels: Any, share: Any) -> Any:
        """Returns class probabilities."""
        if len(labels.shape) == 1:
            labels = ops.one_hot(labels, self.classes, dtype="float32")
        share = share[:, None]
        return labels * share + _partners(labels) * (1.0 - share)


class Mixup(_Mix):
    """Blends an image with its neighbour."""

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images, share = ops.cast(batch[IMAGE], "float32"), self.own_share(draws)
        weight = share[:, None, None, None]
        mixed = images * weight + _partners(images) * (1.0 - weight)
        return {**batch, IMAGE: mixed, LABEL: self.mixed_labels(batch[LABEL], share)}


class Cutmix(_Mix):
    """Replaces a box of an image by that of its neighbour, and of maps as well; other labels are mixed by area."""

    pastes = True

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images = batch[IMAGE]
        count, height, width, channels = images.shape
        half = 0.5 * ops.sqrt(1.0 - self.own_share(draws))
        half_height, half_width = (ops.cast(ops.floor(half * size), index_type()) for size in (height, width))
        rows, tall = _inside(_index(draws, height), half_height, half_height, height)
        columns, wide = _inside(_index(draws, width), half_width, half_width, width)
        example = ops.arange(count, dtype=index_type())[:, None, None]
        inside = ops.cast(ops.logical_and(rows[:, :, None], columns[:, None, :]), index_type())
        pixel = ops.arange(height * width, dtype=index_type())
        pixel = ops.reshape(pixel, (1, height, width)) + ops.bitwise_xor(example, inside) * (height * width)
        mixed = {IMAGE: ops.take(ops.reshape(images, (-1, channels)), pixel, axis=0)}
        for name in self.aligned.maps:
            values = batch[name]
            taken = ops.take(ops.reshape(values, (count * height * width, -1)), pixel, axis=0)
            mixed[name] = ops.reshape(taken, values.shape)
        if LABEL not in mixed:
            share = 1.0 - ops.cast(tall * wide, "float32") / float(height * width)
            mixed[LABEL] = self.mixed_labels(batch[LABEL], share)
        return {**batch, **mixed}
