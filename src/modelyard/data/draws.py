"""Random numbers as arithmetic: a hash of (seed, position in the stream, which draw).

They do not depend on devices, engine, batch size or restarts. They consist of 32-bit integer arithmetic and tables, so
every engine computes the same bits, and NumPy on the host as well: ``Draws(..., ops=HOST)``. Keras is imported when it
is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORD = 0xFFFFFFFF
_FIRST_SALT = 0x85EBCA6B


HOST = SimpleNamespace(
    add=np.add,
    arange=np.arange,
    bitwise_and=np.bitwise_and,
    bitwise_xor=np.bitwise_xor,
    cast=lambda values, dtype: np.asarray(values).astype(dtype),
    concatenate=np.concatenate,
    convert_to_tensor=np.asarray,  # NumPy scalars warn when they overflow, arrays do not
    floor=np.floor,
    multiply=np.multiply,
    right_shift=np.right_shift,
    take=np.take,
)
"""The functions of `keras.ops` that draws use, in NumPy."""


def mix_host(value: int) -> int:
    """Returns `mix` of one Python integer."""
    value &= _WORD
    value ^= value >> 16
    value = value * 0x7FEB352D & _WORD
    value ^= value >> 15
    value = value * 0x846CA68B & _WORD
    return value ^ value >> 16


def mix(words: Any, ops: Any = None) -> Any:
    """Scrambles uint32 words: each bit of the result depends on every bit of the word (constants: C. Wellons, 2018)."""
    ops = ops or _keras_ops()
    words = _xor_shift(words, 16, ops)
    words = ops.multiply(words, _constant(0x7FEB352D, ops))
    words = _xor_shift(words, 15, ops)
    words = ops.multiply(words, _constant(0x846CA68B, ops))
    return _xor_shift(words, 16, ops)


def fold(*words: int) -> int:
    """Returns one 32-bit word from several integers of up to 64 bits."""
    state = 0x9E3779B9
    for word in words:
        for half in (word & _WORD, word >> 32 & _WORD):
            state = mix_host(state ^ half) + 0x9E3779B9 & _WORD
    return mix_host(state)


def seed_words(seed: int) -> NDArray[np.uint32]:
    """Returns the two words that draws take from a seed: for positions, and for examples."""
    return np.array([fold(seed), fold(seed, 1)], np.uint32)


def halves(positions: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Returns the low and the high 32 bits of positions in the stream."""
    return (positions & np.uint64(_WORD)).astype(np.uint32), (positions >> np.uint64(32)).astype(np.uint32)


def index_type() -> str:
    """Returns the integer type for indices of pixels on the device."""
    import keras

    # TensorFlow computes int32 on the host even if there is a GPU, and copies. On a CPU, int64 makes a rotation or a
    # crop slower by a fifth to a half.
    slow = keras.backend.backend() == "tensorflow" and keras.distribution.list_devices("gpu")
    return "int64" if slow else "int32"


