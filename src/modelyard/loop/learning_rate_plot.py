"""The plot of a learning-rate search, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelyard.loop.learning_rate import LearningRates

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 24, 62, 56
_STYLE = (
    "text{font:13px sans-serif;fill:#222}.title{font-size:16px;font-weight:bold}.faint{stroke:#ddd}"
    ".raw{fill:none;stroke:#9ab;stroke-width:1}.smooth{fill:none;stroke:#0b5cad;stroke-width:2.5}"
    ".mark{stroke-width:1.5;stroke-dasharray:5 4}"
)


def draw(found: LearningRates, title: str) -> str:
    """Loss over learning rate, the latter on a logarithmic scale, with what was suggested."""
    rates, smoothed = found.learning_rates, [loss for loss in found.smoothed if math.isfinite(loss)]
    most = 1e4  # far above the plot, and not so far that a viewer stumbles
    first, last = math.log10(rates[0]), math.log10(rates[-1])
    low, high = _range(smoothed, [loss for loss in found.losses if math.isfinite(loss)])

    def x(rate: float) -> float:
        return _LEFT + (math.log10(rate) - first) / max(last - first, 1e-9) * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _HEIGHT - _BOTTOM - (loss - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def line(losses: Iterable[float], kind: str) -> str:
        points = " ".join(
            f"{x(r):.1f},{max(y(v), -most):.1f}" for r, v in zip(rates, losses, strict=True) if math.isfinite(v)
        )
        return f'<polyline class="{kind}" clip-path="url(#plot)" points="{points}"/>'

    parts = [f'<text class="title" x="{_LEFT}" y="26">{escape(title)}</text>']
    for decade in range(math.ceil(first - 0.01), math.floor(last + 0.01) + 1):
        at = x(10.0**decade)
        parts.append(f'<line class="faint" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{10.0**decade:g}</text>')
    for value in _ticks(low, high):
        at = y(value)
        parts.append(f'<line class="faint" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    parts += [line(found.losses, "raw"), line(found.smoothed, "smooth")]
    marks = (("steepest", found.steepest, "#187a2f"), ("a tenth of divergence", found.tenth, "#b3261e"))
    for number, (name, rate, colour) in enumerate(marks):
        if rate is None:
            continue
        text = f"{name}: {rate:.2g}" + (" (suggested)" if rate == found.suggestion else "")
        parts.append(f'<text style="fill:{colour}" x="{_LEFT + 280 * number}" y="46">{text}</text>')
        if rates[0] <= rate <= rates[-1]:
            at = x(rate)
            ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"'
            parts.append(f'<line class="mark" stroke="{colour}" {ends}/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">learning rate</text>')
    up = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text transform="translate(18 {up}) rotate(-90)" text-anchor="middle">loss of a batch</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}"><style>{_STYLE}</style>\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n'
        f'<clipPath id="plot"><rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM}"/></clipPath>\n{body}\n</svg>\n'
    )


def _range(smoothed: list[float], raw: list[float]) -> tuple[float, float]:
    """The losses worth seeing: not those of the last steps, which may be millions."""
    if not smoothed:
        return 0.0, 1.0
    low, begin = min(raw), smoothed[0]
    high = min(max(smoothed), low + 1.8 * max(begin - low, 0.1 * abs(begin)))
    high = max(high, begin)
    room = max(high - low, abs(high) * 0.01, 1e-9) * 0.06
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= next(f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= 8)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
