"""The page of a report: one HTML file that needs no network and no script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from modelyard.charts.axes import with_unit
from modelyard.charts.curves import Curves, chart_style
from modelyard.charts.draw import Series, draw
from modelyard.comparison.plots import templates
from modelyard.reporting.calibration import BINS, Calibration
from modelyard.reporting.facts import Facts, Regression, SplitFacts, number, text
from modelyard.reporting.pictures import Pictures, matrix_picture
from modelyard.reporting.scores import THRESHOLDS, ClassScore
from modelyard.tuning.page import duration

MARKER = '<meta name="generator" content="Modelyard report">'
"""The first lines of every page have it."""
_MATRIX_WITH_NUMBERS, _MATRIX_CLASSES = 25, 1000
_MOST_ROWS = 150
_MOST_COUNTED = 40
"""Of more classes, only the table of their scores has the number of examples."""
_MOST_NUMBERS = 4
_LEVELS = {"problem": ("✖", "Problem"), "warning": ("▲", "Warning"), "note": ("●", "Note"), "fine": ("✔", "Fine")}


def page_text(facts: Facts, pictures: Pictures) -> str:
    """Returns the page as HTML."""
    run, split = facts.run, facts.split
    scripts = [files(package).joinpath(name).read_text(encoding="utf-8") for package, name in _SCRIPTS]
    script = "".join(scripts)
    classes = list(split.classes) if split is not None else []
    rows = sorted(classes, key=lambda one: (one.recall is None, one.recall if one.f1 is None else one.f1))
    context = {
        "facts": facts,
        "run": run,
        "split": split,
        "marker": MARKER,
        "levels": _LEVELS,
        "grave": [one for one in facts.findings if one.level != "fine"],
        "fine": [one for one in facts.findings if one.level == "fine"],
        "counted": _counted(facts),
        "curves": Curves(run.rows, run.best_step, run.name).figures(),
        "matrix": _matrix(split),
        "class_rows": rows[:_MOST_ROWS],
        "class_columns": _class_columns(rows, split),
        "left_out": max(0, len(rows) - _MOST_ROWS),
        "reliability": _reliability(split.calibration) if split is not None and split.calibration is not None else "",
        "thresholds": _thresholds(split),
        "regression": _regression(split.regression) if split is not None and split.regression is not None else [],
        "data_rows": _data_rows(facts),
        "pictures": pictures,
        "number": number,
        "text": text,
        "with_unit": with_unit,
        "duration": duration,
        "chart_style": chart_style(),
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    page: str = templates("modelyard.reporting").get_template("report.html").render(context)
    return page


_SCRIPTS = (("modelyard.tuning", "templates/search.js"), ("modelyard.reporting", "templates/report.js"))
"""Sorts tables; shows the values of charts."""


def _counted(facts: Facts) -> str:
    """Returns how many findings of each level there are, in words."""
    counts = {level: sum(one.level == level for one in facts.findings) for level in ("problem", "warning", "note")}
    parts = [f"{count} {level}{'s' if count != 1 else ''}" for level, count in counts.items() if count]
    return ", ".join(parts)


def _matrix(split: SplitFacts | None) -> dict[str, Any]:
    """Returns the confusion matrix in the order of the clusters: its cells, or a picture for many classes."""
    if split is None or not split.matrix or len(split.matrix) > _MATRIX_CLASSES:
        return {}
    order = list(split.order)
    counts = np.array(split.matrix)[np.ix_(order, order)]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [split.classes[n].name for n in order]
    if len(order) > _MATRIX_WITH_NUMBERS:
        return {"picture": matrix_picture(shares), "names": names}
    rows = [
        (
            name, int(line.sum()),
            [
                {"count": int(count), "share": float(share), "right": a == b, "title": f"{name} as {names[b]}"}
                for b, (count, share) in enumerate(zip(line, parts, strict=True))
            ],
        )
        for a, (name, line, parts) in enumerate(zip(names, counts, shares, strict=True))
    ]  # fmt: skip
    return {"rows": rows, "names": names}


def _class_columns(rows: Sequence[ClassScore], split: SplitFacts | None) -> list[tuple[str, str]]:
    """Returns the columns of the table of classes that some class has a value of: attribute and heading."""
    columns = [
        ("train_examples", "in training"), ("examples", split.split if split else ""), ("precision", "precision"),
        ("recall", "recall"), ("f1", "F1"), ("average_precision", "average precision"), ("threshold", "best threshold"),
        ("threshold_f1", "F1 there"),
    ]  # fmt: skip
    return [(name, title) for name, title in columns if any(getattr(one, name) is not None for one in rows)]


def _reliability(found: Calibration) -> str:
    total = sum(one.count for one in found.bins)
    middles = [(np.ceil(one.probability * BINS) - 0.5) / BINS for one in found.bins]
    bars = Series("share of predictions", middles, [one.count / total for one in found.bins], "bars", 7)
    line = Series("right", [one.probability for one in found.bins], [one.right for one in found.bins], "line", 0)
    words = "; ".join(f"said {one.probability:.2f}: right {one.right:.2f} of {one.count}" for one in found.bins)
    return draw(
        [bars, line], "probability", f"Reliability. {words}", x_ends=(0, 1), y_ends=(0, 1),
        diagonal=True,
    )  # fmt: skip


def _thresholds(split: SplitFacts | None) -> str:
    if split is None or not split.thresholds:
        return ""
    styles = ("dashed", "line", "line")
    series = [
        Series(name, THRESHOLDS, values, style, colour)  # type: ignore[arg-type] # a style
        for (name, values), style, colour in zip(split.thresholds.items(), styles, (1, 2, 0), strict=True)
    ]
    best = max(zip(split.thresholds["F1"], THRESHOLDS, strict=True))
    return draw(
        series, "threshold", f"Macro precision, recall and F1 by threshold; F1 is highest at {best[1]}", y_ends=(0, 1)
    )


def _regression(found: Regression) -> list[dict[str, Any]]:
    """Returns the charts of each number that is predicted."""
    charts = []
    for n, one in enumerate(found.numbers[:_MOST_NUMBERS]):
        true, said = ([row[n] for row in rows] for rows in (found.labels, found.predicted))
        centres, counts = zip(*found.histograms[n], strict=True)
        ends = (min((*true, *said), default=0), max((*true, *said), default=1))
        ends = ends if ends[1] > ends[0] else (ends[0] - 1, ends[1] + 1)
        errors = [b - a for a, b in zip(true, said, strict=True)]
        charts.append(
            {
                "score": one,
                "scatter": draw(
                    [Series("", true, said, "points", 0)], "label", f"Predicted against true {one.name}",
                    y_name="prediction", x_ends=ends, y_ends=ends, diagonal=True,
                ),
                "residuals": draw(
                    [Series("", said, errors, "points", 1)], "prediction", f"Residuals of {one.name} by prediction",
                    y_name="prediction − label",
                ),
                "histogram": draw(
                    [Series("", centres, counts, "bars", 0)], "prediction − label", f"Residuals of {one.name}",
                    y_name="examples",
                ),
            }
        )  # fmt: skip
    return charts


def _data_rows(facts: Facts) -> list[tuple[str, list[int], float]]:
    """Returns each class with its number of examples in the splits that are known, and its share of the largest."""
    counts = facts.run.counts
    if not counts or (len(facts.run.classes) > _MOST_COUNTED and facts.split is not None and facts.split.classes):
        return []
    first = next(iter(counts.values()))
    largest = max(max(first, default=1), 1)
    return [
        (name, [counts[split][n] for split in counts], first[n] / largest) for n, name in enumerate(facts.run.classes)
    ][:_MOST_ROWS]
