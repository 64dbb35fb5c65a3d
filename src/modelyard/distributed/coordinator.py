"""The coordinator: it accepts the other processes, broadcasts commands, and notices who is lost."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

from modelyard.cluster.description import EVALUATOR, PARAMETER_SERVERS, PS, ROLES, SYNCHRONOUS, WORKER, Cluster, Member
from modelyard.distributed.authentication import Door
from modelyard.distributed.connection import Connection, Message, ProtocolError
from modelyard.distributed.process_group import (
    ConnectedGroup,
    describe_error,
    error_from,
    interrupting_signal,
    peer_lost,
    signal_from,
)
from modelyard.errors import ClusterError, PeerLostError, UserError
from modelyard.system.activity import report_silent
from modelyard.system.network import free_port, join_address, listen, split_address

log = logging.getLogger("modelyard")
_HELLO_SECONDS = 10.0
_MAX_PENDING = 500
_FLUSH_SECONDS = 2.0
_LATE_JOIN_SECONDS = 20.0
"""How long a coordinator that fails at the start waits, to report the reason to processes that join."""

Compare = Callable[[dict[str, Any], dict[str, Any]], list[str]]


class Coordinator(ConnectedGroup):
    """Accepts the other processes and broadcasts commands.

    Args:
        cluster: all processes of the run.
        start_info: options, versions and code that this process was started with.
        compare: lists the differences from the start_info of another process.
        start_timeout: seconds for all to join.
        peer_timeout: seconds of silence after which a peer is lost.
        secret: what all processes of the run know; empty for none.
    """

    def __init__(
        self,
        cluster: Cluster,
        start_info: dict[str, Any],
        compare: Compare,
        start_timeout: float,
        peer_timeout: float,
        secret: bytes,
    ) -> None:
        super().__init__(cluster, peer_timeout)
        self._start_info = json.loads(json.dumps(start_info))  # as it arrives from others: JSON has no tuples
        self._compare, self._start_timeout = compare, start_timeout
        self._began = time.monotonic()
        self._connections: dict[Member, Connection] = {}
        self._informed: set[Member] = set()
        self._ready: dict[Member, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._welcome: dict[str, Any] | None = None
        self._pending = threading.Semaphore(_MAX_PENDING)
        self._door = Door(listen(cluster.address(cluster.me)), secret, self._begin)

    @property
    def expected(self) -> list[Member]:
        """The processes without which the run does not begin."""
        return [m for m in self.cluster.members if m != self.cluster.me]

    def wait_for_all(self, optional: Collection[str] = (), **facts: Any) -> None:
        """Waits until all processes have joined, and sends them the facts about the run.

        Args:
            optional: roles that need not join.
            **facts: sent to all.

        Raises:
            ClusterError: if a process differs or does not join in time.
        """
        needed = [member for member in self.expected if member.role not in optional]
        waited_for = ", ".join(map(str, needed)) or "no one"
        log.info("%s; waiting for %s", self.cluster.describe(), waited_for)
        deadline = self._began + self._start_timeout
        with self._changed:
            while missing := [m for m in needed if m not in self._connections]:
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    names = ", ".join(f"{m} ({self.cluster.address(m)})" for m in missing)
                    raise PeerLostError(  # they may join after a restart
                        f"{names} did not join within {self._start_timeout:g} s. Was each started, and can it "
                        f"reach {self.cluster.address(self.cluster.me)}? start_timeout_secs gives them more time."
                    )
                self._changed.wait(min(left, 1.0))
            self.check()
            host, _ = split_address(self.cluster.address(self.cluster.me))
            self.spec = _spec(self.cluster, join_address(host, free_port(host)))
            self._welcome = {"spec": self.spec, **facts}
            self._send_to_all("welcome", **self._welcome)

    def wait_until_ready(self) -> dict[Member, dict[str, Any]]:
        """Waits until every training process has reported; returns the facts they found. Can be called again."""
        with self._changed:
            while any(member not in self._ready for member in self.cluster.trainers if member != self.cluster.me):
                self.check()
                self._changed.wait(1.0)
            self.check()
            found, self._ready = self._ready, {}
            return found

    def broadcast(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Sends a command to all processes that train together with the coordinator."""
        self.check()
        if self.cluster.mode == SYNCHRONOUS:
            for member, connection in list(self._connections.items()):
                if member.role != EVALUATOR:
                    connection.send(kind, payload, **fields)

    # -- accepting --------------------------------------------------------------------------------------------------

    def _begin(self, connection: socket.socket) -> None:
        """Begins a connection with a process that knows the secret."""
        if not self._pending.acquire(blocking=False):
            connection.close()
            return
        try:
            threading.Thread(target=self._receive, args=(connection,), name="hello", daemon=True).start()
        except RuntimeError:  # the system has no thread for it now; it tries again
            connection.close()
            self._pending.release()

    def _receive(self, accepted: socket.socket) -> None:
        """Handles a new connection: a member joins, anything else is closed without disturbing the run."""
        connection = Connection(accepted)
        try:
            connection.set_timeout(_HELLO_SECONDS, in_all=True)
            member, start_info = _read_hello(connection.receive())
            differences = self._compare(self._start_info, start_info)
        except Exception:  # without a secret, anything may connect and send anything
            connection.close()
            return
        finally:
            self._pending.release()
        connection.set_timeout(self.peer_timeout)
        if self._admit(member, differences, connection):
            self._listen(member, connection)

    def _admit(self, member: Member, differences: list[str], connection: Connection) -> bool:
        with self._changed:
            why, kind = self._refusal_reason(member, differences)
            if not kind:
                self._connections[member] = connection
                connection.keep_alive(self.heartbeat_seconds)
                if self._welcome is not None:
                    connection.send("welcome", **self._welcome)
                    log.info("%s has joined", member)
            elif kind == "refused" and self._welcome is None:
                self._fail_all(ClusterError(why))
            self._changed.notify_all()
        if kind:
            connection.send(kind, message=why, final=kind == "refused")
            connection.finish(_FLUSH_SECONDS)
            with self._changed:  # not before it is sent: this process exits when all are informed
                if self.failure is not None:
                    self._informed.add(member)
                self._changed.notify_all()
        return not kind

    def _refusal_reason(self, member: Member, differences: list[str]) -> tuple[str, str]:
        """Returns why a process is not admitted, and whether for good; empty strings if it is."""
        if self.failure is not None:
            failure = describe_error(self.failure)
            return failure["message"], "refused" if failure["final"] else "wait"
        if self._leaving.is_set():
            return "the run is over", "wait"
        if member not in self.cluster.members or member == self.cluster.me:
            what = f"the cluster of {self.cluster.coordinator} has {self.cluster.listed()}, and {member} is not in it"
            hint = " Without an evaluator in it, the chief evaluates itself." if member.role == EVALUATOR else ""
            return f"{what}. Give all processes the same cluster.{hint}", "refused"
        if member in self._connections:
            return f"there is a {member} already", "wait"
        if differences:
            shown = "\n".join(f"  {line}" for line in differences)
            return f"{member} was not started like {self.cluster.coordinator}:\n{shown}", "refused"
        comes_back = member.role == EVALUATOR or (self.cluster.mode == PARAMETER_SERVERS and member.role == WORKER)
        if self._welcome is not None and not comes_back:
            return "the run is under way without it", "wait"
        return "", ""

    # -- lost peers ------------------------------------------------------------------------------------------------

    def _listen(self, member: Member, connection: Connection) -> None:
        silent = False
        try:
            while True:
                message = connection.receive()
                if message.kind == "ready":
                    with self._changed:
                        self._ready[member] = message.fields
                        self._changed.notify_all()
                elif message.kind == "signal":
                    self.signal = signal_from(message.fields)
                elif message.kind == "failed":
                    self._lose_peer(member, connection, error_from(message.fields, str(member)))
                    return
                elif message.kind == "bye":
                    self._forget(member, connection)
                    return
        except TimeoutError:
            silent = True
            error = peer_lost(self._named(member), f"has been silent for {self.peer_timeout:g} s")
        except (OSError, EOFError):
            error = peer_lost(self._named(member), "closed the connection unexpectedly")
        except ProtocolError:
            error = peer_lost(self._named(member), "sent a malformed message")
        self._lose_peer(member, connection, error, silent)

    def _lose_peer(self, member: Member, connection: Connection, error: UserError, silent: bool = False) -> None:
        self._forget(member, connection)
        if self._over.is_set():
            return
        if silent:  # it may be frozen, and would never exit
            report_silent(member.file_name)
        # With parameter servers a worker may come back, but one that hangs blocks its step, and so all, for ever.
        starts_again = isinstance(error, PeerLostError) and not silent
        may_return = self.cluster.mode == PARAMETER_SERVERS and member.role == WORKER and starts_again
        if member.role == EVALUATOR or may_return:
            if self.failure is None:
                log.warning("%s is gone; the run continues, and accepts it again when it returns", member)
            return
        self._informed.add(member)
        self._fail_all(error)

    def _fail_all(self, error: UserError) -> None:
        """Reports the first failure to all at once, whatever this process is busy with."""
        with self._changed:
            if self.failure is None:
                self._informed |= set(self._connections)
                self._send_to_all("failed", **describe_error(error))
                self.fail(error)
            self._changed.notify_all()

    def _forget(self, member: Member, connection: Connection) -> None:
        with self._changed:
            if self._connections.get(member) is connection:
                del self._connections[member]
            self._changed.notify_all()
        connection.close()

    def _named(self, member: Member) -> str:
        return f"{member} ({self.cluster.address(member)})"

    def _send_to_all(self, kind: str, **fields: Any) -> None:
        for connection in list(self._connections.values()):
            connection.send(kind, **fields)

    # -- the end ----------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._leaving.set()
            if error is None or interrupting_signal(error) is not None:
                self._send_to_all("end", signal=interrupting_signal(error))
                # An evaluator still has the last checkpoint to evaluate.
                self._changed.wait_for(
                    lambda: all(m.role == EVALUATOR for m in self._connections), timeout=_LATE_JOIN_SECONDS
                )
            else:
                self._fail_all(error_from(describe_error(error), str(self.cluster.coordinator)))
                self._wait_for_late_processes()
            self._over.set()
        self._door.close()
        deadline = time.monotonic() + _FLUSH_SECONDS
        for connection in list(self._connections.values()):
            connection.finish(max(deadline - time.monotonic(), 0))

    def _wait_for_late_processes(self) -> None:
        """Waits, to report the failure to late processes; if a restart may help, they keep trying instead."""
        if self._welcome is None and not isinstance(self.failure, PeerLostError):
            self._changed.wait_for(lambda: self._informed >= set(self.expected), timeout=_LATE_JOIN_SECONDS)


def _read_hello(hello: Message) -> tuple[Member, dict[str, Any]]:
    """Returns the process that a hello claims to be from, and what it was started with.

    Raises:
        ProtocolError: if the hello is malformed.
    """
    role, index, start_info = (hello.fields.get(name) for name in ("role", "index", "start_info"))
    if hello.kind != "hello" or role not in ROLES or type(index) is not int or not isinstance(start_info, dict):
        raise ProtocolError
    return Member(str(role), index), start_info


def _spec(cluster: Cluster, own_address: str) -> dict[str, list[str]]:
    """Returns the addresses of the framework's servers; the coordinator's has a port that the system picked."""

    def address(member: Member) -> str:
        return own_address if member == cluster.coordinator else cluster.address(member)

    if cluster.mode == SYNCHRONOUS:
        return {WORKER: [address(member) for member in cluster.trainers]}
    roles = (cluster.coordinator.role, WORKER, PS)
    return {role: [address(m) for m in cluster.members if m.role == role] for role in roles}
