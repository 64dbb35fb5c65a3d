"""Training, and then what the config wants of the model that came out: its exports."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.cluster.find import find_cluster
from modelyard.cluster.roles import CHIEF, EVALUATOR
from modelyard.config import Config
from modelyard.errors import ConfigError, Problem, UserError
from modelyard.loop import experiment
from modelyard.loop.result import Result
from modelyard.run.checkpoint import step_of
from modelyard.run.directory import open_run_folder
from modelyard.run.manifest import read_manifest, started_by

log = logging.getLogger("modelyard")


class ExportFailedError(UserError):
    """A run that is complete, and an export of it that failed.

    Args:
        result: what came out of the run.
        failures: formats, and what went wrong.
    """

    def __init__(self, result: Result, failures: Sequence[tuple[str, str]]) -> None:
        self.result, self.failures = result, list(failures)
        script = started_by(read_manifest(open_run_folder(result.model_dir)))
        program = f"python {shlex.quote(script)}" if script else "modelyard"
        again = f"{program} export {shlex.quote(result.model_dir)} --format"
        told = [f"the run is complete, but not its export as {form}: {why}" for form, why in failures]
        super().__init__("\n".join([*told, "Try it again:", *(f"  {again} {form}" for form, _ in failures)]))


def train_and_evaluate(config: Config | Mapping[str, Any] | None = None, **options: Any) -> Result:
    """Trains, evaluates on validation on the way, keeps the best; tests and exports it if the config says so.

    Args:
        config: a config, or options as a dictionary.
        **options: options by name, instead.

    Raises:
        ExportFailedError: if the run is complete, but an export of it failed.

    Example:
        >>> result = modelyard.train_and_evaluate(model="mlp", dataset="digits", train_epochs=5)
        >>> result.metrics["accuracy"]
    """
    return run(experiment.as_config(config, options), evaluates=True)


def train(config: Config | Mapping[str, Any] | None = None, **options: Any) -> Result:
    """Trains and saves, without evaluating. Arguments as for `train_and_evaluate`."""
    return run(experiment.as_config(config, options), evaluates=False)


def resume(model_dir: str | Path, **options: Any) -> Result:
    """Goes on with the run in ``model_dir``, from its own config; ``options`` may change what may change.

    Example:
        >>> modelyard.resume("runs/2026-11-16-09_30_00-resnet20-cifar10", train_epochs=20)
    """
    return run(*experiment.resume_config(model_dir, options))


def run(config: Config, evaluates: bool) -> Result:
    """One process of a run, and the exports where they are this process's to make.

    That is the one that knows the best model: the evaluator of a cluster that has one, else the chief.

    Args:
        config: the config.
        evaluates: whether there are evaluations on the way.

    Raises:
        ExportFailedError: if the run is complete, but an export of it failed.
    """
    if not config.export_at_end:
        return experiment.run(config, evaluates)
    cluster = find_cluster(config.cluster)
    makes_them = cluster.me.role == EVALUATOR if cluster.has_evaluator else cluster.leads
    if makes_them:
        _check(config)
    result = experiment.run(config, evaluates)
    if not makes_them or result.role not in (CHIEF, EVALUATOR):
        return result
    return _exported(result, config.export_at_end, apart=not cluster.is_alone)


def _check(config: Config) -> None:
    """What would fail at the end is said before training."""
    from modelyard.serving.exporting.export import check_installed

    if storage.is_remote(config.model_dir or config.runs_dir):
        message = "exports are written to a folder of this machine, and the run is at a URL. Use `modelyard export`."
        raise ConfigError([Problem(config.origin("export_at_end"), "export_at_end", message)])
    for form in config.export_at_end:
        check_installed(form)


def _exported(result: Result, forms: Sequence[Any], apart: bool) -> Result:
    """The result with its exports. One that fails does not keep the others from being made."""
    from modelyard.serving.exporting.export import export, export_apart

    paths, failures = [], []
    for form in forms:
        try:
            path = _there_is(result.model_dir, form)
            if path is None:
                log.info("exporting as %s …", form)
                # TensorFlow that was part of a cluster is no more able to build a model of its own.
                path = (export_apart if apart else export)(result.model_dir, format=form).path
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


def _there_is(model_dir: str, form: str) -> str | None:
    """The export of the model that would be exported now, where a start before this one made it."""
    from modelyard.serving.description import DESCRIPTION
    from modelyard.serving.exporting.versions import versions

    directory, _, path = experiment.find_checkpoint(model_dir, None, {}, "Python")
    base = directory.export(form)
    for number in reversed(versions(base)):
        try:
            about = json.loads((base / str(number) / DESCRIPTION).read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(about, dict) and about.get("step") == step_of(path):
            log.info("the export as %s of step %d is there already", form, about["step"])
            return str(base / str(number))
    return None
