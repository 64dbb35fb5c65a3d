"""The process that leads: it lets the others in, gives orders, and notices who is gone."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any

from modelyard.cluster.crew import Connected, ended_by, failure_of, in_words, lost, signal_of
from modelyard.cluster.roles import EVALUATOR, PARAMETER_SERVERS, PS, ROLES, SYNCHRONOUS, WORKER, Cluster, Member
from modelyard.cluster.wire import Message, NotOursError, Wire, free_port, join, listen, split
from modelyard.errors import ClusterError, PeerLostError, UserError

log = logging.getLogger("modelyard")
_HELLO_SECONDS = 10.0
_MOST_VISITORS = 500
_LAST_WORDS_SECONDS = 2.0
_LINGER_SECONDS = 20.0
"""How long a lead that fails at the start stays to tell those who come."""

Compare = Callable[[dict[str, Any], dict[str, Any]], list[str]]


class Lead(Connected):
    """Lets the others in and gives orders.

    Args:
        cluster: who is who.
        card: what this process was started with.
        compare: gives, in words, how another's card differs.
        start_timeout: seconds for all to come.
        peer_timeout: seconds of silence after which a peer is lost.
    """

    def __init__(
        self, cluster: Cluster, card: dict[str, Any], compare: Compare, start_timeout: float, peer_timeout: float
    ) -> None:
        super().__init__(cluster, peer_timeout)
        self._card = json.loads(json.dumps(card))  # as the others' arrive: JSON has no tuples
        self._compare, self._start_timeout = compare, start_timeout
        self._began = time.monotonic()
        self._wires: dict[Member, Wire] = {}
        self._told: set[Member] = set()
        self._ready: dict[Member, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._welcome: dict[str, Any] | None = None
        self._visitors = threading.Semaphore(_MOST_VISITORS)
        self._listener = listen(cluster.address(cluster.me))
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    @property
    def expected(self) -> list[Member]:
        """Those without whom the run does not begin."""
        return [m for m in self.cluster.members if m != self.cluster.me]

    def meet(self, optional: Collection[str] = (), **facts: Any) -> None:
        """Waits until everyone is there, and tells them about the run.

        Args:
            optional: roles that need not come.
            **facts: what they are told.

        Raises:
            ClusterError: if someone differs or does not come in time.
        """
        needed = [member for member in self.expected if member.role not in optional]
        waited_for = ", ".join(map(str, needed)) or "nobody"
        log.info("%s; waiting for %s", self.cluster.describe(), waited_for)
        deadline = self._began + self._start_timeout
        with self._changed:
            while missing := [m for m in needed if m not in self._wires]:
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    names = ", ".join(f"{m} ({self.cluster.address(m)})" for m in missing)
                    raise PeerLostError(  # they may come the next time
                        f"{names} did not come within {self._start_timeout:g} s. Were they started, and can they "
                        f"reach {self.cluster.address(self.cluster.me)}? start_timeout_secs gives them more time."
                    )
                self._changed.wait(min(left, 1.0))
            self.check()
            host, _ = split(self.cluster.address(self.cluster.me))
            self.spec = _spec(self.cluster, join(host, free_port(host)))
            self._welcome = {"spec": self.spec, **facts}
            self._say_to_all("welcome", **self._welcome)

    def gather_ready(self) -> dict[Member, dict[str, Any]]:
        """Waits until everyone who trains has said so; gives what they found. They may be asked again."""
        with self._changed:
            while any(member not in self._ready for member in self.cluster.trainers if member != self.cluster.me):
                self.check()
                self._changed.wait(1.0)
            self.check()
            found, self._ready = self._ready, {}
            return found

    def tell(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Gives an order to all who train together with the lead."""
        self.check()
        if self.cluster.mode == SYNCHRONOUS:
            for member, wire in list(self._wires.items()):
                if member.role != EVALUATOR:
                    wire.send(kind, payload, **fields)

    # -- the door ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or the system is short of something for the moment
                self._over.wait(0.1)
                continue
            if not self._visitors.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._receive, args=(connection,), name="visitor", daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        """One who comes: a member, or a stranger who is sent away without disturbing anyone."""
        wire = Wire(connection)
        try:
            wire.set_timeout(_HELLO_SECONDS, in_all=True)
            wire.expect_greeting()
            member, card = _introduced(wire.receive())
            differences = self._compare(self._card, card)
        except Exception:  # whatever the bytes of a stranger lead to
            wire.close()
            return
        finally:
            self._visitors.release()
        wire.set_timeout(self.peer_timeout)
        wire.greet()
        if self._let_in(member, differences, wire):
            self._listen(member, wire)

    def _let_in(self, member: Member, differences: list[str], wire: Wire) -> bool:
        with self._changed:
            why, kind = self._objection(member, differences)
            if not kind:
                self._wires[member] = wire
                wire.keep_alive(self.beat_seconds)
                if self._welcome is not None:
                    wire.send("welcome", **self._welcome)
                    log.info("%s has joined", member)
            elif kind == "refused" and self._welcome is None:
                self._fail_all(ClusterError(why))
            if kind and self.failure is not None:
                self._told.add(member)
            self._changed.notify_all()
        if kind:
            wire.send(kind, message=why, final=kind == "refused")
            wire.finish(_LAST_WORDS_SECONDS)
        return not kind

    def _objection(self, member: Member, differences: list[str]) -> tuple[str, str]:
        """Why someone is not let in, and whether for good; empty if nothing speaks against it."""
        if self.failure is not None:
            told = in_words(self.failure)
            return told["message"], "refused" if told["final"] else "wait"
        if self._leaving.is_set():
            return "the run is over", "wait"
        if member not in self.cluster.members or member == self.cluster.me:
            what = f"the cluster of {self.cluster.lead} has {self.cluster.listed()}, and {member} is not in it"
            hint = " Without an evaluator in it the chief evaluates itself." if member.role == EVALUATOR else ""
            return f"{what}. Give all processes the same cluster.{hint}", "refused"
        if member in self._wires:
            return f"there is a {member} already", "wait"
        if differences:
            shown = "\n".join(f"  {line}" for line in differences)
            return f"{member} was not started like {self.cluster.lead}:\n{shown}", "refused"
        comes_back = member.role == EVALUATOR or (self.cluster.mode == PARAMETER_SERVERS and member.role == WORKER)
        if self._welcome is not None and not comes_back:
            return "the run is under way without it", "wait"
        return "", ""

    # -- who is there -----------------------------------------------------------------------------------------------

    def _listen(self, member: Member, wire: Wire) -> None:
        silent = False
        try:
            while True:
                message = wire.receive()
                if message.kind == "ready":
                    with self._changed:
                        self._ready[member] = message.fields
                        self._changed.notify_all()
                elif message.kind == "signal":
                    self.signal = signal_of(message.fields)
                elif message.kind == "failed":
                    self._gone(member, wire, failure_of(message.fields, str(member)))
                    return
                elif message.kind == "bye":
                    self._forget(member, wire)
                    return
        except TimeoutError:
            silent = True
            error = lost(self._named(member), f"has been silent for {self.peer_timeout:g} s")
        except (OSError, EOFError):
            error = lost(self._named(member), "ended without a word")
        except NotOursError:
            error = lost(self._named(member), "sends what can't be understood")
        self._gone(member, wire, error, silent)

    def _gone(self, member: Member, wire: Wire, error: UserError, silent: bool = False) -> None:
        self._forget(member, wire)
        if self._over.is_set():
            return
        # A worker of parameter servers may come back, but one that hangs holds its step, and so all, for ever.
        starts_again = isinstance(error, PeerLostError) and not silent
        may_return = self.cluster.mode == PARAMETER_SERVERS and member.role == WORKER and starts_again
        if member.role == EVALUATOR or may_return:
            if self.failure is None:
                log.warning("%s is gone; the run goes on, and takes it back when it returns", member)
            return
        self._told.add(member)
        self._fail_all(error)

    def _fail_all(self, error: UserError) -> None:
        """Everyone learns of the first failure at once, whatever this process is busy with."""
        with self._changed:
            if self.failure is None:
                self._told |= set(self._wires)
                self._say_to_all("failed", **in_words(error))
                self.fail(error)
            self._changed.notify_all()

    def _forget(self, member: Member, wire: Wire) -> None:
        with self._changed:
            if self._wires.get(member) is wire:
                del self._wires[member]
            self._changed.notify_all()
        wire.close()

    def _named(self, member: Member) -> str:
        return f"{member} ({self.cluster.address(member)})"

    def _say_to_all(self, kind: str, **fields: Any) -> None:
        for wire in list(self._wires.values()):
            wire.send(kind, **fields)

    # -- the end ----------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._leaving.set()
            if error is None or ended_by(error) is not None:
                self._say_to_all("end", signal=ended_by(error))
                # An evaluator still has the last checkpoint to evaluate.
                self._changed.wait_for(lambda: all(m.role == EVALUATOR for m in self._wires), timeout=_LINGER_SECONDS)
            else:
                self._fail_all(failure_of(in_words(error), str(self.cluster.lead)))
                self._linger()
            self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would leave the thread that accepts, and the port
        self._listener.close()
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for wire in list(self._wires.values()):
            wire.finish(max(deadline - time.monotonic(), 0))

    def _linger(self) -> None:
        """Tells those who come late why there will be no run; where starting again may help, they had better wait."""
        if self._welcome is None and not isinstance(self.failure, PeerLostError):
            self._changed.wait_for(lambda: self._told >= set(self.expected), timeout=_LINGER_SECONDS)


def _introduced(hello: Message) -> tuple[Member, dict[str, Any]]:
    """Who someone says to be, and what it was started with.

    Raises:
        NotOursError: if it says neither.
    """
    role, index, card = (hello.fields.get(name) for name in ("role", "index", "card"))
    if hello.kind != "hello" or role not in ROLES or type(index) is not int or not isinstance(card, dict):
        raise NotOursError
    return Member(str(role), index), card


def _spec(cluster: Cluster, own_address: str) -> dict[str, list[str]]:
    """The addresses of the framework's servers: everyone's own, but the lead's is one that the system picked."""

    def address(member: Member) -> str:
        return own_address if member == cluster.lead else cluster.address(member)

    if cluster.mode == SYNCHRONOUS:
        return {WORKER: [address(member) for member in cluster.trainers]}
    roles = (cluster.lead.role, WORKER, PS)
    return {role: [address(m) for m in cluster.members if m.role == role] for role in roles}
