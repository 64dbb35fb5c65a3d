"""One writer on an object store."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from modelyard import storage
from modelyard.errors import RunError, StorageError
from modelyard.run.remote_lock import STALE_SECONDS, RemoteLock, _here, is_alive
from object_store import BUCKET, object_store

pytest.importorskip("fsspec")
URL = "memory://locks/run/.lock"


@pytest.fixture(autouse=True)
def _free() -> None:
    storage.remove(URL)


def lock() -> RemoteLock:
    return RemoteLock(URL, "memory://locks/run")


def held_by(**who: Any) -> dict[str, Any]:
    holder = {"host": "elsewhere", "pid_space": "", "pid": 7, "time": time.time(), "mark": "other", **who}
    storage.write_bytes(URL, json.dumps(holder).encode())
    return holder


def a_dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


def test_the_lock_names_its_holder_and_is_removed_afterwards() -> None:
    mine = lock()
    mine.acquire()
    found = json.loads(storage.read_bytes(URL))
    assert (found["host"], found["pid"]) == (socket.gethostname(), os.getpid())
    assert abs(found["time"] - time.time()) < 60
    mine.release()
    assert not storage.exists(URL)


def test_a_living_holder_on_another_machine_is_an_error_with_a_hint() -> None:
    held_by(time=time.time() - STALE_SECONDS / 2)
    with pytest.raises(RunError, match=rf"in use by process 7 on elsewhere, last seen 1\d\d seconds.* delete {URL}"):
        lock().acquire()
    storage.remove(URL)
    lock().acquire()


def test_a_holder_that_was_not_seen_for_long_is_taken_over() -> None:
    held_by(time=time.time() - STALE_SECONDS - 1)
    lock().acquire()
    assert json.loads(storage.read_bytes(URL))["pid"] == os.getpid()


def test_a_dead_process_of_this_machine_is_taken_over_at_once() -> None:
    held_by(**_here(), pid=a_dead_pid())
    lock().acquire()


def test_an_earlier_process_with_the_same_number_is_taken_over_at_once() -> None:
    held_by(**_here(), pid=os.getpid())
    lock().acquire()
    with pytest.raises(RunError, match="in use by process"):  # this one lives
        lock().acquire()


def test_a_living_process_of_this_machine_is_not() -> None:
    held_by(**_here(), pid=os.getppid())
    with pytest.raises(RunError, match="in use by process"):
        lock().acquire()


def test_a_dead_pid_in_another_container_of_the_same_name_proves_nothing() -> None:
    assert is_alive(held_by(**{**_here(), "pid_space": "pid:[1]"}, pid=a_dead_pid()))


@pytest.mark.parametrize("how", ["taken", "removed"])
def test_a_process_that_lost_its_lock_stops_writing_and_keeps_the_others_lock(how: str) -> None:
    mine = lock()
    mine.acquire()
    if how == "taken":
        held_by()
    else:
        storage.remove(URL)
    before = storage.read_if_there(URL)
    for call in (mine.renew, mine.check):
        with pytest.raises(
            RunError, match="process 7 on elsewhere took it" if how == "taken" else "someone removed it"
        ):
            call()
    mine.release()
    assert storage.read_if_there(URL) == before


def test_renewing_updates_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = lock()
    mine.acquire()
    first = json.loads(storage.read_bytes(URL))["time"]
    monkeypatch.setattr(time, "time", lambda: first + 100)
    mine.renew()
    assert json.loads(storage.read_bytes(URL))["time"] == first + 100
    mine.release()


def test_it_is_renewed_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.run.remote_lock._RENEW_SECONDS", 0.01)
    mine = lock()
    mine.acquire()
    first, deadline = storage.read_bytes(URL), time.monotonic() + 10
    while storage.read_bytes(URL) == first:
        assert time.monotonic() < deadline
    mine.release()
    assert not storage.exists(URL)


def renewing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "run-lock"]


def fail(*_: Any) -> bytes:
    raise StorageError("can't be reached.")


def test_a_lock_that_can_not_be_removed_is_let_go(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = renewing()
    mine = lock()
    mine.acquire()
    (thread,) = (thread for thread in renewing() if thread not in before)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "remove", fail)
        mine.release()
    assert "can't be reached. Others have to wait" in caplog.text
    thread.join(10)
    assert not thread.is_alive()
    lock().acquire()  # the process itself need not wait


@pytest.mark.parametrize("trouble", ["read_if_there", "write_new"])
def test_a_lock_that_was_not_read_back_is_not_kept(monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    threads, real, calls = renewing(), getattr(storage, trouble), iter(range(100))

    def fails_once(*arguments: Any) -> Any:
        """When the lock is read back, or after it was written: the answer got lost."""
        number, found = next(calls), real(*arguments)
        return fail() if number == (1 if trouble == "read_if_there" else 0) else found

    with monkeypatch.context() as patch:
        patch.setattr(storage, trouble, fails_once)
        with pytest.raises(StorageError, match="can't be reached"):
            lock().acquire()
    assert not storage.exists(URL)
    assert renewing() == threads
    lock().acquire()


def test_a_process_that_looked_before_the_other_wrote_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, real, looks = lock(), storage.read_if_there, iter(range(100))
    mine.acquire()
    before = storage.read_bytes(URL)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "read_if_there", lambda url: real(url) if next(looks) else None)
        with pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
            lock().acquire()
    assert storage.read_bytes(URL) == before
    mine.renew()
    mine.release()


def test_a_process_that_saw_the_dead_holder_late_does_not_remove_the_new_ones_lock() -> None:
    """It decides on what it read before another took over."""
    dead, late, mine = held_by(**_here(), pid=a_dead_pid()), lock(), lock()
    mine.acquire()
    before = storage.read_bytes(URL)
    late._remove_dead(dead)
    assert storage.read_bytes(URL) == before
    mine.release()


def test_a_process_that_died_while_it_took_over_does_not_block_the_next() -> None:
    dead = held_by(**_here(), pid=a_dead_pid())
    storage.write_bytes(f"{URL}-{dead['mark']}", json.dumps({**dead, "mark": "claim"}).encode())
    mine = lock()
    mine.acquire()
    mine.release()
    assert storage.names_below(URL.rpartition("/")[0]) == []


@pytest.mark.parametrize("there", ["nobody", "a dead process"])
def test_of_processes_that_start_at_the_same_moment_one_wins(there: str) -> None:
    with object_store():
        url, together = f"s3://{BUCKET}/run/.lock", threading.Barrier(8)
        if there == "a dead process":
            holder = {**_here(), "pid": a_dead_pid(), "time": time.time(), "mark": "other"}
            storage.write_bytes(url, json.dumps(holder).encode())
        winners, refused = [], []

        def start() -> None:
            mine = RemoteLock(url, f"s3://{BUCKET}/run")
            together.wait(30)
            try:
                mine.acquire()
                winners.append(mine)
            except RunError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert (len(winners), len(refused)) == (1, 7)
        assert all("is in use by process" in message for message in refused)
        winners[0].release()
        assert storage.names_below(f"s3://{BUCKET}/run") == []


def test_an_object_that_is_no_lock_is_named() -> None:
    storage.write_bytes(URL, b"{}")
    with pytest.raises(RunError, match=f"{URL} is not a lock of Modelyard"):
        lock().acquire()
