"""One writer on an object store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from conftest import environment
from google_store import google_store
from modelyard import storage
from modelyard.errors import RunError, StorageError
from modelyard.run.remote_lock import STALE_SECONDS, RemoteLock, _here, is_alive
from object_store import BUCKET, object_store
from waiting import PATIENCE, wait_until

pytest.importorskip("fsspec")
URL = "memory://locks/run/.lock"


@pytest.fixture(autouse=True)
def _free() -> None:
    storage.remove(URL)


def lock() -> RemoteLock:
    return RemoteLock(URL, "memory://locks/run")


def held_by(**who: Any) -> dict[str, Any]:
    holder = {**held(), **who}
    storage.write_bytes(URL, json.dumps(holder).encode())
    return holder


def held() -> dict[str, Any]:
    return {"host": "elsewhere", "pid_space": "", "pid": 7, "time": time.time(), "mark": "other"}


def a_dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=PATIENCE)
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
    message = rf"in use by process 7 on elsewhere, last seen 1\d\d seconds.* delete {URL}"
    with pytest.raises(RunError, match=message) as refused:
        lock().acquire()
    assert refused.value.exit_status == 75  # it may be dead, as a killed container is: submitted jobs try again
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
    for call in (mine.renew, mine.confirm):
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
    first = storage.read_bytes(URL)
    wait_until(lambda: storage.read_bytes(URL) != first, "a renewal")
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
        patch.setattr(storage, "remove_version", fail)
        mine.release()
    assert "can't be reached. Others have to wait" in caplog.text
    thread.join(PATIENCE)
    assert not thread.is_alive()
    lock().acquire()  # the process itself need not wait


@pytest.mark.parametrize("lost", ["the answer", "the answer of a try before"])
def test_a_lock_whose_answer_was_lost_is_not_kept_by_nobody(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The library may repeat a request that the store has carried out already: the store refuses it then."""
    threads, real, calls = renewing(), storage.replace_version, iter(range(100))

    def loses(*arguments: Any) -> bool:
        done = real(*arguments)
        if next(calls):
            return done
        return fail() if lost == "the answer" else False  # type: ignore[return-value]

    mine = lock()
    with monkeypatch.context() as patch:
        patch.setattr(storage, "replace_version", loses)
        if lost == "the answer":
            with pytest.raises(StorageError, match="can't be reached"):
                mine.acquire()
            assert not storage.exists(URL)
            assert renewing() == threads
            mine = lock()
        mine.acquire()
    mine.renew()
    mine.release()
    assert not storage.exists(URL)


# -- against real servers ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest) -> Iterator[str]:
    """A bucket of moto's S3, or of the Google server of the tests."""
    with object_store() if request.param == "s3" else google_store():
        yield f"{request.param}://{BUCKET}"


def start_together(url: str, count: int = 2) -> tuple[list[RemoteLock], list[str]]:
    """So many processes start at the same moment, here as threads; those that run, and why the others do not."""
    together, winners, refused = threading.Barrier(count), list[RemoteLock](), list[str]()

    def start() -> None:
        mine = RemoteLock(url, url)
        together.wait(PATIENCE)
        try:
            mine.acquire()
            winners.append(mine)
        except RunError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return winners, refused


@pytest.mark.parametrize("there", ["nobody", "a dead process"])
def test_of_two_that_start_at_the_same_moment_one_runs_and_one_is_refused_50_times(bucket: str, there: str) -> None:
    dead = {**_here(), "pid": a_dead_pid(), "time": time.time(), "mark": "other"}
    for number in range(50):
        url = f"{bucket}/run-{number}/.lock"
        if there == "a dead process":
            storage.write_bytes(url, json.dumps(dead).encode())
        winners, refused = start_together(url)
        assert (len(winners), len(refused)) == (1, 1)
        assert "is in use by process" in refused[0]
        winners[0].renew()
        winners[0].release()
        assert storage.names_below(f"{bucket}/run-{number}") == []


def test_of_many_that_start_at_the_same_moment_one_runs(bucket: str) -> None:
    winners, refused = start_together(f"{bucket}/run/.lock", 8)
    assert (len(winners), len(refused)) == (1, 7)
    winners[0].release()


