"""The evaluator of a cluster: evaluates every checkpoint that training saves, and keeps the best models.

It has no part in training: it reads checkpoints from the run folder and writes to ``evaluator/`` and ``best/`` there.
When training is over it evaluates what is left, then the best model on test if the config says so.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

from modelyard.cluster.crew import Crew
from modelyard.cluster.follower import Follower
from modelyard.config import Config
from modelyard.data.dataset import VALIDATION, Dataset
from modelyard.errors import CheckpointError
from modelyard.loop.hooks import build_hooks
from modelyard.loop.stages import build, create_engine, load_state, run_lengths
from modelyard.loop.trainer import EvaluationAbandonedError, Trainer
from modelyard.run.checkpoint import Checkpoint, list_checkpoints, read_checkpoint
from modelyard.run.directory import RunDirectory
from modelyard.run.manifest import read_manifest
from modelyard.run.metrics import read_metrics

log = logging.getLogger("modelyard")
HOOKS = ("log", "metrics", "tensorboard", "best")
"""Of the hooks of a run, those that take notice of evaluations."""
_POLL_SECONDS = 0.5


class TrainingWatch:
    """Learns from the lead when training is over.

    Args:
        crew: the connection to the lead.
        over: training was over before this process could join.
    """

    def __init__(self, crew: Follower, over: bool) -> None:
        self.over = over
        self.signal: int | None = None
        self._crew = crew

    def wait(self, seconds: float) -> None:
        """Waits for so long, or until the lead says that it is over.

        Raises:
            PeerLostError: if the lead is gone.
        """
        message = self._crew.order_within(seconds)
        if message is not None and message.kind == "end":
            self.over, self.signal = True, message.fields.get("signal")


class Examiner(Trainer):
    """A trainer that does not train: each of its stretches evaluates a checkpoint that training has saved."""

    trains = False
    watch: TrainingWatch
    watched: RunDirectory
    _checkpoint: Checkpoint
    _all_done = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._passed_over: set[int] = set()

    def snapshot(self) -> Checkpoint:
        """The checkpoint as training saved it."""
        return self._checkpoint

    @property
    def is_over(self) -> bool:
        """Whether training is over and everything is evaluated."""
        return self._all_done

    @property
    def _signal(self) -> int | None:
        return self._own_signal if self._own_signal is not None else self.watch.signal

    def _stretch(self) -> None:
        """Evaluates the next checkpoint, or waits for one."""
        no_more = self.watch.over  # looked at before the folder, so that nothing comes in between
        rows = read_metrics(self.directory.metrics)
        done = {row["step"] for row in rows if row.get("split") == VALIDATION} | self._passed_over
        new = [(step, path) for step, path in list_checkpoints(self.watched.checkpoints).items() if step not in done]
        waits = time.monotonic() - self._evaluated_at < self.config.eval_throttle_secs and not no_more
        if new and not waits:
            self._examine(*new[0])
        elif no_more:
            self._all_done = True
        else:
            self.watch.wait(_POLL_SECONDS)

    def _examine(self, step: int, path: Path) -> None:
        try:
            self._checkpoint = read_checkpoint(path)
        except CheckpointError as error:
            log.warning("%s It is passed over; training may have replaced it by newer ones already.", error)
            self._passed_over.add(step)
            return
        self.step = step
        load_state(self.engine, self._checkpoint, weights_only=True)
        with contextlib.suppress(EvaluationAbandonedError):
            self.evaluate(VALIDATION)
        self._evaluated_at = time.monotonic()

    def _after_the_last_step(self) -> None:
        self.writer.flush()
        if self.config.test_at_end and self._signal is None:
            self._test_the_best()


def evaluate_checkpoints(
    config: Config, dataset: Dataset, crew: Follower, directory: RunDirectory, over: bool
) -> Trainer:
    """Evaluates checkpoints as they come, until training is over and all are evaluated.

    Args:
        config: the resolved config.
        dataset: the data of the run.
        crew: the connection to the lead.
        directory: the run folder.
        over: training was over before this process could join.
    """
    dataset.size(VALIDATION)
    watch = TrainingWatch(crew, over)
    while not list_checkpoints(directory.checkpoints) and not watch.over:  # by the first, the manifest is there
        watch.wait(_POLL_SECONDS)
    engine = create_engine(config, Crew())
    run = run_lengths(config, dataset)
    build(engine, config, dataset, run)
    hooks = [hook for hook in build_hooks(config.hooks) if hook.name in HOOKS]
    run_id = str(read_manifest(directory).get("run_id"))
    examiner = Examiner(config, engine, directory.of_evaluator(), run, run_id, hooks, True, None)
    examiner.watch, examiner.watched = watch, directory
    examiner.step = max(list_checkpoints(directory.checkpoints), default=0)  # what was written of later steps is void
    try:
        examiner.train()
    finally:
        engine.close()
    return examiner
