"""Whoever is not of the group is sent away, learns nothing, and disturbs nobody."""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import psutil
import pytest
from groups import LONG, InThread, LocalCluster, fails_with, is_closed, nothing_is_left

from modelyard.cluster.description import Member
from modelyard.distributed import authentication
from modelyard.distributed import follower as followers
from modelyard.distributed.authentication import (
    COORDINATOR,
    DIFFERS,
    FOLLOWER,
    GREETING_BYTES,
    MAGIC,
    PROOF_BYTES,
    greeting,
    identify,
    proof,
)
from modelyard.distributed.coordinator import Coordinator
from modelyard.errors import ClusterError, PeerLostError
from modelyard.system.network import connect, listen
from waiting import wait_until

DEEP = '{"kind": "hello", "role": "worker", "index": 0, "start_info": ' + '{"a":' * 900 + "1" + "}" * 900 + "}"
MEMORY = 32 << 20


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from nothing_is_left(monkeypatch)


@pytest.fixture
def peers() -> LocalCluster:
    return LocalCluster()


def message(text: str, more: int = 0) -> bytes:
    return struct.pack(">IQ", len(text.encode()), more) + text.encode()


def hello(**fields: object) -> bytes:
    return message(json.dumps({"kind": "hello", "role": "worker", "index": 0, "start_info": {}, **fields}))


def everything(connection: socket.socket) -> bytes:
    """What the other side says until it hangs up."""
    connection.settimeout(LONG)
    said = b""
    with suppress(ConnectionError):
        while part := connection.recv(4096):
            said += part
    return said


def send(connection: socket.socket, data: bytes) -> None:
    with suppress(ConnectionError):  # hung up already
        connection.sendall(data)


def memory() -> int:
    return int(psutil.Process().memory_info().rss)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "was not let in" in r.message]


def trains_to_the_end(peers: LocalCluster, coordinator: Coordinator) -> None:
    """Both workers join, receive a command, and end."""
    parts = [peers.start_follower("worker", index, lr=0.1) for index in (0, 1)]
    coordinator.wait_for_all()
    coordinator.broadcast("train")
    coordinator.__exit__(None, None, None)
    assert [[command.kind for command in part.result()] for part in parts] == [["train", "end"]] * 2


