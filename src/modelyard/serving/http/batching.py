"""Requests put together: a batch goes to the model when it is full, or when its oldest request has waited enough."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.serving.servable import Outputs, Servable, batch_sizes


class QueueFullError(Exception):
    """More is waiting than may wait."""


class TooLateError(Exception):
    """A request was not reached in its time."""


@dataclass(frozen=True)
class Batching:
    """How requests are put together.

    Args:
        max_batch: the most images the model is given at a time.
        max_delay: seconds the first of a batch waits for others.
        max_queue: the most images that may wait.
    """

    max_batch: int = 32
    max_delay: float = 0.005
    max_queue: int = 1024


@dataclass(eq=False)
class _Request:
    images: NDArray[Any]
    answer: asyncio.Future[Outputs]
    arrived: float
    deadline: float
    begun: int = 0
    """Images that are in a batch already: a large request may be cut."""
    pieces: list[Outputs] = field(default_factory=list)


class Batcher:
    """A model and the thread it lives in: it is loaded, warmed up and called there, one batch after the other.

    Args:
        load: gives the model; called in the thread, since Keras and JAX have settings for each thread.
        batching: how requests are put together.
        observe: told of every batch: images in it, its size with what it was filled up with, seconds.
    """

    def __init__(
        self, load: Callable[[], Servable], batching: Batching, observe: Callable[[int, int, float], None] | None = None
    ) -> None:
        self.loaded: Future[Servable] = Future()
        self.batching = batching
        self.waiting = 0
        self._load, self._observe = load, observe
        self._queue: deque[_Request] = deque()
        self._change = threading.Condition()
        self._closed = False
        self.sizes: list[int] = []
        """The sizes of batch that the model computes; known when it is loaded."""
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)

    def start(self) -> Future[Servable]:
        """Begins to load; gives what will be the model, or why it is none."""
        self._thread.start()
        return self.loaded

    def submit(self, images: NDArray[Any], deadline: float) -> asyncio.Future[Outputs]:
        """The answer to come, for use in the event loop that calls this.

        Args:
            images: as the model takes them.
            deadline: by `time.monotonic`; what is not begun by then is dropped.

        Raises:
            QueueFullError: if too much is waiting.
        """
        count, now = len(images), time.monotonic()
        request = _Request(images, asyncio.get_running_loop().create_future(), now, deadline)
        with self._change:
            # A request larger than the queue is taken when nothing else waits.
            if self._closed or (self.waiting and self.waiting + count > self.batching.max_queue):
                raise QueueFullError(f"{self.waiting} images are waiting, and the most is {self.batching.max_queue}")
            before, self.waiting = self.waiting, self.waiting + count
            self._queue.append(request)
            if before == 0 or before < self.batching.max_batch <= self.waiting:  # else the thread has nothing to do yet
                self._change.notify()
        return request.answer

    def close(self) -> None:
        """Takes no more; the thread ends when everything is answered."""
        with self._change:
            self._closed = True
            self._change.notify()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the thread; whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            servable = self._load()
            largest = -(-self.batching.max_batch // servable.least) * servable.least
            self.sizes = batch_sizes(largest, servable.least)
            servable.warm_up(self.sizes)
        except BaseException as error:
            self.loaded.set_exception(error)
            return
        self.loaded.set_result(servable)
        while (batch := self._next()) is not None:
            if batch:
                self._predict(servable, batch)

    def _next(self) -> list[tuple[_Request, int, int]] | None:
        """Requests and which of their images, in order of arrival; None at the end."""
        late: list[_Request] = []
        batch: list[tuple[_Request, int, int]] = []
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
                    late.append(request)
                    self._queue.popleft()
                    self.waiting -= len(request.images) - request.begun
                    continue
                first = request.begun
                request.begun = min(first + room, len(request.images))
                batch.append((request, first, request.begun))
                room -= request.begun - first
                self.waiting -= request.begun - first
                if request.begun == len(request.images):
                    self._queue.popleft()
        _deliver([(request.answer, TooLateError()) for request in late])
        return batch

    def _predict(self, servable: Servable, batch: list[tuple[_Request, int, int]]) -> None:
        began = time.monotonic()
        count = sum(end - first for _, first, end in batch)
        size = next(size for size in self.sizes if size >= count)
        image = servable.facts.image
        done: list[tuple[asyncio.Future[Outputs], Outputs | BaseException]] = []
        try:
            images = np.zeros((size, *image.shape), image.dtype)
            np.concatenate([request.images[first:end] for request, first, end in batch], out=images[:count])
            found = servable.predict(images)
        except BaseException as error:
            for request, _, _ in batch:
                done.append((request.answer, error))
            with self._change:  # the rest of one that was cut has no one to go to
                while self._queue and self._queue[0].begun:
                    request = self._queue.popleft()
                    self.waiting -= len(request.images) - request.begun
        else:
            place = 0
            for request, first, end in batch:
                request.pieces.append({name: values[place : place + end - first] for name, values in found.items()})
                place += end - first
                if end == len(request.images):
                    done.append((request.answer, _joined(request.pieces)))
        if self._observe is not None:
            self._observe(count, size, time.monotonic() - began)
        _deliver(done)


def _joined(pieces: list[Outputs]) -> Outputs:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _deliver(answers: list[tuple[asyncio.Future[Outputs], Outputs | BaseException]]) -> None:
    """Hands answers to the event loops that wait for them, with one call each."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Outputs], Outputs | BaseException]]] = {}
    for answer in answers:
        by_loop.setdefault(answer[0].get_loop(), []).append(answer)
    for loop, mine in by_loop.items():
        with contextlib.suppress(RuntimeError):  # closed: nobody waits any more
            loop.call_soon_threadsafe(_set, mine)


def _set(answers: list[tuple[asyncio.Future[Outputs], Outputs | BaseException]]) -> None:
    for future, answer in answers:
        if future.done():  # given up
            continue
        if isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)
