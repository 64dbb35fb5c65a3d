"""TFRecord files: records one after the other, each with its length and two checksums. Read without TensorFlow.

A record is its length (8 bytes), a checksum of that (4), the data, and a checksum of the data (4), all little endian.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from modelyard.errors import DataError
from modelyard.system.files import explain, whole_file

HEAD, TAIL = 12, 4
"""Bytes of a record before and behind its data."""

_OPEN_FILES = 256
_BLOCK = 1 << 20
_LARGEST = (1 << 32) - 1


def checksum(data: bytes) -> int:
    """The masked CRC-32C that TFRecord stores."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """A record as it stands in a file."""
    return b"".join((_head(len(data)), data, struct.pack("<I", checksum(data))))


def _head(length: int) -> bytes:
    """What stands before the data of a record."""
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", checksum(packed))


def scan(path: Path, progress: Callable[[int], None] | None = None) -> Iterator[tuple[int, bytes, int]]:
    """All records in one pass: offset, data and checksum of the data, every byte checked.

    Args:
        path: a plain file, not a compressed one.
        progress: called with the number of bytes read since the last call.

    Raises:
        DataError: at the first damaged record, naming the file and the byte offset.
    """
    with explain(path, "read", DataError), open(path, "rb", buffering=_BLOCK) as file:
        size = os.fstat(file.fileno()).st_size
        at = number = 0
        while at < size:
            length = checked_length(file.read(HEAD), path, at, size, number)
            data, stored = file.read(length), file.read(TAIL)
            crc = checked_data(data, stored, length, path, at, number)
            yield at, data, crc
            if progress is not None:
                progress(HEAD + length + TAIL)
            at += HEAD + length + TAIL
            number += 1


def checked_length(head: bytes, path: Path, at: int, size: int, number: int) -> int:
    """The length of the record whose first bytes are ``head``; it fits into the file.

    Raises:
        DataError: naming the file and the byte offset.
    """
    before = f"{number:,} whole record{'s' if number != 1 else ''}"
    if len(head) == HEAD:
        length, crc = struct.unpack("<QI", head)
        if crc != checksum(head[:8]):
            reason = "is damaged" if at else "is no TFRecord file, or damaged"
            raise DataError(
                f"{path} {reason}: the length of the record at byte {at:,} does not fit its checksum. "
                f"{before} before it."
            )
        if length > _LARGEST:
            raise DataError(f"{path}: the record at byte {at:,} has {length:,} bytes; the most is {_LARGEST:,}.")
        if at + HEAD + length + TAIL <= size:
            return int(length)
    raise DataError(f"{path} is cut off: the record at byte {at:,} is not whole. {before} before it. Copy it again.")


def checked_data(data: bytes, stored: bytes, length: int, path: Path, at: int, number: int) -> int:
    """The checksum of a record's data, which fits the ``stored`` one.

    Raises:
        DataError: naming the file and the byte offset.
    """
    if len(data) < length or len(stored) < TAIL:
        raise DataError(f"{path} is cut off: the record at byte {at:,} is not whole. Copy it again.")
    crc = checksum(data)
    if crc != int.from_bytes(stored, "little"):
        raise DataError(
            f"{path} is damaged: record {number:,} at byte {at:,} does not fit its checksum. Copy or make it again."
        )
    return crc


class RecordFile:
    """A plain TFRecord file, read at any place and from any thread.

    Few files are kept open, however many there are; one that was replaced under its name is not mixed up with the old.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._name = path, str(path)
        with explain(path, "read", DataError):
            found = path.stat()
        self.size = found.st_size
        self._mark = (found.st_dev, found.st_ino, found.st_mtime_ns)

    def read(self, at: int, length: int) -> bytes:
        """At most ``length`` bytes at the offset ``at``; fewer at the end of the file."""
        try:
            return _opened(self._name, self._mark).read(at, length)
        except OSError as error:
            with explain(self.path, "read", DataError):
                raise error

    def record(self, at: int, length: int, crc: int, number: int) -> bytes:
        """The data of the record at the offset ``at``, which is known to have this length and checksum.

        Raises:
            DataError: if it is damaged or another one, naming the file and the byte offset.
        """
        whole = self.read(at, HEAD + length + TAIL)
        data = whole[HEAD:-TAIL]
        if whole[:HEAD] == _head(length) and int.from_bytes(whole[-TAIL:], "little") == crc == checksum(data):
            return data
        # Something is wrong: once more, step by step, to say what.
        stored_length = checked_length(self.read(at, HEAD), self.path, at, self.size, number)
        data = self.read(at + HEAD, stored_length)
        stored = self.read(at + HEAD + stored_length, TAIL)
        if (stored_length, checked_data(data, stored, stored_length, self.path, at, number)) != (length, crc):
            raise DataError(
                f"{self.path} has changed since it was indexed: another record is at byte {at:,}. "
                f"If it was rewritten on purpose, delete {self.path.name}.index."
            )
        return data


class _Descriptor:
    """An open file. It is closed when the last thread that uses it lets go."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def read(self, at: int, length: int) -> bytes:
        data = os.pread(self.number, length, at)
        while 0 < len(data) < length and (more := os.pread(self.number, length - len(data), at + len(data))):
            data += more  # one call reads at most 2 GiB
        return data

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.number)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str, mark: tuple[int, int, int]) -> _Descriptor:
    return _Descriptor(path)


def compression(path: Path) -> str | None:
    """``gzip`` or ``zlib``, if the records of the file are compressed as a whole."""
    with explain(path, "read", DataError), open(path, "rb") as file:
        head = file.read(HEAD)
    if len(head) == HEAD and struct.unpack("<QI", head)[1] == checksum(head[:8]):
        return None
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    return "zlib" if len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2]) % 31 == 0 else None


def plain_file(path: Path, cache: Path | None) -> Path:
    """``path`` itself, or where its records are compressed, a plain copy in the folder ``cache``, made once.

    Raises:
        DataError: if it is damaged or cut off, or there is no folder for the copy.
    """
    kind = compression(path)
    if kind is None:
        return path
    if cache is None:
        raise DataError(
            f"{path} has no record at byte 0; it seems compressed ({kind}), and there is no folder for a plain copy."
        )
    with explain(path, "read", DataError):
        found = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}".encode()).hexdigest()[:16]
    copy = cache / "plain" / f"{key}-{path.name.removesuffix('.gz')}"
    if not copy.exists():
        with explain(copy, "write", DataError):
            copy.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(copy) as file:
                _unpack(path, kind, file)
    return copy


def _unpack(path: Path, kind: str, to: BinaryIO) -> None:
    try:
        with open(path, "rb") as raw:
            source = gzip.GzipFile(fileobj=raw) if kind == "gzip" else io.BufferedReader(_Inflating(raw))
            with source:
                while block := source.read(_BLOCK):
                    to.write(block)
    except EOFError as error:
        raise DataError(f"{path} is cut off: its compressed records end too early. Copy it again.") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path} is damaged: as {kind} it can't be unpacked ({error}), and as it is, it has no record at byte 0."
        ) from error


class _Inflating(io.RawIOBase):
    """What a zlib stream holds."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw, self.inflate = raw, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self.inflate.eof:
            block = self.inflate.unconsumed_tail or self.raw.read(_BLOCK)
            if not block:
                raise EOFError
            data = self.inflate.decompress(block, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0
