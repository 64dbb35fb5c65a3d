"""`tf.train.Example`, the content of a record: encode and parse it, and map its features to image and label.

An Example has named lists of bytes, floats or integers. The protobuf wire format is implemented here, so TensorFlow is
not needed. Records are untrusted input: every length is checked against the message that contains it. Errors are
`ValueError` with the reason; callers add the file and the offset.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from modelyard.data.catalog import RawType
from modelyard.errors import DataError
from modelyard.system.protobuf import DELIMITED, FIXED32, MASK64, VARINT, fields, varint

Kind = Literal["bytes", "floats", "ints"]
Value = bytes | str | int | float | Sequence[int] | Sequence[float] | Sequence[bytes] | NDArray[np.generic]
Coding = Literal["encoded", "raw", "floats"]
Layout = Literal["hwc", "chw"]

_KINDS: dict[int, Kind] = {1: "bytes", 2: "floats", 3: "ints"}
_MOST_SPANS = 1 << 22
_MOST_SHOWN, _LONGEST_SHOWN = 200, 200


@dataclass(frozen=True, slots=True)
class FeatureSpans:
    """The position of a feature in its record.

    Args:
        kind: None for a feature without a list.
        spans: start and end in the record of each bytes value, or of runs of encoded numbers.
    """

    kind: Kind | None
    spans: tuple[tuple[int, int], ...]

    def size(self) -> int:
        """Returns the number of bytes of all values."""
        return sum(end - start for start, end in self.spans)

    def count(self, record: bytes) -> int:
        """Returns the number of values, without making them."""
        if self.kind == "ints":  # the last byte of each is below 128
            return sum(int(np.count_nonzero(_bytes(record, *span) < 0x80)) for span in self.spans)
        return self.size() // 4 if self.kind == "floats" else len(self.spans)

    def values(self, record: bytes) -> list[bytes] | NDArray[np.int64] | NDArray[np.float32]:
        """Returns a copy of the values."""
        pieces = [record[start:end] for start, end in self.spans]
        if self.kind == "floats":
            return np.frombuffer(b"".join(pieces), "<f4").astype(np.float32)
        return _integers(b"".join(pieces)) if self.kind == "ints" else pieces


@dataclass(frozen=True)
class FeatureMap:
    """The names of the features that hold image and label, and the encoding of the image.

    Args:
        image: the feature with the image.
        label: the feature with the class, an integer or text; None if there is none, then all labels are 0.
        coding: ``encoded`` for an image file (JPEG, PNG, …), ``raw`` for bytes of pixels, ``floats`` for a list.
        layout: the order of raw pixels and floats.
        shape: height, width, channels, whatever the layout; or any shape for values that are not an image.
        height: the feature with the height, if sizes differ.
        width: the feature with the width.
        dtype: of raw pixels, little endian.
        first_label: the number of the first class, 1 if labels are counted from 1.
    """

    image: str = "image/encoded"
    label: str | None = "image/class/label"
    coding: Coding = "encoded"
    layout: Layout = "hwc"
    shape: tuple[int, ...] | None = None
    height: str | None = None
    width: str | None = None
    dtype: RawType = "uint8"
    first_label: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (
            ("coding", self.coding, get_args(Coding)),
            ("layout", self.layout, get_args(Layout)),
            ("dtype", self.dtype, get_args(RawType)),
        ):
            if value not in known:
                raise DataError(f"{name} of a feature map must be one of {', '.join(known)}, not {value!r}.")
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
            if not self.shape or min(self.shape) < 1 or math.prod(self.shape) > 1 << 40:
                raise DataError(f"{self.shape} is not the shape of an image: all sizes must be at least 1.")
        if (self.height is None) != (self.width is None):
            raise DataError("a feature map names the features of both height and width, or neither.")
        if self.coding == "raw" and self.shape is None and self.height is None:
            raise DataError(
                "raw images need --record_shape height,width,channels, or --record_height and --record_width."
            )
        if self.layout == "chw" and self.shape is not None and len(self.shape) != 3:
            raise DataError(f"layout chw needs a shape of height, width, channels, not {self.shape}.")

    def names(self) -> tuple[str, ...]:
        """Returns the names of the features."""
        return tuple(name for name in (self.image, self.label, self.height, self.width) if name is not None)

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {**asdict(self), "shape": None if self.shape is None else list(self.shape)}

    def stored_dtype(self) -> np.dtype[np.generic]:
        """Returns the type of raw pixels and floats in a record."""
        return np.dtype("float32" if self.coding == "floats" else self.dtype).newbyteorder("<")

    def stored_shape(self, length: int, height: int, width: int) -> tuple[int, ...]:
        """Returns the shape of a raw or float image of ``length`` bytes.

        Height and width are those of the record, 0 if unknown.

        Raises:
            ValueError: if the number of bytes does not match, with both sizes.
        """
        dtype = self.stored_dtype()
        shape = self.shape
        if shape is None and self.height is not None:
            pixels = height * width * dtype.itemsize
            if not pixels or not length or length % pixels:
                raise ValueError(f"its image has {length:,} bytes, but {height} × {width} pixels of {dtype.name}")
            return height, width, length // pixels
        if shape is None:
            shape = (length // dtype.itemsize,)
        if (needed := math.prod(shape) * dtype.itemsize) != length:
            size = " × ".join(map(str, shape))
            raise ValueError(f"its image has {length:,} bytes, but {size} of {dtype.name} needs {needed:,}")
        return shape

    def array(self, payload: bytes, height: int, width: int) -> NDArray[np.generic]:
        """Returns a raw or float image as height × width × channels, or values in their shape.

        Raises:
            ValueError: if the number of bytes does not match, with both sizes.
        """
        shape = self.stored_shape(len(payload), height, width)
        dtype = self.stored_dtype()
        values = np.frombuffer(payload, dtype).astype(dtype.newbyteorder("="), copy=False)
        if self.layout == "chw" and len(shape) == 3:
            return np.ascontiguousarray(values.reshape(shape[2], *shape[:2]).transpose(1, 2, 0))
        return values.reshape(shape)


def _bytes(record: bytes, start: int, end: int) -> NDArray[np.uint8]:
    return np.frombuffer(record, np.uint8, end - start, start)


def encode_example(features: Mapping[str, Value]) -> bytes:
    """Encodes an Example. The bytes do not depend on the order of the features."""
    entries = []
    for name in sorted(features):
        feature = _encode_feature(name, features[name])
        entries.append(_delimited(1, _delimited(1, name.encode()) + _delimited(2, feature)))
    return _delimited(1, b"".join(entries)) if entries else b""


def find_features(record: bytes, names: Collection[str] | None = None) -> dict[str, FeatureSpans]:
    """Returns the positions of the features without copying them, of all or of those in ``names``.

    Raises:
        ValueError: if the bytes are not an Example, with the reason.
    """
    wanted = None if names is None else {name.encode(): name for name in names}
    entries: dict[bytes, list[tuple[int, int]]] = {}
    for number, wire, start, end in fields(record, 0, len(record)):
        if (number, wire) != (1, DELIMITED):
            continue
        for inner, inner_wire, entry_start, entry_end in fields(record, start, end):
            if (inner, inner_wire) != (1, DELIMITED):
                continue
            key, values = b"", []
            for part, part_wire, part_start, part_end in fields(record, entry_start, entry_end):
                if part_wire == DELIMITED and part == 1:
                    key = record[part_start:part_end]
                elif part_wire == DELIMITED and part == 2:
                    values.append((part_start, part_end))
            if wanted is None or key in wanted:
                entries[key] = values  # the last of several equal keys wins
    found = {}
    for key, values in entries.items():
        try:
            found[key.decode()] = _find_feature(record, values)
        except UnicodeDecodeError as error:
            raise ValueError("the name of a feature is not text") from error
    return found


def describe_example(record: bytes) -> list[str]:
    """Returns one line per feature with name, kind and size, sorted by name."""
    lines = []
    features = sorted(find_features(record).items())
    for name, feature in features[:_MOST_SHOWN]:
        name = name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}…"
        count = feature.count(record)
        if feature.kind == "bytes":
            size = f"{feature.size():,} bytes" if count == 1 else f"{count:,} values of {feature.size():,} bytes"
        elif not count:
            size = "empty"
        else:
            size = f"{count:,} {'integer' if feature.kind == 'ints' else 'float'}{'s' if count != 1 else ''}"
        lines.append(f"{name}: {size}")
    if len(features) > _MOST_SHOWN:
        lines.append(f"… and {len(features) - _MOST_SHOWN:,} more")
    return lines


def _find_feature(record: bytes, messages: Sequence[tuple[int, int]]) -> FeatureSpans:
    kind: Kind | None = None
    spans: list[tuple[int, int]] = []
    for message in messages:
        for number, wire, list_start, list_end in fields(record, *message):
            if number not in _KINDS or wire != DELIMITED:
                continue
            if kind != _KINDS[number]:
                kind, spans = _KINDS[number], []
            for inner, inner_wire, start, end in fields(record, list_start, list_end):
                # Numbers are packed in one field, or each has a field of its own.
                fits = inner_wire == DELIMITED or (kind, inner_wire) in (("floats", FIXED32), ("ints", VARINT))
                if inner != 1 or not fits:
                    continue
                if kind == "floats" and (end - start) % 4:
                    raise ValueError(f"a list of floats at byte {start} has {end - start:,} bytes, not a multiple of 4")
                if kind == "ints" and end > start and record[end - 1] >= 0x80:
                    raise ValueError(f"a number is cut off at byte {end}")
                if len(spans) == _MOST_SPANS:
                    raise ValueError(f"a feature has more than {_MOST_SPANS:,} separate values")
                spans.append((start, end))
    return FeatureSpans(kind, tuple(spans))


def _integers(packed: bytes) -> NDArray[np.int64]:
    numbers, at = [], 0
    while at < len(packed):
        number, at = varint(packed, at, len(packed))
        numbers.append(number)
    return np.array(numbers, np.uint64).astype(np.int64)


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _delimited(number: int, content: bytes) -> bytes:
    return _encode_varint(number << 3 | DELIMITED) + _encode_varint(len(content)) + content


def _encode_feature(name: str, value: Value) -> bytes:
    values: Any = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, np.ndarray | np.generic):
        values = value.reshape(-1).tolist()
    if not len(values):
        return b""
    if all(isinstance(part, bytes | str) for part in values):
        parts = [part.encode() if isinstance(part, str) else part for part in values]
        return _delimited(1, b"".join(_delimited(1, part) for part in parts))
    if all(isinstance(part, int | np.integer) and -(1 << 63) <= part < 1 << 63 for part in values):
        return _delimited(3, _delimited(1, b"".join(_encode_varint(int(part) & MASK64) for part in values)))
    numbers = all(isinstance(part, int | float | np.number) for part in values)
    if numbers and any(isinstance(part, float | np.floating) for part in values):
        return _delimited(2, _delimited(1, np.asarray(values, "<f4").tobytes()))
    raise ValueError(f"feature {name}: {value!r:.50} is not bytes, text or 64-bit numbers")
