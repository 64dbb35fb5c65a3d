"""A run's model under TensorFlow, as a function from raw images to predictions: what every export is made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from modelyard.data.dataset import IMAGE, Dataset, Feature
from modelyard.data.preprocess import changes_batches
from modelyard.errors import UserError
from modelyard.models.kinds import KINDS
from modelyard.models.remembered import Remembered
from modelyard.models.task import Classifier
from modelyard.serving.run_model import OpenRun

if TYPE_CHECKING:
    from modelyard.engine.tensorflow import TensorFlowEngine

Tensor = Any
CLASS = "class"


@dataclass
class Exportable:
    """A model that is ready to be exported.

    Args:
        run: where it comes from.
        engine: has its weights.
        dataset: what the engine predicts from.
        kept: what the run remembers of its data.
    """

    run: OpenRun
    engine: TensorFlowEngine
    dataset: Dataset
    kept: Remembered

    @property
    def image(self) -> Feature:
        """The images it takes: those of the dataset, or what the user's preprocessing of examples makes of them."""
        return self.dataset.features[IMAGE]

    @property
    def takes_files(self) -> bool:
        """Whether an image file becomes such an image inside the graph, too."""
        whole = self.dataset.stored is self.dataset
        return whole and len(self.image.shape) == 3 and self.image.shape[2] in (1, 3)

    @property
    def kind(self) -> str:
        """Classification, multi_label, regression or other."""
        return next((name for name, kind in KINDS.items() if isinstance(self.engine.task, kind)), "other")

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, or of the values."""
        return self.kept.data.classes

    @property
    def has_own_preprocessing(self) -> bool:
        """Whether code of the user changes batches."""
        return changes_batches(self.run.config.preprocess)

    @cached_property
    def function(self) -> Any:
        """The compiled function from a batch of raw images to named predictions."""
        spec = tf.TensorSpec([None, *self.image.shape], self.image.dtype, name=IMAGE)
        return tf.function(self.predict, input_signature=[spec], autograph=False)

    def predict(self, image: Tensor) -> dict[str, Tensor]:
        """Named predictions for a batch of raw images, as tensors."""
        found = self.engine.predict_tensors({IMAGE: image})
        if type(self.engine.task).predictions is Classifier.predictions:
            # Keras looks at the bits of numbers to tell -0 from 0, which neither ONNX nor TensorFlow Lite can.
            found = {**found, CLASS: tf.argmax(found["probabilities"], axis=-1)}
        return {name: _plain(name, value) for name, value in found.items()}

    @cached_property
    def outputs(self) -> list[str]:
        """Their names."""
        return sorted(self.function.get_concrete_function().structured_outputs)


def make_exportable(run: OpenRun) -> Exportable:
    """The model of ``run``, built with TensorFlow on the CPU.

    Raises:
        UserError: if it needs more than an image.
    """
    engine, dataset = run.engine()
    made = Exportable(run, engine, dataset, run.remembered())  # type: ignore[arg-type]
    others = [tensor.name for tensor in engine.model.inputs if tensor.name != IMAGE]
    if others:
        raise UserError(f"the model takes {', '.join(others)} beside the image; only models of one image are exported.")
    return made


def _plain(name: str, value: Tensor) -> Tensor:
    """Predictions in types that every format has."""
    value = tf.convert_to_tensor(value)
    if name == CLASS:
        return tf.cast(value, tf.int64)
    return tf.cast(value, tf.float32) if value.dtype.is_floating else value
