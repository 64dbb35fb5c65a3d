"""Reads the examples of batches: which they are is arithmetic, so that any thread or process may read any of them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import TRAIN, Arrays, Crop, Dataset
from modelyard.data.draws import HOST, SCALARS, Draws, crop_box, fold, halves
from modelyard.data.order import Order


@dataclass(frozen=True)
class RandomCrop:
    """The options of a random crop that is taken while an image is decoded."""

    seed: int
    scale: tuple[float, float]
    ratio: tuple[float, float]

    def of(self, positions: NDArray[np.int64]) -> Crop:
        """Returns the crops for ``positions`` of the stream, with the same draws as on the device."""
        low, high = halves(positions.astype(np.uint64))
        draws = Draws(fold(self.seed, 0), low, high, ops=HOST).uniform(4).tolist()

        def crop(position: int, height: int, width: int) -> tuple[float, float, float, float]:
            return crop_box(draws[position], height, width, self.scale, self.ratio, ops=SCALARS)

        return crop


@dataclass(frozen=True)
class TrainingPart:
    """The examples ``start`` to ``stop`` of this process's share of the global batch ``batch``."""

    batch: int
    start: int
    stop: int

    def one(self, number: int) -> TrainingPart:
        """Returns one of the examples."""
        return TrainingPart(self.batch, self.start + number, self.start + number + 1)


@dataclass(frozen=True)
class SplitRows:
    """Some examples of a split."""

    split: str
    rows: NDArray[np.int64]

    def one(self, number: int) -> SplitRows:
        """Returns one of the examples."""
        return SplitRows(self.split, self.rows[number : number + 1])


Request = TrainingPart | SplitRows


class BatchReader:
    """Reads parts of batches. Several threads may use it at once; a copy of it may be used in another process.

    Args:
        dataset: the data.
        order: the order of the training examples.
        batch_size: examples per global batch.
        share: the positions of every global batch that this process reads.
        crop: the random crop that is taken while training images are decoded, if any.
    """

    def __init__(
        self, dataset: Dataset, order: Order, batch_size: int, share: NDArray[np.int64], crop: RandomCrop | None
    ) -> None:
        self.dataset, self.order, self.batch_size, self.share, self.crop = dataset, order, batch_size, share, crop
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def read(self, request: Request, out: Arrays) -> None:
        """Fills ``out`` with the examples of a request."""
        if isinstance(request, SplitRows):
            self.dataset.read_into(request.split, request.rows, out)
            return
        positions = self._positions(request)
        self.read_training(self.indices(positions), positions, out)

    def name(self, request: Request) -> str:
        """Returns the name of the first example of a request, for errors."""
        if isinstance(request, SplitRows):
            return self.dataset.name(request.split, int(request.rows[0]))
        return self.dataset.name(TRAIN, int(self.indices(self._positions(request))[0]))

    def _positions(self, part: TrainingPart) -> NDArray[np.int64]:
        return self.share[part.start : part.stop] + part.batch * self.batch_size

    def read_training(self, indices: NDArray[np.int64], positions: NDArray[np.int64], out: Arrays) -> None:
        """Reads training examples for ``positions`` of the stream, with their random crops."""
        self.dataset.read_into(TRAIN, indices, out, None if self.crop is None else self.crop.of(positions))

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the training examples at sorted ``positions`` of the stream."""
        first = int(positions[0])
        with self._lock:  # one thread computes an epoch, not all of them
            return self.order.indices(first, int(positions[-1]) + 1)[positions - first]