# -- without the secret ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 64,
        b"\xff" * (8 << 20),
        b"modelyard cluster 1\n" + hello(),
        MAGIC + struct.pack(">IQ", (1 << 32) - 1, (1 << 64) - 1) + b"x" * (8 << 20),
        MAGIC + hello(),
        greeting() + hello(),
        greeting() + b"\0" * PROOF_BYTES + hello(),
        greeting() + DIFFERS + hello(),
        b"\xff\xfe" + greeting(),
    ],
    ids=range(10),
)
def test_a_stranger_is_told_nothing_and_the_group_forms(
    peers: LocalCluster, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with peers.coordinator(lr=0.1) as coordinator:
        for _ in range(3):
            with connect(peers.coordinator_address, LONG) as unknown:
                send(unknown, said)
                answer = everything(unknown)
            assert answer[:GREETING_BYTES].startswith(MAGIC[: len(answer)])
            assert answer[GREETING_BYTES:] in (b"", DIFFERS)
        assert not coordinator._connections
        assert coordinator.failure is None
        assert len(warnings(caplog)) == 1
        trains_to_the_end(peers, coordinator)


def test_half_a_greeting_is_closed_after_the_limit(peers: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "_SECONDS", 1.0)
    with peers.coordinator(lr=0.1) as coordinator, ExitStack() as stack:
        halves = (b"", MAGIC[:5], greeting()[:-1], greeting(), greeting() + b"\0")
        strangers = [stack.enter_context(connect(peers.coordinator_address, LONG)) for _ in halves]
        for unknown, said in zip(strangers, halves, strict=True):
            unknown.sendall(said)
        assert [len(everything(unknown)) for unknown in strangers] == [0, 0, 0, GREETING_BYTES, GREETING_BYTES]
        trains_to_the_end(peers, coordinator)


def test_a_greeting_that_arrives_byte_by_byte_is_closed_after_the_limit(
    peers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "_SECONDS", 1.0)
    with peers.coordinator() as coordinator, connect(peers.coordinator_address, LONG) as unknown:
        with fails_with(OSError):
            for byte in greeting():
                unknown.sendall(bytes([byte]))
                time.sleep(0.1)
        assert not coordinator._connections


def recorded(peers: LocalCluster, coordinator: Coordinator) -> bytes:
    """What worker 1 says when it joins, as someone on its way sees it."""
    real, said = peers.addresses, b""
    with socket.create_server(("127.0.0.1", 0)) as between:
        peers.addresses = {**real, "chief": (f"127.0.0.1:{between.getsockname()[1]}",)}
        follower = peers.follower("worker", 1, lr=0.1)
        peers.addresses = real
        InThread(follower.join)
        between.settimeout(LONG)
        inner = between.accept()[0]
    with inner, connect(peers.coordinator_address, LONG) as outer:
        inner.settimeout(0.01)
        outer.settimeout(0.01)
        while Member("worker", 1) not in coordinator._connections:
            with suppress(TimeoutError):
                part = inner.recv(4096)
                said += part
                outer.sendall(part)
            with suppress(TimeoutError):
                inner.sendall(outer.recv(4096))
    follower.__exit__(None, None, None)
    return said


def test_a_replayed_hello_is_not_let_in(caplog: pytest.LogCaptureFixture) -> None:
    """Parameter servers: a worker that is lost may come back, so nothing but the proof keeps the replay out."""
    peers = LocalCluster(worker=2, ps=1)
    with peers.coordinator(lr=0.1) as coordinator:
        said = recorded(peers, coordinator)
        assert b'"start_info"' in said
        wait_until(lambda: Member("worker", 1) not in coordinator._connections, "worker 1 is gone")
        for running in (False, True):
            for data in (said, said[GREETING_BYTES + PROOF_BYTES :]):
                with connect(peers.coordinator_address, LONG) as unknown:
                    send(unknown, data)
                    assert everything(unknown)[GREETING_BYTES:] in (b"", DIFFERS)
            assert Member("worker", 1) not in coordinator._connections
            if not running:
                parts = [peers.start_follower("worker", 0, lr=0.1), peers.start_follower("ps", 0, lr=0.1)]
                lost = peers.scripted("worker", 1, lr=0.1)
                coordinator.wait_for_all()
                lost.close()
                wait_until(lambda: Member("worker", 1) not in coordinator._connections, "worker 1 is gone")
        late = peers.start_follower("worker", 1, lr=0.1)
        wait_until(lambda: Member("worker", 1) in coordinator._connections, "the honest one is back")
    assert [part.result()[-1].kind for part in (*parts, late)] == ["end"] * 3
    assert len(warnings(caplog)) == 2  # one for each kind of mistake


def test_a_reflected_challenge_does_not_pass_for_the_coordinator(peers: LocalCluster) -> None:
    peers.start_timeout = 2.0
    with listen(peers.coordinator_address) as server:

        def reflect() -> bytes:
            heard = b""
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return heard
                with connection:
                    heard += everything_echoed(connection)

        part = InThread(reflect)
        with pytest.raises(ClusterError, match="another program answers there"):
            peers.follower("worker", secret_option="x").join()
        server.shutdown(socket.SHUT_RDWR)
    assert b"secret_option" not in part.result()  # it was told nothing either


def everything_echoed(connection: socket.socket) -> bytes:
    heard = b""
    with suppress(ConnectionError):
        while part := connection.recv(4096):
            heard += part
            connection.sendall(part)
    return heard


def test_a_reflected_challenge_does_not_pass_for_a_member(peers: LocalCluster) -> None:
    with peers.coordinator() as coordinator, connect(peers.coordinator_address, LONG) as unknown:
        unknown.sendall(greeting())
        theirs = unknown.recv(GREETING_BYTES, socket.MSG_WAITALL)
        with connect(peers.coordinator_address, LONG) as second:  # the same challenge, for it to answer
            second.sendall(theirs)
            assert len(second.recv(GREETING_BYTES, socket.MSG_WAITALL)) == GREETING_BYTES
            second.sendall(b"\0" * PROOF_BYTES)
            answer = everything(second)
        unknown.sendall(answer)
        assert everything(unknown) == DIFFERS
        assert not coordinator._connections


def test_a_proof_is_for_one_role_one_connection_and_one_secret() -> None:
    one, other = greeting(), greeting()
    made = {
        proof(secret, role, mine, theirs)
        for secret in (b"", b"a" * 16, b"b" * 16)
        for role in (FOLLOWER, COORDINATOR)
        for mine, theirs in ((one, other), (other, one), (one, one))
    }
    assert len(made) == 18
    assert {len(each) for each in made} == {PROOF_BYTES}


@pytest.mark.parametrize(
    ("theirs", "words"),
    [(b"another secret of the tests", "does not have the secret of this process"), (b"", "this process has none")],
)
def test_a_process_with_a_wrong_secret_says_so_and_the_run_goes_on(
    peers: LocalCluster, theirs: bytes, words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "_OTHER_RUN_SECONDS", 0.1)
    right = peers.secret
    with peers.coordinator(lr=0.1) as coordinator:
        for _ in range(2):
            peers.secret = theirs
            with fails_with(ClusterError, rf"the chief at .*{words}.*") as caught:
                peers.follower("worker", 1, lr=0.1).join()
            assert type(caught.value) is ClusterError  # status 2: a restart would repeat it
            assert "MODELYARD_CLUSTER_SECRET" in str(caught.value)
        peers.secret = right
        assert len(warnings(caplog)) == 1
        assert "MODELYARD_CLUSTER_SECRET" in warnings(caplog)[0]
        assert not any(secret and secret.decode() in caplog.text for secret in (right, theirs))
        trains_to_the_end(peers, coordinator)


# -- many ------------------------------------------------------------------------------------------------------------


def test_a_thousand_idle_connections_keep_nobody_out(caplog: pytest.LogCaptureFixture) -> None:
    peers = LocalCluster(worker=2, ps=1)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(1000, limit - psutil.Process().num_fds() - 2 * authentication._MAX_UNKNOWN)
    if count < authentication._MAX_UNKNOWN:
        pytest.skip("too few file descriptors")
    with peers.coordinator() as coordinator, ExitStack() as stack:
        before, threads = memory(), threading.active_count()

        def crowd() -> None:
            for number in range(count):
                idle = stack.enter_context(connect(peers.coordinator_address, LONG))
                idle.sendall((b"", MAGIC, greeting())[number % 3])

        crowd()
        parts = [peers.start_follower(role, index) for role, index in (("worker", 0), ("ps", 0))]
        lost = peers.scripted("worker", 1)
        coordinator.wait_for_all()
        lost.close()
        wait_until(lambda: Member("worker", 1) not in coordinator._connections, "worker 1 is gone")
        stack.close()
        crowd()
        assert threading.active_count() - threads < 20
        late = peers.start_follower("worker", 1)
        wait_until(lambda: Member("worker", 1) in coordinator._connections, "the late worker is there")
        assert len(coordinator._door._unknown) <= authentication._MAX_UNKNOWN
        assert memory() - before < MEMORY
    assert [part.result()[-1].kind for part in (*parts, late)] == ["end"] * 3
    assert len(warnings(caplog)) == 1


def test_memory_does_not_grow_with_what_strangers_send(peers: LocalCluster) -> None:
    data = MAGIC + struct.pack(">IQ", (1 << 32) - 1, (1 << 64) - 1) + os.urandom(4 << 20)
    with peers.coordinator(lr=0.1) as coordinator:
        before = memory()
        for number in range(60):
            with connect(peers.coordinator_address, LONG) as unknown:
                send(unknown, greeting() + data if number % 2 else data)
                everything(unknown)
        assert memory() - before < MEMORY
        trains_to_the_end(peers, coordinator)


def test_it_keeps_accepting_after_the_system_ran_out_of_file_descriptors(peers: LocalCluster) -> None:
    with peers.coordinator() as coordinator, connect(peers.coordinator_address, LONG) as idle:
        door = coordinator._door
        wait_until(lambda: bool(door._unknown), "the idle connection is there")
        listener, failures = door._listener, iter([OSError(24, "Too many open files")] * 2)

        class Short:
            def accept(self) -> tuple[socket.socket, object]:
                for error in failures:
                    raise error
                return listener.accept()

            def __getattr__(self, name: str) -> object:
                return getattr(listener, name)

        door._listener = Short()  # type: ignore[assignment]
        parts = [peers.start_follower("worker", index) for index in (0, 1)]
        coordinator.wait_for_all()
        assert is_closed(idle)  # it had to make room
        assert next(failures, None) is None
    for part in parts:
        part.result()


# -- with the secret, or in a cluster without one --------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 12,
        struct.pack(">IQ", 2, 1 << 39) + b"{}",
        struct.pack(">IQ", (4 << 20) + 1, 0),
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
    ],
    ids=range(22),
)
def test_a_malformed_hello_is_closed_and_the_group_forms(peers: LocalCluster, said: bytes) -> None:
    with peers.coordinator(lr=0.1) as coordinator:
        with connect(peers.coordinator_address, LONG) as unknown:
            identify(unknown, peers.secret, LONG)
            send(unknown, said)
            assert is_closed(unknown)
        if said != message(DEEP):  # may be understood, and refused
            assert not coordinator._connections
            assert coordinator.failure is None
            trains_to_the_end(peers, coordinator)


