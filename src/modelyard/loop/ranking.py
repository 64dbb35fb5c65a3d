"""Compares values of a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelyard.errors import UserError, unknown

_LESS_IS_BETTER = ("loss", "error", "perplexity", "distance", "mae", "mse", "rmse")
_NOT_METRICS = ("step", "epoch", "split", "seconds")


@dataclass(frozen=True)
class Ranking:
    """A metric and its direction, ``mode`` "max" or "min"."""

    metric: str
    mode: str

    @classmethod
    def choose(cls, metric: str, mode: str, row: Mapping[str, Any]) -> Ranking:
        """Resolves ``auto``: accuracy if there is one, else the loss; lower is better for losses and errors."""
        names = [name for name in row if name not in _NOT_METRICS]
        if metric == "auto":
            metric = "accuracy" if "accuracy" in row else "loss"
        if metric not in names:
            raise UserError(unknown("metric", metric, names))
        if mode == "auto":
            mode = "min" if any(word in metric for word in _LESS_IS_BETTER) else "max"
        return cls(metric, mode)

    def value(self, row: Mapping[str, Any]) -> float:
        """Returns the metric in an evaluation row."""
        return float(row[self.metric])

    def key(self, value: float) -> float:
        """Returns a sort key: the best first, NaN last."""
        if math.isnan(value):
            return math.inf
        return -value if self.mode == "max" else value

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Returns whether ``value`` is better by more than ``by``."""
        return self.key(value) < self.key(than) - by
