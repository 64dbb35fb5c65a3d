"""Checks that an export predicts what its run predicts, on real examples.

Keras has one backend per process, so the predictions of a JAX run are computed by another process, which runs this
module: ``python -m modelyard.serving.exporting.check CALL RESULT``.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config.backend import is_installed
from modelyard.config.schema import GIVEN_DATASET
from modelyard.data.dataset import ID, IMAGE, TEST, TRAIN, VALIDATION
from modelyard.data.decoded import DecodedDataset
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import ConfigError, RunError, UserError, counted
from modelyard.run.manifest import read_manifest
from modelyard.serving.run_model import OpenRun, open_run
from modelyard.serving.servable import BYTES, EXAMPLES, IMAGE_BYTES

if TYPE_CHECKING:
    from modelyard.serving.exporting.formats import Exportable

log = logging.getLogger("modelyard")
Predictions = Mapping[str, NDArray[Any]]
Arrays = dict[str, NDArray[Any]]
Predictor = Callable[[Mapping[str, Any]], Predictions]
TOLERANCE = 1e-4
EXACT = {
    "precision": "float32",
    "num_gpus": 0,
    "gpu_id": None,
    "cpu_devices": 1,
    "xla": False,
    "deterministic": False,
    "shard_parameters": False,
}
"""Exports compute in float32 and are compared on the CPU: a GPU rounds matrix products more coarsely."""
_MAX_EXAMPLES = 32
_DECODED_BY_TENSORFLOW = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM")


# -- comparing ----------------------------------------------------------------------------------------------------


def compare_all(
    predictors: Mapping[str, Predictor],
    examples: CheckExamples,
    expected: Predictions,
    own: Mapping[str, tuple[Mapping[str, Any], Predictions]] = MappingProxyType({}),
) -> dict[str, float]:
    """Returns the largest difference from ``expected`` for each signature of an export.

    Args:
        predictors: a function from a batch of named inputs to predictions, by signature.
        examples: the examples to predict.
        expected: the run's predictions for ``examples``, followed by those with files.
        own: inputs and expected outputs of the user's own signatures.

    Raises:
        UserError: if a difference is larger than the tolerance.
    """
    from modelyard.data.records.example import encode_example

    count = examples.count
    for_arrays = {name: values[:count] for name, values in expected.items()}
    for_files = {name: values[count:] for name, values in expected.items()}
    records = [encode_example({"image/encoded": file, ID: b"an id"}) for file in examples.files]
    others = {name: values for name, values in examples.with_files.items() if name != IMAGE}
    batches: dict[str, tuple[Mapping[str, Any], Predictions]] = {
        BYTES: ({IMAGE_BYTES: examples.files, **others}, for_files),
        EXAMPLES: ({EXAMPLES: records}, for_files),
        **own,
    }
    differences = {}
    for name, predictor in predictors.items():
        batch, wanted = batches.get(name, (examples.inputs, for_arrays))
        differences[name] = _compare(name, predictor, batch, wanted)
    return differences


def _compare(name: str, predictor: Predictor, batch: Mapping[str, Any], expected: Predictions) -> float:
    """Returns the largest difference for one signature, relative for numbers beyond 1."""
    found = predictor(batch)
    missing = [output for output in expected if output not in found]
    if missing:
        raise UserError(f"the export was refused: {name} has no output {', '.join(missing)}.")
    largest = 0.0
    for output, wanted in expected.items():
        got = np.asarray(found[output])
        if got.shape != wanted.shape:
            raise UserError(
                f"the export was refused: {output} of {name} has shape {got.shape}; the run's has {wanted.shape}."
            )
        if wanted.dtype.kind == "f":
            size = np.maximum(np.abs(wanted.astype(np.float64)), 1.0)
            difference = float(np.max(np.abs(got.astype(np.float64) - wanted) / size, initial=0.0))
        else:
            difference = float(np.any((got != wanted) & ~_ties(output, got, expected)))
        if not difference <= TOLERANCE:  # also for NaN
            raise UserError(
                f"the export was refused: {output} of {name} differs from the run's own predictions by "
                f"{difference:.2g}; the maximum is {TOLERANCE:g}. Nothing was written."
            )
        largest = max(largest, difference)
    return largest


def _ties(output: str, got: NDArray[Any], expected: Predictions) -> Any:
    """Returns where the run's own probabilities of two answers are so close that rounding decides."""
    probabilities = expected.get("probabilities")
    if probabilities is None:
        return False
    if output == "class" and probabilities.ndim == 2 and got.ndim == 1:
        classes = got[:, None].astype(np.int64).clip(0, probabilities.shape[1] - 1)
        return probabilities.max(axis=1) - np.take_along_axis(probabilities, classes, axis=1)[:, 0] <= TOLERANCE
    return np.abs(probabilities - 0.5) <= TOLERANCE if probabilities.shape == got.shape else False


