"""A loaded model, of a run or of an export: a batch of images in, named arrays out."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import ID, IMAGE, LABEL, TEST, Feature
from modelyard.errors import DataError
from modelyard.serving.description import DESCRIPTION

if TYPE_CHECKING:
    from modelyard.serving.run_model import OpenRun

Outputs = dict[str, NDArray[Any]]
TASK_TYPES = ("classification", "multi_label", "regression", "other")


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model.

    Args:
        model: its name in Modelyard.
        dataset: the training dataset.
        step: the step of its weights.
        task_type: one of `TASK_TYPES`.
        classes: class names, in the order of the probabilities.
        image: shape and type of the images it takes.
        fit: how images of another shape are resized.
        shares: whether pixels are floats from 0 to 1, where image files hold bytes.
        test: its metrics on the test split; empty if it was not tested.
    """

    model: str
    dataset: str
    step: int
    task_type: str
    classes: tuple[str, ...]
    image: Feature
    fit: str = "crop"
    shares: bool = False
    test: Mapping[str, float] = field(default_factory=dict)


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
        from modelyard.data.images import fill

        out = np.empty(self.info.image.shape, self.info.image.dtype)
        if out.ndim != 3:
            raise DataError(f"{name} is an image file; examples of this model have shape {out.shape}. Give numbers.")
        fill(out, data, self.info.fit, None, lambda: name)  # type: ignore[arg-type]
        if self.info.shares:
            out /= 255
        return out

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
                kept.fit,
                kept.shares,
                _numbers(test),
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

            self._dataset.stored.items = ArrayExamples(images, np.zeros(len(images), np.int32))  # type: ignore[attr-defined]
            read = self._dataset.read(TEST, np.arange(len(images)))
            batch = {name: values for name, values in read.items() if name not in (ID, LABEL)}
        found = {name: np.asarray(values) for name, values in self._engine.predict_batch(batch).items()}
        if "class" in found and len(self._classes):
            found["label"] = self._classes[found["class"]]
        return found


def read_description(folder: Path) -> ModelInfo:
    """Reads modelyard.json of an exported version.

    Raises:
        DataError: if it is missing or invalid.
    """
    file = folder / DESCRIPTION
    try:
        kept = json.loads(file.read_bytes())
        image = Feature(tuple(int(n) for n in kept["image"]["shape"]), np.dtype(kept["image"]["dtype"]).name)
        task_type = str(kept["kind"])
        test = kept.get("test") or {}
        classes = tuple(str(name) for name in kept.get("classes") or ())
        info = ModelInfo(
            str(kept["model"]),
            Path(str(kept["dataset"])).name,
            int(kept["step"]),
            task_type if task_type in TASK_TYPES else "other",
            classes,
            image,
            str(kept.get("fit", "crop")),
            bool(kept.get("shares", False)),
            _numbers(test),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is missing or damaged: {error!r}. Export the model again.") from error
    if kept.get("format", "saved_model") != "saved_model":
        raise DataError(f"{folder} is an export as {kept['format']}; only a SavedModel can be loaded here.")
    if not image.shape or min(image.shape) < 1:
        raise DataError(f"{file} has the image shape {image.shape}, which is invalid. Export the model again.")
    return info


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers among ``found``."""
    return {
        str(name): float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
    }


def _task_type(task: Any) -> str:
    from modelyard.models.task_types import TASK_TYPES

    return next((name for name, known in TASK_TYPES.items() if isinstance(task, known)), "other")
