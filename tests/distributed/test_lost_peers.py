"""Who is gone, silent or stuck is noticed, and everyone learns of it; who may come back does."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from groups import LONG, InThread, LocalCluster, ScriptedMember, fails_with, nothing_is_left

from conftest import environment
from modelyard.cluster.description import Member
from modelyard.distributed import coordinator as coordinators
from modelyard.distributed.authentication import Door
from modelyard.distributed.connection import Connection
from modelyard.distributed.coordinator import Coordinator
from modelyard.distributed.follower import Follower
from modelyard.errors import ClusterError, DataError, PeerLostError
from modelyard.system.network import listen
from waiting import PATIENCE, wait_until


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from nothing_is_left(monkeypatch)


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who was reported to the launcher, by the name of the log."""
    names: list[str] = []
    for side in ("coordinator", "follower"):
        monkeypatch.setattr(f"modelyard.distributed.{side}.report_silent", names.append)
    return names


@pytest.fixture
def peers() -> LocalCluster:
    return LocalCluster()


def waits_for_loss(coordinator: Coordinator) -> None:
    assert coordinator._failed.wait(LONG)
    coordinator.check()


def meets(peers: LocalCluster, coordinator: Coordinator, index: int = 1) -> ScriptedMember:
    """A scripted as worker ``index``, with all others there already."""
    scripted = peers.scripted("worker", index)
    coordinator.wait_for_all()
    scripted.polling("welcome")
    return scripted


# -- the others learn of it -----------------------------------------------------------------------------------------


def test_a_process_that_hangs_up_is_lost_for_everyone(peers: LocalCluster, silent: list[str]) -> None:
    other = peers.start_follower("worker", 0)  # waits for commands
    with fails_with(PeerLostError) as caught, peers.coordinator() as coordinator:
        meets(peers, coordinator).close()
        waits_for_loss(coordinator)
    who = f"worker 1 ({peers.addresses['worker'][1]})"
    expected = f"{who} closed the connection unexpectedly. Start all processes again to resume the run"
    assert str(caught.value).startswith(expected)
    assert str(other.error()) == str(caught.value)
    assert caught.value.status == other.error().status == 75  # type: ignore[attr-defined]
    assert silent == []


def test_a_process_that_is_silent_is_lost_for_everyone(peers: LocalCluster, silent: list[str]) -> None:
    peers.peer_timeout = 2.0
    other = peers.start_follower("worker", 0)
    with (
        fails_with(PeerLostError, match=r"worker 1 .* has been silent for 2 s") as caught,
        peers.coordinator() as coordinator,
    ):
        scripted = meets(peers, coordinator)
        waits_for_loss(coordinator)
    assert str(other.error()) == str(caught.value)
    assert silent == ["worker-1"]
    scripted.close()


def test_a_process_that_sends_malformed_messages_is_lost_for_everyone(peers: LocalCluster) -> None:
    other = peers.start_follower("worker", 0)
    with (
        fails_with(PeerLostError, match=r"worker 1 .* sent a malformed message"),
        peers.coordinator() as coordinator,
    ):
        scripted = meets(peers, coordinator)
        scripted.socket.sendall(b"\xff" * 12)
        waits_for_loss(coordinator)
    assert "malformed message" in str(other.error())
    scripted.close()


@pytest.mark.parametrize("number", [9, "15", None, 1e400, [15], 10**30])
def test_a_signal_that_is_not_one_is_a_malformed_message(number: object) -> None:
    peers = LocalCluster(worker=1)
    with fails_with(PeerLostError, match="malformed message"), peers.coordinator() as coordinator:
        scripted = meets(peers, coordinator, 0)
        scripted.connection.send("signal", number=number)
        waits_for_loss(coordinator)
    assert coordinator.signal is None
    scripted.close()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (DataError("there is no folder /x"), ClusterError, "worker 0 failed: there is no folder /x"),
        (ValueError("oh"), PeerLostError, "worker 0 failed: ValueError: oh"),
        (KeyboardInterrupt(), PeerLostError, "worker 0 failed: KeyboardInterrupt"),
        (DataError("x" * 5_000_000), ClusterError, "worker 0 failed: xxx"),
    ],
)
def test_what_a_follower_fails_with_is_reported_to_everyone(
    peers: LocalCluster, error: BaseException, kind: type[ClusterError], words: str
) -> None:
    other = peers.start_follower("worker", 1)

    def follow() -> None:
        with peers.follower("worker", 0) as group:
            group.join()
            raise error

    part = InThread(follow)
    with fails_with(ClusterError) as caught, peers.coordinator() as coordinator:
        coordinator.wait_for_all()
        coordinator.wait_until_ready()  # which worker 0 will never say
    assert part.error() is error
    for seen in (caught.value, other.error()):
        assert type(seen) is kind
        assert str(seen).startswith(words)
        assert str(seen).count("failed:") == 1


