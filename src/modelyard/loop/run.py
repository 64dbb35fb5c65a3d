"""A run, from its config to its result: the stages, in order.

Modules that import Keras are imported in functions, because the engine of the config decides on Keras's backend first.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard import storage
from modelyard.cluster.description import CHIEF, EVALUATOR, Cluster
from modelyard.config import Config, load_config
from modelyard.config.backend import choose_engine, import_engine, select_engine
from modelyard.config.durations import RunLength
from modelyard.config.schema import COMPONENTS, CORE_FIELDS, is_path
from modelyard.config.yaml_file import inline
from modelyard.data.dataset import TEST, TRAIN, VALIDATION, Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import ChangedConfigError, CheckpointError, ConfigError, DataError, Problem, RunError
from modelyard.loop.hooks import SaveCheckpoints, build_hooks, stopped_by
from modelyard.loop.warm_start import read_initial_weights, warm_start
from modelyard.registry import ENGINES
from modelyard.run.checkpoint import Checkpoint, list_best, list_checkpoints, load_latest, read_loop_state, step_of
from modelyard.run.directory import (
    RunDirectory,
    differences,
    path_options,
    run_folder,
    run_options,
    write_config,
)
from modelyard.run.manifest import log_result, log_start, read_manifest, write_manifest
from modelyard.system.files import explain
from modelyard.system.machine import gpus, hardware, versions
from modelyard.system.process import holders, log_to

if TYPE_CHECKING:
    from modelyard.engine.base import Engine
    from modelyard.loop.hooks import Hook
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

    def hooks(self, hooks: list[Hook]) -> list[Hook]:
        """Returns the hooks that run in this process."""
        return hooks

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
    tidy = remove_if_nothing_started(directory) if cluster.is_alone else contextlib.nullcontext()
    with directory, log_to(directory.logs, cluster.me.file_name), tidy:
        # 1. Config and data: the run's own, or those of a new run.
        config = resolve_run_config(directory, config)
        checkpoint = load_latest(directory.checkpoints)
        warm = None if checkpoint is not None else read_initial_weights(config)
        dataset = load_dataset(config)
        if evaluates:
            _check_validation(config, dataset, cluster)
        processes.join(directory, config, dataset)

        # 2. Engine and model.
        engine = processes.create_engine(config)
        length = run_length(config, dataset)
        if checkpoint is not None and checkpoint.step > length.total_steps:
            raise RunError(
                f"{directory.address} is at step {checkpoint.step} already, and {length.total_steps} are asked for; "
                "nothing was changed."
            )
        log_machine(directory, config, dataset, engine)
        build(engine, config, dataset, length)

        # 3. Weights: of the newest checkpoint, from elsewhere, or new.
        if checkpoint is not None:
            engine.load(checkpoint)
        else:
            engine.initialize()
            if warm is not None:
                warm_start(engine, warm)
        run_id = record_start(directory, config, dataset, engine, length, checkpoint, evaluates)

        # 4. Training.
        if cluster.has_evaluator:
            log.info("the evaluator evaluates what is saved: every %s (save_every)", config.save_every)
        hooks = processes.hooks(build_hooks(config.hooks))
        if not any(isinstance(hook, SaveCheckpoints) for hook in hooks):
            log.warning("the hook checkpoint is off: nothing is saved, and this run can't be resumed")
        from modelyard.loop.trainer import Trainer

        evaluates = evaluates and not cluster.has_evaluator
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
        return conclude(directory, trainer, cluster)


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
        return load_config(**{**(config or {}), **options})
    if options:
        raise TypeError("give a Config or options by name, not both; load_config(...) takes options.")
    return config


# -- folder and config -----------------------------------------------------------------------------------------------


def find_folder(config: Config) -> RunDirectory:
    """Returns the run folder, new or existing."""
    _refuse_remote_best(config)
    directory = run_folder(config)
    path = directory.address
    if directory.exists():
        if config.resume == "never":
            raise RunError(f"{path} exists, and resume is 'never'. Name another --model_dir, or set resume to 'auto'.")
        if directory.mirror is not None:
            directory.create()
        return directory
    if config.resume == "must":
        raise RunError(f"there is no run in {path} to resume, and resume is 'must'.")
    if directory.path.exists() and not directory.path.is_dir():
        raise RunError(f"{path} is a file; --model_dir must name a folder.")
    unexpected = directory.unexpected_files()
    if unexpected:
        raise RunError(
            f"{path} is not empty and not a run folder (it holds {', '.join(unexpected[:3])}). Name another."
        )
    directory.create()
    if config.best_model_dir:
        with explain(directory.best, "make the folder of the best models"):
            directory.best.mkdir(parents=True, exist_ok=True)
    return directory


def _refuse_remote_best(config: Config) -> None:
    """Refuses best_model_dir with cloud storage: there, the best models are in the run folder."""
    best, run = config.best_model_dir, config.model_dir or config.runs_dir
    if best is not None and (storage.is_remote(best) or storage.is_remote(run)):
        message = f"{best!r} is not supported with cloud storage: the best models of a run at a URL are in its best/."
        raise ConfigError([Problem(config.origin("best_model_dir"), "best_model_dir", message)])


@contextlib.contextmanager
def remove_if_nothing_started(directory: RunDirectory) -> Iterator[None]:
    """Removes the folder if the block fails before anything is written, unless a launcher has its log there."""
    try:
        yield
    except BaseException:
        if any(holder.pid != os.getpid() for holder in holders(directory.logs)):
            raise
        if not directory.exists() and not directory.unexpected_files() and not list_checkpoints(directory.checkpoints):
            shutil.rmtree(directory.path, ignore_errors=True)
        raise


def resolve_run_config(directory: RunDirectory, config: Config) -> Config:
    """Returns the config to run with, after checking that an existing run can be resumed with it.

    Raises:
        ConfigError: with the options that differ and must not.
    """
    config = with_absolute_paths(config, directory)
    if not directory.exists():
        return config
    threads = run_options(directory).get("threads")
    if config.threads == 0 and isinstance(threads, int):  # pinned for a deterministic run
        config = config.model_copy(update={"threads": threads})
    try:
        refuse_changes(directory, config)
    except ConfigError:
        if max(list_checkpoints(directory.checkpoints), default=0) or list_checkpoints(directory.best):
            raise
        log.info("nothing was trained in %s yet; starting over with the new config", directory.address)
        directory.start_over()
    return config


def with_absolute_paths(config: Config, directory: RunDirectory | None = None) -> Config:
    """Returns the config with absolute paths, so that the run can be resumed from another folder."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else storage.absolute(path)

    paths = {key: config.component_options[key] for key in path_options(config) if key in config.component_options}
    update: dict[str, Any] = {
        "data_dir": absolute(config.data_dir),
        "checkpoint_path": absolute(config.checkpoint_path),
        "cache_dir": absolute(config.cache_dir),
        "dataset": absolute(config.dataset) if is_path(config.dataset) else config.dataset,
        "plugins": tuple(str(Path(p).absolute()) if p.endswith(".py") else p for p in config.plugins),
        "component_options": {**config.component_options, **{key: absolute(path) for key, path in paths.items()}},
    }
    if config.best_model_dir is not None and directory is not None:
        update["best_model_dir"] = str(directory.best)
    return config.model_copy(update=update)


