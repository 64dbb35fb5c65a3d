"""metrics.jsonl: one JSON object per line."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelyard import faults
from modelyard.system.files import explain

Row = dict[str, Any]


class MetricsFile:
    """Appends rows to metrics.jsonl, each with one write: after a kill, at most the last line is incomplete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain(path, "write"):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Adds a row. Numbers that are not finite become null, since JSON has none."""
        plain = {key: _plain(value) for key, value in row.items()}
        line = json.dumps(plain).encode() + b"\n"
        with explain(self.path, "write"):
            faults.reach(faults.FILE)
            written = self._file.write(line)
            if written != len(line):  # a full disk may take a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def offset(self) -> int:
        """Syncs the file to disk and returns its length."""
        with explain(self.path, "write"):
            faults.reach(faults.FILE)
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Syncs and closes the file."""
        with explain(self.path, "write"):
            os.fsync(self._file.fileno())
            self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """All complete rows. Lines that can't be read are left out."""
    return list(each_row(path))


def each_row(path: Path) -> Iterator[Row]:
    """Yields the rows of `read_metrics` one by one."""
    return (row for _, row in _rows(path))


def cut_metrics(path: Path, step: int, known: int = 0) -> None:
    """Removes rows after ``step``, and an incomplete last line.

    Args:
        path: the file.
        step: the last step to keep.
        known: a length up to which the file has no later rows. This part is not read.
    """
    size = path.stat().st_size if path.exists() else 0
    end = known if size >= known else 0
    for stop, row in _rows(path, end):
        if int(row.get("step", 0)) > step:
            break
        end = stop
    if end != size:
        with explain(path, "write"):
            faults.reach(faults.FILE)
            os.truncate(path, end)


def _rows(path: Path, start: int = 0) -> Iterator[tuple[int, Row]]:
    """Yields every complete row from ``start`` with its end."""
    if not path.is_file():
        return
    end = start
    with explain(path, "read"), open(path, "rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            end += len(line)
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if _is_row(row):
                yield end, row


def _is_row(row: Any) -> bool:
    """Whether a value is a row, with the types that all readers rely on."""
    return (
        isinstance(row, dict)
        and isinstance(row.get("step", 0), int)
        and isinstance(row.get("split", ""), str)
        and isinstance(row.get("seconds") or 0.0, int | float)
    )


def _plain(value: Any) -> Any:
    """A number of NumPy as a number of Python."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
