"""A run, from its config to its result: the stages, in order.

Modules that import Keras are imported in functions, because the engine of the config decides on Keras's backend first.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from modelyard import faults
from modelyard.charts.curves import Curves
from modelyard.cluster.description import CHIEF, EVALUATOR, Cluster
from modelyard.config import Config, resolve
from modelyard.config.backend import choose_engine, import_engine, select_engine
from modelyard.config.durations import RunLength
from modelyard.data.dataset import TEST, TRAIN, VALIDATION, Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import CheckpointError, ConfigError, Problem, RunError
from modelyard.loop.hooks import Hook, SaveCheckpoints, build_hooks, pause_step, stopped_by, stopping_hook_problems
from modelyard.loop.start import (
    find_folder,
    log_machine,
    record_start,
    refuse_other_classes,
    refuse_other_config,
    remove_if_nothing_started,
    resolve_run_config,
)
from modelyard.loop.warm_start import read_initial_weights, warm_start
from modelyard.registry import ENGINES
from modelyard.run.checkpoint import list_best, list_checkpoints, load_latest, read_loop_state, step_of
from modelyard.run.directory import RunDirectory, open_run_folder
from modelyard.run.manifest import log_result, read_manifest
from modelyard.run.metrics import read_metrics
from modelyard.system.activity import report
from modelyard.system.interrupt import check_interrupted
from modelyard.system.machine import gpus
from modelyard.system.process import log_to

if TYPE_CHECKING:
    from modelyard.engine.base import Engine
    from modelyard.loop.trainer import Trainer

log = logging.getLogger("modelyard")


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Args:
        model_dir: the run folder.
        step: how many steps were trained.
        split: the split of ``metrics``.
        metrics: ``loss``, ``accuracy`` and the other metrics of the task.
        model_step: the step of the evaluated model; the best model's for test at the end.
        best: the best model by validation: metric, value, step, path; empty if none was kept.
        validation: metrics of the last evaluation on validation.
        seconds: wall-clock time of training, all starts together.
        role: the role of this process; in a cluster, only chief and evaluator have metrics.
        exports: the folders of the exports (export_at_end).
        paused: the run has come to its pause_at, and is neither tested nor exported.
        evaluates_elsewhere: another process evaluates this run, and knows its best model.
    """

    model_dir: str
    step: int
    split: str
    metrics: dict[str, float]
    model_step: int
    best: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    role: str = "chief"
    exports: tuple[str, ...] = ()
    evaluates_elsewhere: bool = False
    paused: bool = False

    def __str__(self) -> str:
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        text = [f"{self.split}, model of step {self.model_step}: {metrics}"]
        if self.best:
            text.append(f"best validation {self.best['metric']}: {self.best['value']:.4g} at step {self.best['step']}")
        return "\n".join([*text, f"run folder: {self.model_dir}"])

    def __fspath__(self) -> str:
        """Returns the run folder: where a function takes a run, it takes its result, too."""
        return self.model_dir

    def plot(self) -> Curves:
        """Returns the curves of the run, which a notebook shows as charts: loss, metrics, learning rate, speed.

        Example:
            >>> result.plot()
            >>> result.plot().save("curves.svg")
        """
        directory = open_run_folder(self.model_dir)
        rows = [*read_metrics(directory.metrics), *read_metrics(directory.evaluations)]
        return Curves(rows, self.best.get("step"), directory.name)

    def as_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


class SingleProcess:
    """The processes of a run that has one. Runs with several have a subclass, in `modelyard.distributed`."""

    cluster = Cluster()

    def join(self, directory: RunDirectory, config: Config, dataset: Dataset) -> None:
        """Waits for the other processes of the run."""

    def create_engine(self, config: Config) -> Engine:
        """Makes the engine."""
        return create_engine(config)

    def signal(self) -> int | None:
        """Returns the signal that another process of the run got, if any."""
        return None


