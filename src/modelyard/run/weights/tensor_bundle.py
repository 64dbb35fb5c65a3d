"""Reads the files of TensorFlow's checkpoints, ``PREFIX.index`` and ``PREFIX.data-…``, without TensorFlow.

The index is a sorted table in LevelDB's format: keys with messages that say where a tensor is. The files are not
trusted, and TensorFlow's own reader ends the process at some damage. Here every length and checksum is checked. Errors
are `ValueError`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from modelyard.errors import CheckpointError
from modelyard.system.protobuf import FIXED32, VARINT, fields, messages, varint
from modelyard.system.untrusted import check_regular, open_regular, read_regular

STRING, BFLOAT16 = 7, 14
_DTYPES = {
    1: "f4", 2: "f8", 3: "i4", 4: "u1", 5: "i2", 6: "i1", 9: "i8", 10: "?", BFLOAT16: "u2", 17: "u2", 19: "f2",
    22: "u4", 23: "u8",
}  # fmt: skip
"""TensorFlow's numbers for types. bfloat16 becomes float32 when it is read."""
_MAGIC = 0xDB4775248B80FB57
_FOOTER, _TRAILER = 48, 5
_LARGEST_INDEX = 1 << 28
_MOST_ENTRIES = 1 << 20
_MOST_AXES = 32
_FULL = -1  # the length of a slice along an axis that is not divided

Slice = tuple[tuple[int, int], ...]
"""Start and length along each axis."""


@dataclass
class Entry:
    """A tensor, or a slice of one: its type and shape, and where its bytes are."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int
    slices: list[Slice]


class TensorBundle:
    """The tensors of a checkpoint.

    Args:
        prefix: the path of its files without ``.index``.

    Raises:
        ValueError: if the index is damaged.
        OSError: if it can't be read.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index = read_regular(Path(f"{prefix}.index"), _LARGEST_INDEX, CheckpointError)
        self._table = dict(_table(index))
        header = self._table.pop(b"", None)
        if header is None:
            raise ValueError("its index has no header")
        facts = _numbers(header)
        self._shards = facts.get(1, 1)
        self._order: Literal["<", ">"] = ">" if facts.get(2) else "<"
        # Slices have keys that begin with 0, and are found by the tensor that they belong to.
        self.entries = {_key(key): _entry(value) for key, value in self._table.items() if not key.startswith(b"\0")}

    def is_numeric(self, key: str) -> bool:
        """Returns whether a tensor holds numbers; no truth values, no text."""
        return self.entries[key].dtype in _DTYPES and _DTYPES[self.entries[key].dtype] != "?"

    def nbytes(self, key: str) -> int:
        """Returns the bytes of a tensor of numbers, as its entry declares them."""
        entry = self.entries[key]
        return math.prod(entry.shape) * np.dtype(_DTYPES[entry.dtype]).itemsize

    def stored_bytes(self) -> int:
        """Returns the bytes of the data files."""
        found = 0
        for shard in range(min(self._shards, _MOST_ENTRIES)):
            path = self._data_file(shard)
            with contextlib.suppress(FileNotFoundError):
                check_regular(path, CheckpointError)
                found += path.stat().st_size
        return found

    def read(self, key: str) -> NDArray[Any]:
        """Returns a tensor of numbers. Check `nbytes` of all tensors first."""
        entry = self.entries[key]
        if not entry.slices:
            return self._array(entry, key)
        whole: NDArray[Any] | None = None
        filled = 0
        for part in entry.slices:
            message = self._table.get(_slice_key(key, part))
            if message is None:
                raise ValueError(f"a slice of {key} is missing")
            piece = self._array(_entry(message), key)
            if whole is None:
                whole = np.zeros(entry.shape, piece.dtype)
            where = tuple(slice(start, None if length == _FULL else start + length) for start, length in part)
            if len(part) != whole.ndim or whole[where].shape != piece.shape:
                raise ValueError(f"a slice of {key} does not fit into it")
            whole[where] = piece
            filled += piece.size
            if filled > whole.size:
                break
        if whole is None or filled != whole.size:
            raise ValueError(f"the slices of {key} are not exactly it")
        return whole

    def read_text(self, key: str) -> bytes:
        """Returns a tensor that is one text: a length, a checksum of it, and the bytes."""
        entry = self.entries[key]
        if entry.dtype != STRING or entry.shape:
            raise ValueError(f"{key} is not one text")
        raw = self._bytes(entry, key)
        length, at = varint(raw, 0, len(raw))
        if at + 4 + length != len(raw):
            raise ValueError(f"{key} is cut off")
        return raw[at + 4 :]

    def _array(self, entry: Entry, key: str) -> NDArray[Any]:
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{key} has the unsupported type {entry.dtype}")
        dtype = np.dtype(_DTYPES[entry.dtype]).newbyteorder(self._order)
        if math.prod(entry.shape) * dtype.itemsize != entry.size:
            raise ValueError(f"{key} of shape {entry.shape} has {entry.size:,} bytes")
        raw = self._bytes(entry, key)
        if google_crc32c.value(raw) != _unmasked(entry.crc):
            raise ValueError(f"{key} does not match its checksum")
        array = np.frombuffer(bytearray(raw), dtype).astype(dtype.newbyteorder("="), copy=False).reshape(entry.shape)
        return (array.astype(np.uint32) << 16).view(np.float32) if entry.dtype == BFLOAT16 else array

    def _bytes(self, entry: Entry, key: str) -> bytes:
        with open_regular(self._data_file(entry.shard), CheckpointError) as file:
            if entry.offset + entry.size > os.fstat(file.fileno()).st_size:
                raise ValueError(f"{key} is beyond the end of its file")
            file.seek(entry.offset)
            return file.read(entry.size)

    def _data_file(self, shard: int) -> Path:
        if not 0 <= shard < self._shards < 100_000:
            raise ValueError(f"it has no data file {shard}")
        return Path(f"{self.prefix}.data-{shard:05}-of-{self._shards:05}")


