"""Hooks that end training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from modelyard.errors import TrainingError
from modelyard.loop.catalog import EarlyStopOptions, StopAtOptions
from modelyard.loop.hooks import Hook
from modelyard.loop.ranking import Ranking

if TYPE_CHECKING:
    from modelyard.engine.base import StepMetrics
    from modelyard.loop.trainer import Trainer


class EarlyStop(Hook):
    """Stops when a validation metric has not improved for some evaluations."""

    options: EarlyStopOptions
    order = 60
    needs_evaluation = True

    def __init__(self, options: EarlyStopOptions) -> None:
        super().__init__(options)
        self._best: float | None = None
        self._waited = 0

    def on_begin(self, loop: Trainer) -> None:
        """Checks that the metric exists."""
        loop.check_evaluates(f"hook {self.name}")
        loop.check_metric(self.options.metric, f"hook {self.name}")

    def on_evaluation(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Counts evaluations since the last improvement."""
        if split != "validation":
            return
        ranking = Ranking.choose(self.options.metric, self.options.mode, row)
        value = ranking.value(row)
        if self._best is None or ranking.is_better(value, self._best, self.options.min_delta):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.options.patience:
            loop.stop(f"{ranking.metric} has not improved on {self._best:.4f} for {self._waited} evaluations")

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and the evaluations since then."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues counting."""
        self._best, self._waited = state["best"], state["waited"]


class StopAt(Hook):
    """Stops when a validation metric reaches a value."""

    options: StopAtOptions
    order = 60
    needs_evaluation = True

    def on_begin(self, loop: Trainer) -> None:
        """Checks that the metric exists."""
        loop.check_evaluates(f"hook {self.name}")
        loop.check_metric(self.options.metric, f"hook {self.name}")

    def on_evaluation(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Compares with the threshold."""
        if split != "validation":
            return
        ranking = Ranking.choose(self.options.metric, self.options.mode, row)
        value = ranking.value(row)
        if not ranking.is_better(self.options.value, value):
            loop.stop(f"{ranking.metric} {value:.4f} has reached {self.options.value:g}")


class NanGuard(Hook):
    """Stops with an error when the loss is NaN or infinite, before it is saved."""

    order = -20

    def on_steps(self, loop: Trainer, metrics: StepMetrics) -> None:
        """Checks the loss of every step."""
        bad = np.flatnonzero(~np.isfinite(metrics["loss"]))
        if len(bad):
            first = int(bad[0])
            step = loop.step - len(metrics["loss"]) + first + 1
            raise TrainingError(
                f"the loss became {float(metrics['loss'][first])} at step {step}. The checkpoints before it are kept. "
                "Try a lower learning_rate, warmup, clip_norm, or a wider precision."
            )
