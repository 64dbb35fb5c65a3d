"""Hooks that record and show how training goes: metrics, TensorBoard, profile, progress bar, log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from modelyard.data.dataset import TRAIN
from modelyard.loop.catalog import ProfilerOptions, TensorBoardOptions
from modelyard.loop.hooks import Hook
from modelyard.registry import Options
from modelyard.run.events import EventWriter, cut_events, event_offsets
from modelyard.run.metrics import MetricsFile, cut_metrics
from modelyard.system.console import bar

if TYPE_CHECKING:
    from modelyard.engine.base import StepMetrics
    from modelyard.loop.trainer import Trainer

log = logging.getLogger("modelyard")
_NOT_SCALARS = ("step", "split")
_FIRST = ("loss", "accuracy")
_BESIDES = {"step", "epoch", "split", "seconds", "learning_rate", "examples_per_second", "average_examples_per_second"}


class Throughput(Hook):
    """Adds ``examples_per_second`` since the last report, and the average since the start, to the training rows.

    Only time spent in training steps counts, without chunks that compile first.
    """

    order = -10

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._last = (0, 0.0)

    def on_log(self, loop: Trainer, row: dict[str, Any]) -> None:
        """Adds the speed since the last report and since the start."""
        steps, seconds = loop.pace.steps, loop.pace.seconds
        batch = loop.config.train_batch_size
        last_steps, last_seconds = self._last
        if seconds > last_seconds:
            row["examples_per_second"] = batch * (steps - last_steps) / (seconds - last_seconds)
            row["average_examples_per_second"] = batch * steps / seconds
        self._last = (steps, seconds)


class Metrics(Hook):
    """Writes rows to metrics.jsonl."""

    order = 10
    needs_training = False

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._known = 0

    def on_begin(self, loop: Trainer) -> None:
        """Truncates the file to the step the run resumes from."""
        cut_metrics(loop.directory.metrics, loop.step, self._known)
        self._file = MetricsFile(loop.directory.metrics)

    def state_dict(self) -> dict[str, Any]:
        """Returns the length of the file at a checkpoint, which need not be read again."""
        return {"offset": self._file.offset()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the length."""
        self._known = _length(state["offset"])

    def on_log(self, loop: Trainer, row: dict[str, Any]) -> None:
        """Writes a training row."""
        self._file.write(row)

    def on_evaluation(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Writes an evaluation row."""
        self._file.write(row)

    def on_end(self, loop: Trainer) -> None:
        """Closes the file."""
        self._file.close()


def _length(value: Any) -> int:
    """Checks the length of a file from a checkpoint."""
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not the length of a file")
    return value


class TensorBoard(Hook):
    """Writes event files: scalars of every split; at the start a sheet of images and the graph."""

    options: TensorBoardOptions
    order = 10
    needs_training = False

    def __init__(self, options: TensorBoardOptions) -> None:
        super().__init__(options)
        self._writers: dict[str, EventWriter] = {}
        self._known: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the lengths of the files at a checkpoint."""
        return {"offsets": event_offsets(self._folder)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the lengths."""
        self._known = {str(file): _length(length) for file, length in state["offsets"].items()}

    def on_begin(self, loop: Trainer) -> None:
        """Truncates the files to the step the run resumes from; writes images and graph of a new run."""
        self._folder = loop.directory.events
        cut_events(self._folder, loop.step, self._known)
        if loop.trains and loop.step == 0 and not any(self._folder.rglob("events.out.tfevents.*")):
            writer = self._writer(TRAIN)
            if self.options.graph:
                writer.graph(loop.engine.model)
            if self.options.images:
                images = loop.engine.task.summary_images(loop.engine.training_batch(0))
                if images is not None:
                    writer.images(0, "train/images", np.asarray(images))
            writer.flush()

    def on_log(self, loop: Trainer, row: dict[str, Any]) -> None:
        """Writes training scalars."""
        self._scalars(TRAIN, row)

    def on_evaluation(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Writes evaluation scalars."""
        self._scalars(split, row)

    def on_end(self, loop: Trainer) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _scalars(self, split: str, row: dict[str, Any]) -> None:
        writer = self._writer(split)
        writer.scalars(row["step"], {name: value for name, value in row.items() if name not in _NOT_SCALARS})
        writer.flush()

    def _writer(self, split: str) -> EventWriter:
        return self._writers.setdefault(split, EventWriter(self._folder / split))


class Profiler(Hook):
    """A profile of some steps, under profile/ in the run folder."""

    options: ProfilerOptions

    def __init__(self, options: ProfilerOptions) -> None:
        super().__init__(options)
        self._state = "waiting"
        self._profile = ExitStack()

    def on_begin(self, loop: Trainer) -> None:
        """Counts from the step this process continues from."""
        self._start = loop.step + self.options.start
        self._stop = self._start + self.options.steps

    def next_step(self, loop: Trainer) -> int | None:
        """Returns the step at which the profile begins or ends."""
        return {"waiting": self._start, "running": self._stop}.get(self._state)

    def on_steps(self, loop: Trainer, metrics: StepMetrics) -> None:
        """Starts or ends the profile."""
        if self._state == "waiting" and loop.step >= self._start:
            self._profile.enter_context(loop.engine.profile(loop.directory.profile))
            self._state = "running"
        elif self._state == "running" and loop.step >= self._stop:
            self._finish(loop)

    def on_end(self, loop: Trainer) -> None:
        """Ends a profile that the run was too short for."""
        if self._state == "running":
            self._finish(loop)
        elif self._state == "waiting":
            log.warning("no profile was made: it begins at step %d, training ended at %d", self._start, loop.step)

    def _finish(self, loop: Trainer) -> None:
        self._profile.close()
        self._state = "done"
        log.info("profile of steps %d to %d: %s", self._start + 1, loop.step, loop.directory.profile)


class Progress(Hook):
    """A progress bar, if there is a terminal."""

    order = 30

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._used = ExitStack()
        self._update: Callable[..., None] | None = None
        self._shown = 0.0

    def on_begin(self, loop: Trainer) -> None:
        """Starts the bar at the step the run resumes from."""
        shown = bar("training", loop.total_steps, done=loop.step, note="compiling")
        self._update = self._used.enter_context(shown)

    def on_steps(self, loop: Trainer, metrics: StepMetrics) -> None:
        """Moves the bar."""
        if self._update is not None and time.monotonic() - self._shown > 0.1:
            self._shown = time.monotonic()
            shown = "  ".join(f"{name} {float(metrics[name][-1]):.4f}" for name in _FIRST if name in metrics)
            self._update(loop.step, note=shown)

    def on_end(self, loop: Trainer) -> None:
        """Removes the bar."""
        self._used.close()
        self._update = None


class Log(Hook):
    """A line in the log for every report and every evaluation."""

    order = 20
    needs_training = False

    def on_log(self, loop: Trainer, row: dict[str, Any]) -> None:
        """Logs training metrics, with the speed if a hook measured it."""
        speed = f"  {row['examples_per_second']:,.0f} examples/s" if row.get("examples_per_second") else ""
        log.info("step %d  epoch %.2f  train  %s%s", row["step"], row["epoch"], _listed(row), speed)

    def on_evaluation(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Logs the metrics of a split."""
        log.info("step %d  epoch %.2f  %s  %s", row["step"], row["epoch"], split, _listed(row))


def _listed(row: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in row.items() if name not in _BESIDES)
