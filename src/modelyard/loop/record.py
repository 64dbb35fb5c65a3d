"""Hooks that record how training goes."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from modelyard.data.dataset import TRAIN
from modelyard.engine.base import StepMetrics
from modelyard.loop.catalog import ProfilerOptions, TensorBoardOptions
from modelyard.loop.hooks import Hook
from modelyard.loop.trainer import Trainer
from modelyard.registry import Options
from modelyard.run.events import EventWriter, cut_events, event_offsets
from modelyard.run.metrics import MetricsFile, cut_metrics

log = logging.getLogger("modelyard")
_NOT_SCALARS = ("step", "split")


class Throughput(Hook):
    """Adds ``examples_per_second`` since the last report, and the average since the start, to the training rows.

    Only time spent in training steps counts, without stretches that compile first.
    """

    order = -10

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._last = (0, 0.0)

    def reported(self, loop: Trainer, row: dict[str, Any]) -> None:
        """Speed since the last report and since the start."""
        steps, seconds = loop.pace.steps, loop.pace.seconds
        batch = loop.config.train_batch_size
        last_steps, last_seconds = self._last
        if seconds > last_seconds:
            row["examples_per_second"] = batch * (steps - last_steps) / (seconds - last_seconds)
            row["average_examples_per_second"] = batch * steps / seconds
        self._last = (steps, seconds)


class Metrics(Hook):
    """Rows in metrics.jsonl."""

    order = 10

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._known = 0

    def begin(self, loop: Trainer) -> None:
        """Cuts the file back to the step the run goes on from."""
        cut_metrics(loop.directory.metrics, loop.step, self._known)
        self._file = MetricsFile(loop.directory.metrics)

    def memory(self) -> dict[str, Any]:
        """How long the file is at a checkpoint: so much of it need never be read again."""
        return {"offset": self._file.offset()}

    def remember(self, memory: dict[str, Any]) -> None:
        """Takes the length back."""
        self._known = memory["offset"]

    def reported(self, loop: Trainer, row: dict[str, Any]) -> None:
        """A training row."""
        self._file.write(row)

    def evaluated(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """An evaluation row."""
        self._file.write(row)

    def end(self, loop: Trainer) -> None:
        """Makes it last."""
        self._file.close()


class TensorBoard(Hook):
    """Event files: scalars of every split; at the start a sheet of images and the graph."""

    order = 10

    def __init__(self, options: TensorBoardOptions) -> None:
        super().__init__(options)
        self.wanted = options
        self._writers: dict[str, EventWriter] = {}
        self._known: dict[str, int] = {}

    def memory(self) -> dict[str, Any]:
        """How long the files are at a checkpoint."""
        return {"offsets": event_offsets(self._folder)}

    def remember(self, memory: dict[str, Any]) -> None:
        """Takes the lengths back."""
        self._known = memory["offsets"]

    def begin(self, loop: Trainer) -> None:
        """Cuts the files back to the step the run goes on from; a new run gets images and graph."""
        self._folder = loop.directory.events
        cut_events(self._folder, loop.step, self._known)
        if loop.trains and loop.step == 0 and not any(self._folder.rglob("events.out.tfevents.*")):
            writer = self._writer(TRAIN)
            if self.wanted.graph:
                writer.graph(loop.engine.model)
            if self.wanted.images:
                images = loop.engine.task.summary_images(loop.engine.training_batch(0))
                if images is not None:
                    writer.images(0, "train/images", np.asarray(images))
            writer.flush()

    def reported(self, loop: Trainer, row: dict[str, Any]) -> None:
        """Training scalars."""
        self._scalars(TRAIN, row)

    def evaluated(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Evaluation scalars."""
        self._scalars(split, row)

    def end(self, loop: Trainer) -> None:
        """Ends the files."""
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

    def __init__(self, options: ProfilerOptions) -> None:
        super().__init__(options)
        self.wanted = options
        self._state = "waiting"

    def begin(self, loop: Trainer) -> None:
        """Counts from where this process goes on."""
        self._start = loop.step + self.wanted.start
        self._stop = self._start + self.wanted.steps

    def next_step(self, loop: Trainer) -> int | None:
        """The steps at which the profile begins and ends."""
        return {"waiting": self._start, "running": self._stop}.get(self._state)

    def trained(self, loop: Trainer, metrics: StepMetrics) -> None:
        """Begins or ends the profile."""
        if self._state == "waiting" and loop.step >= self._start:
            loop.engine.start_profile(loop.directory.profile)
            self._state = "running"
        elif self._state == "running" and loop.step >= self._stop:
            self._finish(loop)

    def end(self, loop: Trainer) -> None:
        """Ends a profile that training was too short for."""
        if self._state == "running":
            self._finish(loop)
        elif self._state == "waiting":
            log.warning("no profile was made: it begins at step %d, training ended at %d", self._start, loop.step)

    def _finish(self, loop: Trainer) -> None:
        loop.engine.stop_profile()
        self._state = "done"
        log.info("profile of steps %d to %d: %s", self._start + 1, loop.step, loop.directory.profile)
