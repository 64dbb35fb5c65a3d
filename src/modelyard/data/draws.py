"""Random numbers as arithmetic: a hash of (seed, position in the stream, which draw).

They do not depend on devices, engine, batch size or restarts. All of it is 32-bit integer arithmetic in `keras.ops`,
so that every engine computes the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

_WORD = 0xFFFFFFFF


def mix_host(value: int) -> int:
    """`mix` for one Python integer."""
    value &= _WORD
    value ^= value >> 16
    value = value * 0x7FEB352D & _WORD
    value ^= value >> 15
    value = value * 0x846CA68B & _WORD
    return value ^ value >> 16


def mix(words: Any) -> Any:
    """Scrambles uint32 words: each bit of the result depends on every bit of the word (constants: C. Wellons, 2018)."""
    words = _xor_shift(words, 16)
    words = ops.multiply(words, _constant(0x7FEB352D))
    words = _xor_shift(words, 15)
    words = ops.multiply(words, _constant(0x846CA68B))
    return _xor_shift(words, 16)


def fold(*words: int) -> int:
    """One 32-bit word from several integers of up to 64 bits."""
    state = 0x9E3779B9
    for word in words:
        for half in (word & _WORD, word >> 32 & _WORD):
            state = mix_host(state ^ half) + 0x9E3779B9 & _WORD
    return mix_host(state)


class Draws:
    """Draws for a batch, one row an example. Each call is a new draw.

    Args:
        seed: the run's seed.
        low, high: the two 32-bit halves of each example's position in the stream, uint32 of shape [batch].
    """

    def __init__(self, seed: int, low: Any, high: Any) -> None:
        key = ops.bitwise_xor(low, _constant(fold(seed)))
        self._key = mix(ops.add(mix(ops.bitwise_xor(mix(key), high)), low))
        self._number = 0

    def words(self, count: int = 1) -> Any:
        """Random 32-bit words, uint32 of shape [batch, count]."""
        salts = [mix_host(0x85EBCA6B + self._number + i) for i in range(count)]
        self._number += count
        columns = ops.convert_to_tensor(np.array(salts, np.uint32))
        return mix(ops.bitwise_xor(self._key[:, None], columns[None, :]))

    def uniform(self, count: int = 1) -> Any:
        """Random numbers in [0, 1), float32 of shape [batch, count]."""
        return ops.cast(ops.right_shift(self.words(count), _constant(8)), "float32") * np.float32(2**-24)

    def integers(self, high: int, count: int = 1) -> Any:
        """Random whole numbers from 0 to ``high`` - 1, int32 of shape [batch, count]."""
        # 24 bits of a float32 hold every product below 2**24 exactly enough for image sizes.
        return ops.cast(ops.floor(self.uniform(count) * np.float32(high)), "int32")


def _constant(value: int) -> Any:
    return ops.convert_to_tensor(np.uint32(value))


def _xor_shift(words: Any, bits: int) -> Any:
    return ops.bitwise_xor(words, ops.right_shift(words, _constant(bits)))