# -- the index --------------------------------------------------------------------------------------------------------


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a sorted table."""
    footer = data[-_FOOTER:]
    if len(footer) < _FOOTER or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("its index is cut off, or of another format")
    at = 0
    for _ in range(2):  # a block that nobody needs
        _, at = varint(footer, at, _FOOTER)
    start, at = varint(footer, at, _FOOTER)
    size, _ = varint(footer, at, _FOOTER)
    entries = copied = 0
    for _, handle in _block(data, start, size):
        inner, at = varint(handle, 0, len(handle))
        length, _ = varint(handle, at, len(handle))
        for key, value in _block(data, inner, length):
            entries, copied = entries + 1, copied + len(key) + len(value)
            # Blocks may be the same, and keys repeat the beginning of the one before.
            if entries > _MOST_ENTRIES or copied > 100 * len(data) + (1 << 20):
                raise ValueError("its index has too many entries")
            yield key, value


def _block(data: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    end = start + size
    if end + _TRAILER > len(data) or size < 4:
        raise ValueError("a block of its index is beyond its end")
    if google_crc32c.value(data[start : end + 1]) != _unmasked(
        int.from_bytes(data[end + 1 : end + _TRAILER], "little")
    ):
        raise ValueError("a block of its index does not match its checksum")
    if data[end]:
        raise ValueError("its index is compressed. Load it with TensorFlow and save it again")
    end -= 4 * int.from_bytes(data[end - 4 : end], "little") + 4  # a list of offsets, for searching
    if end < start:
        raise ValueError("a block of its index is damaged")
    key, at = b"", start
    while at < end:
        shared, at = varint(data, at, end)
        own, at = varint(data, at, end)
        length, at = varint(data, at, end)
        if shared > len(key) or at + own + length > end:
            raise ValueError("an entry of its index is damaged")
        key = key[:shared] + data[at : at + own]
        at += own
        yield key, data[at : at + length]
        at += length


def _unmasked(stored: int) -> int:
    rotated = (stored - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def _key(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise ValueError("a key of its index is not text") from error


def _numbers(message: bytes) -> dict[int, int]:
    """Returns the numbers of a message by their fields."""
    found = {}
    for number, wire, start, end in fields(message, 0, len(message)):
        if wire == VARINT:
            found[number] = varint(message, start, end)[0]
        elif wire == FIXED32:
            found[number] = int.from_bytes(message[start:end], "little")
    return found


def _entry(message: bytes) -> Entry:
    numbers = _numbers(message)
    shape = [_numbers(axis).get(1, 0) for part in messages(message, 2) for axis in messages(part, 2)]
    if len(shape) > _MOST_AXES or any(size >= 1 << 62 for size in shape):
        raise ValueError("an entry of its index has no valid shape")
    slices = [
        tuple((axis.get(1, 0), axis.get(2, _FULL)) for axis in map(_numbers, messages(part, 1)))
        for part in messages(message, 7)
    ]
    dtype, shard, offset, size, crc = (numbers.get(number, 0) for number in (1, 3, 4, 5, 6))
    return Entry(dtype, tuple(shape), shard, offset, size, crc, slices)


# -- the keys of slices, in TensorFlow's code that sorts as what it encodes --------------------------------------------


def _slice_key(name: str, part: Slice) -> bytes:
    text = name.encode().replace(b"\0", b"\0\xff")
    numbers = b"".join(_signed(start) + _signed(length) for start, length in part)
    return b"\0" + text + b"\0\x01" + _unsigned(len(part)) + numbers


def _unsigned(number: int) -> bytes:
    size = (number.bit_length() + 7) // 8
    return bytes([size]) + number.to_bytes(size, "big")


def _signed(number: int) -> bytes:
    """Encodes a number; its first bits, as many as it has bytes, say how many bytes it has."""
    size = (number if number >= 0 else ~number).bit_length() // 7 + 1
    value = number & ((1 << 8 * size) - 1)
    return (value ^ (((1 << size) - 1) << (8 * size - size))).to_bytes(size, "big")
