"""The leaderboard as files: CSV for programs, Markdown and HTML for people; and its numbers as text."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.comparison.leaderboard import Entrant, Leaderboard, Score
from modelyard.comparison.plots import COLOURS, MAX_NAME, Point, scatter, templates, with_unit
from modelyard.comparison.significance import BEST, TIED, UNKNOWN
from modelyard.config.yaml_file import inline
from modelyard.system.files import explain, write_text
from modelyard.system.text import aligned

MARKS = {BEST: "★", TIED: "≈", UNKNOWN: "?"}
LEGEND = (
    "★ best mean; ≈ not significantly different from it, with which it shares a rank; ? not known: a single seed, or "
    "noise hides the difference. The tests are two-sided at 5 %, over examples and seeds, paired over examples, and "
    "corrected for all pairs of a dataset (Holm). ± is the sample standard deviation over the seeds; their number "
    "follows (seeds × folds), and the 95 % confidence interval of the mean. Intervals may overlap where the paired "
    "test finds a difference."
)
COSTS = {
    "parameters": "parameters",
    "flops": "FLOPs",
    "seconds": "training seconds",
    "images_per_second": "images/s",
}
"""The attributes of a score that are costs, with their names in tables and plots."""
_PLOTTED = ("flops", "parameters", "seconds")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\`*_[]<>|#~&"} | {"\n": " ", "\r": " "})


PAGES = tuple(f"leaderboard.{ending}" for ending in ("csv", "md", "html"))
"""The files that `write_pages` writes."""


def write_pages(board: Leaderboard, folder: str) -> None:
    """Writes `PAGES` to a folder or URL, each atomically."""
    if not storage.is_remote(folder):
        with explain(Path(folder), "make the folder"):
            Path(folder).mkdir(parents=True, exist_ok=True)
    columns, *rows = table_rows(board)
    percent = is_percentage(board)
    runs = sum(score.n * max(score.folds, 1) for entrant in board.entrants for score in entrant.scores.values())
    counts = ((len(board.entrants), "model"), (len(board.datasets), "dataset"), (runs, "run"))
    numbered = any(len(entrant.name) > MAX_NAME for entrant in board.entrants)
    context = {
        "board": board,
        "heading": heading(board),
        "sizes": ", ".join(f"{count} {what}{'s' if count != 1 else ''}" for count, what in counts),
        "columns": columns,
        "rows": rows,
        "legend": LEGEND,
        "numbered": numbered,  # names are too long for the plots, which show numbers instead
        "classes": {BEST: "best", TIED: "tied"},
        "marks": MARKS,
        "costs": COSTS,
        "over_datasets": over_datasets,
        "figures": [(dataset, _plots(board, dataset, percent, numbered)) for dataset in board.datasets],
        "colours": COLOURS,
        "number": lambda value: number(value, percent),
        "trainings": trainings,
        "interval_of": lambda score: interval_text(score, percent),
    }
    environment = templates()
    environment.filters |= {"inline": inline, "rank": rank, "markdown": lambda text: text.translate(_MARKDOWN)}
    texts = [csv_text(board)]
    texts += [environment.get_template(f"leaderboard.{ending}").render(context) for ending in ("md", "html")]
    for name, text in zip(PAGES, texts, strict=True):
        if storage.is_remote(folder):
            storage.write_bytes(storage.join(folder, name), text.encode())
        else:
            write_text(Path(folder, name), text)


def csv_text(board: Leaderboard) -> str:
    """Returns one line per entrant and dataset."""
    options = list(dict.fromkeys(key for entrant in board.entrants for key in entrant.options))
    columns = (
        "entrant", "model", *options, "dataset", "metric", "split", "mean", "spread", "low", "high", "seeds",
        "folds", "examples", "looks", "rank", "mark", "p", "mean_rank", *COSTS,
    )  # fmt: skip
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_without_formula(column) for column in columns)
    for entrant in board.entrants:
        for dataset in board.datasets:
            score = entrant.scores.get(dataset)
            if score is None:
                continue
            own = [entrant.options.get(key) for key in options]
            row: list[Any] = [entrant.name, entrant.model, *own, dataset, board.metric, board.split]
            row += [score.mean, score.spread, *(score.interval or (None, None))]
            row += [score.n, score.folds or None, score.examples, score.looks]
            row += [score.rank, score.mark, score.p, entrant.mean_rank]
            row += [getattr(score, cost) for cost in COSTS]
            writer.writerow("" if value is None else _without_formula(value) for value in row)
    for dataset, value in board.baselines.items():
        row = [f"{board.baseline} (baseline)", "", *("" for _ in options), dataset, board.metric, board.split, value]
        writer.writerow(_without_formula(one) for one in [*row, *[""] * (len(columns) - len(row))])
    return out.getvalue()


def _without_formula(value: Any) -> Any:
    """Puts a quote before text that a spreadsheet would evaluate; numbers stay numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(value)
        return f"'{text}" if text.startswith(_FORMULA) else text
    return value


