"""Process groups whose processes are threads of one process, on ports that the system picked."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import pytest

from modelyard.cluster.description import Cluster, Member
from modelyard.distributed import follower as followers
from modelyard.distributed.authentication import identify
from modelyard.distributed.connection import Connection, Message
from modelyard.distributed.coordinator import Coordinator
from modelyard.distributed.follower import Follower
from modelyard.distributed.process_group import polling
from modelyard.system import network
from modelyard.system.network import connect, free_port, join_address
from waiting import PATIENCE, wait_until

T = TypeVar("T")
OURS = {"accept", "hello", "sender", "commands", "leaving", "loss"}
LONG = PATIENCE
"""Longer than anything here takes."""


class InThread(Generic[T]):
    """What another process would do, in a thread; its result or its error is asked for later."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        self._end()
        if self._error is not None:
            raise self._error
        return self._value

    def error(self) -> BaseException:
        self._end()
        assert self._error is not None, "it did not fail"
        return self._error

    def _end(self) -> None:
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "it did not end"


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [f"{key}: {theirs.get(key)}, not {mine[key]}" for key in mine if theirs.get(key) != mine[key]]


class LocalCluster:
    """The addresses of a cluster, and its processes."""

    def __init__(
        self, host: str = "127.0.0.1", chief: int = 1, worker: int = 2, ps: int = 0, evaluator: int = 0
    ) -> None:
        counts = {"chief": chief, "worker": worker, "ps": ps, "evaluator": evaluator}
        ports: set[int] = set()
        while len(ports) < sum(counts.values()):
            ports.add(free_port(host))
        self.addresses = {
            role: tuple(join_address(host, ports.pop()) for _ in range(count)) for role, count in counts.items()
        }
        self.start_timeout = self.peer_timeout = LONG
        self.secret = b"the secret of the tests"

    def cluster(self, role: str, index: int = 0) -> Cluster:
        return Cluster(Member(role, index), self.addresses, "TF_CONFIG")

    @property
    def coordinator_address(self) -> str:
        return self.cluster("chief").address(self.cluster("chief").coordinator)

    def coordinator(self, **start_info: Any) -> Coordinator:
        me = self.cluster("chief").coordinator
        where, timeouts = self.cluster(me.role), (self.start_timeout, self.peer_timeout)
        return Coordinator(where, start_info, differences, *timeouts, self.secret)

    def follower(self, role: str, index: int = 0, **start_info: Any) -> Follower:
        return Follower(self.cluster(role, index), start_info, self.start_timeout, self.peer_timeout, self.secret)

    def start_follower(self, role: str, index: int = 0, **start_info: Any) -> InThread[list[Message]]:
        """A follower that notes its commands until the end."""

        def work() -> list[Message]:
            with self.follower(role, index, **start_info) as group:
                assert group.join() is not None
                return list(group.commands())

        return InThread(work)

    def scripted(self, role: str, index: int = 0, **start_info: Any) -> ScriptedMember:
        return ScriptedMember(self.coordinator_address, role, index, start_info, self.secret)


def _try_to_connect(address: str) -> socket.socket | None:
    try:
        return connect(address, LONG)
    except ConnectionRefusedError:
        return None


class ScriptedMember:
    """A member that does only what the test says: no heartbeats, nothing read."""

    def __init__(self, address: str, role: str, index: int, start_info: dict[str, Any], secret: bytes) -> None:
        self.socket = wait_until(lambda: _try_to_connect(address), "the coordinator listens")
        identify(self.socket, secret, LONG)
        self.connection = Connection(self.socket, most=1 << 40)
        self.connection.set_timeout(LONG)
        self.connection.send("hello", role=role, index=index, start_info=start_info)

    def polling(self, kind: str) -> Message:
        while (message := self.connection.receive()).kind != kind:
            pass
        return message

    def close(self) -> None:
        self.connection.finish(LONG)


@dataclass
class CaughtError:
    value: BaseException = field(default_factory=BaseException)


@contextlib.contextmanager
def fails_with(kind: type[BaseException], match: str = "") -> Iterator[CaughtError]:
    """What is inside is the life of a process, which ends in an error."""
    caught = CaughtError()
    try:
        yield caught
    except kind as error:
        caught.value = error
    assert isinstance(caught.value, kind), "it did not fail"
    assert re.search(match, str(caught.value)), caught.value


def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Around a test: it leaves no thread behind, and is not allowed to end the process."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(network, "_OWN_PORT_SECONDS", 0.3)
    monkeypatch.setattr(followers, "polling", partial(polling, pause=0.02))
    yield
    wait_until(lambda: not OURS & {thread.name for thread in threading.enumerate()}, "all threads end")
    assert ended == []


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side hangs up, whatever it says before; and at once, not when its patience is at an end."""
    connection.settimeout(8.0)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True
