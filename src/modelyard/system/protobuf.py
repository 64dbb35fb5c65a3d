"""Reads the wire format of protocol buffers. Every length is checked against the message that contains it."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5
"""The types of fields: a number of variable length, 8 bytes, a length and so many bytes, 4 bytes."""
MASK64 = 0xFFFFFFFFFFFFFFFF
_LONGEST_VARINT = 10


def varint(message: bytes, at: int, end: int) -> tuple[int, int]:
    """Returns the number at the offset ``at``, and the offset after it.

    Raises:
        ValueError: if it is cut off or too long.
    """
    value = 0
    for shift in range(0, 7 * _LONGEST_VARINT, 7):
        if at >= end:
            raise ValueError(f"a number is cut off at byte {at}")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & MASK64, at
    raise ValueError(f"a number of more than {_LONGEST_VARINT} bytes ends at byte {at}")


def fields(message: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields number, type, start and end of each field.

    Raises:
        ValueError: if a field is damaged.
    """
    while at < end:
        tag, at = varint(message, at, end)
        number, wire = tag >> 3, tag & 7
        start = at
        if wire == DELIMITED:
            length, start = varint(message, at, end)
            at = start + length
        elif wire == VARINT:
            _, at = varint(message, at, end)
        elif wire in (FIXED32, FIXED64):
            at += 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"byte {start} begins a field of unknown type {wire}")
        if not number:
            raise ValueError(f"byte {start} begins a field with the number 0")
        if at > end:
            raise ValueError(f"a field at byte {start} reaches {at - end:,} bytes beyond its end")
        yield number, wire, start, at


def messages(message: bytes, number: int) -> list[bytes]:
    """Returns the messages, texts or bytes in the field ``number``.

    Raises:
        ValueError: if a field is damaged.
    """
    return [
        message[start:end]
        for found, wire, start, end in fields(message, 0, len(message))
        if (found, wire) == (number, DELIMITED)
    ]
