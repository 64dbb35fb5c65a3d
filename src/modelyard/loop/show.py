"""Hooks that show people how training goes."""

from __future__ import annotations

import logging
import time
from typing import Any

from modelyard.engine.base import StepMetrics
from modelyard.loop.hooks import Hook
from modelyard.loop.trainer import Trainer
from modelyard.registry import Options
from modelyard.system.console import console

log = logging.getLogger("modelyard")
_FIRST = ("loss", "accuracy")
_BESIDES = {"step", "epoch", "split", "seconds", "learning_rate", "examples_per_second", "average_examples_per_second"}


class Progress(Hook):
    """A progress bar, where there is a terminal."""

    order = 30

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._bar: Any = None
        self._shown = 0.0

    def begin(self, loop: Trainer) -> None:
        """Starts the bar at the step the run goes on from."""
        if not console().is_terminal:
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TextColumn("/"),
            TimeRemainingColumn(),
            console=console(),
            transient=True,
        )
        self._task = self._bar.add_task("", total=loop.total_steps, completed=loop.step, metrics="compiling")
        self._bar.start()

    def trained(self, loop: Trainer, metrics: StepMetrics) -> None:
        """Moves the bar."""
        if self._bar is not None and time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            shown = "  ".join(f"{name} {float(metrics[name][-1]):.4f}" for name in _FIRST if name in metrics)
            self._bar.update(self._task, completed=loop.step, metrics=shown)

    def end(self, loop: Trainer) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.update(self._task, completed=loop.step)
            self._bar.stop()
            self._bar = None


class Log(Hook):
    """A line in the log for every report and every evaluation."""

    order = 20

    def reported(self, loop: Trainer, row: dict[str, Any]) -> None:
        """Training metrics, with the speed if a hook measured it."""
        speed = f"  {row['examples_per_second']:,.0f} examples/s" if row.get("examples_per_second") else ""
        log.info("step %d  epoch %.2f  train  %s%s", row["step"], row["epoch"], _listed(row), speed)

    def evaluated(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Metrics of a split."""
        log.info("step %d  epoch %.2f  %s  %s", row["step"], row["epoch"], split, _listed(row))


def _listed(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in row.items() if name not in _BESIDES)
