"""Augmentations that change values: brightness, contrast, saturation, hue, noise."""

from __future__ import annotations

from typing import Any

from keras import ops

from modelyard.data.augment.build import Batch, ImageInfo
from modelyard.data.catalog import AmountOptions, HueOptions, NoiseOptions
from modelyard.data.dataset import IMAGE
from modelyard.data.draws import Draws

_GREY = (0.299, 0.587, 0.114)


def to_grey(images: Any) -> Any:
    """How bright each pixel looks: the weights of ITU-R 601 for colour, the pixel itself for one channel."""
    if images.shape[-1] != 3:
        return images
    return sum(weight * images[..., i : i + 1] for i, weight in enumerate(_GREY))


def _around_zero(draws: Draws, amount: float) -> Any:
    """From -amount to amount, one number an example, to be used with images."""
    return ((draws.uniform() * 2.0 - 1.0) * amount)[:, :, None, None]


class _Colour:
    """What all of them share: an amount, and what is known of the images."""

    info: ImageInfo

    def __init__(self, options: AmountOptions | HueOptions) -> None:
        self.amount = options.amount

    def prepare(self, info: ImageInfo) -> None:
        """Keeps what is known of the images."""
        self.info = info


class Brightness(_Colour):
    """Adds the same to all pixels."""

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One shift an example."""
        shift = _around_zero(draws, self.amount * self.info.scale)
        return {**batch, IMAGE: self.info.clip(ops.cast(batch[IMAGE], "float32") + shift)}


class Contrast(_Colour):
    """Moves values away from the mean of their channel, or towards it."""

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One factor an example."""
        images = ops.cast(batch[IMAGE], "float32")
        mean = ops.mean(images, axis=(1, 2), keepdims=True)
        return {**batch, IMAGE: self.info.clip(images + (images - mean) * _around_zero(draws, self.amount))}


class Saturation(_Colour):
    """Moves colours away from grey, or towards it."""

    def prepare(self, info: ImageInfo) -> None:
        """Colour only."""
        info.need_colour()
        super().prepare(info)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One factor an example."""
        images = ops.cast(batch[IMAGE], "float32")
        more = _around_zero(draws, self.amount)
        return {**batch, IMAGE: self.info.clip(images + (images - to_grey(images)) * more)}


class Hue(_Colour):
    """Turns colours around the circle of hues; the lightest and darkest channel of a pixel keep their values."""

    def prepare(self, info: ImageInfo) -> None:
        """Colour only."""
        info.need_colour()
        super().prepare(info)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One turn an example."""
        images = ops.cast(batch[IMAGE], "float32")
        red, green, blue = (images[..., i] for i in range(3))
        most = ops.maximum(ops.maximum(red, green), blue)
        chroma = most - ops.minimum(ops.minimum(red, green), blue)
        safe = ops.where(ops.greater(chroma, 0.0), chroma, 1.0)
        # In sixths of the circle, red at 0, green at 2, blue at 4.
        blueish = ops.where(ops.equal(most, green), 2.0 + (blue - red) / safe, 4.0 + (red - green) / safe)
        hue = ops.where(ops.equal(most, red), (green - blue) / safe, blueish)
        hue = hue + _around_zero(draws, self.amount * 6.0)[:, :, :, 0]
        channels = []
        for start in (5.0, 3.0, 1.0):
            place = (hue + start) * (1 / 6)
            place = (place - ops.floor(place)) * 6.0
            channels.append(most - chroma * ops.clip(ops.minimum(place, 4.0 - place), 0.0, 1.0))
        return {**batch, IMAGE: ops.stack(channels, axis=-1)}


class Noise:
    """Adds normal noise to every value."""

    info: ImageInfo

    def __init__(self, options: NoiseOptions) -> None:
        self.spread = options.spread

    def prepare(self, info: ImageInfo) -> None:
        """Keeps what is known of the images."""
        self.info = info

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        """One number a value."""
        images = ops.cast(batch[IMAGE], "float32")
        _, height, width, channels = images.shape
        noise = ops.reshape(draws.normal(height * width * channels), (-1, height, width, channels))
        return {**batch, IMAGE: self.info.clip(images + noise * (self.spread * self.info.scale))}
