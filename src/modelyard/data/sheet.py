"""A sheet of examples to look at: each one as it is and after augmentation, with its label and id.

Arrays and texts in, a picture out; nothing is read or written here.
"""

from __future__ import annotations

import io
import math
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from modelyard.errors import DataError

Row = tuple[str, Sequence[NDArray[Any]]]
"""A caption (its first line the label, the second smaller, for the id) and the images of an example."""

TILE = 160
MARGIN = 32
_LARGEST_WIDTH = 1840
_SMALLEST_WIDTH = 480
_GAP = 6  # between the images of an example
_FIRST_GAP = 16  # after the first, which is the original
_GUTTER = 36  # between examples
_SHAPE = 1.4  # width by height, where there is a choice

_PAPER, _INK, _FAINT = (255, 255, 255), (28, 30, 33), (112, 117, 124)
_MOUNT, _EDGE = (241, 242, 244), (214, 217, 221)
_PLAIN = {"×": "x", "–": "-", "—": "-", "→": ">", "ß": "ss", "ø": "o", "Ø": "O", "æ": "ae", "Æ": "AE", "ł": "l"}

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def sheet(
    rows: Sequence[Row],
    columns: Sequence[str] = (),
    title: str = "",
    notes: Sequence[str] = (),
    tile: int = TILE,
    value_range: tuple[float, float] | None = None,
) -> Image.Image:
    """A picture of examples, one strip of images each.

    Small images are enlarged by a whole factor, pixel by pixel; large ones are made smaller and keep their shape.

    Args:
        rows: for each example its caption and its images: [height, width] or [height, width, channels], uint8 or
            floats. The first image is the original; the others stand a little apart.
        columns: headings of the images, such as ``original`` and ``augmented``.
        title: the first line, such as the name of the dataset.
        notes: lines below it, such as split, size, augmentations.
        tile: the longest side of a shown image, in pixels.
        value_range: what is black and what is white in float images. By default 0 to 1, or 0 to 255 beside images of
            bytes, if all values are in there; else from the smallest to the largest value of the sheet.

    Raises:
        DataError: if there is nothing to show, or an array is no image.

    Example:
        >>> sheet([("seven", [np.zeros((8, 8), np.uint8)])], title="digits").size[0]
        480
    """
    shown = _tiles(rows, tile, value_range)
    layout = _Layout(shown, bool(columns), max(len(caption.splitlines()) for caption, _ in rows))
    heading = _wrapped(notes, layout.width - 2 * MARGIN)
    top = MARGIN + (_line(22) + 6 if title else 0) + len(heading) * _line(14) + (18 if title or heading else 0)
    picture = Image.new("RGB", (layout.width, top + layout.height + MARGIN), _PAPER)
    draw = ImageDraw.Draw(picture)
    y = MARGIN
    if title:
        draw.text((MARGIN, y), shortened(title, _font(22), layout.width - 2 * MARGIN), _INK, _font(22))
        y += _line(22) + 6
    for line in heading:
        draw.text((MARGIN, y), line, _FAINT, _font(14))
        y += _line(14)
    for across in range(layout.abreast if columns else 0):
        left, rule = layout.corner(across)[0], top + _line(13) + 6
        draw.line((left, rule, left + layout.strip - 1, rule), _EDGE)
        for x, column in zip(layout.image_lefts(across), columns, strict=False):
            draw.text((x, top), shortened(column, _font(13), layout.box[0]), _FAINT, _font(13))
    for number, (caption, images) in enumerate(zip((caption for caption, _ in rows), shown, strict=True)):
        _draw_strip(picture, draw, layout, number, top, caption, images)
    return picture


