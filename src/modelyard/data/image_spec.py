"""The image spec: how a raw example becomes the image that a model sees.

The dataset of a run, `predict`, `serve` and the check of exports all call `ImageSpec.write`. The run folder and
modelyard.json of an export record the spec, so serving decodes as training did. An export holds the same arithmetic as
TensorFlow operations. To add an image format, add it to `IMAGE_FORMATS`: Pillow decodes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import Feature
from modelyard.data.raw_examples import RawExample
from modelyard.errors import DataError

IMAGE_FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "WEBP": (".webp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm"),
}
"""The supported formats, by Pillow's names, and their suffixes. Some of Pillow's other readers start programs."""
IMAGE_SUFFIXES = tuple(suffix for suffixes in IMAGE_FORMATS.values() for suffix in suffixes)
UNSUPPORTED_FORMATS = {"HEIC": (".heic", ".heif", ".hif"), "AVIF": (".avif",)}
"""Formats of cameras and phones that can't be decoded, and their suffixes. Such files are named, not only counted."""

Fit = Literal["crop", "stretch", "pad"]
"""How an image of another shape is resized: the largest middle part of that shape, distorted, or with black bars."""
Box = tuple[float, float, float, float]
"""Top, left, height and width of a part of an image, in pixels of the upright original."""
Choose = Callable[[int, int], Box]
"""Chooses a part of an image from its height and width."""


class UndecodableError(DataError):
    """An image that can't be decoded."""


@dataclass(frozen=True)
class ImageSpec:
    """Size, channels, type and scale of images, and how raw examples are converted to them.

    Args:
        shape: height, width and channels; or the shape of examples that are not images.
        dtype: type of the values.
        fit: how images of another shape are resized.
        unit_scale: whether pixels are floats from 0 to 1. Image files and uint8 arrays are then divided by 255.
        resize: whether images of another size are resized; else they are an error.
    """

    shape: tuple[int, ...]
    dtype: str
    fit: Fit = "crop"
    unit_scale: bool = False
    resize: bool = True

    @property
    def feature(self) -> Feature:
        """Shape and type."""
        return Feature(self.shape, self.dtype)

    def write(self, raw: RawExample, out: NDArray[Any], name: Callable[[], str], choose: Choose | None = None) -> None:
        """Converts one raw example and writes it into ``out``.

        Args:
            raw: an image file, or an array.
            out: an array of ``shape`` and ``dtype``.
            name: returns the name of the example, for errors.
            choose: chooses the part of the image to take, which is stretched to the size. By default, `fit` decides.

        Raises:
            UndecodableError: if an image file can't be decoded.
            DataError: if it has another shape, or values that ``dtype`` cannot hold.
        """
        is_file = isinstance(raw, bytes)
        if not isinstance(raw, bytes):
            _check_values(raw, out.dtype, name)
        if len(self.shape) != 3:
            if isinstance(raw, bytes) or raw.shape != out.shape:
                found = "an image file" if isinstance(raw, bytes) else f"an array of shape {raw.shape}"
                raise DataError(f"{name()} is {found}; an array of shape {out.shape} was expected. Give numbers.")
            out[...] = raw
            return
        from modelyard.data.images import fill

        if choose is None and not self.resize:
            choose = partial(_whole, out, name)
        fill(out, raw, self.fit, choose, name)
        if self.unit_scale and (is_file or raw.dtype == np.uint8):  # type: ignore[union-attr]
            out /= 255

    def decode(self, data: bytes, name: str) -> NDArray[Any]:
        """Returns the image of an image file.

        Raises:
            DataError: if it can't be decoded, or examples are not images.
        """
        out = np.empty(self.shape, self.dtype)
        self.write(data, out, lambda: name)
        return out

    def batch(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns examples as an array whose first axis counts them: one example becomes one of many.

        Raises:
            DataError: if they have another shape. Only image files are resized.
        """
        grey = self.shape[:2] if len(self.shape) == 3 and self.shape[2] == 1 else None
        if grey is not None and grey in (values.shape, values.shape[1:]):
            values = values[..., None]
        if values.shape == self.shape:
            values = values[None]
        if values.shape[1:] != self.shape:
            shape, wanted = ("×".join(map(str, each)) or "single" for each in (values.shape, self.shape))
            raise DataError(
                f"the array has shape {shape}; the model takes one or several examples of shape {wanted}. "
                "Resize images first, or give the files."
            )
        return values.astype(np.float32) if values.dtype == np.float64 and self.dtype == "float32" else values

    def as_json(self) -> dict[str, Any]:
        """Returns the spec as modelyard.json of an export has it."""
        return {"image": self.feature.as_json(), "fit": self.fit, "shares": self.unit_scale}

    @classmethod
    def from_json(cls, recorded: Mapping[str, Any]) -> ImageSpec:
        """Reads `as_json`; ``fit`` and ``shares`` may be missing.

        Raises:
            KeyError, TypeError, ValueError: if it is invalid.
        """
        image = Feature.from_json(recorded["image"])
        return cls(image.shape, image.dtype, recorded.get("fit", "crop"), bool(recorded.get("shares", False)))


@dataclass(frozen=True)
class ImageOptions:
    """The options of a dataset that decide its spec, together with its first example.

    Args:
        size: height and width; by default those of the first image, which all others must have.
        channels: 1 or 3; by default as stored in arrays, 3 for image files.
        fit: how images of another shape are resized.
    """

    size: tuple[int, int] | None = None
    channels: int | None = None
    fit: Fit = "crop"

    def spec(self, first: RawExample, name: str) -> ImageSpec:
        """Returns the spec of a dataset whose first example is ``first``, called ``name``."""
        if isinstance(first, bytes):
            from modelyard.data.images import size_of

            shape: tuple[int, ...] = (*(self.size or size_of(first, name)[:2]), self.channels or 3)
            return ImageSpec(shape, "uint8", self.fit, resize=self.size is not None)
        dtype = "uint8" if first.dtype == np.uint8 else "float32"
        shape = (*first.shape, 1) if first.ndim == 2 else first.shape
        if len(shape) == 3:
            shape = (*(self.size or shape[:2]), self.channels or shape[2])
        elif self.size is not None or self.channels is not None:
            raise DataError(f"image_size and image_channels are for images; these examples have shape {shape}.")
        return ImageSpec(shape, dtype, self.fit, resize=self.size is not None)


def _whole(out: NDArray[Any], name: Callable[[], str], height: int, width: int) -> Box:
    """Chooses the whole image, which must be as large as the first."""
    if (height, width) != out.shape[:2]:
        raise DataError(
            f"{name()} is {height}×{width}, the first image {out.shape[0]}×{out.shape[1]}. "
            "Give one size for all: --image_size 224, for example."
        )
    return 0.0, 0.0, float(height), float(width)


def _check_values(values: NDArray[Any], wanted: np.dtype[Any], name: Callable[[], str]) -> None:
    """Refuses values that a conversion would change: as uint8, floats from 0 to 1 are all black."""
    if wanted.kind == "f" or values.dtype == wanted:
        return
    with np.errstate(invalid="ignore"):
        same = np.array_equal(values.astype(wanted), values)
    if not same:
        low, high = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
        raise DataError(
            f"example {name()} holds {values.dtype} from {values.min():g} to {values.max():g}; the run was trained on "
            f"{wanted}: whole numbers from {low} to {high}. Give the values as they were in training."
        )
