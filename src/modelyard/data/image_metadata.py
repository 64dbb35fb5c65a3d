"""Checks image files before they are decoded: small files must not cost much memory or time.

Pillow copies the data of each tag of a TIFF file or of EXIF. Tags may share their data, so some versions of Pillow can
be made to fill the memory. A progressive JPEG may have any number of scans, and each passes over the whole image.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_SIZES = np.array([0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8], np.int64)
"""Bytes of a value, by the type of a tag."""
_STRIPS = (273, 279, 324, 325)  # offsets and lengths of strips and tiles: Pillow makes an object for each
_MOST_STRIPS = 1 << 20
_FOLDERS = (34665, 34853, 40965)  # EXIF, GPS, interoperability: tables of tags of their own
_MOST_FOLDERS = 8
_MOST_SCANS = 500
_SOI, _SOS, _PROGRESSIVE, _APP1, _APP2 = 0xD8, 0xDA, (0xC2, 0xC6, 0xCA, 0xCE), 0xE1, 0xE2
_EXIF, _MANY_IMAGES = b"Exif\0\0", b"MPF\0"


def check_jpeg(data: bytes) -> None:
    """Refuses a JPEG with far too many scans, or whose metadata declares far more than it holds.

    Raises:
        ValueError: with the reason.
    """
    at, exif, many = 2, b"", b""
    while at + 4 <= len(data) and data[at] == 0xFF and (kind := data[at + 1]) != _SOS:
        if kind == 0xFF:  # padding
            at += 1
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if kind == _APP1 and data.startswith(_EXIF, at + 4):
            exif += data[at + 4 + len(_EXIF) : end]  # Pillow joins them
        elif kind == _APP2 and data.startswith(_MANY_IMAGES, at + 4):
            many = data[at + 4 + len(_MANY_IMAGES) : end]
        elif kind in _PROGRESSIVE and (scans := data.count(b"\xff\xda", at)) > _MOST_SCANS:
            raise ValueError(f"it has {scans:,} scans; the maximum is {_MOST_SCANS}")
        at = end
    check_tags(exif)
    check_tags(many)


def check_tags(tiff: bytes) -> None:
    """Refuses a TIFF file, or EXIF, whose tags declare far more bytes than it has.

    Raises:
        ValueError: with the reason.
    """
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return
    big = tiff[2:4] in (b"+\0", b"\0+")
    width, start = (8, 8) if big else (4, 4)
    entry = np.dtype(
        [("tag", f"{order}u2"), ("type", f"{order}u2"), ("count", f"{order}u{width}"), ("value", f"{order}u{width}")]
    )
    head = np.dtype(f"{order}u{8 if big else 2}")
    folders, copied, position = [_number(tiff, start, width, order)], 0, 0
    while position < min(len(folders), _MOST_FOLDERS):
        at = folders[position]
        position += 1
        if at + head.itemsize > len(tiff):
            continue
        room = (len(tiff) - at - head.itemsize) // entry.itemsize
        count = min(_number(tiff, at, head.itemsize, order), room)
        tags = np.frombuffer(tiff, entry, count, at + head.itemsize) if count else np.empty(0, entry)
        copied += _copied(tags, len(tiff), width)
        if copied > 4 * len(tiff) + (1 << 16):
            raise ValueError(f"its tags declare {copied:,} bytes, but it has {len(tiff):,}")
        if (strips := int(tags["count"][np.isin(tags["tag"], _STRIPS)].max(initial=0))) > _MOST_STRIPS:
            raise ValueError(f"it declares {strips:,} strips; the maximum is {_MOST_STRIPS:,}")
        folders += [int(value) for value in tags["value"][np.isin(tags["tag"], _FOLDERS)] if int(value) not in folders]


def _copied(tags: Any, size: int, inline: int) -> int:
    """Returns the bytes that are copied for the tags of a file of ``size`` bytes: at most those to its end each."""
    units = _SIZES[np.minimum(tags["type"], len(_SIZES) - 1)].astype(np.float64)  # counts may have 64 bits
    declared = units * tags["count"]
    left = np.maximum(size - tags["value"].astype(np.float64), 0)
    return int(np.where(declared > inline, np.minimum(declared, left), 0).sum())


def _number(data: bytes, at: int, size: int, order: str) -> int:
    return int.from_bytes(data[at : at + size], "little" if order == "<" else "big")
