"""Which entrants differ by more than noise: that of the seeds and that of the examples they are evaluated on.

The variance of the difference of two means has two parts. The examples are the same for both, so the first part is the
variance over the examples of the difference, averaged over the seeds. The second part is the variance over the seeds of
each, which are independent: a seed that two models share does not make them alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

BEST, TIED, WORSE, UNKNOWN = "best", "within noise", "worse", "unknown"
SIGNIFICANCE_LEVEL = 0.05
"""Of 20 datasets on which all entrants are equal, one has an entrant that is called worse."""
_NO_DIFFERENCE = 1e-12
"""Means that agree exactly differ by some 1e-17 after rounding."""
_LEAST_P = math.log(1e-12)
"""The logarithm of the smallest p-value."""

Values = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Noise:
    """A variance, and its degrees of freedom."""

    variance: float
    freedom: float


@dataclass(frozen=True)
class Sample:
    """The results of one entrant on one dataset.

    Args:
        scores: the score of each seed.
        parts: the values of each example, whose mean is the score, as arrays [seeds, examples]: one for each fold, and
            a single one without folds. Empty if they are not known.
    """

    scores: Sequence[float]
    parts: tuple[NDArray[Any], ...] = ()

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return math.fsum(self.scores) / len(self.scores)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of examples of each fold."""
        return tuple(part.shape[1] for part in self.parts)

    @cached_property
    def examples(self) -> Values:
        """The mean over the seeds of each example, of all folds."""
        return np.concatenate([part.mean(axis=0, dtype=np.float64) for part in self.parts])

    @cached_property
    def seeds(self) -> list[Noise]:
        """The noise of the seeds in the mean, by fold; empty with a single seed."""
        if len(self.scores) < 2:
            return []
        if not self.parts:
            return [Noise(float(np.var(self.scores, ddof=1)) / len(self.scores), len(self.scores) - 1)]
        return [
            # By chance seeds may agree better than their examples allow.
            Noise(max(float(part.mean(axis=1, dtype=np.float64).var(ddof=1)) / len(part) * weight**2, own), freedom)
            for part, weight, own, freedom in zip(
                self.parts, self._weights, self._interactions, itertools.repeat(len(self.scores) - 1), strict=False
            )
        ]

    @property
    def interaction(self) -> float:
        """The part of the noise of the seeds that is chance on single examples; the examples show it, too."""
        return math.fsum(self._interactions)

    @cached_property
    def _interactions(self) -> list[float]:
        found = []
        for part, weight in zip(self.parts, self._weights, strict=True):
            seeds, examples = part.shape
            rows, columns = part.mean(axis=1, dtype=np.float64), part.mean(axis=0, dtype=np.float64)
            # The squares of the residuals of a two-way table, from those of its margins.
            squares = float(np.square(part, dtype=np.float64).sum()) - seeds * float(columns @ columns)
            squares -= examples * float(np.square(rows - rows.mean()).sum())
            freedom = (seeds - 1) * (examples - 1)
            found.append(max(squares, 0.0) / freedom / (seeds * examples) * weight**2 if freedom else 0.0)
        return found

    @cached_property
    def _weights(self) -> list[float]:
        return [size / sum(self.shape) for size in self.shape]


@dataclass(frozen=True)
class Comparison:
    """The p-value of a difference, and whether it covers the noise of the seeds: it can't with a single seed."""

    p: float
    covers_seeds: bool


def compare(one: Sample, other: Sample) -> Comparison | None:
    """Compares two means, two-sided. None if nothing is known of the noise.

    Without values of the same examples only the noise of the seeds counts: this is Welch's t-test.
    """
    difference = one.mean - other.mean
    has_seeds = bool(one.seeds and other.seeds)
    if not one.parts or one.shape != other.shape or sum(one.shape) < 2:
        seeds = _sum([*one.seeds, *other.seeds]) if has_seeds else Noise(0.0, 1.0)
        if seeds.variance <= _NO_DIFFERENCE**2 and (abs(difference) > _NO_DIFFERENCE or not has_seeds):
            return None  # seeds that agree exactly do not say how large their noise is
        return Comparison(_p_value(difference, [seeds]), True)
    differences = one.examples - other.examples
    examples = _of_examples(differences)
    p = _p_value(difference, [examples])
    if has_seeds:
        own = max(examples.variance - one.interaction - other.interaction, 0.0)
        noise = [Noise(own, examples.freedom), _sum([*one.seeds, *other.seeds])]
        return Comparison(max(p, _p_value(difference, noise)), True)
    if len(one.shape) > 1:  # every fold is a training of its own
        return Comparison(max(p, _p_value(difference, [_of_folds(differences, one.shape)])), True)
    return Comparison(p, False)


