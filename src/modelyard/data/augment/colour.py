"""Augmentations that change values: brightness, contrast, saturation, hue, noise."""

from __future__ import annotations

from typing import Any

from keras import ops

from modelyard.data.augment.build import Batch, ImageInfo
from modelyard.data.catalog import AmountOptions, HueOptions, NoiseOptions
from modelyard.data.dataset import IMAGE
from modelyard.data.draws import Draws
from modelyard.errors import DataError

_GREY = (0.299, 0.587, 0.114)


def to_grey(images: Any) -> Any:
    """Returns the luma of each pixel: the weights of ITU-R 601 for colour, the pixel itself for one channel."""
    if images.shape[-1] != 3:
        return images
    return sum(weight * images[..., i : i + 1] for i, weight in enumerate(_GREY))


def _symmetric(draws: Draws, amount: float) -> Any:
    """Returns one number per example from -amount to amount, in the shape of images."""
    return ((draws.uniform() * 2.0 - 1.0) * amount)[:, :, None, None]


class _Values:
    """The base of augmentations that depend on the range of values."""

    info: ImageInfo
    needs_colour = False
    moves_pixels = False

    def __init__(self, options: AmountOptions | HueOptions) -> None:
        self.amount = options.amount

    def prepare(self, info: ImageInfo) -> None:
        if self.needs_colour and info.shape[2] != 3:
            raise DataError(f"augmentation {info.name!r} needs colour images (3 channels); these have {info.shape[2]}.")
        self.info = info


class Brightness(_Values):
    """Adds one number per example to all pixels."""

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        shift = _symmetric(draws, self.amount * self.info.scale)
        return {**batch, IMAGE: self.info.clip(ops.cast(batch[IMAGE], "float32") + shift)}


class Contrast(_Values):
    """Moves values away from the mean of their channel, or towards it, by one factor per example."""

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images = ops.cast(batch[IMAGE], "float32")
        mean = ops.mean(images, axis=(1, 2), keepdims=True)
        return {**batch, IMAGE: self.info.clip(images + (images - mean) * _symmetric(draws, self.amount))}


class Saturation(_Values):
    """Moves colours away from grey, or towards it, by one factor per example."""

    needs_colour = True

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images = ops.cast(batch[IMAGE], "float32")
        change = _symmetric(draws, self.amount)
        return {**batch, IMAGE: self.info.clip(images + (images - to_grey(images)) * change)}


class Hue(_Values):
    """Rotates colours on the circle of hues; the lightest and darkest channel of a pixel keep their values."""

    needs_colour = True

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images = ops.cast(batch[IMAGE], "float32")
        red, green, blue = (images[..., i] for i in range(3))
        most = ops.maximum(ops.maximum(red, green), blue)
        chroma = most - ops.minimum(ops.minimum(red, green), blue)
        safe = ops.where(ops.greater(chroma, 0.0), chroma, 1.0)
        # In sixths of the circle, red at 0, green at 2, blue at 4.
        blueish = ops.where(ops.equal(most, green), 2.0 + (blue - red) / safe, 4.0 + (red - green) / safe)
        hue = ops.where(ops.equal(most, red), (green - blue) / safe, blueish)
        hue = hue + _symmetric(draws, self.amount * 6.0)[:, :, :, 0]
        channels = []
        for start in (5.0, 3.0, 1.0):
            angle = (hue + start) * (1 / 6)
            angle = (angle - ops.floor(angle)) * 6.0
            channels.append(most - chroma * ops.clip(ops.minimum(angle, 4.0 - angle), 0.0, 1.0))
        return {**batch, IMAGE: ops.stack(channels, axis=-1)}


class Noise(_Values):
    """Adds normal noise to every value."""

    def __init__(self, options: NoiseOptions) -> None:
        self.amount = options.spread

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """Returns the augmented batch."""
        images = ops.cast(batch[IMAGE], "float32")
        _, height, width, channels = images.shape
        noise = ops.reshape(draws.normal(height * width * channels), (-1, height, width, channels))
        return {**batch, IMAGE: self.info.clip(images + noise * (self.amount * self.info.scale))}
