"""A sheet of examples as a PNG file: each example as stored and as augmented in training, with its label and name."""

from __future__ import annotations

import bisect
import io
import logging
import math
import textwrap
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from modelyard import storage
from modelyard.config import Config, resolve
from modelyard.config.backend import select_engine
from modelyard.config.durations import RunLength
from modelyard.data.dataset import IMAGE, LABEL, TRAIN, Dataset, label_kind
from modelyard.data.decoded import DecodedDataset
from modelyard.data.images import decode
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import DataError, counted
from modelyard.system.files import explain, whole_file

Row = tuple[str, Sequence[NDArray[Any]]]
"""The images of an example and its caption: first the label, then a smaller line with the name."""

TILE = 160
MARGIN = 32
_LARGEST_WIDTH = 1840
_SMALLEST_WIDTH = 480
_GAP = 6  # between the images of an example
_FIRST_GAP = 16  # after the first one, the original
_GUTTER, _ROW_GAP = 34, 18  # between examples
_CAPTION_WIDTH = 110  # at least
_FRAME = 1
_ASPECT = 1.4  # preferred width by height

_WHITE, _TEXT, _MUTED = (255, 255, 255), (28, 30, 33), (112, 117, 124)
_BACKGROUND, _BORDER = (241, 242, 244), (214, 217, 221)
_REPLACED = str.maketrans(
    {"×": "x", "–": "-", "—": "-", "→": ">", "ß": "ss", "ø": "o", "Ø": "O", "æ": "ae", "Æ": "AE", "ł": "l"}
)

log = logging.getLogger("modelyard")
Color = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def show_data(
    source: str,
    output: str | Path = "sheet.png",
    *,
    split: str = TRAIN,
    examples: int = 8,
    which: str | Sequence[int] = "random",
    copies: int = 5,
    origin: str = "Python",
    **options: Any,
) -> Path | str:
    """Draws examples of all classes, as stored and several times augmented as in training.

    Args:
        source: a path or the name of a dataset.
        output: the PNG file to write, or its URL.
        split: train, validation or test.
        examples: the number of examples.
        which: "random" ones of each class, by ``random_seed``; the "first" ones of each class; or numbers of examples.
        copies: the number of augmented images per example.
        origin: where the options come from, for error messages.
        **options: options of the dataset, ``augment``, ``preprocess``, ``random_seed``.
    """
    output = str(output)
    if not output.lower().endswith(".png"):
        raise DataError(f"{output} must end in .png.")
    config = resolve({**options, "dataset": source}, source=origin, pick_up_files=False)
    select_engine(config.engine)
    dataset = load_dataset(config)
    rows = _chosen(dataset, split, examples, which, config.random_seed)
    found = dataset.read(split, rows)
    labels = dataset.labels(split)
    if labels is not None and which in ("random", "first"):
        shown, there = len(np.unique(labels[rows])), len(np.unique(labels))
        if shown < there:
            log.info("%d of %d classes are shown; --examples %d shows one example of each", shown, there, there)
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
        f"{split}: {counted(dataset.size(split), 'example')} of {len(dataset.classes)} classes, trained as {shape}",
        f"augment: {', '.join(map(str, config.augment)) or 'none'}",
    ]
    headings = ["stored", *(f"augmented {number + 1}" for number in range(augmented))]
    picture = sheet(list(zip(captions, strips, strict=True)), headings, title=source, notes=notes)
    if storage.is_remote(output):
        storage.write_bytes(output, to_png(picture))
        return output
    path = Path(output).expanduser()
    with explain(path, "write", DataError), whole_file(path) as file:
        file.write(to_png(picture))
    return path


def _label_text(dataset: Dataset, label: Any) -> str:
    kind = label_kind(dataset.features.get(LABEL))
    if kind == "class":
        return dataset.classes[int(label)]
    if kind == "flags":
        return ", ".join(name for name, applies in zip(dataset.classes, label, strict=True) if applies) or "none"
    if kind == "map":
        return f"a map of {'×'.join(map(str, np.shape(label)))}"
    return ", ".join(f"{value:.4g}" for value in np.ravel(label))


