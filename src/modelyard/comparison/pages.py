"""The leaderboard as files: CSV for programs, Markdown and HTML for people."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from modelyard.comparison.board import Leaderboard
from modelyard.comparison.html import page
from modelyard.comparison.wording import COSTS, LEGEND, heading, is_share, over_datasets, rank, result
from modelyard.system.files import explain, write_text

NAME = "leaderboard"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\`*_[]<>|#~&"} | {"\n": " ", "\r": " "})


def page_files(folder: Path) -> list[Path]:
    """What `write_pages` writes."""
    return [folder / f"{NAME}.{ending}" for ending in ("csv", "md", "html")]


def write_pages(board: Leaderboard, folder: Path) -> None:
    """Writes leaderboard.csv, leaderboard.md and leaderboard.html, each whole or not at all."""
    with explain(folder, "make the folder"):
        folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(page_files(folder), (csv_text(board), markdown(board), page(board)), strict=True):
        write_text(path, text)


def csv_text(board: Leaderboard) -> str:
    """A line for every entrant on every dataset."""
    options = list(dict.fromkeys(key for entrant in board.entrants for key in entrant.options))
    columns = (
        "entrant", "model", *options, "dataset", "metric", "split", "mean", "spread", "seeds", "rank", "mark", "p",
        "mean_rank", *COSTS,
    )  # fmt: skip
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_harmless(column) for column in columns)
    for entrant in board.entrants:
        for dataset in board.datasets:
            score = entrant.scores.get(dataset)
            if score is None:
                continue
            own = [entrant.options.get(key) for key in options]
            row: list[Any] = [entrant.name, entrant.model, *own, dataset, board.metric, board.split]
            row += [score.mean, score.spread, score.n, score.rank, score.mark, score.p, entrant.mean_rank]
            row += [of(score) for _, of in COSTS.values()]
            writer.writerow("" if value is None else _harmless(value) for value in row)
    return out.getvalue()


def _harmless(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula gets a quote before it; numbers stay numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(value)
        return f"'{text}" if text.startswith(_FORMULA) else text
    return value


def markdown(board: Leaderboard) -> str:
    """A table of all, and what is not counted."""
    share = is_share(board)
    columns = ["model", "mean rank", *board.datasets, *(name for name, _ in COSTS.values())]
    lines = [f"# Leaderboard: {_escaped(heading(board))}", ""]
    lines.append(f"| {' | '.join(_escaped(column) for column in columns)} |")
    lines.append("|---|" + "---:|" * (len(columns) - 1))
    for entrant in board.entrants:
        cells = [entrant.name, rank(entrant.mean_rank)]
        cells += [result(entrant.scores.get(dataset), share) for dataset in board.datasets]
        cells += [over_datasets(entrant, of) for _, of in COSTS.values()]
        lines.append(f"| {' | '.join(_escaped(cell) for cell in cells)} |")
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
