"""The wire format of `tf.train.Example`, by hand: a few named lists of bytes, floats or whole numbers.

Records are input from strangers: every length is checked against what holds it, and what does not fit is a `ValueError`
with the reason. Callers add the file and the place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["bytes", "floats", "ints"]
Value = bytes | str | int | float | Sequence[int] | Sequence[float] | Sequence[bytes] | NDArray[np.generic]
Parsed = list[bytes] | NDArray[np.int64] | NDArray[np.float32]

_KINDS: dict[int, Kind] = {1: "bytes", 2: "floats", 3: "ints"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WORD = 0xFFFFFFFFFFFFFFFF
_LONGEST = 10
"""Bytes of the longest number."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a feature is in its record.

    Args:
        kind: None for a feature without a list.
        spans: start and end in the record of each bytes value, or of runs of numbers as they are stored.
    """

    kind: Kind | None
    spans: tuple[tuple[int, int], ...]

    def count(self, record: bytes) -> int:
        """How many values it has."""
        if self.kind == "ints":
            return sum(int(np.count_nonzero(_view(record, *span) < 0x80)) for span in self.spans)
        return self.size() // 4 if self.kind == "floats" else len(self.spans)

    def size(self) -> int:
        """How many bytes its values take."""
        return sum(end - start for start, end in self.spans)

    def values(self, record: bytes) -> Parsed:
        """Its values, copied out of the record."""
        pieces = [record[start:end] for start, end in self.spans]
        if self.kind == "floats":
            return np.frombuffer(b"".join(pieces), "<f4").astype(np.float32)
        return _integers(b"".join(pieces)) if self.kind == "ints" else pieces


def encode_example(features: Mapping[str, Value]) -> bytes:
    """The bytes of an Example; the same features give the same bytes, whatever their order.

    Example:
        >>> parse_example(encode_example({"label": 3}))["label"]
        array([3])
    """
    entries = []
    for name in sorted(features):
        feature = _encode_feature(name, features[name])
        entries.append(_delimited(1, _delimited(1, name.encode()) + _delimited(2, feature)))
    return _delimited(1, b"".join(entries)) if entries else b""


def parse_example(record: bytes) -> dict[str, Parsed]:
    """All features of a record.

    Raises:
        ValueError: if the bytes are no Example, with the reason.
    """
    return {name: found.values(record) for name, found in find_features(record).items()}


def find_features(record: bytes, names: Collection[str] | None = None) -> dict[str, Found]:
    """Where the features are, without copying them; by default of all, else of those in ``names`` that there are.

    Raises:
        ValueError: if the bytes are no Example, with the reason.
    """
    wanted = None if names is None else {name.encode(): name for name in names}
    entries: dict[bytes, list[tuple[int, int]]] = {}
    for number, wire, start, end in _fields(record, 0, len(record)):
        if (number, wire) != (1, _BYTES):
            continue
        for inner, inner_wire, entry_start, entry_end in _fields(record, start, end):
            if (inner, inner_wire) != (1, _BYTES):
                continue
            key, values = b"", []
            for part, part_wire, part_start, part_end in _fields(record, entry_start, entry_end):
                if part_wire == _BYTES and part == 1:
                    key = record[part_start:part_end]
                elif part_wire == _BYTES and part == 2:
                    values.append((part_start, part_end))
            if wanted is None or key in wanted:
                entries[key] = values  # of equal keys the last one counts
    found = {}
    for key, values in entries.items():
        try:
            found[key.decode()] = _find_feature(record, values)
        except UnicodeDecodeError as error:
            raise ValueError("the name of a feature is not text") from error
    return found


def describe_example(record: bytes) -> list[str]:
    """A line a feature: name, kind and size, by name."""
    lines = []
    for name, found in sorted(find_features(record).items()):
        count = found.count(record)
        if found.kind == "bytes":
            sizes = f"{found.size():,} bytes" if count == 1 else f"{count:,} values of {found.size():,} bytes"
            lines.append(f"{name}: {sizes}")
        elif found.kind is None or not count:
            lines.append(f"{name}: empty")
        else:
            word = "whole number" if found.kind == "ints" else "float"
            lines.append(f"{name}: {count:,} {word}{'s' if count != 1 else ''}")
    return lines


def _varint(record: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and the place behind it."""
    value = 0
    for shift in range(0, 7 * _LONGEST, 7):
        if at >= end:
            raise ValueError(f"a number is cut off at byte {at}")
        byte = record[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _WORD, at
    raise ValueError(f"a number of more than {_LONGEST} bytes ends at byte {at}")


def _fields(record: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type, start and end of each field of a message."""
    while at < end:
        tag, at = _varint(record, at, end)
        number, wire = tag >> 3, tag & 7
        start = at
        if wire == _BYTES:
            length, start = _varint(record, at, end)
            at = start + length
        elif wire == _VARINT:
            _, at = _varint(record, at, end)
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"byte {start} begins a field of unknown type {wire}")
        if not number:
            raise ValueError(f"byte {start} begins a field with the number 0")
        if at > end:
            raise ValueError(f"a field at byte {start} reaches {at - end:,} bytes beyond its end")
        yield number, wire, start, at


def _find_feature(record: bytes, places: Sequence[tuple[int, int]]) -> Found:
    kind: Kind | None = None
    spans: list[tuple[int, int]] = []
    for place in places:
        for number, wire, list_start, list_end in _fields(record, *place):
            if number not in _KINDS or wire != _BYTES:
                continue
            if kind != _KINDS[number]:
                kind, spans = _KINDS[number], []
            for inner, inner_wire, start, end in _fields(record, list_start, list_end):
                # Numbers come packed in one field, or each in a field of its own.
                fits = inner_wire == _BYTES or (kind, inner_wire) in (("floats", _FIXED32), ("ints", _VARINT))
                if inner != 1 or not fits:
                    continue
                if kind == "floats" and (end - start) % 4:
                    raise ValueError(f"a list of floats at byte {start} has {end - start:,} bytes, no multiple of 4")
                if kind == "ints" and end > start and record[end - 1] >= 0x80:
                    raise ValueError(f"a number is cut off at byte {end}")
                spans.append((start, end))
    return Found(kind, tuple(spans))


def _view(record: bytes, start: int, end: int) -> NDArray[np.uint8]:
    return np.frombuffer(record, np.uint8, end - start, start) if end > start else np.empty(0, np.uint8)


def _integers(packed: bytes) -> NDArray[np.int64]:
    """Numbers of 7 bits a byte; the last byte of each is below 128."""
    data = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(data < 0x80) + 1
    if not len(ends):
        return np.empty(0, np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    lengths = ends - starts
    if lengths.max() > _LONGEST:
        raise ValueError(f"a number of more than {_LONGEST} bytes")
    place = np.arange(len(data)) - np.repeat(starts, lengths)
    bits = (data & 0x7F).astype(np.uint64) << (place * 7).astype(np.uint64)
    return np.add.reduceat(bits, starts).astype(np.int64)


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _delimited(number: int, content: bytes) -> bytes:
    return _number(number << 3 | _BYTES) + _number(len(content)) + content


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
        return _delimited(3, _delimited(1, b"".join(_number(int(part) & _WORD) for part in values)))
    numbers = all(isinstance(part, int | float | np.number) for part in values)
    if numbers and any(isinstance(part, float | np.floating) for part in values):
        return _delimited(2, _delimited(1, np.asarray(values, "<f4").tobytes()))
    raise ValueError(f"feature {name}: {value!r:.50} is neither bytes, text nor numbers of 64 bits")
