"""The outer loop: plain Python that knows only steps.

It trains to the next boundary (log, evaluate, save, profile, stop), then calls the hooks; `loop/hooks.py` shows the
order. It knows nothing of devices: the inner loop, many compiled steps per call, belongs to the engine.
"""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from modelyard import faults
from modelyard.config.durations import Duration, InSteps, RunLength
from modelyard.config.schema import Config
from modelyard.data.dataset import TEST, TRAIN, VALIDATION
from modelyard.engine.base import Engine, State, StepMetrics
from modelyard.errors import CheckpointError, Interrupted, TrainingError, UserError
from modelyard.loop.hooks import Hook, check_metric, check_validation, pause_step, stop_rules, stopped_by
from modelyard.run.checkpoint import BackgroundWriter, Checkpoint, list_best, read_checkpoint
from modelyard.run.directory import CONFIG_COPY, RunDirectory, recorded_options
from modelyard.run.examples import write_example_values
from modelyard.run.tensors import Arrays
from modelyard.system.activity import COMPILING, TRAINING, report
from modelyard.system.console import bar
from modelyard.system.files import retried
from modelyard.system.interrupt import check_interrupted
from modelyard.system.machine import available_cores
from modelyard.system.process import handle_signals

log = logging.getLogger("modelyard")


class EvaluationAbandonedError(Exception):
    """A signal interrupts an evaluation: saving is more urgent."""


class Pace:
    """Measures how long steps take, and decides how many to train at once.

    Long chunks cost less; short ones keep the terminal and Ctrl-C responsive. The length never changes the result.
    """

    chunk_seconds = 0.5

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self._steps_per_call = self._length = 1

    def prepared(self, steps_per_call: int) -> None:
        """Begins with chunks of the engine's `steps_per_call`."""
        self._steps_per_call = self._length = steps_per_call

    def length(self, compiles: bool) -> int:
        """Returns the steps of the next chunk; as few as possible if it compiles first."""
        return self._steps_per_call if compiles else self._length

    def add(self, steps: int, seconds: float, compiles: bool) -> None:
        """Adds the time of a chunk; one that compiles first does not count."""
        if compiles:
            self._length = self._steps_per_call  # steps of this phase may take longer than those before
            log.info("compiled and ran the first step in %.1f s", seconds)
            return
        self.steps += steps
        self.seconds += seconds
        wanted = min(int(steps * self.chunk_seconds / max(seconds, 1e-6)), 4 * self._length)
        self._length = max(wanted - wanted % self._steps_per_call, self._steps_per_call)


class SavePace:
    """Measures what saving costs, and decides when ``save_every=auto`` saves. When it saves never changes the result.

    The cost is the time that training stands still, and the processor time of writing as a part of all cores.

    Args:
        writer: writes what is saved.
    """

    pause_seconds = 10.0
    """How often it saves between evaluations."""
    share = 0.02
    """The share of the time that saving may take."""
    least_seconds = 1.0
    """The least pause before a checkpoint: the writing thread delays short steps by more than it costs itself."""

    def __init__(self, writer: BackgroundWriter) -> None:
        self.snapshot_seconds = 0.0
        self._writer, self._cores = writer, available_cores()
        self._began = time.monotonic()
        self._cost_before: float | None = None
        self._evaluated_step: int | None = None

    @property
    def cost(self) -> float:
        """Seconds that saving has cost so far."""
        return self.snapshot_seconds + self._writer.blocked_seconds + self._writer.cpu_seconds / self._cores

    def begin(self, evaluated_step: int | None) -> None:
        """Notes that a checkpoint or a best model is saved, from which the run resumes."""
        self._began, self._evaluated_step = time.monotonic(), evaluated_step
        self._cost_before = self.cost

    def forget_cost(self) -> None:
        """Leaves the cost of this save out."""
        self._cost_before = None

    def is_due(self, waited: float, evaluated_step: int | None) -> bool:
        """Returns whether to save a checkpoint now.

        Args:
            waited: seconds since the last checkpoint.
            evaluated_step: the step of the last evaluation.
        """
        if self._writer.is_busy or (waited < self.pause_seconds and evaluated_step == self._evaluated_step):
            return False
        cost = 0.0 if self._cost_before is None else self.cost - self._cost_before
        return time.monotonic() - self._began >= max(self.least_seconds, cost / self.share)


