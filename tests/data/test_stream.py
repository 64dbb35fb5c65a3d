"""Batches read ahead: in order, whole, in fixed memory, and no thread is left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.data.dataset import Arrays, Feature
from modelyard.data.stream import PIECE, Stream, slots_for
from waiting import PATIENCE, wait_until

FEATURES = {"image": Feature((2, 3), "uint8"), "number": Feature((), "int64")}


def within_limit(work: Callable[[], None]) -> None:
    """Runs ``work`` in a thread; it must end, and without an error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


class Source:
    """Examples that tell their batch and place, and what was asked for."""

    def __init__(self, batch_size: int, slow: float = 0.0) -> None:
        self.batch_size, self.slow = batch_size, slow
        self.asked: list[tuple[int, int, int]] = []
        self.bad: dict[int, BaseException] = {}

    def read(self, batch: int, start: int, stop: int, out: Arrays) -> None:
        self.asked.append((batch, start, stop))
        if self.slow:
            time.sleep(self.slow * ((batch + start) % 3))
        if batch in self.bad and start == 0:
            raise self.bad[batch]
        numbers = np.arange(start, stop) + batch * self.batch_size
        out["number"][...] = numbers
        out["image"][...] = (numbers % 251)[:, None, None]

    def check(self, arrays: Arrays, first: int, count: int) -> None:
        numbers = np.arange(first * self.batch_size, (first + count) * self.batch_size)
        assert np.array_equal(arrays["number"], numbers)
        assert np.array_equal(arrays["image"], np.broadcast_to((numbers % 251)[:, None, None], (len(numbers), 2, 3)))


@contextlib.contextmanager
def opened(source: Source, slots: int = 4, threads: int = 3) -> Iterator[Stream]:
    stream = Stream(source.read, FEATURES, source.batch_size, slots=slots, threads=threads)
    try:
        yield stream
    finally:
        stream.close()


def go_through(stream: Stream, source: Source, first: int, stop: int, most: int) -> list[int]:
    """Takes the batches one after the other; gives back how many came at a time."""
    counts = []
    while first < stop:
        with stream.batches(first, min(most, stop - first)) as (arrays, count):
            source.check(arrays, first, count)
        counts.append(count)
        first += count
    assert first == stop
    return counts


