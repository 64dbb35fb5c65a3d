"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def aligned(rows: Iterable[Sequence[Any]]) -> str:
    """Returns rows as lines of text, in columns: the first to the left, the others to the right."""
    cells = [[_short(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) if number else cell.ljust(width) for number, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    )
    return "\n".join(line.rstrip() for line in lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
