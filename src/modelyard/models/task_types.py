"""The built-in tasks: classification, multi-label classification, regression.

A regression network predicts standardized labels. Its last layer, ``rescale``, converts them to the units of the
labels. So labels of any size train with the usual learning rates, and exports predict in the units of the data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.data.dataset import LABEL, Feature
from modelyard.errors import ConfigError, DataError, Problem, unknown
from modelyard.models.catalog import ClassifierOptions, RegressorOptions
from modelyard.models.data_info import DataInfo
from modelyard.models.metric import Metric
from modelyard.models.metric_types import CLASSIFICATION, MULTI_LABEL, REGRESSION, standard_metrics
from modelyard.models.task import Batch, Standardize, Task, Tensor, check_outputs, warn_about_activation
from modelyard.registry import Options as BaseOptions

log = logging.getLogger("modelyard")
WEIGHTED = "weighted"
_SQUARED = "squared_error"


def describe_label(label: Feature) -> str:
    """Describes labels in messages: their type and shape."""
    return f"{label.dtype}, " + (f"of shape {label.shape}" if label.shape else "one per example")


# -- classification ----------------------------------------------------------------------------------------------------


class Classifier(Task):
    """One class per example: cross-entropy on logits, accuracy, class and probabilities."""

    Options: type[BaseOptions] = ClassifierOptions

    def __init__(self, options: BaseOptions, data: DataInfo) -> None:
        if LABEL not in data.features and not data.classes and type(self).loss is Classifier.loss:
            raise DataError(
                "these examples have no labels, which classification needs. Give (x, y); in a data frame, records or a "
                f"dataset of your own the labels are named {LABEL!r}."
            )
        super().__init__(options, data)
        self.label_smoothing: Any = getattr(options, "label_smoothing", 0.0)
        """The fraction of the target that is spread over all classes; while a program is compiled, its input."""

    def checked_network(self) -> keras.Model:
        """Returns the network, if it has one output per class."""
        model = super().checked_network()
        _ = self._weights  # so that errors in them are raised before training
        shape = getattr(model, "output_shape", None)
        if shape is not None and not isinstance(shape, list | dict):  # a user's task may have several, and its own loss
            check_outputs(model, self.data.num_classes, "classes")
            if type(self).loss is Classifier.loss and type(self).predictions is Classifier.predictions:
                warn_about_activation(model, "softmax")
        return model

    def weigh(self, batch: Batch) -> Batch:
        """Adds ``weighted``, the class probabilities times the class weights, if classes have weights."""
        if self._weights is None or LABEL not in batch:
            return batch
        labels = batch[LABEL]
        if not _is_soft(labels):
            labels = ops.one_hot(labels, self.data.num_classes)
        wide = keras.config.floatx()
        return {**batch, WEIGHTED: ops.cast(labels, wide) * ops.cast(self._weights, wide)}

    @cached_property
    def _weights(self) -> NDArray[np.float32] | None:
        given = getattr(self.options, "class_weights", None)
        return None if given is None else class_weights(given, self.data.classes, self.data.counts)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns cross-entropy, with label smoothing, focal loss and, in training, class weights if they are set.

        Labels are class indices or class probabilities.
        """
        labels = batch[LABEL]
        smooths, gamma = (getattr(self.options, name, 0.0) for name in ("label_smoothing", "focal_gamma"))
        smoothing = self.label_smoothing if smooths else None
        soft = WEIGHTED in batch or _is_soft(labels)
        if not soft and not smooths and not gamma:
            return ops.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
        if soft:
            target = ops.cast(batch.get(WEIGHTED, labels), outputs.dtype)
        else:
            target = ops.one_hot(labels, self.data.num_classes, dtype=outputs.dtype)
        if WEIGHTED in batch or gamma:
            return cross_entropy(target, outputs, smoothing, gamma)
        if smoothing is not None:
            target = target * (1.0 - smoothing) + smoothing / self.data.num_classes
        return ops.categorical_crossentropy(target, outputs, from_logits=True)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns whether the most likely class is right; for mixed labels, the one of the highest probability."""
        labels = batch[LABEL]
        if _is_soft(labels):
            labels = ops.argmax(labels, axis=-1)
        right = ops.equal(ops.cast(ops.argmax(outputs, axis=-1), "int32"), ops.cast(labels, "int32"))
        return {"accuracy": ops.cast(right, outputs.dtype)}

    def standard_metrics(self) -> list[Metric]:
        """Returns accuracy."""
        return standard_metrics(CLASSIFICATION)

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns class and probabilities."""
        return {"class": ops.argmax(outputs, axis=-1), "probabilities": ops.softmax(outputs, axis=-1)}


