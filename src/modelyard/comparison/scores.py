"""Statistics of a few seeds: whether a difference is more than noise, and ranks that treat noise as a tie."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

LEVEL = 0.05
"""Two-sided: one in twenty differences that are none is taken for one."""
Values = Mapping[int, float]
"""The score of each seed."""
_TINY = 1e-300


def spread(values: Sequence[float]) -> float | None:
    """The sample standard deviation; None of a single value."""
    return statistics.stdev(values) if len(values) > 1 else None


def p_value(one: Values, other: Values) -> float | None:
    """How likely a difference like this is by chance, two-sided; None where a single seed says nothing.

    Over seeds that both have, differences are tested in pairs (Student); otherwise Welch's test is used.
    """
    common = sorted(set(one) & set(other))
    if len(common) >= 2 and len(common) == min(len(one), len(other)):
        return _paired([one[seed] - other[seed] for seed in common])
    if min(len(one), len(other)) < 2:
        return None
    return _welch(list(one.values()), list(other.values()))


def _paired(differences: list[float]) -> float:
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    return _two_sided(mean, error, len(differences) - 1)


def _welch(one: list[float], other: list[float]) -> float:
    parts = [statistics.variance(values) / len(values) for values in (one, other)]
    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / (
        sum(part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True)) or _TINY
    )
    return _two_sided(statistics.fmean(one) - statistics.fmean(other), error, freedom)


def _two_sided(difference: float, error: float, freedom: float) -> float:
    # Rounding leaves seeds that agree exactly with a spread of some 1e-17, of which nothing should follow.
    if error <= 1e-12 * max(abs(difference), 1e-12):
        return 1.0 if abs(difference) < 1e-12 else 0.0
    return student_tail(difference / error, freedom)


def student_tail(t: float, freedom: float) -> float:
    """The probability that Student's t is further from zero than ``t``."""
    return regularized_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def regularized_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges quickly on the other side only
        return 1 - regularized_beta(b, a, 1 - x)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a

    def safe(value: float) -> float:
        return value if abs(value) > _TINY else _TINY

    c, d = 1.0, 1 / safe(1 - (a + b) * x / (a + 1))
    total = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for factor in (even, odd):
            c, d = safe(1 + factor / c), 1 / safe(1 + factor * d)
            total *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * total


def ranks(
    means: Sequence[float], key: Callable[[float], float], differ: Callable[[int, int], bool | None]
) -> list[float]:
    """Ranks from 1, the best first; those that don't differ from the best of their group share the mean of its places.

    A group ends where one differs: nobody is ranked before another with a better mean only for being noisier.

    Args:
        means: the mean of each.
        key: sorts the best first.
        differ: whether two of them, by number, differ by more than noise; None if that is not known, and then the means
            decide.
    """
    order = sorted(range(len(means)), key=lambda number: key(means[number]))
    result = [0.0] * len(means)
    while order:
        first = order[0]
        tied = [first]
        for number in order[1:]:
            if differ(first, number) is not False and means[number] != means[first]:
                break
            tied.append(number)
        taken = sum(rank > 0 for rank in result)
        for number in tied:
            result[number] = taken + (len(tied) + 1) / 2
        order = [number for number in order if number not in tied]
    return result
