"""One experiment, from a config to its results: train, evaluate, resume."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.cluster.crew import Crew
from modelyard.cluster.find import find_cluster
from modelyard.config import Config, load_config, resolve
from modelyard.config.backend import select_engine
from modelyard.config.durations import RunLength
from modelyard.data.dataset import VALIDATION, Dataset
from modelyard.errors import ConfigError, Problem, RunError
from modelyard.loop.crew import form_crew, in_cluster
from modelyard.loop.members import compare_devices, gather, take_part
from modelyard.loop.result import Result, best_of, conclude
from modelyard.loop.stages import build, create_engine, load_state, open_dataset, run_lengths
from modelyard.loop.start import (
    find_folder,
    log_machine,
    record_start,
    refuse_changes,
    settle_config,
    tidy_after_a_false_start,
)
from modelyard.loop.warm_start import read_warm, warm_start
from modelyard.run.checkpoint import (
    Checkpoint,
    best_first,
    choose,
    load_newest,
    read_checkpoint,
)
from modelyard.run.directory import RunDirectory, open_run_folder
from modelyard.run.manifest import read_manifest, started_by
from modelyard.system.log import log_to
from modelyard.system.machine import gpus

if TYPE_CHECKING:
    from modelyard.engine.base import Engine
    from modelyard.loop.trainer import Trainer

log = logging.getLogger("modelyard")


def run(config: Config, evaluates: bool) -> Result:
    """One process of a run: alone, or with its part in a cluster.

    Args:
        config: the config.
        evaluates: whether to evaluate on validation on the way, keep the best, and test it if the config says so.
    """
    cluster = find_cluster(config.cluster)
    config = in_cluster(config, cluster)
    if not cluster.is_alone:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # what a lost peer leads to is told in words
        select_engine(config.engine)  # importing it may hold this process up, which would look like silence later
    if cluster.leads:
        with form_crew(config, cluster, evaluates) as crew:
            return _lead(config, evaluates, crew)
    return take_part(config, cluster, evaluates)


def as_config(config: Config | Mapping[str, Any] | None, options: Mapping[str, Any]) -> Config:
    """The config of whoever gives one, or options in one of two ways."""
    if isinstance(config, Config):
        if options:
            raise TypeError("give a Config or options by name, not both; load_config(...) takes options.")
        return config
    return load_config(**{**(config or {}), **options})


def resume_config(model_dir: str | Path, options: Mapping[str, Any], source: str = "Python") -> tuple[Config, bool]:
    """The config to go on with, and whether that run evaluates."""
    directory = open_run_folder(model_dir, options.get("cache_dir"))
    pointless = sorted(
        {"config_file", "config_set", "hyperparameter_file", "hyperparameter_set", "recipe"} & set(options)
    )
    if pointless:
        message = "has no use here: the run's own config.yaml is the config."
        raise ConfigError(Problem(source, key, message) for key in pointless)
    given = {**options, "config_file": str(directory.config), "model_dir": directory.address, "resume": "must"}
    try:
        config = resolve(given, source=source, pick_up_files=False)
    except ConfigError as error:
        script = started_by(read_manifest(directory))
        if script is not None:
            error.add_hint(
                f"This run was started by the script {script}: use `python {script} resume …`, or --plugins."
            )
        raise
    return config, bool(read_manifest(directory).get("evaluates", True))


def find_checkpoint(
    model_dir: str | Path, checkpoint: str | int | None, options: Mapping[str, Any], source: str
) -> tuple[RunDirectory, Config, Path]:
    """A run folder, its config, and the folder of a checkpoint: best, latest or a step; None is best if there is one.

    Raises:
        UserError: if there is no run or no such checkpoint, or options would change what was trained.
    """
    directory = open_run_folder(model_dir, options.get("cache_dir"))
    config, _ = resume_config(model_dir, options, source)
    refuse_changes(directory, config)
    which = checkpoint if checkpoint is not None else "best" if best_first(directory.best) else "latest"
    path = choose(directory.checkpoints, directory.best, str(which))
    directory.bring_weights(path)
    return directory, config, path


def evaluate(
    model_dir: str | Path,
    *,
    checkpoint: str | int | None = None,
    split: str = VALIDATION,
    source: str = "Python",
    **options: Any,
) -> Result:
    """Evaluates a checkpoint of a run, every example counted once.

    Args:
        model_dir: the run folder.
        checkpoint: best, latest or a step; by default best if there is one.
        split: validation, test or train.
        source: where the options come from, for error messages.
        **options: options that change how it is computed, such as eval_batch_size or engine.
    """
    directory, config, path = find_checkpoint(model_dir, checkpoint, options, source)
    loaded = read_checkpoint(path)
    dataset = open_dataset(config)
    known = read_manifest(directory).get("dataset", {}).get("fingerprint")
    if known != dataset.fingerprint():
        log.warning("the data of %s is not the data this run was trained on", config.dataset)
    dataset.size(split)
    engine = create_engine(config, Crew())
    build(engine, config, dataset, run_lengths(config, dataset))
    load_state(engine, loaded, weights_only=True)
    from modelyard.system.console import bar

    with bar(f"evaluating on {split}", dataset.size(split)) as progress:
        metrics = engine.evaluate(split, progress)
    engine.close()
    return Result(str(model_dir), loaded.step, split, metrics, loaded.step, best=best_of(directory))


# -- the stages of a run ------------------------------------------------------------------------------------------


def _lead(config: Config, evaluates: bool, crew: Crew) -> Result:
    """The training run, stage by stage, in the process that decides and writes."""
    threading.Thread(target=gpus, daemon=True).start()  # the driver takes its time, and there is other work to do
    directory = find_folder(config)
    tidy = tidy_after_a_false_start(directory) if crew.cluster.is_alone else contextlib.nullcontext()
    with directory, log_to(directory.logs, crew.cluster.me.file_name), tidy:
        config = settle_config(directory, config)
        checkpoint = load_newest(directory.checkpoints)
        warm = None if checkpoint is not None else read_warm(config)
        dataset = open_dataset(config)
        if evaluates:
            _check_validation(config, dataset, crew)
        gather(crew, directory, config, dataset)
        engine = create_engine(config, crew)
        compare_devices(crew, engine)
        run = run_lengths(config, dataset)
        if checkpoint is not None and checkpoint.step > run.total_steps:
            raise RunError(
                f"{directory.address} is at step {checkpoint.step} already, and {run.total_steps} are asked for; "
                "nothing was changed."
            )
        log_machine(directory, config, dataset, engine)
        build(engine, config, dataset, run)
        if checkpoint is not None:
            load_state(engine, checkpoint)
        else:
            engine.begin()
            if warm is not None:
                warm_start(engine, warm)
            elif engine.processes > 1:
                engine.load(engine.state())  # the lead's first weights are everyone's, whatever each machine drew
        run_id = record_start(directory, config, dataset, engine, run, checkpoint, evaluates)
        here = evaluates and not crew.cluster.has_evaluator
        if crew.cluster.has_evaluator:
            log.info("the evaluator evaluates what is saved: every %s (save_every)", config.save_every)
        trainer = _trainer(config, engine, directory, run, run_id, here, checkpoint)
        try:
            trainer.train()
        except Exception as error:
            error.add_note(
                f"The run folder is {directory.address}; `modelyard resume` with it goes on from what is saved."
            )
            raise
        finally:
            engine.close()
        return conclude(directory, trainer, crew.cluster)


def _check_validation(config: Config, dataset: Dataset, crew: Crew) -> None:
    """There must be a validation split, unless the config says that there need not be one."""
    if config.validation_fraction == 0 and VALIDATION not in dataset.sizes() and not crew.cluster.has_evaluator:
        last = "; the model after the last step is tested" if config.test_at_end else ""
        log.info("there is no validation split (validation_fraction is 0): nothing is evaluated on the way%s", last)
        return
    dataset.size(VALIDATION)


def _trainer(
    config: Config,
    engine: Engine,
    directory: RunDirectory,
    run: RunLength,
    run_id: str,
    evaluates: bool,
    checkpoint: Checkpoint | None,
) -> Trainer:
    from modelyard.loop.hooks import build_hooks
    from modelyard.loop.trainer import Trainer

    hooks = build_hooks(config.hooks)
    if engine.crew.cluster.has_evaluator:  # which keeps the best models, so that only one process writes there
        hooks = [hook for hook in hooks if hook.name != "best"]
    if not any(hook.name == "checkpoint" for hook in hooks):
        log.warning("the hook checkpoint is off: nothing is saved, and this run can't be gone on with")
    return Trainer(config, engine, directory, run, run_id, hooks, evaluates, checkpoint)
