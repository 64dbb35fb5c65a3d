"""An export on disk: modelyard.json, and the SavedModel, opened to serve it or to predict a table.

It needs neither the run nor its data.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import modelyard
from modelyard import storage
from modelyard.config import Config, load_config
from modelyard.config.backend import import_quietly, keras_backend, select_engine
from modelyard.config.durations import RunLength
from modelyard.data.dataset import IMAGE, TEST, Dataset, Feature
from modelyard.data.decoded import dataset_to_predict
from modelyard.data.image_spec import ImageSpec
from modelyard.data.inputs import Inputs, is_one_image, spec_of
from modelyard.data.pipeline import Pipeline
from modelyard.data.raw_examples import RawExamples
from modelyard.data.sources.remote import local_tree
from modelyard.errors import ConfigError, DataError, Problem, RunError
from modelyard.run.directory import CONFIG, LARGEST_JSON
from modelyard.run.metrics import read_metrics
from modelyard.serving.servable import DEFAULT, ModelInfo, Outputs, Servable, finite_numbers
from modelyard.system.files import write_text
from modelyard.system.untrusted import read_regular

if TYPE_CHECKING:
    from modelyard.serving.exporting.formats import Exportable

DESCRIPTION, SAVED_MODEL = "modelyard.json", "saved_model.pb"
_COMPLETE = (DESCRIPTION, SAVED_MODEL)
"""An exported SavedModel has both. Either may be copied last: without one, it is incomplete."""
_TASK_TYPES = ("classification", "multi_label", "regression", "other")
_NO_METRICS = ("step", "epoch", "split", "time", "seconds", "examples_per_second")
_OPTIONS = ("eval_batch_size", "input_threads", "input_workers", "cache_dir", "threads", "metrics")


# -- modelyard.json -----------------------------------------------------------------------------------------------


def write_description(folder: Path, model: Exportable, form: str, version: int) -> None:
    """Writes modelyard.json.

    Args:
        folder: the folder of the export.
        model: the exported model.
        form: the format of the export.
        version: the number of its folder.
    """
    run = model.run
    image = {}
    if IMAGE in model.inputs:
        image = replace(model.recorded.image, shape=model.image.shape, dtype=model.image.dtype).as_json()
    tests = [row for row in read_metrics(run.directory.metrics) if row.get("split") == TEST]
    description = {
        "format": form,
        "version": version,
        "model": run.config.model,
        "dataset": run.config.dataset,
        "step": run.step,
        "takes_files": model.takes_files,
        **image,
        "inputs": {name: feature.as_json() for name, feature in model.inputs.items()},
        "kind": model.task_type,
        "classes": list(model.classes),
        "outputs": model.outputs,
        "metrics": _metrics(run.checkpoint.loop_state.get("last_evaluation") or {}),
        "test": _metrics(tests[-1]) if tests else {},
        "modelyard": modelyard.__version__,
    }
    write_text(folder / DESCRIPTION, json.dumps(description, indent=1) + "\n")


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a row of metrics.jsonl."""
    return {name: value for name, value in finite_numbers(row).items() if name not in _NO_METRICS}