def interval(sample: Sample, *, is_share: bool = False) -> tuple[float, float] | None:
    """Returns the 95 % confidence interval of a mean; with a single seed that of the trained model.

    None if nothing is known of the noise. ``is_share``: the values of an example are 0 to 1, and so is the interval.
    """
    noise = [_sum(sample.seeds)] if sample.seeds else []
    count = sum(sample.shape)
    if count > 1:
        examples = _of_examples(sample.examples, count - 1)
        if len(sample.shape) > 1 and not sample.seeds:
            noise = [max(_of_folds(sample.examples, sample.shape), examples, key=lambda one: one.variance)]
        else:
            own = max(examples.variance - (sample.interaction if sample.seeds else 0.0), 0.0)
            noise.append(Noise(own, examples.freedom))
    if not noise or (count < 2 and noise[0].variance <= 0):
        return None
    half = math.sqrt(_squared_half_width(noise, SIGNIFICANCE_LEVEL))
    mean = sample.mean
    if not is_share or not 0 <= mean <= 1:
        return mean - half, mean + half
    # Wilson's interval, for as many examples as would have this width: at 0 and 1 it is not empty.
    z2 = 1.959964**2
    most = float(count) if count > 1 else math.inf
    equal = min(mean * (1 - mean) * z2 / half**2, most) if half > 0 else most
    if equal == 0:  # all are right, or none
        equal = most
    middle = (mean + z2 / (2 * equal)) / (1 + z2 / equal)
    half = math.sqrt(z2) / (1 + z2 / equal) * math.sqrt(mean * (1 - mean) / equal + z2 / (4 * equal**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _of_examples(values: Values, freedom: int | None = None) -> Noise:
    """Returns the noise of a mean over examples. Only those that differ tell how large it is."""
    telling = int(np.count_nonzero(values)) - 1 if freedom is None else freedom
    return Noise(float(values.var(ddof=1)) / len(values), max(telling, 1))


def _of_folds(values: Values, sizes: Sequence[int]) -> Noise:
    """Returns the noise of a mean over folds: of their examples, and of their trainings."""
    means = np.array([part.mean() for part in np.split(values, np.cumsum(sizes)[:-1])])
    weights = np.array(sizes) / sum(sizes)
    squares = float((weights**2 * (means - weights @ means) ** 2).sum())
    return Noise(squares * len(sizes) / (len(sizes) - 1), len(sizes) - 1)


def _sum(noises: Sequence[Noise]) -> Noise:
    """Returns the sum of independent variances, with the degrees of freedom of Welch and Satterthwaite."""
    variance = math.fsum(noise.variance for noise in noises)
    squares = math.fsum(noise.variance**2 / noise.freedom for noise in noises)
    return Noise(variance, variance**2 / squares if squares > 0 else sum(noise.freedom for noise in noises))


def _squared_half_width(noise: Sequence[Noise], alpha: float) -> float:
    """Returns the square of the half width of an interval. Each variance has its own quantile of Student's t.

    Such an interval, of Cochran and Cox, is never too narrow (Lawton, 1965).
    """
    from scipy import special

    return math.fsum(one.variance * float(special.stdtrit(one.freedom, alpha / 2)) ** 2 for one in noise)


def _p_value(difference: float, noise: Sequence[Noise]) -> float:
    """Returns for which level the interval of the difference ends at 0."""
    from scipy import optimize, special

    noise = [one for one in noise if one.variance > 0]
    error = math.sqrt(math.fsum(one.variance for one in noise))
    if error <= _NO_DIFFERENCE * max(abs(difference), _NO_DIFFERENCE):
        return 1.0 if abs(difference) < _NO_DIFFERENCE else 0.0
    if len(noise) == 1:
        return float(2 * special.stdtr(noise[0].freedom, -abs(difference) / error))

    def excess(log_p: float) -> float:
        return _squared_half_width(noise, math.exp(log_p)) - difference**2

    if excess(_LEAST_P) <= 0:
        return math.exp(_LEAST_P)
    return math.exp(optimize.brentq(excess, _LEAST_P, 0.0, xtol=1e-6)) if abs(difference) > 0 else 1.0


# -- places: marks and ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """The place of an entrant: rank, mark, and the corrected p-value of its difference from the best."""

    rank: float
    mark: str
    p: float | None


def places(samples: Mapping[Key, Sample], key: Callable[[float], float]) -> dict[Key, Place]:
    """Returns the place of every entrant; ranks and marks follow from the same comparisons.

    In the order of their means, entrants share a rank, the mean of their places, while they do not differ from the
    first of them. The next one that does begins a new rank. Those that share the first rank are the best and those
    within noise of it. Of the others, those that do not differ from the best, or of which it is not known, are marked
    unknown: noise hides whether they are worse. P-values are corrected for all pairs.

    Args:
        samples: the results of each entrant.
        key: sorts means, the best first.
    """
    means = {name: sample.mean for name, sample in samples.items()}
    order = sorted(samples, key=lambda name: key(means[name]))
    pairs = list(itertools.combinations(order, 2))
    found = {pair: compare(samples[pair[0]], samples[pair[1]]) for pair in pairs}
    known = {pair: comparison for pair, comparison in found.items() if comparison is not None}
    corrected = dict(zip(known, holm([comparison.p for comparison in known.values()]), strict=True))

    def differ(pair: tuple[Key, Key]) -> bool | None:
        if means[pair[0]] == means[pair[1]]:
            return False
        if pair not in known:
            return None
        if corrected[pair] >= SIGNIFICANCE_LEVEL:
            return False
        return True if known[pair].covers_seeds else None

    result: dict[Key, Place] = {}
    rest = list(order)
    while rest:
        tied = [rest[0]]
        while len(tied) < len(rest) and differ((rest[0], rest[len(tied)])) is False:
            tied.append(rest[len(tied)])
        rank = len(result) + (len(tied) + 1) / 2
        for name in tied:
            p = None if means[name] == means[order[0]] else corrected.get((order[0], name))
            if means[name] == means[order[0]]:
                mark = BEST
            elif not result or tied[0] == order[0]:
                mark = TIED
            else:
                mark = WORSE if differ((order[0], name)) else UNKNOWN
            result[name] = Place(rank, mark, p)
        rest = rest[len(tied) :]
    return result


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns p-values corrected for their number by Holm's method."""
    count, largest = len(p_values), 0.0
    corrected = [1.0] * count
    for place, index in enumerate(sorted(range(count), key=lambda index: p_values[index])):
        largest = max(largest, (count - place) * p_values[index])
        corrected[index] = min(largest, 1.0)
    return corrected
