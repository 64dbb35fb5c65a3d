"""The commonest body, read without a Python object for each number: rows of whole numbers, nested as the images are.

A parser makes 3,072 numbers and 1,057 lists of an image of 32×32×3, which are then counted, checked and thrown away.
Here the brackets and commas, without the digits, are compared with those that images of this shape have.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import Feature

_HEAD = re.compile(rb'\{(?:"signature_name": ?"serving_default", ?)?"instances": ?\[')
_TAIL = b"]}"
_DIGITS, _BRACKETS = b"0123456789", b"[] "


def plain_images(body: bytes, image: Feature, most: int) -> NDArray[np.uint8] | None:
    """The images of a predict request, where they are whole numbers from 0 to 255 in lists of the right shape.

    Args:
        body: of the request.
        image: what the model takes.
        most: images of a request.

    Returns:
        What the parser would give; None where anything is unusual, or wrong: the parser knows what to say of it.
    """
    head = _HEAD.match(body)
    if image.dtype != "uint8" or not image.shape or head is None or not body.endswith(_TAIL):
        return None
    text = body[head.end() : -len(_TAIL)]
    blanks = text.count(b" ")
    if blanks and blanks != text.count(b", "):  # as Python writes it, and no others: 1 2 are not 12
        return None
    brackets = text.translate(None, _DIGITS + b" ")
    one = _brackets(image.shape)
    count, rest = divmod(len(brackets) + 1, len(one) + 1)
    if rest or not 1 <= count <= most or brackets != b",".join([one] * count):
        return None
    if _beside_lists(text):
        return None
    values = _bytes_of(text.translate(None, _BRACKETS))
    return None if values is None else values.reshape(count, *image.shape)


def _beside_lists(text: bytes) -> bool:
    """Whether a number stands before or after a list, not in one: [1[2]] has the brackets of [[2]]."""
    letters = np.frombuffer(text, np.uint8)
    before = letters[np.flatnonzero(letters == ord("[")) - 1]  # the first: the last letter, which is no digit, either
    after = letters.take(np.flatnonzero(letters == ord("]")) + 1, mode="wrap")
    return any(((each >= ord("0")) & (each <= ord("9"))).any() for each in (before, after))


def _bytes_of(numbers: bytes) -> NDArray[np.uint8] | None:
    """Digits and commas as numbers; None where one is missing, above 255, or begins with a 0 that it does not need."""
    text = np.frombuffer(numbers + b",", np.uint8)
    ends = np.flatnonzero(text == ord(","))
    lengths = np.diff(ends, prepend=-1) - 1
    if lengths.min() < 1 or lengths.max() > 3:
        return None
    digits = text - ord("0")
    two, three = lengths > 1, lengths > 2
    tens, hundreds = digits[ends - 2] * two, digits[ends - 3] * three  # where there are none, any digit times 0
    values: NDArray[np.uint16] = digits[ends - 1] + np.uint8(10) * tens + np.uint16(100) * hundreds
    if values.max() > 255 or (two & (values < 10)).any() or (three & (values < 100)).any():
        return None
    return values.astype(np.uint8)


@lru_cache(maxsize=8)
def _brackets(shape: tuple[int, ...]) -> bytes:
    """What is left of an image when its digits are taken away."""
    inside = b""
    for size in reversed(shape):
        inside = b"[" + b",".join([inside] * size) + b"]"
    return inside
