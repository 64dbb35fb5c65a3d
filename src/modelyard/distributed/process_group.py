"""The common base of coordinator and followers: each notices that a peer is lost, and exits in bounded time.

Every process connects to the coordinator. The coordinator compares what they were started with and welcomes them, or
refuses with the difference. From then on both sides send heartbeats. A process that is silent for too long, or closes
its connection unexpectedly, is lost: every process learns of it in bounded time, whatever it waits for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from modelyard.cluster.description import Cluster, ProcessGroup
from modelyard.distributed.connection import ProtocolError
from modelyard.errors import ClusterError, Interrupted, PeerLostError, UserError

log = logging.getLogger("modelyard")
_MAX_CHARACTERS = 20_000
_EXPLAIN_SECONDS = 5.0
"""A collective operation may fail a moment before the connection is known to be closed."""


class ConnectedGroup(ProcessGroup):
    """A group of several processes, seen from one of them. Subclasses: `Coordinator` and `Follower`.

    Args:
        cluster: all processes of the run.
        peer_timeout: seconds of silence after which a peer is lost.
    """

    def __init__(self, cluster: Cluster, peer_timeout: float) -> None:
        super().__init__(cluster)
        self.peer_timeout = peer_timeout
        self.heartbeat_seconds = min(peer_timeout / 4, 5.0)
        self._failed = threading.Event()
        self._leaving = threading.Event()
        self._over = threading.Event()
        self._noticing = threading.Lock()
        self._callbacks: list[Callable[[str], None]] = []

    def __enter__(self) -> Self:
        return self

    def on_peer_lost(self, callback: Callable[[str], None]) -> None:
        """Registers ``callback`` for the loss of a peer; calls it at once if one is lost already."""
        with self._noticing:
            self._callbacks.append(callback)
            failure = self.failure
        if failure is not None:
            self._call(callback, failure)

    def check(self) -> None:
        """Raises the failure of the group, if there is one."""
        if self.failure is not None:
            raise self.failure

    def explain(self, error: Exception) -> Exception:
        """Returns the loss behind ``error``, if there is one; it may be noticed a moment later."""
        if not isinstance(error, UserError):
            self._failed.wait(_EXPLAIN_SECONDS)
        return self.failure or error

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raises the loss of a peer in place of the errors that follow from it."""
        try:
            yield
        except Exception as error:
            reason = self.explain(error)
            if reason is error:
                raise
            raise reason from error

    def fail(self, failure: UserError) -> None:
        """Records the first failure, wakes up whoever waits, and makes this process exit. Never blocks."""
        with self._noticing:
            if self.failure is not None or self._over.is_set():
                return
            self.failure, self.lost = failure, not self._leaving.is_set()
            callbacks = [] if self._leaving.is_set() else list(self._callbacks)
        log.debug("%s", failure)  # shown when the process exits
        self._failed.set()
        threading.Thread(target=self._exit_in_time, args=(failure,), name="leaving", daemon=True).start()
        for callback in callbacks:
            threading.Thread(target=self._call, args=(callback, failure), name="loss", daemon=True).start()

    def _call(self, callback: Callable[[str], None], failure: UserError) -> None:
        with contextlib.suppress(Exception):
            callback(str(failure))

    def _exit_in_time(self, failure: UserError) -> None:
        if not self._leaving.wait(self.grace_seconds):
            log.error("%s This process did not exit within %g s and is ended.", failure, self.grace_seconds)
            os._exit(failure.exit_status)


def peer_lost(who: str, how: str) -> PeerLostError:
    """Returns the error for a process that is gone."""
    return PeerLostError(f"{who} {how}. Start all processes again to resume the run from its last checkpoint.")


def error_from(fields: dict[str, Any], who: str = "") -> UserError:
    """Returns the error that another process failed with, or passes on."""
    message = str(fields.get("message") or "no reason was given")
    message = f"{who} failed: {message}" if who else message
    return ClusterError(message) if fields.get("final") else PeerLostError(message)


def describe_error(error: BaseException) -> dict[str, Any]:
    """Describes an error for the other processes: its text, and whether a restart is pointless."""
    final = isinstance(error, UserError) and error.exit_status == UserError.status
    text = str(error) if isinstance(error, UserError) else ": ".join(filter(None, (type(error).__name__, str(error))))
    return {"message": text[:_MAX_CHARACTERS], "final": final}


def signal_from(fields: dict[str, Any]) -> int:
    """Returns the signal that another process reports.

    Raises:
        ProtocolError: if it is not one that asks a process to exit.
    """
    number = fields.get("number")
    if number not in (signal.SIGINT, signal.SIGTERM):
        raise ProtocolError
    return int(number)


def polling(deadline: float, pause: float = 0.2) -> Iterator[float]:
    """Yields the seconds left, again and again, until there are none."""
    while (left := deadline - time.monotonic()) > 0:
        yield left
        time.sleep(min(pause, left))


def interrupting_signal(error: BaseException | None) -> int | None:
    """Returns the signal that ended a run after everything was saved."""
    return int(error.signal) if isinstance(error, Interrupted) else None
