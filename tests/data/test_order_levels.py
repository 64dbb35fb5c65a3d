"""Two levels of order: blocks within windows, for sets too large for one permutation."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.data import order as order_module
from modelyard.data.order import BLOCK, FULL_SHUFFLE_LIMIT, WINDOW, Order, permutation

relaxed = settings(deadline=None)
seeds = st.integers(0, 2**63 - 1)
sizes = st.integers(1, 300)
blocks = st.integers(1, 20)
windows = st.integers(1, 9)


@relaxed
@given(seeds, sizes, blocks, windows, st.integers(0, 2**40))
def test_every_epoch_is_a_permutation_wherever_the_short_block_lands(
    seed: int, size: int, block: int, window: int, epoch: int
) -> None:
    stretch = Order(seed, size, 2, block, window).indices(epoch * size, (epoch + 1) * size)
    assert stretch.dtype == np.int64
    assert sorted(stretch.tolist()) == list(range(size))


@relaxed
@given(seeds, sizes, blocks, windows, st.integers(0, 10**6), st.lists(st.integers(0, 90), max_size=6))
def test_a_stretch_is_the_same_however_it_is_asked_for(
    seed: int, size: int, block: int, window: int, start: int, pieces: list[int]
) -> None:
    together = Order(seed, size, 2, block, window).indices(start, start + sum(pieces))
    used, found, at = Order(seed, size, 2, block, window), [], start
    for length in pieces:
        found.extend(used.indices(at, at + length).tolist())
        fresh = Order(seed, size, 2, block, window).indices(at, at + length)
        assert found[len(found) - length :] == fresh.tolist()
        at += length
    assert found == together.tolist()
    backwards = [int(used.indices(p, p + 1)[0]) for p in reversed(range(start, at))]
    assert backwards[::-1] == found


@relaxed
@given(seeds, sizes, blocks, windows)
def test_a_window_holds_whole_blocks_and_no_window_is_much_smaller_than_another(
    seed: int, size: int, block: int, window: int
) -> None:
    """The end of an epoch is shuffled as well as its middle."""
    stream = Order(seed, size, 2, block, window).indices(0, size)
    count = -(-size // block)
    pieces = -(-count // window)
    places = np.diff([number * count // pieces for number in range(pieces + 1)])
    assert max(places) <= window
    assert max(places) - min(places) <= 1
    for length in places:
        # The short block is in this window if the window is whole without what that block lacks.
        short, full = (stream[: length * block - lacking] for lacking in (count * block - size, 0))
        piece = short if _whole_blocks(short, size, block, length) else full
        assert _whole_blocks(piece, size, block, length)
        stream = stream[len(piece) :]
    assert len(stream) == 0


def _whole_blocks(examples: np.ndarray, size: int, block: int, count: int) -> bool:
    starts = sorted(set((examples // block * block).tolist()))
    whole = [index for start in starts for index in range(start, min(start + block, size))]
    return len(starts) == count and sorted(examples.tolist()) == whole


def test_two_levels_of_these_seeds_never_change() -> None:
    """A run that goes on under a later version must see the examples in the same order."""
    order = Order(0, 23, levels=2, block=4, window=3)
    first = [15, 0, 16, 3, 18, 17, 13, 12, 1, 14, 2, 19, 6, 4, 9, 11, 5, 21, 22, 10, 8, 7, 20]
    later = [15, 14, 17, 21, 18, 16, 20, 12, 19, 22, 13, 0, 11, 4, 1, 2, 3, 8, 5, 9, 6, 7, 10]
    assert order.indices(0, 23).tolist() == first
    assert order.indices(23 * 10**12, 23 * 10**12 + 23).tolist() == later
    assert (BLOCK, WINDOW, FULL_SHUFFLE_LIMIT) == (256, 1024, 4_000_000)


def test_a_stream_has_nothing_of_the_order_in_storage() -> None:
    size = 100_000
    ranks, neighbours = [], []
    for seed in range(5):
        stream = Order(seed, size, levels=2, block=256, window=64).indices(0, size)
        ranks.append(np.corrcoef(np.arange(size), stream)[0, 1])
        neighbours.append(np.mean(np.abs(np.diff(stream)) == 1))
    # 391 blocks: chance alone gives a correlation of about 0.05 an epoch.
    assert np.abs(ranks).max() < 0.2
    assert np.abs(np.mean(ranks)) < 0.1
    assert max(neighbours) < 0.001  # one in 16,384 is chance within a window, and storage has all of them


def test_epochs_windows_and_seeds_are_shuffled_differently() -> None:
    size, block = 64, 64  # a window is one block: what remains is the second level alone
    orders = {tuple(Order(s, size, 2, block, 1).indices(e * size, e * size + size)) for s in range(3) for e in range(3)}
    assert len(orders) == 9
    whole = Order(0, 4 * size, 2, block, 1).indices(0, 4 * size).reshape(4, size) % block
    assert len({tuple(row) for row in whole.tolist()}) == 4
    starts = {tuple(Order(s, 80, 2, 1, 1).indices(e * 80, e * 80 + 80)) for s in range(3) for e in range(3)}
    assert len(starts) == 9  # a window is one example: what remains is the first level


def test_a_far_position_of_a_huge_set_needs_one_window_and_no_array_of_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sorted_sizes: list[int] = []

    def counting(seed: int, domain: int, number: int, size: int, part: int = 0) -> np.ndarray:
        sorted_sizes.append(size)
        return permutation(seed, domain, number, size, part)

    monkeypatch.setattr(order_module, "permutation", counting)
    size, position = 10**9, 10**12 + 5
    order = Order.for_size(0, size)
    tracemalloc.start()
    try:
        found = order.indices(position, position + 256)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(found.tolist())) == 256
    assert 0 <= found.min() <= found.max() < size
    blocks = -(-size // BLOCK)
    assert sorted_sizes[0] == blocks
    assert len(sorted_sizes) == 2
    assert sorted_sizes[1] <= BLOCK * WINDOW
    assert most < size // 5  # bytes: one byte an example would be five times as much
    order.indices(position + 256, position + 512)
    assert len(sorted_sizes) == 2  # nothing is computed again


def test_a_window_and_the_next_stay_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[int, int]] = []

    def counting(seed: int, domain: int, number: int, size: int, part: int = 0) -> np.ndarray:
        computed.append((number, part))
        return permutation(seed, domain, number, size, part)

    monkeypatch.setattr(order_module, "permutation", counting)
    order = Order(0, 160, levels=2, block=4, window=10)  # four windows of 40 examples
    for position in (38, 42, 38, 42):
        order.indices(position - 1, position + 1)
    assert computed == [(0, 0), (0, 0), (0, 1)]  # the blocks, then two windows


def test_the_size_chooses_the_levels_unless_the_user_does() -> None:
    assert Order.for_size(0, FULL_SHUFFLE_LIMIT).levels == 1
    assert Order.for_size(0, FULL_SHUFFLE_LIMIT + 1).levels == 2
    assert Order.for_size(0, 10**9, "full").levels == 1
    assert Order.for_size(0, 10, "blocks").levels == 2
    assert Order.for_size(0, 10).indices(0, 10).tolist() == Order(0, 10).indices(0, 10).tolist()


@pytest.mark.parametrize("wrong", [(0, 10, 3), (0, 0, 1), (0, 10, 2, 0), (0, 10, 2, 4, 0)])
def test_an_order_that_can_not_be_is_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no order of"):
        Order(*wrong)
