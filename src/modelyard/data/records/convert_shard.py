"""One shard of a conversion: some examples, checked, encoded and written as a file of records with its index.

Worker processes import this module and little else; none of it depends on how many of them there are.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel

from modelyard.data.catalog import RawType
from modelyard.data.images import decode, resize
from modelyard.data.raw_examples import RawExample, RawExamples
from modelyard.data.records.example import FeatureMap, Value, encode_example
from modelyard.data.records.index import build_index, index_path, write_index
from modelyard.data.records.reader import Encoding
from modelyard.data.records.tfrecord import frame
from modelyard.errors import DataError
from modelyard.system.files import explain, whole_file

OnBad = Literal["fail", "skip"]

_FORMATS = {
    b"\xff\xd8\xff": "jpeg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}


@dataclass(frozen=True)
class Recipe:
    """How examples are stored: see `convert_items`."""

    encoding: Encoding
    max_edge: int | None
    quality: int
    features: FeatureMap
    """Where the records will hold what; from it follows whether examples are image files or arrays."""
    arrays: bool


@dataclass(frozen=True)
class Encoded:
    """An example as it goes into a record; sizes are None for values that are no image."""

    payload: bytes
    format: str
    size: tuple[int, int, int] | None
    reencoded: bool


@dataclass(frozen=True)
class ShardTask:
    """Which examples go where."""

    path: Path
    split: str
    start: int
    labels: NDArray[np.int32]


class ShardResult(BaseModel):
    """What became of a shard; kept in a file beside it until the conversion ends."""

    file: str
    records: int
    bytes: int
    sha256: str
    class_counts: dict[int, int]
    smallest: tuple[int, int, int] | None
    largest: tuple[int, int, int] | None
    reencoded: int
    bad: list[tuple[str, str]]


def result_path(path: Path) -> Path:
    """Where the result of a shard is kept."""
    return path.with_name(f".{path.name}.json")


def recipe_for(first: RawExample, encoding: Encoding, max_edge: int | None, quality: int, name: str) -> Recipe:
    """How examples like ``first`` are stored.

    Raises:
        DataError: if they can't be stored that way.
    """
    sizes: dict[str, Any] = {"height": "image/height", "width": "image/width"}
    if isinstance(first, bytes):
        coding: Any = "raw" if encoding == "raw" else "encoded"
        return Recipe(encoding, max_edge, quality, FeatureMap(coding=coding, **sizes), arrays=False)
    if encoding == "jpeg":
        _as_pixels(first, name)
        return Recipe(encoding, max_edge, quality, FeatureMap(**sizes), arrays=True)
    dtype: Any = first.dtype.name
    if dtype not in get_args(RawType):
        raise DataError(f"{name}: values of type {dtype} can't be stored; give one of {', '.join(get_args(RawType))}.")
    if first.ndim in (2, 3):
        return Recipe(encoding, max_edge, quality, FeatureMap(coding="raw", dtype=dtype, **sizes), arrays=True)
    return Recipe(encoding, max_edge, quality, FeatureMap(coding="raw", dtype=dtype, shape=first.shape), arrays=True)


def encode_item(stored: RawExample, recipe: Recipe, name: str) -> Encoded:
    """An example as it goes into a record. Image files are decoded whatever happens, to know that they can be.

    Raises:
        DataError: if it can't be, naming it.
    """
    if isinstance(stored, bytes) == recipe.arrays:
        found, others = ("an image file", "arrays") if recipe.arrays else ("an array", "image files")
        raise DataError(f"{name} is {found}; those before it are {others}.")
    if not isinstance(stored, bytes):
        return _encode_array(stored, recipe, name)
    # Pixels of files are always colour: grey ones among them would look like another shape.
    pixels = decode(stored, 3 if recipe.encoding == "raw" else None, name)
    fitted = shrunk(pixels, recipe.max_edge)
    size: tuple[int, int, int] = fitted.shape
    if recipe.encoding == "raw":
        return Encoded(fitted.tobytes(), "raw", size, False)
    kind = image_format(stored)
    if recipe.encoding == "keep" and fitted is pixels:
        return Encoded(stored, kind, size, False)
    if recipe.encoding == "keep" and kind == "png":
        return Encoded(png(fitted), "png", size, True)
    return Encoded(jpeg(fitted, recipe.quality, name), "jpeg", size, recipe.encoding == "keep")


def image_format(data: bytes) -> str:
    """The format of an image file, by its first bytes."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((name for magic, name in _FORMATS.items() if data.startswith(magic)), "other")


