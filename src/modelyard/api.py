"""The public verbs of a run: train, train_and_evaluate, resume, evaluate. The commands call them too."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard import storage
from modelyard.cluster.description import CHIEF, EVALUATOR
from modelyard.cluster.environment import find_cluster
from modelyard.config import Config
from modelyard.config.yaml_file import inline
from modelyard.data.dataset import VALIDATION
from modelyard.data.sources.arrays import is_one_split
from modelyard.errors import StorageError, UserError
from modelyard.loop import existing_run
from modelyard.loop.existing_run import find_checkpoint, resume_config
from modelyard.loop.run import Result, as_config, report_result
from modelyard.loop.run import run as run_stages
from modelyard.run.checkpoint import step_of
from modelyard.run.directory import RunDirectory, find_run_folder, find_runs, open_run_folder, run_options
from modelyard.run.directory import restore_config as restore_run_config
from modelyard.run.manifest import read_manifest, started_by
from modelyard.run.summary import summarize
from modelyard.system.activity import report
from modelyard.system.process import random_state_kept

if TYPE_CHECKING:
    from modelyard.serving.loaded_run import Rows

__all__ = ["ExportFailedError", "evaluate", "resume", "run", "runs", "train", "train_and_evaluate"]
log = logging.getLogger("modelyard")


class ExportFailedError(UserError):
    """An export failed after a run that is complete.

    Args:
        result: the result of the run.
        failures: pairs of a format and the reason.
    """

    def __init__(self, result: Result, failures: Sequence[tuple[str, str]]) -> None:
        self.result, self.failures = result, list(failures)
        script = started_by(read_manifest(open_run_folder(result.model_dir)))
        program = f"python {shlex.quote(script)}" if script else "modelyard"
        command = f"{program} export {shlex.quote(result.model_dir)} --format"
        reasons = [f"the run is complete, but not its export as {form}: {why}" for form, why in failures]
        super().__init__("\n".join([*reasons, "Try it again:", *(f"  {command} {form}" for form, _ in failures)]))


def train_and_evaluate(config: Config | Mapping[str, Any] | None = None, **options: Any) -> Result:
    """Trains, evaluates on validation during training, keeps the best; tests and exports it if the config says so.

    Args:
        config: a config, or options as a dictionary.
        **options: options by name, instead.

    Raises:
        ExportFailedError: if the run is complete, but an export of it failed.

    Example:
        >>> result = modelyard.train_and_evaluate(model="mlp", dataset="digits", train_epochs=5)
        >>> result.metrics["accuracy"]
    """
    return run(as_config(config, options), evaluates=True)


def train(config: Config | Mapping[str, Any] | None = None, **options: Any) -> Result:
    """Trains and saves, without evaluating. Arguments as for `train_and_evaluate`."""
    return run(as_config(config, options), evaluates=False)


def resume(model_dir: str | os.PathLike[str], *, restore_config: bool = False, **options: Any) -> Result:
    """Resumes the run in ``model_dir`` from its own config; ``options`` may change its length, hooks, devices.

    Args:
        model_dir: the run folder, or the result of the run.
        restore_config: first write config.yaml again, as it is in the newest checkpoint.
        **options: options that may change. With ``trust=True``, the plugins of somebody else's run are imported.

    Example:
        >>> modelyard.resume("runs/2026-11-16-09_30_00-resnet20-cifar10", train_epochs=20)
    """
    model_dir = os.fspath(model_dir)
    if restore_config:
        restore_run_config(find_run_folder(model_dir, options.get("cache_dir")))
    return run(*resume_config(model_dir, options))


def evaluate(
    model_dir: str | os.PathLike[str],
    *,
    checkpoint: str | int | None = None,
    split: str | None = None,
    source: str = "Python",
    **options: Any,
) -> Result:
    """Evaluates a checkpoint of a run, every example counted once.

    Args:
        model_dir: the run folder, or the result of the run.
        checkpoint: best, latest or a step; by default best if there is one.
        split: validation (the default), test or train.
        source: where the options come from, for error messages.
        **options: options that do not change what was trained, such as eval_batch_size or engine. ``dataset`` may be
            the arrays of the run, or without ``split`` any examples with labels, such as (x, y).

    Example:
        >>> modelyard.evaluate("runs/first", split="test").metrics["accuracy"]
    """
    model_dir = os.fspath(model_dir)
    data = options.get("dataset")
    if data is None or split is not None or isinstance(data, str | os.PathLike) or not is_one_split(data):
        wanted = split or VALIDATION
        return existing_run.evaluate(model_dir, checkpoint=checkpoint, split=wanted, source=source, **options)
    from modelyard.serving.loaded_run import load

    return load(model_dir, checkpoint, **{**options, "dataset": None}).evaluate(data)


def runs(folder: str | os.PathLike[str] = "runs") -> Rows:
    """Returns a row for each run: model, dataset, status, results, and the options in which the runs differ.

    Args:
        folder: the folder of the runs, or its URL; or a pattern of run folders, such as ``runs/*resnet*``.

    Example:
        >>> modelyard.runs("runs/*").to_pandas().sort_values("validation_accuracy")
    """
    from modelyard.serving.loaded_run import Rows

    where = os.fspath(folder)
    if any(letter in where for letter in "*?[") and not storage.is_remote(where):
        pattern = Path(where).expanduser()
        top = Path(pattern.anchor or ".")
        found = [
            run for path in sorted(top.glob(str(pattern.relative_to(top)))) if (run := RunDirectory(path)).exists()
        ]
    else:
        found = find_runs(where)
    options: list[dict[str, Any]] = []
    for directory in found:
        try:
            options.append(run_options(directory))
        except UserError as error:  # one run that can't be read does not hide the others
            log.warning("%s", error)
            options.append({})
    known = dict.fromkeys(name for one in options for name in one)
    differing = [name for name in known if len({inline(one.get(name)) for one in options if one}) > 1]
    rows = []
    for directory, own in zip(found, options, strict=True):
        about = summarize(directory)
        row = {"run": about["run"], "model_dir": directory.address}
        row |= {name: about.get(name) for name in ("model", "dataset", "status", "step", "seconds")}
        for split in ("validation", "test"):
            row |= {f"{split}_{name}": value for name, value in (about.get(split) or {}).items()}
        row |= {name: own.get(name) for name in differing if name not in row}
        rows.append(row)
    return Rows(rows)


@random_state_kept()
def run(config: Config, evaluates: bool) -> Result:
    """Runs one process of a run, and makes the exports if this process knows the best model.

    That is the evaluator of a cluster that has one, else the chief.

    Args:
        config: the resolved config.
        evaluates: whether to evaluate during training.

    Raises:
        ExportFailedError: if the run is complete, but an export of it failed.
    """
    cluster = find_cluster(config.cluster)
    exports = cluster.me.role == EVALUATOR or (cluster.is_coordinator and not cluster.has_evaluator)
    formats = config.export_at_end if exports else ()
    if formats:
        _check_exports(formats)
    if not cluster.is_alone or cluster.model_dir:  # TF_CONFIG may name the folder of a single process, too
        from modelyard.distributed.agreement import config_in_cluster

        config = config_in_cluster(config, cluster)
    if cluster.is_alone:
        result = run_stages(config, evaluates)
    else:
        from modelyard.distributed import run as distributed

        result = distributed.run(config, evaluates, cluster)
    if not exports or result.role not in (CHIEF, EVALUATOR) or result.evaluates_elsewhere or result.paused:
        return result
    if formats:
        result = _exported(result, formats, config.given_dataset, in_subprocess=not cluster.is_alone)
    report_result(config, result)
    return result


def _check_exports(formats: Sequence[str]) -> None:
    """Raises before training if an export would fail at the end."""
    from modelyard.serving.exporting.export import check_installed

    for form in formats:
        check_installed(form)


def _exported(result: Result, forms: Sequence[Any], data: Any, in_subprocess: bool) -> Result:
    """Returns the result with its exports. One that fails does not prevent the others.

    Args:
        result: the result of the run.
        forms: the formats.
        data: the examples of the run, if a Python program gave them: exports are checked on some.
        in_subprocess: whether other processes export.
    """
    from modelyard.serving.exporting.export import export, export_in_subprocess

    paths, failures = [], []
    for form in forms:
        try:
            path = _existing_export(result.model_dir, form)
            if path is None:
                log.info("exporting as %s …", form)
                report("exporting")
                # TensorFlow that was part of a cluster can no longer build a model of its own.
                make = export_in_subprocess if in_subprocess else export
                # The run's plugins have just been used.
                path = make(result.model_dir, format=form, trust=True, dataset=data).path
            paths.append(path)
        except UserError as error:
            failures.append((form, str(error)))
        except Exception as error:  # the frameworks have no class of error in common
            log.exception("the export as %s failed", form)
            failures.append((form, f"{type(error).__name__}: {error}"))
    result = replace(result, exports=tuple(paths))
    if failures:
        raise ExportFailedError(result, failures)
    return result


def _existing_export(model_dir: str, form: str) -> str | None:
    """Returns the export of this very model, if an earlier start made it."""
    from modelyard.serving.exported_model import DESCRIPTION
    from modelyard.serving.exporting.export import export_address, exported_versions, exported_versions_at

    directory, _, path = find_checkpoint(model_dir, None, {"trust": True}, "Python")
    base = export_address(directory, form)
    versions = exported_versions_at(base) if storage.is_remote(base) else exported_versions(Path(base))
    for number in reversed(versions):
        description = storage.inside(storage.inside(base, str(number)), DESCRIPTION)
        try:
            about = json.loads(storage.read_bytes(description))
        except (StorageError, ValueError, RecursionError):
            continue
        if isinstance(about, dict) and about.get("step") == step_of(path):
            log.info("the export as %s of step %d exists already", form, about["step"])
            return storage.inside(base, str(number))
    return None