class Trainer:
    """Trains a run and evaluates it.

    Args:
        config: the resolved config.
        engine: the engine, with the state of ``checkpoint``.
        directory: the locked run folder.
        run: the length of the run.
        run_id: the id of the run.
        hooks: the hooks in the order they are called.
        evaluates: whether to evaluate, on validation during training and on test at the end.
        checkpoint: the checkpoint to resume from; None for a new run.
        other_signal: returns a signal that reached another process of the run.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        directory: RunDirectory,
        run: RunLength,
        run_id: str,
        hooks: Sequence[Hook],
        evaluates: bool,
        checkpoint: Checkpoint | None,
        other_signal: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.config, self.engine, self.directory, self.run, self.run_id = config, engine, directory, run, run_id
        self.hooks, self.total_steps = list(hooks), run.total_steps
        self.pace = Pace()
        self.writer = BackgroundWriter()
        self.save_pace = SavePace(self.writer)
        self.last_test: dict[str, Any] = {}
        self.last_log: dict[str, float] = {}
        self._evaluates = evaluates and VALIDATION in engine.dataset.sizes()
        self._tests = evaluates and config.test_at_end
        self._log_cadence = InSteps(config.log_every.period(run))
        every = config.eval_every or Duration.parse(f"{config.epochs_between_evals} epochs")
        self._evaluation_cadence = InSteps(every.period(run))
        self._evaluated_at = -math.inf
        self.trains = True
        """Whether this process trains; an evaluator does not."""
        self._own_signal: int | None = None
        self._other_signal = other_signal
        self._loaded: Checkpoint | None = None
        """The checkpoint that is evaluated, if another process trains."""
        self._snapshot: tuple[int, State] | None = None
        state = checkpoint.loop_state if checkpoint is not None else {}
        self.step = self._first_step = checkpoint.step if checkpoint is not None else 0
        self._metric_sums: dict[str, float] = dict(state.get("window", {}))
        self._summed_steps: int = state.get("window_steps", 0)
        self._seconds_before: float = state.get("seconds", 0.0)
        self.evaluated_step: int | None = state.get("evaluated_step")
        self.evaluation_pending: bool = state.get("owes_evaluation", False)
        self.example_values: Arrays = {}
        """Values of each example of the last evaluation."""
        self.last_evaluation: dict[str, Any] = dict(state.get("last_evaluation", {}))
        for hook in self.hooks:
            if hook.name in state.get("hooks", {}):
                self._restore(hook, state["hooks"][hook.name])
        self.stop_reason = stopped_by(state, config, self.total_steps)
        self.pause_step = pause_step(config, run)
        """The step at which this start ends, though the run is longer."""
        self.was_paused = bool(state.get("paused"))
        """Whether the checkpoint that this start began with says so."""

    def _restore(self, hook: Hook, state: Any) -> None:
        try:
            hook.load_state_dict(state)
        except UserError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the hook {hook.name!r} can't take back its state from the checkpoint of step {self.step}: "
                f"{type(error).__name__}: {error}. The hook has changed, or the checkpoint is damaged. "
                f"--hooks=-{hook.name} leaves the hook out."
            ) from error

    def train(self) -> None:
        """Trains to the end, then evaluates the best model on test if the config says so.

        Raises:
            Interrupted: on SIGTERM or Ctrl-C, after the hooks have saved.
        """
        with self._session():
            if self._evaluates and self.evaluation_pending and not self.is_over:
                self._evaluate()
                self._call_hooks("on_boundary")
            while not self.is_over and self._signal is None:
                self._train_chunk()
            if self.is_over:
                self._after_the_last_step()
            if self.is_paused and self._signal is None:
                self._log_pause()

    def evaluate_checkpoints(self, checkpoints: Iterable[Checkpoint | None]) -> None:
        """Evaluates checkpoints of another process as they come, then tests the best if the config says so.

        Args:
            checkpoints: yields checkpoints, or None after a wait.

        Raises:
            Interrupted: on SIGTERM or Ctrl-C.
        """
        self.trains = False
        with self._session():
            for checkpoint in checkpoints:
                if self._signal is not None:
                    break
                if checkpoint is not None:
                    self.step, self._loaded = checkpoint.step, checkpoint
                    self.engine.load(checkpoint, weights_only=True)
                    with contextlib.suppress(EvaluationAbandonedError):
                        self.evaluate(VALIDATION)
            self.writer.flush()
            if self._tests and self._signal is None and not self.is_paused:
                self._test_the_best()

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """Begins and ends the hooks around the block; after a signal, has them save and raises `Interrupted`."""
        begun: list[Hook] = []
        self._started = time.monotonic()
        with self._signals():
            try:
                if self.trains and not self.is_over:
                    self._prepare()
                    if self._evaluates and self.config.metrics:  # one that fails does so before training
                        self.engine.metric_names(VALIDATION)
                for hook in self.hooks:
                    begun.append(hook)
                    self._call(hook, "on_begin")
                self._started = time.monotonic()  # from here on it is training that takes time
                yield
                if self._signal is not None:
                    report("saving", self.step, total=self.total_steps)
                    self._call_hooks("on_interrupt")
                    self.writer.flush()
                    raise Interrupted(self._signal, self.step, self.directory.address)
            except BaseException as error:
                with contextlib.suppress(Exception):  # the error being raised says more than what follows from it
                    self._finish(begun)
                if isinstance(error, Exception):
                    self.directory.check_in_place()  # which may be the cause
                raise
            report("saving", self.step, total=self.total_steps)
            self._finish(begun)

    def _prepare(self) -> None:
        """Compiles, before the clock runs."""
        check_interrupted()
        report(COMPILING, self.step, total=self.total_steps)
        log.info("compiling …")
        periods = [self.total_steps, self._log_cadence.period]
        splits = []
        if self._evaluates:
            periods.append(self._evaluation_cadence.period)
            splits.append(VALIDATION)
        if self._tests and TEST in self.engine.dataset.sizes():
            splits.append(TEST)
        self.engine.prepare(periods, splits, self.step)
        self.pace.prepared(self.engine.steps_per_call)

    @property
    def _signal(self) -> int | None:
        """The signal that asks to save and exit; it may have reached another process of the run."""
        return self._own_signal if self._own_signal is not None else self._other_signal()

    @property
    def is_over(self) -> bool:
        """Whether this start has nothing more to train: the run has ended, or is paused."""
        return self.has_ended or self.is_paused

    @property
    def has_ended(self) -> bool:
        """Whether the last step is done or a hook has stopped the run."""
        return self.step >= self.total_steps or self.stop_reason is not None

    @property
    def is_paused(self) -> bool:
        """Whether the run has come to its pause_at."""
        return not self.has_ended and self.pause_step is not None and self.step >= self.pause_step

    @property
    def seconds(self) -> float:
        """Wall-clock time of training, earlier starts of the run included."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def epoch(self) -> float:
        """The number of epochs trained."""
        return float(self.step / self.run.steps_per_epoch)

    def check_metric(self, metric: str, wanted_by: str) -> None:
        """Raises if no evaluation measures ``metric``, before training and not after the first epoch. For hooks."""
        if self._evaluates:
            check_metric(self.engine, metric, wanted_by)

    def check_evaluates(self, wanted_by: str) -> None:
        """Raises if there is no validation split to evaluate on. For hooks."""
        check_validation(self.engine, wanted_by)

    def stop(self, reason: str) -> None:
        """Stops training after this step. For hooks."""
        if self.stop_reason is None:
            log.info("step %d  stopping: %s", self.step, reason)
            self.stop_reason = reason

    def snapshot(self) -> Checkpoint:
        """Returns the state of the run at this step, to be saved. For hooks.

        Raises:
            TrainingError: if weights are not finite: such a state is never saved.
        """
        if self._loaded is not None:
            return self._loaded
        began = time.monotonic()
        if self._snapshot is None or self._snapshot[0] != self.step:
            self._snapshot = self.step, self.engine.state()
            weights = self._snapshot[1].weights
            broken = next((name for name, value in weights.items() if not np.isfinite(value).all()), None)
            if broken is not None:
                raise TrainingError(
                    f"{broken} holds values that are not finite after step {self.step}, so that step is not saved. "
                    "The checkpoints before it are kept. Try a lower learning_rate, warmup or clip_norm."
                )
        loop_state = {
            "run": self.run_id,
            CONFIG_COPY: recorded_options(self.config),
            "window": dict(self._metric_sums),
            "window_steps": self._summed_steps,
            "seconds": self.seconds,
            "evaluated_step": self.evaluated_step,
            "owes_evaluation": self.evaluation_pending,
            "last_evaluation": self.last_evaluation,
            "paused": self.is_paused and not self.evaluation_pending,
            "stopped": self.stop_reason,
            "stopped_under": stop_rules(self.config),
            "threads": self.engine.threads,
            "replicas": self.engine.replicas,
            "total_steps": self.total_steps,
            "hooks": {hook.name: kept for hook in self.hooks if (kept := hook.state_dict())},
        }
        state = self._snapshot[1]
        self.save_pace.snapshot_seconds += time.monotonic() - began
        return Checkpoint(self.step, state.weights, state.optimizer, loop_state)

    def _train_chunk(self) -> None:
        """Trains to the next boundary, or as far as keeps the loop responsive, and calls the hooks."""
        boundaries = [
            self.pause_step or self.total_steps,
            self._log_cadence.next_after(self.step),
            *self.engine.phases.periods,
        ]
        if self._evaluates:
            boundaries.append(self._evaluation_cadence.next_after(self.step))
        boundaries += [at for hook in self.hooks if (at := hook.next_step(self)) is not None]
        boundaries += [at for at in (faults.next_step(self.step),) if at is not None]
        self.engine.phases.announce(self.step, self.engine.network.freezing)
        compiles = self.engine.compiles_at(self.step)
        count = min(min(at for at in boundaries if at > self.step) - self.step, self.pace.length(compiles))
        report(COMPILING if compiles else TRAINING, self.step, self.step + count, self.total_steps)
        began = time.perf_counter()
        metrics = self.engine.train(self.step, count)
        self.pace.add(count, time.perf_counter() - began, compiles)
        faults.trained(self.step, count)
        self.step += count
        report(TRAINING, self.step, total=self.total_steps)
        self.directory.check_in_place()
        self._add_to_window(metrics)
        self._call_hooks("on_steps", metrics)
        evaluates = self._evaluates and self._evaluation_due()
        # An evaluation is compared with training. At a pause, the sums go on as if there were none.
        if self._log_cadence.fires_at(self.step) or self.has_ended or (evaluates and self._evaluates_regularly()):
            self._log(metrics)
        if evaluates:
            self._evaluate()
        self._call_hooks("on_boundary")

    def _call_hooks(self, event: str, *arguments: Any) -> None:
        """Calls the method ``event`` of every hook."""
        for hook in self.hooks:
            self._call(hook, event, *arguments)

    def _call(self, hook: Hook, event: str, *arguments: Any) -> None:
        try:
            getattr(hook, event)(self, *arguments)
        except Exception as error:
            error.add_note(f"This happened in the hook {hook.name!r}, at step {self.step}.")
            raise

    def _add_to_window(self, metrics: StepMetrics) -> None:
        # Step by step, so that the sum does not depend on how the steps were cut into chunks.
        for name, values in metrics.items():
            total = self._metric_sums.get(name, 0.0)
            for value in values.tolist():
                total += value
            self._metric_sums[name] = total
        self._summed_steps += len(next(iter(metrics.values())))

    def _log(self, metrics: StepMetrics) -> None:
        """Logs means since the last log row; the learning rate is the last one."""
        means = {name: total / self._summed_steps for name, total in self._metric_sums.items()}
        means["learning_rate"] = float(metrics["learning_rate"][-1])
        self._metric_sums, self._summed_steps = {}, 0
        self.last_log = means
        self._call_hooks("on_log", self._row(TRAIN, self.step, means))

    def _evaluation_due(self) -> bool:
        return self.is_over or self._evaluates_regularly()

    def _evaluates_regularly(self) -> bool:
        if not self._evaluation_cadence.fires_at(self.step):
            return False
        return time.monotonic() - self._evaluated_at >= self.config.eval_throttle_secs

    def _evaluate(self) -> None:
        before, self.evaluated_step = self.evaluated_step, self.step
        self.evaluation_pending = False
        try:
            self.evaluate(VALIDATION)
        except EvaluationAbandonedError:  # the resumed run evaluates first
            self.evaluated_step, self.evaluation_pending = before, True
        self._evaluated_at = time.monotonic()

    def _after_the_last_step(self) -> None:
        if self._evaluates and self.evaluated_step != self.step:  # the run was trained without evaluation before
            self._evaluate()
            self._call_hooks("on_boundary")
        elif self.is_paused and not self.was_paused and self.step == self._first_step:
            self._call_hooks("on_boundary")  # what is saved of this step does not say that the run pauses
        if self._tests and self._signal is None and not self.is_paused:
            self._test_the_best()

    def _log_pause(self) -> None:
        where = (self.step, self.total_steps, shlex.quote(self.directory.address))
        log.info("the run is paused at step %d of %d, as pause_at says. To go on: modelyard resume %s", *where)

    def _test_the_best(self) -> None:
        """Evaluates the best model, or the last if none is kept, on the test split; once."""
        if TEST not in self.engine.dataset.sizes():
            log.info("there is no test split to evaluate on")
            return
        step = self._load_best()
        for row in self.directory.evaluations_of(TEST):
            if row.get("step") == step:
                self.last_test = {k: v for k, v in row.items() if k not in ("step", "epoch", "split", "seconds")}
                return
        with contextlib.suppress(EvaluationAbandonedError):
            self.last_test = self.evaluate(TEST, step)

    def _load_best(self) -> int:
        """Loads the best model that can be read, or keeps the last one; returns its step."""
        if self._evaluates:
            self.writer.flush()
        for path in list_best(self.directory.best):
            try:
                checkpoint = read_checkpoint(path)
            except CheckpointError as error:
                log.warning("%s The next best is used.", error)
                continue
            self.engine.load(checkpoint)
            return checkpoint.step
        return self.step

    def evaluate(self, split: str, step: int | None = None) -> dict[str, float]:
        """Evaluates the model as it is now on ``split`` and calls the hooks.

        Args:
            split: the split.
            step: the step of the model, if it is not this one.
        """
        report("testing" if split == TEST else "evaluating", self.step, total=self.total_steps)
        with bar(f"evaluating on {split}", self.engine.dataset.size(split)) as show:

            def progress(done: int, size: int) -> None:
                if self._signal is not None and done < size:
                    raise EvaluationAbandonedError
                show(done, size)

            faults.reach(faults.EVALUATE)
            found = self.engine.evaluate_examples(split, progress)
        self.directory.check_in_place()
        metrics, self.example_values = found.metrics, found.examples
        step = self.step if step is None else step
        if split == VALIDATION:
            self.last_evaluation = dict(metrics)
        elif split == TEST:  # before the row, which says that nothing more is to be done
            retried(self.directory.examples, write_example_values, self.directory, split, step, found.examples)
        self._call_hooks("on_evaluation", split, self._row(split, step, metrics))
        return metrics

    def _row(self, split: str, step: int, metrics: dict[str, float]) -> dict[str, Any]:
        return {
            "step": step,
            "epoch": round(float(step / self.run.steps_per_epoch), 6),
            "split": split,
            **{name: float(np.asarray(value)) for name, value in metrics.items()},
            "seconds": round(self.seconds, 3),
        }

    def _finish(self, begun: list[Hook]) -> None:
        """Ends every hook that began, and the writer; raises the first error."""
        errors: list[Exception] = []
        closings: list[Callable[[], None]] = [partial(hook.on_end, self) for hook in begun]
        for close in (*closings, self.writer.close):
            try:
                close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Lets the chunk end and saves at the first SIGTERM or Ctrl-C; raises at the second Ctrl-C."""

        def note(number: int, frame: Any) -> None:
            if self._own_signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._own_signal = number
            log.info("%s: saving, then exiting …", signal.Signals(number).name)

        with handle_signals(note):
            yield
