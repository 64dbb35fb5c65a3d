"""Significance with a few seeds, and ranks."""

from __future__ import annotations

import math
import statistics

import pytest

from modelyard.comparison.leaderboard import p_value, ranks, spread


@pytest.mark.parametrize(
    ("t", "freedom"), [(12.706, 1), (4.3027, 2), (2.7764, 4), (2.2281, 10), (2.0423, 30), (1.96, 10**5)]
)
def test_the_quantiles_of_every_table_leave_five_percent(t: float, freedom: int) -> None:
    count = freedom + 1
    noise = [float(number) for number in range(count)]
    shift = t * statistics.stdev(noise) / math.sqrt(count) - statistics.fmean(noise)
    better = {seed: value + shift for seed, value in enumerate(noise)}
    none = dict.fromkeys(range(count), 0.0)
    assert p_value(better, none) == pytest.approx(0.05, abs=1e-5)
    assert p_value(none, better) == p_value(better, none)


def test_the_tests_agree_with_scipy() -> None:
    from scipy import stats

    one, other = [0.91, 0.93, 0.92, 0.95], [0.90, 0.915, 0.89, 0.93]
    paired = p_value(dict(enumerate(one)), dict(enumerate(other)))
    assert paired == pytest.approx(stats.ttest_rel(one, other).pvalue, rel=1e-9)
    welch = p_value(dict(enumerate(one)), dict(enumerate(other[:3], start=10)))
    assert welch == pytest.approx(stats.ttest_ind(one, other[:3], equal_var=False).pvalue, rel=1e-9)


def test_significance_is_unknown_with_a_single_seed() -> None:
    assert p_value({0: 0.9}, {0: 0.1}) is None
    assert p_value({0: 0.9, 1: 0.8}, {0: 0.1}) is None
    assert spread([0.9]) is None
    assert spread([1.0, 3.0]) == pytest.approx(2**0.5)


def test_equal_scores_cause_no_division_by_zero() -> None:
    assert p_value({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.5}) == 1
    assert p_value({0: 0.5, 1: 0.5}, {0: 0.4, 1: 0.4}) == 0
    assert p_value({0: 0.5, 1: 0.5}, {7: 0.4, 8: 0.4}) == 0
    assert p_value({0: 0.3, 1: 0.1}, {0: 0.2, 1: 0.0}) == 0  # 0.1 both times, but for rounding


def test_results_that_do_not_differ_share_their_mean_rank() -> None:
    means = dict(enumerate([0.90, 0.95, 0.94, 0.80]))

    def near(one: int, other: int) -> bool:
        return abs(means[one] - means[other]) > 0.02

    assert ranks(means, lambda value: -value, near) == {0: 3, 1: 1.5, 2: 1.5, 3: 4}
    assert ranks(means, lambda value: value, near) == {0: 2, 1: 3.5, 2: 3.5, 3: 1}
    assert ranks(means, lambda value: -value, lambda one, other: None) == {0: 3, 1: 1, 2: 2, 3: 4}
    # The last is so noisy that it does not differ from the first, but it is no better than the second, which does.
    noisy = {"a": 0.97, "b": 0.95, "c": 0.91}
    assert ranks(noisy, lambda value: -value, lambda one, other: other == "b") == {"a": 1, "b": 2.5, "c": 2.5}
    assert ranks({"a": 0.5, "b": 0.5}, lambda value: -value, lambda one, other: None) == {"a": 1.5, "b": 1.5}
