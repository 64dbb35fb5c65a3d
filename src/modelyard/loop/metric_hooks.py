"""Hooks that watch a metric: keep the best models, stop early, stop at a value, stop at NaN."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from modelyard.config.schema import Config
from modelyard.data.dataset import VALIDATION
from modelyard.errors import RunError, TrainingError, UserError, unknown
from modelyard.loop.catalog import EarlyStopOptions, StopAtOptions
from modelyard.loop.hooks import Hook, check_metric, check_validation
from modelyard.models.metric import metric_modes
from modelyard.run.checkpoint import (
    Checkpoint,
    DamagedError,
    folder_name,
    list_best,
    list_checkpoints,
    rank_key,
    read_checkpoint,
    read_loop_state,
    set_aside,
    write_checkpoint,
)
from modelyard.run.examples import keep_example_values, write_example_values
from modelyard.system.files import remove_folder, remove_partial, retried

if TYPE_CHECKING:
    from modelyard.engine.base import Engine, StepMetrics
    from modelyard.loop.trainer import Trainer

log = logging.getLogger("modelyard")
_LESS_IS_BETTER = ("loss", "error", "perplexity", "distance", "mae", "mse", "rmse", "mape")
_NOT_METRICS = ("step", "epoch", "split", "seconds")
NO_MODES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Ranking:
    """A metric and its direction, ``mode`` "max" or "min"."""

    metric: str
    mode: str

    @classmethod
    def choose(cls, metric: str, mode: str, row: Mapping[str, Any], modes: Mapping[str, str] = NO_MODES) -> Ranking:
        """Resolves ``auto``: accuracy if there is one, else the loss; lower is better for losses and errors.

        Args:
            metric: the name of the metric, or auto.
            mode: max, min or auto.
            row: an evaluation row.
            modes: what is better of the metrics that say so; of others it is chosen by the name.
        """
        names = [name for name in row if name not in _NOT_METRICS]
        if metric == "auto":
            metric = "accuracy" if "accuracy" in row else "loss"
        if metric not in names:
            raise UserError(unknown("metric", metric, names))
        if mode == "auto":
            by_name = "min" if any(word in metric for word in _LESS_IS_BETTER) else "max"
            mode = modes.get(metric, by_name)
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


def _modes(loop: Trainer) -> dict[str, str]:
    return metric_modes(loop.engine.functions.metrics.metrics)


class KeepBest(Hook):
    """Keeps the best models by validation metric. Their folders are the record, so a restart loses none.

    A model is saved when all hooks have seen its evaluation, so that a run can resume from it.
    """

    order = 90  # before the checkpoints, which a best model may make unnecessary
    needs_training, needs_evaluation = False, True

    def check_run(self, config: Config, engine: Engine) -> None:
        """Checks that the metric exists."""
        check_metric(engine, config.best_metric, "best_metric")

    def on_begin(self, loop: Trainer) -> None:
        """Reads the best models of earlier starts."""
        loop.check_metric(loop.config.best_metric, "best_metric")
        folder = loop.directory.best
        self._kept: list[tuple[float, float, int]] = []  # as rank_key has them, the best first
        self._ranking: Ranking | None = None
        self._save_later: Callable[[], None] | None = None
        if any(read_loop_state(path).get("run") != loop.run_id for path in list_best(folder)):
            raise RunError(
                f"{folder} holds the best models of another run. Name another --best_model_dir, or move them away."
            )
        for unfinished in (folder, loop.directory.examples):
            remove_partial(unfinished)
        _set_aside_damaged(folder, loop.step)
        for path in list_best(folder)[loop.config.keep_best :]:  # a killed process had already written a better one
            remove_folder(path)
        for path in list_best(folder):
            state = read_loop_state(path)
            self._kept.append(rank_key(state["best"], state.get("metrics", {})))
        keep_example_values(loop.directory, VALIDATION, [step for *_, step in self._kept])

    def on_evaluation(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Keeps this model if it is among the best."""
        if split != VALIDATION:
            return
        ranking = self._ranking or Ranking.choose(loop.config.best_metric, loop.config.best_mode, row, _modes(loop))
        self._ranking = ranking
        value = ranking.value(row)
        best = {"metric": ranking.metric, "mode": ranking.mode, "value": value, "step": loop.step}
        metrics = {name: row[name] for name in row if isinstance(row[name], float)}
        key, keep = rank_key(best, metrics), loop.config.keep_best
        if key in self._kept or (len(self._kept) >= keep and key > self._kept[-1]):
            return
        if not self._kept or key < self._kept[0]:
            log.info("step %d  best %s so far: %.4f", loop.step, ranking.metric, value)
        ranked = sorted([*(other for other in self._kept if other[-1] != loop.step), key])
        self._kept, dropped = ranked[:keep], ranked[keep:]
        self._save_later = partial(self._save, loop, best, metrics, [step for *_, step in dropped])
        # An evaluator keeps a model before its row says that it was evaluated. A hook of the user may evaluate at any
        # moment: at the next boundary, the weights may be those of a later step.
        if not loop.trains or loop.evaluated_step != loop.step:
            self.on_boundary(loop)

    def on_boundary(self, loop: Trainer) -> None:
        """Saves the model."""
        save, self._save_later = self._save_later, None
        if save is not None:
            save()

    def _save(self, loop: Trainer, best: dict[str, Any], metrics: dict[str, float], dropped: Sequence[int]) -> None:
        loop.save_pace.begin(loop.evaluated_step)
        snapshot = loop.snapshot()
        resumable = not loop.trains or loop.evaluated_step == loop.step
        state = {**snapshot.loop_state, "best": best, "metrics": metrics, "resumable": resumable}
        checkpoint = Checkpoint(snapshot.step, snapshot.weights, snapshot.optimizer, state)
        directory, examples, kept = loop.directory, loop.example_values, [step for *_, step in self._kept]

        def write() -> None:
            directory.check_in_place()
            retried(directory.examples, write_example_values, directory, VALIDATION, checkpoint.step, examples)
            retried(directory.best, write_checkpoint, directory.best, checkpoint)
            for step in dropped:
                path = directory.best / folder_name(step)
                if path.is_dir():
                    remove_folder(path)
            keep_example_values(directory, VALIDATION, kept)
            directory.push()

        loop.writer.submit(write)


