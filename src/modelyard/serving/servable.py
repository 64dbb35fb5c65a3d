"""A loaded model, of a run or of an export: a batch of images in, named arrays out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import ID, IMAGE
from modelyard.data.image_spec import ImageSpec
from modelyard.data.inputs import Inputs, describe, is_picture
from modelyard.errors import DataError

DEFAULT, BYTES, EXAMPLES = "serving_default", "bytes", "examples"
"""The signatures of images, of image files and of `tf.Example`s, in exports and in requests."""
IMAGE_WITH_ID, BYTES_WITH_ID = "image_with_id", "bytes_with_id"
IMAGE_BYTES = "image_bytes"
SIGNATURES = (DEFAULT, BYTES, EXAMPLES, IMAGE_WITH_ID, BYTES_WITH_ID)
Outputs = dict[str, NDArray[Any]]


def signatures_of(inputs: Iterable[str], takes_files: bool) -> dict[str, tuple[str, ...]]:
    """Returns the inputs of each signature of a model, by name.

    An input `ID` is returned with the prediction; an Example may have one inside.

    Args:
        inputs: the names of the model's inputs.
        takes_files: whether its image may be a file.
    """
    names = tuple(inputs)
    found = {DEFAULT: names}
    with_bytes = tuple(IMAGE_BYTES if name == IMAGE else name for name in names)
    if takes_files:
        found[BYTES] = with_bytes
    if takes_files and names == (IMAGE,):
        found[EXAMPLES] = (EXAMPLES,)
    if IMAGE in names:
        found[IMAGE_WITH_ID] = (*names, ID)
    if takes_files:
        found[BYTES_WITH_ID] = (*with_bytes, ID)
    return found


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model.

    Args:
        model: its name in Modelyard.
        dataset: the training dataset.
        step: the step of its weights.
        task_type: classification, multi_label, regression or other.
        classes: class names, in the order of the probabilities.
        inputs: the spec of each input it takes, by name.
        test: its metrics on the test split; empty if it was not tested.
        takes_files: whether image files can be converted to its images.
    """

    model: str
    dataset: str
    step: int
    task_type: str
    classes: tuple[str, ...]
    inputs: Inputs
    test: Mapping[str, float] = field(default_factory=dict)
    takes_files: bool = True

    @property
    def image(self) -> ImageSpec:
        """The spec of the images it takes.

        Raises:
            DataError: if it takes no image.
        """
        if IMAGE not in self.inputs:
            raise DataError(f"the model takes no image; it takes {describe(self.inputs)}.")
        return self.inputs[IMAGE]

    @property
    def signatures(self) -> dict[str, tuple[str, ...]]:
        """The inputs of each signature that makes sense for the model, by name."""
        files = self.takes_files and IMAGE in self.inputs and is_picture(self.image)
        return signatures_of(self.inputs, files)


class Servable(ABC):
    """A loaded model. `predict` is called by one thread."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.batch_multiple = 1
        """Batch sizes are multiples of this: the number of devices."""
        self.outputs: dict[str, tuple[tuple[int, ...], str]] = {}
        """Shape (without the batch) and type of each output; known after `warm_up`."""

    @abstractmethod
    def predict(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        """Returns the predictions for a batch: an array per input, by name. All arrays have the same length."""

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Predicts a batch of each size, so that all sizes are compiled."""
        for size in sizes:
            zeros = {name: np.zeros((size, *spec.shape), spec.dtype) for name, spec in self.info.inputs.items()}
            found = self.predict(zeros)
            self.outputs = {
                name: (values.shape[1:], "string" if values.dtype.kind in "OSU" else values.dtype.name)
                for name, values in found.items()
            }
            wrong = [name for name, values in found.items() if len(values) != size]
            if wrong:
                raise DataError(f"the output {wrong[0]} of the model is not one per image; the model can't be served.")


def task_type_of(task: Any) -> str:
    """Returns the type of a run's task: classification, multi_label, regression or other."""
    from modelyard.models.choose_task import TASK_TYPES

    return next((name for name, known in TASK_TYPES.items() if isinstance(task, known)), "other")


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers among ``values``, such as metrics."""
    return {
        str(name): float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
    }
