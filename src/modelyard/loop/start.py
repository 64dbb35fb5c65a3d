"""The start of a run: its folder, the config it resumes with, and what is logged and recorded."""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import os
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard import storage
from modelyard.config import Config
from modelyard.config.durations import RunLength
from modelyard.config.schema import COMPONENTS, CORE_FIELDS, is_path
from modelyard.config.yaml_file import inline
from modelyard.data.dataset import Dataset
from modelyard.data.splits import describe_splits, held_out
from modelyard.errors import ChangedConfigError, ConfigError, DataError, Problem, RunError, counted
from modelyard.loop.hooks import pause_step, stopped_by
from modelyard.models.metric import metric_modes
from modelyard.run.checkpoint import Checkpoint, folder_name, list_checkpoints
from modelyard.run.directory import (
    CONFIG,
    CONFIG_COPY,
    RunDirectory,
    differences,
    path_options,
    run_folder,
    run_options,
    write_config,
)
from modelyard.run.manifest import log_start, read_manifest, write_manifest
from modelyard.system.files import explain, whole_file
from modelyard.system.machine import hardware, versions
from modelyard.system.process import holders

if TYPE_CHECKING:
    from modelyard.engine.base import Engine

log = logging.getLogger("modelyard")


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
        if not directory.is_in_place() or any(holder.pid != os.getpid() for holder in holders(directory.logs)):
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
    changed = differences(run_options(directory), config)
    refused = [(key, there, here) for key, there, here, free in changed if not free]
    if refused:
        parts = [key for key, _, _ in refused if key in COMPONENTS]
        raise ChangedConfigError(
            Problem(config.origin(key), key, f"is {inline(here)} here, {inline(there)} in the run {directory.address}.")
            for key, there, here in refused
            if key in CORE_FIELDS or not parts  # for another model, its options need not be listed
        )
    used = ((read_manifest(directory).get("starts") or [{}])[-1].get("engine") or {}).get("engine")
    for key, there, here, _ in changed:
        if key == "engine" and here == used:  # "auto" before, which has chosen the same
            continue
        log.info("%s: %s, was %s when the run was last started", key, inline(here), inline(there))


def refuse_other_config(directory: RunDirectory, config: Config, step: int, loop_state: Mapping[str, Any]) -> None:
    """Checks that a checkpoint was trained with ``config``. Its copy of the config says so; older ones have none.

    Raises:
        ConfigError: if an option differs that can't change: config.yaml was edited, or is that of another run.
    """
    copy, file = loop_state.get(CONFIG_COPY), directory.address_of(directory.config)
    found = [
        Problem(file, key, f"is {inline(here)}; {inline(there)} in {folder_name(step)}.")
        for key, there, here, free in (differences(copy, config) if copy else ())
        if not free
    ]
    if found:
        error = ChangedConfigError(found)
        run = shlex.quote(directory.address)
        error.add_hint(f"To restore {CONFIG} as it was when that was trained: modelyard resume {run} --restore_config")
        raise error


def refuse_other_classes(directory: RunDirectory, config: Config, dataset: Dataset) -> None:
    """Checks that data has the classes that a run was trained on, in their order: labels are their numbers.

    Raises:
        DataError: with the classes that differ.
    """
    manifest = read_manifest(directory)
    recorded = manifest.get("data") or manifest.get("dataset") or {}
    if "classes" not in recorded:  # an older run
        return
    found, known = ([str(name) for name in names] for names in (dataset.classes, recorded["classes"]))
    difference = differing_classes(found, known)
    if difference is not None:
        raise DataError(
            f"the data of {config.dataset} has other classes than the run {directory.address}: {difference}."
        )


def differing_classes(found: Sequence[str], known: Sequence[str]) -> str | None:
    """Returns how the classes of data differ from the ``known`` classes of a run; None if they do not."""
    if list(found) == list(known):
        return None
    new, missing = ([name for name in a if name not in set(b)] for a, b in ((found, known), (known, found)))
    if not new and not missing:
        return "the same names are in another order"
    named = [f"only in {where}: {_few(names)}" for where, names in (("the data", new), ("the run", missing)) if names]
    return f"the data has {len(found)}, the run {len(known)}; {'; '.join(named)}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


# -- log, manifest and journal ----------------------------------------------------------------------------------------