def _plots(board: Leaderboard, dataset: str, percent: bool, numbered: bool) -> list[tuple[str, str]]:
    """Returns the name of each cost, and the SVG plot of the metric against it."""
    y_name, scale = f"{board.split} {board.metric}", 1.0
    if percent:
        y_name, scale = f"{y_name} in %", 100.0
    plots = []
    for cost in _PLOTTED:
        points = [
            Point(entrant.name, float(x), scale * score.mean, _scaled(score.interval, scale), index)
            for index, entrant in enumerate(board.entrants)
            if (score := entrant.scores.get(dataset)) is not None and (x := getattr(score, cost)) is not None
        ]
        svg = scatter(points, COSTS[cost], y_name, numbered=numbered, most=100 if percent else math.inf)
        plots += [(COSTS[cost], svg)] if svg else []
    return plots


def _scaled(ends: tuple[float, float] | None, scale: float) -> tuple[float, float] | None:
    return None if ends is None else (scale * ends[0], scale * ends[1])


# -- numbers as text, the same on the console and on every page -----------------------------------------------------


def as_text(board: Leaderboard) -> str:
    """Returns the board as text: the heading, the table, and what is to be known of it."""
    return "\n".join([heading(board), "", aligned(table_rows(board)), "", *remarks(board)])


def remarks(board: Leaderboard) -> list[str]:
    """Returns what follows the table: the legend, the notes, and the runs that are not counted."""
    reasons = [f"{run.name}: {run.status}" + (f" – {run.reason}" if run.reason else "") for run in board.unfinished]
    return [LEGEND, *(f"note: {n}" for n in board.notes), *(f"not counted: {reason}" for reason in reasons)]


def heading(board: Leaderboard) -> str:
    """Returns the metric that is compared, in words."""
    unit = " in %" if is_percentage(board) else ""
    better = "higher" if board.mode == "max" else "lower"
    looks = f", best of {board.looks} evaluations on this split" if board.looks > 1 else ""
    return f"{board.split} {board.metric}{unit}, {better} is better{looks}"


def table_rows(board: Leaderboard) -> list[list[str]]:
    """Returns the table as text: the names of the columns, then one row per entrant."""
    percent = is_percentage(board)
    rows = [["model", "mean rank", *board.datasets, *COSTS.values()]]
    for entrant in board.entrants:
        results = [result(entrant.scores.get(dataset), percent) for dataset in board.datasets]
        costs = [over_datasets(entrant, cost) for cost in COSTS]
        rows.append([entrant.name, rank(entrant.mean_rank), *results, *costs])
    if board.baselines:
        known = [board.baselines.get(dataset) for dataset in board.datasets]
        levels = ["–" if value is None else number(value, percent) for value in known]
        rows.append([f"{board.baseline} (baseline)", "–", *levels, *["–"] * len(COSTS)])
    return rows


def is_percentage(board: Leaderboard) -> bool:
    """Returns whether the metric is shown in percent: an accuracy from 0 to 1."""
    values = [score.mean for entrant in board.entrants for score in entrant.scores.values()]
    return "accuracy" in board.metric and all(0 <= value <= 1 for value in values)


def number(value: float, percent: bool) -> str:
    """Returns a score without its unit."""
    return f"{100 * value:.2f}" if percent else f"{value:.4g}"


def result(score: Score | None, percent: bool) -> str:
    """Returns mean ± standard deviation (seeds), interval and mark; a dash for a missing score."""
    if score is None:
        return "–"
    text = number(score.mean, percent) + (f" ± {number(score.spread, percent)}" if score.spread is not None else "")
    return " ".join(
        filter(None, (f"{text} ({trainings(score)})", interval_text(score, percent), MARKS.get(score.mark, "")))
    )


def trainings(score: Score) -> str:
    """Returns the number of seeds, and of folds if there are any: 2 × 5."""
    return f"{score.n} × {score.folds}" if score.folds > 1 else str(score.n)


def interval_text(score: Score, percent: bool) -> str:
    """Returns the confidence interval of a score, such as [93.1, 96.4]; empty if it is not known."""
    if score.interval is None:
        return ""
    low, high = (f"{100 * value:.1f}" if percent else f"{value:.3g}" for value in score.interval)
    return f"[{low}, {high}]"


def rank(value: float | None) -> str:
    """Returns a mean rank."""
    return "–" if value is None else f"{value:.2f}"


def over_datasets(entrant: Entrant, cost: str) -> str:
    """Returns a cost of an entrant: one number, or its range over the datasets."""
    values = sorted(value for score in entrant.scores.values() if (value := getattr(score, cost)) is not None)
    if not values:
        return "–"
    low, high = with_unit(values[0]), with_unit(values[-1])
    return low if low == high else f"{low} – {high}"
