"""Numbers of a leaderboard in words for people: the same on the console and on every page."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from modelyard.comparison.board import BEST, TIED, UNKNOWN, Entrant, Leaderboard, Score

MARKS = {BEST: "★", TIED: "≈", UNKNOWN: "?"}
LEGEND = (
    "★ best mean; ≈ not significantly different from it (two-sided test at 5 %, in pairs over common seeds or "
    "Welch's; no correction for several comparisons); ? a single seed, so not known. ± is the sample standard "
    "deviation over the seeds, whose number follows. Ranks treat what does not differ as a tie."
)
COSTS: dict[str, tuple[str, Callable[[Score], float | None]]] = {
    "parameters": ("parameters", lambda score: score.parameters),
    "flops": ("FLOPs", lambda score: score.flops),
    "seconds": ("training seconds", lambda score: score.seconds),
    "images_per_second": ("images/s", lambda score: score.images_per_second),
}
"""What a result costs: its name and how to read it."""


def is_share(board: Leaderboard) -> bool:
    """Whether the metric is a share, which people read as a percentage."""
    values = [score.mean for entrant in board.entrants for score in entrant.scores.values()]
    return "accuracy" in board.metric and all(0 <= value <= 1 for value in values)


def number(value: float, share: bool) -> str:
    """A score, without its unit."""
    return f"{100 * value:.2f}" if share else f"{value:.4g}"


def result(score: Score | None, share: bool) -> str:
    """Mean ± spread (seeds) and its mark; a gap is a dash."""
    if score is None:
        return "–"
    text = number(score.mean, share) + (f" ± {number(score.spread, share)}" if score.spread is not None else "")
    return f"{text} ({score.n}) {MARKS.get(score.mark, '')}".strip()


def large(value: float | None) -> str:
    """A number of parameters, operations or images: 11.2 M."""
    if value is None:
        return "–"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def over_datasets(entrant: Entrant, of: Callable[[Score], float | None]) -> str:
    """What an entrant has of a cost: one number, or from … to … over the datasets."""
    return _range(value for score in entrant.scores.values() if (value := of(score)) is not None)


def _range(values: Iterable[float]) -> str:
    found = sorted(values)
    if not found:
        return "–"
    low, high = large(found[0]), large(found[-1])
    return low if low == high else f"{low} – {high}"


def rank(value: float | None) -> str:
    """A mean rank."""
    return "–" if value is None else f"{value:.2f}"


def heading(board: Leaderboard) -> str:
    """What is compared."""
    unit = " in %" if is_share(board) else ""
    better = "more" if board.mode == "max" else "less"
    return f"{board.split} {board.metric}{unit}, {better} is better"
