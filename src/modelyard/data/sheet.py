"""A sheet of examples as a PNG file: each example as stored and as augmented in training, with its label and name."""

from __future__ import annotations

import bisect
import io
import math
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from modelyard.config import Config, resolve
from modelyard.config.backend import select_engine
from modelyard.config.durations import RunLength
from modelyard.data.dataset import IMAGE, LABEL, TRAIN, Dataset, label_kind
from modelyard.data.decoded import DecodedDataset
from modelyard.data.images import decode
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import DataError
from modelyard.system.files import explain, whole_file

Row = tuple[str, Sequence[NDArray[Any]]]
"""The images of an example and its caption: first the label, then a smaller line with the name."""

TILE = 160
MARGIN = 32
_LARGEST_WIDTH = 1840
_SMALLEST_WIDTH = 480
_GAP = 6  # between the images of an example
_FIRST_GAP = 16  # after the first one, the original
_GUTTER = 36  # between examples
_ASPECT = 1.4  # preferred width by height

_WHITE, _TEXT, _MUTED = (255, 255, 255), (28, 30, 33), (112, 117, 124)
_BACKGROUND, _BORDER = (241, 242, 244), (214, 217, 221)
_PLAIN = {"×": "x", "–": "-", "—": "-", "→": ">", "ß": "ss", "ø": "o", "Ø": "O", "æ": "ae", "Æ": "AE", "ł": "l"}

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def show_data(
    source: str,
    output: str | Path = "sheet.png",
    *,
    split: str = TRAIN,
    examples: int = 8,
    copies: int = 5,
    origin: str = "Python",
    **options: Any,
) -> Path:
    """Draws examples of all classes, as stored and several times augmented as in training.

    Args:
        source: a path or the name of a dataset.
        output: the PNG file to write.
        split: train, validation or test.
        examples: the number of examples.
        copies: the number of augmented images per example.
        origin: where the options come from, for error messages.
        **options: options of the dataset, ``augment``, ``preprocess``, ``random_seed``.
    """
    path = Path(output).expanduser()
    if path.suffix.lower() != ".png":
        raise DataError(f"{path} must end in .png.")
    config = resolve({**options, "dataset": source}, source=origin, pick_up_files=False)
    select_engine(config.engine)
    dataset = load_dataset(config)
    rows = _one_of_each_class(dataset, split, examples)
    found = dataset.read(split, rows)
    strips = [[image] for image in _originals(dataset, split, rows, np.asarray(found[IMAGE]))]
    augmented = copies if split == TRAIN and (config.augment or config.preprocess) else 0
    for copy in range(augmented):
        for strip, image in zip(strips, _augmented(config, dataset, rows, copy), strict=True):
            strip.append(image)
    captions = [str(row) for row in rows]
    if LABEL in found:
        pairs = zip(np.asarray(found[LABEL]), rows.tolist(), strict=True)
        captions = [f"{_label_text(dataset, label)}\n{dataset.name(split, row)}" for label, row in pairs]
    shape = "×".join(map(str, dataset.features[IMAGE].shape))
    notes = [
        f"{split}: {dataset.size(split):,} examples of {len(dataset.classes)} classes, trained as {shape}",
        f"augment: {', '.join(map(str, config.augment)) or 'none'}",
    ]
    headings = ["stored", *(f"augmented {number + 1}" for number in range(augmented))]
    picture = sheet(list(zip(captions, strips, strict=True)), headings, title=source, notes=notes)
    with explain(path, "write", DataError), whole_file(path) as file:
        file.write(to_png(picture))
    return path


def _label_text(dataset: Dataset, label: Any) -> str:
    kind = label_kind(dataset.features.get(LABEL))
    if kind == "class":
        return dataset.classes[int(label)]
    if kind == "flags":
        return ", ".join(name for name, applies in zip(dataset.classes, label, strict=True) if applies) or "none"
    return ", ".join(f"{value:.4g}" for value in np.ravel(label))


def _originals(dataset: Dataset, split: str, rows: NDArray[np.int64], read: NDArray[Any]) -> list[NDArray[Any]]:
    """Returns the raw images, which are not cropped or resized."""
    if not isinstance(dataset, DecodedDataset):
        return list(read)
    examples = dataset.splits[split]
    raw = [(examples.load(row), examples.name(row)) for row in rows.tolist()]
    return [decode(value, None, name) if isinstance(value, bytes) else value for value, name in raw]


