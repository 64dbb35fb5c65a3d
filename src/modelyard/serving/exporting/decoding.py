"""Decodes an image file to pixels of one size, as TensorFlow operations.

The arithmetic is that of `modelyard.data.images`, to the bit for JPEG and PNG. So a SavedModel gets the pixels of
training, and needs neither OpenCV nor Pillow nor Modelyard. Converted CMYK may differ by one per pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from modelyard.data.image_spec import ImageSpec
from modelyard.data.images import MOST_PIXELS

Tensor = Any
_ONE = 2048  # OpenCV resizes bytes with integers: coefficients have 11 bits
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"


def image_decoder(image: ImageSpec) -> Callable[[Tensor], Tensor]:
    """Returns a function from the bytes of one image file to an image as in training.

    Args:
        image: the spec of the images; they have 1 or 3 channels.
    """

    def decode(data: Tensor) -> Tensor:
        is_jpeg = tf.equal(tf.strings.substr(data, 0, 3), _JPEG)
        pixels, *part = tf.cond(is_jpeg, lambda: _from_jpeg(data, image), lambda: _from_other(data, image))
        pixels = _fitted(tf.ensure_shape(pixels, [None, None, image.shape[2]]), part, image)
        pixels = tf.ensure_shape(pixels, image.shape)
        if image.unit_scale:  # a table: a graph would multiply by 1/255 instead of dividing
            return tf.gather(tf.constant(np.arange(256, dtype=np.dtype(image.dtype)) / 255, image.dtype), pixels)
        return tf.cast(pixels, image.dtype)

    return decode


# -- resizing, on whole numbers -----------------------------------------------------------------------------------


def _resized(pixels: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Resizes pixels (int32): halves them while they are much too large, then resizes bilinearly."""
    channels = pixels.shape[2]

    def halve(down: Tensor, across: Tensor, now: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        number = tf.cast(down, tf.int32) + 2 * tf.cast(across, tf.int32) - 1
        halved = tf.switch_case(number, [lambda: _half_down(now), lambda: _half_across(now), lambda: _half(now)])
        halved = tf.ensure_shape(halved, [None, None, channels])
        return (*_too_large(halved, height, width), halved)

    shapes = (tf.TensorShape([]), tf.TensorShape([]), tf.TensorShape([None, None, channels]))
    first = (*_too_large(pixels, height, width), pixels)
    halved = tf.while_loop(
        lambda down, across, _: tf.logical_or(down, across),
        halve,
        first,
        shape_invariants=shapes,
        parallel_iterations=1,
    )
    return _bilinear(halved[2], height, width)


def _too_large(pixels: Tensor, height: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Returns whether rows, and columns, must be halved."""
    shape = tf.shape(pixels)
    both = tf.logical_and(shape[0] >= 2 * height, shape[1] >= 2 * width)
    return tf.logical_or(both, shape[0] >= 3 * height), tf.logical_or(both, shape[1] >= 3 * width)


def _half(pixels: Tensor) -> Tensor:
    tall, wide = 2 * (tf.shape(pixels)[0] // 2), 2 * (tf.shape(pixels)[1] // 2)
    rows = pixels[:tall:2] + pixels[1:tall:2]
    return _shifted(rows[:, :wide:2] + rows[:, 1:wide:2] + 2, 2)


def _half_down(pixels: Tensor) -> Tensor:
    tall = 2 * (tf.shape(pixels)[0] // 2)
    both = pixels[:tall:2] + pixels[1:tall:2]
    half = _shifted(both, 1)
    return half + tf.bitwise.bitwise_and(tf.bitwise.bitwise_and(both, 1), half)  # a half goes to the even number


def _half_across(pixels: Tensor) -> Tensor:
    wide = 2 * (tf.shape(pixels)[1] // 2)
    return _shifted(pixels[:, :wide:2] + pixels[:, 1:wide:2] + 1, 1)


def _bilinear(pixels: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Resizes as OpenCV's INTER_LINEAR resizes bytes."""
    shape = tf.shape(pixels)
    left, share = _source_positions(shape[1], width)
    outside = tf.logical_or(left < 0, left + 1 >= shape[1])
    share = tf.where(outside, tf.zeros_like(share), share)
    left = tf.clip_by_value(left, 0, shape[1] - 1)
    right = tf.minimum(left + 1, shape[1] - 1)
    first, second = (part[None, :, None] for part in _coefficients(share))
    across = tf.gather(pixels, left, axis=1) * first + tf.gather(pixels, right, axis=1) * second
    across = _shifted(across, 4)
    top, share = _source_positions(shape[0], height)
    first, second = (part[:, None, None] for part in _coefficients(share))
    above = tf.gather(across, tf.clip_by_value(top, 0, shape[0] - 1)) * first
    below = tf.gather(across, tf.clip_by_value(top + 1, 0, shape[0] - 1)) * second
    return _shifted(_shifted(above, 16) + _shifted(below, 16) + 2, 2)


def _source_positions(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, for each of ``target`` pixels, the one of ``source`` pixels before it, and the distance from that."""
    scale = 1.0 / (tf.cast(target, tf.float64) / tf.cast(source, tf.float64))
    position = tf.cast((tf.cast(tf.range(target), tf.float64) + 0.5) * scale - 0.5, tf.float32)
    before = tf.floor(position)
    return tf.cast(before, tf.int32), position - before


def _coefficients(share: Tensor) -> tuple[Tensor, Tensor]:
    return tf.cast(tf.round((1.0 - share) * _ONE), tf.int32), tf.cast(tf.round(share * _ONE), tf.int32)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    return tf.bitwise.right_shift(numbers, bits)


# -- cropping and padding -----------------------------------------------------------------------------------------


def part_of(tall: Tensor, wide: Tensor, height: int, width: int, fit: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns top, left, height and width (float64) of the part that is resized to ``height`` × ``width``."""
    tall, wide = tf.cast(tall, tf.float64), tf.cast(wide, tf.float64)
    if fit != "crop":
        return tf.zeros_like(tall), tf.zeros_like(wide), tall, wide
    # Grappler would replace a division by a constant with an inexact product. So the divisors are not constants.
    by = [tf.where(tall > 0, tf.constant(side, tf.float64), 1.0) for side in (height, width)]
    scale = tf.minimum(tall / by[0], wide / by[1])
    part_tall, part_wide = height * scale, width * scale
    return (tall - part_tall) / 2, (wide - part_wide) / 2, part_tall, part_wide


def _fitted(pixels: Tensor, part: Sequence[Tensor], image: ImageSpec) -> Tensor:
    height, width, _ = image.shape
    shape = tf.shape(pixels)
    top, left = tf.minimum(_rounded(part[0]), shape[0] - 1), tf.minimum(_rounded(part[1]), shape[1] - 1)
    tall = tf.minimum(tf.maximum(_rounded(part[2]), 1), shape[0] - top)
    wide = tf.minimum(tf.maximum(_rounded(part[3]), 1), shape[1] - left)
    pixels = pixels[top : top + tall, left : left + wide]
    if image.fit != "pad":
        return _resized(pixels, tf.constant(height), tf.constant(width))
    scale = tf.minimum(height / part[2], width / part[3])
    inner_tall, inner_wide = tf.maximum(_rounded(part[2] * scale), 1), tf.maximum(_rounded(part[3] * scale), 1)
    above, before = (height - inner_tall) // 2, (width - inner_wide) // 2
    bars = [[above, height - inner_tall - above], [before, width - inner_wide - before], [0, 0]]
    return tf.pad(_resized(pixels, inner_tall, inner_wide), bars)


def _rounded(value: Tensor) -> Tensor:
    return tf.cast(value + 0.5, tf.int32)


# -- files --------------------------------------------------------------------------------------------------------


def _from_jpeg(data: Tensor, image: ImageSpec) -> tuple[Tensor, ...]:
    """Returns upright pixels, and the part of them to take."""
    height, width, channels = image.shape
    raw = tf.io.extract_jpeg_shape(data)
    small = tf.debugging.assert_less_equal(
        tf.cast(raw[0], tf.int64) * tf.cast(raw[1], tf.int64), tf.constant(MOST_PIXELS, tf.int64), "too many pixels"
    )
    with tf.control_dependencies([small] if small is not None else []):
        raw = tf.identity(raw)
    orientation = _orientation(data, _exif_of_jpeg)
    turned = orientation >= 5
    tall, wide = tf.where(turned, raw[1], raw[0]), tf.where(turned, raw[0], raw[1])
    part = part_of(tall, wide, height, width, image.fit)
    # libjpeg decodes at 1/2, 1/4 or 1/8 of the size while the part stays large enough.
    enough = [tf.logical_and(part[2] >= by * height, part[3] >= by * width) for by in (2, 4, 8)]
    halvings = tf.add_n([tf.cast(yes, tf.int32) for yes in enough])
    is_cmyk = raw[2] == 4
    halvings = tf.where(is_cmyk, 0, halvings)

    def shrunk(ratio: int) -> Callable[[], Tensor]:
        return lambda: tf.io.decode_jpeg(data, channels, ratio, dct_method="INTEGER_ACCURATE", fancy_upscaling=True)

    def from_cmyk() -> Tensor:
        whole = tf.io.decode_jpeg(data, 3, dct_method="INTEGER_ACCURATE", fancy_upscaling=True)
        return tf.cast(_with_channels(tf.cast(whole, tf.int32), channels), tf.uint8)

    pixels = tf.switch_case(tf.where(is_cmyk, 4, halvings), [shrunk(1), shrunk(2), shrunk(4), shrunk(8), from_cmyk])
    pixels = _turned(tf.cast(tf.ensure_shape(pixels, [None, None, channels]), tf.int32), orientation)
    by = tf.cast(tf.bitwise.left_shift(1, halvings), tf.float64)
    return (pixels, *(side / by for side in part))


def _from_other(data: Tensor, image: ImageSpec) -> tuple[Tensor, ...]:
    """Returns the same as `_from_jpeg`, of a PNG, GIF or BMP."""
    height, width, channels = image.shape
    found = tf.io.decode_image(data, expand_animations=False)
    pixels = _with_channels(tf.cast(tf.ensure_shape(found, [None, None, None]), tf.int32), channels)
    is_png = tf.equal(tf.strings.substr(data, 0, len(_PNG)), _PNG)
    orientation = tf.cond(is_png, lambda: _orientation(data, _exif_of_png), lambda: tf.constant(1))
    pixels = _turned(pixels, orientation)
    shape = tf.shape(pixels)
    return (pixels, *part_of(shape[0], shape[1], height, width, image.fit))


def _with_channels(pixels: Tensor, channels: int) -> Tensor:
    """Converts to grey or colour as Pillow does; drops transparency."""
    colours = tf.where(tf.shape(pixels)[2] < 3, [0, 0, 0], [0, 1, 2])
    red, green, blue = (tf.gather(pixels, colours[i], axis=2) for i in range(3))
    if channels == 3:
        return tf.stack([red, green, blue], axis=2)
    return _shifted(red * 19595 + green * 38470 + blue * 7471 + 0x8000, 16)[..., None]


def _turned(pixels: Tensor, orientation: Tensor) -> Tensor:
    """Rotates and mirrors by an EXIF orientation."""
    channels = pixels.shape[2]

    def when(orientations: tuple[int, ...], turn: Callable[[Tensor], Tensor], now: Tensor) -> Tensor:
        chosen = tf.reduce_any(orientation == tf.constant(orientations))
        return tf.ensure_shape(tf.cond(chosen, lambda: turn(now), lambda: now), [None, None, channels])

    pixels = when((5, 6, 7, 8), lambda now: tf.transpose(now, [1, 0, 2]), pixels)
    pixels = when((2, 3, 6, 7), lambda now: now[:, ::-1], pixels)
    return when((3, 4, 7, 8), lambda now: now[::-1], pixels)


# -- EXIF ---------------------------------------------------------------------------------------------------------


class _Bytes:
    """The bytes of a file as numbers; beyond its end they are 0."""

    def __init__(self, data: Tensor) -> None:
        self.numbers = tf.cast(tf.io.decode_raw(data, tf.uint8), tf.int64)
        self.size = tf.shape(self.numbers, tf.int64)[0]

    def at(self, offset: Tensor) -> Tensor:
        """Returns the byte at each offset."""
        inside = tf.logical_and(offset >= 0, offset < self.size)
        found = tf.gather(self.numbers, tf.clip_by_value(offset, 0, self.size - 1))
        return tf.where(inside, found, tf.zeros_like(found))

    def number(self, offset: Tensor, length: int, little: Tensor | bool = False) -> Tensor:
        """Returns the integer of ``length`` bytes at each offset; ``little`` is its byte order."""
        parts = [self.at(offset + i) for i in range(length)]
        big_endian = tf.add_n([part * 256 ** (length - 1 - i) for i, part in enumerate(parts)])
        little_endian = tf.add_n([part * 256**i for i, part in enumerate(parts)])
        return tf.where(little, little_endian, big_endian)

    def has(self, offset: Tensor, text: bytes) -> Tensor:
        """Returns whether ``text`` is at the offset."""
        return tf.reduce_all(self.at(offset + tf.range(len(text), dtype=tf.int64)) == tf.constant([*text], tf.int64))


def _exif_of_jpeg(data: _Bytes) -> Tensor:
    """Returns the offset of the TIFF header of the first EXIF segment; 0 if there is none."""

    def more(offset: Tensor, found: Tensor) -> Tensor:
        marker = tf.logical_and(data.at(offset) == 0xFF, data.at(offset + 1) != 0xDA)
        return tf.logical_and(tf.logical_and(found == 0, offset + 4 <= data.size), marker)

    def step(offset: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        is_exif = tf.logical_and(data.at(offset + 1) == 0xE1, data.has(offset + 4, b"Exif\0\0"))
        length = tf.where(data.at(offset + 1) == 0xFF, tf.constant(1, tf.int64), 2 + data.number(offset + 2, 2))
        return offset + length, tf.where(is_exif, offset + 10, found)

    return tf.while_loop(more, step, (tf.constant(2, tf.int64), tf.constant(0, tf.int64)), parallel_iterations=1)[1]


def _exif_of_png(data: _Bytes) -> Tensor:
    """Returns the offset of the TIFF header in the chunk eXIf of a PNG; 0 if there is none."""

    def more(offset: Tensor, found: Tensor) -> Tensor:
        return tf.logical_and(found == 0, offset + 12 <= data.size)

    def step(offset: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        is_exif = data.has(offset + 4, b"eXIf")
        return offset + 12 + data.number(offset, 4), tf.where(is_exif, offset + 8, found)

    first = tf.constant(len(_PNG), tf.int64)
    return tf.while_loop(more, step, (first, tf.constant(0, tf.int64)), parallel_iterations=1)[1]


def _orientation(data: Tensor, find_exif: Callable[[_Bytes], Tensor]) -> Tensor:
    """Returns the EXIF orientation, 1 to 8; 1 (upright) if it is missing or damaged."""
    read = _Bytes(data)
    start = find_exif(read)

    def from_exif() -> Tensor:
        little = read.has(start, b"II\x2a\x00")
        valid = tf.logical_or(little, read.has(start, b"MM\x00\x2a"))
        directory = start + read.number(start + 4, 4, little)
        count = tf.where(valid, read.number(directory, 2, little), tf.constant(0, tf.int64))
        entries = directory + 2 + 12 * tf.range(count)
        tag, kind, length = (read.number(entries + at, n, little) for at, n in ((0, 2), (2, 2), (4, 4)))
        value = tf.where(kind == 3, read.number(entries + 8, 2, little), read.number(entries + 8, 4, little))
        is_integer = tf.logical_or(kind == 3, kind == 4)  # SHORT, or LONG
        found = (tag == 0x0112) & is_integer & (length == 1) & (value >= 1) & (value <= 8)
        return tf.cast(tf.concat([[1], tf.boolean_mask(value, found)], axis=0)[-1], tf.int32)

    return tf.cond(start > 0, from_exif, lambda: tf.constant(1))
