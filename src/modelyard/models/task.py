"""The task contract: a network with its loss, metrics and predictions.

A function that builds a Keras model is the shortest way to your own model. It becomes a classifier:

    @modelyard.register_model("tiny")
    def tiny(data, options):
        inputs, x = modelyard.image_input(data)
        return keras.Model(inputs, keras.layers.Dense(data.num_classes)(keras.layers.Flatten()(x)))

For another loss, metrics or predictions, override methods of `Task` or `Classifier`. `task_types.py` has the built-in
tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.config.schema import Config
from modelyard.data.dataset import IMAGE
from modelyard.errors import DataError, UserError
from modelyard.models.data_info import DataInfo
from modelyard.models.metric import Metric
from modelyard.registry import Options as BaseOptions

log = logging.getLogger("modelyard")
Tensor = Any
Batch = dict[str, Any]


class Task:
    """A network with its loss, metrics and predictions. All of them are per example; Modelyard averages.

    Args:
        options: the typed options of the model.
        data: shapes, classes and statistics of the data.
    """

    Options: type[BaseOptions] = BaseOptions

    def __init__(self, options: BaseOptions, data: DataInfo) -> None:
        self.options = options
        self.data = data

    def network(self) -> keras.Model:
        """Returns the Keras model. Its inputs are named like the features they take."""
        raise NotImplementedError(f"{type(self).__name__} must define network().")

    def checked_network(self) -> keras.Model:
        """Returns the network, if it can be trained on this data.

        Raises:
            UserError: if it cannot.
        """
        model = self.network()
        if not isinstance(model, keras.Model):
            raise UserError(f"the model must return a keras.Model; it returned {type(model).__name__}.")
        inputs = getattr(model, "inputs", None)
        if not inputs:
            raise UserError(
                f"the model {model.name!r} has no named inputs. Build it with keras.Model(inputs, outputs), inputs "
                "from keras.Input(..., name='image') or modelyard.image_input(data)."
            )
        unexpected = [tensor.name for tensor in inputs if tensor.name not in self.data.features]
        if unexpected:
            known = ", ".join(self.data.features)
            raise UserError(f"the model takes {', '.join(unexpected)}, but an example has: {known}. Rename its inputs.")
        return model

    def first_weights(self, model: keras.Model) -> dict[str, NDArray[Any]]:
        """Returns initial weights by name, for a new run; the others keep the values of their initializers."""
        return {}

    def preprocess(self, batch: Batch, training: bool) -> Batch:
        """Returns a batch as the network sees it, after augmentation; by default unchanged."""
        return batch

    def weigh(self, batch: Batch) -> Batch:
        """Adds the weights of examples in the loss to a training batch, after `preprocess`; by default nothing.

        Evaluation is unweighted, so that its loss is comparable between runs.
        """
        return batch

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the loss of each example, shape [batch]."""
        raise NotImplementedError(f"{type(self).__name__} must define loss().")

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns statistics of each example, first axis the batch; their means are the metrics.

        They are also those of training, which has no metrics by name.
        """
        return {}

    def standard_metrics(self) -> list[Metric]:
        """Returns the metrics that every evaluation computes from the predictions; those of `--metrics` are added."""
        return []

    def example_values(self, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns what is kept of each example of an evaluation, one value each; ``statistics`` are loss and metrics.

        By default it is every statistic with one value per example. Comparisons of models are paired over them.
        """
        return {name: values for name, values in statistics.items() if len(values.shape) == 1}

    def summarize(self, means: dict[str, Any]) -> dict[str, float]:
        """Returns metrics from means over a split. Override it for metrics such as a root or a ratio of means."""
        return {name: float(value) for name, value in means.items()}

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns the predictions for each example."""
        return {"outputs": outputs}

    def signatures(self, model: keras.Model) -> dict[str, keras.Model]:
        """Returns models for further signatures of a SavedModel, by name; by default none.

        Their inputs are named like those of the network, and they use its layers. Their outputs are a dictionary.

        Args:
            model: the network, with the weights that are exported.

        Example:
            >>> features = model.get_layer("pool").output
            >>> return {"embedding": keras.Model(model.inputs, {"embedding": features})}
        """
        return {}

    def optimizer(self, config: Config, default: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """Returns the optimizer; by default the one the config names."""
        return default

    def summary_images(self, batch: Batch) -> NDArray[np.generic] | None:
        """Returns images of a training batch for TensorBoard; by default the feature ``image``."""
        images = batch.get(IMAGE)
        return None if images is None or np.ndim(images) != 4 else np.asarray(images)


def check_outputs(model: keras.Model, count: int, what: str) -> None:
    """Raises UserError if the network does not have ``count`` outputs."""
    shape = getattr(model, "output_shape", None)
    if isinstance(shape, list | dict):
        raise UserError(f"the model has {len(shape)} output tensors; it should have one, of {count} numbers.")
    if shape is not None and shape[-1] != count:
        raise UserError(
            f"the model has {shape[-1]} outputs, but there are {count} {what}. "
            "Its last layer should have data.num_classes units."
        )


def warn_about_activation(model: keras.Model, activation: str) -> None:
    """Warns if the last layer of a network has an activation that the loss and the predictions apply themselves."""
    last = model.layers[-1]
    own = getattr(last, "activation", None)
    if own is getattr(keras.activations, activation) or type(last).__name__.lower() == activation:
        log.warning(
            "the network ends in a %s (layer %r), but the loss and the predictions take logits and apply it again. "
            "Probabilities will be wrong. Remove the activation of the last layer",
            activation,
            last.name,
        )


@keras.saving.register_keras_serializable(package="modelyard")
class Standardize(keras.layers.Layer):
    """Converts images to mean 0 and standard deviation 1 of the training images. Both are saved with the model."""

    def __init__(self, mean: Any = 0.0, spread: Any = 1.0, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "trainable": False})  # it is in a saved config, too
        self._initial = (mean, spread)

    def build(self, input_shape: Any) -> None:
        """Makes the two weights."""
        mean, spread = (np.broadcast_to(value, (input_shape[-1],)) for value in self._initial)
        self.mean = self.add_weight(
            name="mean", shape=mean.shape, initializer=_constant(mean), trainable=False, autocast=False
        )
        self.spread = self.add_weight(
            name="spread", shape=spread.shape, initializer=_constant(spread), trainable=False, autocast=False
        )

    def call(self, inputs: Tensor) -> Tensor:
        """Returns (inputs - mean) / spread, computed in the precision of the weights."""
        values = (ops.cast(inputs, self.variable_dtype) - self.mean) / self.spread
        return ops.cast(values, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the config for Keras's format; the values are in the weights."""
        return dict(super().get_config())


