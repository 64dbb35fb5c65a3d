"""The ends and the ticks of axes, and large numbers with a unit."""

from __future__ import annotations

import math
from collections.abc import Sequence


def with_unit(value: float) -> str:
    """Returns a large number with a unit, such as 11.2 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def log_range(values: Sequence[float]) -> tuple[float, float]:
    """Returns the logarithms of the ends of an axis."""
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = max(0.12 * (high - low), 0.15)
    return low - margin, high + margin


def log_ticks(low: float, high: float) -> list[float]:
    """Returns the ticks of an axis whose ends have these logarithms."""
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        values = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
        found = [value for value in values if low <= math.log10(value) <= high]
        if len(found) >= 3:
            return found[:: -(-len(found) // 7)]
    return [float(f"{10 ** (low + part * (high - low)):.2g}") for part in (0.2, 0.5, 0.8)]


def linear_range(low: float, high: float, most: float = math.inf) -> tuple[float, float, list[float]]:
    """Returns the ends of an axis with a margin, and its ticks, none above ``most``."""
    if high - low < 1e-4 * abs(high) or high == low:  # all values are equal: the axis must not show rounding noise
        middle, half = (low + high) / 2, abs(high) / 200 or 0.5
        low, high = middle - half, min(middle + half, max(most, high))
    size = high - low
    low, high = low - 0.1 * size, high + 0.12 * size
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step)
    ticks = [number * step for number in range(first, math.floor(high / step) + 1)]
    return low, high, [value for value in ticks if value <= most + step / 1000]