def refuse_changes(directory: RunDirectory, config: Config) -> None:
    """Logs what ``config`` changes in an existing run.

    Raises:
        ConfigError: if an option differs that must not.
    """
    changed = differences(directory, config)
    refused = [(key, there, here) for key, there, here, free in changed if not free]
    if refused:
        parts = [key for key, _, _ in refused if key in COMPONENTS]
        raise ChangedConfigError(
            Problem(config.origin(key), key, f"is {inline(here)} here, {inline(there)} in the run {directory.address}.")
            for key, there, here in refused
            if key in CORE_FIELDS or not parts  # for another model, its options need not be listed
        )
    for key, there, here, _ in changed:
        log.info("%s: %s, was %s when the run was last started", key, inline(here), inline(there))


# -- data, engine and model -------------------------------------------------------------------------------------------


def create_engine(config: Config) -> Engine:
    """Makes the engine of a run of one process."""
    name = import_engine(config.engine)
    if name == "jax":
        from modelyard.engine.jax_devices import wake_devices

        wake_devices(config)
    return load_engine(name, config)(config)


def load_engine(name: str, config: Config) -> Callable[..., Engine]:
    """Imports the engine called ``name`` and logs why it was chosen."""
    select_engine(name)
    log.info("engine %s (%s)", name, choose_engine(config.engine)[1])
    engine: Callable[..., Engine] = ENGINES.get(name).load()
    return engine