def _originals(dataset: Dataset, split: str, rows: NDArray[np.int64], read: NDArray[Any]) -> list[NDArray[Any]]:
    """Returns the raw images, which are not cropped or resized."""
    if not isinstance(dataset, DecodedDataset):
        return list(read)
    examples = dataset.splits[split]
    raw = [(examples.load(row), examples.name(row)) for row in rows.tolist()]
    return [decode(value, None, name) if isinstance(value, bytes) else value for value, name in raw]


def _chosen(dataset: Dataset, split: str, count: int, which: str | Sequence[int], seed: int) -> NDArray[np.int64]:
    """Returns the examples to show.

    Raises:
        DataError: if ``which`` is not valid.
    """
    if which in ("random", "first"):
        return _one_of_each_class(dataset, split, count, seed if which == "random" else None)
    parts = which.split(",") if isinstance(which, str) else [str(number) for number in which]
    rows = [int(part) for part in parts if part.strip().isdecimal()]
    size = dataset.size(split)
    if len(rows) < len(parts) or not rows:
        raise DataError(f"which is {which!r}; give random, first, or numbers of examples such as 3,17,40.")
    if max(rows) >= size:
        raise DataError(f"there is no example {max(rows)}: the {split} split has {size:,}, 0 to {size - 1}.")
    return np.array(rows, np.int64)


