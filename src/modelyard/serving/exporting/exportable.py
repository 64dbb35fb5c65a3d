"""A run's model on TensorFlow, as a function from raw images to predictions. All formats are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from modelyard.data.dataset import IMAGE, Dataset, Feature
from modelyard.data.preprocess import changes_batches
from modelyard.errors import UserError
from modelyard.models.data_info import RecordedData
from modelyard.models.task_types import TASK_TYPES, Classifier
from modelyard.serving.run_model import OpenRun

if TYPE_CHECKING:
    from modelyard.engine.tensorflow import TensorFlowEngine

Tensor = Any
CLASS = "class"


@dataclass
class Exportable:
    """A model to export.

    Args:
        run: the run and its checkpoint.
        engine: the engine, with the weights of the checkpoint.
        dataset: the dataset that the engine predicts from.
        recorded: the recorded facts of its data.
    """

    run: OpenRun
    engine: TensorFlowEngine
    dataset: Dataset
    recorded: RecordedData

    @property
    def image(self) -> Feature:
        """The images it takes: those of the dataset, after the run's own preprocessing of examples."""
        return self.dataset.features[IMAGE]

    @property
    def takes_files(self) -> bool:
        """Whether image files can be decoded to such images inside the graph."""
        whole = self.dataset.stored is self.dataset
        return whole and len(self.image.shape) == 3 and self.image.shape[2] in (1, 3)

    @property
    def task_type(self) -> str:
        """classification, multi_label, regression or other."""
        return next((name for name, cls in TASK_TYPES.items() if isinstance(self.engine.task, cls)), "other")

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, or of the predicted values."""
        return self.recorded.data.classes

    @property
    def has_own_preprocessing(self) -> bool:
        """Whether code of the user preprocesses batches."""
        return changes_batches(self.run.config.preprocess)

    @cached_property
    def function(self) -> Any:
        """The compiled function from a batch of raw images to named predictions."""
        spec = tf.TensorSpec([None, *self.image.shape], self.image.dtype, name=IMAGE)
        return tf.function(self.predict, input_signature=[spec], autograph=False)

    def predict(self, image: Tensor) -> dict[str, Tensor]:
        """Returns named predictions for a batch of raw images, as tensors."""
        found = self.engine.functions.predictions({IMAGE: image})
        if type(self.engine.task).predictions is Classifier.predictions:
            # keras.ops.argmax inspects the bits of floats, which neither ONNX nor TensorFlow Lite can.
            found = {**found, CLASS: tf.argmax(found["probabilities"], axis=-1)}
        return {name: _cast(name, value) for name, value in found.items()}

    @cached_property
    def outputs(self) -> list[str]:
        """Names of the predictions."""
        return sorted(self.function.get_concrete_function().structured_outputs)


def make_exportable(run: OpenRun) -> Exportable:
    """Builds the model of ``run`` with TensorFlow on the CPU.

    Raises:
        UserError: if it has other inputs than the image.
    """
    engine, dataset = run.engine()
    made = Exportable(run, engine, dataset, run.recorded_data())  # type: ignore[arg-type]
    others = [tensor.name for tensor in engine.model.inputs if tensor.name != IMAGE]
    if others:
        raise UserError(
            f"the model takes {', '.join(others)} besides the image; only models of one image can be exported."
        )
    return made


def _cast(name: str, value: Tensor) -> Tensor:
    """Casts a prediction to a type that every format has."""
    value = tf.convert_to_tensor(value)
    if name == CLASS:
        return tf.cast(value, tf.int64)
    return tf.cast(value, tf.float32) if value.dtype.is_floating else value