def run_length(config: Config, dataset: Dataset) -> RunLength:
    """Returns the length of the run: N epochs are ceil(N × examples / batch) steps."""
    examples = dataset.size(TRAIN)
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
    total = length().total_steps
    return max(saved) >= total or stopped_by(state, config, total) is not None


def build(engine: Engine, config: Config, dataset: Dataset, length: RunLength) -> None:
    """Makes the model and hands it to the engine."""
    from modelyard.engine.network import build_network
    from modelyard.models.task_types import build_task

    with engine.model_scope():
        network = build_network(config, build_task(config, dataset), length)
    engine.build(network, dataset, length)
    log.info("model %s: %s parameters", config.model, f"{engine.model.count_params():,}")


# -- log, manifest and journal ----------------------------------------------------------------------------------------


def log_machine(directory: RunDirectory, config: Config, dataset: Dataset, engine: Engine) -> None:
    """Logs versions, machine, devices, data and options."""
    machine = hardware()
    log.info("run folder %s", directory.address)
    log.info("versions: %s", ", ".join(f"{name} {version}" for name, version in versions().items()))
    log.info("machine: %s, %d cores, %s GiB memory", machine["cpu"], machine["cores"], machine["memory_gib"])
    log.info("GPUs: %s", "; ".join(machine["gpus"]) or "none")
    log.info("devices: %s, %d threads", ", ".join(engine.describe()["devices"]), engine.threads)
    log.info("dataset %s: %s", config.dataset, ", ".join(f"{n:,} {split}" for split, n in dataset.sizes().items()))
    log.info("options other than the defaults: %s", _listed(config.changed()) or "none")
    log.debug("all options: %s", _listed(config.flat()))
    for note in config.notes:
        log.info("%s", note)


def record_start(
    directory: RunDirectory,
    config: Config,
    dataset: Dataset,
    engine: Engine,
    run: RunLength,
    checkpoint: Checkpoint | None,
    evaluates: bool,
) -> str:
    """Writes config, manifest and journal, once all checks have passed. Returns the id of the run.

    Raises:
        DataError: if the data is not the data that the run started with.
    """
    step = checkpoint.step if checkpoint is not None else 0
    before = read_manifest(directory)
    fingerprint = dataset.fingerprint()
    known = before.get("dataset", {}).get("fingerprint")
    if known is not None and known != fingerprint:
        raise DataError(
            f"the data of {config.dataset!r} is not the data this run started with: {_sizes(dataset.sizes())}, "
            f"was {_sizes(before['dataset'].get('sizes', {}))} (fingerprint {fingerprint[:12]}, was {known[:12]}). "
            "Restore the old data, or start a new run."
        )
    if checkpoint is not None:
        log.info("resuming at step %d of %d", step, run.total_steps)
        _log_inexact_resume(config, engine, run, checkpoint, before)
    else:
        log.info("%d steps of %d examples", run.total_steps, run.batch_size)
    # Threads decide the last bits, so a deterministic run pins them.
    write_config(directory, config.model_copy(update={"threads": engine.threads}) if config.deterministic else config)
    from modelyard.models.data_info import record_data

    described = {"fingerprint": fingerprint, "sizes": dataset.sizes(), "classes": list(dataset.classes)[:1000]}
    before.update(
        run_id=before.get("run_id") or uuid.uuid4().hex,
        evaluates=evaluates,
        model=_size_of(engine),
        data=record_data(config, dataset, engine.task.data),
    )
    manifest = write_manifest(directory, config, described, engine.describe(), step, before)
    if step < run.total_steps:
        log_start(directory.journal, directory.name, config, step)
    return str(manifest["run_id"])


