"""Replaces a C function for the callers in some shared libraries. For Linux on x86-64 and aarch64, elsewhere nothing.

A library calls functions of others through a table of addresses, which the dynamic linker fills in (the ELF
specification, "Relocation"; ``man 3 dl_iterate_phdr``). This module finds the entries of one function and changes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LOAD, _DYNAMIC, _RELRO = 1, 2, 0x6474E552
_PLT_BYTES, _STRINGS, _SYMBOLS, _RELOCATIONS, _RELOCATION_BYTES, _STRING_BYTES, _PLT = 2, 5, 6, 7, 8, 10, 23
_TYPES = {"x86_64": (6, 7), "aarch64": (1025, 1026)}
"""GLOB_DAT and JUMP_SLOT: an entry that holds the address of a function."""
_RELOCATION = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
_SYMBOL = np.dtype([("name", "<u4"), ("rest", "V20")])


class _Header(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("physical", ctypes.c_uint64),
        ("file_bytes", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("align", ctypes.c_uint64),
    )


class _Library(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.POINTER(_Header)),
        ("count", ctypes.c_uint16),
    )


@contextlib.contextmanager
def replaced(function: str, by: Any, folder: Path) -> Iterator[int]:
    """Makes the loaded libraries below ``folder`` call another function while the block runs.

    Args:
        function: the name of a C function, such as ``bind``.
        by: a ctypes function with the same arguments.
        folder: where the libraries are.

    Yields:
        The number of entries that were changed; 0 where that is not supported.
    """
    entries = _entries(function, folder)
    before = [ctypes.c_uint64.from_address(at).value for at, _ in entries]
    try:
        for at, guarded in entries:
            _write(at, ctypes.cast(by, ctypes.c_void_p).value or 0, guarded)
        yield len(entries)
    finally:
        for (at, guarded), value in zip(entries, before, strict=True):
            _write(at, value, guarded)


def _entries(function: str, folder: Path) -> list[tuple[int, bool]]:
    """Returns the addresses of the entries of ``function``, and whether they are in memory that is read-only."""
    types = _TYPES.get(platform.machine(), ())
    if sys.platform != "linux" or not types or ctypes.sizeof(ctypes.c_void_p) != 8:
        return []
    found = []
    for base, headers in _libraries(folder):
        read_only = [
            range(base + h.address, _whole_pages(base + h.address + h.bytes)) for h in headers if h.type == _RELRO
        ]
        ends = [h.address + h.bytes for h in headers if h.type == _LOAD]
        for header in headers:
            if header.type == _DYNAMIC:
                for at in _entries_of(function, base, max(ends), base + header.address, types):
                    found.append((at, any(at in area for area in read_only)))
    return found


def _whole_pages(end: int) -> int:
    return end - end % mmap.PAGESIZE  # the linker leaves the part of a page that follows writable


def _libraries(folder: Path) -> list[tuple[int, list[_Header]]]:
    """Returns the base address and the program headers of the loaded libraries below ``folder``."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
    found: list[tuple[int, bytes, list[_Header]]] = []

    def note(library: Any, size: int, data: Any) -> int:
        it = library.contents
        headers = [_Header.from_buffer_copy(it.headers[number]) for number in range(it.count)]
        found.append((it.base, it.name or b"", headers))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(kind(note), None)
    inside = f"{folder}/".encode()
    return [(base, headers) for base, name, headers in found if name.startswith(inside)]


def _entries_of(function: str, base: int, size: int, dynamic: int, types: tuple[int, ...]) -> list[int]:
    values: dict[int, int] = {}
    while (tag := ctypes.c_int64.from_address(dynamic).value) != 0:
        values[tag] = ctypes.c_uint64.from_address(dynamic + 8).value
        dynamic += 16

    def memory(tag: int, count: int, dtype: Any) -> NDArray[Any]:
        at = values.get(tag, 0)
        at += base if at < base else 0  # glibc makes addresses of them, other linkers keep offsets
        if not count or not base <= at < base + size:
            return np.empty(0, dtype)
        buffer = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(at)
        return np.frombuffer(buffer, dtype)

    tables = ((_PLT, _PLT_BYTES), (_RELOCATIONS, _RELOCATION_BYTES))
    lists = [memory(tag, values.get(length, 0) // _RELOCATION.itemsize, _RELOCATION) for tag, length in tables]
    relocations = np.concatenate([some[np.isin(some["type"], types)] for some in lists])
    if not len(relocations):
        return []
    symbols = memory(_SYMBOLS, int(relocations["symbol"].max()) + 1, _SYMBOL)
    strings = memory(_STRINGS, values.get(_STRING_BYTES, 0), np.uint8)
    if not len(symbols) or not len(strings):
        return []
    name = np.frombuffer(function.encode() + b"\0", np.uint8)
    places = np.minimum(symbols["name"][relocations["symbol"]], len(strings) - len(name))
    wanted = (strings[places[:, None] + np.arange(len(name))] == name).all(axis=1)
    return [base + int(offset) for offset in relocations["offset"][wanted]]


def _write(at: int, value: int, read_only: bool) -> None:
    page = at - at % mmap.PAGESIZE
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if read_only and protect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    ctypes.c_uint64.from_address(at).value = value
    if read_only:
        protect(page, mmap.PAGESIZE, mmap.PROT_READ)