def _one_of_each_class(dataset: Dataset, split: str, count: int, seed: int | None) -> NDArray[np.int64]:
    """Returns one example of each class, then a second, and so on, up to ``count``: random ones, or the first."""
    size = dataset.size(split)
    labels = dataset.labels(split)
    order = np.arange(size) if seed is None else np.random.default_rng(seed).permutation(size)
    if labels is None:
        spread = np.unique(np.linspace(0, size - 1, min(count, size)).astype(np.int64))
        return spread if seed is None else np.sort(order[: min(count, size)])
    order = order[np.argsort(labels[order], kind="stable")]
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
    """Draws examples, one strip of images each, with headings for the columns of images.

    Small images are enlarged by an integer factor, large ones are reduced. The aspect ratio is kept. Float images are
    shown from 0 to 1, or from 0 to 255 beside uint8 images, if all values are in that range; else from the smallest to
    the largest value of the sheet.

    Raises:
        DataError: if there is nothing to show, or an array is not an image.
    """
    tiles = _tiles(rows)
    box = max(image.width for images in tiles for image in images), max(i.height for images in tiles for i in images)
    count = max(len(images) for images in tiles)
    lefts = [i * (box[0] + _GAP) + (_FIRST_GAP - _GAP if i else 0) for i in range(count)]
    lines = max(len(caption.splitlines()) for caption, _ in rows)
    strips = [_strip(caption, images, lefts, box, lines) for (caption, _), images in zip(rows, tiles, strict=True)]
    strip_width, strip_height = strips[0].size
    across, down = strip_width + _GUTTER, strip_height + _ROW_GAP
    headings, edge = _line(13) + 20 if columns else 0, MARGIN - _FRAME

    def size(abreast: int) -> tuple[int, int]:
        return 2 * edge + abreast * across - _GUTTER, headings + math.ceil(len(strips) / abreast) * down - _ROW_GAP

    most = min(len(strips), max(1, (_LARGEST_WIDTH - 2 * edge + _GUTTER) // across))
    abreast = min(range(1, most + 1), key=lambda n: abs(math.log(size(n)[0] / size(n)[1] / _ASPECT)))
    width, height = max(_SMALLEST_WIDTH, size(abreast)[0]), size(abreast)[1]
    wrapped = _wrapped(notes, width - 2 * MARGIN)
    top = edge + (_line(22) + 6 if title else 0) + len(wrapped) * _line(14) + (18 if title or wrapped else 0)
    picture = Image.new("RGB", (width, top + height + edge), _WHITE)
    draw = ImageDraw.Draw(picture)
    y = MARGIN
    if title:
        _write(draw, (MARGIN, y), title, 22, width - 2 * MARGIN, _TEXT)
        y += _line(22) + 6
    for line in wrapped:
        _write(draw, (MARGIN, y), line, 14, width - 2 * MARGIN)
        y += _line(14)
    for left in range(MARGIN, MARGIN + abreast * across, across) if columns else ():
        rule = top + _line(13) + 6
        draw.line((left, rule, left + strip_width - 2 * _FRAME - 1, rule), _BORDER)
        for x, heading in zip(lefts, columns, strict=False):
            _write(draw, (left + x, top), heading, 13, box[0])
    for number, strip in enumerate(strips):
        row, column = divmod(number, abreast)
        picture.paste(strip, (edge + column * across, top + headings + row * down))
    return picture


def _strip(
    caption: str, images: Sequence[Image.Image], lefts: Sequence[int], box: tuple[int, int], lines: int
) -> Image.Image:
    """Draws the caption of an example, in up to two ``lines``, and its images, each in the middle of a box."""
    wide, tall = box
    top = (_line(15) + (_line(13) if lines > 1 else 0) + 5) if lines else 0
    width = max(_CAPTION_WIDTH, lefts[-1] + wide)
    strip = Image.new("RGB", (width + 2 * _FRAME, top + tall + 2 * _FRAME), _WHITE)
    draw = ImageDraw.Draw(strip)
    label, *rest = caption.splitlines() or [""]
    _write(draw, (_FRAME, 0), label, 15, width, _TEXT)
    _write(draw, (_FRAME, _line(15)), " ".join(rest), 13, width)
    for left, image in zip(lefts, images, strict=False):
        draw.rectangle((left, top, left + wide + _FRAME, top + tall + _FRAME), _BACKGROUND, _BORDER)
        corner = left + _FRAME + (wide - image.width) // 2, top + _FRAME + (tall - image.height) // 2
        strip.paste(image, corner, image if image.mode == "RGBA" else None)
    return strip


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


# -- images ---------------------------------------------------------------------------------------------------------


def _tiles(rows: Sequence[Row]) -> list[list[Image.Image]]:
    checked = [[_checked(image, caption) for image in images] for caption, images in rows]
    if not any(checked):
        raise DataError("there are no images to show.")
    everything = [image for images in checked for image in images]
    low, high = _value_range(everything)
    return [[_scaled(_bytes(image, low, high)) for image in images] for images in checked]


def as_bytes(images: Sequence[NDArray[Any]]) -> list[NDArray[np.uint8]]:
    """Returns images as they are shown: of 8 bits, with one, three or four channels.

    Raises:
        DataError: if an array is not an image.
    """
    checked = [_checked(image, "") for image in images]
    low, high = _value_range(checked)
    return [_bytes(image, low, high) for image in checked]


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


def _write(
    draw: ImageDraw.ImageDraw, at: tuple[int, int], text: str, size: int, width: int, color: Color = _MUTED
) -> None:
    draw.text(at, shortened(text, _font(size), width), color, _font(size))


def _wrapped(notes: Sequence[str], width: int) -> list[str]:
    """Wraps the notes to about ``width`` pixels, and joins all lines after the third."""
    characters = int(width / _font(14).getlength("n"))
    lines = [line for note in notes for line in textwrap.wrap(note, characters)]
    return [*lines[:3], " ".join(lines[3:])] if len(lines) > 3 else lines


def _legible(text: str) -> str:
    """Replaces letters that Pillow's font does not have: it has hardly more than ASCII."""
    letters = unicodedata.normalize("NFKD", text.translate(_REPLACED))
    return "".join(
        letter if letter.isascii() or letter in "©«°±·»‘’“”‹›" else "?"
        for letter in letters
        if not unicodedata.combining(letter)
    )
