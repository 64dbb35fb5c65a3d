"""Significance over examples and seeds, and places: marks and ranks."""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from modelyard.comparison.leaderboard import spread
from modelyard.comparison.significance import Sample, compare, holm, interval, places


def p_value(one: list[float], other: list[float]) -> float | None:
    found = compare(Sample(one), Sample(other))
    return None if found is None else found.p


def of_examples(*parts: Any) -> Sample:
    """The results on these values, as many seeds as rows."""
    arrays = tuple(np.asarray(part, np.float32) for part in parts)
    return Sample([float(row.mean()) for row in np.concatenate(arrays, axis=1)], arrays)


@pytest.mark.parametrize(("t", "freedom"), [(2.7764, 4), (2.2281, 10), (2.0423, 30), (1.96, 10**5)])
def test_the_quantiles_of_every_table_leave_five_percent(t: float, freedom: int) -> None:
    noise = [float(number) for number in range(freedom // 2 + 1)]
    shift = t * statistics.stdev(noise) * math.sqrt(2 / len(noise))
    better = [value + shift for value in noise]
    assert p_value(better, noise) == pytest.approx(0.05, abs=1e-5)
    assert p_value(noise, better) == p_value(better, noise)


def test_without_values_of_examples_it_is_the_test_of_welch() -> None:
    one, other = [0.91, 0.93, 0.92, 0.95], [0.90, 0.915, 0.89]
    assert p_value(one, other) == pytest.approx(stats.ttest_ind(one, other, equal_var=False).pvalue, rel=1e-9)


def test_significance_is_unknown_with_a_single_seed() -> None:
    assert p_value([0.9], [0.1]) is None
    assert p_value([0.9, 0.8], [0.1]) is None
    assert spread([0.9]) is None
    assert spread([1.0, 3.0]) == pytest.approx(2**0.5)


def test_equal_scores_cause_no_division_by_zero() -> None:
    assert p_value([0.5, 0.5], [0.5, 0.5]) == 1
    assert p_value([0.5, 0.5], [0.4, 0.4]) is None  # nothing is known of the noise
    assert p_value([0.5, 0.5], [0.4, 0.41]) is not None
    assert interval(Sample([0.5, 0.5])) is None
    same = of_examples([[1, 0, 1, 1]] * 2)
    assert compare(same, same) is not None
    assert compare(same, same).p == 1  # type: ignore[union-attr]


def right(*wrong: int, count: int = 153) -> np.ndarray[Any, Any]:
    values = np.ones((len(wrong), count), np.float32)
    for row, number in enumerate(wrong):
        values[row, :number] = 0
    return values


def test_few_examples_are_noise_even_if_the_seeds_agree() -> None:
    """Three seeds agree to an image of 153: the seeds alone call the second worse, McNemar's test does not."""
    one, other = right(10, 10, 11), np.roll(right(16, 15, 16), 5, axis=1)
    seeds = stats.ttest_ind(one.mean(axis=1), other.mean(axis=1))
    only_one, only_other = (int((a > b).sum()) for a, b in ((one[0], other[0]), (other[0], one[0])))
    mcnemar = stats.binomtest(only_one, only_one + only_other).pvalue
    assert seeds.pvalue < 0.001 < 0.2 < mcnemar
    found = compare(of_examples(one), of_examples(other))
    assert found is not None
    assert found.covers_seeds
    assert found.p > 0.1


def test_no_difference_is_more_significant_than_on_the_examples_alone() -> None:
    random = np.random.default_rng(1)
    for _ in range(50):
        one, other = ((random.random((3, 200)) < level).astype(np.float32) for level in (0.9, 0.85))
        found = compare(of_examples(one), of_examples(other))
        assert found is not None
        paired = stats.ttest_rel(one.mean(axis=0), other.mean(axis=0)).pvalue
        assert found.p >= paired * (1 - 1e-6)


def test_with_many_examples_it_is_the_test_over_seeds() -> None:
    random = np.random.default_rng(2)
    levels = [[0.90, 0.91, 0.92, 0.93], [0.88, 0.90, 0.885, 0.89]]
    one, other = (
        np.stack([random.permutation(np.arange(100_000) < level * 100_000) for level in mine]) for mine in levels
    )
    found = compare(of_examples(one), of_examples(other))
    assert found is not None
    assert found.p == pytest.approx(stats.ttest_ind(*levels, equal_var=False).pvalue, rel=0.03)


def test_a_single_seed_says_which_trained_models_differ_but_not_which_methods() -> None:
    one, other = right(10), right(40)
    found = compare(of_examples(one), of_examples(other))
    assert found is not None
    assert not found.covers_seeds
    assert found.p < 0.001
    placed = places({"a": of_examples(one), "b": of_examples(other), "c": of_examples(right(11))}, lambda v: -v)
    assert {name: place.mark for name, place in placed.items()} == {"a": "best", "b": "unknown", "c": "within noise"}
    assert {name: place.rank for name, place in placed.items()} == {"a": 1.5, "b": 3, "c": 1.5}


def test_p_values_are_corrected_for_their_number() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def around(mean: float, noise: float) -> Sample:
    return Sample([mean - noise, mean, mean + noise])


def test_marks_and_ranks_agree() -> None:
    samples = {"a": around(0.9, 1e-4), "b": around(0.95, 1e-2), "c": around(0.94, 1e-2), "d": around(0.5, 1e-4)}
    up, down = places(samples, lambda value: -value), places(samples, lambda value: value)
    assert {name: place.rank for name, place in up.items()} == {"b": 1.5, "c": 1.5, "a": 3, "d": 4}
    assert {name: place.mark for name, place in up.items()} == {
        "b": "best", "c": "within noise", "a": "worse", "d": "worse",
    }  # fmt: skip
    assert {name: place.mark for name, place in down.items()} == {"d": "best", **dict.fromkeys("abc", "worse")}
    assert {name: place.rank for name, place in down.items()} == {"d": 1, "a": 2, "b": 3.5, "c": 3.5}
    assert (up["b"].p, down["d"].p) == (None, None)
    unknown = places({"a": Sample([0.5]), "b": Sample([0.5]), "c": Sample([0.4])}, lambda value: -value)
    assert [(place.rank, place.mark) for place in unknown.values()] == [(1.5, "best"), (1.5, "best"), (3, "unknown")]


def test_a_noisy_result_below_one_that_is_worse_is_not_within_noise_of_the_best() -> None:
    samples = {"best": around(0.97, 1e-4), "worse": around(0.95, 1e-4), "noisy": around(0.91, 0.2)}
    found = places(samples, lambda value: -value)
    assert [(found[name].rank, found[name].mark) for name in samples] == [
        (1, "best"), (2.5, "worse"), (2.5, "unknown"),
    ]  # fmt: skip


def test_within_noise_is_never_below_what_is_not() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        samples = {n: around(random.normal(), random.exponential()) for n in range(5)}
        found = places(samples, lambda value: -value)
        order = sorted(found, key=lambda n: -samples[n].mean)
        marks = [found[n].mark for n in order]
        shared = [mark in ("best", "within noise") for mark in marks]
        assert shared == sorted(shared, reverse=True)
        assert [found[n].rank == found[order[0]].rank for n in order] == shared
        assert all((found[n].p or 0) < 0.05 for n in order if found[n].mark == "worse")
        assert [found[n].rank for n in order] == sorted(found[n].rank for n in order)


def test_intervals() -> None:
    scores = [0.90, 0.93, 0.91]
    expected = stats.t.interval(0.95, 2, np.mean(scores), stats.sem(scores))
    assert interval(Sample(scores)) == pytest.approx(expected)
    assert interval(Sample([0.9])) is None
    low, high = interval(of_examples(right(0)), is_share=True) or (0, 0)
    assert (low, high) == (pytest.approx(153 / (153 + 1.96**2), abs=1e-3), 1)
    one = interval(of_examples(right(30)), is_share=True)
    assert one == pytest.approx(stats.binomtest(123, 153).proportion_ci(method="wilson"), abs=2e-3)
    low, high = interval(of_examples(right(30, 31, 29)), is_share=True) or (0, 0)
    assert low < one[0] + 0.01
    assert high > one[1] - 0.01


def benchmark() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "leaderboard.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_the_leaderboard", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folds", [False, True])
def test_equal_models_are_rarely_called_different(folds: bool) -> None:
    made = benchmark()
    assert made.coverage(200, folds=folds) >= 0.93
    now, before = made.false_rate(200, folds=folds)
    assert now <= 0.05
    assert before > 0.05  # so the simulation has noise to fall for


def test_real_differences_are_found() -> None:
    made = benchmark()
    random = np.random.default_rng(0)
    found = {}
    for loss in (0.0, 0.02, 0.1):
        setting = made.Setting((2000,), 5, 0.9, 0.2, 0.3, 0.003)
        marks = [
            places(dict(enumerate(made.simulate(random, setting, (0.0, loss)))), lambda value: -value)[1].mark
            for _ in range(40)
        ]
        found[loss] = marks.count("worse") / len(marks)
    assert found[0.1] == 1
    assert found[0.02] > 0.5
    assert found[0.0] < 0.15
