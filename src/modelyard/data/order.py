"""The order of examples: a pure function of the seed.

Training reads one endless stream, epoch after epoch. Each epoch is a permutation given by (seed, epoch, size). Global
batch k of size B is positions kB to (k+1)B. There is no iterator and no state: resuming at step 10 million takes as
long as starting.

A dataset too large for one permutation is shuffled in two levels: blocks of neighbours are permuted, then the examples
in windows of many blocks. Only the windows that are needed are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

_ORDER_DOMAIN = 0x6F72646572  # domains separate the uses of one seed
_BLOCK_DOMAIN = 0x626C6F636B
_WINDOW_DOMAIN = 0x77696E646F77

BLOCK = 256
"""Two levels: neighbours in storage per block."""
WINDOW = 1024
"""Two levels: the most blocks per window."""
FULL_SHUFFLE_LIMIT = 4_000_000
"""Up to this size, ``auto`` is one permutation: computing it takes about a second and 32 MB."""

Shuffle = Literal["auto", "full", "blocks"]


def raw_draws(seed: int, domain: int, number: int, count: int, part: int = 0) -> NDArray[np.uint64]:
    """Returns ``count`` 64-bit draws of Philox for (seed, domain, number, part).

    NumPy never changes the bit streams of its generators. It may change its `permutation`, so that is not used.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, number & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    counter = np.array([0, 0, part, domain], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def permutation(seed: int, domain: int, number: int, size: int, part: int = 0) -> NDArray[np.int64]:
    """Returns a permutation of ``size`` elements: the order of random keys, equal keys by index."""
    keys = raw_draws(seed, domain, number, size, part)
    order = np.argsort(keys)  # ten times as fast as a stable sort, and the same unless keys are equal
    found = keys[order]
    if (found[1:] == found[:-1]).any():
        order = np.argsort(keys, kind="stable")
    return order.astype(np.int64)


class Order:
    """The stream of training examples.

    Args:
        seed: the seed of all permutations.
        size: the number of examples.
        levels: 1 for one permutation of all, 2 for blocks within windows.
        block: two levels: examples per block. The last block may be short.
        window: two levels: the most blocks per window. The windows of an epoch differ by one block at most, so that
            none is too small to shuffle well.

    Example:
        >>> order = Order(seed=0, size=10)
        >>> sorted(order.indices(0, 10).tolist()) == list(range(10))
        True
    """

    def __init__(self, seed: int, size: int, levels: int = 1, block: int = BLOCK, window: int = WINDOW) -> None:
        if levels not in (1, 2) or min(size, block, window) < 1:
            raise ValueError(f"no order of {size} examples has {levels} levels, blocks of {block}, windows of {window}")
        self.seed = seed
        self.size = size
        self.levels = levels
        self._block, self._most_blocks = block, window
        self._blocks = -(-size // block)
        self._windows = -(-self._blocks // window)
        # Two of each: a batch may contain the end of one epoch or window and the start of the next.
        self._epoch = lru_cache(maxsize=2)(lambda epoch: permutation(seed, _ORDER_DOMAIN, epoch, size))
        self._epoch_blocks = lru_cache(maxsize=2)(self._compute_blocks)
        self._window = lru_cache(maxsize=2)(self._compute_window)

    def __reduce__(self) -> tuple[Any, ...]:
        return Order, (self.seed, self.size, self.levels, self._block, self._most_blocks)

    @classmethod
    def for_size(cls, seed: int, size: int, shuffle: Shuffle = "auto") -> Order:
        """Returns the order of ``size`` examples: ``full`` is one level, ``blocks`` two, ``auto`` chooses by size."""
        if shuffle == "auto":
            shuffle = "full" if size <= FULL_SHUFFLE_LIMIT else "blocks"
        return cls(seed, size, levels=1 if shuffle == "full" else 2)

    def indices(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the examples at positions ``start`` to ``stop`` of the stream."""
        pieces = []
        position = start
        while position < stop:
            epoch, offset = divmod(position, self.size)
            if self.levels == 1:
                piece = self._epoch(epoch)[offset:]
            else:
                window, skip = self._find(epoch, offset)
                piece = self._window(epoch, window)[skip:]
            pieces.append(piece[: stop - position])
            position += len(pieces[-1])
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def batches(self, step: int, count: int, batch_size: int) -> NDArray[np.int64]:
        """Returns the examples of ``count`` global batches from ``step`` on, one row per batch."""
        return self.indices(step * batch_size, (step + count) * batch_size).reshape(count, batch_size)

    def _find(self, epoch: int, offset: int) -> tuple[int, int]:
        """Returns the window of position ``offset`` of the epoch, and the position in the window."""
        blocks = self._epoch_blocks(epoch)
        before = offset < blocks.start_of(blocks.short + 1, self._block)
        block = (offset if before else offset + blocks.missing) // self._block
        # The inverse of `_first_block`: the last window that starts at this block or before.
        window = ((block + 1) * self._windows - 1) // self._blocks
        return window, offset - blocks.start_of(self._first_block(window), self._block)

    def _first_block(self, window: int) -> int:
        """Returns the first block of a window, as an index of the permuted blocks."""
        return window * self._blocks // self._windows

    def _compute_blocks(self, epoch: int) -> _Blocks:
        permuted = permutation(self.seed, _BLOCK_DOMAIN, epoch, self._blocks)
        short = int(np.flatnonzero(permuted == self._blocks - 1)[0])
        return _Blocks(permuted, short, self._blocks * self._block - self.size)

    def _compute_window(self, epoch: int, window: int) -> NDArray[np.int64]:
        permuted = self._epoch_blocks(epoch).permuted
        numbers = permuted[self._first_block(window) : self._first_block(window + 1)]
        examples = (numbers[:, None] * self._block + np.arange(self._block)).ravel()
        examples = examples[examples < self.size]  # the last block may be short
        return examples[permutation(self.seed, _WINDOW_DOMAIN, epoch, len(examples), window)]


@dataclass(frozen=True)
class _Blocks:
    """The permuted blocks of an epoch. The one with the index ``short`` has ``missing`` examples less."""

    permuted: NDArray[np.int64]
    short: int
    missing: int

    def start_of(self, index: int, block: int) -> int:
        """Returns the position in the epoch at which a block starts."""
        return index * block - (self.missing if index > self.short else 0)
