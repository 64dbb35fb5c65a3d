"""The index of a TFRecord file: the offset and the label of each record, and the position of its image.

The index is the file NAME.index beside NAME. It is made on first use in one pass, and is memory-mapped. An index that
does not belong to its file, or is damaged, is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt

from modelyard.data.records.example import FeatureMap, FeatureSpans, describe_example, find_features
from modelyard.data.records.tfrecord import HEAD, TAIL, RecordFile, checksum, header, scan
from modelyard.errors import DataError
from modelyard.system.files import whole_file
from modelyard.system.untrusted import open_regular

ENTRY = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u4"),
        ("crc", "<u4"),
        ("label", "<i4"),
        ("image_offset", "<u4"),
        ("image_length", "<u4"),
        ("height", "<u4"),
        ("width", "<u4"),
    ]
)
"""One record: its offset in the file, length and checksum of its data, and the position of the image in the data."""

IN_PIECES = 0xFFFFFFFF
"""The length of an image whose numbers are not contiguous: the record has to be parsed."""

_MAGIC = b"modelyard record index 1\n"
_ALIGN = 64
_LONGEST_HEADER = 1 << 27
_LONGEST_LABEL = 1000
_MOST_LABELS = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Index:
    """The records of one file.

    Args:
        entries: one `ENTRY` per record.
        texts: if labels are text, the sorted texts; labels are positions in them.
    """

    entries: NDArray[np.void]
    texts: tuple[str, ...] | None


class _Header(BaseModel):
    model_config = ConfigDict(strict=True)
    size: int
    records: NonNegativeInt
    features: dict[str, Any]
    texts: tuple[str, ...] | None
    crc: int


def index_path(path: Path) -> Path:
    """Returns the path of the index of a file."""
    return path.with_name(f"{path.name}.index")


def find_index(file: RecordFile, features: FeatureMap, cache: Path | None) -> Index | None:
    """Reads the index of a file, beside it or in ``cache``. Returns None if it has to be made."""
    for path in _index_paths(file.path, cache):
        try:
            return read_index(path, file, features)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, DataError) as error:
            _log.debug("%s is made again: %s.", path, error)
    return None


def make_index(
    file: RecordFile, features: FeatureMap, cache: Path | None, progress: Callable[[int], None] | None = None
) -> Index:
    """Makes the index of a file and writes it beside the file, or to ``cache`` if that is not possible.

    Raises:
        DataError: if the file is damaged, or its records do not have the features.
    """
    index = build_index(file.path, features, progress)
    for path in _index_paths(file.path, cache):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as out:
                write_index(out, index, features, file.size)
            return read_index(path, file, features)
        except (OSError, ValueError, DataError) as error:
            _log.info("%s can't be written: %s.", path, error)
    _log.warning("The index of %s can't be written; it is kept in memory and made again next time.", file.path)
    return index


def build_index(path: Path, features: FeatureMap, progress: Callable[[int], None] | None = None) -> Index:
    """Makes the index of an uncompressed file in one pass, which checks every byte.

    Raises:
        DataError: if the file is damaged, with the record and its byte offset.
    """
    texts: dict[str, int] = {}
    rows = np.fromiter(_rows(path, features, texts, progress), ENTRY)
    if not texts:
        return Index(rows, None)
    # Renumbered alphabetically, so that labels do not depend on the order of the records.
    ordered = sorted(texts)
    rows["label"] = np.argsort([texts[text] for text in ordered])[rows["label"]]
    return Index(rows, tuple(ordered))


def write_index(out: BinaryIO, index: Index, features: FeatureMap, size: int) -> None:
    """Writes the index of a file of ``size`` bytes."""
    rows = index.entries.tobytes()
    fields = {
        "size": size,
        "records": len(index.entries),
        "features": features.as_dict(),
        "texts": index.texts,
        "crc": checksum(rows),
    }
    text = json.dumps(fields, sort_keys=True).encode()
    # Spaces align the array.
    text += b" " * (-(len(_MAGIC) + len(text) + 1) % _ALIGN) + b"\n"
    out.write(_MAGIC + text)
    out.write(rows)


def read_index(path: Path, file: RecordFile, features: FeatureMap) -> Index:
    """Memory-maps an index, after checking that it is whole and belongs to ``file`` and ``features``.

    Raises:
        ValueError: if not, with the reason.
        OSError: if it can't be read.
    """
    with open_regular(path, DataError) as stored:
        if stored.readline(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is not an index of this version")
        fields = _Header.model_validate_json(stored.readline(_LONGEST_HEADER))
        start = stored.tell()
    if (fields.size, fields.features) != (file.size, features.as_dict()):
        raise ValueError("it belongs to another file or another feature map")
    count = fields.records
    if path.stat().st_size != start + count * ENTRY.itemsize:
        raise ValueError("it is cut off")
    # A plain array is still mapped, and reads one row several times faster than a memmap.
    entries = np.asarray(np.memmap(path, ENTRY, "r", start, (count,))) if count else np.empty(0, ENTRY)
    if checksum(entries.tobytes()) != fields.crc:
        raise ValueError("it does not match its checksum")
    _check(entries, fields.texts, file)
    return Index(entries, fields.texts)


def _feature_error(record: bytes, what: str) -> ValueError:
    """Returns an error that lists the features of the record."""
    return ValueError(f"{what}. The record has: {'; '.join(describe_example(record)) or 'no features'}")


def _index_paths(path: Path, cache: Path | None) -> list[Path]:
    if cache is None:
        return [index_path(path)]
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return [index_path(path), cache / "index" / f"{key}-{path.name}.index"]


def _check(entries: NDArray[np.void], texts: tuple[str, ...] | None, file: RecordFile) -> None:
    """Checks that the records fill the file. An index is untrusted input."""
    lengths = entries["length"].astype(np.int64)
    ends = np.cumsum(lengths + HEAD + TAIL)
    starts = ends - lengths - HEAD - TAIL
    whole = (int(ends[-1]) if len(ends) else 0) == file.size
    if not whole or not np.array_equal(starts, entries["offset"].astype(np.int64)):
        raise ValueError("its offsets do not match the file")
    pieces = entries["image_length"] == IN_PIECES
    within = entries["image_offset"].astype(np.int64) + entries["image_length"] <= lengths
    if not (within | pieces).all():
        raise ValueError("its images extend beyond their records")
    if len(entries) and (entries["label"].min() < 0 or (texts is not None and entries["label"].max() >= len(texts))):
        raise ValueError("its labels are out of range")
    for entry in entries[[0, -1]] if len(entries) else ():
        at, length = int(entry["offset"]), int(entry["length"])
        crc = struct.pack("<I", int(entry["crc"]))
        if (file.read(at, HEAD), file.read(at + HEAD + length, TAIL)) != (header(length), crc):
            raise ValueError("it belongs to another file")


def _rows(
    path: Path, features: FeatureMap, texts: dict[str, int], progress: Callable[[int], None] | None
) -> Iterator[tuple[int, ...]]:
    """Yields an `ENTRY` per record. Texts of labels are numbered in ``texts``, in the order of their first record."""
    for number, (at, data, crc) in enumerate(scan(path, progress)):
        try:
            found = find_features(data, features.names())
            start, length = _image_span(data, found, features)
            height, width = _size(data, found, features)
            if features.coding != "encoded" and length != IN_PIECES:
                features.stored_shape(length, height, width)
            label = _label(data, found, features)
            if number and isinstance(label, str) != bool(texts):
                raise ValueError("some labels are numbers and some are text")
            if isinstance(label, str):
                label = texts.setdefault(label, len(texts))
            if label >= _MOST_LABELS:
                raise ValueError(f"there are more than {_MOST_LABELS:,} different labels")
        except ValueError as error:
            raise DataError(f"{path}, record {number:,} at byte {at:,}: {error}.") from error
        yield at, len(data), crc, label, start, length, height, width


def _image_span(record: bytes, found: dict[str, FeatureSpans], features: FeatureMap) -> tuple[int, int]:
    image = found.get(features.image)
    if image is None:
        raise _feature_error(record, f"it has no feature {features.image!r} for the image")
    if features.coding == "floats":
        if image.kind != "floats":
            raise _feature_error(record, f"the feature {features.image!r} is not a list of floats")
        if len(image.spans) != 1:
            return 0, IN_PIECES
    elif image.kind != "bytes" or len(image.spans) != 1:
        raise _feature_error(record, f"the feature {features.image!r} is not one image as bytes")
    start, end = image.spans[0]
    return start, end - start


def _size(record: bytes, found: dict[str, FeatureSpans], features: FeatureMap) -> tuple[int, int]:
    if features.height is None or features.width is None:
        shape = features.shape or ()
        return (shape[0], shape[1]) if len(shape) > 1 else (0, 0)
    sizes = []
    for name in (features.height, features.width):
        feature = found.get(name)
        one = feature is not None and feature.kind == "ints" and feature.count(record) == 1
        value = int(feature.values(record)[0]) if feature is not None and one else 0
        if 0 < value < 1 << 32:
            sizes.append(value)
        elif features.coding == "encoded":
            sizes.append(0)
        else:
            raise _feature_error(record, f"it has no feature {name!r} with one positive integer")
    return sizes[0], sizes[1]


def _label(record: bytes, found: dict[str, FeatureSpans], features: FeatureMap) -> int | str:
    if features.label is None:
        return 0
    label = found.get(features.label)
    if label is None:
        raise _feature_error(record, f"it has no feature {features.label!r} for the label")
    if label.kind not in ("ints", "bytes") or label.count(record) != 1:
        raise _feature_error(record, f"the feature {features.label!r} is not one label: an integer or a text")
    values = label.values(record)
    if label.kind == "bytes":
        if (size := label.size()) > _LONGEST_LABEL:
            raise _feature_error(record, f"the feature {features.label!r} is not a label: it has {size:,} bytes")
        try:
            return bytes(values[0]).decode()
        except UnicodeDecodeError as error:
            raise ValueError("its label is neither a number nor text") from error
    value = int(values[0])
    if not 0 <= value - features.first_label < _MOST_LABELS:
        raise ValueError(
            f"its label {value} is out of range: labels start at {features.first_label}, "
            f"and there are at most {_MOST_LABELS:,} classes"
        )
    return value - features.first_label
