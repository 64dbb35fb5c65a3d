"""Order is arithmetic: training reads one endless stream, epoch after epoch, and position p of it is a pure function.

Each epoch is a permutation given by (seed, epoch, size). Global batch k of size B is positions kB to (k+1)B. There is
no iterator and no state: resuming at step 10 million costs what starting costs.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ORDER_DOMAIN = 0x6F72646572  # keeps these draws apart from other uses of the same seed


def raw_draws(seed: int, domain: int, number: int, count: int) -> NDArray[np.uint64]:
    """``count`` 64-bit draws of Philox for (seed, domain, number).

    Bit streams of NumPy's generators never change between versions; its `permutation` may, so it is not used.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, number & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    counter = np.array([0, 0, 0, domain], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def permutation(seed: int, domain: int, number: int, size: int) -> NDArray[np.int64]:
    """A permutation of ``size`` things: the order of random keys, equal keys by index."""
    return np.argsort(raw_draws(seed, domain, number, size), kind="stable").astype(np.int64)


class Order:
    """The stream of training examples.

    Example:
        >>> order = Order(seed=0, size=10)
        >>> sorted(order.indices(0, 10).tolist()) == list(range(10))
        True
    """

    def __init__(self, seed: int, size: int) -> None:
        self.seed = seed
        self.size = size
        # Two epochs: a batch may reach from one into the next.
        self._epoch = lru_cache(maxsize=2)(lambda epoch: permutation(seed, _ORDER_DOMAIN, epoch, size))

    def indices(self, start: int, stop: int) -> NDArray[np.int64]:
        """The examples at positions ``start`` to ``stop`` of the stream."""
        pieces = []
        position = start
        while position < stop:
            epoch, offset = divmod(position, self.size)
            length = min(self.size - offset, stop - position)
            pieces.append(self._epoch(epoch)[offset : offset + length])
            position += length
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def batches(self, step: int, count: int, batch_size: int) -> NDArray[np.int64]:
        """The examples of ``count`` global batches from ``step`` on, one row a batch."""
        return self.indices(step * batch_size, (step + count) * batch_size).reshape(count, batch_size)