class Draws:
    """Draws for a batch, one row per example. Each call is a new draw.

    Args:
        seed: the run's seed; or `seed_words` of it, as a tensor, if a compiled program serves other seeds as well.
        low, high: the two 32-bit halves of each example's position in the stream, uint32 of shape [batch].
        ops: `keras.ops` by default, `HOST` for NumPy arrays.
        rows: the index of each example in its split, int32 of shape [batch]; for draws that depend on the example.
        epochs: the epoch of each position, int32 of shape [batch].
    """

    def __init__(
        self, seed: Any, low: Any, high: Any, ops: Any = None, *, rows: Any = None, epochs: Any = None
    ) -> None:
        self.rows, self.epochs = rows, epochs
        self._index_type = "int32" if ops is HOST else index_type()
        self._ops = ops = ops or _keras_ops()
        words = [_constant(int(word), ops) for word in seed_words(seed)] if isinstance(seed, int) else seed
        self._row_seed = words[1]
        key = ops.bitwise_xor(low, words[0])
        self._key = mix(ops.add(mix(ops.bitwise_xor(mix(key, ops), high), ops), low), ops)
        self._number = 0

    def words(self, count: int = 1) -> Any:
        """Returns random 32-bit words, uint32 of shape [batch, count]."""
        salts = [mix_host(_FIRST_SALT + self._number + i) for i in range(count)]
        self._number += count
        columns = self._ops.convert_to_tensor(np.array(salts, np.uint32))
        return mix(self._ops.bitwise_xor(self._key[:, None], columns[None, :]), self._ops)

    def row_words(self) -> Any:
        """Returns a 32-bit word for each example, the same in every epoch: uint32 of shape [batch]."""
        ops = self._ops
        key = ops.bitwise_xor(ops.cast(self.rows, "uint32"), self._row_seed)
        return mix(ops.add(mix(key, ops), _constant(_FIRST_SALT, ops)), ops)

    def uniform(self, count: int = 1) -> Any:
        """Returns random numbers in [0, 1), float32 of shape [batch, count]."""
        ops = self._ops
        return ops.cast(ops.right_shift(self.words(count), _constant(8, ops)), "float32") * np.float32(2**-24)

    def integers(self, high: int, count: int = 1) -> Any:
        """Returns random integers from 0 to ``high`` - 1, int32 of shape [batch, count]."""
        # 24 bits of a float32 hold every product below 2**24 exactly enough for image sizes.
        return self._ops.cast(self._ops.floor(self.uniform(count) * np.float32(high)), "int32")

    def field(self, count: int) -> Any:
        """Returns many random numbers per example in one draw: float32 in (0, 1) with 16 bits, [batch, count]."""
        ops = self._ops
        parts = [ops.cast(half, "float32") for half in self._field(count)]
        return (ops.concatenate(parts, axis=1)[:, :count] + np.float32(0.5)) * np.float32(2**-16)

    def normal(self, count: int) -> Any:
        """Returns as many numbers of the standard normal distribution, cut at ±4.4."""
        ops = self._ops
        table = ops.convert_to_tensor(_normal_table())
        parts = [ops.take(table, ops.cast(half, self._index_type), axis=0) for half in self._field(count)]
        return ops.concatenate(parts, axis=1)[:, :count]

    def _field(self, count: int) -> tuple[Any, Any]:
        """Returns integers from 0 to 65535: two times uint32 of shape [batch, half of count, rounded up]."""
        ops = self._ops
        salt = mix_host(_FIRST_SALT + self._number)
        self._number += 1
        # Mixed once more, so that no element of a field equals a word of another draw.
        key = mix(ops.bitwise_xor(self._key, _constant(salt, ops)), ops)
        elements = mix(ops.cast(ops.arange((count + 1) // 2, dtype="int32"), "uint32"), ops)
        words = mix(ops.bitwise_xor(key[:, None], elements[None, :]), ops)
        return ops.bitwise_and(words, _constant(0xFFFF, ops)), ops.right_shift(words, _constant(16, ops))


@lru_cache(maxsize=1)
def _normal_table() -> NDArray[np.float32]:
    """Returns the normal number for each of 65536 equal shares of probability: devices differ in logarithms."""
    upper = [NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(32768, 65536)]
    return np.array([-value for value in reversed(upper)] + upper, np.float32)


def _keras_ops() -> Any:
    from keras import ops

    return ops


def _constant(value: int, ops: Any) -> Any:
    return ops.convert_to_tensor(np.uint32(value))


def _xor_shift(words: Any, bits: int, ops: Any) -> Any:
    return ops.bitwise_xor(words, ops.right_shift(words, _constant(bits, ops)))


# -- the box of a random resized crop --------------------------------------------------------------------------------

SCALARS = SimpleNamespace(floor=math.floor, maximum=max, minimum=min, round=round, sqrt=math.sqrt)
"""The arithmetic for one image: calls of NumPy take longer than the work."""


def crop_box(
    u: Sequence[Any],
    height: int,
    width: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ops: Any = np,
) -> tuple[Any, Any, Any, Any]:
    """Returns the random box in each image that a random resized crop takes.

    Area (a share of the image, uniform) and ratio of width to height (uniform in its logarithm) are drawn once. If a
    box of that area and ratio is larger than the image, the ratio changes as far as ``ratio`` allows, then the area.

    Args:
        u: four uniform numbers in [0, 1), for area, ratio, top and left: numbers, arrays or tensors.
        height, width: size of the images.
        scale: the least and greatest area.
        ratio: the least and greatest ratio.
        ops: `SCALARS` for plain numbers, NumPy for arrays, `keras.ops` for tensors.

    Returns:
        Top, left, height and width in pixels: integers as floats. The box is inside the image.
    """
    tall, wide = float(height), float(width)
    narrowest, widest = ratio
    area = scale[0] + u[0] * (scale[1] - scale[0])
    shape = _exp(math.log(narrowest) + u[1] * (math.log(widest) - math.log(narrowest)))
    # The ratios at which a box of this area is as high, or as wide, as the image.
    shape = ops.minimum(ops.maximum(shape, area * (wide / tall)), (wide / tall) / area)
    shape = ops.minimum(ops.maximum(shape, narrowest), widest)
    box_width = ops.minimum(ops.sqrt(area * shape * (tall * wide)), wide)
    box_height = ops.minimum(ops.sqrt(area / shape * (tall * wide)), tall)
    box_width = ops.maximum(ops.round(ops.minimum(box_width, box_height * widest)), 1.0)
    box_height = ops.maximum(ops.round(ops.minimum(box_height, box_width / narrowest)), 1.0)
    box_height = ops.minimum(box_height, tall)
    # The product may round up.
    top = ops.minimum(ops.floor(u[2] * (tall - box_height + 1.0)), tall - box_height)
    left = ops.minimum(ops.floor(u[3] * (wide - box_width + 1.0)), wide - box_width)
    return top, left, box_height, box_width


def _exp(x: Any) -> Any:
    """The exponential function from products and sums, the same bits on every device; error 1e-5 for |x| < 4."""
    small = x * (1 / 64)
    result = 1.0 + small * (1.0 + small * (1 / 2 + small * (1 / 6 + small * (1 / 24))))
    for _ in range(6):
        result = result * result
    return result
