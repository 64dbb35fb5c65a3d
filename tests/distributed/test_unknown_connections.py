"""Whoever is not of the group is sent away, and disturbs nobody."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from groups import LocalCluster, fails_with, is_closed, nothing_is_left, wait_until

from modelyard.distributed import coordinator as coordinators
from modelyard.distributed.connection import MAGIC
from modelyard.system.network import connect

DEEP = '{"kind": "hello", "role": "worker", "index": 0, "start_info": ' + '{"a":' * 900 + "1" + "}" * 900 + "}"


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from nothing_is_left(monkeypatch)


@pytest.fixture
def peers() -> LocalCluster:
    return LocalCluster()


def message(text: str, more: int = 0) -> bytes:
    return MAGIC + struct.pack(">IQ", len(text.encode()), more) + text.encode()


def hello(**fields: object) -> bytes:
    return message(json.dumps({"kind": "hello", "role": "worker", "index": 0, "start_info": {}, **fields}))


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 64,
        MAGIC + b"\xff" * 12,
        MAGIC + struct.pack(">IQ", 2, 1 << 39) + b"{}",
        MAGIC + struct.pack(">IQ", (4 << 20) + 1, 0),
        message('{"kind": "hello", "role": "worker", "index": 0, "start_info": {}}', more=1 << 39),
        message("[]"),
        message("{}"),
        message("null"),
        message('{"kind": 5}'),
        message("not json"),
        message("[" * 200_000),
        message(DEEP),
        message('{"kind": "hello", "role": "worker", "index": Infinity, "start_info": {}}'),
        message('{"kind": "hello", "role": "worker", "index": ' + "1" * 5000 + ', "start_info": {}}'),
        hello(kind="train"),
        hello(role="boss"),
        hello(role=["worker"]),
        hello(index="0"),
        hello(index=True),
        hello(index=0.0),
        hello(index=None),
        hello(start_info=[]),
        hello(start_info=None),
        b"\xff\xfe" + MAGIC,
    ],
    ids=range(25),
)
def test_an_unknown_connection_is_closed_and_the_group_forms(peers: LocalCluster, said: bytes) -> None:
    with peers.coordinator(lr=0.1) as coordinator:
        unknown = connect(peers.coordinator_address, 5.0)
        unknown.sendall(said)
        if said != message(DEEP):  # may be understood, and refused
            assert is_closed(unknown)
            assert not coordinator._connections
            assert coordinator.failure is None
            parts = [peers.start_follower("worker", index, lr=0.1) for index in (0, 1)]
            coordinator.wait_for_all()
            coordinator.broadcast("train")
            coordinator.__exit__(None, None, None)
            assert [[next_command.kind for next_command in part.result()] for part in parts] == [["train", "end"]] * 2
        else:
            assert is_closed(unknown)
        unknown.close()


def test_a_hello_that_arrives_byte_by_byte_is_closed_after_the_limit(
    peers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinators, "_HELLO_SECONDS", 1.0)
    with peers.coordinator() as coordinator, connect(peers.coordinator_address, 5.0) as unknown:
        began = time.monotonic()
        with fails_with(OSError):
            unknown.sendall(MAGIC + struct.pack(">IQ", 1 << 20, 0))
            while time.monotonic() - began < 8.0:
                unknown.sendall(b" ")
                time.sleep(0.05)
        assert not coordinator._connections


def test_the_number_of_silent_connections_is_limited(peers: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "_MAX_PENDING", 5)
    monkeypatch.setattr(coordinators, "_HELLO_SECONDS", 60.0)
    with peers.coordinator() as coordinator:
        others = [connect(peers.coordinator_address, 5.0) for _ in range(20)]
        assert is_closed(others[-1])
        assert [thread.name for thread in threading.enumerate()].count("hello") == 5
        parts = [peers.start_follower("worker", index) for index in (0, 1)]  # try again until there is room
        for unknown in others:
            unknown.close()
        coordinator.wait_for_all()
    for part in parts:
        part.result()


def test_it_keeps_accepting_after_the_system_ran_out_of_file_descriptors(peers: LocalCluster) -> None:
    with peers.coordinator() as coordinator:
        listener, failures = coordinator._listener, iter([OSError(24, "Too many open files")] * 2)

        class Short:
            def accept(self) -> tuple[socket.socket, object]:
                for error in failures:
                    raise error
                return listener.accept()

            def __getattr__(self, name: str) -> object:
                return getattr(listener, name)

        coordinator._listener = Short()  # type: ignore[assignment]
        connect(peers.coordinator_address, 5.0).close()  # what the old one still waits for
        wait_until(lambda: next(failures, None) is None, "both failures")
        parts = [peers.start_follower("worker", index) for index in (0, 1)]
        coordinator.wait_for_all()
    for part in parts:
        part.result()


def test_one_who_claims_to_be_a_member_that_is_there_changes_nothing(peers: LocalCluster) -> None:
    parts = [peers.start_follower("worker", index, lr=0.1) for index in (0, 1)]
    with peers.coordinator(lr=0.1) as coordinator:
        coordinator.wait_for_all()
        for said in (hello(start_info={"lr": 0.1}), hello(start_info={"lr": 0.5}), hello(index=7), hello(role="chief")):
            with connect(peers.coordinator_address, 5.0) as unknown:
                unknown.sendall(said)
                assert is_closed(unknown)
        assert coordinator.failure is None
        coordinator.broadcast("train")
    for part in parts:
        assert [next_command.kind for next_command in part.result()] == ["train", "end"]