def _is_soft(labels: Tensor) -> bool:
    """Returns whether labels are class probabilities, such as those of mixup, and not class indices."""
    return len(labels.shape) == 2 and "float" in keras.backend.standardize_dtype(labels.dtype)


def class_weights(
    given: str | Mapping[str, float] | Sequence[float], classes: Sequence[str], counts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Returns a weight per class, such that the mean over the training split is 1.

    Args:
        given: "balanced", weights by class name (1 for the others), or one per class.
        classes: the class names.
        counts: the number of training examples of each class.

    Raises:
        ConfigError: for an unknown class, or if the number of weights is not the number of classes.
    """
    if isinstance(given, str):  # balanced; classes without examples have weight 0
        weights = np.divide(1.0, counts, out=np.zeros(len(counts)), where=counts > 0)
    elif isinstance(given, Mapping):
        numbers = {name: number for number, name in enumerate(classes)}
        unexpected = [unknown("class", name, classes) for name in given if name not in numbers]
        if unexpected:
            raise _problem(" ".join(unexpected))
        weights = np.ones(len(classes))
        for name, weight in given.items():
            weights[numbers[name]] = weight
    else:
        weights = np.asarray(given, np.float64)
        if len(weights) != len(classes):
            names = ", ".join(classes[:10]) + (" …" if len(classes) > 10 else "")
            raise _problem(f"has {len(weights)} weights, but there are {len(classes)} classes: {names}.")
    mean = float(weights @ counts) / max(int(counts.sum()), 1)
    if mean <= 0:
        raise _problem("gives every training example the weight 0.")
    return (weights / mean).astype(np.float32)


def cross_entropy(target: Tensor, logits: Tensor, smoothing: Any, gamma: float) -> Tensor:
    """Returns the loss of each example: Σ over the classes of target · (1 − p)^γ · (−log p).

    It is linear in the target: the loss of a mixed label is the mean of the losses of its classes.

    Args:
        target: class probabilities, [batch, classes]; they need not sum to 1.
        logits: of the same shape.
        smoothing: the fraction of the target that is spread over all classes: a number, a tensor or None.
        gamma: the exponent of the focal loss; 0 is plain cross-entropy.
    """
    if smoothing is not None:
        whole = ops.sum(target, axis=-1, keepdims=True)
        target = target * (1.0 - smoothing) + whole * (smoothing / logits.shape[-1])
    logs = ops.log_softmax(logits, axis=-1)
    if gamma:
        # At least 1e-7: at 0 the gradient of a power below 1 is infinite, and 0 × ∞ is NaN.
        target = target * ops.power(ops.maximum(-ops.expm1(logs), 1e-7), gamma)
    return -ops.sum(target * logs, axis=-1)


def _problem(message: str) -> ConfigError:
    return ConfigError([Problem("options of the model", "class_weights", message)])


# -- multi-label -------------------------------------------------------------------------------------------------------


class MultiLabel(Task):
    """Several classes per example, or none: sigmoid cross-entropy on logits, exact match, binary accuracy, macro F1.

    `network` has ``data.num_classes`` outputs, logits. A class applies if its probability is above 0.5.
    """

    def __init__(self, options: BaseOptions, data: DataInfo) -> None:
        label = data.features.get(LABEL)
        if label is None or len(label.shape) != 1:
            found = "no labels" if label is None else f"labels of {describe_label(label)}"
            raise DataError(f"multi_label needs labels of 0 and 1, one row per example; the dataset has {found}.")
        super().__init__(options, replace(data, outputs=label.shape[0]))

    def checked_network(self) -> keras.Model:
        """Returns the network, if it has one output per class."""
        model = super().checked_network()
        check_outputs(model, self.data.num_classes, "classes")
        if type(self).loss is MultiLabel.loss and type(self).predictions is MultiLabel.predictions:
            warn_about_activation(model, "sigmoid")
        return model

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns sigmoid cross-entropy, averaged over the classes."""
        # log(1 + e^x) - x·y is finite for every logit, and its gradient at 0 is exact.
        return ops.mean(ops.softplus(outputs) - outputs * self._labels(outputs, batch), axis=-1)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns whether all classes are right, and the fraction that is right."""
        labels = self._labels(outputs, batch)
        found = ops.cast(outputs > 0, outputs.dtype)
        right = ops.cast(ops.equal(found, labels), outputs.dtype)
        return {"exact_match": ops.min(right, axis=-1), "binary_accuracy": ops.mean(right, axis=-1)}

    def standard_metrics(self) -> list[Metric]:
        """Returns exact match, binary accuracy and macro F1."""
        return standard_metrics(MULTI_LABEL)

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns probabilities, and for each class whether it applies."""
        return {"probabilities": ops.sigmoid(outputs), "labels": ops.cast(outputs > 0, "uint8")}

    def _labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        return ops.cast(batch[LABEL], outputs.dtype)


# -- regression --------------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="modelyard")
class Rescale(Standardize):
    """The inverse of `Standardize`: converts standardized labels to their units."""

    def call(self, inputs: Tensor) -> Tensor:
        """Returns inputs × spread + mean, in the precision of the weights."""
        return ops.cast(inputs, self.variable_dtype) * self.spread + self.mean

    def compute_output_spec(self, inputs: Any) -> Any:
        """Returns the same shape, in full precision."""
        return keras.KerasTensor(inputs.shape, dtype=self.variable_dtype)


class Regressor(Task):
    """One or several numbers per example: squared, absolute or Huber loss; mae, rmse and r2.

    `network` has ``data.num_classes`` outputs, one per number of a label, and no activation at the end.
    """

    Options: type[BaseOptions] = RegressorOptions
    predicts_numbers = True
    """Whole numbers as labels are not classes: derived splits do not depend on them."""

    def __init__(self, options: BaseOptions, data: DataInfo) -> None:
        label = data.features.get(LABEL)
        if label is None or len(label.shape) > 1:
            found = "no labels" if label is None else f"labels of {describe_label(label)}"
            raise DataError(f"regression needs labels of one or several numbers per example; the dataset has {found}.")
        super().__init__(options, replace(data, outputs=label.shape[0] if label.shape else 1))
        self.mean, self.spread = (np.reshape(a, (-1,)) for a in (data.label_mean, data.label_spread))

    def checked_network(self) -> keras.Model:
        """Returns the network followed by `Rescale`, if it has one output per number."""
        model = super().checked_network()
        check_outputs(model, self.data.num_classes, "numbers in a label")
        values = Rescale(self.mean, self.spread, dtype=keras.config.floatx(), name="rescale")(model.output)
        return keras.Model(model.input, values, name=model.name)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the loss that the options name, in units of the labels' spread, averaged over a label's numbers."""
        error = self._error(outputs, batch) / ops.cast(self.spread, outputs.dtype)
        name = getattr(self.options, "regression_loss", "mse")
        size = ops.abs(error)
        if name == "mse":
            size = ops.square(error)
        elif name == "huber":
            delta = getattr(self.options, "huber_delta", 1.0)
            size = ops.where(size <= delta, 0.5 * ops.square(error), delta * (size - 0.5 * delta))
        return ops.mean(size, axis=-1)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns the absolute error, in the units of the labels, and the squared error of each of a label's numbers.

        The latter has two axes, so it is no metric of training.
        """
        error = self._error(outputs, batch)
        return {"mae": ops.mean(ops.abs(error), axis=-1), _SQUARED: ops.square(error)}

    def standard_metrics(self) -> list[Metric]:
        """Returns mae and rmse, in the units of the labels, and r2."""
        return standard_metrics(REGRESSION)

    def example_values(self, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds the squared error of each example, averaged over the numbers of a label."""
        kept = super().example_values(statistics)
        if _SQUARED in statistics:  # a subclass may have other metrics
            kept[_SQUARED] = ops.mean(statistics[_SQUARED], axis=-1)
        return kept

    def summarize(self, means: dict[str, Any]) -> dict[str, float]:
        """Leaves out the squared error, which is only a value of each example."""
        return super().summarize({name: value for name, value in means.items() if name != _SQUARED})

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Returns the numbers, in the shape of labels."""
        return {"values": outputs if self.data.features[LABEL].shape else outputs[:, 0]}

    def _labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        return ops.reshape(ops.cast(batch[LABEL], outputs.dtype), (-1, self.data.num_classes))

    def _error(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs - self._labels(outputs, batch)
