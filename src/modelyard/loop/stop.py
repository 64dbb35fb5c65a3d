"""Hooks that end training."""

from __future__ import annotations

from typing import Any

import numpy as np

from modelyard.engine.base import StepMetrics
from modelyard.errors import TrainingError
from modelyard.loop.catalog import EarlyStopOptions, StopAtOptions
from modelyard.loop.hooks import Hook
from modelyard.loop.ranking import Ranking
from modelyard.loop.trainer import Trainer


class EarlyStop(Hook):
    """Stops when a validation metric has not improved for some evaluations."""

    order = 60

    def __init__(self, options: EarlyStopOptions) -> None:
        super().__init__(options)
        self.wanted = options
        self._best: float | None = None
        self._waited = 0

    def begin(self, loop: Trainer) -> None:
        """Checks that there is such a metric."""
        loop.check_evaluates(f"hook {self.name}")
        loop.check_metric(self.wanted.metric, f"hook {self.name}")

    def evaluated(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Counts evaluations since the last improvement."""
        if split != "validation":
            return
        ranking = Ranking.choose(self.wanted.metric, self.wanted.mode, row)
        value = ranking.value(row)
        if self._best is None or ranking.is_better(value, self._best, self.wanted.min_delta):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.wanted.patience:
            loop.stop(f"{ranking.metric} has not improved on {self._best:.4f} for {self._waited} evaluations")

    def memory(self) -> dict[str, Any]:
        """The best value and how long ago it was."""
        return {"best": self._best, "waited": self._waited}

    def remember(self, memory: dict[str, Any]) -> None:
        """Goes on counting where it was."""
        self._best, self._waited = memory["best"], memory["waited"]


class StopAt(Hook):
    """Stops when a validation metric reaches a value."""

    order = 60

    def __init__(self, options: StopAtOptions) -> None:
        super().__init__(options)
        self.wanted = options

    def begin(self, loop: Trainer) -> None:
        """Checks that there is such a metric."""
        loop.check_evaluates(f"hook {self.name}")
        loop.check_metric(self.wanted.metric, f"hook {self.name}")

    def evaluated(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Compares with the threshold."""
        if split != "validation":
            return
        ranking = Ranking.choose(self.wanted.metric, self.wanted.mode, row)
        value = ranking.value(row)
        if not ranking.is_better(self.wanted.value, value):
            loop.stop(f"{ranking.metric} {value:.4f} has reached {self.wanted.value:g}")


class NanGuard(Hook):
    """Ends training with an error when the loss is not a number, before anything of it is saved."""

    order = -20

    def trained(self, loop: Trainer, metrics: StepMetrics) -> None:
        """Looks at the loss of every step."""
        bad = np.flatnonzero(~np.isfinite(metrics["loss"]))
        if len(bad):
            first = int(bad[0])
            step = loop.step - len(metrics["loss"]) + first + 1
            raise TrainingError(
                f"the loss became {float(metrics['loss'][first])} at step {step}. The checkpoints before it are kept. "
                "Try a lower learning_rate, warmup, clip_norm, or a wider precision."
            )
