"""One experiment, from a config to its results: train, evaluate, resume."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.config import Config, load_config, resolve
from modelyard.config.durations import Run
from modelyard.config.yaml_file import inline
from modelyard.data.dataset import TEST, TRAIN, VALIDATION, Dataset
from modelyard.engine.select import choose_engine, select_engine
from modelyard.errors import CheckpointError, ConfigError, DataError, Problem, RunError
from modelyard.registry import ENGINES
from modelyard.run.checkpoint import (
    Checkpoint,
    best_first,
    choose,
    list_checkpoints,
    load_newest,
    read_checkpoint,
    read_state,
    step_of,
)
from modelyard.run.directory import (
    LOCK,
    RunDirectory,
    differences,
    new_run_path,
    open_run_folder,
    read_json,
    run_options,
    write_config,
)
from modelyard.run.journal import log_result, log_start
from modelyard.run.log import log_to
from modelyard.run.machine import hardware, versions
from modelyard.run.manifest import write_manifest

if TYPE_CHECKING:
    from modelyard.engine.base import Engine
    from modelyard.loop.trainer import Trainer

log = logging.getLogger("modelyard")
ROLE = "chief"


@dataclass(frozen=True)
class Result:
    """What came out of a run.

    Args:
        model_dir: the run folder.
        step: how many steps were trained.
        split: the split that ``metrics`` are of.
        metrics: ``loss``, ``accuracy`` and whatever else the task measures.
        model_step: the step of the model that ``metrics`` are of; the best model's for test at the end.
        best: the best model by validation: metric, value, step, path; empty where none was kept.
        validation: metrics on validation at the last evaluation.
        seconds: wall-clock time of training, all starts together.
    """

    model_dir: str
    step: int
    split: str
    metrics: dict[str, float]
    model_step: int
    best: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def train_and_evaluate(config: Config | Mapping[str, Any] | None = None, **options: Any) -> Result:
    """Trains, evaluates on validation on the way, keeps the best, and tests it at the end if the config says so.

    Args:
        config: a config, or options as a dictionary.
        **options: options by name, instead.

    Example:
        >>> result = modelyard.train_and_evaluate(model="mlp", dataset="digits", train_epochs=5)
        >>> result.metrics["accuracy"]
    """
    return _run(_as_config(config, options), evaluates=True)


def train(config: Config | Mapping[str, Any] | None = None, **options: Any) -> Result:
    """Trains and saves, without evaluating. Arguments as for `train_and_evaluate`."""
    return _run(_as_config(config, options), evaluates=False)


def resume(model_dir: str | Path, **options: Any) -> Result:
    """Goes on with the run in ``model_dir``, from its own config; ``options`` may change what may change.

    Example:
        >>> modelyard.resume("runs/2026-11-16-09_30_00-resnet20-cifar10", train_epochs=20)
    """
    config, evaluates = resume_config(model_dir, options)
    return _run(config, evaluates)


def resume_config(model_dir: str | Path, options: Mapping[str, Any], source: str = "Python") -> tuple[Config, bool]:
    """The config to go on with, and whether that run evaluates."""
    directory = open_run_folder(model_dir)
    pointless = sorted(
        {"config_file", "config_set", "hyperparameter_file", "hyperparameter_set", "recipe"} & set(options)
    )
    if pointless:
        message = "has no use here: the run's own config.yaml is the config."
        raise ConfigError(Problem(source, key, message) for key in pointless)
    config = resolve(
        {**options, "config_file": str(directory.config), "model_dir": str(model_dir), "resume": "must"},
        source=source,
        pick_up_files=False,
        before_plugins=select_engine,
    )
    return config, bool(read_json(directory.manifest).get("evaluates", True))


def evaluate(
    model_dir: str | Path, *, checkpoint: str | None = None, split: str = VALIDATION, **options: Any
) -> Result:
    """Evaluates a checkpoint of a run, every example counted once.

    Args:
        model_dir: the run folder.
        checkpoint: best, latest or a step; by default best if there is one.
        split: validation, test or train.
        **options: options that change how it is computed, such as eval_batch_size or engine.
    """
    directory = open_run_folder(model_dir)
    config, _ = resume_config(model_dir, options)
    _refuse_changes(directory, config)
    which = checkpoint or ("best" if best_first(directory.best) else "latest")
    path = choose(directory.checkpoints, directory.best, which)
    loaded = read_checkpoint(path)
    dataset = _load_dataset(config)
    dataset.size(split)
    engine = _create_engine(config)
    _build(engine, config, dataset, _lengths(config, dataset))
    _load_state(engine, loaded, weights_only=True)
    from modelyard.run.console import bar

    with bar(f"evaluating on {split}", dataset.size(split)) as progress:
        metrics = engine.evaluate(split, progress)
    return Result(str(model_dir), loaded.step, split, metrics, loaded.step, best=_best(directory))


# -- the stages of a run ------------------------------------------------------------------------------------------


def _run(config: Config, evaluates: bool) -> Result:
    """One training run, stage by stage."""
    directory, config = _open(config)
    with directory, log_to(directory.logs, ROLE):
        checkpoint = load_newest(directory.checkpoints)
        dataset = _load_dataset(config)
        if evaluates:
            dataset.size(VALIDATION)
        engine = _create_engine(config)
        if config.deterministic:  # they decide the last bits, so they are pinned
            config = config.model_copy(update={"threads": engine.threads})
        run = _lengths(config, dataset)
        run_id = _record_start(directory, config, dataset, engine, run, checkpoint, evaluates)
        _build(engine, config, dataset, run)
        if checkpoint is not None:
            _load_state(engine, checkpoint)
        elif config.checkpoint_path is not None:
            _warm_start(engine, config.checkpoint_path)
        trainer = _trainer(config, engine, directory, run, run_id, evaluates, checkpoint)
        trainer.train()
        return _conclude(directory, trainer)


def _as_config(config: Config | Mapping[str, Any] | None, options: Mapping[str, Any]) -> Config:
    if isinstance(config, Config):
        if options:
            raise TypeError("give a Config or options by name, not both; load_config(...) takes options.")
        return config
    return load_config(**{**(config or {}), **options})


def _open(config: Config) -> tuple[RunDirectory, Config]:
    """The run folder, made now or found; an existing run must be one that this config may go on with."""
    path = new_run_path(config)
    best = Path(config.best_model_dir).expanduser() if config.best_model_dir else None
    directory = RunDirectory(path, best)
    if directory.exists():
        if config.resume == "never":
            raise RunError(
                f"{path} exists, and resume is 'never'. Name another --model_dir, or leave resume at 'auto'."
            )
        config = _go_on_config(directory, config)
        _refuse_changes(directory, config)
        return directory, config
    if config.resume == "must":
        raise RunError(f"there is no run in {path} to go on with, and resume is 'must'.")
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; --model_dir must name a folder.")
    strangers = sorted(p.name for p in path.iterdir() if p.name not in (LOCK, "runlogs")) if path.is_dir() else []
    strangers = [name for name in strangers if not name.startswith(".partial-") and name != "checkpoints"]
    if strangers:
        raise RunError(f"{path} is not empty and is no run folder (it holds {', '.join(strangers[:3])}). Name another.")
    directory.create()
    return directory, config


def _go_on_config(directory: RunDirectory, config: Config) -> Config:
    """Threads that were pinned stay as they were."""
    threads = run_options(directory).get("threads")
    if config.threads == 0 and isinstance(threads, int):
        return config.model_copy(update={"threads": threads})
    return config


def _refuse_changes(directory: RunDirectory, config: Config) -> None:
    changed = differences(directory, config)
    refused = [(key, there, here) for key, there, here, free in changed if not free]
    if refused:
        raise ConfigError(
            Problem(config.origin(key), key, f"is {inline(here)} here, {inline(there)} in the run {directory.path}.")
            for key, there, here in refused
        )
    for key, there, here, _ in changed:
        log.info("%s: %s, was %s when the run was last started", key, inline(here), inline(there))


def _load_dataset(config: Config) -> Dataset:
    from modelyard.data.load import load_dataset

    return load_dataset(config)


def _create_engine(config: Config) -> Engine:
    name = select_engine(config.engine)
    log.info("engine %s (%s)", name, choose_engine(config.engine)[1])
    engine: Engine = ENGINES.get(name).load()(config)
    return engine


def _lengths(config: Config, dataset: Dataset) -> Run:
    """How long the run is: N epochs are ceil(N × examples / batch) steps."""
    examples = dataset.size(TRAIN)
    if config.train_steps is not None:
        total = config.train_steps
    elif config.train_epochs is not None:
        # As written, not as a binary float: 1.1 epochs of 100 examples are 110, not 110.00000000000001.
        total = math.ceil(Fraction(repr(config.train_epochs)) * examples / config.train_batch_size)
    else:
        raise ConfigError([Problem("config", "train_steps", "is missing, and so is train_epochs; give one.")])
    return Run(examples, config.train_batch_size, total)


def _record_start(
    directory: RunDirectory,
    config: Config,
    dataset: Dataset,
    engine: Engine,
    run: Run,
    checkpoint: Checkpoint | None,
    evaluates: bool,
) -> str:
    """Writes config, manifest and journal, and opens the log. Returns the id of the run."""
    step = checkpoint.step if checkpoint is not None else 0
    before = read_json(directory.manifest)
    fingerprint = dataset.fingerprint()
    known = before.get("dataset", {}).get("fingerprint")
    if known is not None and known != fingerprint:
        raise DataError(
            f"the data of {config.dataset!r} is not the data this run began with (fingerprint {fingerprint[:12]}, "
            f"was {known[:12]}). Bring the old data back, or start a new run."
        )
    described = {"fingerprint": fingerprint, "sizes": dataset.sizes(), "classes": list(dataset.classes)[:1000]}
    write_config(directory, config)
    before.update(run_id=before.get("run_id") or uuid.uuid4().hex, evaluates=evaluates)
    manifest = write_manifest(directory, config, described, engine.describe(), step, before)
    log_start(directory.journal, directory.name, config, step)
    machine = hardware()
    log.info("run folder %s", directory.path)
    log.info("versions: %s", ", ".join(f"{name} {version}" for name, version in versions().items()))
    log.info("machine: %s, %d cores, %s GiB memory", machine["cpu"], machine["cores"], machine["memory_gib"])
    log.info("GPUs: %s", "; ".join(machine["gpus"]) or "none")
    log.info("devices: %s, %d threads", ", ".join(engine.describe()["devices"]), engine.threads)
    log.info("dataset %s: %s", config.dataset, ", ".join(f"{n:,} {split}" for split, n in dataset.sizes().items()))
    options = config.flat()
    chosen = {key: value for key, value in options.items() if config.origin(key) != "default" and value is not None}
    log.info("options that were set: %s", _listed(chosen) or "none")
    log.debug("all options: %s", _listed(options))
    for note in config.notes:
        log.info("%s", note)
    if checkpoint is not None:
        log.info("going on at step %d of %d", step, run.total_steps)
        _warn_of_inexact_resume(config, engine, run, checkpoint)
    else:
        log.info("%d steps of %d examples", run.total_steps, run.batch_size)
    return str(manifest["run_id"])


def _listed(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={inline(value)}" for key, value in options.items())


def _warn_of_inexact_resume(config: Config, engine: Engine, run: Run, checkpoint: Checkpoint) -> None:
    memory = checkpoint.memory
    if memory.get("total_steps", run.total_steps) != run.total_steps:
        log.info(
            "the run now has %d steps, it had %d; the learning-rate schedule follows the new number",
            run.total_steps,
            memory["total_steps"],
        )
    for name, now in (("threads", engine.threads), ("replicas", engine.replicas)):
        if config.deterministic and memory.get(name, now) != now:
            log.warning(
                "%s: %d, was %d; the result will not be bit-identical to an undisturbed run", name, now, memory[name]
            )


def _build(engine: Engine, config: Config, dataset: Dataset, run: Run) -> None:
    from modelyard.models.task import build_task

    engine.config = config
    engine.build(lambda: build_task(config, dataset), dataset, run)
    log.info("model %s: %s parameters", config.model, f"{engine.model.count_params():,}")


def _load_state(engine: Engine, checkpoint: Checkpoint, weights_only: bool = False) -> None:
    from modelyard.engine.base import State

    engine.load(State(checkpoint.weights, checkpoint.optimizer), weights_only=weights_only)


def _warm_start(engine: Engine, path: str) -> None:
    """Weights to begin with; never on resume."""
    from modelyard.engine.base import State
    from modelyard.run.weights import read_weights

    engine.load(State(read_weights(Path(path).expanduser()), {}), weights_only=True)
    log.info("starting from the weights in %s", path)


def _trainer(
    config: Config,
    engine: Engine,
    directory: RunDirectory,
    run: Run,
    run_id: str,
    evaluates: bool,
    checkpoint: Checkpoint | None,
) -> Trainer:
    from modelyard.loop.hooks import build_hooks, chosen_hooks
    from modelyard.loop.trainer import Trainer

    hooks = build_hooks(chosen_hooks(config))
    return Trainer(config, engine, directory, run, run_id, hooks, evaluates, checkpoint)


def _conclude(directory: RunDirectory, trainer: Trainer) -> Result:
    """Gathers the results and adds them to the journal."""
    best = _best(directory)
    validation = {k: float(v) for k, v in trainer.last_evaluation.items()}
    split, metrics, model_step = VALIDATION, validation, trainer.step
    if trainer.last_test:
        split, metrics = TEST, {k: float(v) for k, v in trainer.last_test.items()}
        model_step = best.get("step", trainer.step)
    elif not validation:
        split, metrics = TRAIN, trainer.last_report
    seconds = round(trainer.seconds, 2)
    result = Result(str(directory.path), trainer.step, split, metrics, model_step, best, validation, seconds)
    shown: dict[str, Any] = {f"{split} {name}": value for name, value in metrics.items()}
    shown |= {f"best validation {best['metric']}": f"{best['value']:.6g} at step {best['step']}"} if best else {}
    ended = f"{trainer.step}" + (f" ({trainer.stop_reason})" if trainer.stop_reason else "")
    log_result(directory.journal, directory.name, {"step": ended, **shown, "seconds": result.seconds})
    return result


def _best(directory: RunDirectory) -> dict[str, Any]:
    """The best model of the run, if one was kept."""
    paths = best_first(directory.best)
    if not paths:
        return {}
    won = read_state(paths[0])["memory"]["best"]
    return {"metric": won["metric"], "value": won["value"], "step": step_of(paths[0]), "path": str(paths[0])}


def has_checkpoint(directory: RunDirectory) -> bool:
    """Whether there is anything to go on from."""
    try:
        return bool(list_checkpoints(directory.checkpoints))
    except CheckpointError:
        return False