def _constant(value: NDArray[Any]) -> Callable[..., Any]:
    return lambda shape, dtype=None: ops.convert_to_tensor(value, dtype)


def image_input(data: DataInfo, smallest: int = 1) -> tuple[Tensor, Tensor]:
    """Returns an input for raw images and the standardized tensor, to build a network on.

    Args:
        data: shapes and statistics of the data.
        smallest: the minimum height and width that the network can take.

    Raises:
        DataError: if the examples are not images or are too small.
    """
    shape = data.image_shape
    if len(shape) != 3 or min(shape[:2]) < smallest:
        shown = "×".join(map(str, shape))
        channels = " Channels come last." if len(shape) == 3 and shape[0] in (1, 3) else ""
        raise DataError(
            f"this model takes images of at least {smallest}×{smallest}; the examples of this dataset have shape "
            f"{shown}.{channels} Choose another model (mlp takes any shape) or another dataset."
        )
    return any_input(data)


def any_input(data: DataInfo) -> tuple[Tensor, Tensor]:
    """Returns an input and the standardized tensor for examples of any shape."""
    inputs = keras.Input(data.image_shape, dtype=data.features[IMAGE].dtype, name=IMAGE)
    return inputs, Standardize(data.mean, data.spread, name="standardize")(inputs)
