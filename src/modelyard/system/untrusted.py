"""Reads files that may come from anyone: only regular files, and nothing that expands without limit.

The limits on expansion are in this module only. A file is refused if its content has more than 256 MiB and is more than
100 times as large as the file (or ``MODELYARD_MAX_EXPANSION`` times), or if it does not fit in memory or on the disk.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from modelyard import faults
from modelyard.errors import UserError
from modelyard.system.files import retried
from modelyard.system.machine import available_memory

EXPANSION_VARIABLE = "MODELYARD_MAX_EXPANSION"
EXPANSION = 100
"""The largest ratio of content to file. Images compress 2 to 20 times, deflate reaches 1,032."""
ALWAYS_ALLOWED = 1 << 28
"""Bytes that a file of any size may expand to."""

_BLOCK = 1 << 20
_STEP = 1 << 26  # bytes between looks at the free memory or disk
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib detects which from the header
_OTHERS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

# -- regular files --------------------------------------------------------------------------------------------------


def check_regular(path: Path, kind: type[UserError], mode: int | None = None) -> None:
    """Refuses what is not a regular file: reading it could have no end. Links are followed.

    Args:
        path: the file.
        kind: the class of the error.
        mode: of the file, if it is open.

    Raises:
        OSError: if there is nothing at the path.
    """
    mode = path.stat().st_mode if mode is None else mode
    if not stat.S_ISREG(mode):
        what = next((name for test, name in _OTHERS if test(mode)), "something else")
        link = f"a link to {path.resolve()}, which is {what}" if path.is_symlink() else what
        raise kind(f"{path} is {link}; only regular files are read.")


def open_regular(path: Path, kind: type[UserError], buffer_size: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """Opens a regular file for reading.

    Raises:
        UserError: of the class ``kind``, if it is a device, a pipe, a socket or a folder.
        OSError: if it can't be opened.
    """
    check_regular(path, kind)  # opening a device may already have an effect
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a pipe by now: never wait for it
    try:
        check_regular(path, kind, os.fstat(handle).st_mode)
        return io.BufferedReader(io.FileIO(handle), buffer_size)
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, most: int, kind: type[UserError]) -> bytes:
    """Returns the content of a regular file of at most ``most`` bytes; reads again after an error that may pass.

    Raises:
        UserError: of the class ``kind``, if it is larger, or not a regular file.
        OSError: if it can't be read.
    """
    return retried(path, _read, path, most, kind)


def _read(path: Path, most: int, kind: type[UserError]) -> bytes:
    faults.reach(faults.READ)
    with open_regular(path, kind) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise kind(f"{path} has {size:,} bytes; such a file may have at most {most:,}.")
        return file.read(size)  # not to the end: some files of the system have none


# -- expansion ------------------------------------------------------------------------------------------------------


def check_expansion(path: Path, content: int, stored: int, kind: type[UserError]) -> None:
    """Refuses a file whose content is far larger than the file.

    Args:
        path: the file.
        content: bytes of its content, as far as they are known.
        stored: bytes of the file.
        kind: the class of the error.
    """
    if content <= ALWAYS_ALLOWED:
        return
    limit, ratio = _largest_ratio(kind), content / max(stored, 1)
    if ratio > limit:
        raise kind(
            f"{path} has {stored:,} bytes and expands to {content:,} or more, {ratio:,.0f} times as much; the limit is "
            f"{limit:,.0f}. If you trust this file, set {EXPANSION_VARIABLE}, to 1100 for example."
        )


def check_memory(path: Path, needed: int, kind: type[UserError], advice: str = "") -> None:
    """Refuses a file whose content does not fit in memory."""
    if needed > ALWAYS_ALLOWED and needed > (free := available_memory()):
        raise kind(f"{path} needs {needed:,} bytes of memory, but {free:,} are free.{advice and f' {advice}'}")


def check_archive(path: Path, archive: zipfile.ZipFile, kind: type[UserError]) -> None:
    """Refuses a zip archive that expands too far, or that only older or slower methods than deflate can unpack."""
    members = archive.infolist()
    for member in members:
        # Python unpacks a whole block of the others at once, and a block of bzip2 may have any size.
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise kind(f"{path}: {member.filename!r} is compressed by method {member.compress_type}; use deflate.")
    check_expansion(path, sum(member.file_size for member in members), path.stat().st_size, kind)


def inflated(path: Path, kind: type[UserError], disk: Path | None = None) -> Iterator[bytes]:
    """Yields the content of a file that is compressed with gzip or zlib, and watches how far it expands.

    Args:
        path: the file.
        kind: the class of the errors.
        disk: the folder that the content is written to; None if it is kept in memory.

    Raises:
        UserError: of the class ``kind``, if it expands too far.
        EOFError: if it is cut off.
        zlib.error: if it is damaged.
        OSError: if it can't be read.
    """
    inflate, data, done = zlib.decompressobj(_GZIP_OR_ZLIB), b"", 0
    with open_regular(path, kind) as file:
        stored = os.fstat(file.fileno()).st_size
        while data := data or file.read(_BLOCK):
            if inflate.eof:  # gzip files may be concatenated, and padded with zeros
                data = data.lstrip(b"\0")
                if not data:
                    continue
                inflate = zlib.decompressobj(_GZIP_OR_ZLIB)
            piece = inflate.decompress(data, _BLOCK)
            data = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            done += len(piece)
            check_expansion(path, done, stored, kind)
            if done // _STEP > (done - len(piece)) // _STEP:
                _check_room(path, done, disk, kind)
            yield piece
    # All input is used up, so what is left has no limit but is at most a block.
    yield inflate.flush()
    if not inflate.eof:
        raise EOFError("its compressed data ends too early")


def _check_room(path: Path, done: int, disk: Path | None, kind: type[UserError]) -> None:
    """Refuses to go on if memory or disk are nearly full: other programs on this machine need them, too."""
    if disk is None:
        if available_memory() < _STEP:
            raise kind(f"{path} expands to more than {done:,} bytes, and the memory is full.")
        return
    usage = shutil.disk_usage(disk)
    if usage.free < min(1 << 30, usage.total // 20):
        raise kind(
            f"{path} expands to more than {done:,} bytes, and the disk of {disk} is nearly full: {usage.free:,} bytes "
            "are free. What was written is removed. Free some space, or choose another folder with --cache_dir."
        )


def _largest_ratio(kind: type[UserError]) -> float:
    text = os.environ.get(EXPANSION_VARIABLE, "")
    try:
        ratio = float(text or EXPANSION)
    except ValueError:
        ratio = 0.0
    if not ratio >= 1:
        raise kind(f"the environment variable {EXPANSION_VARIABLE} must be a number of at least 1, not {text!r}.")
    return ratio
