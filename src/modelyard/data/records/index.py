"""The index of a TFRecord file: where each record is, its label, and where its image is inside it.

It stands beside the file as NAME.index, is made on first use in one pass, and is mapped into memory, not loaded. An
index that does not belong to its file, or is damaged, is made anew: it never holds anything that the file does not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from modelyard.data.records.example import Found, Kind, describe_example, find_features
from modelyard.data.records.feature_map import FeatureMap
from modelyard.data.records.tfrecord import HEAD, TAIL, RecordFile, checksum, scan
from modelyard.errors import DataError
from modelyard.system.files import whole_file

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
"""One record: where it begins in the file, its data's length and checksum, and the place of the image in the data."""

IN_PIECES = 0xFFFFFFFF
"""As the length of an image: its numbers do not stand in one piece, and the record has to be parsed."""

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
        entries: an `ENTRY` a record.
        texts: the sorted texts that the label column refers to, if labels are text.
    """

    entries: NDArray[np.void]
    texts: tuple[str, ...] | None


def index_path(path: Path) -> Path:
    """Where the index of a file stands."""
    return path.with_name(f"{path.name}.index")


def find_index(file: RecordFile, features: FeatureMap, cache: Path | None) -> Index | None:
    """The index of a file: the one beside it, or the one in ``cache``. None if it has to be made."""
    for place in _places(file.path, cache):
        try:
            return read_index(place, file, features)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            _log.debug("%s is made anew: %s.", place, error)
    return None


def make_index(
    file: RecordFile, features: FeatureMap, cache: Path | None, progress: Callable[[int], None] | None = None
) -> Index:
    """Makes the index of a file, and keeps it beside the file or in ``cache``.

    Args:
        file: a plain TFRecord file.
        features: where image and label are.
        cache: a folder for the index, if the file's own can't be written.
        progress: called with numbers of bytes.

    Raises:
        DataError: if the file is damaged, or its records do not hold what ``features`` says.
    """
    index = build_index(file.path, features, progress)
    for place in _places(file.path, cache):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(place) as out:
                write_index(out, index, features, file.size)
            return read_index(place, file, features)
        except (OSError, ValueError) as error:
            _log.info("%s can't be written: %s.", place, error)
    _log.warning("The index of %s can't be written; it is kept in memory and made again next time.", file.path)
    return index


def build_index(path: Path, features: FeatureMap, progress: Callable[[int], None] | None = None) -> Index:
    """Makes the index of a plain file in one pass, which checks every byte.

    Raises:
        DataError: naming the file, the record and its byte offset.
    """
    labels = _Labels()
    rows = np.fromiter(_rows(path, features, labels, progress), ENTRY)
    if labels.kind != "bytes":
        return Index(rows, None)
    # Numbers were given as the texts came; now they follow the alphabet, so that they depend on the texts only.
    ordered = sorted(labels.texts)
    renumber = np.empty(len(ordered), np.int32)
    renumber[[labels.texts[text] for text in ordered]] = np.arange(len(ordered), dtype=np.int32)
    rows["label"] = renumber[rows["label"]]
    return Index(rows, tuple(text.decode() for text in ordered))


def write_index(out: BinaryIO, index: Index, features: FeatureMap, size: int) -> None:
    """Writes an index; ``size`` is that of the file it belongs to."""
    rows = index.entries.tobytes()
    header = {
        "size": size,
        "records": len(index.entries),
        "features": features.as_dict(),
        "texts": index.texts,
        "crc": checksum(rows),
    }
    text = json.dumps(header, sort_keys=True).encode()
    # Spaces, so that the array begins at a round address.
    text += b" " * (-(len(_MAGIC) + len(text) + 1) % _ALIGN) + b"\n"
    out.write(_MAGIC + text)
    out.write(rows)


def read_index(path: Path, file: RecordFile, features: FeatureMap) -> Index:
    """Maps an index into memory, after checking that it is whole and belongs to ``file`` and ``features``.

    Raises:
        ValueError: if not, with the reason.
        OSError: if it can't be read.
    """
    with open(path, "rb") as stored:
        if stored.readline(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is no index of this version")
        line = stored.readline(_LONGEST_HEADER)
        start = stored.tell()
    try:
        header = json.loads(line)
        count, texts = header["records"], header["texts"]
        if type(count) is not int or count < 0 or not (texts is None or type(texts) is list):
            raise ValueError("its header is damaged")
        known = {"size": file.size, "features": features.as_dict()}
        if {name: header[name] for name in known} != known:
            raise ValueError("it is of another file or another feature map")
        crc = header["crc"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("its header is damaged") from error
    if path.stat().st_size != start + count * ENTRY.itemsize:
        raise ValueError("it is cut off")
    # As a plain array, which is still mapped: one row of a memmap takes several times as long.
    entries = np.asarray(np.memmap(path, ENTRY, "r", start, (count,))) if count else np.empty(0, ENTRY)
    if checksum(entries.tobytes()) != crc:
        raise ValueError("it does not fit its checksum")
    _check(entries, None if texts is None else len(texts), file)
    return Index(entries, None if texts is None else tuple(str(text) for text in texts))


def missing(record: bytes, what: str) -> ValueError:
    """An error that shows what the record holds instead."""
    return ValueError(f"{what}. The record has: {'; '.join(describe_example(record)) or 'no features'}")


def _places(path: Path, cache: Path | None) -> list[Path]:
    if cache is None:
        return [index_path(path)]
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    return [index_path(path), cache / "index" / f"{key}-{path.name}.index"]


def _check(entries: NDArray[np.void], texts: int | None, file: RecordFile) -> None:
    """An index could be made by a stranger: places are inside the file, one record after the other."""
    lengths = entries["length"].astype(np.int64)
    ends = np.cumsum(lengths + HEAD + TAIL)
    starts = ends - lengths - HEAD - TAIL
    whole = (int(ends[-1]) if len(ends) else 0) == file.size
    if not whole or not np.array_equal(starts, entries["offset"].astype(np.int64)):
        raise ValueError("its places do not fit the file")
    pieces = entries["image_length"] == IN_PIECES
    within = entries["image_offset"].astype(np.int64) + entries["image_length"] <= lengths
    if not (within | pieces).all():
        raise ValueError("its images reach beyond their records")
    if len(entries) and (entries["label"].min() < 0 or (texts is not None and entries["label"].max() >= texts)):
        raise ValueError("its labels are out of range")
    for entry in entries[[0, -1]] if len(entries) else ():
        at, length = int(entry["offset"]), int(entry["length"])
        head = struct.pack("<Q", length)
        if file.read(at, HEAD) != head + struct.pack("<I", checksum(head)):
            raise ValueError("it is of another file")
        if file.read(at + HEAD + length, TAIL) != struct.pack("<I", int(entry["crc"])):
            raise ValueError("it is of another file")


def _rows(
    path: Path, features: FeatureMap, labels: _Labels, progress: Callable[[int], None] | None
) -> Iterator[tuple[int, ...]]:
    for number, (at, data, crc) in enumerate(scan(path, progress)):
        try:
            found = find_features(data, features.wanted())
            start, length = _image_span(data, found, features)
            height, width = _size(data, found, features)
            if features.coding != "encoded" and length != IN_PIECES:
                features.stored_shape(length, height, width)
            label = labels.number(data, found, features)
        except ValueError as error:
            raise DataError(f"{path}, record {number:,} at byte {at:,}: {error}.") from error
        yield at, len(data), crc, label, start, length, height, width


def _image_span(record: bytes, found: dict[str, Found], features: FeatureMap) -> tuple[int, int]:
    image = found.get(features.image)
    if image is None:
        raise missing(record, f"there is no feature {features.image!r}, where the image should be")
    if features.coding == "floats":
        if image.kind != "floats":
            raise missing(record, f"the feature {features.image!r} is no list of floats")
        if len(image.spans) != 1:
            return 0, IN_PIECES
    elif image.kind != "bytes" or len(image.spans) != 1:
        raise missing(record, f"the feature {features.image!r} is not one image as bytes")
    start, end = image.spans[0]
    return start, end - start


def _size(record: bytes, found: dict[str, Found], features: FeatureMap) -> tuple[int, int]:
    if features.height is None or features.width is None:
        shape = features.shape or ()
        return (shape[0], shape[1]) if len(shape) > 1 else (0, 0)
    sizes = []
    for name in (features.height, features.width):
        values = found[name].values(record) if name in found and found[name].kind == "ints" else []
        if len(values) == 1 and 0 < int(values[0]) < 1 << 32:
            sizes.append(int(values[0]))
        elif features.coding == "encoded":
            sizes.append(0)
        else:
            raise missing(record, f"there is no feature {name!r} with one number from 1 on")
    return sizes[0], sizes[1]


class _Labels:
    """Turns the labels of a file's records into numbers, in one pass."""

    def __init__(self) -> None:
        self.kind: Kind | None = None
        self.texts: dict[bytes, int] = {}

    def number(self, record: bytes, found: dict[str, Found], features: FeatureMap) -> int:
        """The label as a number; that of a text is the order in which it came."""
        if features.label is None:
            return 0
        label = found.get(features.label)
        if label is None:
            raise missing(record, f"there is no feature {features.label!r}, where the label should be")
        if label.kind not in ("ints", "bytes") or label.count(record) != 1:
            raise missing(record, f"the feature {features.label!r} is not one label, a whole number or text")
        if self.kind not in (None, label.kind):
            raise ValueError("some labels are numbers and some are text")
        self.kind = label.kind
        if label.kind == "bytes":
            return self._text(record, *label.spans[0], features)
        value = int(label.values(record)[0])
        if not 0 <= value - features.first_label < _MOST_LABELS:
            raise ValueError(
                f"its label {value} is out of range: labels count from {features.first_label} on, "
                f"and there are at most {_MOST_LABELS:,} classes"
            )
        return value - features.first_label

    def _text(self, record: bytes, start: int, end: int, features: FeatureMap) -> int:
        if end - start > _LONGEST_LABEL:
            raise missing(record, f"the feature {features.label!r} is no label: it has {end - start:,} bytes")
        text = record[start:end]
        if text not in self.texts:
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise ValueError("its label is neither a number nor text") from error
            if len(self.texts) >= _MOST_LABELS:
                raise ValueError(f"there are more than {_MOST_LABELS:,} different labels")
            self.texts[text] = len(self.texts)
        return self.texts[text]
