"""An exported model that predicts a table, as a run does: with TensorFlow alone, from its own description."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config import Config, load_config
from modelyard.config.backend import keras_backend, select_engine
from modelyard.config.durations import RunLength
from modelyard.data.dataset import IMAGE, TEST, Dataset, Feature
from modelyard.data.pipeline import Pipeline
from modelyard.data.raw_examples import RawExamples
from modelyard.errors import ConfigError, Problem, RunError
from modelyard.serving.description import DESCRIPTION
from modelyard.serving.servable import ExportedServable, is_exported_version, read_description

_OPTIONS = ("eval_batch_size", "input_threads", "cache_dir", "threads")


class OpenExport:
    """A version of an export.

    Args:
        folder: the version, or the folder of all versions, of which the newest is taken.
        options: of `_OPTIONS`.
        source: where they come from, for error messages.
    """

    def __init__(self, folder: Path, options: dict[str, Any], source: str) -> None:
        wrong = [key for key in options if key not in _OPTIONS]
        if wrong:
            told = f"has no effect here: an export has no options but {', '.join(_OPTIONS)}."
            raise ConfigError(Problem(source, key, told) for key in wrong)
        self.path = folder if (folder / DESCRIPTION).is_file() else _newest(folder)
        self.info = read_description(self.path)
        self.config: Config = load_config(**options)
        self.address, self.step, self.classes = str(self.path.absolute()), self.info.step, self.info.classes

    @property
    def label(self) -> Feature:
        """Of an example, by what the model predicts."""
        kinds = {"regression": Feature((), "float32"), "multi_label": Feature((len(self.classes),), "uint8")}
        return kinds.get(self.info.task_type, Feature((), "int32"))

    def engine(
        self, items: RawExamples, *, labelled: bool = False, skips: bool = False
    ) -> tuple[ExportEngine, Dataset]:
        """What predicts, and the dataset of the examples."""
        if keras_backend() is None:
            select_engine("tensorflow")
        from modelyard.models.recorded_data import RecordedData
        from modelyard.models.task import DataInfo
        from modelyard.serving.examples import Examples

        nothing = np.zeros(0, np.float32)
        data = DataInfo({IMAGE: self.info.image}, self.info.classes, nothing, nothing)
        kept = RecordedData(data, {IMAGE: self.info.image}, None, self.info.fit, self.info.shares)
        dataset = Examples(items, kept, labelled=labelled, skips=skips)
        return ExportEngine(self, dataset), dataset


class ExportEngine:
    """Predicts the examples of a dataset, a batch at a time."""

    def __init__(self, opened: OpenExport, dataset: Dataset) -> None:
        config, size = opened.config, dataset.size(TEST)
        self._pipeline = Pipeline(config, dataset, RunLength(size, config.train_batch_size, 1))
        self._batch, self._model = min(config.eval_batch_size, size), ExportedServable(opened.path)

    def predict(self, split: str, first: int = 0) -> Generator[dict[str, NDArray[Any]], None, None]:
        """Predictions in order, from the example ``first`` on."""
        for batch, weights in self._pipeline.evaluation(split, self._batch, first=first):
            count = int(weights.sum())
            found = self._model.predict(np.asarray(batch[IMAGE]))
            yield {name: values[:count] for name, values in found.items() if name != "label"}

    def close(self) -> None:
        """Ends what reads ahead."""
        self._pipeline.close()


def is_export(folder: Path) -> bool:
    """Whether a folder is an exported version, or holds such."""
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
