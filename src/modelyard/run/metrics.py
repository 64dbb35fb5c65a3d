"""metrics.jsonl: one JSON object a line, in the order things happened."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelyard.run.files import explain

Row = dict[str, Any]


class MetricsFile:
    """Appends rows to metrics.jsonl, each with one write, so that a kill leaves at most the last line torn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain(path, "write"):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds a row. Numbers that are not finite become null, since JSON has none."""
        plain = {key: _plain(value) for key, value in row.items()}
        with explain(self.path, "write"):
            self._file.write(json.dumps(plain).encode() + b"\n")

    def close(self) -> None:
        """Makes it last."""
        with explain(self.path, "write"):
            os.fsync(self._file.fileno())
            self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """All whole rows."""
    return [row for _, row in _rows(path)]


def cut_metrics(path: Path, step: int) -> None:
    """Removes what was written after ``step``, and a torn last line."""
    end = 0
    for stop, row in _rows(path):
        if int(row.get("step", 0)) > step:
            break
        end = stop
    if path.exists() and path.stat().st_size != end:
        with explain(path, "write"):
            os.truncate(path, end)


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Each whole row and the offset behind it."""
    if not path.is_file():
        return
    end = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError:
                return
            end += len(line)
            if isinstance(row, dict):
                yield end, row


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
