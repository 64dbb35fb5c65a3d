"""Versions come and go while requests are answered: a new one is loaded beside the old one, then takes its place."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from modelyard.errors import RunError, UserError
from modelyard.serving.http.batching import Batcher, Batching
from modelyard.serving.http.sources import Source
from modelyard.serving.servable import Servable

log = logging.getLogger("modelyard")

LOADING, AVAILABLE, UNLOADING, END = "LOADING", "AVAILABLE", "UNLOADING", "END"
_REMEMBERED = 20
"""Versions that are gone and still reported."""


def set_aside_garbage() -> None:
    """Collects what a model that is gone left behind, then takes all that stays out of Python's garbage collection.

    JSON makes thousands of lists a request, for which the millions of objects of a framework would be gone through.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@dataclass
class Status:
    """Where a version is in its life, in the words of TensorFlow Serving."""

    state: str
    code: str = "OK"
    message: str = ""


class Version:
    """A loaded version, and how many requests are using it. Used in the event loop alone.

    Args:
        number: of the version.
        servable: the model.
        batcher: its queue and thread.
    """

    def __init__(self, number: int, servable: Servable, batcher: Batcher) -> None:
        self.number, self.servable, self.batcher = number, servable, batcher
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def held(self) -> Iterator[Version]:
        """It stays while the block runs."""
        self._users += 1
        self._idle.clear()
        try:
            yield self
        finally:
            self._users -= 1
            if not self._users:
                self._idle.set()

    async def retire(self) -> None:
        """Answers what it still has, and ends."""
        await self._idle.wait()
        self.batcher.close()
        await asyncio.to_thread(self.batcher.join)


class Versions:
    """The version that is served, and those on their way in and out.

    Args:
        source: where they come from.
        batching: how requests are put together.
        observe: told of every batch.
        poll: seconds between two looks at the source.
    """

    def __init__(
        self,
        source: Source,
        batching: Batching,
        observe: Callable[[int, int, float], None] | None = None,
        poll: float = 1.0,
    ) -> None:
        self.statuses: dict[int, Status] = {}
        self.current: Version | None = None
        self._source, self._batching, self._observe, self._poll = source, batching, observe, poll
        self._failed: dict[int, str] = {}
        self._before: dict[int, str] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Loads the newest version that can be loaded; before any request is taken.

        Raises:
            UserError: if there is none.
        """
        seen = self._source.versions()
        if not seen:
            raise RunError(self._source.missing())
        for number in sorted(seen, reverse=True):
            try:
                self.current = self._loaded(number)
                return
            except UserError as error:
                self._fail(number, seen[number], error)
                if number == min(seen):
                    raise

    async def watch(self) -> None:
        """Looks for versions until it is cancelled."""
        while True:
            await asyncio.sleep(self._poll)
            try:
                await self.look()
            except Exception:  # the next look may find it mended; what is served stays
                log.exception("looking for versions failed")

    async def look(self) -> None:
        """Takes up a new version, if there is one whose files have not changed since the last look."""
        seen = await asyncio.to_thread(self._source.versions)
        before, self._before = self._before, seen
        # A copy in progress grows from look to look.
        whole = [n for n, files in seen.items() if before.get(n) == files and self._failed.get(n) != files]
        serving = self.current.number if self.current else None
        # Where a version is replaced (export --overwrite), it is away for a moment: that is no reason to go back.
        if serving is not None and (serving in seen or serving in before):
            whole.append(serving)
        if not whole or max(whole) == serving:
            return
        number = max(whole)
        try:
            new = await asyncio.to_thread(self._loaded, number)
        except Exception as error:
            self._fail(number, seen[number], error)
            return
        old, self.current = self.current, new  # from here on every request gets the new one
        log.info("version %d is served instead of %s", number, serving)
        if old is not None:
            task = asyncio.create_task(self._retire(old))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def close(self) -> None:
        """Answers what is waiting, then ends all threads."""
        if self.current is not None:
            await self.current.retire()
        for task in list(self._retiring):
            await task

    def _loaded(self, number: int) -> Version:
        log.info("version %d: loading", number)
        self.statuses[number] = Status(LOADING)
        began = time.monotonic()
        batcher = Batcher(lambda: self._source.load(number), self._batching, self._observe)
        servable = batcher.start().result()
        seconds, sizes = time.monotonic() - began, ", ".join(map(str, batcher.sizes))
        log.info("version %d: loaded and warmed up for batches of %s in %.1f s", number, sizes, seconds)
        self.statuses[number] = Status(AVAILABLE)
        gc.freeze()
        return Version(number, servable, batcher)

    def _fail(self, number: int, files: str, error: BaseException) -> None:
        kept = "" if self.current is None else f"; version {self.current.number} stays"
        log.error("version %d can't be served%s: %s", number, kept, error)
        self._failed[number] = files
        self.statuses[number] = Status(END, "INTERNAL", str(error) or type(error).__name__)
        self._forget()

    async def _retire(self, version: Version) -> None:
        self.statuses[version.number] = Status(UNLOADING)
        await version.retire()
        self.statuses[version.number] = Status(END)
        log.info("version %d has answered its last request and is unloaded", version.number)
        del version
        await asyncio.to_thread(set_aside_garbage)
        self._forget()

    def _forget(self) -> None:
        gone = [number for number, status in self.statuses.items() if status.state == END]
        for number in gone[:-_REMEMBERED]:
            del self.statuses[number]
