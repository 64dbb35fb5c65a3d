"""The evaluator of a run: evaluates every checkpoint that training saves, and keeps the best models.

It takes no part in training: it reads checkpoints from the run folder and writes to ``evaluator/`` and ``best/`` there.
When training is over it evaluates the remaining checkpoints, then the best model on test if the config says so.

One process evaluates a run at a time: the one with the run folder's lock of evaluation. An evaluator in the cluster
is told by the coordinator when training is over. One that the cluster does not list, as Estimator and Kubeflow have it,
sees that in the run folder. It shares the work with the coordinator by the lock: the first to take it evaluates.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from modelyard.cluster.description import Cluster
from modelyard.config import Config
from modelyard.config.durations import RunLength
from modelyard.data.dataset import VALIDATION, Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.distributed.agreement import check_folder
from modelyard.distributed.follower import Follower
from modelyard.errors import CheckpointError, Interrupted, StorageError
from modelyard.loop.hooks import build_hooks
from modelyard.loop.run import build, create_engine, is_finished, run_length
from modelyard.loop.start import refuse_changes, with_absolute_paths
from modelyard.loop.trainer import Trainer
from modelyard.run.checkpoint import BackgroundWriter, Checkpoint, list_checkpoints, read_checkpoint
from modelyard.run.directory import evaluated_run_folder
from modelyard.run.manifest import read_manifest
from modelyard.storage import is_missing
from modelyard.system.activity import report
from modelyard.system.process import handle_signals

log = logging.getLogger("modelyard")
_POLL_SECONDS = 0.5


class CheckpointEvaluator:
    """Evaluates checkpoints as training saves them, until training is over and all are evaluated.

    Args:
        config: the resolved config.
        cluster: all processes of the run.
        group: the connection to the coordinator; None if the cluster does not list this evaluator.
    """

    def __init__(self, config: Config, cluster: Cluster, group: Follower | None) -> None:
        self._config, self._cluster, self._group = config, cluster, group
        self.directory = evaluated_run_folder(config)
        self._ended = False  # whether the coordinator has said so
        self._over = False  # whether no checkpoint will come, and those that came can be seen
        self._signal: int | None = None
        self._skipped: set[int] = set()
        self._reported = ""

    @cached_property
    def _dataset(self) -> Dataset:
        return load_dataset(self._config)

    @cached_property
    def _length(self) -> RunLength:
        return run_length(self._config, self._dataset)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Joins the coordinator, if there is a connection, and is the process that evaluates while the block runs.

        Raises:
            ClusterError: if the coordinator refuses, or does not answer in time.
        """
        report("joining")
        if self.directory.mirror is not None:
            self.directory.create()
        with handle_signals(self._interrupt):
            if self._group is not None:
                facts = self._group.join(unless=self._is_finished)
                self._ended = facts is None
                check_folder(self.directory, (facts or {}).get("mark"), str(self._cluster.coordinator))
            else:
                log.info("%s; it watches %s", self._cluster.describe(), self.directory.address)
            self._take_evaluation()
        failed = True
        try:
            yield
            failed = False
        except Interrupted:
            failed = False  # the user believes that everything is saved
            raise
        finally:
            self.directory.unlock(failed)

    def _take_evaluation(self) -> None:
        told = False
        while True:
            try:
                if self.directory.take_evaluation():
                    return
                if not told:
                    log.info(
                        "%s evaluates this run. This evaluator waits until that process ends, then evaluates the rest.",
                        self.directory.who_evaluates(),
                    )
                    told = True
            except StorageError as error:
                if not told:  # it may never work, for example without credentials
                    raise
                self._report_storage(error)
            report("waiting for the process that evaluates")
            self._wait()

    def run(self) -> Trainer:
        """Evaluates until the end; returns the trainer, which has the results.

        Raises:
            PeerLostError: if the coordinator is gone.
        """
        config, directory = self._config, self.directory
        with handle_signals(self._interrupt):
            self._refresh()
            while not list_checkpoints(directory.checkpoints) and not self._over:
                self._wait()  # when the first checkpoint is there, config and manifest are, too
            if self._group is None and directory.exists():  # nobody else has compared them
                refuse_changes(directory, with_absolute_paths(config, directory))
            self._dataset.size(VALIDATION)
            manifest = read_manifest(directory)
            if manifest.get("dataset", {}).get("fingerprint") not in (None, self._dataset.fingerprint()):
                log.warning("the data of %s is not the data this run is trained on", config.dataset)
            own = directory.of_evaluator()
            engine = create_engine(config)
            build(engine, config, self._dataset, self._length)
        # The model is kept before its row is written: a row says that nothing more is to be done for a checkpoint.
        hooks = [hook for hook in build_hooks(config.hooks) if not hook.needs_training]
        hooks.sort(key=lambda hook: not hook.needs_evaluation)
        run_id = str(manifest.get("run_id"))
        trainer = Trainer(config, engine, own, self._length, run_id, hooks, True, None, lambda: self._signal)
        trainer.writer = _Writer()
        # Hooks drop what was written for later steps than this one.
        trainer.step = max(list_checkpoints(directory.checkpoints), default=0)
        try:
            trainer.evaluate_checkpoints(self._checkpoints())
        finally:
            engine.close()
        return trainer

    def _checkpoints(self) -> Iterator[Checkpoint | None]:
        """Yields the checkpoints that have no evaluation yet; None after each wait."""
        directory = self.directory
        evaluated_at = -math.inf
        while True:
            over = self._over  # read before the folder, so that no checkpoint is missed in between
            done = {row["step"] for row in directory.evaluations_of(VALIDATION)} | self._skipped
            new = [found for found in list_checkpoints(directory.checkpoints).items() if found[0] not in done]
            throttled = time.monotonic() - evaluated_at < self._config.eval_throttle_secs and not over
            checkpoint = self._read(*new[0]) if new and not throttled else None
            if checkpoint is not None:
                yield checkpoint
                directory.push()
                evaluated_at = time.monotonic()
            elif over and not new:
                return
            else:
                self._wait()
                yield None

    def _read(self, step: int, path: Path) -> Checkpoint | None:
        """Reads a checkpoint; None if it is gone, damaged, or can't be downloaded now."""
        try:
            self.directory.download_weights(path)
            checkpoint = read_checkpoint(path)
            self._reported = ""
            return checkpoint
        except StorageError as error:
            if not is_missing(error):
                self._report_storage(error)
                return None
            reason: Exception = error
        except CheckpointError as error:
            reason = error
        log.warning("%s It is skipped; training may have replaced it by newer ones already.", reason)
        self._skipped.add(step)
        return None

    def _wait(self) -> None:
        """Waits a moment, or until the coordinator says that training is over."""
        report("waiting for a checkpoint")
        if self._group is None or self._ended:
            time.sleep(_POLL_SECONDS)
        else:
            message = self._group.command_within(_POLL_SECONDS)
            if message is not None and message.kind == "end":
                self._ended, self._signal = True, message.fields.get("signal")
        self._refresh()

    def _refresh(self) -> None:
        """Looks at the run folder again. Storage that can't be reached for a while does not end an evaluator."""
        try:
            self.directory.refresh(now=self._ended and not self._over)
        except StorageError as error:
            self._report_storage(error)
            return
        self._over = self._ended or (self._group is None and self._is_finished())

    def _report_storage(self, error: StorageError) -> None:
        """Logs a failure of the storage, once until a checkpoint is read."""
        if str(error) != self._reported:
            self._reported = str(error)
            log.warning("%s The evaluator tries again until it can.", error)

    def _is_finished(self) -> bool:
        """Whether the newest checkpoint is the last."""
        if self._group is not None:  # it is not connected yet
            with contextlib.suppress(StorageError):
                self.directory.refresh()
        return is_finished(self.directory, self._config, lambda: self._length)

    def _interrupt(self, number: int, frame: Any) -> None:
        """Ends an evaluator that does not evaluate yet."""
        raise Interrupted(signal.Signals(number), 0, self.directory.address)


class _Writer(BackgroundWriter):
    """Writes at once: while an evaluator keeps a model, it has nothing else to do."""

    def submit(self, write: Any) -> None:
        """Writes."""
        write()
