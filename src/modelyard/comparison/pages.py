"""The leaderboard as files: CSV for programs, Markdown and HTML for people; and its numbers as text."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelyard.comparison.leaderboard import BEST, TIED, UNKNOWN, WORSE, Entrant, Leaderboard, Score
from modelyard.comparison.plots import COLOURS, MAX_NAME, Point, scatter
from modelyard.config.yaml_file import inline
from modelyard.system.files import explain, write_text

NAME = "leaderboard"
MARKS = {BEST: "★", TIED: "≈", UNKNOWN: "?"}
LEGEND = (
    "★ best mean; ≈ not significantly different from it (two-sided t-test at 5 %, paired over common seeds or "
    "Welch's, without correction for multiple comparisons); ? a single seed, so not known. ± is the sample standard "
    "deviation over the seeds; their number follows. Results that do not differ share a rank."
)
COSTS: dict[str, tuple[str, Callable[[Score], float | None]]] = {
    "parameters": ("parameters", lambda score: score.parameters),
    "flops": ("FLOPs", lambda score: score.flops),
    "seconds": ("training seconds", lambda score: score.seconds),
    "images_per_second": ("images/s", lambda score: score.images_per_second),
}
"""The costs of a result: the name of each and how to read it."""
_PLOTTED = ("flops", "parameters", "seconds")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\`*_[]<>|#~&"} | {"\n": " ", "\r": " "})


def page_files(folder: Path) -> list[Path]:
    """Returns the files that `write_pages` writes."""
    return [folder / f"{NAME}.{ending}" for ending in ("csv", "md", "html")]


def write_pages(board: Leaderboard, folder: Path) -> None:
    """Writes leaderboard.csv, leaderboard.md and leaderboard.html, each atomically."""
    with explain(folder, "make the folder"):
        folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(page_files(folder), (csv_text(board), markdown(board), html_page(board)), strict=True):
        write_text(path, text)


def csv_text(board: Leaderboard) -> str:
    """Returns one line per entrant and dataset."""
    options = list(dict.fromkeys(key for entrant in board.entrants for key in entrant.options))
    columns = (
        "entrant", "model", *options, "dataset", "metric", "split", "mean", "spread", "seeds", "rank", "mark", "p",
        "mean_rank", *COSTS,
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
            row += [score.mean, score.spread, score.n, score.rank, score.mark, score.p, entrant.mean_rank]
            row += [of(score) for _, of in COSTS.values()]
            writer.writerow("" if value is None else _without_formula(value) for value in row)
    return out.getvalue()


def _without_formula(value: Any) -> Any:
    """Puts a quote before text that a spreadsheet would evaluate; numbers stay numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(value)
        return f"'{text}" if text.startswith(_FORMULA) else text
    return value


def markdown(board: Leaderboard) -> str:
    """Returns the table, the notes and the unfinished runs."""
    columns, *rows = table_rows(board)
    lines = [f"# Leaderboard: {_escaped(heading(board))}", ""]
    lines.append(f"| {' | '.join(_escaped(column) for column in columns)} |")
    lines.append("|---|" + "---:|" * (len(columns) - 1))
    lines += [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in rows]
    lines += ["", _escaped(LEGEND)]
    if board.notes:
        lines += ["", *(f"- {_escaped(note)}" for note in board.notes)]
    if board.unfinished:
        lines += ["", "## Not counted", ""]
        lines += [
            f"- {_escaped(run.name)}: {_escaped(run.status)}" + (f" – {_escaped(run.reason)}" if run.reason else "")
            for run in board.unfinished
        ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.translate(_MARKDOWN)


def html_page(board: Leaderboard) -> str:
    """Returns one HTML file without scripts or links. All text is escaped: names may come from anywhere."""
    import jinja2

    percent = is_percentage(board)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.PackageLoader("modelyard.comparison")
    )
    environment.filters |= {
        "inline": inline,
        "rank": rank,
        "number": lambda value: number(value, percent),
        "hint": lambda score: (
            f"p = {score.p:.2g}" if score.p is not None else "" if score.mark == WORSE else score.mark
        ),
    }
    runs = sum(score.n for entrant in board.entrants for score in entrant.scores.values())
    counts = ((len(board.entrants), "model"), (len(board.datasets), "dataset"), (runs, "run"))
    numbered = any(len(entrant.name) > MAX_NAME for entrant in board.entrants)
    return environment.get_template("leaderboard.html").render(
        board=board,
        heading=heading(board),
        sizes=", ".join(f"{count} {what}{'s' if count != 1 else ''}" for count, what in counts) + ".",
        columns=table_rows(board)[0],
        numbered=numbered,  # names are too long for the plots: numbers stand for them
        bar_width=lambda entrant: _bar_width(entrant, len(board.entrants)),
        classes={BEST: "best", TIED: "tied"},
        marks=MARKS,
        costs=COSTS.values(),
        over_datasets=over_datasets,
        legend=LEGEND,
        figures=[(dataset, _plots(board, dataset, percent, numbered)) for dataset in board.datasets],
        colours=COLOURS,
    )


