"""How the processes of a run meet, what is refused, and how commands reach them."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from groups import LONG, InThread, LocalCluster, fails_with, nothing_is_left

from modelyard.cluster.description import Member, ProcessGroup
from modelyard.distributed import coordinator as coordinators
from modelyard.distributed.connection import Connection
from modelyard.errors import ClusterError, DataError, Interrupted, PeerLostError
from modelyard.system import network
from modelyard.system.network import check_free, listen
from waiting import wait_until


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from nothing_is_left(monkeypatch)


@pytest.fixture
def peers() -> LocalCluster:
    return LocalCluster()


# -- meeting --------------------------------------------------------------------------------------------------------


def test_all_join_and_receive_the_same_facts() -> None:
    peers = LocalCluster(worker=2, evaluator=1)
    received: list[dict[str, object]] = []

    def follow(role: str, index: int) -> list[str]:
        with peers.follower(role, index, lr=0.1) as group:
            facts = group.join()
            assert facts is not None
            received.append(facts)
            group.report_ready(found=index)
            return [next_command.kind for next_command in group.commands()]

    parts = [InThread(lambda who=who: follow(*who)) for who in (("worker", 0), ("worker", 1), ("evaluator", 0))]
    with peers.coordinator(lr=0.1) as coordinator:
        coordinator.wait_for_all(mark="m", threads=3)
        report_ready = coordinator.wait_until_ready()
        coordinator.broadcast("train", step=0)
    assert [part.result() for part in parts] == [["train", "end"], ["train", "end"], ["end"]]
    assert {member.index: facts["found"] for member, facts in report_ready.items() if member.role == "worker"} == {
        0: 0,
        1: 1,
    }
    assert all((facts["mark"], facts["threads"], facts["spec"]) == ("m", 3, coordinator.spec) for facts in received)
    own, *others = coordinator.spec["worker"]
    assert others == list(peers.addresses["worker"])
    assert own.startswith("127.0.0.1:")
    assert own != peers.coordinator_address
    assert coordinator.failure is None


def test_worker_0_coordinates_where_there_is_no_chief() -> None:
    peers = LocalCluster(chief=0, worker=2)
    part = peers.start_follower("worker", 1)
    with peers.coordinator() as coordinator:
        coordinator.wait_for_all()
        assert (coordinator.rank, coordinator.size) == (0, 2)
        assert coordinator.spec["worker"][1:] == [peers.addresses["worker"][1]]
    assert [next_command.kind for next_command in part.result()] == ["end"]


def test_servers_of_parameter_servers_keep_their_roles() -> None:
    peers = LocalCluster(worker=1, ps=1)
    parts = [peers.start_follower("worker"), peers.start_follower("ps")]
    with peers.coordinator() as coordinator:
        coordinator.wait_for_all()
        coordinator.broadcast("train")  # to nobody: they are the coordinator's
    assert [[next_command.kind for next_command in part.result()] for part in parts] == [["end"], ["end"]]
    assert set(coordinator.spec) == {"chief", "worker", "ps"}


def test_groups_form_over_ipv6() -> None:
    try:
        peers = LocalCluster("::1", worker=1)
    except OSError:
        pytest.skip("no IPv6 here")
    part = peers.start_follower("worker")
    with peers.coordinator() as coordinator:
        coordinator.wait_for_all()
        assert coordinator.spec["worker"][0].startswith("[::1]:")
    assert [next_command.kind for next_command in part.result()] == ["end"]


def test_start_info_arrives_as_it_was_though_json_has_no_tuples() -> None:
    peers = LocalCluster(worker=1)
    part = peers.start_follower("worker", sizes=(1, 2), rate=0.1)
    with peers.coordinator(sizes=(1, 2), rate=0.1) as coordinator:
        coordinator.wait_for_all()
    part.result()


def test_who_waits_for_others_for_long_is_not_taken_for_lost(peers: LocalCluster) -> None:
    peers.peer_timeout = 1.0
    first = peers.start_follower("worker", 0)
    with peers.coordinator() as coordinator:
        wait_until(lambda: Member("worker", 0) in coordinator._connections, "worker 0 is there")
        assert not coordinator._failed.wait(1.8)
        second = peers.start_follower("worker", 1)
        coordinator.wait_for_all()
    assert [part.result()[-1].kind for part in (first, second)] == ["end", "end"]


def test_who_does_not_come_is_named_with_its_address(peers: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "_LATE_JOIN_SECONDS", 0.1)
    peers.start_timeout = 0.5
    part = peers.start_follower("worker", 0)
    with pytest.raises(PeerLostError) as caught, peers.coordinator() as coordinator:
        coordinator.wait_for_all()
    message = str(caught.value)
    assert message.startswith(f"worker 1 ({peers.addresses['worker'][1]}) did not join within 0.5 s.")
    assert peers.coordinator_address in message
    assert "start_timeout_secs" in message
    assert "worker 1 (" in str(part.error())
    assert part.error().status == 75  # type: ignore[attr-defined]  # it may come the next time


def test_a_coordinator_that_is_not_there_is_named_with_its_address(peers: LocalCluster) -> None:
    peers.start_timeout = 0.5
    with pytest.raises(
        ClusterError, match=rf"the chief at {peers.coordinator_address} could not be joined within 0.5 s.*refused"
    ):
        peers.follower("worker").join()


def test_another_program_at_the_coordinators_address_is_recognized(peers: LocalCluster) -> None:
    peers.start_timeout = 1.0
    with listen(peers.coordinator_address) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.recv(4096)

        part = InThread(serve)
        with pytest.raises(ClusterError, match="another program answers there"):
            peers.follower("worker").join()
        server.shutdown(socket.SHUT_RDWR)
    part.result()


def test_a_coordinator_that_hangs_up_is_reported_as_that(peers: LocalCluster) -> None:
    peers.start_timeout = 0.5
    with listen(peers.coordinator_address) as server:

        def serve() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        part = InThread(serve)
        with pytest.raises(ClusterError, match=r"no process answers there \((the connection was closed|.*reset.*)\)"):
            peers.follower("worker").join()
        server.shutdown(socket.SHUT_RDWR)
    part.result()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        for use in (check_free, listen):
            with pytest.raises(ClusterError, match=rf"port \d+ of this process's address {address} is in use"):
                use(address)


def test_a_port_that_is_left_in_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_OWN_PORT_SECONDS", LONG)
    asked = iter([True, True])
    monkeypatch.setattr(network, "_answers", lambda address: next(asked, False))
    listen(f"127.0.0.1:{network.free_port('127.0.0.1')}").close()
    assert next(asked, None) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may")
def test_a_port_that_is_not_allowed_is_reported_as_that() -> None:
    with pytest.raises(ClusterError, match="can't listen at its address"):
        listen("127.0.0.1:1")


def test_the_port_of_a_coordinator_is_free_when_it_is_over(
    peers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_OWN_PORT_SECONDS", 0.0)
    for _ in range(3):
        parts = [peers.start_follower("worker", 0), peers.start_follower("worker", 1)]
        with peers.coordinator() as coordinator:
            coordinator.wait_for_all()
        for part in parts:
            part.result()
        listen(peers.coordinator_address).close()


def test_an_evaluator_need_not_join_what_is_over() -> None:
    peers = LocalCluster(worker=0, evaluator=1)
    asked = iter([False, True])
    assert peers.follower("evaluator").join(unless=lambda: next(asked)) is None
    assert list(asked) == []


def test_a_coordinator_does_not_wait_for_optional_processes() -> None:
    peers = LocalCluster(worker=1, evaluator=1)
    worker = peers.start_follower("worker")
    with peers.coordinator() as coordinator:
        coordinator.wait_for_all(("evaluator",), mark="m")
        late = peers.scripted("evaluator")
        assert late.polling("welcome").fields["mark"] == "m"
        late.close()
    assert [next_command.kind for next_command in worker.result()] == ["end"]


# -- who is not let in ----------------------------------------------------------------------------------------------


def test_a_difference_is_reported_on_every_process(peers: LocalCluster) -> None:
    waiting = peers.start_follower("worker", 0, lr=0.1)
    with fails_with(ClusterError) as caught, peers.coordinator(lr=0.1) as coordinator:
        wait_until(lambda: bool(coordinator._connections), "worker 0 is there")
        different = peers.start_follower("worker", 1, lr=0.5)
        coordinator.wait_for_all()
    errors = [caught.value, waiting.error(), different.error()]
    expected = "worker 1 was not started like the chief:\n  lr: 0.5, not 0.1"
    assert [str(error) for error in errors] == [expected] * 3
    assert [getattr(error, "status", None) for error in errors] == [2, 2, 2]


def test_a_coordinator_exits_when_all_are_informed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "_LATE_JOIN_SECONDS", threading.TIMEOUT_MAX)
    peers = LocalCluster(worker=1, evaluator=1)
    waiting = peers.start_follower("evaluator", lr=0.1)

    def work() -> None:
        with peers.coordinator(lr=0.1) as coordinator:
            wait_until(lambda: bool(coordinator._connections), "the evaluator is there")
            different = peers.start_follower("worker", lr=0.5)
            different.error()
            waiting.error()
            wait_until(lambda: not coordinator._connections, "both are gone")
            coordinator.wait_for_all()

    assert isinstance(InThread(work).error(), ClusterError)


def test_a_difference_is_reported_at_once_though_the_coordinator_is_busy(peers: LocalCluster) -> None:
    with peers.coordinator(lr=0.1) as coordinator:
        waiting, different = (
            peers.start_follower("worker", 0, lr=0.1),
            peers.start_follower("worker", 1, lr=0.5),
        )
        for part in (waiting, different):  # and this thread, the coordinator's, has done nothing yet
            assert "lr: 0.5, not 0.1" in str(part.error())
        with pytest.raises(ClusterError, match=r"lr: 0\.5"):
            coordinator.check()


def test_a_process_that_is_not_in_the_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "_LATE_JOIN_SECONDS", 0.1)
    peers = LocalCluster(worker=1)
    what = "the chief has 1 chief, 1 worker, and the evaluator is not in it"
    with fails_with(ClusterError, match=what), peers.coordinator() as coordinator:
        part = peers.start_follower("evaluator")
        coordinator.wait_for_all()
    assert "Without an evaluator in it, the chief evaluates itself" in str(part.error())


def test_a_second_process_of_the_same_name_waits(peers: LocalCluster) -> None:
    first = peers.start_follower("worker", 0)
    with peers.coordinator() as coordinator:
        wait_until(lambda: bool(coordinator._connections), "worker 0 is there")
        peers.start_timeout = 0.5
        with pytest.raises(ClusterError, match="there is a worker 0 already"):
            peers.follower("worker", 0).join()
        assert coordinator.failure is None
        second = peers.start_follower("worker", 1)
        coordinator.wait_for_all()
        with pytest.raises(ClusterError, match="there is a worker 0 already"):
            peers.follower("worker", 0).join()
    assert [part.result()[-1].kind for part in (first, second)] == ["end", "end"]


def test_a_coordinator_that_fails_before_anyone_came_reports_it_to_late_processes(peers: LocalCluster) -> None:
    def coordinator() -> None:
        with peers.coordinator():
            raise DataError("there is no folder /x")

    part = InThread(coordinator)
    for index in (0, 1):
        error = peers.start_follower("worker", index).error()
        assert str(error) == "the chief failed: there is no folder /x"
        assert type(error) is ClusterError
    assert isinstance(part.error(), DataError)  # as soon as all are informed, not later


def test_a_coordinator_that_fails_exits_after_its_report_is_sent(
    peers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is sent by a thread that ends with the process. A process that missed it would wait for minutes."""
    finish, sent = Connection.finish, []

    def slow(connection: Connection, seconds: float) -> None:
        time.sleep(0.2)
        finish(connection, seconds)
        sent.append(connection)

    monkeypatch.setattr(Connection, "finish", slow)
    late = [peers.start_follower("worker", index) for index in (0, 1)]
    with pytest.raises(DataError), peers.coordinator():
        raise DataError("there is no folder /x")
    assert len([connection for connection in sent if not connection._sender.is_alive()]) >= 2
    assert {str(each.error()) for each in late} == {"the chief failed: there is no folder /x"}