def test_what_the_coordinator_fails_with_is_reported_to_everyone(peers: LocalCluster) -> None:
    parts = [peers.start_follower("worker", 0), peers.start_follower("worker", 1)]
    with fails_with(DataError), peers.coordinator() as coordinator:
        coordinator.wait_for_all()
        coordinator.on_peer_lost(lambda reason: pytest.fail("nobody is lost"))
        raise DataError("the shard s3://b/7 is damaged")
    for part in parts:
        assert str(part.error()) == "the chief failed: the shard s3://b/7 is damaged"
        assert type(part.error()) is ClusterError


def test_of_several_failures_all_report_the_same_first_one() -> None:
    peers = LocalCluster(worker=4)
    watching = [peers.start_follower("worker", index) for index in (0, 1)]
    with fails_with(ClusterError) as caught, peers.coordinator() as coordinator:
        members = [peers.scripted("worker", index) for index in (2, 3)]
        coordinator.wait_for_all()
        for scripted in members:
            scripted.polling("welcome")
        threads = [
            threading.Thread(target=p.connection.send, args=("failed",), kwargs={"message": "m"}) for p in members
        ]
        for thread in threads:
            thread.start()
        waits_for_loss(coordinator)
    first = str(caught.value)
    assert first in ("worker 2 failed: m", "worker 3 failed: m")
    assert [str(part.error()) for part in watching] == [first, first]
    for scripted in members:
        scripted.close()


def test_a_lost_peer_breaks_off_what_waits_for_it(peers: LocalCluster) -> None:
    reasons: list[str] = []
    part = peers.start_follower("worker", 0)
    with fails_with(PeerLostError), peers.coordinator() as coordinator:
        scripted = meets(peers, coordinator)
        stuck = threading.Event()
        coordinator.on_peer_lost(lambda reason: stuck.wait(LONG) and None)  # one that does not return holds up nobody
        coordinator.on_peer_lost(lambda reason: 1 / 0)
        coordinator.on_peer_lost(reasons.append)
        scripted.close()
        wait_until(lambda: bool(reasons), "the callback is called")
        coordinator.on_peer_lost(reasons.append)  # comes too late, and is called at once
        assert len(reasons) == 2
        assert all("closed the connection unexpectedly" in reason for reason in reasons)
        assert "closed the connection unexpectedly" in str(coordinator.explain(RuntimeError("collective aborted")))
        stuck.set()
        coordinator.broadcast("train")
    assert "closed the connection unexpectedly" in str(part.error())


def test_the_first_failure_of_a_process_stays(peers: LocalCluster) -> None:
    with fails_with(ClusterError, match="the first"), peers.follower("worker") as group:
        group.fail(ClusterError("the first"))
        group.fail(ClusterError("the second"))
        group.check()


def test_the_reason_of_a_closed_connection_is_read_though_sending_failed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine, theirs = Connection(socket.create_connection(server.getsockname())), Connection(server.accept()[0])
    theirs.send("failed", message="no disk space")
    theirs.finish(LONG)
    mine.keep_alive(0.01)
    wait_until(lambda: not mine._sender.is_alive(), "it can't send any more")
    assert mine.receive().fields == {"message": "no disk space"}
    mine.close()


