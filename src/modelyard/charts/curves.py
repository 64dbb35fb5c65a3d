"""The curves of a run: each metric of training and validation over the steps, learning rate and speed."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from modelyard.charts.draw import HEIGHT, WIDTH, Mark, Series, draw, is_number

_BESIDES = ("step", "epoch", "seconds", "average_examples_per_second")
_FIRST, _LAST = ("loss", "accuracy"), ("learning_rate", "examples_per_second")
_NAMES = {"learning_rate": "learning rate", "examples_per_second": "speed, examples per second"}
_STYLES = (("train", "training", "dashed", 1), ("validation", "validation", "line", 0), ("test", "test", "points", 3))
_MOST = 24
_COLOURS = (
    ":host,.modelyard-curves{--paper:#fff;--ink:#1c2024;--faint:#667078;--line:#dde2e6;--best:#0b7a4b}"
    "@media (prefers-color-scheme:dark){:host,.modelyard-curves{--paper:#14171a;--ink:#e6e9ec;--faint:#98a2ab;"
    "--line:#333a41;--best:#5fd39b}}"
)


class Curve(NamedTuple):
    """The values of a metric on a split. ``values`` has None where it was not finite."""

    steps: list[int]
    values: list[float | None]


class Figure(NamedTuple):
    """A chart and its title."""

    title: str
    svg: str


class Curves:
    """The curves of a run. A notebook shows them as charts; they need no plotting library.

    Args:
        rows: the rows of metrics.jsonl.
        best_step: the step of the best model, if one is kept.
        name: the name of the run.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], best_step: int | None = None, name: str = "") -> None:
        self.name, self.best_step = name, best_step
        self.by_metric = curves_of(rows)

    def __repr__(self) -> str:
        return f"<curves of {self.name or 'a run'}: {', '.join(self.by_metric) or 'none yet'}>"

    def figures(self) -> list[Figure]:
        """Returns a chart for each metric, then learning rate and speed."""
        found = []
        for metric, splits in self.by_metric.items():
            series = [
                Series(name, splits[split].steps, splits[split].values, style, colour)  # type: ignore[arg-type]
                for split, name, style, colour in _STYLES
                if split in splits
            ]
            if metric in _LAST:
                series = [Series("", one.x, one.y, "line", 2) for one in series[:1]]
            is_evaluated = any(split != "train" for split in splits)
            marks = [Mark(self.best_step, f"best: step {self.best_step}")] if self.best_step and is_evaluated else []
            title = _NAMES.get(metric, metric)
            svg = draw(series, "step", f"{title}: {_in_words(splits)}", marks=marks, may_be_log=metric == "loss")
            if svg:
                found.append(Figure(title, svg))
        return found

    def save(self, path: str | Path) -> Path:
        """Writes the charts as one SVG file, and returns its path."""
        target = Path(path).expanduser()
        target.write_text(self._repr_svg_(), encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        """Returns the charts for a notebook."""
        boxes = "".join(
            f'<figure style="margin:0"><figcaption>{html.escape(one.title)}</figcaption>{one.svg}</figure>'
            for one in self.figures()
        )
        grid = "display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:1rem"
        style = f"<style>{_COLOURS}.modelyard-curves{{background:var(--paper);color:var(--ink)}}{chart_style()}</style>"
        return f'<div class="modelyard-curves" style="{grid}">{style}{boxes or "no curves yet"}</div>'

    def _repr_svg_(self) -> str:
        """Returns all charts in one SVG."""
        figures = self.figures()
        tall = HEIGHT + 24
        parts = [
            f'<g transform="translate({n % 2 * WIDTH} {n // 2 * tall})"><text class="name" x="14" y="16" '
            f'font-weight="600">{html.escape(one.title)}</text><g transform="translate(0 22)">{one.svg}</g></g>'
            for n, one in enumerate(figures)
        ]
        width, height = min(max(len(figures), 1), 2) * WIDTH, max(-(-len(figures) // 2), 1) * tall
        parts = [part.replace("<svg ", f'<svg width="{WIDTH}" height="{HEIGHT}" ', 1) for part in parts]
        style = f"{_COLOURS.replace(':host,', '')}{chart_style()}.chart{{width:{WIDTH}px}}text.name{{fill:var(--ink)}}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="modelyard-curves" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" style="background:var(--paper);font:12px sans-serif">'
            f"<style>{style}</style>{''.join(parts)}</svg>"
        )


def curves_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Returns the curves by metric and split: losses and accuracy first, learning rate and speed last.

    Args:
        rows: the rows of metrics.jsonl, by anybody: what is no number is left out.
    """
    found: dict[str, dict[str, dict[int, float | None]]] = {}
    for row in rows:
        step, split = row.get("step"), row.get("split")
        if not is_number(step) or split not in ("train", "validation", "test"):
            continue
        for key, value in row.items():
            if key not in _BESIDES and (value is None or is_number(value)) and len(key) < 200:
                own = found.setdefault(key, {}).setdefault(split, {})
                own[int(step)] = None if value is None else float(value)  # type: ignore[arg-type] # a number
    found = {
        key: splits for key, splits in found.items() if any(v is not None for s in splits.values() for v in s.values())
    }
    names = [*(name for name in _FIRST if name in found)]
    names += [name for name in found if name not in (*_FIRST, *_LAST)]
    names += [name for name in _LAST if name in found]
    return {
        name: {
            split: Curve([*map(int, sorted(points))], [points[step] for step in sorted(points)])
            for split, points in found[name].items()
        }
        for name in names[:_MOST]
    }


def chart_style() -> str:
    """Returns the styles of charts."""
    return files("modelyard.charts").joinpath("templates/chart.css").read_text(encoding="utf-8")


def _in_words(splits: Mapping[str, Curve]) -> str:
    parts = []
    for split, name, _, _ in _STYLES:
        values = [value for value in splits[split].values if value is not None] if split in splits else []
        if values:
            parts.append(f"{name} from {values[0]:.4g} to {values[-1]:.4g}")
    return "; ".join(parts)
