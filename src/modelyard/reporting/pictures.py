"""The pictures of a report, as data URIs of a limited size: JPEGs, small images enlarged by the browser as PNGs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from modelyard.data.sheet import as_bytes

_LARGEST, _SMALL, _SHOWN = 160, 64, 144
_QUALITY = 80
_MOST_BYTES = 2_000_000
"""All pictures of a page together, as text."""
_MAP_SIDE = 56
_DARKEST = 205


@dataclass(frozen=True)
class Picture:
    """A picture: its data URI, its size in pixels of the page, whether its pixels are shown as squares, its caption."""

    uri: str
    width: int
    height: int
    is_small: bool = False
    caption: str = ""


class Pictures:
    """The pictures of a report.

    ``training`` are images of a training batch. ``mistakes`` and ``maps`` are by the number of the example. ``layer``
    is what the maps are of. ``values`` are in words, in place of pictures for examples that are no images.
    """

    def __init__(self) -> None:
        self.training: list[Picture] = []
        self.mistakes: dict[int, Picture] = {}
        self.maps: dict[int, Picture] = {}
        self.layer = ""
        self.values: dict[int, str] = {}
        self._left = _MOST_BYTES

    def add_mistakes(self, rows: Sequence[int], images: NDArray[Any]) -> None:
        """Adds images of examples."""
        for row, image in zip(rows, as_bytes(list(images)), strict=True):
            self._keep(self.mistakes, row, picture(image))

    def add_training(self, images: NDArray[Any], captions: Sequence[str] | None) -> None:
        """Adds images of a training batch."""
        for number, image in enumerate(as_bytes(list(images))):
            made = picture(image, "" if captions is None else captions[number])
            if self._takes(made):
                self.training.append(made)

    def add_maps(self, rows: Sequence[int], layer: str, maps: NDArray[np.float32]) -> None:
        """Adds class-activation maps, as transparent pictures to lay over the images."""
        self.layer = layer[:100]
        for row, each in zip(rows, maps, strict=True):
            below = self.mistakes.get(row)
            if below is not None:
                self._keep(self.maps, row, shade(each, below.width, below.height))

    def _keep(self, kept: dict[int, Picture], row: int, made: Picture) -> None:
        if self._takes(made):
            kept[row] = made

    def _takes(self, made: Picture) -> bool:
        if len(made.uri) > self._left:
            return False
        self._left -= len(made.uri)
        return True


def picture(image: NDArray[np.uint8], caption: str = "") -> Picture:
    """Returns an image of height × width × channels as a picture."""
    pixels = Image.fromarray(np.ascontiguousarray(image[..., 0] if image.shape[2] == 1 else image))
    if max(pixels.size) <= _SMALL:
        factor = max(1, _SHOWN // max(pixels.size))
        return Picture(_uri(pixels, "PNG"), factor * pixels.width, factor * pixels.height, True, caption)
    pixels.thumbnail((_LARGEST, _LARGEST), Image.Resampling.LANCZOS, reducing_gap=3)
    uri = _uri(pixels.convert("RGB") if pixels.mode == "RGBA" else pixels, "JPEG")
    enlarged = max(1.0, _SHOWN / max(pixels.size))
    return Picture(uri, round(enlarged * pixels.width), round(enlarged * pixels.height), False, caption)


def shade(values: NDArray[np.float32], width: int, height: int) -> Picture:
    """Returns a map from 0 to 1 as a shadow to lay over an image: what is 1 stays light. It suits all colours."""
    dark = Image.fromarray(np.rint((1 - np.nan_to_num(values)) * _DARKEST).clip(0, 255).astype(np.uint8))
    dark = dark.resize((_MAP_SIDE, _MAP_SIDE), Image.Resampling.BICUBIC)
    shadow = Image.new("RGB", dark.size)
    shadow.putalpha(dark)
    return Picture(_uri(shadow, "PNG"), width, height)


def matrix_picture(shares: NDArray[np.float64]) -> Picture:
    """Returns a matrix of shares from 0 to 1 as a picture, one pixel per cell: blue, the more opaque the larger."""
    pixels = np.zeros((*shares.shape, 4), np.uint8)
    pixels[..., :3] = (40, 104, 192)
    pixels[..., 3] = np.rint(255 * np.sqrt(shares.clip(0, 1)))
    return Picture(_uri(Image.fromarray(pixels), "PNG"), len(shares), len(shares), True)


def _uri(pixels: Image.Image, form: str) -> str:
    buffer = io.BytesIO()
    pixels.save(buffer, form, optimize=True, **({"quality": _QUALITY} if form == "JPEG" else {}))
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