def _set_aside_damaged(folder: Path, step: int) -> None:
    """Renames damaged models of steps after ``step``, which are trained again: the models are then kept again."""
    for path in (path for at, path in list_checkpoints(folder).items() if at > step):
        try:
            read_checkpoint(path)
        except DamagedError as error:
            log.warning("%s It was set aside as %s.", error, set_aside(path).name)


class _StopsOnMetric(Hook):
    """Stops when a validation metric asks for it."""

    options: EarlyStopOptions | StopAtOptions
    order = 60
    needs_evaluation = True

    def check_run(self, config: Config, engine: Engine) -> None:
        """Checks that there is a validation split, and the metric."""
        check_validation(engine, f"hook {self.name}")
        check_metric(engine, self.options.metric, f"hook {self.name}")

    def on_begin(self, loop: Trainer) -> None:
        """Checks that the metric exists."""
        loop.check_evaluates(f"hook {self.name}")
        loop.check_metric(self.options.metric, f"hook {self.name}")

    def on_evaluation(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Stops if the metric gives a reason to."""
        if split == VALIDATION:
            ranking = Ranking.choose(self.options.metric, self.options.mode, row, _modes(loop))
            reason = self._reason_to_stop(ranking, ranking.value(row))
            if reason is not None:
                loop.stop(reason)

    def _reason_to_stop(self, ranking: Ranking, value: float) -> str | None:
        raise NotImplementedError


class EarlyStop(_StopsOnMetric):
    """Stops when a validation metric has not improved for some evaluations."""

    options: EarlyStopOptions

    def __init__(self, options: EarlyStopOptions) -> None:
        super().__init__(options)
        self._best: float | None = None
        self._waited = 0

    def _reason_to_stop(self, ranking: Ranking, value: float) -> str | None:
        if self._best is None or ranking.is_better(value, self._best, self.options.min_delta):
            self._best, self._waited = value, 0
            return None
        self._waited += 1
        if self._waited < self.options.patience:
            return None
        return f"{ranking.metric} has not improved on {self._best:.4f} for {self._waited} evaluations"

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and the evaluations since then."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues counting."""
        best = state["best"]
        self._best, self._waited = None if best is None else float(best), int(state["waited"])


class StopAt(_StopsOnMetric):
    """Stops when a validation metric reaches a value."""

    options: StopAtOptions

    def _reason_to_stop(self, ranking: Ranking, value: float) -> str | None:
        if ranking.is_better(self.options.value, value):
            return None
        return f"{ranking.metric} {value:.4f} has reached {self.options.value:g}"


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
