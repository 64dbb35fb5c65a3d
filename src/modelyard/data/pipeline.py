"""From a dataset to what an engine is given: whole splits that stay on the device, or batches read ahead.

Which examples make up batch k is arithmetic (`order.py`); so is the part of each image that a random crop takes while
decoding. Nothing here has a state that a checkpoint would need.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config.durations import RunLength
from modelyard.config.schema import Config
from modelyard.data.dataset import ID, TRAIN, Arrays, Crop, Dataset, Feature
from modelyard.data.draws import HOST, SCALARS, Draws, crop_box, fold, halves
from modelyard.data.order import Order
from modelyard.data.stream import Stream, places_for, read_all
from modelyard.errors import UserError
from modelyard.registry import AUGMENTATIONS
from modelyard.system.console import bar
from modelyard.system.machine import available_cores

log = logging.getLogger("modelyard")

RESIDENT_BYTES = 2 << 30
"""What all splits together may take where `resident` is auto."""
STREAM_BYTES = 128 << 20
"""What batches that are read ahead may take, in use or waiting; three batches always."""


class Pipeline:
    """The data of a run, as an engine takes it.

    Args:
        config: the resolved config.
        dataset: the data of all splits.
        run: the lengths of the run.
        share: which positions of every global batch this process reads; by default all.
    """

    def __init__(
        self, config: Config, dataset: Dataset, run: RunLength, share: NDArray[np.int64] | None = None
    ) -> None:
        self.config, self.dataset, self.run = config, dataset, run
        self.order = Order.for_size(config.random_seed, run.examples, config.shuffle)
        self.share = np.arange(run.batch_size) if share is None else share
        self.threads = config.input_threads or available_cores()
        self.features: dict[str, Feature] = {n: f for n, f in dataset.features.items() if n != ID}
        self.crops_while_decoding = _crops_while_decoding(config, dataset)
        if self.crops_while_decoding and config.resident == "always":
            raise UserError(
                "resident is 'always', but random_resized_crop takes another part of each image file every time it is "
                "read. Set resident to 'auto', or leave random_resized_crop out."
            )
        self._ordering = threading.Lock()
        self._held: dict[str, Arrays] = {}
        self._room = RESIDENT_BYTES
        self._stream: Stream | None = None

    # -- the resident path ------------------------------------------------------------------------------------------

    def resident(self, split: str) -> Arrays | None:
        """The whole split, decoded, where it is to stay in memory; else None."""
        if split in self._held:
            return self._held[split]
        if not self._stays(split):
            return None
        arrays = self.dataset.arrays(split)
        if arrays is None:
            size = self.dataset.size(split)
            arrays = {name: np.empty((size, *f.shape), f.dtype) for name, f in self.features.items()}

            def read(indices: NDArray[np.int64], out: Arrays) -> None:
                self.dataset.read_into(split, indices, out)

            with bar(f"reading {split}", size) as progress:
                read_all(read, size, arrays, self.threads, progress)
        self._held[split] = {name: arrays[name] for name in self.features}
        self._room -= self._bytes(split)
        return self._held[split]

    def _stays(self, split: str) -> bool:
        if split == TRAIN and self.crops_while_decoding:
            return False
        if self.config.resident != "auto":
            return self.config.resident == "always"
        if self._bytes(split) > self._room:
            return False
        # What a short run does not need is not read in advance.
        wanted = self.run.total_steps * self.run.batch_size
        return split != TRAIN or self.dataset.arrays(split) is not None or wanted >= self.dataset.size(split)

    def _bytes(self, split: str) -> int:
        example = sum(int(np.prod(f.shape)) * np.dtype(f.dtype).itemsize for f in self.features.values())
        return example * self.dataset.size(split)

    # -- the streaming path -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def training(self, step: int, most: int) -> Iterator[tuple[Arrays, int]]:
        """This process's share of the global batches from ``step`` on, at most ``most`` of them, and how many."""
        if self._stream is None:
            places = places_for(self.features, len(self.share), STREAM_BYTES)
            while_decoding = ", cropped while they are decoded" if self.crops_while_decoding else ""
            log.info("training batches are read ahead by %d threads%s", self.threads, while_decoding)
            self._stream = Stream(
                self._read_training, self.features, len(self.share), places=places, threads=self.threads
            )
        with self._stream.batches(step, most) as taken:
            yield taken

    def rows(self, step: int, count: int) -> NDArray[np.int64]:
        """The examples of ``count`` global batches from ``step`` on, one row a batch."""
        return self.order.batches(step, count, self.run.batch_size)

    def training_examples(self, step: int, most: int) -> tuple[Arrays, NDArray[np.uint64]]:
        """The first examples of a global batch, before augmentation on the device, and their positions."""
        count = min(most, self.run.batch_size)
        out = {name: np.empty((count, *f.shape), f.dtype) for name, f in self.features.items()}
        positions = np.arange(count) + step * self.run.batch_size
        self.read(self._indices(positions), positions, out)
        return out, positions.astype(np.uint64)

    def read(self, indices: NDArray[np.int64], positions: NDArray[np.int64], out: Arrays) -> None:
        """Training examples as they are at ``positions`` of the stream: cropped while decoding, if asked for."""
        crop = self._crop(positions) if self.crops_while_decoding else None
        self.dataset.read_into(TRAIN, indices, out, crop)

    def _read_training(self, batch: int, start: int, stop: int, out: Arrays) -> None:
        positions = self.share[start:stop] + batch * self.run.batch_size
        self.read(self._indices(positions), positions, out)

    def _indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        first = int(positions[0])
        with self._ordering:  # one thread computes an epoch, not all of them
            return self.order.indices(first, int(positions[-1]) + 1)[positions - first]

    def _crop(self, positions: NDArray[np.int64]) -> Crop:
        """The part of each image that the first augmentation takes, from the draws that it has on the device too."""
        options: Any = self.config.augment[0].options(AUGMENTATIONS)
        low, high = halves(positions.astype(np.uint64))
        draws = Draws(fold(self.config.random_seed, 0), low, high, ops=HOST).uniform(4).tolist()

        def crop(place: int, height: int, width: int) -> tuple[float, float, float, float]:
            return crop_box(draws[place], height, width, options.scale, options.ratio, ops=SCALARS)

        return crop

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluation(
        self, split: str, batch_size: int, process: int = 0, processes: int = 1, first: int = 0
    ) -> Generator[tuple[Arrays, NDArray[np.float64]], None, None]:
        """Batches of equal size in storage order, with weights; the last is filled up with examples of weight 0.

        Args:
            split: which one.
            batch_size: examples in a whole batch.
            process: which of equal consecutive shares of every batch to give.
            processes: how many such shares there are.
            first: the example to begin with.
        """
        size, share = self.dataset.size(split), batch_size // processes
        end = first + -(-(size - first) // batch_size) * batch_size
        starts = range(first + process * share, end, batch_size)
        held = self.resident(split)
        if held is not None:
            for start in starts:
                rows, weights = _padded(start, share, size)
                yield {name: array[rows] for name, array in held.items()}, weights
            return

        def read(batch: int, start: int, stop: int, out: Arrays) -> None:
            first = starts[batch]
            self.dataset.read_into(split, _padded(first + start, stop - start, size)[0], out)

        places = min(places_for(self.features, share, STREAM_BYTES), max(len(starts), 2))
        stream = Stream(read, self.features, share, places=places, threads=self.threads, count=len(starts))
        try:
            for number, start in enumerate(starts):
                with stream.batches(number, 1) as (arrays, _):
                    yield arrays, _padded(start, share, size)[1]
        finally:
            stream.close()

    def close(self) -> None:
        """Ends the threads that read ahead."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _crops_while_decoding(config: Config, dataset: Dataset) -> bool:
    """Whether the first augmentation is a crop that is better done on whole image files, while they are decoded."""
    return dataset.crops and bool(config.augment) and config.augment[0].name == "random_resized_crop"


def _padded(start: int, count: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Rows from ``start`` on and their weights; those beyond the end are row 0 with weight 0."""
    rows = np.arange(start, start + count)
    inside = rows < size
    return np.where(inside, rows, 0), inside.astype(np.float64)


def share_of_batch(batch_size: int, pieces: int, workers: int, worker: int) -> NDArray[np.int64]:
    """The positions of every global batch that one of several workers reads: its part of each piece."""
    positions = np.arange(batch_size).reshape(pieces, workers, -1)
    return positions[:, worker].reshape(-1)
