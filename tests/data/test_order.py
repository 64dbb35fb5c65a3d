"""Order is arithmetic: permutations, batches, and golden values that must never change."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.data.order import Order, permutation, raw_draws

relaxed = settings(deadline=None)
seeds = st.integers(0, 2**63 - 1)
sizes = st.integers(1, 200)


@relaxed
@given(seeds, sizes, st.integers(0, 2**40))
def test_every_epoch_is_a_permutation(seed: int, size: int, epoch: int) -> None:
    stretch = Order(seed, size).indices(epoch * size, (epoch + 1) * size)
    assert stretch.dtype == np.int64
    assert sorted(stretch.tolist()) == list(range(size))


def test_the_order_of_these_seeds_never_changes() -> None:
    """A run that goes on under a later version must see the examples in the same order."""
    order = Order(seed=0, size=10)
    assert order.indices(0, 10).tolist() == [2, 3, 5, 7, 0, 6, 1, 4, 9, 8]
    assert order.indices(10, 20).tolist() == [3, 7, 2, 9, 6, 4, 8, 5, 0, 1]
    assert order.indices(10**13, 10**13 + 10).tolist() == [6, 4, 2, 9, 7, 0, 1, 3, 8, 5]
    assert Order(seed=2**63 - 1, size=10).indices(0, 10).tolist() == [3, 5, 4, 1, 7, 0, 9, 2, 6, 8]
    assert raw_draws(0, 0x6F72646572, 0, 2).tolist() == [6862111340689273230, 8360763569485089257]


@relaxed
@given(seeds, sizes, st.integers(1, 64), st.integers(0, 10**6), st.lists(st.integers(1, 7), max_size=5))
def test_a_batch_is_the_same_however_it_is_asked_for(
    seed: int, size: int, batch: int, step: int, pieces: list[int]
) -> None:
    """Batch k is positions kB to (k+1)B: alone, among others, from a fresh start."""
    total = sum(pieces)
    together = Order(seed, size).batches(step, total, batch)
    assert together.shape == (total, batch)
    used, rows, at = Order(seed, size), [], step
    for count in pieces:
        rows.extend(used.batches(at, count, batch).tolist())
        at += count
    assert rows == together.tolist()
    for k in range(total):
        assert Order(seed, size).batches(step + k, 1, batch)[0].tolist() == together[k].tolist()
        positions = Order(seed, size).indices((step + k) * batch, (step + k + 1) * batch)
        assert positions.tolist() == together[k].tolist()


@relaxed
@given(seeds, sizes, st.integers(0, 1000), st.integers(0, 500))
def test_nothing_is_dropped_and_nothing_is_short(seed: int, size: int, start: int, length: int) -> None:
    order = Order(seed, size)
    stretch = order.indices(start, start + length)
    assert len(stretch) == length
    one_by_one = [int(order.indices(p, p + 1)[0]) for p in range(start, start + length)]
    assert stretch.tolist() == one_by_one


def test_a_batch_crosses_the_end_of_an_epoch() -> None:
    order = Order(seed=0, size=10)
    first, second = order.indices(0, 10).tolist(), order.indices(10, 20).tolist()
    assert order.batches(1, 1, 7)[0].tolist() == [*first[7:], *second[:4]]


def test_a_batch_larger_than_the_dataset_holds_several_epochs() -> None:
    batch = Order(seed=0, size=3).batches(0, 1, 10)[0]
    assert np.bincount(batch[:9]).tolist() == [3, 3, 3]


def test_epochs_differ_and_seeds_differ() -> None:
    orders = {tuple(Order(seed, 50).indices(e * 50, e * 50 + 50).tolist()) for seed in range(4) for e in range(4)}
    assert len(orders) == 16


def test_the_domain_keeps_uses_of_one_seed_apart() -> None:
    assert permutation(0, 1, 0, 50).tolist() != permutation(0, 2, 0, 50).tolist()


def test_every_example_comes_at_every_place_about_equally_often() -> None:
    size, epochs = 8, 4000
    table = Order(seed=1, size=size).indices(0, size * epochs).reshape(epochs, size)
    counts = np.stack([np.bincount(table[:, place], minlength=size) for place in range(size)])
    assert np.abs(counts - epochs / size).max() < 5 * np.sqrt(epochs / size)


def test_step_ten_million_costs_what_step_ten_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        "modelyard.data.order.permutation", lambda seed, domain, epoch, size: calls.append(epoch) or np.arange(size)
    )
    Order(seed=0, size=1000).batches(10_000_000, 2, 100)
    assert calls == [1_000_000]


def test_equal_keys_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = np.array([5, 3, 5, 3, 3, 9, 5] * 400, np.uint64)
    monkeypatch.setattr("modelyard.data.order.raw_draws", lambda *_: keys)
    assert permutation(0, 0, 0, len(keys)).tolist() == np.argsort(keys, kind="stable").tolist()
