"""Keeps the processes of a run together: one leads, the others follow its orders.

Everyone connects to the lead's address. The lead compares what they were started with and welcomes them, or refuses
with the difference; from then on both sides say at short intervals that they are alive. Who is silent for too long, or
hangs up without a word, is lost: then everyone learns it within a bounded time, whatever they wait for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from modelyard.cluster.roles import Cluster
from modelyard.cluster.wire import Message, NotOursError
from modelyard.errors import ClusterError, Interrupted, PeerLostError, UserError

log = logging.getLogger("modelyard")
GRACE_SECONDS = 15.0
_MOST_WORDS = 20_000
_EXPLAIN_SECONDS = 5.0
"""A collective operation may fail a moment before the connection is known to be gone."""


class Crew:
    """A process alone: nobody to tell. `Lead` and `Follower` are the others."""

    spec: dict[str, list[str]]
    """The addresses of the framework's own servers, by its names for roles."""
    grace = GRACE_SECONDS
    """How long this process may take to leave by itself once a peer is lost, before it is ended."""

    def __init__(self, cluster: Cluster | None = None) -> None:
        self.cluster = cluster or Cluster()
        self.spec = {}
        self.signal: int | None = None
        """A signal that reached another process of the run."""

    @property
    def rank(self) -> int:
        """The place of this process among those that train together."""
        trainers = self.cluster.trainers
        return trainers.index(self.cluster.me) if self.cluster.me in trainers else 0

    @property
    def size(self) -> int:
        """How many processes train together."""
        return max(len(self.cluster.trainers), 1)

    def tell(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Gives an order to all followers."""

    def explain(self, error: Exception) -> Exception:
        """The reason behind ``error``, if it is that a peer was lost."""
        return error

    def on_loss(self, callback: Callable[[str], None]) -> None:
        """Has ``callback`` called, from another thread, when a peer is lost: to end what waits for it."""

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Connected(Crew):
    """What the lead and its followers do alike: notice a loss, and make this process leave.

    Args:
        cluster: who is who.
        peer_timeout: seconds of silence after which a peer is lost.
    """

    def __init__(self, cluster: Cluster, peer_timeout: float) -> None:
        super().__init__(cluster)
        self.peer_timeout = peer_timeout
        self.beat_seconds = min(peer_timeout / 4, 5.0)
        self.failure: UserError | None = None
        self.lost = False
        """Whether the failure came from another process while this one was at work."""
        self._failed = threading.Event()
        self._leaving = threading.Event()
        self._over = threading.Event()
        self._noticing = threading.Lock()
        self._callbacks: list[Callable[[str], None]] = []

    def on_loss(self, callback: Callable[[str], None]) -> None:
        """Has ``callback`` called when a peer is lost; at once if one is lost already."""
        with self._noticing:
            self._callbacks.append(callback)
            failure = self.failure
        if failure is not None:
            self._call(callback, failure)

    def check(self) -> None:
        """Raises what was noticed."""
        if self.failure is not None:
            raise self.failure

    def explain(self, error: Exception) -> Exception:
        """The loss that ``error`` comes from, if there is one; it may be noticed a moment later."""
        if not isinstance(error, UserError):
            self._failed.wait(_EXPLAIN_SECONDS)
        return self.failure or error

    def fail(self, failure: UserError) -> None:
        """Notes the first failure, wakes up whoever waits, and sees to it that this process leaves. Never waits."""
        with self._noticing:
            if self.failure is not None or self._over.is_set():
                return
            self.failure, self.lost = failure, not self._leaving.is_set()
            callbacks = [] if self._leaving.is_set() else list(self._callbacks)
        log.debug("%s", failure)  # who started the process is told when it ends
        self._failed.set()
        threading.Thread(target=self._leave, args=(failure,), name="leaving", daemon=True).start()
        for callback in callbacks:
            threading.Thread(target=self._call, args=(callback, failure), name="loss", daemon=True).start()

    def _call(self, callback: Callable[[str], None], failure: UserError) -> None:
        with contextlib.suppress(Exception):
            callback(str(failure))

    def _leave(self, failure: UserError) -> None:
        if not self._leaving.wait(self.grace):
            log.error("%s This process did not end by itself within %g s and is ended.", failure, self.grace)
            os._exit(failure.status)


def lost(who: str, how: str) -> PeerLostError:
    """The error for a process that is gone."""
    return PeerLostError(f"{who} {how}. The run goes on from its last checkpoint when all are started again.")


def failure_of(said: dict[str, Any], who: str = "") -> UserError:
    """The error for what another process failed with, or passes on."""
    message = str(said.get("message") or "it did not say why")
    message = f"{who} failed: {message}" if who else message
    return ClusterError(message) if said.get("final") else PeerLostError(message)


def in_words(error: BaseException) -> dict[str, Any]:
    """An error for the other processes: in words, and whether starting again would be of no use."""
    final = isinstance(error, UserError) and not isinstance(error, PeerLostError)
    text = str(error) if isinstance(error, UserError) else ": ".join(filter(None, (type(error).__name__, str(error))))
    return {"message": text[:_MOST_WORDS], "final": final}


def signal_of(said: dict[str, Any]) -> int:
    """The signal that another process tells of.

    Raises:
        NotOursError: if it is none that asks a process to leave.
    """
    number = said.get("number")
    if number not in (signal.SIGINT, signal.SIGTERM):
        raise NotOursError
    return int(number)


def until(deadline: float, pause: float = 0.2) -> Iterator[float]:
    """The seconds left, again and again, until there are none."""
    while (left := deadline - time.monotonic()) > 0:
        yield left
        time.sleep(min(pause, left))


class Inbox:
    """Messages in order, with a failure able to cut the waiting short."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Message | None] = queue.Queue()

    def put(self, message: Message | None) -> None:
        """Adds a message; None wakes the waiter up."""
        self._queue.put(message)

    def get(self, seconds: float | None = None) -> Message | None:
        """The next message, when it is there; None if that takes longer than ``seconds``."""
        try:
            return self._queue.get(timeout=seconds)
        except queue.Empty:
            return None


def ended_by(error: BaseException | None) -> int | None:
    """The signal that ended a run after everything was saved."""
    return int(error.signal) if isinstance(error, Interrupted) else None