# -- examples to compare on -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckExamples:
    """Examples to compare predictions on.

    Args:
        inputs: a batch as the dataset gives it, by the names of the inputs.
        files: image files; the first are of the same examples. None if the model takes no files.
        with_files: the inputs of the examples of the files, decoded as in training.
        origin: where the examples come from, for people.
    """

    inputs: Arrays
    files: list[bytes]
    with_files: Arrays
    origin: str

    @property
    def count(self) -> int:
        """The number of examples without files."""
        return len(next(iter(self.inputs.values())))


def check_examples(model: Exportable) -> CheckExamples:
    """Returns examples of the run's data, or random ones if the data can't be opened."""
    stored: list[Any] = []
    try:
        dataset = load_dataset(model.run.config)
    except (UserError, OSError) as error:
        what = "images" if set(model.inputs) == {IMAGE} else "inputs"
        if model.run.config.dataset == GIVEN_DATASET and model.run.config.given_dataset is None:
            reason = "the data of the run is arrays, which are not given (modelyard.export(RUN, dataset=(x, y)))"
        else:
            reason = f"the data of the run can't be opened ({error})"
        log.warning("%s: the export is checked on random %s", reason, what)
        inputs, origin = {name: _random(model, name) for name in model.inputs}, f"random {what}"
    else:
        sizes = dataset.sizes()
        split = next(name for name in (TEST, VALIDATION, TRAIN) if name in sizes)
        rows = np.unique(np.linspace(0, sizes[split] - 1, min(sizes[split], _MAX_EXAMPLES)).astype(np.int64))
        read, origin = dataset.read(split, rows), f"{counted(len(rows), 'example')} of {split}"
        inputs = {name: np.asarray(read[name]) for name in model.inputs if name in read}
        if isinstance(dataset.stored, DecodedDataset):
            stored = [dataset.stored.splits[split].load(int(row)) for row in rows]
        for name, feature in model.inputs.items():
            found = inputs.get(name)
            if found is None or found.shape[1:] != feature.shape or found.dtype != feature.dtype:
                values = "nothing" if found is None else f"{found.dtype} of shape {found.shape[1:]}"
                raise UserError(
                    f"the examples of {model.run.config.dataset} have {values} as {name}; the run was trained on "
                    f"{feature.dtype} of shape {feature.shape}. Restore the data of the run."
                )
    if not model.takes_files:
        return CheckExamples(inputs, [], {name: values[:0] for name, values in inputs.items()}, origin)
    files, images = [], inputs[IMAGE]
    for image, file in zip_longest(images, stored):
        usable = isinstance(file, bytes) and file.startswith(_DECODED_BY_TENSORFLOW)
        files.append(file if usable else _png(image, model.recorded.image.unit_scale))
    files += _unusual_files(files[0])
    decoded = np.stack([model.recorded.image.decode(file, "an example to check with") for file in files])
    of_files = [n if n < len(images) else 0 for n in range(len(files))]  # the last are other files of the first example
    return CheckExamples(
        inputs, files, {**{name: values[of_files] for name, values in inputs.items()}, IMAGE: decoded}, origin
    )


def _random(model: Exportable, name: str) -> NDArray[Any]:
    random, feature = np.random.default_rng(0), model.inputs[name]
    shape, dtype = (_MAX_EXAMPLES, *feature.shape), np.dtype(feature.dtype)
    if dtype.kind != "f":  # whole numbers may be indices, so only those of images are large
        return random.integers(0, 256 if name == IMAGE else 2, shape).astype(dtype)
    unit_scale = name == IMAGE and model.recorded.image.unit_scale
    return (random.random(shape) if unit_scale else random.normal(0, 1, shape)).astype(dtype)


