"""An exported SavedModel, opened to serve it or to predict a table. It needs TensorFlow and modelyard.json only."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config import Config, load_config
from modelyard.config.backend import keras_backend, select_engine
from modelyard.config.durations import RunLength
from modelyard.data.dataset import IMAGE, TEST, Dataset, Feature
from modelyard.data.decoded import DecodedDataset
from modelyard.data.pipeline import Pipeline
from modelyard.data.raw_examples import RawExamples
from modelyard.errors import ConfigError, DataError, Problem, RunError
from modelyard.serving.description import DESCRIPTION, read_description
from modelyard.serving.servable import Outputs, Servable

SAVED_MODEL = "saved_model.pb"
"""An exported version has it and `DESCRIPTION`. Either may be copied last: without one, it is incomplete."""
_OPTIONS = ("eval_batch_size", "input_threads", "cache_dir", "threads")


class ExportedServable(Servable):
    """A SavedModel that `modelyard export` wrote, run by TensorFlow."""

    def __init__(self, folder: Path) -> None:
        super().__init__(read_description(folder))
        try:
            import tensorflow as tf
        except ImportError as error:
            raise RunError(
                "an exported SavedModel needs TensorFlow: pip install 'modelyard[cpu]', or serve the run itself "
                "with --model_dir."
            ) from error
        try:
            self._loaded = tf.saved_model.load(str(folder))  # holds the variables
            self._function = self._loaded.signatures["serving_default"]
        except Exception as error:  # TensorFlow's readers have no class of error in common
            raise DataError(f"{folder} can't be loaded: {str(error).strip() or type(error).__name__}") from error
        self._tensor: Callable[..., Any] = tf.constant
        wanted = self._function.structured_input_signature[1]
        if set(wanted) != {IMAGE}:
            raise DataError(f"{folder} has the inputs {', '.join(wanted) or '(none)'}; the one input must be {IMAGE}.")
        image, spec = self.info.image, wanted[IMAGE]
        if not spec.shape.is_compatible_with((None, *image.shape)) or spec.dtype.name != image.dtype:
            raise DataError(
                f"{folder} takes images {spec.shape} of {spec.dtype.name}, but its {DESCRIPTION} says "
                f"{image.shape} of {image.dtype}."
            )

    def predict(self, images: NDArray[Any]) -> Outputs:
        """Predicts with the signature serving_default; bytes become text."""
        found = {name: values.numpy() for name, values in self._function(image=self._tensor(images)).items()}
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
        folder: the version; or the folder of all versions, whose newest is opened.
        options: options among `_OPTIONS`.
        source: where the options come from, for error messages.
    """

    def __init__(self, folder: Path, options: dict[str, Any], source: str) -> None:
        wrong = [key for key in options if key not in _OPTIONS]
        if wrong:
            message = f"has no effect here: an export takes {', '.join(_OPTIONS)} only."
            raise ConfigError(Problem(source, key, message) for key in wrong)
        self.path = folder if (folder / DESCRIPTION).is_file() else _newest(folder)
        self.info = read_description(self.path)
        self.config: Config = load_config(**options)
        self.address, self.step, self.classes = str(self.path.absolute()), self.info.step, self.info.classes

    @property
    def label(self) -> Feature:
        """Shape and type of a label, by the task of the model."""
        by_task = {"regression": Feature((), "float32"), "multi_label": Feature((len(self.classes),), "uint8")}
        return by_task.get(self.info.task_type, Feature((), "int32"))

    def engine(
        self, items: RawExamples, *, labelled: bool = False, skips: bool = False
    ) -> tuple[ExportEngine, Dataset]:
        """Returns an engine that predicts, and the dataset of the examples."""
        if keras_backend() is None:
            select_engine("tensorflow")
        dataset = DecodedDataset({TEST: items}, self.classes, self.info.image, labelled=labelled, skip_bad=skips)
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
            outputs = self._model.predict(np.asarray(batch[IMAGE]))
            yield {name: values[:count] for name, values in outputs.items() if name != "label"}

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._pipeline.close()


def is_exported_version(folder: Path) -> bool:
    """Returns whether a folder is a complete exported version, by its name and its files."""
    named = folder.name.isascii() and folder.name.isdigit() and folder.name == str(int(folder.name))
    return named and (folder / DESCRIPTION).is_file() and (folder / SAVED_MODEL).is_file()


def is_export(folder: Path) -> bool:
    """Returns whether a folder is an exported version, or holds exported versions."""
    return (folder / DESCRIPTION).is_file() or (
        folder.is_dir()
        and not (folder / "config.yaml").exists()
        and any(is_exported_version(path) for path in folder.iterdir())
    )


def _newest(folder: Path) -> Path:
    versions = [path for path in folder.iterdir() if is_exported_version(path)]
    if not versions:
        raise RunError(f"{folder} holds no exported version.")
    return max(versions, key=lambda path: int(path.name))
