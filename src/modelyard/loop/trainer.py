"""The outer loop: plain Python that knows only steps.

Run to the next boundary (report, evaluate, save, profile, stop), then call the hooks. It knows nothing of devices; the
inner loop, many compiled steps a call, belongs to the engine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from modelyard.config.durations import Duration, InSteps, RunLength
from modelyard.config.schema import Config
from modelyard.data.dataset import TEST, TRAIN, VALIDATION
from modelyard.engine.base import Engine, State, StepMetrics
from modelyard.errors import CheckpointError, Interrupted, UserError, unknown
from modelyard.loop.hooks import Hook
from modelyard.loop.stages import stop_rules, stopped_by
from modelyard.run.checkpoint import BackgroundWriter, Checkpoint, best_first, read_checkpoint
from modelyard.run.directory import RunDirectory
from modelyard.run.metrics import read_metrics
from modelyard.system.console import bar
from modelyard.system.signals import signals_go_to

log = logging.getLogger("modelyard")


class EvaluationAbandonedError(Exception):
    """A signal came while evaluating: saving is more urgent."""


class Pace:
    """How long steps take, and how many to ask for at once.

    Long stretches cost less; short ones keep the terminal and Ctrl-C alive. The length never changes what is learned.
    """

    stretch_seconds = 0.5

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self._grain = self._length = 1

    def prepared(self, engine: Engine) -> None:
        """The engine is ready for stretches that are multiples of its grain."""
        self._grain = self._length = engine.grain

    def length(self, compiles: bool) -> int:
        """Steps for the next stretch; as few as can be where it compiles first."""
        return self._grain if compiles else self._length

    def add(self, steps: int, seconds: float, compiles: bool) -> None:
        """Learns from a stretch; one that compiles first does not count."""
        if compiles:
            self._length = self._grain  # steps of this phase may take longer than those before
            log.info("compiled and ran the first step in %.1f s", seconds)
            return
        self.steps += steps
        self.seconds += seconds
        wanted = min(int(steps * self.stretch_seconds / max(seconds, 1e-6)), 4 * self._length)
        self._length = max(wanted - wanted % self._grain, self._grain)


class Trainer:
    """Runs the training of one run, and its evaluations.

    Args:
        config: the resolved config.
        engine: built, with its state at ``step``.
        directory: the locked run folder.
        run: the lengths of the run.
        run_id: tells this run from others.
        hooks: in the order they are called.
        evaluate: whether to evaluate, on validation on the way and on test at the end; without a validation split,
            only at the end.
        checkpoint: the point to go on from; None for a new run.
    """

    trains = True
    """Whether there are training batches to show; an evaluator has none."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        directory: RunDirectory,
        run: RunLength,
        run_id: str,
        hooks: Sequence[Hook],
        evaluate: bool,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.config, self.engine, self.directory, self.run, self.run_id = config, engine, directory, run, run_id
        self.hooks = list(hooks)
        self.total_steps = run.total_steps
        self.pace = Pace()
        self.writer = BackgroundWriter()
        self.last_test: dict[str, Any] = {}
        self.last_report: dict[str, float] = {}
        self._evaluates = evaluate and VALIDATION in engine.dataset.sizes()
        self._tests = evaluate and config.test_at_end
        self._report_cadence = InSteps(config.log_every.period(run))
        every = config.eval_every or Duration.parse(f"{config.epochs_between_evals} epochs")
        self._evaluation_cadence = InSteps(every.period(run))
        self._evaluated_at = -math.inf
        self._own_signal: int | None = None
        self._snapshot: Checkpoint | None = None
        memory = checkpoint.memory if checkpoint is not None else {}
        self.step = checkpoint.step if checkpoint is not None else 0
        self._window: dict[str, float] = dict(memory.get("window", {}))
        self._window_steps: int = memory.get("window_steps", 0)
        self._seconds_before: float = memory.get("seconds", 0.0)
        self.evaluated_step: int | None = memory.get("evaluated_step")
        self.owes_evaluation: bool = memory.get("owes_evaluation", False)
        self.last_evaluation: dict[str, Any] = dict(memory.get("last_evaluation", {}))
        for hook in self.hooks:
            if hook.name in memory.get("hooks", {}):
                hook.remember(memory["hooks"][hook.name])
        self.stop_reason = stopped_by(memory, config, self.total_steps)

    def train(self) -> None:
        """Trains to the end, then evaluates the best model on test if the config says so.

        Raises:
            Interrupted: on SIGTERM or Ctrl-C, after the hooks have saved.
        """
        begun: list[Hook] = []
        self._started = time.monotonic()
        with self._signals():
            try:
                if self.trains and not self.is_over:
                    self._prepare()
                for hook in self.hooks:
                    begun.append(hook)
                    self._call(hook, hook.begin)
                self._started = time.monotonic()  # now it is training that takes time
                if self._evaluates and self.owes_evaluation and not self.is_over:
                    self._evaluate()
                    self._settle()
                while not self.is_over and self._signal is None:
                    self._stretch()
                if self.is_over:
                    self._after_the_last_step()
                if self._signal is not None:
                    for hook in self.hooks:
                        self._call(hook, hook.interrupted)
                    self.writer.flush()
                    raise Interrupted(self._signal, self.step, self.directory.address)
            except BaseException:
                with contextlib.suppress(Exception):  # the error under way says more than what follows from it
                    self._finish(begun)
                raise
            self._finish(begun)

    def _prepare(self) -> None:
        """Has the engine compile, before the clock runs."""
        periods = [self.total_steps, self._report_cadence.period]
        splits = []
        if self._evaluates:
            periods.append(self._evaluation_cadence.period)
            splits.append(VALIDATION)
        if self._tests and TEST in self.engine.dataset.sizes():
            splits.append(TEST)
        self.engine.prepare(periods, splits)
        self.pace.prepared(self.engine)

    @property
    def _signal(self) -> int | None:
        """The signal that asks to save and leave; it may have reached another process of the run."""
        return self._own_signal if self._own_signal is not None else self.engine.crew.signal

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or a hook asked to stop."""
        return self.step >= self.total_steps or self.stop_reason is not None

    @property
    def seconds(self) -> float:
        """Wall-clock time of training, earlier starts of the run included."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def epoch(self) -> float:
        """How many epochs are done."""
        return float(self.step / self.run.steps_per_epoch)

    def check_metric(self, metric: str, wanted_by: str) -> None:
        """Refuses a metric that no evaluation measures, before training and not after the first epoch. For hooks."""
        if not self._evaluates or metric in ("auto", "loss"):
            return
        known = self.engine.metric_names(VALIDATION)
        if metric not in known:
            raise UserError(f"{wanted_by}: {unknown('metric', metric, known)}")

    def check_evaluates(self, wanted_by: str) -> None:
        """Refuses what hangs on evaluations where there is no validation split to evaluate on. For hooks."""
        sizes = self.engine.dataset.sizes()
        if VALIDATION not in sizes:
            raise UserError(
                f"{wanted_by} needs a validation split, and there is none: the splits are {', '.join(sizes)}. "
                "Give a validation_fraction of more than 0, or leave it out."
            )

    def stop(self, reason: str) -> None:
        """Ends training after this step. For hooks."""
        if self.stop_reason is None:
            log.info("step %d  stopping: %s", self.step, reason)
            self.stop_reason = reason

    def snapshot(self) -> Checkpoint:
        """The state of the run at this step, to be saved. For hooks."""
        if self._snapshot is None or self._snapshot.step != self.step:
            state = self.engine.state()
            self._snapshot = Checkpoint(self.step, state.weights, state.optimizer)
        learned = self._snapshot
        memory = {
            "run": self.run_id,
            "window": dict(self._window),
            "window_steps": self._window_steps,
            "seconds": self.seconds,
            "evaluated_step": self.evaluated_step,
            "owes_evaluation": self.owes_evaluation,
            "last_evaluation": self.last_evaluation,
            "stopped": self.stop_reason,
            "stopped_under": stop_rules(self.config),
            "threads": self.engine.threads,
            "replicas": self.engine.replicas,
            "total_steps": self.total_steps,
            "hooks": {hook.name: kept for hook in self.hooks if (kept := hook.memory())},
        }
        return Checkpoint(learned.step, learned.weights, learned.optimizer, memory)

    def _stretch(self) -> None:
        """Trains to the next boundary, or as far as keeps the loop responsive, and calls the hooks."""
        boundaries = [self.total_steps, self._report_cadence.next_after(self.step), *self.engine.phases.periods]
        if self._evaluates:
            boundaries.append(self._evaluation_cadence.next_after(self.step))
        boundaries += [at for hook in self.hooks if (at := hook.next_step(self)) is not None]
        compiles = self.engine.compiles_at(self.step)
        count = min(min(at for at in boundaries if at > self.step) - self.step, self.pace.length(compiles))
        began = time.perf_counter()
        metrics = self.engine.train(self.step, count)
        self.pace.add(count, time.perf_counter() - began, compiles)
        self.step += count
        self._add_to_window(metrics)
        for hook in self.hooks:
            self._call(hook, hook.trained, metrics)
        if self._report_cadence.fires_at(self.step) or self.is_over:
            self._report(metrics)
        if self._evaluates and self._evaluation_due():
            self._evaluate()
        self._settle()

    def _call(self, hook: Hook, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except Exception as error:
            error.add_note(f"This happened in the hook {hook.name!r}, at step {self.step}.")
            raise

    def _settle(self) -> None:
        for hook in self.hooks:
            self._call(hook, hook.settled)

    def _add_to_window(self, metrics: StepMetrics) -> None:
        # Step by step, so that the sum does not depend on how the steps were cut into stretches.
        for name, values in metrics.items():
            total = self._window.get(name, 0.0)
            for value in values.tolist():
                total += value
            self._window[name] = total
        self._window_steps += len(next(iter(metrics.values())))

    def _report(self, metrics: StepMetrics) -> None:
        """Means since the last report; the learning rate is the last one."""
        means = {name: total / self._window_steps for name, total in self._window.items()}
        means["learning_rate"] = float(metrics["learning_rate"][-1])
        self._window, self._window_steps = {}, 0
        self.last_report = means
        row = self._row(TRAIN, means)
        for hook in self.hooks:
            self._call(hook, hook.reported, row)

    def _evaluation_due(self) -> bool:
        if self.is_over:
            return True
        if not self._evaluation_cadence.fires_at(self.step):
            return False
        return time.monotonic() - self._evaluated_at >= self.config.eval_throttle_secs

    def _evaluate(self) -> None:
        before, self.evaluated_step = self.evaluated_step, self.step
        self.owes_evaluation = False
        try:
            self.evaluate(VALIDATION)
        except EvaluationAbandonedError:  # it is made up for when the run goes on
            self.evaluated_step, self.owes_evaluation = before, True
        self._evaluated_at = time.monotonic()

    def _after_the_last_step(self) -> None:
        if self._evaluates and self.evaluated_step != self.step:  # a run that was trained without evaluation
            self._evaluate()
            self._settle()
        if self._tests and self._signal is None:
            self._test_the_best()

    def _test_the_best(self) -> None:
        """Evaluates the best model, or the last where none is kept, on the test split; once."""
        if TEST not in self.engine.dataset.sizes():
            log.info("there is no test split to evaluate on")
            return
        step = self._load_best()
        for row in read_metrics(self.directory.metrics):
            if (row.get("split"), row.get("step")) == (TEST, step):
                self.last_test = {k: v for k, v in row.items() if k not in ("step", "epoch", "split", "seconds")}
                return
        with contextlib.suppress(EvaluationAbandonedError):
            self.last_test = self.evaluate(TEST, step)

    def _load_best(self) -> int:
        """Brings the best model that can be read into the engine, or leaves the last one there; returns its step."""
        if self._evaluates:
            self.writer.flush()
        for path in best_first(self.directory.best):
            try:
                checkpoint = read_checkpoint(path)
            except CheckpointError as error:
                log.warning("%s The next best is taken.", error)
                continue
            self.engine.load(State(checkpoint.weights, checkpoint.optimizer))
            return checkpoint.step
        return self.step

    def evaluate(self, split: str, step: int | None = None) -> dict[str, float]:
        """Evaluates the model as it is now on ``split`` and tells the hooks.

        Args:
            split: which one.
            step: the step the model is from, if it is not this one.
        """
        with bar(f"evaluating on {split}", self.engine.dataset.size(split)) as show:

            def progress(done: int, size: int) -> None:
                if self._signal is not None and done < size:
                    raise EvaluationAbandonedError
                show(done, size)

            metrics = self.engine.evaluate(split, progress)
        row = self._row(split, metrics)
        if step is not None:
            row.update(step=step, epoch=round(float(step / self.run.steps_per_epoch), 6))
        if split == VALIDATION:
            self.last_evaluation = dict(metrics)
        for hook in self.hooks:
            self._call(hook, hook.evaluated, split, row)
        return metrics

    def _row(self, split: str, metrics: dict[str, float]) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": round(self.epoch, 6),
            "split": split,
            **{name: float(np.asarray(value)) for name, value in metrics.items()},
            "seconds": round(self.seconds, 3),
        }

    def _finish(self, begun: list[Hook]) -> None:
        """Ends every hook that began, and the writing; the first error is the one that is raised."""
        errors: list[Exception] = []
        closings: list[Callable[[], None]] = [partial(hook.end, self) for hook in begun]
        for close in (*closings, self.writer.close):
            try:
                close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or Ctrl-C lets the stretch end and saves; the second Ctrl-C breaks off."""

        def note(number: int, frame: Any) -> None:
            if self._own_signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._own_signal = number
            log.info("%s: saving, then leaving …", signal.Signals(number).name)

        with signals_go_to(note):
            yield
