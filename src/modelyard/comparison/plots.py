"""Small scatter plots as SVG: points with error bars and names, on a logarithmic axis of costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.charts.axes import linear_range, log_range, log_ticks, with_unit

__all__ = ["linear_range", "log_range", "log_ticks", "scatter", "templates", "with_unit"]
WIDTH, HEIGHT, COLOURS = 420, 300, 8
_RIGHT, _TOP, _BOTTOM = WIDTH - 14, 14, HEIGHT - 44
_LETTER, _LINE = 6.8, 14.0
"""Width and height of a letter of a name, large enough to keep names apart."""
MAX_NAME = 26
"""Letters of the longest name that fits in a plot; longer names are truncated."""
_SAME_POSITION = 3.0
_Position = tuple[float, float]
_Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@lru_cache
def templates(*packages: str) -> Any:
    """Returns the environment of the templates. In HTML and SVG all text is escaped: names may come from anywhere.

    Args:
        *packages: other packages with templates, which may include those of this one.
    """
    import jinja2

    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(name) for name in (*packages, "modelyard.comparison")])
    escape = jinja2.select_autoescape(("html", "svg"))
    return jinja2.Environment(autoescape=escape, undefined=jinja2.StrictUndefined, loader=loader)


@dataclass(frozen=True)
class Point:
    """A point: its name, its coordinates, the ends of its error bar, and its index, which selects its colour."""

    name: str
    x: float
    y: float
    bar: tuple[float, float] | None
    index: int


def scatter(
    points: Sequence[Point], x_name: str, y_name: str, *, numbered: bool = False, most: float = math.inf
) -> str:
    """Returns a plot of ``points`` as SVG; empty if there are none with a positive x, since that axis is logarithmic.

    If ``numbered``, points are labelled by numbers from 1, not by their names. There are no ticks above ``most``.
    """
    points = [p for p in points if p.x > 0 and math.isfinite(p.x) and math.isfinite(p.y)]
    if not points:
        return ""
    low, high = log_range([p.x for p in points])
    ends = [end for p in points for end in (p.y, *(p.bar or ()))]
    least, greatest, y_ticks = linear_range(min(ends), max(ends), most)
    left = 12 + 7 * max((len(f"{value:.6g}") for value in y_ticks), default=4)

    def across(x: float) -> float:
        return left + (math.log10(x) - low) / (high - low) * (_RIGHT - left)

    def down(y: float) -> float:
        return _BOTTOM - (y - least) / (greatest - least) * (_BOTTOM - _TOP)

    positions = [(across(p.x), down(p.y)) for p in points]
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in positions]
    taken += [(across(p.x) - 2, down(p.bar[1]), across(p.x) + 2, down(p.bar[0])) for p in points if p.bar]
    labels = _numbers(points, positions) if numbered else _names(points, positions)
    context = {"points": points, "x_name": x_name, "y_name": y_name, "across": across, "down": down}
    context |= {"x_ticks": log_ticks(low, high), "y_ticks": y_ticks, "labels": _placed(labels, taken, left)}
    context |= {"width": WIDTH, "height": HEIGHT, "left": left, "right": _RIGHT, "top": _TOP, "bottom": _BOTTOM}
    plot: str = templates().get_template("scatter.svg").render(context, colours=COLOURS, with_unit=with_unit)
    return plot


# -- names beside the points ----------------------------------------------------------------------------------------


def _names(points: Sequence[Point], positions: Sequence[_Position]) -> list[tuple[str, _Position]]:
    names = [p.name if len(p.name) <= MAX_NAME else f"{p.name[: MAX_NAME - 1]}…" for p in points]
    return list(zip(names, positions, strict=True))


def _numbers(points: Sequence[Point], positions: Sequence[_Position]) -> list[tuple[str, _Position]]:
    """Returns the numbers of the points; points at the same position share a label, such as 1–3, 5."""
    groups: dict[_Position, list[int]] = {}
    for point, position in zip(points, positions, strict=True):
        same = next((other for other in groups if math.dist(position, other) < _SAME_POSITION), position)
        groups.setdefault(same, []).append(point.index + 1)
    return [(_as_ranges(sorted(numbers)), position) for position, numbers in groups.items()]


def _as_ranges(numbers: Sequence[int]) -> str:
    texts: list[str] = []
    # In a run of consecutive numbers, the difference from their index is constant.
    for _, pairs in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        texts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(texts)


def _placed(
    labels: Sequence[tuple[str, _Position]], taken: Sequence[_Box], margin: int
) -> list[tuple[str, float, float]]:
    """Returns the labels with the position where each covers least."""
    boxes = np.array([*taken, *([(0.0, 0.0, 0.0, 0.0)] * len(labels))]).reshape(-1, 4)  # with room for the labels

    def cost(box: _Box) -> float:
        left, top, right, bottom = box
        outside = max(0, margin - left) + max(0, right - WIDTH) + max(0, -top) + max(0, bottom - _BOTTOM)
        return 100 * outside + _overlap(box, boxes)

    placed = []
    for number, (text, (x, y)) in enumerate(labels, len(taken)):
        width = len(text) * _LETTER
        lefts = (x + 8, x - 8 - width, x - width / 2)  # right of the point, left of it, above or below it
        candidates = [
            (left, y + shift - _LINE / 2, left + width, y + shift + _LINE / 2)
            for shift in (0, -14, 14, -26, 26, -38, 38)
            for left in lefts[: 3 if shift else 2]
        ]
        best = min(candidates, key=cost)
        boxes[number] = best
        placed.append((text, best[0], best[3] - 3))
    return placed


def _overlap(one: _Box, others: NDArray[np.float64]) -> float:
    """Returns the area that a box shares with others, in all."""
    size = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2])
    return float(np.maximum(size, 0).prod(axis=1).sum())
