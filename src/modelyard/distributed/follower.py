"""A follower: a process that joins the coordinator and carries out its commands."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from modelyard import faults
from modelyard.cluster.description import Cluster
from modelyard.cluster.secret import SECRET
from modelyard.distributed.authentication import WrongSecretError, identify
from modelyard.distributed.connection import MAX_BYTES, Connection, Message, ProtocolError
from modelyard.distributed.process_group import (
    ConnectedGroup,
    describe_error,
    error_from,
    interrupting_signal,
    peer_lost,
    polling,
)
from modelyard.errors import ClusterError, PeerLostError
from modelyard.system.activity import report_silent
from modelyard.system.network import connect

log = logging.getLogger("modelyard")
_FLUSH_SECONDS = 2.0
_OTHER_RUN_SECONDS = 20.0
"""How long a coordinator with another secret may be there: one of an earlier start may still be exiting."""
_ANSWER_SECONDS = 1.0
"""How long a running coordinator may take to answer."""


class Follower(ConnectedGroup):
    """Carries out the commands of the coordinator.

    Args:
        cluster: all processes of the run.
        start_info: options, versions and code that this process was started with, for the coordinator to compare.
        start_timeout: seconds to find the coordinator.
        peer_timeout: seconds of silence after which the coordinator is lost.
        secret: what all processes of the run know; empty for none.
    """

    def __init__(
        self, cluster: Cluster, start_info: dict[str, Any], start_timeout: float, peer_timeout: float, secret: bytes
    ) -> None:
        super().__init__(cluster, peer_timeout)
        self._secret = secret
        self._start_info, self._start_timeout = start_info, start_timeout
        self._inbox: queue.Queue[Message | None] = queue.Queue()  # None wakes the waiter up
        self._connection: Connection | None = None

    def join(self, unless: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Joins the coordinator, waits until all processes have joined, and returns what it sends about the run.

        Args:
            unless: called before every attempt; if it returns True, joining is pointless, and None is returned.

        Raises:
            ClusterError: if the coordinator refuses, fails, or does not answer in time.
        """
        coordinator, address = self.cluster.coordinator, self.cluster.address(self.cluster.coordinator)
        log.info("%s; waiting for %s at %s", self.cluster.describe(), coordinator, address)
        why, last = "no process listens there", 0.0
        for left in polling(time.monotonic() + self._start_timeout):
            if unless():
                return None
            try:
                # The last attempt is not cut short: that would hide the reason that earlier ones found.
                connection, reply = self._handshake(address, min(max(left, _ANSWER_SECONDS), self.peer_timeout))
            except (OSError, EOFError) as error:
                why = f"no process answers there ({str(error) or 'the connection was closed'})"
                continue
            except WrongSecretError:
                last = last or time.monotonic() + _OTHER_RUN_SECONDS
                if time.monotonic() < last:
                    continue
                what = f"does not have the secret of this process ({SECRET})"
                what = what if self._secret else f"has a secret ({SECRET}), and this process has none"
                raise ClusterError(
                    f"{coordinator} at {address} {what}. Give all processes of the run the same secret, or none."
                ) from None
            except ProtocolError:
                why = "another program answers there"
                continue
            if reply.kind == "welcome":
                return self._welcomed(connection, reply)
            connection.close()
            if reply.kind in ("refused", "failed"):
                raise error_from(reply.fields)
            why = str(reply.fields.get("message", "it did not accept this process"))
        raise PeerLostError(  # it may be there after a restart
            f"{coordinator} at {address} could not be joined within {self._start_timeout:g} s: {why}. "
            "Is it running, with the same addresses in its cluster? start_timeout_secs gives it more time."
        )

    def _handshake(self, address: str, timeout: float) -> tuple[Connection, Message]:
        faults.reach(faults.JOIN)
        raw = connect(address, timeout)
        try:
            identify(raw, self._secret, timeout)
        except BaseException:
            raw.close()
            raise
        connection = Connection(raw, most=MAX_BYTES)
        try:
            connection.send(
                "hello", role=self.cluster.me.role, index=self.cluster.me.index, start_info=self._start_info
            )
            connection.set_timeout(self.peer_timeout)
            connection.keep_alive(self.heartbeat_seconds)
            while True:
                reply = connection.receive()
                if reply.kind != "alive":  # the coordinator still waits for others
                    return connection, reply
        except BaseException:
            connection.close()
            raise

    def _welcomed(self, connection: Connection, reply: Message) -> dict[str, Any]:
        self._connection = connection
        self.spec = reply.fields.get("spec", {})
        threading.Thread(target=self._listen, args=(connection,), name="commands", daemon=True).start()
        return dict(reply.fields)

    def report_ready(self, **facts: Any) -> None:
        """Reports to the coordinator that this process can begin, with ``facts`` to compare."""
        self._send("ready", **facts)

    def report_signal(self, number: int) -> None:
        """Reports a signal to the coordinator, which makes all processes save and exit at the same step."""
        self._send("signal", number=number)

    def next_command(self) -> Message:
        """Returns the next command.

        Raises:
            PeerLostError: if the coordinator is gone.
        """
        message = self.command_within(None)
        if message is None:
            raise peer_lost(str(self.cluster.coordinator), "has ended the run already")
        return message

    def command_within(self, seconds: float | None) -> Message | None:
        """Returns the next command; None if there is none within ``seconds``.

        Raises:
            PeerLostError: if the coordinator is gone.
        """
        self.check()
        try:
            message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            message = None
        self.check()
        return message

    def commands(self) -> Iterator[Message]:
        """Yields the commands, up to and including the one that ends the run."""
        while True:
            message = self.next_command()
            yield message
            if message.kind == "end":
                return

    def _listen(self, connection: Connection) -> None:
        coordinator = str(self.cluster.coordinator)
        try:
            while True:
                message = connection.receive()
                if message.kind == "failed":
                    self.fail(error_from(message.fields))
                elif message.kind != "alive":
                    self._inbox.put(message)
                if message.kind in ("failed", "end"):
                    return
        except TimeoutError:
            if not self._over.is_set():
                report_silent(self.cluster.coordinator.file_name)
            self.fail(peer_lost(coordinator, f"has been silent for {self.peer_timeout:g} s"))
        except (OSError, EOFError):
            self.fail(peer_lost(coordinator, "closed the connection unexpectedly"))
        except ProtocolError:
            self.fail(peer_lost(coordinator, "sent a malformed message"))
        finally:
            self._inbox.put(None)

    def _send(self, kind: str, **fields: Any) -> None:
        if self._connection is not None:
            self._connection.send(kind, **fields)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        if error is None or interrupting_signal(error) is not None:
            self._send("bye")
        elif self.failure is None:
            self._send("failed", **describe_error(error))
        self._over.set()
        if self._connection is not None:
            self._connection.finish(_FLUSH_SECONDS)