def test_a_coordinator_that_fails_does_not_wait_for_ever_for_those_who_do_not_come(
    peers: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinators, "_LATE_JOIN_SECONDS", 0.1)
    with pytest.raises(DataError), peers.coordinator():
        raise DataError("there is no folder /x")


def test_a_coordinator_that_crashes_leaves_the_others_to_its_next_start(peers: LocalCluster) -> None:
    waiting = peers.start_follower("worker", 0)
    with fails_with(ValueError, match="oh"), peers.coordinator() as coordinator:
        wait_until(lambda: bool(coordinator._connections), "worker 0 is there")
        raise ValueError("oh")
    assert str(waiting.error()) == "the chief failed: ValueError: oh"
    assert isinstance(waiting.error(), PeerLostError)
    late = [peers.start_follower("worker", 0), peers.start_follower("worker", 1)]
    with peers.coordinator() as coordinator:
        coordinator.wait_for_all()
    assert [part.result()[-1].kind for part in late] == ["end", "end"]


# -- orders ---------------------------------------------------------------------------------------------------------


def test_commands_come_in_order_with_large_payloads_between(peers: LocalCluster) -> None:
    parts = [peers.start_follower("worker", 0), peers.start_follower("worker", 1)]
    large = os.urandom(1 << 20) * 20
    with peers.coordinator() as coordinator:
        coordinator.wait_for_all()
        for step in range(50):
            coordinator.broadcast("train", step=step)
        coordinator.broadcast("load", large)
        coordinator.broadcast("load", b"")
        for step in range(50, 100):
            coordinator.broadcast("train", step=step)
    for part in parts:
        commands = part.result()
        assert [next_command.fields["step"] for next_command in commands if next_command.kind == "train"] == list(
            range(100)
        )
        assert [next_command.kind for next_command in commands[50:52]] == ["load", "load"]
        assert commands[50].payload == large
        assert commands[51].payload == b""
        assert commands[-1].kind == "end"


