"""Whoever is not of the group is sent away, and disturbs nobody."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from groups import Yard, ends_in, hears_the_end, nothing_is_left, wait_until

from modelyard.distributed import coordinator as coordinators
from modelyard.distributed.connection import MAGIC
from modelyard.system.network import connect

DEEP = '{"kind": "hello", "role": "worker", "index": 0, "start_info": ' + '{"a":' * 900 + "1" + "}" * 900 + "}"


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from nothing_is_left(monkeypatch)


@pytest.fixture
def yard() -> Yard:
    return Yard()


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
def test_a_stranger_is_sent_away_and_the_crew_meets(yard: Yard, said: bytes) -> None:
    with yard.coordinator(lr=0.1) as coordinator:
        stranger = connect(yard.coordinator_address, 5.0)
        stranger.sendall(said)
        if said != message(DEEP):  # may be understood, and refused
            assert hears_the_end(stranger)
            assert not coordinator._connections
            assert coordinator.failure is None
            parts = [yard.obeys("worker", index, lr=0.1) for index in (0, 1)]
            coordinator.wait_for_all()
            coordinator.broadcast("train")
            coordinator.__exit__(None, None, None)
            assert [[next_command.kind for next_command in part.result()] for part in parts] == [["train", "end"]] * 2
        else:
            assert hears_the_end(stranger)
        stranger.close()


def test_a_stranger_who_says_its_hello_drop_by_drop_is_sent_away(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "_HELLO_SECONDS", 1.0)
    with yard.coordinator() as coordinator, connect(yard.coordinator_address, 5.0) as stranger:
        began = time.monotonic()
        with ends_in(OSError):
            stranger.sendall(MAGIC + struct.pack(">IQ", 1 << 20, 0))
            while time.monotonic() - began < 8.0:
                stranger.sendall(b" ")
                time.sleep(0.05)
        assert not coordinator._connections


def test_strangers_who_say_nothing_are_not_let_in_without_end(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "_MAX_PENDING", 5)
    monkeypatch.setattr(coordinators, "_HELLO_SECONDS", 60.0)
    with yard.coordinator() as coordinator:
        strangers = [connect(yard.coordinator_address, 5.0) for _ in range(20)]
        assert hears_the_end(strangers[-1])
        assert [thread.name for thread in threading.enumerate()].count("hello") == 5
        parts = [yard.obeys("worker", index) for index in (0, 1)]  # try again until there is room
        for stranger in strangers:
            stranger.close()
        coordinator.wait_for_all()
    for part in parts:
        part.result()


def test_the_door_stays_open_when_the_system_is_short_of_something(yard: Yard) -> None:
    with yard.coordinator() as coordinator:
        door, failures = coordinator._listener, iter([OSError(24, "Too many open files")] * 2)

        class Short:
            def accept(self) -> tuple[socket.socket, object]:
                for error in failures:
                    raise error
                return door.accept()

            def __getattr__(self, name: str) -> object:
                return getattr(door, name)

        coordinator._listener = Short()  # type: ignore[assignment]
        connect(yard.coordinator_address, 5.0).close()  # what the old one still waits for
        wait_until(lambda: next(failures, None) is None, "both failures")
        parts = [yard.obeys("worker", index) for index in (0, 1)]
        coordinator.wait_for_all()
    for part in parts:
        part.result()


def test_one_who_claims_to_be_a_member_that_is_there_changes_nothing(yard: Yard) -> None:
    parts = [yard.obeys("worker", index, lr=0.1) for index in (0, 1)]
    with yard.coordinator(lr=0.1) as coordinator:
        coordinator.wait_for_all()
        for said in (hello(start_info={"lr": 0.1}), hello(start_info={"lr": 0.5}), hello(index=7), hello(role="chief")):
            with connect(yard.coordinator_address, 5.0) as stranger:
                stranger.sendall(said)
                assert hears_the_end(stranger)
        assert coordinator.failure is None
        coordinator.broadcast("train")
    for part in parts:
        assert [next_command.kind for next_command in part.result()] == ["train", "end"]