def log_machine(directory: RunDirectory, config: Config, dataset: Dataset, engine: Engine) -> None:
    """Logs versions, machine, devices, data and options."""
    machine = hardware()
    log.info("run folder %s", directory.address)
    log.info("versions: %s", ", ".join(f"{name} {version}" for name, version in versions().items()))
    log.info("machine: %s, cores: %d, memory: %s GiB", machine["cpu"], machine["cores"], machine["memory_gib"])
    log.info("GPUs: %s", "; ".join(machine["gpus"]) or "none")
    log.info("devices: %s, threads: %d", ", ".join(engine.describe()["devices"]), engine.threads)
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
    fingerprint = engine.data_fingerprint
    known = before.get("dataset", {}).get("fingerprint")
    if known is not None and known != fingerprint:
        raise DataError(
            f"the data of {config.dataset!r} is not the data this run started with: {_sizes(dataset.sizes())}, "
            f"was {_sizes(before['dataset'].get('sizes', {}))} (fingerprint {fingerprint[:12]}, was {known[:12]}). "
            f"{_change_of_bad(dataset.stored, before['dataset'])}Restore the old data, or start a new run."
        )
    if checkpoint is not None:
        _log_resume(directory, config, run, checkpoint)
        _log_inexact_resume(config, engine, run, checkpoint, before)
    else:
        log.info("%s of %s", counted(run.total_steps, "step"), counted(run.batch_size, "example"))
    # Threads decide the last bits, so a deterministic run pins them.
    write_config(directory, config.model_copy(update={"threads": engine.threads}) if config.deterministic else config)
    from modelyard.models.data_info import record_data

    described = {"fingerprint": fingerprint, "sizes": dataset.sizes(), "classes": list(dataset.classes)[:1000]}
    described |= describe_splits(dataset.stored)
    before.update(
        run_id=before.get("run_id") or (checkpoint and checkpoint.loop_state.get("run")) or uuid.uuid4().hex,
        evaluates=evaluates,
        model=_size_of(engine),
        data=record_data(config, dataset, engine.task.data),
        metrics=metric_modes(engine.functions.metrics.metrics),
    )
    _record_splits(directory, dataset.stored)
    manifest = write_manifest(directory, config, described, engine.describe(), step, before)
    if step < run.total_steps:
        log_start(directory.journal, directory.name, config, step)
    return str(manifest["run_id"])


def _record_splits(directory: RunDirectory, dataset: Dataset) -> None:
    """Writes which examples were taken from train, if any were; all others are in train."""
    if dataset.derived is None or directory.splits.exists():
        return
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("split", "row", "example"))
    lines.writerows(held_out(dataset))
    with explain(directory.splits, "write"), whole_file(directory.splits) as file:
        file.write(text.getvalue().encode(errors="surrogateescape"))


def _change_of_bad(dataset: Dataset, before: dict[str, Any]) -> str:
    """Names the first example that is left out now and was not when the run was started, or the other way round."""
    known = {split: found.get("examples", {}) for split, found in before.get("left_out", {}).items()}
    left_out = dataset.left_out or {}
    for split, bad in left_out.items():
        old = known.get(split, {})
        new = [reason for name, reason in bad.items() if name not in old]
        if new and before.get("left_out", {}).get(split, {}).get("count", 0) == len(old):
            return f"{len(new)} example(s) can't be decoded any more, the first: {new[0]} "
    if not known:
        return ""
    names = {dataset.name(split, row) for split, size in dataset.sizes().items() for row in range(size)}
    repaired = [name for split, old in known.items() for name in old if name not in left_out.get(split, {})]
    repaired = [name for name in repaired if name in names]
    if not repaired:
        return ""
    return f"{len(repaired)} example(s) that were left out can be decoded now, the first: {repaired[0]}. "


def _size_of(engine: Engine) -> dict[str, int | None]:
    """Returns parameters and FLOPs of the model; None if they cannot be counted from its shapes."""
    from modelyard.models.flops import flops

    computed = None
    with contextlib.suppress(Exception):  # a user's model may do anything, and this is information only
        computed = flops(engine.model)
    return {"parameters": int(engine.model.count_params()), "flops": computed}


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in sizes.items()) or "unknown"


def _log_resume(directory: RunDirectory, config: Config, run: RunLength, checkpoint: Checkpoint) -> None:
    """Logs where training continues, or why there is nothing to train and how to train longer."""
    reason = stopped_by(checkpoint.loop_state, config, run.total_steps)
    epochs = f"--train_epochs {2 * config.train_epochs:g}" if config.train_epochs is not None else None
    longer = f"modelyard resume {shlex.quote(directory.address)} {epochs or f'--train_steps {2 * run.total_steps}'}"
    if checkpoint.step >= run.total_steps:
        log.info("the run is finished: all %d steps are trained. To train longer: %s", run.total_steps, longer)
    elif reason is not None:
        where = (checkpoint.step, run.total_steps, reason)
        log.info("the run was stopped at step %d of %d: %s. To train on, change its hooks, or: %s", *where, longer)
    elif checkpoint.step != pause_step(config, run):
        log.info("resuming at step %d of %d", checkpoint.step, run.total_steps)


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