@pytest.mark.parametrize("action", ["renew", "release"])
def test_a_holder_that_sleeps_after_its_check_neither_overwrites_nor_removes_the_lock_of_the_next(
    bucket: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped between the look at its lock and the request; meanwhile the lock was taken over."""
    url = f"{bucket}/run/.lock"
    sleeper = RemoteLock(url, url)
    sleeper.acquire()
    real, taken = storage.read_version, list[bytes]()

    def sleep_after(asked: str) -> Any:
        found = real(asked)
        if not taken:
            storage.write_bytes(asked, json.dumps({**held(), "mark": "next"}).encode())
            taken.append(storage.read_bytes(asked))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(storage, "read_version", sleep_after)
        with pytest.raises(RunError, match="process 7 on elsewhere took it"):
            getattr(sleeper, action)()
    assert storage.read_bytes(url) == taken[0]
    with pytest.raises(RunError, match="lost its lock"):
        sleeper.confirm()


def test_a_stopped_holder_that_wakes_up_after_a_take_over_leaves_the_lock_alone(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is really stopped, and woken."""
    url = f"{bucket}/run/.lock"
    code = (
        "import sys; from modelyard.run import remote_lock\n"
        "remote_lock._RENEW_SECONDS = 0.01\n"
        f"lock = remote_lock.RemoteLock({url!r}, 'run'); lock.acquire(); print('held', flush=True)\n"
        "for action in (lock.confirm, lock.renew, lock.release):\n"
        "    sys.stdin.readline()\n"
        "    try: action(); print('done', flush=True)\n"
        "    except Exception as error: print(type(error).__name__, flush=True)\n"
    )
    sleeper = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert sleeper.stdin is not None
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == "held\n"
        sleeper.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED, what="the stop")
        mine = RemoteLock(url, url)
        with monkeypatch.context() as patch:
            patch.setattr("modelyard.run.remote_lock.STALE_SECONDS", -1)
            mine.acquire()
        before = storage.read_bytes(url)
        time.sleep(0.05)  # it slept for longer than _RENEW_SECONDS: whoever takes a lock over waits for much longer
        sleeper.send_signal(signal.SIGCONT)
        said = []
        for _ in range(3):
            sleeper.stdin.write("\n")
            sleeper.stdin.flush()
            said.append(sleeper.stdout.readline().strip())
        assert said == ["RunError", "RunError", "done"]  # there is nothing to release
        assert storage.read_bytes(url) == before
        mine.release()
    finally:
        sleeper.kill()
        sleeper.communicate()


@pytest.mark.parametrize("answers", [True, False], ids=["refuses conditions", "ignores conditions"])
def test_stores_without_conditional_writes_still_have_one_writer_at_a_time(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can't settle a race, but whoever looks sees who has the lock."""
    with object_store():
        from moto.s3.responses import S3Response

        for name in ("put_object", "delete_object"):
            monkeypatch.setattr(S3Response, name, _without_conditions(getattr(S3Response, name), answers))
        url = f"s3://{BUCKET}/run/.lock"
        mine = RemoteLock(url, url)
        mine.acquire()
        with pytest.raises(RunError, match="is in use by process"):
            RemoteLock(url, url).acquire()
        mine.renew()
        storage.write_bytes(url, json.dumps(held()).encode())
        for action in (mine.renew, mine.confirm):
            with pytest.raises(RunError, match="took it"):
                action()
        mine.release()
        assert json.loads(storage.read_bytes(url))["pid"] == 7


def _without_conditions(change: Any, answers: bool) -> Any:
    def call(self: Any) -> Any:
        names = [name for name in ("If-Match", "If-None-Match") if name in self.headers]
        if names and answers:
            return 501, {}, "<Error><Code>NotImplemented</Code><Message>A header is not implemented</Message></Error>"
        kept = {name: value for name, value in self.headers.items() if name not in names}
        self.headers = type(self.headers)(kept)
        return change(self)

    return call


def test_an_object_that_is_no_lock_is_named() -> None:
    storage.write_bytes(URL, b"{}")
    with pytest.raises(RunError, match=f"{URL} is not a lock of Modelyard"):
        lock().acquire()
