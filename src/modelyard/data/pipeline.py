"""Gives an engine its data: whole splits that stay on the device, or batches that are read ahead.

The examples of batch k are arithmetic (`order.py`), and so is the part of each image that a random crop takes while
decoding. A checkpoint therefore needs no state of the pipeline.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
from modelyard.data.stream import Stream, slots_for
from modelyard.errors import UserError
from modelyard.registry import AUGMENTATIONS
from modelyard.system.console import bar
from modelyard.system.machine import available_cores, available_memory

log = logging.getLogger("modelyard")

RESIDENT_BYTES = 2 << 30
"""Memory that all resident splits together may always use if `resident` is auto."""
_HOST_SHARE = 3
"""A larger resident split is in the memory of the host twice while it is copied to the device; a third part is left."""
_ALWAYS_ALLOWED = 64 << 20
_ROW_BYTES = 8
"""The bytes of the index of an example."""
LEAST_CORES = 4
"""With fewer cores, threads are as fast as processes and start at once."""
_LEAST_BY_PROCESSES = 10_000
"""Fewer examples are decoded before processes have started."""
STREAM_BYTES = 256 << 20
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
        device_bytes: returns how much data the device can hold; asked when the first split is wanted, and the model is
            there.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        run: RunLength,
        share: NDArray[np.int64] | None = None,
        device_bytes: Callable[[], int] = lambda: RESIDENT_BYTES,
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
        self._device_bytes = device_bytes
        self._held: dict[str, int] = {}
        self._training: Future[Stream] | None = None
        self._lock = threading.Lock()

    # -- resident splits --------------------------------------------------------------------------------------------

    def resident(self, split: str) -> Arrays | None:
        """Returns the whole split, decoded, if it is resident; else None."""
        if split in self._resident:
            return self._resident[split]
        if not self.is_resident(split):
            return None
        arrays = self.dataset.arrays(split)
        if arrays is None:
            arrays = self._read_all(split)
            if split == TRAIN:
                log.info("the training data stays on the device: %s MiB", f"{self._bytes(split) / 2**20:,.0f}")
        self._resident[split] = {name: arrays[name] for name in self.features}
        return self._resident[split]

    def is_resident(self, split: str) -> bool:
        """Returns whether a split stays on the device, without reading it."""
        if split not in self._held and self._why_not_resident(split) is None:
            self._held[split] = self._bytes(split)
        return split in self._held

    def release(self, split: str) -> None:
        """Frees the host's memory of a resident split, which is on the device now. It is read anew if it is wanted."""
        self._resident.pop(split, None)

    def _read_all(self, split: str) -> Arrays:
        """Reads a whole split; a large one by processes, which it ends if they have nothing else to do."""
        size, example = self.dataset.size(split), sum(feature.nbytes for feature in self.features.values())
        arrays = empty_arrays(self.features, size)
        part = min(size, int(np.clip(STREAM_BYTES // (4 * max(example, 1)), 64, 1024)))
        starts = range(0, size, part)
        are_idle = self._workers is None and self._training is None
        batches = self._in_order(split, starts, part, by_processes=not are_idle or size >= _LEAST_BY_PROCESSES)
        with bar(f"reading {split}", size) as progress, contextlib.closing(batches):
            for start, (batch, _) in zip(starts, batches, strict=True):
                for name, array in arrays.items():
                    array[start : start + part] = batch[name][: size - start]
                progress(min(start + part, size), size)
        if are_idle:
            self._end_workers()
        return arrays

    def _why_not_resident(self, split: str) -> str | None:
        """Returns why a split is not resident, as the end of a sentence; None if it is."""
        if split == TRAIN and self.crops_while_decoding:
            return ", cropped while they are decoded"
        if self.config.resident != "auto":
            return None if self.config.resident == "always" else ""
        size = self._bytes(split)
        if size > self._limit - sum(self._held.values()):
            fitting = f"at most {self._limit / 2**30:,.1f} GiB stay on the device"
            return f": the split has {size / 2**30:,.1f} GiB, and {fitting}"
        wanted = self.run.total_steps * self.run.batch_size
        if split == TRAIN and self.dataset.arrays(split) is None and wanted < self.dataset.size(split):
            return ": the run is shorter than an epoch"
        return None

    @functools.cached_property
    def _limit(self) -> int:
        """The bytes that all resident splits together may have. It never changes, and so a split stays what it is."""
        return max(RESIDENT_BYTES, min(self._device_bytes(), available_memory() // _HOST_SHARE))

    def _bytes(self, split: str) -> int:
        return sum(feature.nbytes for feature in self.features.values()) * self.dataset.size(split)

    # -- training ---------------------------------------------------------------------------------------------------

    def start(self, step: int, together: int = 1) -> None:
        """Begins to read batches ahead from ``step`` on, while the caller does something else, such as compiling.

        Args:
            step: the first step.
            together: the batches that the caller wants at a time, if there is memory for twice as many. Those from a
                multiple of this number on lie side by side then.
        """
        if self._training is not None:
            return
        slots = slots_for(self.features, len(self.share), STREAM_BYTES)
        if together > 1:
            slots = slots - slots % (2 * together) or slots  # `Stream` gives at most half of them at a time
        check_batch_memory("train_batch_size", len(self.share), self.features, slots)
        why = self._why_not_resident(TRAIN) or ""  # while it is so: other splits may become resident meanwhile

        def begin() -> Stream:
            stream = self._read_ahead(TrainingPart, len(self.share), slots)
            by = f"{self._worker_count} processes" if self._worker_count else f"{self.threads} threads"
            log.info("training batches are read ahead by %s%s", by, why)
            stream.start(step)
            return stream

        beside = ThreadPoolExecutor(1)
        self._training = beside.submit(begin)
        beside.shutdown(wait=False)

    @contextlib.contextmanager
    def training(self, step: int, most: int) -> Iterator[tuple[Arrays, int]]:
        """Yields this process's share of at most ``most`` global batches from ``step`` on, and their number."""
        self.start(step)
        assert self._training is not None
        with self._training.result().batches(step, most) as taken:
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

        check_batch_memory("eval_batch_size", share, self.features, self._slots(share, len(starts)))
        yield from self._in_order(split, starts, share)

    def _in_order(
        self, split: str, starts: range, count: int, by_processes: bool = True
    ) -> Generator[tuple[Arrays, NDArray[np.float64]], None, None]:
        """Reads ``count`` examples of a split from each of ``starts`` on. Yields them with weights."""
        size = self.dataset.size(split)

        def request(batch: int, start: int, stop: int) -> SplitRows:
            return SplitRows(split, _padded(starts[batch] + start, stop - start, size)[0])

        stream = self._read_ahead(request, count, self._slots(count, len(starts)), len(starts), by_processes)
        try:
            for number, start in enumerate(starts):
                with stream.batches(number, 1) as (arrays, _):
                    yield arrays, _padded(start, count, size)[1]
        finally:
            stream.close()

    def _slots(self, size: int, batches: int) -> int:
        return min(slots_for(self.features, size, STREAM_BYTES), max(batches, 2))

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        if self._training is not None:
            with contextlib.suppress(Exception):  # `training` raises it
                self._training.result().close()
            self._training = None
        self._end_workers()

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _read_ahead(
        self,
        request: Callable[[int, int, int], Request],
        size: int,
        slots: int,
        count: int | None = None,
        by_processes: bool = True,
    ) -> Stream:
        """Returns a stream of batches of ``size`` examples, read by processes or by threads of this one."""
        fixed: Any = {"slots": slots, "count": count}
        memory = self._shared(slots * size) if by_processes else None
        if memory is not None:
            workers = self._workers
            assert workers is not None

            def read_there(batch: int, start: int, stop: int, out: Arrays) -> None:
                row = batch % slots * size + start
                workers.read(memory, row, stop - start, request(batch, start, stop))

            return Stream(read_there, self.features, size, threads=workers.count, buffers=memory.arrays, **fixed)

        def read_here(batch: int, start: int, stop: int, out: Arrays) -> None:
            self.reader.read(request(batch, start, stop), out)

        return Stream(read_here, self.features, size, threads=self.threads, **fixed)

    def _shared(self, count: int) -> SharedArrays | None:
        """Returns memory for ``count`` examples, into which processes read; None if threads of this process must."""
        with self._lock:
            if not self._worker_count:
                return None
            try:
                memory = SharedArrays(self.features, count)
                if self._workers is None:
                    self._workers = InputWorkers(self.reader, self._worker_count)
            except CannotShareError as error:
                log.info("the input is read by threads of this process: %s", error)
                self._worker_count = 0
                return None
            return memory

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