def shrunk(image: NDArray[Any], max_edge: int | None) -> NDArray[Any]:
    """``image`` itself, or a smaller one whose longer edge is ``max_edge``."""
    height, width = image.shape[:2]
    longer = max(height, width)
    if max_edge is None or longer <= max_edge:
        return image
    return resize(image, *(max((2 * edge * max_edge + longer) // (2 * longer), 1) for edge in (height, width)))


def jpeg(image: NDArray[Any], quality: int, name: str) -> bytes:
    """A JPEG file."""
    try:
        data: bytes = simplejpeg.encode_jpeg(
            np.ascontiguousarray(image),
            quality=quality,
            colorspace="GRAY" if image.shape[2] == 1 else "RGB",
            colorsubsampling="Gray" if image.shape[2] == 1 else "420",
        )
    except ValueError as error:
        raise DataError(f"{name} can't be stored as JPEG: {error}.") from error
    return data


def png(image: NDArray[Any]) -> bytes:
    """A PNG file."""
    out = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(out, "PNG")
    return out.getvalue()


def write_shard(
    task: ShardTask,
    items: RawExamples,
    classes: Sequence[str],
    recipe: Recipe,
    on_bad: OnBad,
    tick: Callable[[], None],
) -> ShardResult:
    """Writes the records of a shard, their index, and last the result, which says that the shard is done.

    Raises:
        DataError: at the first example that can't be read, if bad ones are not to be skipped; if the disk is full.
    """
    digest, size, written, reencoded = hashlib.sha256(), 0, 0, 0
    counts: dict[int, int] = {}
    shapes: list[tuple[int, int, int]] = []
    bad: list[tuple[str, str]] = []
    with explain(task.path, "write", DataError):
        with whole_file(task.path) as out:
            for row, label in enumerate(task.labels.tolist()):
                tick()
                name = items.name(task.start + row)
                try:
                    encoded = encode_item(items.load(task.start + row), recipe, name)
                except DataError as error:
                    if on_bad == "fail":
                        raise DataError(unskipped(str(error))) from error
                    bad.append((name, str(error)))
                    continue
                data = frame(encode_example(_features(encoded, label, classes[label], name)))
                out.write(data)
                digest.update(data)
                size += len(data)
                written += 1
                reencoded += encoded.reencoded
                counts[label] = counts.get(label, 0) + 1
                if encoded.size is not None:
                    # Only the least and the most of each are kept.
                    shapes = [encoded.size] if not shapes else _extremes([*shapes, encoded.size])
        index = build_index(task.path, recipe.features)  # reads the file back: what is on disk is what was meant
        with whole_file(index_path(task.path)) as out:
            write_index(out, index, recipe.features, size)
        result = ShardResult(
            file=task.path.name,
            records=written,
            bytes=size,
            sha256=digest.hexdigest(),
            class_counts=counts,
            smallest=shapes[0] if shapes else None,
            largest=shapes[-1] if shapes else None,
            reencoded=reencoded,
            bad=bad,
        )
        with whole_file(result_path(task.path)) as out:
            out.write(result.model_dump_json().encode(errors="replace"))
    return result


def unskipped(problem: str) -> str:
    """A sentence about a bad example, and how to go on without it."""
    return f"{problem} To leave out examples that can't be read, use --on_bad skip; finished shards are kept."


def _extremes(sizes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    columns = list(zip(*sizes, strict=True))
    least, most = tuple(map(min, columns)), tuple(map(max, columns))
    return [(least[0], least[1], least[2]), (most[0], most[1], most[2])]


def _features(encoded: Encoded, label: int, text: str, name: str) -> Mapping[str, Value]:
    features: dict[str, Value] = {
        "image/encoded": encoded.payload,
        "image/format": encoded.format,
        "image/class/label": label,
        "image/class/text": text,
        "image/filename": name.encode(errors="replace"),
    }
    if encoded.size is not None:
        height, width, channels = encoded.size
        features |= {"image/height": height, "image/width": width, "image/channels": channels}
    return features


def _as_pixels(array: NDArray[np.generic], name: str) -> NDArray[Any]:
    pixels = array[..., None] if array.ndim == 2 else array
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size:
        raise DataError(
            f"{name} has shape {'×'.join(map(str, array.shape))} of {array.dtype}; an image has height × width × 1 or "
            "3 of uint8. Other values can only be kept as they are (encoding keep, no max_edge)."
        )
    return pixels


def _encode_array(array: NDArray[np.generic], recipe: Recipe, name: str) -> Encoded:
    if recipe.encoding == "jpeg":
        pixels = shrunk(_as_pixels(array, name), recipe.max_edge)
        return Encoded(jpeg(pixels, recipe.quality, name), "jpeg", pixels.shape, False)
    features = recipe.features
    if array.dtype.name != features.dtype:
        raise DataError(f"{name} has values of {array.dtype}, those before it of {features.dtype}.")
    little = array.dtype.newbyteorder("<")
    if features.shape is not None:
        if array.shape != features.shape:
            raise DataError(f"{name} has shape {array.shape}, those before it {features.shape}.")
        return Encoded(array.astype(little, copy=False).tobytes(), "raw", None, False)
    if array.ndim not in (2, 3) or not array.size:
        raise DataError(f"{name} has shape {array.shape}; height × width × channels are needed.")
    values = array[..., None] if array.ndim == 2 else array
    if recipe.max_edge is not None and max(values.shape[:2]) > recipe.max_edge:
        values = shrunk(_as_pixels(array, name), recipe.max_edge)
        return Encoded(values.tobytes(), "raw", values.shape, recipe.encoding == "keep")
    return Encoded(values.astype(little, copy=False).tobytes(), "raw", values.shape, False)