def _png(image: NDArray[Any], unit_scale: bool) -> bytes:
    """Returns an image of a dataset as a PNG file; floats are rounded to bytes."""
    from PIL import Image

    if image.dtype != np.uint8:
        image = np.rint(image.astype(np.float64) * (255 if unit_scale else 1)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(file, "PNG")
    return file.getvalue()


def _unusual_files(file: bytes) -> list[bytes]:
    """Returns the same picture in other sizes and colour modes, rotated, and transparent."""
    from PIL import Image

    with Image.open(io.BytesIO(file)) as opened:
        picture = opened.convert("RGB")
    large = picture.resize((3 * picture.width + 1, 2 * picture.height + 5))
    rotated = Image.Exif()
    rotated[0x0112] = 6
    grey, colour, transparent = io.BytesIO(), io.BytesIO(), io.BytesIO()
    large.convert("L").save(grey, "JPEG", exif=rotated.tobytes())
    large.save(colour, "JPEG", quality=90)
    large.convert("RGBA").save(transparent, "PNG")
    return [grey.getvalue(), colour.getvalue(), transparent.getvalue()]


# -- the run's own predictions ----------------------------------------------------------------------------------------


def expected_predictions(model: Exportable, examples: CheckExamples, options: dict[str, Any]) -> Predictions:
    """Returns the run's own predictions, for the examples and then for the files, on the engine of its last start."""
    inputs = {name: np.concatenate([values, examples.with_files[name]]) for name, values in examples.inputs.items()}
    if _last_engine(model.run) == "jax" and is_installed("jax"):
        found = predict_in_subprocess(model.run, "jax", inputs, options)
        if found is not None:
            return found
    return _predict_batch(model.engine, inputs)


def _last_engine(run: OpenRun) -> str:
    starts = read_manifest(run.directory).get("starts") or [{}]
    return str((starts[-1].get("engine") or {}).get("engine", run.config.engine))


def _predict_batch(engine: Any, inputs: Arrays) -> dict[str, NDArray[Any]]:
    batch = {**inputs, ID: np.arange(len(next(iter(inputs.values()))), dtype=np.int64)}
    return {name: np.asarray(values) for name, values in engine.predict_batch(batch).items()}


def predict_in_subprocess(run: OpenRun, engine: str, inputs: Arrays, options: dict[str, Any]) -> Predictions | None:
    """Predicts a batch on another engine, in a new process.

    Returns:
        The predictions; None if the new process can't find a plugin of the run, such as one that a script registers.

    Raises:
        RunError: if the process fails otherwise.
    """
    try:
        # The run's plugins were trusted here; that process has not imported them yet.
        arguments = {**options, "trust": True, "engine": engine, "run": run.address, "step": run.step, "inputs": inputs}
        found: Predictions = call_in_subprocess(engine, predict_inputs, **arguments)
    except ConfigError as error:
        reason = " ".join(str(error).split())
        log.warning("%s The export is compared with the run's model on TensorFlow instead.", reason)
        return None
    except UserError as error:
        raise RunError(f"the run's own predictions, on {engine}, could not be computed: {error}") from error
    return found


def predict_inputs(run: str, step: int, inputs: Arrays, engine: str, **options: Any) -> Predictions:
    """Returns the predictions of a run for a batch."""
    opened = open_run(run, step, engine=engine, **options)
    built, _ = replace(opened, config=opened.config.model_copy(update={**EXACT, "engine": engine})).engine()
    try:
        return _predict_batch(built, inputs)
    finally:
        built.close()


# -- another process --------------------------------------------------------------------------------------------------


def call_in_subprocess(backend: str, function: Callable[..., Any], **arguments: Any) -> Any:
    """Calls a function of this package in a new process, where Keras has another backend, without GPUs.

    Raises:
        UserError: what the function raises; or the last line on stderr, if the process fails otherwise.
    """
    kept = {**os.environ, "KERAS_BACKEND": backend}  # also for plugins that import Keras before the engine is chosen
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [package, kept.get("PYTHONPATH")]))
    environment = {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryDirectory() as temporary:
        call, result = Path(temporary, "call"), Path(temporary, "result")
        call.write_bytes(pickle.dumps((function, arguments)))
        words = [sys.executable, "-m", "modelyard.serving.exporting.check", str(call), str(result)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not result.exists():
            raise RunError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
        value = pickle.loads(result.read_bytes())
    if isinstance(value, UserError):
        raise value
    return value


def main(call: Path, result: Path) -> None:
    """Makes the call in a file of `call_in_subprocess`."""
    function, arguments = pickle.loads(call.read_bytes())
    try:
        value = function(**arguments)
    except UserError as error:
        value = error
    result.write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