def _size_of(engine: Engine) -> dict[str, int | None]:
    """Returns parameters and FLOPs of the model; None if they cannot be counted from its shapes."""
    from modelyard.models.flops import flops

    computed = None
    with contextlib.suppress(Exception):  # a user's model may do anything, and this is information only
        computed = flops(engine.model)
    return {"parameters": int(engine.model.count_params()), "flops": computed}


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in sizes.items()) or "unknown"


def _log_inexact_resume(
    config: Config, engine: Engine, run: RunLength, checkpoint: Checkpoint, manifest: dict[str, Any]
) -> None:
    state = checkpoint.loop_state
    if state.get("total_steps", run.total_steps) != run.total_steps:
        log.info(
            "the run now has %d steps, it had %d; the learning-rate schedule%s the new number",
            run.total_steps,
            state["total_steps"],
            " and phases given in percent follow" if len(config.fine_tune) > 1 else " follows",
        )
    if not config.deterministic:
        return
    now = {"threads": engine.threads, "replicas": engine.replicas, **versions()}
    last = manifest.get("starts") or [{}]
    then = last[-1].get("versions", {}) | {name: state[name] for name in ("threads", "replicas") if name in state}
    for name in sorted(set(now) & set(then)):
        if now[name] != then[name]:
            inexact = "the result may not be bit-identical to that of an uninterrupted run"
            log.warning("%s: %s, was %s; %s", name, now[name], then[name], inexact)


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={inline(value)}" for key, value in options.items())


def conclude(directory: RunDirectory, trainer: Trainer, cluster: Cluster) -> Result:
    """Collects the results and adds them to the journal."""
    role = EVALUATOR if cluster.me.role == EVALUATOR else CHIEF
    best = {} if cluster.has_evaluator and role == CHIEF else best_of(directory)  # it is still at work
    validation = {k: float(v) for k, v in trainer.last_evaluation.items()}
    split, metrics, model_step = VALIDATION, validation, trainer.step
    if trainer.last_test:
        split, metrics = TEST, {k: float(v) for k, v in trainer.last_test.items()}
        model_step = best.get("step", trainer.step)
    elif not validation:
        split, metrics = TRAIN, trainer.last_log
    seconds = round(trainer.seconds, 2)
    result = Result(directory.address, trainer.step, split, metrics, model_step, best, validation, seconds, role)
    shown: dict[str, Any] = {f"{split} {name}": value for name, value in metrics.items()}
    shown |= {f"best validation {best['metric']}": f"{best['value']:.6g} at step {best['step']}"} if best else {}
    ended = f"{trainer.step}" + (f" ({trainer.stop_reason})" if trainer.stop_reason else "")
    log_result(directory.journal, directory.name, {"step": ended, **shown, "seconds": result.seconds})
    return result


def best_of(directory: RunDirectory) -> dict[str, Any]:
    """Returns the best model of the run, or nothing if none was kept."""
    paths = list_best(directory.best)
    if not paths:
        return {}
    won = read_loop_state(paths[0])["best"]
    path = directory.address_of(paths[0])
    return {"metric": won["metric"], "value": won["value"], "step": step_of(paths[0]), "path": path}
