"""One chart as SVG: series of lines, points or bars on two axes, with marks and a legend.

Series differ in colour and in their stroke or their shape, so that a print in grey can be read. The values stand in the
chart, where a page's script finds them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from modelyard.charts.axes import linear_range, log_range, log_ticks, with_unit

WIDTH, HEIGHT = 420, 260
MOST_POINTS = 400
"""The points of a line; of more, some are left out."""
_MOST_MARKERS = 40
"""A line of so many points shows each."""
_LETTER = 6.6
_TICK_TEXTS = 5
_LOG_FROM = 100.0
_LARGEST = 1e150


@dataclass(frozen=True)
class Series:
    """Values of a chart.

    Args:
        name: the text in the legend; empty for none.
        x, y: the values; those that are not finite are left out.
        style: line, dashed, points or bars.
        colour: the number of its colour, 0 to 7.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Literal["line", "dashed", "points", "bars"] = "line"
    colour: int = 0


@dataclass(frozen=True)
class Mark:
    """A vertical line at a value of x, and its text."""

    x: float
    text: str


def draw(
    series: Sequence[Series],
    x_name: str,
    label: str,
    *,
    y_name: str = "",
    marks: Sequence[Mark] = (),
    x_ends: tuple[float, float] | None = None,
    y_ends: tuple[float, float] | None = None,
    may_be_log: bool = False,
    diagonal: bool = False,
) -> str:
    """Returns a chart as SVG; empty if there is nothing to show.

    Args:
        series: the values.
        x_name: the name of the horizontal axis.
        label: what the chart shows, in words, for those who do not see it.
        y_name: the name of the vertical axis; by default none.
        marks: vertical lines.
        x_ends, y_ends: the ends of the axes; by default those of the values, with a margin.
        may_be_log: whether the vertical axis is logarithmic if the values differ by a factor of 100.
        diagonal: draw the line where x and y are equal.
    """
    shown = [one for one in (_finite(one) for one in series) if one.x]
    if not shown:
        return ""
    ys, xs = [value for one in shown for value in one.y], [value for one in shown for value in one.x]
    is_log = may_be_log and min(ys) > 0 and max(ys) > _LOG_FROM * min(ys)
    if is_log:
        low, high = log_range(ys)
        y_ticks = [(math.log10(tick), tick) for tick in log_ticks(low, high)]
    else:
        least = min(0.0, *ys) if any(one.style == "bars" for one in shown) else min(ys)
        low, high, found = linear_range(least, max(ys))
        if any(one.style == "bars" for one in shown):
            low = max(low, 0.0) if least >= 0 else low
        if y_ends is not None:
            (low, high), (_, _, found) = y_ends, linear_range(*y_ends)
        found = [ys[0]] if min(ys) == max(ys) and y_ends is None else found
        y_ticks = [(tick, tick) for tick in found if low <= tick <= high]
    if x_ends is None:
        x_ends = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, max(xs) + 1)
    start, end = x_ends
    texts = [_tick(tick) for _, tick in y_ticks]
    left = int(14 + _LETTER * max(map(len, texts), default=2))
    legend = [one for one in shown if one.name]
    right, top, bottom = WIDTH - 14, 34 if legend or marks else 14, HEIGHT - 42

    def across(x: float) -> float:
        return round(left + (x - start) / (end - start) * (right - left), 1)

    def down(y: float) -> float:
        part = ((math.log10(y) if is_log else y) - low) / (high - low)
        return round(bottom - min(max(part, -0.05), 1.05) * (bottom - top), 1)

    x_ticks = [tick for tick in linear_range(start, end)[2] if start <= tick <= end]
    x_ticks = x_ticks[:: max(1, -(-len(x_ticks) // (_TICK_TEXTS + 2)))]
    rendered: str = (
        _templates()
        .get_template("chart.svg")
        .render(
            shapes=[_shape(one, across, down, bottom) for one in shown],
            legend=_legend(legend, left, right),
            marks=[
                (at, mark.text, "end" if at > (left + right) / 2 else "start")
                for mark in marks
                if start <= mark.x <= end
                for at in [across(mark.x)]
            ],
            x_ticks=[(across(tick), _tick(tick)) for tick in x_ticks],
            y_ticks=[
                (round(bottom - (at - low) / (high - low) * (bottom - top), 1), text)
                for (at, _), text in zip(y_ticks, texts, strict=True)
            ],
            x_name=x_name[:60],
            y_name=(f"{y_name} (logarithmic)" if is_log else y_name)[:60],
            label=label[:300],
            diagonal=(across(max(start, low)), down(max(start, low)), across(min(end, high)), down(min(end, high)))
            if diagonal
            else None,
            values=_values(shown) if x_ends and any(one.style in ("line", "dashed") for one in shown) else "",
            ends=f"{left} {right} {start:.12g} {end:.12g}",
            width=WIDTH, height=HEIGHT, left=left, right=right, top=top, bottom=bottom,
        )
    )  # fmt: skip
    return rendered


@lru_cache
def _templates() -> Any:
    import jinja2

    loader = jinja2.PackageLoader("modelyard.charts")
    return jinja2.Environment(
        autoescape=jinja2.select_autoescape(("svg",)), undefined=jinja2.StrictUndefined, loader=loader
    )


def is_number(value: Any) -> bool:
    """Returns whether a value is a finite number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def _finite(series: Series) -> Series:
    """Returns a series without what is no number, with some points left out if there are too many."""
    pairs = [(x, y) for x, y in zip(series.x, series.y, strict=True) if is_number(x) and is_number(y)]
    if series.style in ("line", "dashed") and len(pairs) > MOST_POINTS:
        step = -(-len(pairs) // MOST_POINTS)
        pairs = [*pairs[::step], *(pairs[-1:] if (len(pairs) - 1) % step else [])]
    return Series(series.name, [x for x, _ in pairs], [y for _, y in pairs], series.style, series.colour)


def _shape(series: Series, across: Any, down: Any, bottom: float) -> dict[str, Any]:
    """Returns the path of a series, and its single points with their values in words."""
    points = [(across(x), down(y)) for x, y in zip(series.x, series.y, strict=True)]
    markers: list[tuple[float, float, str]] = []
    if series.style == "bars":
        width = max(min((b[0] - a[0] for a, b in itertools.pairwise(points)), default=20.0) * 0.86, 1.0)
        foot = down(0.0) if min(series.y) < 0 else bottom
        path = "".join(f"M{x - width / 2:.1f} {foot}V{y}h{width:.1f}V{foot}z" for x, y in points)
    elif series.style == "points":
        path = "".join(f"M{x} {y}h.01" for x, y in points)
    else:
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        if len(points) <= _MOST_MARKERS:
            markers = [
                (x, y, f"{series.name} {_tick(at)}: {value:.6g}")
                for (x, y), at, value in zip(points, series.x, series.y, strict=True)
            ]
    return {"style": series.style, "colour": series.colour % 8, "path": path, "markers": markers}


def _legend(series: Sequence[Series], left: float, right: float) -> list[tuple[float, str, str, int]]:
    """Returns the places of the texts, as many as there is room for."""
    placed: list[tuple[float, str, str, int]] = []
    at = float(left)
    for one in series:
        name = one.name if len(one.name) <= 24 else f"{one.name[:23]}…"
        if at + 30 + _LETTER * len(name) > right:
            break
        placed.append((at, name, one.style, one.colour % 8))
        at += 40 + _LETTER * len(name)
    return placed


def _values(series: Sequence[Series]) -> str:
    """Returns the values of the lines for a script."""
    lines = [one for one in series if one.style in ("line", "dashed")]
    return json.dumps(
        [[one.name, [float(f"{x:.8g}") for x in one.x], [float(f"{y:.6g}") for y in one.y]] for one in lines]
    )


def _tick(value: float) -> str:
    value = float(f"{value:.10g}")
    return with_unit(value) if abs(value) >= 1e4 else f"{value:.4g}"
