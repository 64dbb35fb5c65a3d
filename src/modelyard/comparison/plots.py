"""Small plots as SVG text: points with error bars and names, on a logarithmic axis of costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, COLOURS = 420, 300, 8
_RIGHT, _TOP, _BOTTOM = 14, 14, 44
_LETTER, _LINE = 6.8, 14.0
"""How wide a letter of a name is, and how high: enough to keep names apart."""
LONGEST = 26
"""Letters of a name that has room in a plot; of longer ones the end is cut off."""
_SAME_SPOT = 3.0


@dataclass(frozen=True)
class Point:
    """A point: its name, where it is, how far its error bar reaches, and its number, from 0, which gives its colour."""

    name: str
    x: float
    y: float
    error: float | None
    number: int

    @property
    def kind(self) -> str:
        """The class of its colour."""
        return f"c{self.number % COLOURS}"


_Spot = tuple[float, float]


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: _Box) -> float:
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return width * height if width > 0 and height > 0 else 0.0


def scatter(
    points: Sequence[Point],
    x_name: str,
    y_name: str,
    scale: float = 1.0,
    *,
    numbered: bool = False,
    most: float = math.inf,
) -> str:
    """A plot of ``points``.

    Args:
        points: at least one; those without a positive x have no place on the axis and are left out.
        x_name: what the lower axis is.
        y_name: what the other one is.
        scale: the values of y are multiplied by it, for percentages.
        numbered: points are labelled by their numbers, from 1, and not by their names.
        most: y has no values above it, so no ticks either; scaled.
    """
    points = [p for p in points if p.x > 0 and math.isfinite(p.x) and math.isfinite(p.y)]
    if not points:
        return ""
    low, high = _log_range([p.x for p in points])
    bars = [scale * (p.y + sign * (p.error or 0.0)) for p in points for sign in (-1, 1)]
    bottom, top, ticks = _linear_range(min(bars), max(bars), most)
    margin = 12 + 7 * max((len(_plain(value)) for value in ticks), default=4)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / (high - low)
        up = (y - bottom) / (top - bottom)
        return margin + across * (WIDTH - margin - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    label = escape(f"{y_name} against {x_name}: " + ", ".join(p.name for p in points), quote=True)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
    for value in ticks:
        _, y = place(10**low, value)
        parts.append(f'<line class="grid" x1="{margin}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{margin - 6}" y="{y + 4:.1f}" text-anchor="end">{_plain(value)}</text>')
    for value in _log_ticks(low, high):
        x, _ = place(value, bottom)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_short(value)}</text>'
        )
    middle = (margin + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    parts += _marks(points, place, scale, margin, numbered)
    return "".join([*parts, "</svg>"])


def _marks(
    points: Sequence[Point],
    place: Callable[[float, float], tuple[float, float]],
    scale: float,
    left: int,
    numbered: bool,
) -> list[str]:
    """Error bars, points, and names or numbers beside them where there is room."""
    spots = [place(p.x, scale * p.y) for p in points]
    parts: list[str] = []
    taken = [_Box(x - 5, y - 5, x + 5, y + 5) for x, y in spots]
    for point, (x, _) in zip(points, spots, strict=True):
        if point.error:
            _, upper = place(point.x, scale * (point.y + point.error))
            _, lower = place(point.x, scale * (point.y - point.error))
            path = f"M{x:.1f} {lower:.1f}V{upper:.1f}M{x - 4:.1f} {lower:.1f}h8M{x - 4:.1f} {upper:.1f}h8"
            parts.append(f'<path class="bar {point.kind}" d="{path}"/>')
            taken.append(_Box(x - 2, upper, x + 2, lower))
    for point, (x, y) in zip(points, spots, strict=True):
        value = f"{scale * point.y:.4g}" + (f" ± {scale * point.error:.2g}" if point.error is not None else "")
        title = f"{point.name}: {value}, {_short(point.x)}"
        parts.append(
            f'<circle class="{point.kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{escape(title)}</title></circle>'
        )
    for name, (x, y) in _numbers(points, spots) if numbered else _names(points, spots):
        box = _room(name, x, y, taken, left)
        taken.append(box)
        parts.append(f'<text class="name" x="{box.left:.1f}" y="{box.bottom - 3:.1f}">{escape(name)}</text>')
    return parts


def _names(points: Sequence[Point], spots: Sequence[_Spot]) -> list[tuple[str, _Spot]]:
    names = [p.name if len(p.name) <= LONGEST else f"{p.name[: LONGEST - 1]}…" for p in points]
    return list(zip(names, spots, strict=True))


def _numbers(points: Sequence[Point], spots: Sequence[_Spot]) -> list[tuple[str, _Spot]]:
    """Their numbers; those of points that lie on each other are one label: 1–3, 5."""
    groups: list[tuple[list[int], _Spot]] = []
    for point, spot in zip(points, spots, strict=True):
        mine = next((numbers for numbers, other in groups if math.dist(spot, other) < _SAME_SPOT), None)
        if mine is None:
            groups.append(([point.number + 1], spot))
        else:
            mine.append(point.number + 1)
    return [(_in_runs(sorted(numbers)), spot) for numbers, spot in groups]


def _in_runs(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _room(name: str, x: float, y: float, taken: Sequence[_Box], margin: int) -> _Box:
    """Where a name hides least."""
    width = len(name) * _LETTER
    best, least = None, math.inf
    for turn, (side, shift) in enumerate(itertools.product((1, -1, 0), (0, -14, 14, -26, 26, -38, 38))):
        left = x + 8 if side > 0 else x - 8 - width if side < 0 else x - width / 2
        middle = y + shift
        if side == 0 and abs(shift) < 14:
            continue
        box = _Box(left, middle - _LINE / 2, left + width, middle + _LINE / 2)
        outside = max(0, margin - box.left) + max(0, box.right - WIDTH) + max(0, -box.top)
        outside += max(0, box.bottom - (HEIGHT - _BOTTOM))
        cost = 100 * outside + sum(box.overlap(other) for other in taken) + abs(shift) / 100 + turn / 1000
        if cost < least:
            best, least = box, cost
    assert best is not None
    return best


def _log_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = max(0.12 * (high - low), 0.15)
    return low - margin, high + margin


def _log_ticks(low: float, high: float) -> list[float]:
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        values = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
        found = [value for value in values if low <= math.log10(value) <= high]
        if len(found) >= 3:
            return found[:: -(-len(found) // 7)]
    return [float(f"{10 ** (low + part * (high - low)):.2g}") for part in (0.2, 0.5, 0.8)]


def _linear_range(low: float, high: float, most: float) -> tuple[float, float, list[float]]:
    if high - low < 1e-4 * abs(high) or high == low:  # all the same: an axis that shows it and no digits of noise
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


def _plain(value: float) -> str:
    return f"{value:.6g}"


def _short(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