def run(config: Config, evaluates: bool, processes: SingleProcess | None = None) -> Result:
    """Trains, stage by stage, in the process that decides and writes.

    Args:
        config: the resolved config.
        evaluates: whether to evaluate on validation during training, keep the best, and test it if the config says so.
        processes: the other processes of the run; by default there are none.
    """
    processes = processes or SingleProcess()
    cluster = processes.cluster
    threading.Thread(target=gpus, daemon=True).start()  # asking the driver takes a while; there is other work to do
    directory = find_folder(config)
    cleanup = remove_if_nothing_started(directory) if cluster.is_alone else contextlib.nullcontext()
    name, at_end = cluster.me.file_name, contextlib.ExitStack()
    with faults.injected(directory.logs, name), directory, log_to(directory.logs, name), cleanup, at_end:
        # 1. Config and data: the run's own, or those of a new run.
        config = resolve_run_config(directory, config)
        checkpoint = load_latest(directory.checkpoints, directory.best, read_manifest(directory).get("run_id"))
        if checkpoint is not None:
            refuse_other_config(directory, config, checkpoint.step, checkpoint.loop_state)
        initial_weights = None if checkpoint is not None else read_initial_weights(config)
        report("loading data")
        log.info("reading the data: %s …", config.dataset)
        dataset = load_dataset(config, kept=True)
        if checkpoint is not None:
            refuse_other_classes(directory, config, dataset)
        if evaluates:
            _check_validation(config, dataset, cluster)
        check_interrupted()
        processes.join(directory, config, dataset)
        evaluates_elsewhere = _evaluates_elsewhere(config, evaluates, cluster, directory)

        # 2. Engine and model.
        engine = processes.create_engine(config)
        from modelyard.compat.keras import precision_kept

        at_end.enter_context(precision_kept())
        length = run_length(config, dataset)
        if checkpoint is not None and checkpoint.step > length.total_steps:
            raise RunError(
                f"{directory.address} is at step {checkpoint.step} already, and {length.total_steps} are asked for; "
                "nothing was changed."
            )
        pause = pause_step(config, length)
        if checkpoint is not None and pause is not None and checkpoint.step > pause:
            raise RunError(
                f"{directory.address} is at step {checkpoint.step} already, and pause_at is step {pause}; nothing was "
                "changed. Give a later one, or leave it out to train to the end."
            )
        log_machine(directory, config, dataset, engine)
        if length.batch_size > length.examples:
            log.warning(
                "train_batch_size is %d, and there are only %d training examples: each batch repeats some. For whole "
                "epochs of different batches, choose a smaller one",
                length.batch_size,
                length.examples,
            )
        build(engine, config, dataset, length)

        # 3. Weights: of the newest checkpoint, from elsewhere, or new.
        if checkpoint is not None:
            engine.load(checkpoint)
        else:
            engine.initialize()
            if initial_weights is not None:
                warm_start(engine, initial_weights)
        hooks = build_hooks(config.hooks)
        if evaluates_elsewhere:
            hooks = [hook for hook in hooks if not hook.needs_evaluation]
        for hook in hooks:  # before anything of a new run is written
            if evaluates or not hook.needs_evaluation:
                hook.check_run(config, engine)
        check_interrupted()
        run_id = record_start(directory, config, dataset, engine, length, checkpoint, evaluates)

        # 4. Training.
        if evaluates_elsewhere:
            log.info("an evaluator process evaluates what is saved (save_every: %s)", config.save_every or "auto")
        if not any(isinstance(hook, SaveCheckpoints) for hook in hooks):
            log.warning("the hook checkpoint is off: nothing is saved, and this run can't be resumed")
        from modelyard.loop.trainer import Trainer

        evaluates = evaluates and not evaluates_elsewhere
        trainer = Trainer(config, engine, directory, length, run_id, hooks, evaluates, checkpoint, processes.signal)
        try:
            trainer.train()
        except Exception as error:
            error.add_note(
                f"The run folder is {directory.address}; `modelyard resume` with it continues from the last checkpoint."
            )
            raise
        finally:
            engine.close()
        return conclude(directory, trainer, cluster, evaluates_elsewhere)


def _evaluates_elsewhere(config: Config, evaluates: bool, cluster: Cluster, directory: RunDirectory) -> bool:
    """Returns whether another process evaluates: one of the cluster, or one that took that part of the run folder.

    Raises:
        ConfigError: if a hook must see the evaluations here.
    """
    if cluster.has_evaluator or not evaluates:
        return cluster.has_evaluator
    if directory.take_evaluation():
        return False
    log.info("%s evaluates this run", directory.who_evaluates())
    problems = stopping_hook_problems(config)
    if problems:
        raise ConfigError(problems)
    return True


def _check_validation(config: Config, dataset: Dataset, cluster: Cluster) -> None:
    """Raises if there is no validation split, unless the config says that there need not be one."""
    if config.validation_fraction == 0 and VALIDATION not in dataset.sizes() and not cluster.has_evaluator:
        last = "; the model after the last step is tested" if config.test_at_end else ""
        log.info("there is no validation split (validation_fraction is 0): training is not evaluated%s", last)
        return
    dataset.size(VALIDATION)


def as_config(config: Config | Mapping[str, Any] | None, options: Mapping[str, Any]) -> Config:
    """Returns the config of a public function, which takes a `Config`, a dictionary, or options by name."""
    if not isinstance(config, Config):
        return resolve({**(config or {}), **options}, source="Python", pick_up_files=False)
    if options:
        raise TypeError("give a Config or options by name, not both; load_config(...) takes options.")
    return config


# -- data, engine and model -------------------------------------------------------------------------------------------


