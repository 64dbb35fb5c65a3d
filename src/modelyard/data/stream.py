"""Batches that threads read ahead, for data that is not resident on the device.

Batch k is read into one of a fixed number of slots, so memory does not grow with the dataset. What a batch contains is
arithmetic; the stream only decides when to read it. The threads read themselves, or wait for processes that read
(`input_workers.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from modelyard.data.dataset import Arrays, Feature, empty_arrays

ReadInto = Callable[[int, int, int, Arrays], None]
"""``read(batch, start, stop, out)`` fills ``out`` with the examples ``start`` to ``stop`` of a batch."""

PIECE = 16
"""Examples that a thread reads at a time: few, so that threads finish a batch together; enough to outweigh locking."""
_BEFORE_USE = 2
"""Batches that are read before the first one is wanted."""

_open_streams: set[Stream] = set()


@atexit.register
def _close_all() -> None:
    """A thread inside a C++ library would abort the process when the interpreter exits."""
    for stream in list(_open_streams):
        stream.close()


class Stream:
    """Batches of equal size, read ahead in order.

    Args:
        read: fills a part of a batch; several threads call it.
        features: shape and type of each array of an example.
        batch_size: examples per batch.
        slots: the number of batches in memory, including those in use.
        count: the number of batches; None if there is no end.
        threads: the number of threads that read.
        buffers: arrays of all slots, if they must be in memory that is shared with other processes.

    Example:
        >>> with stream.batches(step, most=8) as (arrays, count):
        ...     train(arrays, count)
    """

    def __init__(
        self,
        read: ReadInto,
        features: Mapping[str, Feature],
        batch_size: int,
        *,
        slots: int,
        threads: int,
        count: int | None = None,
        buffers: Arrays | None = None,
    ) -> None:
        self._read = read
        self._batch_size = batch_size
        self._slots = slots
        self._count = count
        self._threads = threads
        self._buffers = empty_arrays(features, slots * batch_size) if buffers is None else buffers
        self._pieces = -(-batch_size // PIECE)
        self._change = threading.Condition()
        self._workers: list[threading.Thread] = []
        self._first = 0  # the batch that the caller wants next
        self._start = 0  # the batch at which reading began; -1 while nothing is read
        self._ahead = slots  # batches that may be read from there on
        self._claimed = 0  # pieces given to threads since then
        self._missing: dict[int, int] = {}
        self._failed: dict[int, BaseException] = {}
        self._running = 0
        self._closed = False

    @contextlib.contextmanager
    def batches(self, first: int, most: int) -> Iterator[tuple[Arrays, int]]:
        """Yields the batches from ``first`` on: arrays of all their examples, and the number of batches.

        The arrays are overwritten after the block. An error of reading is raised when its batch is the first.
        """
        if self._closed:
            raise ValueError("the stream is closed")
        self._seek(first, self._slots)
        slot = first % self._slots
        count = min(most, self._slots - slot, max(self._slots // 2, 1))
        if self._count is not None:
            count = min(count, self._count - first)
        with self._change:
            while any(self._missing.get(k, 1) for k in range(first, first + count)):
                self._change.wait()
            count = next((k - first for k in range(first, first + count) if k in self._failed), count)
            if not count:
                error = self._failed[first]
                self._stop_reading()
                raise error
        rows = slice(slot * self._batch_size, (slot + count) * self._batch_size)
        yield {name: array[rows] for name, array in self._buffers.items()}, count
        with self._change:
            for k in range(first, first + count):
                del self._missing[k]
            self._first = first + count
            self._change.notify_all()

    def start(self, first: int) -> None:
        """Begins to read at ``first``: only few batches, since whoever does not want them yet needs the processor."""
        self._seek(first, min(_BEFORE_USE, self._slots))

    def close(self) -> None:
        """Ends the threads."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for worker in self._workers:
            worker.join()
        self._workers = []
        _open_streams.discard(self)

    def _seek(self, first: int, ahead: int) -> None:
        with self._change:
            if self._workers and first == self._first:
                if ahead > self._ahead:
                    self._ahead = ahead
                    self._change.notify_all()
                return
            self._stop_reading()
            self._ahead = ahead
            self._first = self._start = first
            self._claimed = 0
            self._change.notify_all()
            if not self._workers:
                _open_streams.add(self)
                self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self._threads)]
                for worker in self._workers:
                    worker.start()

    def _stop_reading(self) -> None:
        """Waits, with the lock held, until no thread writes into the buffers."""
        self._first = self._start = -1
        while self._running:
            self._change.wait()
        self._missing, self._failed = {}, {}

    def _work(self) -> None:
        while (claim := self._claim()) is not None:
            batch, piece = claim
            start = piece * PIECE
            stop = min(start + PIECE, self._batch_size)
            base = batch % self._slots * self._batch_size
            out = {name: array[base + start : base + stop] for name, array in self._buffers.items()}
            error: BaseException | None = None
            try:
                self._read(batch, start, stop, out)
            except BaseException as raised:  # `batches` raises it
                error = raised
            with self._change:
                self._running -= 1
                self._missing[batch] -= 1
                if error is not None:
                    self._failed.setdefault(batch, error)
                if not self._missing[batch] or not self._running:
                    self._change.notify_all()

    def _claim(self) -> tuple[int, int] | None:
        """Waits for a free slot; returns the batch and piece to read, or None if the stream is closed."""
        with self._change:
            while not self._closed:
                batch = self._start + self._claimed // self._pieces
                exists = self._count is None or batch < self._count
                if self._start >= 0 and exists and batch < self._first + self._ahead:
                    piece = self._claimed % self._pieces
                    self._missing.setdefault(batch, self._pieces)
                    self._claimed += 1
                    self._running += 1
                    return batch, piece
                self._change.wait()
        return None


def slots_for(features: Mapping[str, Feature], batch_size: int, budget: int) -> int:
    """Returns how many batches fit into ``budget`` bytes; at least three, so that one is used while others are read."""
    example = sum(feature.nbytes for feature in features.values())
    return int(np.clip(budget // max(example * batch_size, 1), 3, 256))
