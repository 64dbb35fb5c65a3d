"""The process that leads: it lets the others in, gives orders, and notices who is gone."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from modelyard.cluster.crew import Connected, ended_by, failure_of, in_words, lost
from modelyard.cluster.roles import EVALUATOR, PARAMETER_SERVERS, PS, ROLES, SYNCHRONOUS, WORKER, Cluster, Member
from modelyard.cluster.wire import NotOursError, Wire, free_port, listen, split
from modelyard.errors import ClusterError, PeerLostError, UserError

log = logging.getLogger("modelyard")
_HELLO_SECONDS = 10.0
_LINGER_SECONDS = 10.0
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
        self._card, self._compare, self._start_timeout = card, compare, start_timeout
        self._began = time.monotonic()
        self._wires: dict[Member, Wire] = {}
        self._told: set[Member] = set()
        self._ready: dict[Member, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._welcome: dict[str, Any] | None = None
        self._listener = listen(cluster.address(cluster.me))
        threading.Thread(target=self._accept, name="door", daemon=True).start()
        self._repeat(self._beat)

    @property
    def expected(self) -> list[Member]:
        """Those without whom the run does not begin."""
        return [m for m in self.cluster.members if m != self.cluster.me]

    def meet(self, **facts: Any) -> None:
        """Waits until everyone is there, and tells them ``facts`` about the run.

        Raises:
            ClusterError: if someone differs or does not come in time.
        """
        waited_for = ", ".join(map(str, self.expected)) or "nobody"
        log.info("%s; waiting for %s", self.cluster.describe(), waited_for)
        deadline = self._began + self._start_timeout
        with self._changed:
            while missing := [m for m in self.expected if m not in self._wires]:
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    names = ", ".join(f"{m} ({self.cluster.address(m)})" for m in missing)
                    raise ClusterError(
                        f"{names} did not come within {self._start_timeout:g} s. Were they started, and can they "
                        f"reach {self.cluster.address(self.cluster.me)}? start_timeout_secs gives them more time."
                    )
                self._changed.wait(min(left, 1.0))
            self.check()
            host, _ = split(self.cluster.address(self.cluster.me))
            self.spec = _spec(self.cluster, f"{host}:{free_port(host)}")
            self._welcome = {"spec": self.spec, **facts}
            for wire in self._wires.values():
                self._quietly(wire, "welcome", **self._welcome)

    def gather_ready(self) -> dict[Member, dict[str, Any]]:
        """Waits until everyone who trains can begin; gives what they found."""
        with self._changed:
            while any(member not in self._ready for member in self.cluster.trainers if member != self.cluster.me):
                self.check()
                self._changed.wait(1.0)
            self.check()
            return dict(self._ready)

    def tell(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Gives an order to all who train together with the lead."""
        self.check()
        if self.cluster.mode == SYNCHRONOUS:
            for member, wire in list(self._wires.items()):
                if member.role != EVALUATOR:
                    self._quietly(wire, kind, payload, **fields)

    # -- the door ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._receive, args=(connection,), name="visitor", daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        """One who comes: a member, or a stranger who is sent away without disturbing anyone."""
        wire = Wire(connection)
        try:
            wire.set_timeout(_HELLO_SECONDS)
            wire.expect_greeting()
            hello = wire.receive()
            wire.greet()
            member = Member(str(hello.fields.get("role")), int(hello.fields.get("index", -1)))
            card = hello.fields.get("card")
            if hello.kind != "hello" or not isinstance(card, dict) or member.role not in ROLES:
                raise NotOursError
        except (OSError, EOFError, NotOursError, TypeError, ValueError):
            wire.close()
            return
        if self._let_in(member, card, wire):
            self._listen(member, wire)

    def _let_in(self, member: Member, card: dict[str, Any], wire: Wire) -> bool:
        with self._changed:
            why, kind = self._objection(member, card)
            if kind:
                self._quietly(wire, kind, message=why, final=kind == "refused")
                wire.close()
                self._told.add(member)
                if kind == "refused" and self._welcome is None:
                    self.fail(ClusterError(why))
                self._changed.notify_all()
                return False
            wire.set_timeout(self.peer_timeout)
            self._wires[member] = wire
            if self._welcome is not None:
                self._quietly(wire, "welcome", **self._welcome)
                log.info("%s has joined", member)
            self._changed.notify_all()
            return True

    def _objection(self, member: Member, card: dict[str, Any]) -> tuple[str, str]:
        """Why someone is not let in, and whether for good; empty if nothing speaks against it."""
        if self.failure is not None:
            told = in_words(self.failure)
            return told["message"], "refused" if told["final"] else "wait"
        if member not in self.cluster.members or member == self.cluster.me:
            what = f"the cluster of {self.cluster.lead} has {self.cluster.listed()}, and {member} is not in it"
            hint = " Without an evaluator in it the chief evaluates itself." if member.role == EVALUATOR else ""
            return f"{what}. Give all processes the same cluster.{hint}", "refused"
        if member in self._wires:
            return f"there is a {member} already", "wait"
        if differences := self._compare(self._card, card):
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
                    self.signal = int(message.fields["number"])
                elif message.kind == "failed":
                    self._gone(member, wire, failure_of(str(member), message.fields))
                    return
                elif message.kind == "bye":
                    with self._changed:
                        self._forget(member, wire)
                    return
        except TimeoutError:
            silent = True
            error = lost(self._named(member), f"has been silent for {self.peer_timeout:g} s")
        except (OSError, EOFError):
            error = lost(self._named(member), "ended without a word")
        except (NotOursError, KeyError, TypeError, ValueError):
            error = lost(self._named(member), "sends what can't be understood")
        self._gone(member, wire, error, silent)

    def _gone(self, member: Member, wire: Wire, error: UserError, silent: bool = False) -> None:
        with self._changed:
            self._forget(member, wire)
        if self._over.is_set():
            return
        # A worker of parameter servers may come back, but one that hangs holds its step, and so all, for ever.
        may_return = self.cluster.mode == PARAMETER_SERVERS and member.role == WORKER and not silent
        if member.role == EVALUATOR or may_return:
            log.warning("%s is gone (%s); the run goes on, and takes it back when it returns", member, error)
            return
        self.fail(error)
        with self._changed:
            for other, others_wire in self._wires.items():
                self._quietly(others_wire, "failed", **in_words(error), who=str(member) if other != member else None)
            self._changed.notify_all()

    def _forget(self, member: Member, wire: Wire) -> None:
        if self._wires.get(member) is wire:
            del self._wires[member]
        wire.close()
        self._changed.notify_all()

    def _named(self, member: Member) -> str:
        return f"{member} ({self.cluster.address(member)})"

    def _beat(self) -> None:
        for wire in list(self._wires.values()):
            self._quietly(wire, "alive")

    def _quietly(self, wire: Wire, kind: str, payload: bytes = b"", **fields: Any) -> None:
        with contextlib.suppress(OSError):  # the listening side notices
            wire.send(kind, payload, **fields)

    # -- the end ----------------------------------------------------------------------------------------------------

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or ended_by(error) is not None:
            self._say_to_all("end", signal=ended_by(error))
            with self._changed:
                # An evaluator still has the last checkpoint to evaluate.
                self._changed.wait_for(lambda: all(m.role == EVALUATOR for m in self._wires), timeout=_LINGER_SECONDS)
        else:
            if self.failure is None:
                self.failure = error if isinstance(error, UserError) else PeerLostError(in_words(error)["message"])
            self._say_to_all("failed", **in_words(error))
            self._linger()
        self._over.set()
        self._listener.close()
        for wire in list(self._wires.values()):
            wire.close()

    def _say_to_all(self, kind: str, **fields: Any) -> None:
        for wire in list(self._wires.values()):
            self._quietly(wire, kind, **fields)

    def _linger(self) -> None:
        """Tells those who come late why there will be no run; where starting again may help, they had better wait."""
        if self._welcome is None and not isinstance(self.failure, PeerLostError):
            with self._changed:
                told = self._told | set(self._wires)
                self._changed.wait_for(lambda: self._told | told >= set(self.expected), timeout=_LINGER_SECONDS)


def _spec(cluster: Cluster, own_address: str) -> dict[str, list[str]]:
    """The addresses of the framework's servers: everyone's own, but the lead's is one that the system picked."""

    def address(member: Member) -> str:
        return own_address if member == cluster.lead else cluster.address(member)

    if cluster.mode == SYNCHRONOUS:
        return {WORKER: [address(member) for member in cluster.trainers]}
    roles = (cluster.lead.role, WORKER, PS)
    return {role: [address(m) for m in cluster.members if m.role == role] for role in roles}
