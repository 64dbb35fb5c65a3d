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
"""Width and height of a letter of a name, large enough to keep names apart."""
MAX_NAME = 26
"""Letters of the longest name that fits in a plot; longer names are truncated."""
_SAME_POSITION = 3.0


@dataclass(frozen=True)
class Point:
    """A point: its name, its coordinates, the length of its error bar, and its index, which selects its colour."""

    name: str
    x: float
    y: float
    error: float | None
    index: int

    @property
    def css_class(self) -> str:
        """The CSS class of its colour."""
        return f"c{self.index % COLOURS}"


_Position = tuple[float, float]


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
    """Returns a plot of ``points`` as SVG; empty if there are none.

    Args:
        points: the points; those without a positive x are left out, since the axis is logarithmic.
        x_name: the name of the lower axis.
        y_name: the name of the other axis.
        scale: the values of y are multiplied by it, for percentages.
        numbered: label points by numbers from 1, not by their names.
        most: the largest possible value of y, scaled; there are no ticks above it.
    """
    points = [p for p in points if p.x > 0 and math.isfinite(p.x) and math.isfinite(p.y)]
    if not points:
        return ""
    low, high = _log_range([p.x for p in points])
    bars = [scale * (p.y + sign * (p.error or 0.0)) for p in points for sign in (-1, 1)]
    bottom, top, ticks = _linear_range(min(bars), max(bars), most)
    margin = 12 + 7 * max((len(_plain(value)) for value in ticks), default=4)

    def position_of(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low) / (high - low)
        up = (y - bottom) / (top - bottom)
        return margin + across * (WIDTH - margin - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    label = escape(f"{y_name} against {x_name}: " + ", ".join(p.name for p in points), quote=True)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
    for value in ticks:
        _, y = position_of(10**low, value)
        parts.append(f'<line class="grid" x1="{margin}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{margin - 6}" y="{y + 4:.1f}" text-anchor="end">{_plain(value)}</text>')
    for value in _log_ticks(low, high):
        x, _ = position_of(value, bottom)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_short(value)}</text>'
        )
    middle = (margin + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    parts += _marks(points, position_of, scale, margin, numbered)
    return "".join([*parts, "</svg>"])


def _marks(
    points: Sequence[Point],
    position_of: Callable[[float, float], tuple[float, float]],
    scale: float,
    left: int,
    numbered: bool,
) -> list[str]:
    """Draws error bars, points, and names or numbers beside them where there is room."""
    positions = [position_of(p.x, scale * p.y) for p in points]
    parts: list[str] = []
    taken = [_Box(x - 5, y - 5, x + 5, y + 5) for x, y in positions]
    for point, (x, _) in zip(points, positions, strict=True):
        if point.error:
            _, upper = position_of(point.x, scale * (point.y + point.error))
            _, lower = position_of(point.x, scale * (point.y - point.error))
            path = f"M{x:.1f} {lower:.1f}V{upper:.1f}M{x - 4:.1f} {lower:.1f}h8M{x - 4:.1f} {upper:.1f}h8"
            parts.append(f'<path class="bar {point.css_class}" d="{path}"/>')
            taken.append(_Box(x - 2, upper, x + 2, lower))
    for point, (x, y) in zip(points, positions, strict=True):
        value = f"{scale * point.y:.4g}" + (f" ± {scale * point.error:.2g}" if point.error is not None else "")
        title = f"{point.name}: {value}, {_short(point.x)}"
        circle = f'<circle class="{point.css_class}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">'
        parts.append(f"{circle}<title>{escape(title)}</title></circle>")
    for name, (x, y) in _numbers(points, positions) if numbered else _names(points, positions):
        box = _label_box(name, x, y, taken, left)
        taken.append(box)
        parts.append(f'<text class="name" x="{box.left:.1f}" y="{box.bottom - 3:.1f}">{escape(name)}</text>')
    return parts


def _names(points: Sequence[Point], positions: Sequence[_Position]) -> list[tuple[str, _Position]]:
    names = [p.name if len(p.name) <= MAX_NAME else f"{p.name[: MAX_NAME - 1]}…" for p in points]
    return list(zip(names, positions, strict=True))


def _numbers(points: Sequence[Point], positions: Sequence[_Position]) -> list[tuple[str, _Position]]:
    """Returns the numbers of the points; points at the same position share a label, such as 1–3, 5."""
    groups: list[tuple[list[int], _Position]] = []
    for point, position in zip(points, positions, strict=True):
        mine = next((numbers for numbers, other in groups if math.dist(position, other) < _SAME_POSITION), None)
        if mine is None:
            groups.append(([point.index + 1], position))
        else:
            mine.append(point.index + 1)
    return [(_as_ranges(sorted(numbers)), position) for numbers, position in groups]


def _as_ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _label_box(name: str, x: float, y: float, taken: Sequence[_Box], margin: int) -> _Box:
    """Returns the position where a name covers least."""
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


def _plain(value: float) -> str:
    return f"{value:.6g}"


def _short(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
