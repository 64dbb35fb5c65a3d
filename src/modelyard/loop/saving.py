"""Hooks that save: checkpoints to resume from, and the best models."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from modelyard.config.durations import InSteps
from modelyard.errors import RunError, TrainingError
from modelyard.loop.hooks import Hook
from modelyard.loop.ranking import Ranking
from modelyard.registry import Options
from modelyard.run.checkpoint import (
    Checkpoint,
    folder_name,
    list_best,
    list_checkpoints,
    prune,
    read_loop_state,
    write_checkpoint,
)
from modelyard.system.files import remove_folder, remove_partial

if TYPE_CHECKING:
    from modelyard.loop.trainer import Trainer

log = logging.getLogger("modelyard")


class SaveCheckpoints(Hook):
    """Saves at step 0, as often as save_every says, when interrupted, and at the end."""

    order = 100  # last, so that it saves the other hooks' state after this step

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._saved: tuple[int, int | None] = (-1, None)

    def on_begin(self, loop: Trainer) -> None:
        """Saves a new run before its first step."""
        every = loop.config.save_every
        self.cadence = InSteps(every.period(loop.run)) if every.seconds is None else None
        self._seconds = every.seconds
        self._saved_at = time.monotonic()
        if loop.step in list_checkpoints(loop.directory.checkpoints):
            self._saved = (loop.step, loop.evaluated_step)
        else:
            self._save(loop)

    def on_boundary(self, loop: Trainer) -> None:
        """Saves if it is due."""
        if self.cadence is not None:
            due = self.cadence.fires_at(loop.step)
        else:
            due = time.monotonic() - self._saved_at >= (self._seconds or 0)
        if due or loop.is_over:
            self._save(loop)

    def on_interrupt(self, loop: Trainer) -> None:
        """Saves before the run ends."""
        self._save(loop)

    def _save(self, loop: Trainer) -> None:
        if self._saved == (loop.step, loop.evaluated_step):
            return
        checkpoint = loop.snapshot()
        broken = next((name for name, value in checkpoint.weights.items() if not np.isfinite(value).all()), None)
        if broken is not None:
            raise TrainingError(
                f"{broken} holds values that are not finite after step {loop.step}, so that step is not saved. "
                "The checkpoints before it are kept. Try a lower learning_rate, warmup or clip_norm."
            )
        self._saved, self._saved_at = (loop.step, loop.evaluated_step), time.monotonic()
        directory, keep = loop.directory, loop.config.keep_checkpoints

        def write() -> None:
            write_checkpoint(directory.checkpoints, checkpoint)
            prune(directory.checkpoints, keep)
            directory.push(keep)

        loop.writer.submit(write)


class KeepBest(Hook):
    """Keeps the best models by validation metric. Their folders are the record, so a restart loses none."""

    order = 50
    needs_training, needs_evaluation = False, True

    def on_begin(self, loop: Trainer) -> None:
        """Reads the best models of earlier starts."""
        loop.check_metric(loop.config.best_metric, "best_metric")
        folder = loop.directory.best
        self._kept: list[tuple[float, int]] = []
        self._ranking: Ranking | None = None
        if any(read_loop_state(path).get("run") != loop.run_id for path in list_best(folder)):
            raise RunError(
                f"{folder} holds the best models of another run. Name another --best_model_dir, or move them away."
            )
        remove_partial(folder)
        for path in list_best(folder):
            won = read_loop_state(path)["best"]
            self._kept.append((float(won["value"]), int(won["step"])))

    def on_evaluation(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Keeps this model if it is among the best."""
        if split != "validation":
            return
        ranking = self._ranking or Ranking.choose(loop.config.best_metric, loop.config.best_mode, row)
        self._ranking = ranking
        value = ranking.value(row)
        worse = [(v, s) for v, s in self._kept if ranking.is_better(value, v)]
        room = len(self._kept) < loop.config.keep_best
        if not (worse or room) or (value, loop.step) in self._kept:
            return
        if not self._kept or len(worse) == len(self._kept):
            log.info("step %d  best %s so far: %.4f", loop.step, ranking.metric, value)
        self._kept = [(v, s) for v, s in self._kept if s != loop.step]
        self._kept = sorted([*self._kept, (value, loop.step)], key=lambda k: ranking.key(k[0]))
        self._kept, dropped = self._kept[: loop.config.keep_best], self._kept[loop.config.keep_best :]
        won = {"metric": ranking.metric, "mode": ranking.mode, "value": value, "step": loop.step}
        snapshot = loop.snapshot()
        state = {**snapshot.loop_state, "best": won, "metrics": {k: row[k] for k in row if isinstance(row[k], float)}}
        checkpoint = Checkpoint(snapshot.step, snapshot.weights, snapshot.optimizer, state)
        directory = loop.directory

        def write() -> None:
            write_checkpoint(directory.best, checkpoint)
            for _, step in dropped:
                path = directory.best / folder_name(step)
                if path.is_dir():
                    remove_folder(path)
            directory.push()

        loop.writer.submit(write)
