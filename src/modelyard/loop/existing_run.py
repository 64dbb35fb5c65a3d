"""A run that exists: its config to resume with, one of its checkpoints, its evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelyard.config import Config, resolve
from modelyard.data.dataset import VALIDATION, Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import ConfigError, Problem
from modelyard.loop.run import Result, best_of, build, create_engine, run_length
from modelyard.loop.start import refuse_changes, refuse_other_classes, refuse_other_config
from modelyard.run.checkpoint import read_checkpoint, read_loop_state, select_checkpoint, step_of
from modelyard.run.directory import RunDirectory, open_run_folder
from modelyard.run.manifest import read_manifest, started_by
from modelyard.system.console import bar
from modelyard.system.process import random_state_kept

log = logging.getLogger("modelyard")


def resume_config(
    model_dir: str | Path, options: Mapping[str, Any], source: str = "Python", *, check_files: bool = True
) -> tuple[Config, bool]:
    """Returns the config to resume a run with, and whether that run evaluates.

    Args:
        model_dir: the run folder.
        options: options that change.
        source: where the options come from, for error messages.
        check_files: files that the options name must exist here.
    """
    directory = open_run_folder(model_dir, options.get("cache_dir"))
    without_effect = sorted(
        {"config_file", "config_set", "hyperparameter_file", "hyperparameter_set", "recipe"} & set(options)
    )
    if without_effect:
        message = "has no effect here: the run's own config.yaml is the config."
        raise ConfigError(Problem(source, key, message) for key in without_effect)
    own = {"config_file": str(directory.config), "model_dir": directory.address, "resume": "must"}
    try:
        config = resolve(
            {**options, **own}, source=source, pick_up_files=False, own_files=False, check_files=check_files
        )
    except ConfigError as error:
        script = started_by(read_manifest(directory))
        if script is not None and any(problem.where != source for problem in error.problems):  # in the run's config
            error.add_hint(
                f"This run was started by the script {script}. To use what it registers, add --plugins {script}. It is "
                "imported: what must not run again belongs under `if __name__ == '__main__':`."
            )
        raise
    return config, bool(read_manifest(directory).get("evaluates", True))


def find_checkpoint(
    model_dir: str | Path, checkpoint: str | int | None, options: Mapping[str, Any], source: str
) -> tuple[RunDirectory, Config, Path]:
    """Returns a run folder, its config, and a checkpoint folder: best, latest or a step; None is best if there is one.

    Raises:
        UserError: if there is no run or no such checkpoint, or options would change what was trained.
    """
    directory = open_run_folder(model_dir, options.get("cache_dir"))
    config, _ = resume_config(model_dir, options, source)
    refuse_changes(directory, config)
    path = select_checkpoint(directory.checkpoints, directory.best, checkpoint)
    refuse_other_config(directory, config, step_of(path), read_loop_state(path))
    directory.download_weights(path)
    return directory, config, path


def check_data_of_run(directory: RunDirectory, config: Config, dataset: Dataset) -> None:
    """Warns if a dataset is not the one that a run was trained on.

    Args:
        directory: the run folder.
        config: the config that names the dataset.
        dataset: as `load_dataset` returns it.

    Raises:
        DataError: if it has other classes.
    """
    refuse_other_classes(directory, config, dataset)
    known = read_manifest(directory).get("dataset", {}).get("fingerprint")
    if known is None:
        log.warning("%s does not say which data the run was trained on: it is not checked", directory.manifest)
    elif known != dataset.fingerprint():
        log.warning("the data of %s is not the data this run was trained on", config.dataset)


@random_state_kept()
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
        **options: options that do not change what was trained, such as eval_batch_size or engine.
    """
    directory, config, path = find_checkpoint(model_dir, checkpoint, options, source)
    loaded = read_checkpoint(path)
    dataset = load_dataset(config)
    check_data_of_run(directory, config, dataset)
    dataset.size(split)
    engine = create_engine(config)
    from modelyard.compat.keras import precision_kept

    with precision_kept():
        build(engine, config, dataset, run_length(config, dataset))
        engine.load(loaded, weights_only=True)
        with bar(f"evaluating on {split}", dataset.size(split)) as progress:
            metrics = engine.evaluate(split, progress)
        engine.close()
    return Result(directory.address, loaded.step, split, metrics, loaded.step, best=best_of(directory))
