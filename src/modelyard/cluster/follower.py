"""A process that follows: it joins the lead's crew and takes its orders."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from modelyard.cluster.crew import Connected, Inbox, ended_by, failure_of, in_words, lost, until
from modelyard.cluster.roles import Cluster
from modelyard.cluster.wire import MOST_BYTES, Message, NotOursError, Wire, connect
from modelyard.errors import PeerLostError

log = logging.getLogger("modelyard")
_LAST_WORDS_SECONDS = 2.0
_ANSWER_SECONDS = 1.0
"""How long a lead that is there may take to answer."""


class Follower(Connected):
    """Takes orders from the lead.

    Args:
        cluster: who is who.
        card: what this process was started with, for the lead to compare.
        start_timeout: seconds to find the lead in.
        peer_timeout: seconds of silence after which the lead is lost.
    """

    def __init__(self, cluster: Cluster, card: dict[str, Any], start_timeout: float, peer_timeout: float) -> None:
        super().__init__(cluster, peer_timeout)
        self._card, self._start_timeout = card, start_timeout
        self._inbox = Inbox()
        self._wire: Wire | None = None

    def join(self, unless: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Finds the lead, and waits until everyone is there. Returns what the lead tells about the run.

        Args:
            unless: asked before every attempt; if it says so, there is no need to join any more, and None is returned.

        Raises:
            ClusterError: if the lead refuses, fails, or does not answer in time.
        """
        lead, address = self.cluster.lead, self.cluster.address(self.cluster.lead)
        log.info("%s; waiting for %s at %s", self.cluster.describe(), lead, address)
        why = "nobody listens there"
        for left in until(time.monotonic() + self._start_timeout):
            if unless():
                return None
            try:
                # The last try gets its time too: cut short, it would hide the reason that the ones before it found.
                wire, reply = self._knock(address, min(max(left, _ANSWER_SECONDS), self.peer_timeout))
            except (OSError, EOFError) as error:
                why = f"nobody answers there ({str(error) or 'it hung up'})"
                continue
            except NotOursError:
                why = "something else answers there"
                continue
            if reply.kind == "welcome":
                return self._welcomed(wire, reply)
            wire.close()
            if reply.kind in ("refused", "failed"):
                raise failure_of(reply.fields)
            why = str(reply.fields.get("message", "it does not let this process in"))
        raise PeerLostError(  # it may be there the next time
            f"{lead} at {address} could not be joined within {self._start_timeout:g} s: {why}. "
            "Is it running, with the same addresses in its cluster? start_timeout_secs gives it more time."
        )

    def _knock(self, address: str, timeout: float) -> tuple[Wire, Message]:
        wire = Wire(connect(address, timeout), most=MOST_BYTES)
        try:
            wire.set_timeout(timeout)
            wire.greet()
            wire.send("hello", role=self.cluster.me.role, index=self.cluster.me.index, card=self._card)
            wire.expect_greeting()
            wire.set_timeout(self.peer_timeout)
            wire.keep_alive(self.beat_seconds)
            while True:
                reply = wire.receive()
                if reply.kind != "alive":  # the lead waits for others
                    return wire, reply
        except BaseException:
            wire.close()
            raise

    def _welcomed(self, wire: Wire, reply: Message) -> dict[str, Any]:
        self._wire = wire
        self.spec = reply.fields.get("spec", {})
        threading.Thread(target=self._listen, args=(wire,), name="orders", daemon=True).start()
        return dict(reply.fields)

    def ready(self, **facts: Any) -> None:
        """Tells the lead that this process can begin, and what it found."""
        self._say("ready", **facts)

    def report_signal(self, number: int) -> None:
        """Tells the lead of a signal: it has all save and leave at the same step."""
        self._say("signal", number=number)

    def order(self) -> Message:
        """The next order.

        Raises:
            PeerLostError: if the lead is gone.
        """
        message = self.order_within(None)
        if message is None:
            raise lost(str(self.cluster.lead), "has ended the run already")
        return message

    def order_within(self, seconds: float | None) -> Message | None:
        """The next order; None if there is none within ``seconds``.

        Raises:
            PeerLostError: if the lead is gone.
        """
        self.check()
        message = self._inbox.get(seconds)
        self.check()
        return message

    def orders(self) -> Iterator[Message]:
        """Orders, until the lead says that it is over; that one too."""
        while True:
            message = self.order()
            yield message
            if message.kind == "end":
                return

    def _listen(self, wire: Wire) -> None:
        lead = str(self.cluster.lead)
        try:
            while True:
                message = wire.receive()
                if message.kind == "failed":
                    self.fail(failure_of(message.fields))
                elif message.kind != "alive":
                    self._inbox.put(message)
                if message.kind in ("failed", "end"):
                    return
        except TimeoutError:
            self.fail(lost(lead, f"has been silent for {self.peer_timeout:g} s"))
        except (OSError, EOFError):
            self.fail(lost(lead, "ended without a word"))
        except NotOursError:
            self.fail(lost(lead, "sends what can't be understood"))
        finally:
            self._inbox.put(None)

    def _say(self, kind: str, **fields: Any) -> None:
        if self._wire is not None:
            self._wire.send(kind, **fields)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        if error is None or ended_by(error) is not None:
            self._say("bye")
        elif self.failure is None:
            self._say("failed", **in_words(error))
        self._over.set()
        if self._wire is not None:
            self._wire.finish(_LAST_WORDS_SECONDS)