def to_png(picture: Image.Image) -> bytes:
    """The picture as the content of a .png file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def shortened(text: str, font: Font, width: float) -> str:
    """As much of ``text`` as fits into ``width`` pixels, with an ellipsis where some is left out."""
    text = _legible(" ".join(text.split()))
    if font.getlength(text) <= width:
        return text
    low, high = 0, len(text)
    while low < high:  # the longest beginning that fits
        middle = (low + high + 1) // 2
        if font.getlength(f"{text[:middle].rstrip()}…") <= width:
            low = middle
        else:
            high = middle - 1
    return f"{text[:low].rstrip()}…"


class _Layout:
    """Where things stand: strips side by side, as many as give the sheet a good shape."""

    def __init__(self, shown: Sequence[Sequence[Image.Image]], headed: bool, lines: int) -> None:
        everything = [image for images in shown for image in images]
        self.box = max(image.width for image in everything), max(image.height for image in everything)
        self.images = max(len(images) for images in shown)
        # A caption needs some room, however small the images are.
        self.strip = max(110, self.images * self.box[0] + (self.images - 1) * _GAP + self._first_gap())
        self.headed = _line(13) + 20 if headed else 0
        self.caption = (_line(15) + (_line(13) if lines > 1 else 0) + 5) if lines else 0
        choices = range(1, min(len(shown), self._fitting()) + 1)
        self.abreast = min(choices, key=lambda n: abs(math.log(self._wide(n) / self._tall(n, len(shown)) / _SHAPE)))
        self.width = max(_SMALLEST_WIDTH, self._wide(self.abreast))
        self.height = self._tall(self.abreast, len(shown))

    def _first_gap(self) -> int:
        return _FIRST_GAP - _GAP if self.images > 1 else 0

    def _fitting(self) -> int:
        return max(1, (_LARGEST_WIDTH - 2 * MARGIN + _GUTTER) // (self.strip + _GUTTER))

    def _wide(self, abreast: int) -> int:
        return 2 * MARGIN + abreast * (self.strip + _GUTTER) - _GUTTER

    def _tall(self, abreast: int, strips: int) -> int:
        return self.headed + -(-strips // abreast) * (self.caption + self.box[1] + 20) - 20

    def corner(self, number: int) -> tuple[int, int]:
        """Left and top of strip ``number``."""
        down, across = divmod(number, self.abreast)
        return MARGIN + across * (self.strip + _GUTTER), self.headed + down * (self.caption + self.box[1] + 20)

    def image_lefts(self, number: int) -> list[int]:
        """The left edges of the images of strip ``number``."""
        left = self.corner(number)[0]
        return [left + i * (self.box[0] + _GAP) + (self._first_gap() if i else 0) for i in range(self.images)]


def _draw_strip(
    picture: Image.Image,
    draw: ImageDraw.ImageDraw,
    layout: _Layout,
    number: int,
    top: int,
    caption: str,
    images: Sequence[Image.Image],
) -> None:
    left, y = layout.corner(number)
    y += top
    label, *rest = caption.splitlines() or [""]
    draw.text((left, y), shortened(label, _font(15), layout.strip), _INK, _font(15))
    if rest:
        draw.text((left, y + _line(15)), shortened(" ".join(rest), _font(13), layout.strip), _FAINT, _font(13))
    y += layout.caption
    wide, tall = layout.box
    for x, image in zip(layout.image_lefts(number), images, strict=False):
        draw.rectangle((x - 1, y - 1, x + wide, y + tall), _MOUNT, _EDGE)
        at = x + (wide - image.width) // 2, y + (tall - image.height) // 2
        picture.paste(image, at, image if image.mode == "RGBA" else None)


# -- images ---------------------------------------------------------------------------------------------------------


def _tiles(rows: Sequence[Row], tile: int, value_range: tuple[float, float] | None) -> list[list[Image.Image]]:
    checked = [[_checked(image, caption) for image in images] for caption, images in rows]
    if not any(checked):
        raise DataError("there are no images to show.")
    everything = [image for images in checked for image in images]
    low, high = value_range or _value_range(everything)
    return [[_scaled(_bytes(image, low, high), tile) for image in images] for images in checked]


def _checked(image: NDArray[Any], caption: str) -> NDArray[Any]:
    image = np.asarray(image)
    if image.ndim == 1:
        image = image[None]  # a row of numbers
    if image.ndim == 2:
        image = image[..., None]
    if image.ndim != 3 or image.size == 0 or image.dtype.kind not in "buif":
        raise DataError(
            f"{caption.splitlines()[0] if caption else 'an example'}: an array of {image.dtype} and shape "
            f"{image.shape} is no image. Give [height, width, channels]."
        )
    if image.shape[2] in (1, 3, 4):
        return image
    return image[..., :3] if image.shape[2] > 4 else image[..., :1]


def _value_range(images: Sequence[NDArray[Any]]) -> tuple[float, float]:
    numbers = [image[np.isfinite(image)] for image in images if image.dtype != np.uint8]
    numbers = [values for values in numbers if values.size]
    low = min((float(values.min()) for values in numbers), default=0.0)
    high = max((float(values.max()) for values in numbers), default=1.0)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    if low >= 0 and high <= 255 and any(image.dtype == np.uint8 for image in images):
        return 0.0, 255.0
    return low, high


def _bytes(image: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    if image.dtype == np.uint8:
        return image
    values = np.nan_to_num(image.astype(np.float64), nan=low, posinf=high, neginf=low)
    shares = (values - low) / (high - low) if high > low else np.zeros_like(values)
    return np.rint(np.clip(shares, 0, 1) * 255).astype(np.uint8)


def _scaled(image: NDArray[np.uint8], tile: int) -> Image.Image:
    height, width, channels = image.shape
    picture = Image.fromarray(np.ascontiguousarray(image[..., 0] if channels == 1 else image))
    longest = max(height, width)
    if longest <= tile:
        factor = tile // longest
        return picture.resize((width * factor, height * factor), Image.Resampling.NEAREST)
    size = max(1, round(width * tile / longest)), max(1, round(height * tile / longest))
    return picture.resize(size, Image.Resampling.LANCZOS, reducing_gap=3)


# -- text -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _font(size: int) -> Font:
    """Pillow's own font, so that a sheet looks the same everywhere."""
    return ImageFont.load_default(size)


def _line(size: int) -> int:
    return round(size * 1.35)


def _wrapped(notes: Sequence[str], width: int, most: int = 4) -> list[str]:
    """The notes, one below the other, long ones over several lines; ``most`` lines in all."""
    lines: list[str] = []
    for note in notes:
        line = ""
        for word in _legible(note).split():
            if line and _font(14).getlength(f"{line} {word}") > width:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}".strip()
        lines.append(line)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [shortened(line, _font(14), width) for line in lines]


def _legible(text: str) -> str:
    """Letters that Pillow's font lacks without their accents, or as the plain letters nearest to them."""
    return "".join(character if _has(character) else _plain(character) for character in text)


@lru_cache(maxsize=4096)
def _has(character: str) -> bool:
    font = _font(16)
    return character == " " or bytes(font.getmask(character)) != bytes(font.getmask("\uffff"))


def _plain(character: str) -> str:
    base = unicodedata.normalize("NFKD", character)[0]
    return _PLAIN.get(character) or (base if _has(base) else "?")
