"""The hook contract, and the hook that saves checkpoints. A run calls its hooks like this:

    check_run(config, engine)                                # before anything of a new run is written
    for hook in hooks: hook.on_begin(loop)
    while steps are left:
        train a chunk of steps, up to the next boundary      # log, evaluation, hook.cadence, phase, end
        on_steps(loop, metrics)                              # after every chunk
        on_log(loop, row)                                    # when log_every is due
        on_evaluation(loop, split, row)                      # after an evaluation
        on_boundary(loop)                                    # when all of that has happened at this step
    on_interrupt(loop)                                       # only on SIGTERM or Ctrl-C
    on_end(loop)                                             # always, also after an error
    on_complete(config, result, directory)                   # when the run is complete, after its exports

A hook of your own:

    @modelyard.register_hook("cheer")
    class Cheer(modelyard.Hook):
        def on_evaluation(self, loop, split, row):
            if row["accuracy"] > 0.9:
                print("over 90 % at step", loop.step)

and on the command line ``--plugins my_hooks.py --hooks +cheer``.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modelyard.config.calls import Call
from modelyard.config.durations import InSteps, RunLength
from modelyard.config.schema import Config, edit_hooks
from modelyard.data.dataset import VALIDATION
from modelyard.errors import Problem, UserError, unknown
from modelyard.registry import HOOKS, METRICS
from modelyard.registry import Options as BaseOptions
from modelyard.run.checkpoint import list_checkpoints, prune, write_checkpoint
from modelyard.system.files import retried

if TYPE_CHECKING:
    from modelyard.engine.base import Engine, StepMetrics
    from modelyard.loop.run import Result
    from modelyard.loop.trainer import Trainer
    from modelyard.run.directory import RunDirectory

_OLD_NAMES = {
    "begin": "on_begin",
    "trained": "on_steps",
    "reported": "on_log",
    "evaluated": "on_evaluation",
    "settled": "on_boundary",
    "interrupted": "on_interrupt",
    "end": "on_end",
    "memory": "state_dict",
    "remember": "load_state_dict",
}


class Hook:
    """Acts at certain moments of a run. Override what you need.

    Args:
        options: the typed options of the hook.
    """

    Options: type[BaseOptions] = BaseOptions
    name = ""
    """The name it is registered under."""
    order = 0
    """Hooks are called from the lowest to the highest."""
    cadence: InSteps | None = None
    """The steps at which this hook must be called; set it in `on_begin`. Chunks end at these steps."""
    needs_training = True
    """Whether it must run where steps are trained. A separate evaluator process leaves such hooks out."""
    needs_evaluation = False
    """Whether it must see evaluations. With a separate evaluator, training leaves such hooks out."""

    def __init__(self, options: BaseOptions) -> None:
        self.options = options

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _support_old_names(cls)

    def check_run(self, config: Config, engine: Engine) -> None:
        """Called before anything of a new run is written; raises a `UserError` if the hook can't work in it."""

    def on_begin(self, loop: Trainer) -> None:
        """Called before the first step of this process; ``loop.step`` is the step it continues from."""

    def next_step(self, loop: Trainer) -> int | None:
        """Returns the next step after which this hook must be called, or None; by default that of `cadence`."""
        return self.cadence.next_after(loop.step) if self.cadence is not None else None

    def on_steps(self, loop: Trainer, metrics: StepMetrics) -> None:
        """Called after a chunk of steps, with the metrics of each step."""

    def on_log(self, loop: Trainer, row: dict[str, Any]) -> None:
        """Called when training metrics are due. A hook may add to the row for the hooks after it."""

    def on_evaluation(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Called after an evaluation."""

    def on_boundary(self, loop: Trainer) -> None:
        """Called last after every chunk, when all of the above has happened at this step."""

    def on_interrupt(self, loop: Trainer) -> None:
        """Called before the run ends because of SIGTERM or Ctrl-C."""

    def on_end(self, loop: Trainer) -> None:
        """Called after the last step, also when training failed or was interrupted."""

    def on_complete(self, config: Config, result: Result, directory: RunDirectory) -> None:
        """Called when a run is complete and its exports are made. It is another instance than that of the run."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what must survive a restart, as plain JSON values; saved with every checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` returned."""


def _support_old_names(cls: type[Hook]) -> None:
    """Lets hooks written for the old method names work, and classes that call the old names of their parents."""
    renamed = {}
    for old, new in _OLD_NAMES.items():
        # The first class with either name decides. A mixin that is no hook has the old name only.
        owner = next((base for base in cls.__mro__ if old in vars(base) or new in vars(base)), None)
        if owner is not None and new not in vars(owner):
            setattr(cls, new, vars(owner)[old])
            renamed[old] = new
        elif owner is cls:
            setattr(cls, old, vars(cls)[new])
    if renamed:
        names = ", ".join(f"{old} → {new}" for old, new in renamed.items())
        text = f"the hook {cls.__name__} has old method names. Rename them before version 1.0: {names}"
        warnings.warn(text, FutureWarning, stacklevel=3)  # Python hides a DeprecationWarning from the users of a plugin


_support_old_names(Hook)


def build_hooks(calls: Sequence[Call]) -> list[Hook]:
    """Makes the hooks of a config, the default ones included, in the order they are called."""
    hooks: list[Hook] = []
    for call in edit_hooks(tuple(calls)):
        hook = HOOKS.get(call.name).load()(call.options(HOOKS))
        if not isinstance(hook, Hook):
            raise UserError(f"the hook {call.name!r} must be a subclass of modelyard.Hook.")
        if any(other.name == call.name for other in hooks):
            raise UserError(f"the hook {call.name!r} is named twice.")
        hook.name = call.name
        hooks.append(hook)
    return sorted(hooks, key=lambda hook: hook.order)


def check_metric(engine: Engine, metric: str, wanted_by: str) -> None:
    """Raises if no evaluation measures ``metric``."""
    if metric in ("auto", "loss") or VALIDATION not in engine.dataset.sizes():
        return
    known = engine.metric_names(VALIDATION)
    if metric not in known and metric in METRICS.names():
        raise UserError(f"{wanted_by}: the evaluations have no {metric!r}. Add it to the metrics: --metrics {metric}.")
    if metric not in known:
        raise UserError(f"{wanted_by}: {unknown('metric', metric, known)}")


def check_validation(engine: Engine, wanted_by: str) -> None:
    """Raises if there is no validation split to evaluate on."""
    sizes = engine.dataset.sizes()
    if VALIDATION not in sizes:
        raise UserError(
            f"{wanted_by} needs a validation split, and there is none: the splits are {', '.join(sizes)}. "
            "Give a validation_fraction of more than 0, or leave it out."
        )


def stopping_hook_problems(config: Config) -> list[Problem]:
    """Returns the hooks that stop training after an evaluation, which another process makes."""
    stopping = [hook.name for hook in build_hooks(config.hooks) if hook.needs_training and hook.needs_evaluation]
    if not stopping:
        return []
    names = " and ".join(stopping)
    message = f"{names} must see evaluations in the process that trains; run without an evaluator process."
    return [Problem(config.origin("hooks"), "hooks", message)]


class SaveCheckpoints(Hook):
    """Saves at step 0, every ``save_every``, when interrupted, and at the end."""

    order = 100  # last, so that it saves the other hooks' state after this step

    def __init__(self, options: BaseOptions) -> None:
        super().__init__(options)
        self._saved: tuple[int, int | None, bool] = (-1, None, False)

    def on_begin(self, loop: Trainer) -> None:
        """Saves a new run before its first step."""
        every = loop.config.save_every
        self.cadence = InSteps(every.period(loop.run)) if every is not None and every.seconds is None else None
        self._saved_at = time.monotonic()
        loop.save_pace.begin(loop.evaluated_step)
        if loop.step in list_checkpoints(loop.directory.checkpoints):
            self._saved = (loop.step, loop.evaluated_step, loop.was_paused)
        else:
            self._save(loop)
        loop.save_pace.forget_cost()  # the first save may take longer than all others

    def on_boundary(self, loop: Trainer) -> None:
        """Saves if it is due."""
        if self._is_due(loop) or loop.is_over:
            self._save(loop)

    def on_interrupt(self, loop: Trainer) -> None:
        """Saves before the run ends."""
        self._save(loop)

    def _is_due(self, loop: Trainer) -> bool:
        every, waited = loop.config.save_every, time.monotonic() - self._saved_at
        if every is None:
            return loop.save_pace.is_due(waited, loop.evaluated_step)
        if every.seconds is not None:
            return waited >= every.seconds
        return self.cadence is not None and self.cadence.fires_at(loop.step)

    def _save(self, loop: Trainer) -> None:
        what = (loop.step, loop.evaluated_step, loop.is_paused)
        if self._saved == what:
            return
        loop.save_pace.begin(loop.evaluated_step)
        checkpoint = loop.snapshot()
        self._saved, self._saved_at = what, time.monotonic()
        directory, keep = loop.directory, loop.config.keep_checkpoints

        def write() -> None:
            directory.check_in_place()
            retried(directory.checkpoints, write_checkpoint, directory.checkpoints, checkpoint)
            prune(directory.checkpoints, keep)
            directory.push(keep)

        loop.writer.submit(write)


def stopped_by(state: Mapping[str, Any], config: Config, total_steps: int) -> str | None:
    """Returns why a hook has stopped the run; it stays stopped until the hooks or the number of steps change."""
    unchanged = state.get("total_steps") == total_steps and state.get("stopped_under") == stop_rules(config)
    return state.get("stopped") if unchanged else None


def pause_step(config: Config, run: RunLength) -> int | None:
    """Returns the step at which this start of a run pauses; None if it trains to the end."""
    step = run.total_steps if config.pause_at is None else config.pause_at.steps(run)
    return step if step < run.total_steps else None


def stop_rules(config: Config) -> list[str]:
    """Returns the hooks that may stop the run before its last step."""
    return [str(call) for call in config.hooks]
