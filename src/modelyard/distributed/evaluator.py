"""The evaluator of a cluster: evaluates every checkpoint that training saves, and keeps the best models.

It takes no part in training: it reads checkpoints from the run folder and writes to ``evaluator/`` and ``best/`` there.
When training is over it evaluates the remaining checkpoints, then the best model on test if the config says so.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path

from modelyard.config import Config
from modelyard.data.dataset import VALIDATION, Dataset
from modelyard.distributed.follower import Follower
from modelyard.errors import CheckpointError
from modelyard.loop.hooks import build_hooks
from modelyard.loop.run import build, create_engine, run_length
from modelyard.loop.trainer import Trainer
from modelyard.run.checkpoint import Checkpoint, list_checkpoints, read_checkpoint
from modelyard.run.directory import RunDirectory
from modelyard.run.manifest import read_manifest
from modelyard.run.metrics import read_metrics
from modelyard.system.activity import report

log = logging.getLogger("modelyard")
_POLL_SECONDS = 0.5


class CheckpointEvaluator:
    """Evaluates checkpoints as training saves them, until training is over and all are evaluated.

    Args:
        config: the resolved config.
        dataset: the data of the run.
        group: the connection to the coordinator.
        directory: the run folder.
        over: training was over before this process could join.
    """

    def __init__(self, config: Config, dataset: Dataset, group: Follower, directory: RunDirectory, over: bool) -> None:
        self._config, self._dataset, self._group, self._directory = config, dataset, group, directory
        self._over = over
        self._signal: int | None = None
        self._skipped: set[int] = set()

    def run(self) -> Trainer:
        """Evaluates until the end; returns the trainer, which has the results.

        Raises:
            PeerLostError: if the coordinator is gone.
        """
        self._dataset.size(VALIDATION)
        while not list_checkpoints(self._directory.checkpoints) and not self._over:
            self._wait()  # when the first checkpoint is there, the manifest is, too
        config, own = self._config, self._directory.of_evaluator()
        engine = create_engine(config)
        length = run_length(config, self._dataset)
        build(engine, config, self._dataset, length)
        hooks = [hook for hook in build_hooks(config.hooks) if not hook.needs_training]
        run_id = str(read_manifest(self._directory).get("run_id"))
        trainer = Trainer(config, engine, own, length, run_id, hooks, True, None, lambda: self._signal)
        # Hooks drop what was written for later steps than this one.
        trainer.step = max(list_checkpoints(self._directory.checkpoints), default=0)
        try:
            trainer.evaluate_checkpoints(self._checkpoints(own.metrics))
        finally:
            engine.close()
        return trainer

    def _checkpoints(self, metrics: Path) -> Iterator[Checkpoint | None]:
        """Yields the checkpoints that have no evaluation yet; None after each wait."""
        evaluated_at = -math.inf
        while True:
            over = self._over  # read before the folder, so that no checkpoint is missed in between
            done = {row["step"] for row in read_metrics(metrics) if row.get("split") == VALIDATION} | self._skipped
            new = [found for found in list_checkpoints(self._directory.checkpoints).items() if found[0] not in done]
            throttled = time.monotonic() - evaluated_at < self._config.eval_throttle_secs and not over
            if new and not throttled:
                checkpoint = self._read(*new[0])
                if checkpoint is not None:
                    yield checkpoint
                    evaluated_at = time.monotonic()
            elif over:
                return
            else:
                self._wait()
                yield None

    def _read(self, step: int, path: Path) -> Checkpoint | None:
        try:
            return read_checkpoint(path)
        except CheckpointError as error:
            log.warning("%s It is skipped; training may have replaced it by newer ones already.", error)
            self._skipped.add(step)
            return None

    def _wait(self) -> None:
        """Waits a moment, or until the coordinator says that training is over."""
        report("waiting for a checkpoint")
        message = self._group.command_within(_POLL_SECONDS)
        if message is not None and message.kind == "end":
            self._over, self._signal = True, message.fields.get("signal")
