"""The TFRecord file format, without TensorFlow: a sequence of records with checksums.

A record is its length (8 bytes), a checksum of the length (4), the data, and a checksum of the data (4), all little
endian.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import google_crc32c

from modelyard import faults
from modelyard.errors import DataError
from modelyard.system.files import explain, retried, whole_file
from modelyard.system.untrusted import check_memory, check_regular, inflated, open_regular

HEAD, TAIL = 12, 4
"""Bytes of a record before and after its data."""

_OPEN_FILES = 256
_BLOCK = 1 << 20
_LARGEST = (1 << 32) - 1


def checksum(data: bytes) -> int:
    """Returns the masked CRC-32C that TFRecord uses."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def header(length: int) -> bytes:
    """Returns the bytes before the data of a record."""
    packed = struct.pack("<Q", length)
    return packed + struct.pack("<I", checksum(packed))


def frame(data: bytes) -> bytes:
    """Returns ``data`` as a record."""
    return b"".join((header(len(data)), data, struct.pack("<I", checksum(data))))


def scan(path: Path, progress: Callable[[int], None] | None = None) -> Iterator[tuple[int, bytes, int]]:
    """Reads all records in one pass and yields offset, data and checksum of the data. Every byte is checked.

    Args:
        path: an uncompressed file.
        progress: called with the number of bytes read since the last call.

    Raises:
        DataError: at the first damaged record, with the file and the byte offset.
    """
    with explain(path, "read", DataError), open_regular(path, DataError, _BLOCK) as file:
        size = os.fstat(file.fileno()).st_size
        at = number = 0
        while at < size:
            data, crc = _read_record(file, path, at, size, number)
            yield at, data, crc
            length = HEAD + len(data) + TAIL
            if progress is not None:
                progress(length)
            at += length
            number += 1


def _read_record(file: BinaryIO, path: Path, at: int, size: int, number: int) -> tuple[bytes, int]:
    """Reads the record number ``number``, at the offset ``at``; returns its data and their checksum."""
    head = file.read(HEAD)
    if len(head) < HEAD:
        raise _cut_off(path, at, number)
    length, crc = struct.unpack("<QI", head)
    if crc != checksum(head[:8]):
        reason = "is damaged" if at else "is not a TFRecord file, or is damaged"
        raise DataError(
            f"{path} {reason}: the length of the record at byte {at:,} does not match its checksum. {_before(number)}"
        )
    if length > _LARGEST:
        raise DataError(f"{path}: the record at byte {at:,} has {length:,} bytes; the maximum is {_LARGEST:,}.")
    if at + HEAD + length + TAIL > size:
        raise _cut_off(path, at, number)
    check_memory(path, length, DataError)
    data, stored = file.read(length), file.read(TAIL)
    if len(stored) < TAIL:
        raise _cut_off(path, at, number)
    crc = checksum(data)
    if crc != int.from_bytes(stored, "little"):
        raise DataError(
            f"{path} is damaged: record {number:,} at byte {at:,} does not match its checksum. Copy or make it again."
        )
    return data, crc


def _cut_off(path: Path, at: int, number: int) -> DataError:
    return DataError(f"{path} is cut off: the record at byte {at:,} is not whole. {_before(number)} Copy it again.")


def _before(number: int) -> str:
    return f"{number:,} whole record{'s' if number != 1 else ''} before it."


class RecordFile:
    """An uncompressed TFRecord file, for reads at any offset and from any thread.

    The number of open files is limited. A file that is replaced by another one of the same name is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._name = path, str(path)
        with explain(path, "read", DataError):
            check_regular(path, DataError)
            found = path.stat()
        self.size = found.st_size
        self._version = (found.st_dev, found.st_ino, found.st_mtime_ns)

    def read(self, at: int, length: int) -> bytes:
        """Returns ``length`` bytes from the offset ``at``; fewer at the end of the file."""
        try:
            return self._read(at, length)
        except OSError:
            with explain(self.path, "read", DataError):
                return retried(self.path, self._read, at, length)

    def _read(self, at: int, length: int) -> bytes:
        try:
            faults.reach(faults.READ)
            return _opened(self._name, self._version).read(at, length)
        except OSError:
            _opened.cache_clear()  # a descriptor of a network disk may stay broken
            raise

    def record(self, at: int, length: int, crc: int, number: int) -> bytes:
        """Returns the data of the record at the offset ``at``, whose length and checksum are known.

        Raises:
            DataError: if it is damaged or another record, with the file and the byte offset.
        """
        whole = self.read(at, HEAD + length + TAIL)
        data = whole[HEAD:-TAIL]
        if whole[:HEAD] == header(length) and int.from_bytes(whole[-TAIL:], "little") == crc == checksum(data):
            return data
        # Something is wrong. Reading it step by step finds out what.
        with explain(self.path, "read", DataError), open_regular(self.path, DataError) as file:
            file.seek(at)
            data, stored_crc = _read_record(file, self.path, at, self.size, number)
        if (len(data), stored_crc) != (length, crc):
            raise DataError(
                f"{self.path} has changed since it was indexed: another record is at byte {at:,}. "
                f"If it was rewritten on purpose, delete {self.path.name}.index."
            )
        return data


class _Descriptor:
    """An open file, closed when the last thread that uses it has released it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)

    def read(self, at: int, length: int) -> bytes:
        data = os.pread(self.number, length, at)
        while 0 < len(data) < length and (more := os.pread(self.number, length - len(data), at + len(data))):
            data += more  # one call reads at most 2 GiB
        return data

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.number)


@functools.lru_cache(maxsize=_OPEN_FILES)
def _opened(path: str, version: tuple[int, int, int]) -> _Descriptor:
    return _Descriptor(path)


def compression(path: Path) -> str | None:
    """Returns ``gzip`` or ``zlib`` if the whole file is compressed, else None."""
    with explain(path, "read", DataError), open_regular(path, DataError) as file:
        head = file.read(HEAD)
    if len(head) == HEAD and struct.unpack("<QI", head)[1] == checksum(head[:8]):
        return None
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    return "zlib" if len(head) > 1 and head[0] == 0x78 and int.from_bytes(head[:2]) % 31 == 0 else None


def plain_file(path: Path, cache: Path | None) -> Path:
    """Returns ``path``, or for a compressed file an uncompressed copy in the folder ``cache``, which is made once.

    Raises:
        DataError: if the file is damaged or cut off, or there is no folder for the copy.
    """
    kind = compression(path)
    if kind is None:
        return path
    if cache is None:
        raise DataError(
            f"{path} has no record at byte 0; it seems compressed ({kind}), and there is no folder for an uncompressed "
            "copy."
        )
    with explain(path, "read", DataError):
        found = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}".encode()).hexdigest()[:16]
    copy = cache / "plain" / f"{key}-{path.name.removesuffix('.gz')}"
    if not copy.exists():
        with explain(copy, "write", DataError):
            copy.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(copy) as file:
                try:
                    for piece in inflated(path, DataError, copy.parent):
                        file.write(piece)
                except EOFError as error:
                    raise DataError(f"{path} is cut off: {error}. Copy it again.") from error
                except zlib.error as error:
                    raise DataError(
                        f"{path} is damaged: it can't be decompressed as {kind} ({error}), and it has no record at "
                        "byte 0."
                    ) from error
    return copy