def test_a_follower_can_wait_for_a_command_for_a_while(peers: LocalCluster) -> None:
    part = peers.start_follower("worker", 1)
    with peers.coordinator() as coordinator, peers.follower("worker", 0) as group:
        joining = InThread(group.join)
        coordinator.wait_for_all()
        joining.result()
        assert group.command_within(0.01) is None
        coordinator.broadcast("train")
        next_command = group.command_within(LONG)
        assert next_command is not None
        assert next_command.kind == "train"
        group.__exit__(None, None, None)  # "bye", so that the coordinator need not wait
    part.result()


def test_a_signal_reaches_the_coordinator_and_ends_all_with_it(peers: LocalCluster) -> None:
    def follow() -> object:
        with peers.follower("worker", 0) as group:
            group.join()
            group.report_signal(signal.SIGTERM)
            *_, last = group.commands()
            return last.fields["signal"]

    parts = [InThread(follow), InThread(lambda: peers.start_follower("worker", 1).result()[-1].fields["signal"])]
    with fails_with(Interrupted), peers.coordinator() as coordinator:
        coordinator.wait_for_all()
        wait_until(lambda: coordinator.signal is not None, "the coordinator hears of the signal")
        assert coordinator.signal == signal.SIGTERM
        raise Interrupted(coordinator.signal, 5, "run")
    assert [part.result() for part in parts] == [signal.SIGTERM, signal.SIGTERM]