def test_an_error_of_its_own_is_not_explained_by_others(peers: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.distributed.process_group._EXPLAIN_SECONDS", 0.01)
    error = RuntimeError("out of memory")
    assert peers.follower("worker").explain(error) is error


# -- the coordinator is gone ----------------------------------------------------------------------------------------


def welcomed(peers: LocalCluster) -> tuple[Follower, Connection]:
    """A follower, and the other end of its connection: a coordinator that does only what the test says."""
    accepted: queue.Queue[socket.socket] = queue.Queue()
    door = Door(listen(peers.coordinator_address), peers.secret, accepted.put)
    group = peers.follower("worker")
    joining = InThread(group.join)
    connection = Connection(accepted.get(timeout=LONG))
    door.close()
    connection.set_timeout(LONG)
    assert connection.receive().kind == "hello"
    connection.send("welcome", spec={})
    assert joining.result() == {"spec": {}}
    return group, connection


def test_a_coordinator_that_hangs_up_is_lost_while_a_command_is_waited_for(peers: LocalCluster) -> None:
    group, connection = welcomed(peers)
    with fails_with(PeerLostError, match="the chief closed the connection unexpectedly"), group:
        waiting = InThread(group.next_command)
        connection.close()
        assert isinstance(waiting.error(), PeerLostError)
        group.next_command()


def test_a_coordinator_that_is_silent_is_lost_while_a_command_is_waited_for(
    peers: LocalCluster, silent: list[str]
) -> None:
    peers.peer_timeout = 2.0
    group, connection = welcomed(peers)
    with pytest.raises(PeerLostError, match="the chief has been silent for 2 s"), group:
        group.next_command()
    assert silent == ["chief"]
    connection.close()


@pytest.mark.parametrize("said", [b"\xff" * 12, b"\0\0\0\2" + b"\0" * 8 + b"[]", b"\0\0\0\2" + b"\0" * 8 + b"{}"])
def test_a_coordinator_that_sends_malformed_messages_is_lost(peers: LocalCluster, said: bytes) -> None:
    group, connection = welcomed(peers)
    with fails_with(PeerLostError, match="the chief sent a malformed message"), group:
        connection._put(said)
        group.next_command()
    connection.close()


def test_speaking_to_a_coordinator_that_is_gone_is_reported_as_that_and_not_as_a_broken_pipe(
    peers: LocalCluster,
) -> None:
    group, connection = welcomed(peers)
    with fails_with(PeerLostError, match="closed the connection unexpectedly"), group:
        connection.close()
        group.report_ready(data="x" * (1 << 20))
        group.report_signal(15)
        group.next_command()


# -- who is stuck ---------------------------------------------------------------------------------------------------


def test_a_process_that_takes_no_bytes_holds_up_nobody_else_and_is_lost(peers: LocalCluster) -> None:
    peers.peer_timeout = 10.0
    large = b"x" * (64 << 20)
    seen: list[str] = []

    def follow() -> None:
        with peers.follower("worker", 1) as group:
            group.join()
            for next_command in group.commands():
                seen.append(next_command.kind)

    other = InThread(follow)
    with (
        fails_with(PeerLostError, match=r"worker 0 .* has been silent for 10 s"),
        peers.coordinator() as coordinator,
    ):
        scripted = meets(peers, coordinator, 0)
        scripted.connection.keep_alive(0.2)  # it says that it is well
        for kind in ("load", "train"):
            coordinator.broadcast(kind, large)
        wait_until(lambda: "train" in seen, "the other has its commands")
        assert coordinator.failure is None  # so it was not held up until the first was given up
        waits_for_loss(coordinator)
    assert "worker 0 (" in str(other.error())
    scripted.close()


def test_a_payload_may_take_longer_than_the_timeout_as_long_as_it_moves() -> None:
    peers = LocalCluster(worker=1)
    large = bytes(range(256)) * (1 << 17)
    with peers.coordinator() as coordinator:
        scripted = meets(peers, coordinator, 0)
        connection = coordinator._connections[Member("worker", 0)]
        slow = _Slow(connection._socket)
        connection._socket = slow  # type: ignore[assignment]
        coordinator.broadcast("load", large)
        coordinator.broadcast("train", step=1)
        assert scripted.polling("load").payload == large
        assert scripted.polling("train").fields == {"step": 1}
        assert slow.sent > 100
        assert coordinator.failure is None
        scripted.connection.send("bye")
    scripted.close()


class _Slow:
    """A socket on which each 256 KiB take nearly the timeout. That of `sendall` is for the whole."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.sent = connection, 0

    def send(self, data: memoryview) -> int:
        self.sent += 1
        return self._connection.send(data[: 1 << 18])

    def sendall(self, data: memoryview) -> None:
        if self.send(data) < len(data):
            raise TimeoutError

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)


# -- who may come back ----------------------------------------------------------------------------------------------


def test_an_evaluator_may_go_and_come_back() -> None:
    peers = LocalCluster(worker=1, evaluator=1)
    worker = peers.start_follower("worker")
    with peers.coordinator() as coordinator:
        evaluator = peers.scripted("evaluator")
        coordinator.wait_for_all(mark="m")
        for _ in range(2):
            evaluator.close()
            wait_until(lambda: Member("evaluator", 0) not in coordinator._connections, "the coordinator notices")
            evaluator = peers.scripted("evaluator")
            assert evaluator.polling("welcome").fields == {"mark": "m", "spec": coordinator.spec}
        evaluator.connection.send("failed", message="no disk space", final=True)
        wait_until(lambda: Member("evaluator", 0) not in coordinator._connections, "the coordinator notices")
        coordinator.broadcast("train")
    assert [next_command.kind for next_command in worker.result()] == ["train", "end"]
    evaluator.close()


def test_an_evaluator_that_comes_back_otherwise_is_refused_and_the_run_continues() -> None:
    peers = LocalCluster(worker=0, evaluator=1)
    with peers.coordinator(lr=0.1) as coordinator:
        evaluator = peers.scripted("evaluator", lr=0.1)
        coordinator.wait_for_all()
        evaluator.close()
        wait_until(lambda: not coordinator._connections, "the coordinator notices")
        with pytest.raises(ClusterError, match=r"lr: 0\.5, not 0\.1"):
            peers.follower("evaluator", lr=0.5).join()
        assert coordinator.failure is None


def test_a_coordinator_that_is_done_does_not_wait_for_the_evaluator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "_LATE_JOIN_SECONDS", threading.TIMEOUT_MAX)
    peers = LocalCluster(worker=0, evaluator=1)

    def work() -> None:
        with peers.coordinator() as coordinator:
            coordinator.wait_for_all()

    coordinator = InThread(work)
    evaluator = peers.scripted("evaluator")
    coordinator.result()
    assert evaluator.polling("end").fields == {"signal": None}  # said before it hung up
    evaluator.close()


def test_a_worker_of_parameter_servers_may_go_and_come_back() -> None:
    peers = LocalCluster(worker=2, ps=1)
    stays = [peers.start_follower("worker", 0), peers.start_follower("ps")]
    with peers.coordinator() as coordinator:
        worker = meets(peers, coordinator)
        worker.close()
        wait_until(lambda: Member("worker", 1) not in coordinator._connections, "the coordinator notices")
        again = peers.start_follower("worker", 1)
        wait_until(lambda: Member("worker", 1) in coordinator._connections, "it is back")
    for part in (*stays, again):
        assert part.result()[-1].kind == "end"


@pytest.mark.parametrize("how", ["silent", "for good"])
def test_a_worker_of_parameter_servers_that_will_not_come_back_ends_the_run(how: str) -> None:
    peers = LocalCluster(worker=2, ps=1)
    peers.peer_timeout = 2.0
    stays = [peers.start_follower("worker", 0), peers.start_follower("ps")]
    with fails_with(ClusterError) as caught, peers.coordinator() as coordinator:
        worker = meets(peers, coordinator)
        if how == "for good":
            worker.connection.send("failed", message="no such model", final=True)
        waits_for_loss(coordinator)
    assert ("has been silent" if how == "silent" else "worker 1 failed: no such model") in str(caught.value)
    assert [str(part.error()) for part in stays] == [str(caught.value)] * 2
    worker.close()


def test_a_parameter_server_that_is_gone_ends_the_run() -> None:
    peers = LocalCluster(worker=1, ps=1)
    worker = peers.start_follower("worker")
    with (
        fails_with(PeerLostError, match=r"ps 0 .* closed the connection unexpectedly"),
        peers.coordinator() as coordinator,
    ):
        server = peers.scripted("ps")
        coordinator.wait_for_all()
        server.polling("welcome")
        server.close()
        waits_for_loss(coordinator)
    assert isinstance(worker.error(), PeerLostError)


def test_a_synchronous_worker_that_comes_back_waits_for_the_next_start(peers: LocalCluster) -> None:
    other = peers.start_follower("worker", 0)
    with fails_with(PeerLostError), peers.coordinator() as coordinator:
        meets(peers, coordinator).close()
        assert coordinator._failed.wait(LONG)
        again = peers.start_follower("worker", 1)
        coordinator.check()
    assert isinstance(other.error(), PeerLostError)
    other = peers.start_follower("worker", 0)
    with peers.coordinator() as coordinator:
        coordinator.wait_for_all()
    assert [part.result()[-1].kind for part in (again, other)] == ["end", "end"]


# -- who does not leave by itself is ended --------------------------------------------------------------------------

SCRIPT = """
import sys, threading, time
from groups import LocalCluster
from modelyard.cluster.description import ProcessGroup
from modelyard.errors import ClusterError, PeerLostError
ProcessGroup.grace_seconds = 0.3
how, error = sys.argv[1], PeerLostError("gone.") if sys.argv[2] == "75" else ClusterError("not like the chief.")
peers = LocalCluster(worker=0)
with peers.coordinator() as coordinator:
    coordinator.fail(error)
    if how == "hangs":
        threading.Event().wait(600)
if how == "fails within":
    coordinator.fail(error)
time.sleep(0.6)  # more than the grace: whoever has left the group may take its time
print("well", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "given", "status"), [("hangs", "75", 75), ("hangs", "2", 2), ("leaves", "75", 0), ("fails within", "75", 0)]
)
def test_who_hangs_after_a_loss_is_ended_and_who_leaves_is_not(how: str, given: str, status: int) -> None:
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, given],
        capture_output=True, text=True, timeout=PATIENCE, env=environment(**path), check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert ("well" in done.stdout) == (status == 0)
    assert ("did not exit within" in done.stderr) == (status != 0)
