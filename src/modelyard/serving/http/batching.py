"""Batching: requests share a batch, which runs when it is full or its oldest request has waited long enough."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.pipeline import check_batch_memory
from modelyard.serving.servable import Outputs, Servable


class QueueFullError(Exception):
    """The queue has no room for a request."""


class DeadlineExceededError(Exception):
    """A request was not started before its deadline."""


@dataclass(frozen=True)
class BatchingOptions:
    """How requests are batched.

    Args:
        max_batch: images per batch.
        max_delay: seconds that the first request of a batch waits for others.
        max_queue: images in the queue.
    """

    max_batch: int = 32
    max_delay: float = 0.005
    max_queue: int = 1024


@dataclass(eq=False)
class _Request:
    inputs: Mapping[str, NDArray[Any]]
    count: int
    answer: asyncio.Future[Outputs]
    arrived: float
    deadline: float
    begun: int = 0
    """Examples that are in a batch already: a large request may be split."""
    parts: list[Outputs] = field(default_factory=list)


_Slice = tuple[_Request, int, int]
"""A request and the range of its examples that are in a batch."""
_Answer = tuple[asyncio.Future[Outputs], Outputs | BaseException]


class Batcher:
    """A queue and the thread of one model. The model is loaded, warmed up and called in that thread only.

    Args:
        load: returns the model; called in the thread, since Keras and JAX have settings per thread.
        batching: how requests are batched.
        observe: called after every batch with its images, its size with padding, and the seconds it took.
    """

    def __init__(
        self,
        load: Callable[[], Servable],
        batching: BatchingOptions,
        observe: Callable[[int, int, float], None] | None = None,
    ) -> None:
        self.loaded: Future[Servable] = Future()
        self.batching = batching
        self.waiting = 0
        self.sizes: list[int] = []
        """The batch sizes that are compiled; known when the model is loaded."""
        self._load, self._observe = load, observe
        self._queue: deque[_Request] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> Future[Servable]:
        """Starts to load. The future holds the model, or the error of loading it."""
        self._thread.start()
        return self.loaded

    def submit(self, inputs: Mapping[str, NDArray[Any]], deadline: float) -> asyncio.Future[Outputs]:
        """Queues examples and returns a future of the predictions, for the event loop of the caller.

        Args:
            inputs: an array per input of the model, by name.
            deadline: by `time.monotonic`; a request that is not started by then is dropped.

        Raises:
            QueueFullError: if the queue is full.
        """
        count, now = len(next(iter(inputs.values()))), time.monotonic()
        request = _Request(inputs, count, asyncio.get_running_loop().create_future(), now, deadline)
        with self._change:
            # A request larger than the queue is accepted when nothing else waits.
            if self._closed or (self.waiting and self.waiting + count > self.batching.max_queue):
                raise QueueFullError(f"{self.waiting} images are waiting; the maximum is {self.batching.max_queue}")
            before, self.waiting = self.waiting, self.waiting + count
            self._queue.append(request)
            if before == 0 or before < self.batching.max_batch <= self.waiting:  # else the thread need not wake up
                self._change.notify()
        return request.answer

    def close(self) -> None:
        """Accepts no more requests; the thread ends when all are answered."""
        with self._change:
            self._closed = True
            self._change.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread and returns whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            servable = self._load()
            multiple = servable.batch_multiple
            features = {name: spec.feature for name, spec in servable.info.inputs.items()}
            check_batch_memory("max_batch", self.batching.max_batch, features)
            self.sizes = batch_sizes(-(-self.batching.max_batch // multiple) * multiple, multiple)
            servable.warm_up(self.sizes)
        except BaseException as error:
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(servable)
        while (batch := self._next_batch()) is not None:
            if batch:
                self._predict(servable, batch)

    def _next_batch(self) -> list[_Slice] | None:
        """Waits for a batch, in order of arrival; None at the end."""
        dropped: list[_Request] = []
        batch: list[_Slice] = []
        with self._change:
            while not self._queue and not self._closed:
                self._change.wait()
            while self._queue and self.waiting < self.batching.max_batch and not self._closed:
                left = self._queue[0].arrived + self.batching.max_delay - time.monotonic()
                if left <= 0:
                    break
                self._change.wait(left)
            if not self._queue:
                return None
            now, room = time.monotonic(), self.batching.max_batch
            while self._queue and room:
                request = self._queue[0]
                if request.answer.cancelled() or (not request.begun and now > request.deadline):
                    dropped.append(request)
                    self._queue.popleft()
                    self.waiting -= request.count - request.begun
                    continue
                first = request.begun
                request.begun = min(first + room, request.count)
                batch.append((request, first, request.begun))
                room -= request.begun - first
                self.waiting -= request.begun - first
                if request.begun == request.count:
                    self._queue.popleft()
        _deliver([(request.answer, DeadlineExceededError()) for request in dropped])
        return batch

    def _predict(self, servable: Servable, batch: list[_Slice]) -> None:
        began = time.monotonic()
        count = sum(end - first for _, first, end in batch)
        size = next(size for size in self.sizes if size >= count)
        answers: list[_Answer] = []
        try:
            inputs = {}
            for name, spec in servable.info.inputs.items():
                inputs[name] = np.zeros((size, *spec.shape), spec.dtype)
                parts = [request.inputs[name][first:end] for request, first, end in batch]
                np.concatenate(parts, out=inputs[name][:count])
            found = servable.predict(inputs)
        except BaseException as error:
            answers += [(request.answer, error) for request, _, _ in batch]
            with self._change:  # the rest of a request that was split is dropped: it is answered with the error
                while self._queue and self._queue[0].begun:
                    request = self._queue.popleft()
                    self.waiting -= request.count - request.begun
        else:
            offset = 0
            for request, first, end in batch:
                request.parts.append({name: values[offset : offset + end - first] for name, values in found.items()})
                offset += end - first
                if end == request.count:
                    answers.append((request.answer, _joined(request.parts)))
        if self._observe is not None:
            self._observe(count, size, time.monotonic() - began)
        _deliver(answers)


def batch_sizes(largest: int, least: int = 1) -> list[int]:
    """Returns the batch sizes to compile: ``least`` times powers of two, and ``largest``."""
    sizes, size = [], least
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


def _joined(parts: list[Outputs]) -> Outputs:
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _deliver(answers: list[_Answer]) -> None:
    """Passes answers to the event loops that wait for them, with one call per loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}
    for answer in answers:
        by_loop.setdefault(answer[0].get_loop(), []).append(answer)
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_set_results, mine)


def _set_results(answers: list[_Answer]) -> None:
    for future, answer in answers:
        if future.done():  # cancelled
            continue
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)
