"""A loaded model, of a run or of an export: a batch of images in, named arrays out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import ID, IMAGE, LABEL, TEST
from modelyard.errors import DataError
from modelyard.serving.description import ModelInfo, finite_numbers

if TYPE_CHECKING:
    from modelyard.serving.run_model import OpenRun

Outputs = dict[str, NDArray[Any]]


class Servable(ABC):
    """A loaded model. `predict` is called by one thread, `decode` by several."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.batch_multiple = 1
        """Batch sizes are multiples of this: the number of devices."""
        self.outputs: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape (without the batch) and type of each output; known after `warm_up`."""

    @abstractmethod
    def predict(self, images: NDArray[Any]) -> Outputs:
        """Returns the predictions for a batch of images; all arrays have its length."""

    def decode(self, data: bytes, name: str) -> NDArray[Any]:
        """Returns the pixels of an image file as in training: colours, orientation, size.

        Raises:
            DataError: if it is not an image.
        """
        return self.info.image.decode(data, name)

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Predicts a batch of each size, so that all sizes are compiled."""
        image = self.info.image
        for size in sizes:
            found = self.predict(np.zeros((size, *image.shape), image.dtype))
            self.outputs = {name: (values.shape[1:], _type_name(values)) for name, values in found.items()}
            wrong = [name for name, values in found.items() if len(values) != size]
            if wrong:
                raise DataError(f"the output {wrong[0]} of the model is not one per image; the model can't be served.")


def _type_name(values: NDArray[Any]) -> str:
    return "string" if values.dtype.kind in "OSU" else values.dtype.name


def batch_sizes(largest: int, least: int = 1) -> list[int]:
    """Returns the batch sizes to compile: ``least`` times powers of two, and ``largest``."""
    sizes, size = [], least
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest]


class RunServable(Servable):
    """A checkpoint of a run with its engine. Build it in the thread that predicts: Keras has settings per thread."""

    def __init__(self, opened: OpenRun) -> None:
        from modelyard.run.summary import summarize

        engine, dataset = opened.engine()  # first: it chooses Keras's backend
        kept = opened.recorded_data()
        test = summarize(opened.directory).get("test") or {}
        super().__init__(
            ModelInfo(
                opened.config.model,
                Path(opened.config.dataset).name,
                opened.step,
                _task_type(engine.task),
                tuple(kept.data.classes),
                kept.image,
                finite_numbers(test),
            )
        )
        self._engine, self._dataset = engine, dataset
        self.batch_multiple = len(engine.devices)
        self._classes = np.array(kept.data.classes, object)

    def predict(self, images: NDArray[Any]) -> Outputs:
        """Predicts with the engine, after the run's own preprocessing of examples."""
        batch: dict[str, Any] = {IMAGE: images}
        if self._dataset.stored is not self._dataset:
            from modelyard.data.raw_examples import ArrayExamples

            examples = ArrayExamples(images, np.zeros(len(images), np.int32))
            self._dataset.stored.splits[TEST] = examples  # type: ignore[attr-defined]
            read = self._dataset.read(TEST, np.arange(len(images)))
            batch = {name: values for name, values in read.items() if name not in (ID, LABEL)}
        found = {name: np.asarray(values) for name, values in self._engine.predict_batch(batch).items()}
        if "class" in found and len(self._classes):
            found["label"] = self._classes[found["class"]]
        return found


def _task_type(task: Any) -> str:
    from modelyard.models.task_types import TASK_TYPES

    return next((name for name, known in TASK_TYPES.items() if isinstance(task, known)), "other")
