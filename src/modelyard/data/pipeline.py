"""Gives an engine its data: whole splits that stay on the device, or batches that are read ahead.

The examples of batch k are arithmetic (`order.py`), and so is the part of each image that a random crop takes while
decoding. A checkpoint therefore needs no state of the pipeline.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard import faults
from modelyard.config.durations import RunLength
from modelyard.config.schema import Config
from modelyard.data.batch_reader import BatchReader, RandomCrop, Request, SplitRows, TrainingPart
from modelyard.data.dataset import ID, TRAIN, Arrays, Dataset, Feature, empty_arrays
from modelyard.data.input_workers import CannotShareError, InputWorkers, SharedArrays
from modelyard.data.order import Order
from modelyard.data.stream import Stream, read_all, slots_for
from modelyard.errors import UserError
from modelyard.registry import AUGMENTATIONS
from modelyard.system.console import bar
from modelyard.system.machine import available_cores, available_memory

log = logging.getLogger("modelyard")

RESIDENT_BYTES = 2 << 30
"""The limit of all resident splits together if `resident` is auto."""
_ALWAYS_ALLOWED = 64 << 20
_ROW_BYTES = 8
"""The bytes of the index of an example."""
LEAST_CORES = 4
"""With fewer cores, threads are as fast as processes and start at once."""
STREAM_BYTES = 128 << 20
"""The limit of batches in memory; three batches are always allowed."""


def check_batch_memory(option: str, size: int, features: Mapping[str, Feature], copies: int = 1) -> None:
    """Raises `UserError` if batches of ``size`` examples do not fit in memory.

    Args:
        option: the option that has the batch size.
        size: the examples of this process.
        features: shape and type of each array of an example.
        copies: the number of batches that are in memory at once.
    """
    example = sum(feature.nbytes for feature in features.values())
    needed, free = size * copies * (example + _ROW_BYTES), available_memory()
    if needed > _ALWAYS_ALLOWED and needed > free:
        fitting = f"at most {free // (copies * (example + _ROW_BYTES)):,}" if free > 0 else "a smaller one"
        raise UserError(
            f"{option} is too large: {size:,} examples of {example:,} bytes need {needed / 2**30:,.1f} GiB of memory, "
            f"but {free / 2**30:,.1f} GiB are free. Give {fitting}."
        )


class Pipeline:
    """The data of a run, as an engine takes it.

    Args:
        config: the resolved config.
        dataset: the data of all splits.
        run: the lengths of the run.
        share: the positions of every global batch that this process reads; by default all.
    """

    def __init__(
        self, config: Config, dataset: Dataset, run: RunLength, share: NDArray[np.int64] | None = None
    ) -> None:
        self.config, self.dataset, self.run = config, dataset, run
        self.order = Order.for_size(config.random_seed, run.examples, config.shuffle)
        self.share = np.arange(run.batch_size) if share is None else share
        self.threads = config.input_threads or available_cores()
        self.features: dict[str, Feature] = {n: f for n, f in dataset.features.items() if n != ID}
        # A random crop as the first augmentation is better done on the whole image file, while it is decoded. Maps and
        # boxes belong to the decoded image, and are cropped with it on the device.
        self.crops_while_decoding = (
            dataset.crops
            and bool(config.augment)
            and config.augment[0].name == "random_resized_crop"
            and not (dataset.maps or dataset.boxes)
        )
        if self.crops_while_decoding and config.resident == "always":
            raise UserError(
                "resident is 'always', but random_resized_crop takes another part of each image file every time it is "
                "read. Set resident to 'auto', or leave random_resized_crop out."
            )
        self.reader = BatchReader(dataset, self.order, run.batch_size, self.share, self._crop())
        self._workers: InputWorkers | None = None
        self._worker_count = input_workers(config, dataset)
        self._resident: dict[str, Arrays] = {}
        self._free_bytes = RESIDENT_BYTES
        self._stream: Stream | None = None

    # -- resident splits --------------------------------------------------------------------------------------------

    def resident(self, split: str) -> Arrays | None:
        """Returns the whole split, decoded, if it is resident; else None."""
        if split in self._resident:
            return self._resident[split]
        if not self._is_resident(split):
            return None
        arrays = self.dataset.arrays(split)
        if arrays is None:
            size = self.dataset.size(split)
            arrays = empty_arrays(self.features, size)

            def read(indices: NDArray[np.int64], out: Arrays) -> None:
                self.dataset.read_into(split, indices, out)

            with bar(f"reading {split}", size) as progress:
                read_all(read, size, arrays, self.threads, progress)
        self._resident[split] = {name: arrays[name] for name in self.features}
        self._free_bytes -= self._bytes(split)
        return self._resident[split]

    def _is_resident(self, split: str) -> bool:
        if split == TRAIN and self.crops_while_decoding:
            return False
        if self.config.resident != "auto":
            return self.config.resident == "always"
        if self._bytes(split) > self._free_bytes:
            return False
        # A short run does not need the whole split.
        wanted = self.run.total_steps * self.run.batch_size
        return split != TRAIN or self.dataset.arrays(split) is not None or wanted >= self.dataset.size(split)

    def _bytes(self, split: str) -> int:
        return sum(feature.nbytes for feature in self.features.values()) * self.dataset.size(split)

    # -- training ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def training(self, step: int, most: int) -> Iterator[tuple[Arrays, int]]:
        """Yields this process's share of at most ``most`` global batches from ``step`` on, and their number."""
        if self._stream is None:
            slots = slots_for(self.features, len(self.share), STREAM_BYTES)
            check_batch_memory("train_batch_size", len(self.share), self.features, slots)
            self._stream = self._read_ahead(TrainingPart, len(self.share), slots)
            while_decoding = ", cropped while they are decoded" if self.crops_while_decoding else ""
            by = f"{self.threads} threads" if self._workers is None else f"{self._workers.count} processes"
            log.info("training batches are read ahead by %s%s", by, while_decoding)
        with self._stream.batches(step, most) as taken:
            yield taken

    def rows(self, step: int, count: int) -> NDArray[np.int64]:
        """Returns the examples of ``count`` global batches from ``step`` on, one row per batch."""
        return self.order.batches(step, count, self.run.batch_size)

    def training_examples(self, step: int, most: int) -> tuple[Arrays, NDArray[np.uint64]]:
        """Returns the first examples of a global batch, before augmentation on the device, and their positions."""
        count = min(most, self.run.batch_size)
        out = empty_arrays(self.features, count)
        positions = np.arange(count) + step * self.run.batch_size
        self.read(self.reader.indices(positions), positions, out)
        return out, positions.astype(np.uint64)

    def read(self, indices: NDArray[np.int64], positions: NDArray[np.int64], out: Arrays) -> None:
        """Reads training examples for ``positions`` of the stream, with their random crops if done while decoding."""
        self.reader.read_training(indices, positions, out)

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluation(
        self, split: str, batch_size: int, process: int = 0, processes: int = 1, first: int = 0
    ) -> Generator[tuple[Arrays, NDArray[np.float64]], None, None]:
        """Yields batches of equal size in storage order, with weights. Padding of the last batch has weight 0.

        Args:
            split: which split.
            batch_size: examples per global batch.
            process: which of equal consecutive shares of every batch to yield.
            processes: the number of shares.
            first: the example to start with.
        """
        size, share = self.dataset.size(split), batch_size // processes
        end = first + -(-(size - first) // batch_size) * batch_size
        starts = range(first + process * share, end, batch_size)
        resident = self.resident(split)
        if resident is not None:
            for start in starts:
                rows, weights = _padded(start, share, size)
                yield {name: array[rows] for name, array in resident.items()}, weights
            return

        def request(batch: int, start: int, stop: int) -> SplitRows:
            return SplitRows(split, _padded(starts[batch] + start, stop - start, size)[0])

        slots = min(slots_for(self.features, share, STREAM_BYTES), max(len(starts), 2))
        check_batch_memory("eval_batch_size", share, self.features, slots)
        stream = self._read_ahead(request, share, slots, len(starts))
        try:
            for number, start in enumerate(starts):
                with stream.batches(number, 1) as (arrays, _):
                    yield arrays, _padded(start, share, size)[1]
        finally:
            stream.close()

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _read_ahead(
        self, request: Callable[[int, int, int], Request], size: int, slots: int, count: int | None = None
    ) -> Stream:
        """Returns a stream of batches of ``size`` examples, read by processes or by threads of this one."""
        fixed: Any = {"slots": slots, "count": count}
        if self._worker_count:
            try:
                memory = SharedArrays(self.features, slots * size)
                if self._workers is None:
                    self._workers = InputWorkers(self.reader, self._worker_count)
            except CannotShareError as error:
                log.info("the input is read by threads of this process: %s", error)
                self._worker_count = 0
            else:
                workers = self._workers

                def read_there(batch: int, start: int, stop: int, out: Arrays) -> None:
                    row = batch % slots * size + start
                    workers.read(memory, row, stop - start, request(batch, start, stop))

                return Stream(read_there, self.features, size, threads=workers.count, buffers=memory.arrays, **fixed)

        def read_here(batch: int, start: int, stop: int, out: Arrays) -> None:
            self.reader.read(request(batch, start, stop), out)

        return Stream(read_here, self.features, size, threads=self.threads, **fixed)

    def _crop(self) -> RandomCrop | None:
        if not self.crops_while_decoding:
            return None
        options: Any = self.config.augment[0].options(AUGMENTATIONS)
        return RandomCrop(self.config.random_seed, options.scale, options.ratio)


def input_workers(config: Config, dataset: Dataset) -> int:
    """Returns how many processes read data that is not resident; 0 if threads of this process do."""
    if not dataset.copies_read or dataset.arrays(next(iter(dataset.sizes()))) is not None:
        return 0
    if config.input_workers != "auto":
        return config.input_workers
    cores = min(available_cores(), config.threads or available_cores())
    # Faults of reads are counted in the process of the run.
    chosen = config.input_threads or not dataset.is_built_in or faults.happen_at(faults.READ)
    return cores if cores >= LEAST_CORES and not chosen else 0


def _padded(start: int, count: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns rows from ``start`` on and their weights. Beyond the end it is row 0 with weight 0."""
    rows = np.arange(start, start + count)
    inside = rows < size
    return np.where(inside, rows, 0), inside.astype(np.float64)


def share_of_batch(batch_size: int, pieces: int, workers: int, worker: int) -> NDArray[np.int64]:
    """Returns the positions of every global batch that one of several workers reads: its part of each piece."""
    return np.arange(batch_size).reshape(pieces, workers, -1)[:, worker].reshape(-1)
