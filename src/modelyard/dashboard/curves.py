"""The curves of a run: metrics.jsonl, read once and from then on where reading stopped.

A file may have gigabytes. When a split has `MOST_POINTS`, two of them become one, which keeps the mean and the extremes
of both. So memory has a limit, and no spike disappears.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any

from modelyard.dashboard.run_files import metrics_of, open_plain, parse_row

MOST_POINTS = 4096
_MOST_METRICS = 200
_PIECE = 1 << 20
_LONGEST_LINE = 1 << 20
_MARK = 256
"""Bytes before the place where reading stopped. If they differ, the file was cut and has grown again."""
_AXES = ("step", "epoch", "seconds")
_MISSING = float("nan")


class Split:
    """The points of one split: a point is the mean of ``stride`` rows, at the place of the last of them."""

    def __init__(self) -> None:
        self.stride = 1
        self.axes = {name: array("d") for name in _AXES}
        self.means: dict[str, array[float]] = {}
        self.lows: dict[str, array[float]] = {}
        self.highs: dict[str, array[float]] = {}
        self._pending: list[dict[str, float]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row."""
        self._pending.append(row)
        if len(self._pending) < self.stride:
            return
        rows, self._pending = self._pending, []
        for name, axis in self.axes.items():
            axis.append(rows[-1].get(name, _MISSING))
        count = len(self.axes["step"])
        for name in metrics_of(rows[-1]):
            if name not in self.means and len(self.means) < _MOST_METRICS:
                self.means[name] = array("d", [_MISSING]) * (count - 1)
                if self.stride > 1:
                    self.lows[name], self.highs[name] = array("d", self.means[name]), array("d", self.means[name])
        for name, means in self.means.items():
            values = [row[name] for row in rows if name in row]
            means.append(sum(values) / len(values) if values else _MISSING)
            if self.stride > 1:
                self.lows[name].append(min(values, default=_MISSING))
                self.highs[name].append(max(values, default=_MISSING))
        if count >= MOST_POINTS:
            self._halve()

    def _halve(self) -> None:
        if self.stride == 1:
            self.lows = {name: array("d", values) for name, values in self.means.items()}
            self.highs = {name: array("d", values) for name, values in self.means.items()}
        self.stride *= 2
        self.axes = {name: values[1::2] for name, values in self.axes.items()}
        self.means = {name: merged(values, 2, _mean) for name, values in self.means.items()}
        self.lows = {name: merged(values, 2, min) for name, values in self.lows.items()}
        self.highs = {name: merged(values, 2, max) for name, values in self.highs.items()}

    def curve(self, name: str, most: int) -> dict[str, Any] | None:
        """Returns the points of a metric, at most ``most`` of them, as lists; None if there is no such metric.

        What is missing or not finite is None.
        """
        if name not in self.means:
            return None
        count, means = len(self.axes["step"]), self.means[name]
        many = -(-count // most)
        found: dict[str, Any] = {axis: _listed(values[many - 1 :: many]) for axis, values in self.axes.items()}
        if many > 1 and count % many:  # the last point counts too
            for axis, values in self.axes.items():
                found[axis].append(_plain(values[-1]))
        found["mean"] = _listed(merged(means, many, _mean))
        if many > 1 or self.stride > 1:
            found["low"] = _listed(merged(self.lows.get(name, means), many, min))
            found["high"] = _listed(merged(self.highs.get(name, means), many, max))
        last = [row[name] for row in self._pending if name in row]
        if last:  # rows that are no point yet
            for axis in _AXES:
                found[axis].append(_plain(self._pending[-1].get(axis, _MISSING)))
            for key, function in (("mean", _mean), ("low", min), ("high", max)):
                if key in found:
                    found[key].append(function(last))
        return found | {"rows": many * self.stride}


def merged(values: array[float], count: int, function: Any) -> array[float]:
    """Returns a number for every ``count`` values: that of ``function`` for those that are not missing."""
    if count == 1:
        return values
    found = array("d")
    for start in range(0, len(values), count):
        known = [value for value in values[start : start + count] if value == value]
        found.append(function(known) if known else _MISSING)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _plain(value: float) -> float | None:
    return value if value == value else None


def _listed(values: array[float]) -> list[float | None]:
    return [value if value == value else None for value in values]


class MetricsReader:
    """Reads a metrics.jsonl that grows.

    Args:
        path: the file, which need not exist.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.splits: dict[str, Split] = {}
        self.read, self.size = 0, 0
        self._mark, self._file = b"", 0
        self._skips = False
        self.guard = threading.Lock()

    def advance(self, seconds: float) -> None:
        """Reads on, for about so many seconds. Then ``read`` of ``size`` bytes are read."""
        with self.guard:
            handle = open_plain(self.path)
            if handle is None:
                self._start_over(0)
                self.size = 0
                return
            try:
                self._advance(handle, time.monotonic() + seconds)
            except OSError:
                return
            finally:
                os.close(handle)

    def _advance(self, handle: int, end: float) -> None:
        status = os.fstat(handle)
        self.size = status.st_size
        mark = os.pread(handle, len(self._mark), self.read - len(self._mark)) if self._mark else b""
        if status.st_ino != self._file or self.size < self.read or mark != self._mark:
            self._start_over(status.st_ino)
        while self.read < self.size:
            data = os.pread(handle, _PIECE, self.read)
            whole, newline, _ = data.rpartition(b"\n")
            if not newline:
                if len(data) < _LONGEST_LINE:
                    return  # it is being written
                self.read, self._skips = self.read + len(data), True
                continue
            lines = whole.split(b"\n")
            for line in lines[1:] if self._skips else lines:
                row = parse_row(line)
                if row is not None and (row["split"] in self.splits or len(self.splits) < 10):
                    self.splits.setdefault(row["split"], Split()).add(row)
            self.read, self._skips = self.read + len(whole) + 1, False
            self._mark = (whole + newline)[-_MARK:]
            if time.monotonic() > end:
                return

    def _start_over(self, file: int) -> None:
        self.splits, self.read, self._mark, self._file, self._skips = {}, 0, b"", file, False