def create_engine(config: Config) -> Engine:
    """Makes the engine of a run of one process."""
    name = import_engine(config.engine)
    if name == "jax":
        from modelyard.engine.jax_devices import start_devices

        start_devices(config)
    return load_engine(name, config)(config)


def load_engine(name: str, config: Config) -> Callable[..., Engine]:
    """Imports the engine called ``name`` and logs why it was chosen."""
    select_engine(name)
    log.info("engine %s (%s)", name, choose_engine(config.engine)[1])
    engine: Callable[..., Engine] = ENGINES.get(name).load()
    return engine


def run_length(config: Config, dataset: Dataset) -> RunLength:
    """Returns the length of the run: N epochs are ceil(N × examples / batch) steps."""
    return length_of(config, dataset.size(TRAIN))


def length_of(config: Config, examples: int) -> RunLength:
    """Returns the length of a run on so many training examples."""
    if config.train_steps is not None:
        total = config.train_steps
    elif config.train_epochs is not None:
        # As written, not as a binary float: 1.1 epochs of 100 examples are 110, not 110.00000000000001.
        total = math.ceil(Fraction(repr(config.train_epochs)) * examples / config.train_batch_size)
    else:
        raise ConfigError([Problem("config", "train_steps", "is missing, and so is train_epochs; give one.")])
    return RunLength(examples, config.train_batch_size, total)


def is_finished(directory: RunDirectory, config: Config, length: Callable[[], RunLength]) -> bool:
    """Returns whether the newest checkpoint is the last that the run will have under ``config``.

    Args:
        directory: the run folder.
        config: the config; a finished run may be asked for more steps.
        length: returns the length of the run; called only if something is saved.
    """
    saved = list_checkpoints(directory.checkpoints)
    if not saved:
        return False
    try:
        state = read_loop_state(saved[max(saved)])
    except CheckpointError:
        return False
    run = length()
    last = pause_step(config, run) or run.total_steps
    return max(saved) >= last or stopped_by(state, config, run.total_steps) is not None


def build(engine: Engine, config: Config, dataset: Dataset, length: RunLength) -> None:
    """Makes the model and hands it to the engine."""
    check_interrupted()
    report("building the model")
    log.info("building the model: %s …", config.model)
    from modelyard.engine.network import build_network
    from modelyard.models.choose_task import build_task

    with engine.model_scope():
        network = build_network(config, build_task(config, dataset), length)
    engine.build(network, dataset, length)
    log.info("model %s: %s parameters", config.model, f"{engine.model.count_params():,}")


def conclude(directory: RunDirectory, trainer: Trainer, cluster: Cluster, evaluates_elsewhere: bool = False) -> Result:
    """Collects the results and adds them to the journal."""
    role = EVALUATOR if cluster.me.role == EVALUATOR else CHIEF
    best = {} if evaluates_elsewhere else best_of(directory)  # the other process is still at work
    validation = {k: float(v) for k, v in trainer.last_evaluation.items()}
    split, metrics, model_step = VALIDATION, validation, trainer.step
    if trainer.last_test:
        split, metrics = TEST, {k: float(v) for k, v in trainer.last_test.items()}
        model_step = best.get("step", trainer.step)
    elif not validation:
        split, metrics = TRAIN, trainer.last_log
    seconds = round(trainer.seconds, 2)
    result = Result(
        directory.address, trainer.step, split, metrics, model_step, best, validation, seconds, role,
        evaluates_elsewhere=evaluates_elsewhere, paused=trainer.is_paused,
    )  # fmt: skip
    shown: dict[str, Any] = {f"{split} {name}": value for name, value in metrics.items()}
    shown |= {f"best validation {best['metric']}": f"{best['value']:.6g} at step {best['step']}"} if best else {}
    ended = f"{trainer.step}" + (f" ({trainer.stop_reason})" if trainer.stop_reason else "")
    ended += f" (paused; the run has {trainer.total_steps})" if trainer.is_paused else ""
    log_result(directory.journal, directory.name, {"step": ended, **shown, "seconds": result.seconds})
    return result


def report_result(config: Config, result: Result) -> None:
    """Tells the hooks that the run is complete."""
    hooks = [hook for hook in build_hooks(config.hooks) if type(hook).on_complete is not Hook.on_complete]
    if hooks:
        directory = open_run_folder(result.model_dir, config.cache_dir)
        if directory.mirror is not None:
            directory.mirror.fetch_folder(directory.trackers)
        for hook in hooks:
            hook.on_complete(config, result, directory)


def best_of(directory: RunDirectory) -> dict[str, Any]:
    """Returns the best model of the run, or nothing if none was kept."""
    paths = list_best(directory.best)
    if not paths:
        return {}
    best = read_loop_state(paths[0])["best"]
    path = directory.address_of(paths[0])
    return {"metric": best["metric"], "value": best["value"], "step": step_of(paths[0]), "path": path}