def test_one_who_claims_to_be_a_member_that_is_there_changes_nothing(peers: LocalCluster) -> None:
    parts = [peers.start_follower("worker", index, lr=0.1) for index in (0, 1)]
    with peers.coordinator(lr=0.1) as coordinator:
        coordinator.wait_for_all()
        for said in (hello(start_info={"lr": 0.1}), hello(start_info={"lr": 0.5}), hello(index=7), hello(role="chief")):
            with connect(peers.coordinator_address, LONG) as unknown:
                identify(unknown, peers.secret, LONG)
                unknown.sendall(said)
                assert is_closed(unknown)
        assert coordinator.failure is None
        coordinator.broadcast("train")
    for part in parts:
        assert [next_command.kind for next_command in part.result()] == ["train", "end"]


def test_a_process_waits_for_the_coordinator_of_an_earlier_start_to_exit(
    peers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "_OTHER_RUN_SECONDS", LONG)
    with peers.coordinator() as earlier:
        peers.secret = b"that of the next start"
        joining = [peers.start_follower("worker", index) for index in (0, 1)]
        wait_until(lambda: bool(earlier._door._reported), "one was not let in")
        earlier.fail(PeerLostError("it is exiting"))
        earlier.__exit__(None, PeerLostError("it is exiting"), None)
    with peers.coordinator() as coordinator:
        coordinator.wait_for_all()
    assert [part.result()[-1].kind for part in joining] == ["end", "end"]


def test_a_cluster_without_a_secret_forms(peers: LocalCluster) -> None:
    peers.secret = b""
    with peers.coordinator(lr=0.1) as coordinator:
        trains_to_the_end(peers, coordinator)