@settings(max_examples=60, deadline=None)
@given(
    batch_size=st.integers(1, 11),
    slots=st.integers(1, 7),
    threads=st.integers(1, 6),
    most=st.integers(1, 9),
    first=st.integers(0, 40),
    length=st.integers(1, 25),
)
def test_every_batch_comes_once_in_order_and_whole(
    batch_size: int, slots: int, threads: int, most: int, first: int, length: int
) -> None:
    source = Source(batch_size)

    def work() -> None:
        with opened(source, slots, threads) as stream:
            counts = go_through(stream, source, first, first + length, most)
            # Half of the slots stay for reading ahead.
            assert all(1 <= count <= min(most, max(slots // 2, 1)) for count in counts)

    within_limit(work)
    asked = [ask for ask in source.asked if ask[0] < first + length]
    assert len(asked) == len(set(asked)) == length * -(-batch_size // PIECE)
    assert max(batch for batch, _, _ in source.asked) < first + length + slots


@settings(max_examples=30, deadline=None)
@given(jumps=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=8))
def test_jumps_in_either_direction_give_the_right_batches(jumps: list[tuple[int, int, int]]) -> None:
    source = Source(5, slow=0.0005)

    def work() -> None:
        with opened(source) as stream:
            for first, length, most in jumps:
                go_through(stream, source, first, first + length, most)

    within_limit(work)


def test_the_same_batch_again_is_the_same() -> None:
    source = Source(6)

    def work() -> None:
        with opened(source) as stream:
            for _ in range(5):
                go_through(stream, source, 7, 8, 1)

    within_limit(work)


def test_how_many_batches_come_at_a_time_does_not_hang_on_the_clock() -> None:
    def counts(slow: float) -> list[int]:
        source = Source(4, slow)
        with opened(source, slots=6, threads=4) as stream:
            return go_through(stream, source, 3, 40, 8)

    assert counts(0) == counts(0.001)


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 8])
def test_an_error_is_raised_at_its_batch_and_not_before(most: int) -> None:
    source = Source(6)
    bad = source.bad[5] = OSError("the disk is gone")

    def work() -> None:
        with opened(source, slots=8) as stream:
            with stream.batches(0, 1) as (arrays, count):
                wait_until(lambda: any(batch == 7 for batch, _, _ in source.asked))  # read ahead: it failed already
                source.check(arrays, 0, count)
            go_through(stream, source, 1, 5, most)
            with pytest.raises(OSError, match="the disk is gone") as raised, stream.batches(5, most):
                raise AssertionError("batch 5 came")
            assert raised.value is bad

    within_limit(work)


def test_after_an_error_other_batches_are_read_and_the_same_when_it_is_mended() -> None:
    source = Source(6)
    source.bad[2] = ValueError("broken")

    def work() -> None:
        with opened(source) as stream:
            for _ in range(3):
                with pytest.raises(ValueError, match="broken"), stream.batches(2, 1):
                    pass
            go_through(stream, source, 3, 9, 3)
            source.bad.clear()
            go_through(stream, source, 0, 9, 2)

    within_limit(work)


def test_an_error_ahead_is_forgotten_by_a_jump() -> None:
    source = Source(6)
    source.bad[1] = ValueError("broken")

    def work() -> None:
        with opened(source) as stream:
            with stream.batches(0, 1):
                wait_until(lambda: any(batch == 3 for batch, _, _ in source.asked))
            go_through(stream, source, 50, 60, 2)

    within_limit(work)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_errors_of_every_class_come_through(error: BaseException) -> None:
    source = Source(6)
    source.bad[0] = error

    def work() -> None:
        with opened(source) as stream, pytest.raises(type(error)), stream.batches(0, 1):
            pass

    within_limit(work)


def test_an_error_of_the_consumer_comes_through_and_the_stream_goes_on() -> None:
    source = Source(6)

    def work() -> None:
        with opened(source) as stream:
            go_through(stream, source, 0, 3, 1)
            with pytest.raises(ZeroDivisionError), stream.batches(3, 1):
                raise ZeroDivisionError
            go_through(stream, source, 3, 9, 2)
            with pytest.raises(ZeroDivisionError), stream.batches(9, 1):
                raise ZeroDivisionError
            go_through(stream, source, 10, 15, 2)

    within_limit(work)


# -- memory and threads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 3, 6])
def test_a_batch_in_use_is_not_overwritten_however_slow_its_user_is(slots: int) -> None:
    source = Source(7)

    def work() -> None:
        with opened(source, slots, threads=6) as stream:
            first = 0
            while first < 12:
                with stream.batches(first, 3) as (arrays, count):
                    source.check(arrays, first, count)
                    before = -1
                    while before != len(source.asked):  # until the threads have filled all slots there are
                        before = len(source.asked)
                        time.sleep(0.01)
                    source.check(arrays, first, count)
                    assert max(batch for batch, _, _ in source.asked) < first + slots
                first += count

    within_limit(work)


def test_memory_is_that_of_the_places() -> None:
    source = Source(5)
    with opened(source, slots=3) as stream:
        bases = set()
        first = 0
        while first < 20:
            with stream.batches(first, 2) as (arrays, count):
                base = arrays["number"].base
                assert base is not None
                bases.add(id(base))
                assert base.shape == (15,)
            first += count
    assert len(bases) == 1


def test_close_ends_all_threads_even_while_they_read() -> None:
    before = set(threading.enumerate())
    source = Source(8, slow=0.002)
    stream = Stream(source.read, FEATURES, 8, slots=5, threads=6)
    with stream.batches(0, 1):
        assert len(set(threading.enumerate()) - before) == 6
    within_limit(stream.close)
    assert set(threading.enumerate()) - before == set()
    within_limit(stream.close)
    with pytest.raises(ValueError, match="closed"), stream.batches(1, 1):
        pass


def test_a_stream_that_was_never_used_has_no_threads() -> None:
    before = set(threading.enumerate())
    stream = Stream(Source(8).read, FEATURES, 8, slots=5, threads=6)
    assert set(threading.enumerate()) == before
    stream.close()


def test_places_fill_the_budget_but_are_never_fewer_than_three() -> None:
    assert slots_for(FEATURES, 10, budget=140 * 50) == 50
    assert slots_for(FEATURES, 10, budget=1) == 3
    assert slots_for(FEATURES, 1, budget=1 << 40) == 256


@pytest.mark.parametrize("first", [0, 9])
def test_before_the_first_batch_is_wanted_only_two_are_read(first: int) -> None:
    read: set[int] = set()

    def fill(batch: int, start: int, stop: int, out: Any) -> None:
        read.add(batch)

    with contextlib.closing(Stream(fill, FEATURES, 8, slots=5, threads=3)) as stream:
        stream.start(first)
        wait_until(lambda: len(read) == 2 and not stream._running, "two batches")
        assert read == {first, first + 1}
        with stream.batches(first, 1):
            wait_until(lambda: read == set(range(first, first + 5)), "all slots")


def test_a_stream_with_an_end_reads_nothing_beyond_it() -> None:
    read: list[int] = []
    lock = threading.Lock()

    def fill(batch: int, start: int, stop: int, out: Any) -> None:
        with lock:
            read.append(batch)

    stream = Stream(fill, {"x": Feature((), "int64")}, 4, slots=8, threads=3, count=5)
    try:
        done = 0
        while done < 5:
            with stream.batches(done, 3) as (_, count):
                done += count
        assert done == 5
    finally:
        stream.close()
    assert set(read) == {0, 1, 2, 3, 4}
