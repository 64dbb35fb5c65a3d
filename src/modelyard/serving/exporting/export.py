"""Exports: a run's model for other programs, with its preprocessing inside, checked before it appears."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from modelyard.config.accelerators import is_installed
from modelyard.config.backend import INSTALL, keras_backend, select_engine
from modelyard.errors import RunError, UserError, unknown
from modelyard.serving.exporting.versions import choose_version, export_folder, tidied
from modelyard.serving.run_model import OpenRun, open_run
from modelyard.system.files import whole_folder

if TYPE_CHECKING:
    from modelyard.serving.exporting.check import Predictions, Probe
    from modelyard.serving.exporting.exportable import Exportable

log = logging.getLogger("modelyard")
Format = Literal["saved_model", "keras", "onnx", "tflite"]
FORMATS = ("saved_model", "keras", "onnx", "tflite")
_ONNX = ("tf2onnx", "onnx", "onnxruntime")


@dataclass(frozen=True)
class Exported:
    """An export.

    Args:
        path: its folder.
        version: the number of that.
        format: saved_model, keras, onnx or tflite.
        step: the step of the model.
        difference: the largest difference of its predictions from the run's own, of all ways to ask it.
        differences: the same for each way.
        checked_on: what they were compared on.
    """

    path: str
    version: int
    format: str
    step: int
    difference: float
    differences: dict[str, float]
    checked_on: str


def export(
    model_dir: str | Path,
    *,
    checkpoint: str | int | None = None,
    format: Format = "saved_model",  # noqa: A002 - the name of the option
    output: str | Path | None = None,
    version: int | None = None,
    overwrite: bool = False,
    source: str = "Python",
    **options: Any,
) -> Exported:
    """Writes the model of a run for other programs, and compares its predictions with the run's own.

    Args:
        model_dir: the run folder.
        checkpoint: best, latest or a step; by default best if there is one.
        format: saved_model, keras, onnx or tflite.
        output: the folder for numbered versions; by default one in the run folder.
        version: the number of the new version; by default the next one.
        overwrite: replace that version where it exists; without a number, the newest.
        source: where the options come from, for error messages.
        **options: options that say where things are: data_dir, cache_dir, plugins.

    Raises:
        UserError: if there is no such model, it can't be written so, or what was written predicts something else.

    Example:
        >>> modelyard.export("runs/first").path
        'runs/first/export/1'
    """
    if format not in FORMATS:
        raise UserError(unknown("format", str(format), FORMATS))
    check_installed(format)
    if keras_backend() in (None, "tensorflow"):
        options["engine"] = "tensorflow"  # before the run's own parts are imported, which import Keras
    run = open_run(model_dir, checkpoint, source, **options)
    base = export_folder(run.directory, format, None if output is None else str(output))
    with tidied(base):
        number = choose_version(base, version, overwrite)
        if keras_backend() not in (None, "tensorflow"):
            return _elsewhere(run, format, base, version, overwrite, options)
        return _export(run, format, base / str(number), overwrite, options)


def _export(run: OpenRun, form: Format, target: Path, overwrite: bool, options: dict[str, Any]) -> Exported:
    from modelyard.serving.exporting.reference import EXACT

    select_engine("tensorflow")
    from modelyard.serving.description import describe, write_description
    from modelyard.serving.exporting.check import gather_probe
    from modelyard.serving.exporting.exportable import make_exportable

    run = replace(run, config=run.config.model_copy(update={**EXACT, "engine": "tensorflow"}))
    model = make_exportable(run)
    probe = gather_probe(model)
    expected = _expected(model, probe, options)
    model.engine.settle_averages()
    if not model.takes_files and form == "saved_model":
        log.warning("images are not decoded inside: %s. The export takes image tensors only.", _why(model))
    write, predictors = _writer(form)
    with whole_folder(target) as folder:
        write(model, folder)
        write_description(folder, describe(model, form, int(target.name)))
        differences = _differences(predictors(folder, model), probe, expected)
        if target.exists() and not overwrite:
            raise RunError(f"{target} was written by another process meanwhile. Export again.")
    model.engine.close()
    largest = max(differences.values())
    return Exported(str(target), int(target.name), form, run.step, largest, differences, probe.what)


def _expected(model: Exportable, probe: Probe, options: dict[str, Any]) -> Predictions:
    """What the run itself predicts: for the images, then for the files."""
    from modelyard.serving.exporting.reference import is_elsewhere, predict_elsewhere

    images = np.concatenate([probe.images, probe.decoded])
    if is_elsewhere(model.run):
        found = predict_elsewhere(model.run, "jax", images, options)
        if found is not None:
            return found
    batch = {"image": images, "id": np.arange(len(images), dtype=np.int64)}
    return {name: np.asarray(values) for name, values in model.engine.predict_batch(batch).items()}


def _differences(
    predictors: dict[str, Callable[[Any], Predictions]], probe: Probe, expected: Predictions
) -> dict[str, float]:
    from modelyard.serving.description import BYTES
    from modelyard.serving.exporting.check import compare
    from modelyard.serving.exporting.saved_model import EXAMPLES, encoded_example

    of_images = {name: values[: len(probe.images)] for name, values in expected.items()}
    of_files = {name: values[len(probe.images) :] for name, values in expected.items()}
    found = {}
    for name, predictor in predictors.items():
        if name == BYTES:
            found[name] = compare(name, predictor, probe.files, of_files)
        elif name == EXAMPLES:
            records = [encoded_example(file, str(i).encode()) for i, file in enumerate(probe.files)]
            found[name] = compare(name, predictor, records, of_files)
        else:
            found[name] = compare(name, predictor, probe.images, of_images)
    return found


def _writer(form: Format) -> tuple[Callable[[Exportable, Path], None], Callable[[Path, Exportable], Any]]:
    if form == "keras":
        from modelyard.serving.exporting.keras_file import keras_predictors, write_keras

        return write_keras, keras_predictors
    if form == "onnx":
        from modelyard.serving.exporting.onnx_file import onnx_predictors, write_onnx

        return write_onnx, onnx_predictors
    if form == "tflite":
        from modelyard.serving.exporting.tflite_file import tflite_predictors, write_tflite

        return write_tflite, tflite_predictors
    from modelyard.serving.exporting.saved_model import saved_model_predictors, write_saved_model

    return write_saved_model, saved_model_predictors


def check_installed(form: str) -> None:
    """Makes sure that what a format needs is there.

    Raises:
        UserError: with how to install it.
    """
    if not is_installed("tensorflow"):
        raise UserError(f"exports are made by TensorFlow, also those of JAX runs. Install it: {INSTALL['tensorflow']}")
    missing = [name for name in _ONNX if form == "onnx" and not is_installed(name)]
    if missing:
        raise UserError(f"--format onnx needs {', '.join(missing)}. Install it: pip install 'modelyard[onnx]'")


def _why(model: Exportable) -> str:
    if model.dataset.stored is not model.dataset:
        return "this run preprocesses examples by code of its own, in NumPy, which comes before what is exported"
    return f"examples of shape {'×'.join(map(str, model.image.shape))} are no grey or colour images"


# -- where Keras runs on another backend --------------------------------------------------------------------------


def export_apart(model_dir: str | Path, *, format: Format) -> Exported:  # noqa: A002 - as for `export`
    """The same as `export`, in a process of its own, whatever this one's Keras can do."""
    run = open_run(model_dir)
    return _elsewhere(run, format, export_folder(run.directory, format, None), None, False, {})


def _elsewhere(
    run: OpenRun, form: Format, base: Path, version: int | None, overwrite: bool, options: dict[str, Any]
) -> Exported:
    """Exports in a process of its own: this one's Keras has another backend."""
    from modelyard.serving.exporting.reference import child_environment

    asked = {"model_dir": run.directory.address, "checkpoint": run.step, "format": form, "output": str(base)}
    asked |= {"version": version, "overwrite": overwrite, **options}
    words = [sys.executable, "-m", "modelyard.serving.exporting.export", json.dumps(asked)]
    done = subprocess.run(words, env=child_environment("tensorflow"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return Exported(**json.loads(done.stdout.strip().splitlines()[-1]))


def main(words: list[str]) -> None:
    """Exports as a JSON object says, prints one; an error is the last line of standard error."""
    try:
        print(json.dumps(asdict(export(**json.loads(words[0])))))  # noqa: T201 - for the process that asked
    except UserError as error:
        print(" ".join(str(error).split()), file=sys.stderr)  # noqa: T201
        sys.exit(error.status)


if __name__ == "__main__":
    main(sys.argv[1:])