def _bar_width(entrant: Entrant, entrants: int) -> str:
    """Returns the width of the bar of the mean rank in percent: the longer, the better."""
    assert entrant.mean_rank is not None
    return f"{100.0 if entrants == 1 else 100 * (entrants - entrant.mean_rank + 0.5) / (entrants - 0.5):.0f}"


def _plots(board: Leaderboard, dataset: str, percent: bool, numbered: bool) -> list[tuple[str, str]]:
    """Returns the name of each cost, and the SVG plot of the metric against it."""
    y_name = f"{board.split} {board.metric}" + (" in %" if percent else "")
    scale = 100.0 if percent else 1.0
    plots = []
    for x_name, of in (COSTS[cost] for cost in _PLOTTED):
        points = [
            Point(entrant.name, float(x), score.mean, score.spread, index)
            for index, entrant in enumerate(board.entrants)
            if (score := entrant.scores.get(dataset)) is not None and (x := of(score)) is not None
        ]
        plots.append(
            (x_name, scatter(points, x_name, y_name, scale, numbered=numbered, most=100 if percent else math.inf))
        )
    return [(x_name, svg) for x_name, svg in plots if svg]


# -- numbers as text, the same on the console and on every page -----------------------------------------------------


def heading(board: Leaderboard) -> str:
    """Returns the metric that is compared, in words."""
    unit = " in %" if is_percentage(board) else ""
    better = "higher" if board.mode == "max" else "lower"
    return f"{board.split} {board.metric}{unit}, {better} is better"


def table_rows(board: Leaderboard) -> list[list[str]]:
    """Returns the table as text: the names of the columns, then one row per entrant."""
    percent = is_percentage(board)
    rows = [["model", "mean rank", *board.datasets, *(name for name, _ in COSTS.values())]]
    for entrant in board.entrants:
        results = [result(entrant.scores.get(dataset), percent) for dataset in board.datasets]
        costs = [over_datasets(entrant, of) for _, of in COSTS.values()]
        rows.append([entrant.name, rank(entrant.mean_rank), *results, *costs])
    return rows


def is_percentage(board: Leaderboard) -> bool:
    """Returns whether the metric is shown in percent: an accuracy from 0 to 1."""
    values = [score.mean for entrant in board.entrants for score in entrant.scores.values()]
    return "accuracy" in board.metric and all(0 <= value <= 1 for value in values)


def number(value: float, percent: bool) -> str:
    """Returns a score without its unit."""
    return f"{100 * value:.2f}" if percent else f"{value:.4g}"


def result(score: Score | None, percent: bool) -> str:
    """Returns mean ± standard deviation (seeds) and the mark; a dash for a missing score."""
    if score is None:
        return "–"
    text = number(score.mean, percent) + (f" ± {number(score.spread, percent)}" if score.spread is not None else "")
    return f"{text} ({score.n}) {MARKS.get(score.mark, '')}".strip()


def rank(value: float | None) -> str:
    """Returns a mean rank."""
    return "–" if value is None else f"{value:.2f}"


def over_datasets(entrant: Entrant, of: Callable[[Score], float | None]) -> str:
    """Returns a cost of an entrant: one number, or its range over the datasets."""
    values = sorted(value for score in entrant.scores.values() if (value := of(score)) is not None)
    if not values:
        return "–"
    low, high = _with_unit(values[0]), _with_unit(values[-1])
    return low if low == high else f"{low} – {high}"


def _with_unit(value: float) -> str:
    """Returns a large number with a unit, such as 11.2 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
