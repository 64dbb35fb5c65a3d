"""Writing while training continues."""

import threading
import time

import pytest

from modelyard.run.checkpoint import BackgroundWriter
from waiting import PATIENCE


@pytest.fixture
def writer() -> BackgroundWriter:
    return BackgroundWriter()


def test_writes_happen_in_order_on_a_thread_of_their_own(writer: BackgroundWriter) -> None:
    done: list[tuple[int, bool]] = []
    for number in range(20):
        writer.submit(lambda n=number: done.append((n, threading.current_thread() is threading.main_thread())))
    writer.close()
    assert done == [(n, False) for n in range(20)]


def test_training_continues_during_a_write(writer: BackgroundWriter) -> None:
    gate, done = threading.Event(), threading.Event()
    writer.submit(lambda: (gate.wait(PATIENCE), done.set()))
    assert not done.is_set()
    gate.set()
    writer.flush()
    assert done.is_set()
    writer.close()


def test_at_most_one_write_waits(writer: BackgroundWriter) -> None:
    """So that no more than that many copies of the weights are in memory."""
    started, gate, third = threading.Event(), threading.Event(), threading.Event()
    writer.submit(lambda: (started.set(), gate.wait(PATIENCE)))
    started.wait(PATIENCE)
    writer.submit(lambda: None)
    submitting = threading.Thread(target=lambda: (writer.submit(lambda: None), third.set()))
    submitting.start()
    assert not third.wait(0.2)
    gate.set()
    assert third.wait(PATIENCE)
    submitting.join()
    writer.close()


def test_flush_waits_until_everything_is_written(writer: BackgroundWriter) -> None:
    done: list[int] = []
    for number in range(3):
        writer.submit(lambda n=number: (time.sleep(0.02), done.append(n)))
    writer.flush()
    assert done == [0, 1, 2]
    writer.flush()
    writer.close()


def fail() -> None:
    raise OSError("the disk is full")


@pytest.mark.parametrize("later", ["submit", "flush", "close"])
def test_an_error_is_raised_at_the_next_call(writer: BackgroundWriter, later: str) -> None:
    started = threading.Event()
    writer.submit(lambda: (started.set(), fail()))
    started.wait(PATIENCE)
    writer._queue.join()
    with pytest.raises(OSError, match="the disk is full"):
        writer.submit(lambda: None) if later == "submit" else getattr(writer, later)()
    writer.close()


def test_what_waits_behind_a_failed_write_is_not_written(writer: BackgroundWriter) -> None:
    """Pruning that was to follow a checkpoint must not happen when the checkpoint is not there."""
    gate, done = threading.Event(), []
    writer.submit(lambda: (gate.wait(PATIENCE), fail()))
    writer.submit(lambda: done.append("pruned"))
    gate.set()
    with pytest.raises(OSError, match="the disk is full"):
        writer.flush()
    assert done == []
    writer.submit(lambda: done.append("again"))
    writer.close()
    assert done == ["again"]


def test_an_error_is_raised_once(writer: BackgroundWriter) -> None:
    writer.submit(fail)
    with pytest.raises(OSError, match="the disk is full"):
        writer.flush()
    writer.flush()
    writer.close()


def test_a_writer_that_wrote_nothing_has_no_thread(writer: BackgroundWriter) -> None:
    writer.flush()
    writer.close()
    assert writer._thread is None


def test_a_closed_writer_leaves_no_thread_and_may_be_used_again(writer: BackgroundWriter) -> None:
    done: list[int] = []
    for number in range(2):
        writer.submit(lambda n=number: done.append(n))
        writer.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint-writer"]
    assert done == [0, 1]