def _one_of_each_class(dataset: Dataset, split: str, count: int) -> NDArray[np.int64]:
    """Returns the first example of each class, then the second, and so on, up to ``count``."""
    size = dataset.size(split)
    labels = dataset.labels(split)
    if labels is None:
        return np.unique(np.linspace(0, size - 1, min(count, size)).astype(np.int64))
    order = np.argsort(labels, kind="stable")
    first = np.searchsorted(labels[order], labels[order])
    turn = np.arange(size) - first  # the number of examples of the class before this one
    return np.sort(order[np.lexsort((labels[order], turn))][: min(count, size)])


def _augmented(config: Config, dataset: Dataset, rows: NDArray[np.int64], copy: int) -> NDArray[Any]:
    """Returns the images augmented as in training, with other random numbers for each copy."""
    from keras import ops

    from modelyard.data.augment.build import build_augmentation, neighbours
    from modelyard.data.draws import halves
    from modelyard.data.pipeline import Pipeline
    from modelyard.data.preprocess import batch_preprocessing

    group = neighbours(config.augment)  # mixup needs pairs
    padded = np.concatenate([rows, np.resize(rows, -len(rows) % group)])
    pipeline = Pipeline(config, dataset, RunLength(dataset.size(TRAIN), len(padded), 1))
    positions = np.arange(len(padded)) + copy * (-(-dataset.size(TRAIN) // group) * group)
    out = {name: np.empty((len(padded), *f.shape), f.dtype) for name, f in pipeline.features.items()}
    pipeline.read(padded, positions, out)
    batch = {name: ops.convert_to_tensor(array) for name, array in out.items()}
    augment = build_augmentation(
        config.augment, dataset, config.random_seed, len(padded), pipeline.crops_while_decoding
    )
    low, high = (ops.convert_to_tensor(half) for half in halves(positions.astype(np.uint64)))
    numbers, epochs = (ops.convert_to_tensor(n.astype(np.int32)) for n in (padded, np.full(len(padded), copy)))
    batch = batch_preprocessing(config.preprocess)(augment(batch, low, high, numbers, epochs), True)
    return np.asarray(ops.convert_to_numpy(batch[IMAGE]))[: len(rows)]


# -- drawing --------------------------------------------------------------------------------------------------------


def sheet(
    rows: Sequence[Row],
    columns: Sequence[str] = (),
    title: str = "",
    notes: Sequence[str] = (),
) -> Image.Image:
    """Draws examples, one strip of images each.

    Small images are enlarged by an integer factor, large ones are reduced. The aspect ratio is kept. Float images are
    shown from 0 to 1, or from 0 to 255 beside uint8 images, if all values are in that range; else from the smallest to
    the largest value of the sheet.

    Args:
        rows: the caption and the images of each example: [height, width] or [height, width, channels], uint8 or
            floats. The first image is the original, with a gap after it.
        columns: headings of the images, such as ``original`` and ``augmented``.
        title: the first line, such as the name of the dataset.
        notes: lines below it, such as split, size, augmentations.

    Raises:
        DataError: if there is nothing to show, or an array is not an image.

    Example:
        >>> sheet([("seven", [np.zeros((8, 8), np.uint8)])], title="digits").size[0]
        480
    """
    shown = _tiles(rows)
    layout = _Layout(shown, bool(columns), max(len(caption.splitlines()) for caption, _ in rows))
    heading = _wrapped(notes, layout.width - 2 * MARGIN)
    top = MARGIN + (_line(22) + 6 if title else 0) + len(heading) * _line(14) + (18 if title or heading else 0)
    picture = Image.new("RGB", (layout.width, top + layout.height + MARGIN), _WHITE)
    draw = ImageDraw.Draw(picture)
    y = MARGIN
    if title:
        draw.text((MARGIN, y), shortened(title, _font(22), layout.width - 2 * MARGIN), _TEXT, _font(22))
        y += _line(22) + 6
    for line in heading:
        draw.text((MARGIN, y), line, _MUTED, _font(14))
        y += _line(14)
    for across in range(layout.abreast if columns else 0):
        left, rule = layout.corner(across)[0], top + _line(13) + 6
        draw.line((left, rule, left + layout.strip - 1, rule), _BORDER)
        for x, column in zip(layout.image_lefts(across), columns, strict=False):
            draw.text((x, top), shortened(column, _font(13), layout.box[0]), _MUTED, _font(13))
    for number, (caption, images) in enumerate(zip((caption for caption, _ in rows), shown, strict=True)):
        _draw_strip(picture, draw, layout, number, top, caption, images)
    return picture


def to_png(picture: Image.Image) -> bytes:
    """Encodes the picture as PNG."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def shortened(text: str, font: Font, width: float) -> str:
    """Cuts ``text`` to ``width`` pixels, with an ellipsis."""
    text = _legible(" ".join(text.split()))
    if font.getlength(text) <= width:
        return text
    cuts = [f"{text[:length].rstrip()}…" for length in range(len(text))]
    return cuts[max(bisect.bisect(cuts, width, key=font.getlength) - 1, 0)]


class _Layout:
    """Positions: as many strips side by side as give the sheet a good aspect ratio."""

    def __init__(self, shown: Sequence[Sequence[Image.Image]], headed: bool, lines: int) -> None:
        everything = [image for images in shown for image in images]
        self.box = max(image.width for image in everything), max(image.height for image in everything)
        self.images = max(len(images) for images in shown)
        # Wide enough for a caption.
        self.strip = max(110, self.images * self.box[0] + (self.images - 1) * _GAP + self._first_gap())
        self.headed = _line(13) + 20 if headed else 0
        self.caption = (_line(15) + (_line(13) if lines > 1 else 0) + 5) if lines else 0
        choices = range(1, min(len(shown), self._fitting()) + 1)
        self.abreast = min(choices, key=lambda n: abs(math.log(self._wide(n) / self._tall(n, len(shown)) / _ASPECT)))
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
        """Returns left and top of strip ``number``."""
        down, across = divmod(number, self.abreast)
        return MARGIN + across * (self.strip + _GUTTER), self.headed + down * (self.caption + self.box[1] + 20)

    def image_lefts(self, number: int) -> list[int]:
        """Returns the left edges of the images of strip ``number``."""
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
    draw.text((left, y), shortened(label, _font(15), layout.strip), _TEXT, _font(15))
    if rest:
        draw.text((left, y + _line(15)), shortened(" ".join(rest), _font(13), layout.strip), _MUTED, _font(13))
    y += layout.caption
    wide, tall = layout.box
    for x, image in zip(layout.image_lefts(number), images, strict=False):
        draw.rectangle((x - 1, y - 1, x + wide, y + tall), _BACKGROUND, _BORDER)
        at = x + (wide - image.width) // 2, y + (tall - image.height) // 2
        picture.paste(image, at, image if image.mode == "RGBA" else None)


# -- images ---------------------------------------------------------------------------------------------------------


def _tiles(rows: Sequence[Row]) -> list[list[Image.Image]]:
    checked = [[_checked(image, caption) for image in images] for caption, images in rows]
    if not any(checked):
        raise DataError("there are no images to show.")
    everything = [image for images in checked for image in images]
    low, high = _value_range(everything)
    return [[_scaled(_bytes(image, low, high)) for image in images] for images in checked]


def _checked(image: NDArray[Any], caption: str) -> NDArray[Any]:
    image = np.asarray(image)
    if image.ndim == 1:
        image = image[None]  # a row of numbers
    if image.ndim == 2:
        image = image[..., None]
    if image.ndim != 3 or image.size == 0 or image.dtype.kind not in "buif":
        raise DataError(
            f"{caption.splitlines()[0] if caption else 'an example'}: an array of {image.dtype} and shape "
            f"{image.shape} is not an image. Give [height, width, channels]."
        )
    if image.shape[2] in (1, 3, 4):
        return image
    return image[..., :3] if image.shape[2] > 4 else image[..., :1]


def _value_range(images: Sequence[NDArray[Any]]) -> tuple[float, float]:
    numbers = np.concatenate([image[np.isfinite(image)] for image in images if image.dtype != np.uint8] or [[0.0]])
    low, high = (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 1.0)
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


def _scaled(image: NDArray[np.uint8]) -> Image.Image:
    height, width, channels = image.shape
    picture = Image.fromarray(np.ascontiguousarray(image[..., 0] if channels == 1 else image))
    if max(height, width) <= TILE:
        return ImageOps.scale(picture, TILE // max(height, width), Image.Resampling.NEAREST)
    picture.thumbnail((TILE, TILE), Image.Resampling.LANCZOS, reducing_gap=3)
    return picture


# -- text -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _font(size: int) -> Font:
    """Returns Pillow's own font, so that a sheet looks the same everywhere."""
    return ImageFont.load_default(size)


def _line(size: int) -> int:
    return round(size * 1.35)


def _wrapped(notes: Sequence[str], width: int, most: int = 4) -> list[str]:
    """Wraps the notes to ``width`` pixels and at most ``most`` lines."""
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
    """Replaces letters that Pillow's font does not have: without accents, or by the nearest plain letter."""
    return "".join(character if _has(character) else _plain(character) for character in text)


@lru_cache(maxsize=4096)
def _has(character: str) -> bool:
    font = _font(16)
    return character == " " or bytes(font.getmask(character)) != bytes(font.getmask("\uffff"))


def _plain(character: str) -> str:
    base = unicodedata.normalize("NFKD", character)[0]
    return _PLAIN.get(character) or (base if _has(base) else "?")
