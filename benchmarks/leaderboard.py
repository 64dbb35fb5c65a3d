"""Measures how often the leaderboard calls equal models different, and how often it finds a real difference.

    python benchmarks/leaderboard.py [--matrices 2000] [--quick]

Matrices of three models are simulated and judged by the leaderboard's own functions. An example is right if a sum is
positive: how easy the example is for all models, how easy it is for this model, how good this training (seed) is, and
chance. Each matrix has 100 to 10,000 examples, 2 to 5 seeds, an accuracy of 60 to 97 %, and seeds that differ by up to
2 percentage points beside the chance of the examples. Cross-validation has 3 to 5 folds and 1 to 3 seeds.

- Equal models: the share of matrices with any mark "worse" or any rank that is not shared. The goal is at most 5 %.
- A third model that is worse by 10 points: the same, for the two that are equal.
- The share of 95 % confidence intervals of a score that contain the expected accuracy.
- One model is better than another by 1, 2, 5 and 10 points: the share of matrices where the other is marked worse.

Beside it stands the rule before: t-tests against the best over the seeds alone, paired, without correction.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from modelyard.comparison.significance import SIGNIFICANCE_LEVEL, WORSE, Sample, interval, places

SIZES = (100, 153, 300, 1000, 3000, 10_000)


@dataclass(frozen=True)
class Setting:
    """What the models of a matrix have in common. Variances are relative to that of how easy examples are."""

    sizes: tuple[int, ...]
    seeds: int
    accuracy: float
    own: float
    chance: float
    seed_spread: float


def random_setting(random: np.random.Generator, *, sizes: tuple[int, ...] = SIZES, folds: bool = False) -> Setting:
    """Returns a realistic setting."""
    size, parts = int(random.choice(sizes)), int(random.integers(3, 6)) if folds else 1
    return Setting(
        tuple(len(part) for part in np.array_split(np.arange(size), parts)),
        int(random.integers(1, 4)) if folds else int(random.integers(2, 6)),
        random.uniform(0.6, 0.97),
        random.uniform(0.05, 0.4),
        random.uniform(0.1, 0.6),
        random.uniform(0, 0.02) * (random.random() < 0.8),
    )


def simulate(random: np.random.Generator, setting: Setting, losses: tuple[float, ...]) -> list[Sample]:
    """Returns the results of models whose expected accuracies are lower by ``losses``."""
    easy = [random.standard_normal(size, np.float32) for size in setting.sizes]
    samples = []
    for loss in losses:
        accuracy = setting.accuracy - loss
        middle = float(special.ndtri(accuracy))
        rest = 1 + setting.own + setting.chance
        # So large that seeds have this spread of the accuracy, to first order.
        seed = setting.seed_spread * np.sqrt(rest) / float(stats.norm.pdf(middle))
        parts = []
        for shared in easy:
            size = (setting.seeds, len(shared))
            known = shared + np.sqrt(setting.own) * random.standard_normal(len(shared), np.float32)
            values = known + np.sqrt(setting.chance) * random.standard_normal(size, np.float32)
            values += seed * random.standard_normal((setting.seeds, 1), np.float32)
            parts.append((values + middle * np.sqrt(rest + seed**2) > 0).astype(np.float32))
        whole: NDArray[np.float32] = np.concatenate(parts, axis=1)
        samples.append(Sample([float(row.mean()) for row in whole], tuple(parts)))
    return samples


def judged(samples: list[Sample], models: tuple[int, ...] = (0, 1, 2)) -> bool:
    """Returns whether any of these models is worse than another of them, by mark or by rank."""
    found = places(dict(enumerate(samples)), lambda value: -value)
    best = max(samples, key=lambda sample: sample.mean)
    is_worse = [found[n].mark == WORSE for n in models if any(samples[m] is best for m in models)]
    return bool(any(is_worse) or len({found[n].rank for n in models}) > 1)


def judged_before(samples: list[Sample], models: tuple[int, ...] = (0, 1, 2)) -> bool:
    """Returns whether the rule before marked any of these models worse than the best of them."""
    best = max((samples[n] for n in models), key=lambda sample: sample.mean)
    return any(_paired(best, samples[n]) < SIGNIFICANCE_LEVEL for n in models if samples[n].mean != best.mean)


def _paired(one: Sample, other: Sample) -> float:
    differences = np.subtract(one.scores, other.scores)
    if len(differences) < 2:
        return 1.0
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return float(2 * stats.t.sf(abs(differences.mean()) / error, len(differences) - 1)) if error > 1e-12 else 0.0


def false_rate(count: int, *, folds: bool = False, losses: tuple[float, ...] = (0, 0, 0)) -> tuple[float, float]:
    """Returns the rate of matrices where equal models are judged to differ: now, and by the rule before."""
    random = np.random.default_rng(1)
    models = tuple(n for n, loss in enumerate(losses) if loss == 0)
    now = before = 0
    for _ in range(count):
        samples = simulate(random, random_setting(random, folds=folds), losses)
        now += judged(samples, models)
        before += judged_before(samples, models)
    return now / count, before / count


def coverage(count: int, *, folds: bool = False) -> float:
    """Returns the rate of confidence intervals that contain the expected accuracy."""
    random = np.random.default_rng(3)
    contained = []
    for _ in range(count):
        setting = random_setting(random, folds=folds)
        found = interval(simulate(random, setting, (0.0,))[0], is_share=True)
        contained.append(found is not None and found[0] <= setting.accuracy <= found[1])
    return sum(contained) / count


def main() -> None:
    """Measures all cases and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", type=int, default=2000, help="matrices of each case")
    parser.add_argument("--quick", action="store_true", help="200 matrices")
    chosen = parser.parse_args()
    count = 200 if chosen.quick else chosen.matrices
    print(f"{count} matrices of each case; called different, now and before\n")
    for name, folds, losses in (
        ("three equal models", False, (0.0, 0.0, 0.0)),
        ("three equal models, cross-validation", True, (0.0, 0.0, 0.0)),
        ("two equal models and one worse by 10 points", False, (0.0, 0.0, 0.1)),
    ):
        now, before = false_rate(count, folds=folds, losses=losses)
        print(f"{name:45} {now:7.1%} {before:7.1%}   {'goal 5 %' if now <= 0.05 else 'goal 5 %: missed'}", flush=True)
    for name, folds in (("", False), (", cross-validation", True)):
        print(f"{'95 % intervals that contain the expected accuracy' + name:67} {coverage(count, folds=folds):7.1%}")
    print("\ndifferences that are found, by points, examples and seeds")
    random = np.random.default_rng(2)
    found: dict[tuple[float, int, int], list[bool]] = defaultdict(list)
    for _ in range(count):
        setting = random_setting(random, sizes=(153, 1000, 10_000))
        for loss in (0.01, 0.02, 0.05, 0.1):
            samples = simulate(random, setting, (0.0, 0.0, loss))
            placed = places(dict(enumerate(samples)), lambda value: -value)
            found[loss, setting.sizes[0], setting.seeds].append(bool(placed[2].mark == WORSE))
    print(f"{'':10}{'examples':>10}" + "".join(f"{seeds:>8} seeds" for seeds in (2, 3, 4, 5)))
    for loss in (0.01, 0.02, 0.05, 0.1):
        for size in (153, 1000, 10_000):
            rates = [np.mean(found[loss, size, seeds] or [False]) for seeds in (2, 3, 4, 5)]
            print(f"{100 * loss:8.0f} p{size:>10}" + "".join(f"{rate:>14.0%}" for rate in rates))


if __name__ == "__main__":
    main()
