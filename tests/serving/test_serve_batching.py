"""Requests share batches: in order, within a delay, and every one gets its own answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from modelyard.errors import UserError
from modelyard.serving.http.batching import (
    Batcher,
    BatchingOptions,
    DeadlineExceededError,
    QueueFullError,
    batch_sizes,
)
from serving_parts import Brightness, facts
from waiting import PATIENCE

FOREVER = 3600.0


def images(*values: int) -> Any:
    return {"image": np.stack([np.full((4, 4, 3), value, np.uint8) for value in values])}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


def started(servable: Brightness, *settings: Any) -> Batcher:
    batcher = Batcher(lambda: servable, BatchingOptions(*settings))
    batcher.start().result(PATIENCE)
    servable.batches.clear()
    return batcher


def far() -> float:
    return time.monotonic() + FOREVER


def test_requests_that_wait_together_share_a_batch_in_order_of_arrival() -> None:
    servable = Brightness(facts("regression"))
    batcher = started(servable, 8, 0.2, 64)

    async def work() -> list[Any]:
        return await asyncio.gather(*(batcher.submit(images(value), far()) for value in (10, 20, 30)))

    answers = run(work())
    assert [round(float(answer["values"][0]) * 255) for answer in answers] == [10, 20, 30]
    assert [batch[:, 0, 0, 0].tolist() for batch in servable.batches] == [[10, 20, 30, 0]]  # filled up to 4
    batcher.close()
    assert batcher.join(PATIENCE)


def test_a_full_batch_does_not_wait_and_a_lonely_request_waits_no_longer_than_the_delay() -> None:
    async def answered(batcher: Batcher, *requests: Any) -> None:
        await asyncio.gather(*(batcher.submit(each, far()) for each in requests))
        batcher.close()

    run(answered(started(Brightness(), 2, FOREVER, 64), images(1), images(2)))
    run(answered(started(Brightness(), 2, 0.05, 64), images(1)))


def test_large_requests_are_cut_and_put_together_again() -> None:
    servable = Brightness(facts("regression"))
    batcher = started(servable, 4, 0.01, 64)
    values = list(range(10))

    async def work() -> Any:
        return await asyncio.gather(batcher.submit(images(*values), far()), batcher.submit(images(99), far()))

    large, small = run(work())
    assert [round(float(v) * 255) for v in large["values"]] == values
    assert round(float(small["values"][0]) * 255) == 99
    assert [len(batch) for batch in servable.batches] == [4, 4, 4]  # the last: two of the large one, the small one
    batcher.close()


def test_a_full_queue_refuses_and_what_is_late_is_dropped_without_being_computed() -> None:
    servable = Brightness()
    batcher = started(servable, 1, 0.0, 2)

    async def work() -> None:
        servable.go.clear()
        first = batcher.submit(images(1), far())
        while batcher.waiting:  # until the model has it
            await asyncio.sleep(0.001)
        late = batcher.submit(images(2), time.monotonic() + 0.01)
        other = batcher.submit(images(3), far())
        with pytest.raises(QueueFullError, match="2 images are waiting"):
            batcher.submit(images(4), far())
        await asyncio.sleep(0.05)
        servable.go.set()
        with pytest.raises(DeadlineExceededError):
            await late
        await first
        await other

    run(work())
    assert [int(batch[0, 0, 0, 0]) for batch in servable.batches] == [1, 3]
    assert batcher.waiting == 0
    batcher.close()


def test_a_model_that_fails_fails_its_requests_and_goes_on() -> None:
    servable = Brightness()
    batcher = started(servable, 4, 0.01, 64)
    good, servable.predict = servable.predict, lambda images: 1 / 0  # type: ignore[method-assign,assignment,misc]

    async def fails() -> None:
        with pytest.raises(ZeroDivisionError):
            await batcher.submit(images(1, 2, 3, 4, 5, 6), far())

    run(fails())
    servable.predict = good  # type: ignore[method-assign]
    assert batcher.waiting == 0

    async def works() -> Any:
        return await batcher.submit(images(255), far())

    assert run(works())["class"][0] == 2
    batcher.close()


def test_a_closed_batcher_answers_what_it_has() -> None:
    servable = Brightness()
    batcher = started(servable, 2, FOREVER, 64)

    async def work() -> Any:
        waiting = batcher.submit(images(0), far())
        batcher.close()
        with pytest.raises(QueueFullError):
            batcher.submit(images(0), far())
        return await waiting

    assert run(work())["class"][0] == 0  # it does not wait for company that can't come
    assert batcher.join(PATIENCE)


def test_few_sizes_are_computed_and_all_are_warmed_up() -> None:
    assert batch_sizes(32) == [1, 2, 4, 8, 16, 32]
    assert batch_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert batch_sizes(1) == [1]
    assert batch_sizes(12, 3) == [3, 6, 12]
    servable = Brightness()
    batcher = Batcher(lambda: servable, BatchingOptions(6))
    batcher.start().result(PATIENCE)
    assert [len(batch) for batch in servable.batches] == [1, 2, 4, 6]
    batcher.close()


def test_a_model_that_does_not_load_says_why() -> None:
    def load() -> Brightness:
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        Batcher(load, BatchingOptions()).start().result(PATIENCE)


def test_a_max_batch_that_cannot_fit_in_memory_is_an_error_in_words() -> None:
    batcher = Batcher(lambda: Brightness(facts("regression")), BatchingOptions(10**12))
    with pytest.raises(UserError, match="max_batch is too large: 1,000,000,000,000 examples of 48 bytes"):
        batcher.start().result(PATIENCE)
