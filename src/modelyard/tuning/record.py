"""The record of a trial in its run folder: its step, its evaluations, and its costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelyard.comparison.matrix_folder import is_finished
from modelyard.comparison.results import metrics_of
from modelyard.config import Config
from modelyard.config.durations import Duration, RunLength
from modelyard.errors import UserError
from modelyard.loop.metric_hooks import Ranking
from modelyard.loop.run import length_of
from modelyard.run.checkpoint import list_saved
from modelyard.run.directory import RunDirectory
from modelyard.run.manifest import read_manifest
from modelyard.run.metrics import read_metrics
from modelyard.run.summary import PAUSED, status

ENDED = ("finished", "stopped early")


@dataclass(frozen=True)
class Record:
    """The record of a trial.

    Args:
        state: done, paused, or nothing if it is to be trained on.
        step: the step of the newest checkpoint.
        length: the length of the run, once it has begun.
        evaluations: the metrics of each evaluation on validation, by step.
        costs: parameters, flops, seconds and so on, as far as they are known.
        modes: what is better of the metrics that say so.
        started: when it was first started, as in its manifest.
    """

    state: str = ""
    step: int = 0
    length: RunLength | None = None
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    modes: Mapping[str, str] = field(default_factory=dict)
    started: str = ""

    def best(self, ranking: Ranking) -> Mapping[str, float]:
        """Returns all values of the best model: of the evaluation that is the best by a metric, and the costs."""
        row = best_evaluation(self.evaluations.values(), ranking)
        return {**self.costs, **row} if row else {}

    def reached(self, rungs: Sequence[Duration]) -> list[int]:
        """Returns the steps of the rungs at which the trial was evaluated."""
        if self.length is None:
            return []
        steps = [rung.steps(self.length) for rung in rungs]
        return [step for step in steps if step in self.evaluations and step <= self.step]

    def next_rung(self, rungs: Sequence[Duration]) -> Duration | None:
        """Returns where the trial pauses next; None if it trains to its end."""
        if self.length is None:
            return next(iter(rungs), None)
        for rung in rungs:
            step = rung.steps(self.length)
            if step > self.step or (step == self.step and self.state != PAUSED):
                return rung
        return None


def read_record(directory: RunDirectory, config: Config) -> Record:
    """Reads the run folder of a trial. One that is damaged has no results; the run itself says why.

    Args:
        directory: the run folder; it need not exist.
        config: the config of the trial.
    """
    try:
        if not directory.exists():
            return Record()
        word = status(directory)
        state = PAUSED if word.startswith(PAUSED) else ""
        complete = not config.test_at_end and not config.export_at_end
        if word in ENDED and (complete or is_finished(directory, config.test_at_end, config.export_at_end)):
            state = "done"
        manifest, rows = read_manifest(directory), read_metrics(directory.metrics)
        examples = ((manifest.get("dataset") or {}).get("sizes") or {}).get("train")
        return Record(
            state,
            max(list_saved(directory.checkpoints, directory.best), default=0),
            length_of(config, examples) if isinstance(examples, int) and examples > 0 else None,
            {int(row.get("step", 0)): metrics_of(row) for row in rows if row.get("split") == "validation"},
            costs_of(manifest, rows),
            manifest.get("metrics") or {},
            str((manifest.get("starts") or [{}])[0].get("time", "")),
        )
    except (UserError, OSError, ValueError, TypeError, AttributeError, KeyError):
        return Record()


def best_evaluation(evaluations: Iterable[Mapping[str, float]], ranking: Ranking) -> Mapping[str, float]:
    """Returns the evaluation of the best model by a metric; empty if none has it."""
    found = [row for row in evaluations if ranking.metric in row]
    return min(found, key=lambda row: (ranking.key(row[ranking.metric]), row.get("loss", math.inf)), default={})


def costs_of(manifest: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the costs of a run, as far as they are known: parameters, flops, seconds, speeds.

    Args:
        manifest: its manifest.
        rows: the rows of its metrics.
    """
    model = manifest.get("model") or {}
    costs = {key: model.get(key) for key in ("parameters", "flops")}
    costs["seconds"] = max((row["seconds"] for row in rows if row.get("seconds")), default=None)
    speeds = [row["average_examples_per_second"] for row in rows if row.get("average_examples_per_second")]
    if speeds:
        costs |= {"images_per_second": speeds[-1], "ms_per_example": 1000 / speeds[-1]}
    return {key: float(value) for key, value in costs.items() if isinstance(value, int | float)}
