"""Batches read ahead by threads, for data that does not lie on the device.

Batch k is read where its turn comes, into one of a fixed number of places, so memory does not grow with the dataset.
What a batch holds is arithmetic; the stream only decides when it is read. Threads are enough: reading, decoding and
resizing release Python's lock.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import Arrays, Feature

ReadInto = Callable[[int, int, int, Arrays], None]
"""``read(batch, start, stop, out)``: fills ``out`` with the examples ``start`` to ``stop`` of a batch."""

PIECE = 16
"""Examples a thread takes at a time: few enough that the last batch is not waited for, enough to be worth a turn."""


_running: set[Stream] = set()


@atexit.register
def _close_all() -> None:
    """A thread that dies inside a library while the interpreter ends would take the process down with it."""
    for stream in list(_running):
        stream.close()


class Stream:
    """Batches of equal size, read ahead in order.

    Args:
        read: fills a part of a batch; called from several threads.
        features: what an example looks like.
        batch_size: examples a batch.
        places: batches that are kept, those in use included.
        count: how many batches there are; None for no end.
        threads: how many read.

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
        places: int,
        threads: int,
        count: int | None = None,
    ) -> None:
        self._read = read
        self._batch_size = batch_size
        self._places = places
        self._count = count
        self._threads = threads
        self._buffers = {
            name: np.empty((places * batch_size, *feature.shape), feature.dtype) for name, feature in features.items()
        }
        self._pieces = -(-batch_size // PIECE)
        self._change = threading.Condition()
        self._workers: list[threading.Thread] = []
        self._generation = 0  # a jump to another batch makes the work of the generation before worthless
        self._first = 0  # the batch the reader wants next
        self._claimed = 0  # (batch - start) × pieces + piece: what has been given to threads
        self._start = 0
        self._missing: dict[int, int] = {}
        self._failed: dict[int, BaseException] = {}
        self._running = 0
        self._closed = False

    @contextlib.contextmanager
    def batches(self, first: int, most: int) -> Iterator[tuple[Arrays, int]]:
        """The batches from ``first`` on, at most ``most``: arrays of all their examples, and how many batches.

        The arrays are overwritten when the block ends. An error of reading is raised where its batch comes first.
        """
        if self._closed:
            raise ValueError("the stream is closed")
        self._go_to(first)
        place = first % self._places
        count = min(most, self._places - place, max(self._places // 2, 1))
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
        rows = slice(place * self._batch_size, (place + count) * self._batch_size)
        yield {name: array[rows] for name, array in self._buffers.items()}, count
        with self._change:
            for k in range(first, first + count):
                del self._missing[k]
            self._first = first + count
            self._change.notify_all()

    def close(self) -> None:
        """Ends the threads."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for worker in self._workers:
            worker.join()
        self._workers = []
        _running.discard(self)

    def _go_to(self, first: int) -> None:
        with self._change:
            if self._workers and first == self._first:
                return
            self._stop_reading()
            self._first = self._start = first
            self._claimed = 0
            self._change.notify_all()
            if not self._workers:
                _running.add(self)
                self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self._threads)]
                for worker in self._workers:
                    worker.start()

    def _stop_reading(self) -> None:
        """Waits, with the lock held, until no thread writes into the buffers."""
        self._generation += 1
        self._missing, self._failed = {}, {}
        self._first = self._start = -1
        while self._running:
            self._change.wait()

    def _work(self) -> None:
        while (claim := self._claim()) is not None:
            generation, batch, piece = claim
            start = piece * PIECE
            stop = min(start + PIECE, self._batch_size)
            base = batch % self._places * self._batch_size
            out = {name: array[base + start : base + stop] for name, array in self._buffers.items()}
            error: BaseException | None = None
            try:
                self._read(batch, start, stop, out)
            except BaseException as raised:  # it is raised again where the batch is asked for
                error = raised
            with self._change:
                self._running -= 1
                if generation == self._generation:
                    self._missing[batch] -= 1
                    if error is not None:
                        self._failed.setdefault(batch, error)
                if generation != self._generation or not self._missing[batch]:
                    self._change.notify_all()

    def _claim(self) -> tuple[int, int, int] | None:
        """The next piece of work, as soon as there is a place for it."""
        with self._change:
            while not self._closed:
                batch = self._start + self._claimed // self._pieces
                there_is = self._count is None or batch < self._count
                if self._start >= 0 and there_is and batch < self._first + self._places:
                    piece = self._claimed % self._pieces
                    self._missing.setdefault(batch, self._pieces)
                    self._claimed += 1
                    self._running += 1
                    return self._generation, batch, piece
                self._change.wait()
        return None


def places_for(features: Mapping[str, Feature], batch_size: int, budget: int) -> int:
    """How many batches fit into ``budget`` bytes: at least three, so that one is used while others are read."""
    example = sum(int(np.prod(f.shape)) * np.dtype(f.dtype).itemsize for f in features.values())
    return int(np.clip(budget // max(example * batch_size, 1), 3, 256))


def read_all(
    read: Callable[[NDArray[np.int64], Arrays], None],
    size: int,
    out: Arrays,
    threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fills ``out`` with all ``size`` examples, side by side."""
    from concurrent.futures import ThreadPoolExecutor

    step = 32

    def part(start: int) -> int:
        stop = min(start + step, size)
        read(np.arange(start, stop), {name: array[start:stop] for name, array in out.items()})
        return stop - start

    done = 0
    with ThreadPoolExecutor(threads) as pool:
        try:
            for count in pool.map(part, range(0, size, step)):
                done += count
                if progress is not None:
                    progress(done, size)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