def read_description(folder: Path) -> ModelInfo:
    """Reads modelyard.json of an exported version.

    Raises:
        DataError: if it is missing or invalid.
    """
    file = folder / DESCRIPTION
    try:
        read = json.loads(read_regular(file, LARGEST_JSON, DataError))
        inputs = {name: spec_of(Feature.from_json(each)) for name, each in read.get("inputs", {}).items()}
        if "image" in read:
            inputs = {**inputs, IMAGE: ImageSpec.from_json(read)}
        task_type = str(read["kind"])
        info = ModelInfo(
            str(read["model"]),
            Path(str(read["dataset"])).name,
            int(read["step"]),
            task_type if task_type in _TASK_TYPES else "other",
            tuple(str(name) for name in read.get("classes") or ()),
            inputs,
            finite_numbers(read.get("test") or {}),
            bool(read.get("takes_files", True)),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{file} is missing or damaged: {error!r}. Export the model again.") from error
    if read.get("format", "saved_model") != "saved_model":
        raise DataError(f"{folder} is an export as {read['format']}; only a SavedModel can be loaded here.")
    for name, spec in inputs.items():
        if min(spec.shape, default=1) < 1 or (name == IMAGE and not spec.shape):
            raise DataError(f"{file} has the {name} shape {spec.shape}, which is invalid. Export the model again.")
    if not inputs:
        raise DataError(f"{file} names no inputs. Export the model again.")
    return info


# -- the SavedModel -----------------------------------------------------------------------------------------------


class ExportedServable(Servable):
    """A SavedModel that `modelyard export` wrote, run by TensorFlow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(read_description(folder))
        try:
            tf: Any = import_quietly("tensorflow")
        except ImportError as error:
            raise RunError(
                "an exported SavedModel needs TensorFlow: pip install 'modelyard[cpu]', or serve the run itself "
                "with --model_dir."
            ) from error
        try:
            self._loaded = tf.saved_model.load(str(folder))  # holds the variables
            self._function = self._loaded.signatures[DEFAULT]
        except Exception as error:  # TensorFlow's readers have no common exception class
            raise DataError(f"{folder} can't be loaded: {str(error).strip() or type(error).__name__}") from error
        self._to_tensor = tf.constant
        inputs = self._function.structured_input_signature[1]
        if set(inputs) != set(self.info.inputs):
            wanted = ", ".join(self.info.inputs)
            raise DataError(f"{folder} has the inputs {', '.join(inputs) or '(none)'}; {DESCRIPTION} says {wanted}.")
        for name, given in self.info.inputs.items():
            spec = inputs[name]
            if not spec.shape.is_compatible_with((None, *given.shape)) or spec.dtype.name != given.dtype:
                raise DataError(
                    f"{folder} takes {name} {spec.shape} of {spec.dtype.name}, but its {DESCRIPTION} says "
                    f"{given.shape} of {given.dtype}."
                )

    def predict(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        """Predicts with the signature serving_default; bytes become text."""
        tensors = {name: self._to_tensor(values) for name, values in inputs.items()}
        found = {name: values.numpy() for name, values in self._function(**tensors).items()}
        for name, values in found.items():
            if values.dtype == object:
                flat = [each.decode("utf-8", "replace") if isinstance(each, bytes) else each for each in values.flat]
                text = np.empty(len(flat), object)
                text[:] = flat
                found[name] = text.reshape(values.shape)
        return found


class OpenExport:
    """A version of an export, to predict a table with. It has the attributes and methods of `OpenRun`.

    Args:
        folder: the version; or the folder of all versions, whose newest is opened. At a URL, it is copied to the cache.
        options: options among `_OPTIONS`.
        source: where the options come from, for error messages.
    """

    def __init__(self, folder: str | Path, options: dict[str, Any], source: str) -> None:
        wrong = [key for key in options if key not in _OPTIONS]
        if wrong:
            message = f"has no effect here: an export takes {', '.join(_OPTIONS)} only."
            raise ConfigError(Problem(source, key, message) for key in wrong)
        self.config: Config = load_config(**options)
        if isinstance(folder, str) and storage.is_remote(folder):
            self.address = _newest_at(folder)
            self.path = local_tree(self.address, storage.cache_folder(self.config.cache_dir))
        else:
            folder = Path(folder).expanduser()
            self.path = folder if (folder / DESCRIPTION).is_file() else _newest(folder)
            self.address = str(self.path.absolute())
        self.info = read_description(self.path)
        self.step, self.classes = self.info.step, self.info.classes

    value_columns: Sequence[str] = ()
    """An export does not have the names of the columns of vectors."""

    @property
    def inputs(self) -> Inputs:
        """What the model takes, by name."""
        return self.info.inputs

    @property
    def features(self) -> dict[str, Feature]:
        """Shape and type of each input."""
        return {name: spec.feature for name, spec in self.info.inputs.items()}

    @property
    def takes_image_only(self) -> bool:
        """Whether the image is the only input."""
        return is_one_image(self.info.inputs)

    @property
    def label(self) -> Feature:
        """Shape and type of a label, by the task of the model."""
        several = (len(self.classes),) if len(self.classes) > 1 else ()
        by_task = {"regression": Feature(several, "float32"), "multi_label": Feature((len(self.classes),), "uint8")}
        return by_task.get(self.info.task_type, Feature((), "int32"))

    def engine(
        self, examples: RawExamples, *, labelled: bool = False, skip_bad: bool = False
    ) -> tuple[ExportEngine, Dataset]:
        """Returns an engine that predicts, and the dataset of the examples."""
        if keras_backend() is None:
            select_engine("tensorflow")
        inputs = self.info.inputs
        dataset = dataset_to_predict(examples, self.classes, inputs, labelled=labelled, skip_bad=skip_bad)
        return ExportEngine(self, dataset), dataset


class ExportEngine:
    """Predicts the examples of a dataset, batch by batch."""

    def __init__(self, opened: OpenExport, dataset: Dataset) -> None:
        config, size = opened.config, dataset.size(TEST)
        self._pipeline = Pipeline(config, dataset, RunLength(size, config.train_batch_size, 1))
        self._batch, self._model = min(config.eval_batch_size, size), ExportedServable(opened.path)

    def predict(self, split: str, first: int = 0) -> Generator[dict[str, NDArray[Any]], None, None]:
        """Yields predictions in order, from the example ``first`` on."""
        for batch, weights in self._pipeline.evaluation(split, self._batch, first=first):
            count = int(weights.sum())
            outputs = self._model.predict({name: np.asarray(batch[name]) for name in self._model.info.inputs})
            yield {name: values[:count] for name, values in outputs.items() if name != "label"}

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._pipeline.close()


# -- folders of versions ------------------------------------------------------------------------------------------


def is_exported_version(folder: Path) -> bool:
    """Returns whether a folder is a complete exported version, by its name and its files."""
    named = folder.name.isascii() and folder.name.isdigit() and folder.name == str(int(folder.name))
    return named and (folder / DESCRIPTION).is_file() and (folder / SAVED_MODEL).is_file()


def is_export(folder: Path) -> bool:
    """Returns whether a folder is an exported version, or holds exported versions."""
    return (folder / DESCRIPTION).is_file() or (
        folder.is_dir()
        and not (folder / CONFIG).exists()
        and any(is_exported_version(path) for path in folder.iterdir())
    )


def is_export_at(address: str | Path) -> bool:
    """Returns `is_export` of a path or URL."""
    if not isinstance(address, str) or not storage.is_remote(address):
        return is_export(Path(address).expanduser())
    if storage.exists(storage.join(address, CONFIG)):
        return False
    return storage.exists(storage.join(address, DESCRIPTION)) or bool(versions_at(address))


def versions_at(url: str) -> list[int]:
    """Returns the numbers of the complete versions below a URL, oldest first."""
    names = set(storage.names_below(url))
    numbers = {name.partition("/")[0] for name in names}
    complete = (n for n in numbers if n.isascii() and n.isdecimal() and {f"{n}/{f}" for f in _COMPLETE} <= names)
    return sorted(map(int, complete))


def _newest_at(url: str) -> str:
    """Returns the URL of a version: the one at ``url``, or the newest below it."""
    if storage.exists(storage.join(url, DESCRIPTION)):
        return url.rstrip("/")
    versions = versions_at(url)
    if not versions:
        raise RunError(f"{url} holds no exported version.")
    return storage.join(url, str(versions[-1]))


def _newest(folder: Path) -> Path:
    versions = [path for path in folder.iterdir() if is_exported_version(path)]
    if not versions:
        raise RunError(f"{folder} holds no exported version.")
    return max(versions, key=lambda path: int(path.name))