def test_a_follower_that_leaves_by_a_signal_is_not_lost(peers: LocalCluster) -> None:
    other = peers.start_follower("worker", 1)

    def follow() -> None:
        with peers.follower("worker", 0) as group:
            group.join()
            *_, last = group.commands()
            raise Interrupted(last.fields["signal"], 5, "run")

    part = InThread(follow)
    with fails_with(Interrupted), peers.coordinator() as coordinator:
        coordinator.wait_for_all()
        raise Interrupted(signal.SIGINT, 5, "run")
    assert isinstance(part.error(), Interrupted)
    other.result()
    assert coordinator.failure is None


def test_a_command_after_the_end_is_an_error_that_says_so(peers: LocalCluster) -> None:
    def follow() -> None:
        with peers.follower("worker", 0) as group:
            group.join()
            assert [next_command.kind for next_command in group.commands()] == ["end"]
            group.next_command()

    part, other = InThread(follow), peers.start_follower("worker", 1)
    with peers.coordinator() as coordinator:
        coordinator.wait_for_all()
    assert "has ended the run already" in str(part.error())
    other.result()


def test_alone_there_is_nobody_to_lose() -> None:
    group, error = ProcessGroup(), ValueError()
    assert group.explain(error) is error
    assert (group.rank, group.size, group.signal, group.failure, group.lost) == (0, 1, None, None, False)
