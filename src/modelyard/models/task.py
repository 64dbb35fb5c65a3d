"""The task contract: what a model is to Modelyard.

The short way to a model of your own is one function that builds a Keras model; it becomes a classifier:

    @modelyard.register_model("tiny")
    def tiny(data, options):
        inputs, x = modelyard.image_input(data)
        return keras.Model(inputs, keras.layers.Dense(data.num_classes)(keras.layers.Flatten()(x)))

The long way is a subclass of `Task` or `Classifier` that overrides what differs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.config.calls import Call
from modelyard.config.schema import Config
from modelyard.data.dataset import ID, IMAGE, LABEL, TRAIN, Dataset, Feature
from modelyard.data.preprocess import batch_preprocessing
from modelyard.errors import DataError, UserError
from modelyard.models.catalog import ClassifierOptions
from modelyard.models.class_loss import class_weights, cross_entropy
from modelyard.registry import Options as BaseOptions

Tensor = Any
Batch = dict[str, Any]
WEIGHTED = "weighted"
_STATISTICS_EXAMPLES = 4096


@dataclass(frozen=True)
class DataInfo:
    """What a model may know of its data: the shapes, the classes, the mean and spread of the training images, a sample
    of them (None where examples are no images), and the mean and spread of the training labels.
    """

    features: dict[str, Feature]
    classes: tuple[str, ...]
    mean: NDArray[np.float32]
    spread: NDArray[np.float32]
    images: NDArray[Any] | None = field(default=None, repr=False, compare=False)
    count: Callable[[], NDArray[np.int64]] | None = field(default=None, repr=False, compare=False)
    label_mean: NDArray[np.float32] | float = 0.0
    label_spread: NDArray[np.float32] | float = 1.0
    outputs: int | None = None

    @property
    def num_classes(self) -> int:
        """How many outputs a network needs: one for each class, or for each number to predict."""
        return len(self.classes) if self.outputs is None else self.outputs

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """How many training examples each class has; counted when first asked for.

        Raises:
            DataError: if examples have no class as a label.
        """
        label = self.features.get(LABEL)
        if self.count is None or label is None or label.shape != () or "int" not in label.dtype:
            raise DataError("these examples have no class as a label that could be counted.")
        return self.count()

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Height, width and channels; for other examples, their shape."""
        return self.features[IMAGE].shape


def describe(dataset: Dataset, preprocess: Sequence[Call] = ()) -> DataInfo:
    """`DataInfo` of ``dataset`` behind the user's preprocessing of batches.

    The statistics come from examples spread evenly over the training split.
    """
    size = dataset.size(TRAIN)
    most = _STATISTICS_EXAMPLES if dataset.arrays(TRAIN) is not None else _STATISTICS_EXAMPLES // 8  # those are decoded
    rows = np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))
    found = dataset.read(TRAIN, rows)
    features = dataset.features
    if preprocess:
        batch = {name: ops.convert_to_tensor(found[name]) for name in features if name != ID}
        batch = batch_preprocessing(preprocess)(batch, False)
        found = {name: ops.convert_to_numpy(value) for name, value in batch.items()}
        features = {name: Feature(array.shape[1:], array.dtype.name) for name, array in found.items()}
    channels = features[IMAGE].shape[-1] if IMAGE in features else 1
    mean, spread = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    if IMAGE in features:
        flat = np.asarray(found[IMAGE]).reshape(-1, channels)
        if len(features[IMAGE].shape) == 1:  # values, not pixels: one scale for all columns
            flat = flat.reshape(-1, 1)
        means, spreads = zip(*(_moments(column) for column in flat.T), strict=True)
        mean = np.broadcast_to(np.array(means), channels).astype(np.float32)
        spread = np.broadcast_to(np.maximum(spreads, 1e-6), channels).astype(np.float32)
    images = np.asarray(found[IMAGE]) if IMAGE in features and len(features[IMAGE].shape) == 3 else None
    labels = np.asarray(found[LABEL], np.float64) if LABEL in features and len(features[LABEL].shape) < 2 else None
    label_mean = 0.0 if labels is None else labels.mean(axis=0).astype(np.float32)
    label_spread = 1.0 if labels is None else _at_least(labels.std(axis=0))
    return DataInfo(features, dataset.classes, mean, spread, images, lambda: _count(dataset), label_mean, label_spread)


def _at_least(spread: NDArray[np.float64]) -> NDArray[np.float32]:
    """Labels that are all the same have no spread to divide by."""
    return np.where(spread > 0, np.maximum(spread, 1e-12), 1.0).astype(np.float32)


def _count(dataset: Dataset) -> NDArray[np.int64]:
    """How many training examples each class has; where labels are not known without reading, only they are read."""
    labels = dataset.labels(TRAIN)
    if labels is None:
        size, at_once = dataset.size(TRAIN), 1024
        labels = np.empty(size, np.int32)
        for start in range(0, size, at_once):
            rows = np.arange(start, min(start + at_once, size))
            dataset.read_into(TRAIN, rows, {LABEL: labels[start : start + at_once]})
    return np.bincount(labels, minlength=len(dataset.classes)).astype(np.int64)


def _moments(values: NDArray[Any]) -> tuple[float, float]:
    """Mean and standard deviation; bytes are counted, which is quicker than computing with each."""
    if values.dtype != np.uint8:
        wide = values.astype(np.float64)
        return float(wide.mean()), float(wide.std())
    shares = np.bincount(values, minlength=256) / max(len(values), 1)
    mean = float(shares @ np.arange(256))
    return mean, float(np.sqrt(shares @ (np.arange(256) - mean) ** 2))


class Task:
    """A network with its loss, metrics and predictions. Everything is per example; Modelyard does the averaging.

    Args:
        options: the typed options of the model.
        data: what the data looks like.
    """

    Options: type[BaseOptions] = BaseOptions

    def __init__(self, options: BaseOptions, data: DataInfo) -> None:
        self.options = options
        self.data = data

    def network(self) -> keras.Model:
        """The Keras model. Its inputs are named like the features they take."""
        raise NotImplementedError(f"{type(self).__name__} must define network().")

    def checked_network(self) -> keras.Model:
        """The network, if it is one that can be trained on this data.

        Raises:
            UserError: if it is not, with what would be right.
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
        strange = [tensor.name for tensor in inputs if tensor.name not in self.data.features]
        if strange:
            known = ", ".join(self.data.features)
            raise UserError(f"the model takes {', '.join(strange)}, but an example has: {known}. Name its inputs so.")
        return model

    def first_weights(self, model: keras.Model) -> dict[str, NDArray[Any]]:
        """Weights to begin with, by name; asked for once, where a run begins. The rest begins as it was drawn."""
        return {}

    def preprocess(self, batch: Batch, training: bool) -> Batch:
        """Changes a batch before the network sees it, after augmentation; by default not at all."""
        return batch

    def weigh(self, batch: Batch) -> Batch:
        """Adds to a training batch, after `preprocess`, what examples weigh in the loss; by default nothing.

        Evaluation goes without: its loss compares with that of other weights.
        """
        return batch

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The loss of each example, shape [batch]."""
        raise NotImplementedError(f"{type(self).__name__} must define loss().")

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Statistics of each example, first axis the batch; their means are the metrics."""
        return {}

    def summarize(self, means: dict[str, Any]) -> dict[str, float]:
        """Metrics from the means over a split, for those that are no plain mean (say, a root or a ratio of means)."""
        return {name: float(value) for name, value in means.items()}

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """What `predict` gives for each example."""
        return {"outputs": outputs}

    def optimizer(self, config: Config, default: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
        """The optimizer; by default the one the config names."""
        return default

    def summary_images(self, batch: Batch) -> NDArray[np.generic] | None:
        """Images of a training batch for TensorBoard; by default the feature ``image``."""
        images = batch.get(IMAGE)
        return None if images is None or np.ndim(images) != 4 else np.asarray(images)


class Classifier(Task):
    """One class an example: cross-entropy on logits, accuracy, class and probabilities."""

    Options: type[BaseOptions] = ClassifierOptions

    def checked_network(self) -> keras.Model:
        """The network, if it has one output for each class."""
        model = super().checked_network()
        _ = self._weights  # what is wrong with them is said before training
        shape = getattr(model, "output_shape", None)
        if shape is not None and not isinstance(shape, list | dict):  # others are the business of an own loss
            check_outputs(model, self.data.num_classes, "classes")
        return model

    def weigh(self, batch: Batch) -> Batch:
        """Where classes have weights, adds ``weighted``: the shares of the classes times their weights."""
        if self._weights is None or LABEL not in batch:
            return batch
        labels = batch[LABEL]
        if not _are_shares(labels):
            labels = ops.one_hot(labels, self.data.num_classes)
        wide = keras.config.floatx()
        return {**batch, WEIGHTED: ops.cast(labels, wide) * ops.cast(self._weights, wide)}

    @cached_property
    def _weights(self) -> NDArray[np.float32] | None:
        given = getattr(self.options, "class_weights", None)
        return None if given is None else class_weights(given, self.data.classes, self.data.counts)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy, with label smoothing, focal loss and, in training, weights of classes where they are wanted.

        Labels are classes, or shares of the classes.
        """
        labels = batch[LABEL]
        smoothing, gamma = (getattr(self.options, name, 0.0) for name in ("label_smoothing", "focal_gamma"))
        shares = WEIGHTED in batch or _are_shares(labels)
        if not shares and not smoothing and not gamma:
            return ops.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
        if shares:
            target = ops.cast(batch.get(WEIGHTED, labels), outputs.dtype)
        else:
            target = ops.one_hot(labels, self.data.num_classes, dtype=outputs.dtype)
        if WEIGHTED in batch or gamma:
            return cross_entropy(target, outputs, smoothing, gamma)
        target = target * (1.0 - smoothing) + smoothing / self.data.num_classes
        return ops.categorical_crossentropy(target, outputs, from_logits=True)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Whether the likeliest class is the right one; where labels are mixed, the one with the greatest share."""
        labels = batch[LABEL]
        if _are_shares(labels):
            labels = ops.argmax(labels, axis=-1)
        right = ops.equal(ops.cast(ops.argmax(outputs, axis=-1), "int32"), ops.cast(labels, "int32"))
        return {"accuracy": ops.cast(right, outputs.dtype)}

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Class and probabilities."""
        return {"class": ops.argmax(outputs, axis=-1), "probabilities": ops.softmax(outputs, axis=-1)}


def _are_shares(labels: Tensor) -> bool:
    """Whether labels are shares of all classes, as mixup makes them, and not one class an example."""
    return len(labels.shape) == 2 and "float" in keras.backend.standardize_dtype(labels.dtype)


def check_outputs(model: keras.Model, count: int, what: str) -> None:
    """Refuses a network that has not ``count`` outputs."""
    shape = getattr(model, "output_shape", None)
    if isinstance(shape, list | dict):
        raise UserError(f"the model has {len(shape)} outputs; it should have one, of {count} numbers.")
    if shape is not None and shape[-1] != count:
        raise UserError(
            f"the model has {shape[-1]} outputs, but there are {count} {what}. "
            "Its last layer should have data.num_classes units."
        )


def build_task(config: Config, dataset: Dataset) -> Task:
    """The task of the model that ``config`` names, for ``dataset``."""
    return task_for(config, describe(dataset, config.preprocess), dataset.features.get(LABEL))


def task_for(config: Config, data: DataInfo, label: Feature | None) -> Task:
    """The task of the model that ``config`` names.

    Args:
        config: the resolved config.
        data: what the network sees.
        label: as the dataset has it.
    """
    target = config.entry("model").load()
    from modelyard.models.kinds import check_options, kind_of_network  # those are tasks themselves

    options = config.options_of("model")
    if not inspect.isclass(target):
        kind = kind_of_network(config, data, label)
        check_options(config, kind)
        own: dict[str, Any] = {"network": lambda task: target(task.data, task.options)}
        if hasattr(target, "first_weights"):  # it is more than a function
            own["first_weights"] = lambda task, model: target.first_weights(model, task.options)
        kind = type(kind.__name__, (kind,), own)
        return kind(options, data)
    if not issubclass(target, Task):
        raise UserError(f"the model {config.model!r} is a class that is no modelyard.Task.")
    check_options(config, target)
    return target(options, data)


@keras.saving.register_keras_serializable(package="modelyard")
class Standardize(keras.layers.Layer):
    """Takes raw values to mean 0 and spread 1; both come from the training images and are saved with the model."""

    def __init__(self, mean: Any = 0.0, spread: Any = 1.0, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "trainable": False})  # a saved one says it, too
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
        """(inputs - mean) / spread, in the precision of the weights."""
        values = (ops.cast(inputs, self.variable_dtype) - self.mean) / self.spread
        return ops.cast(values, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """For saving in Keras's format; the values are in the weights."""
        return dict(super().get_config())


def _constant(value: NDArray[Any]) -> Callable[..., Any]:
    return lambda shape, dtype=None: ops.convert_to_tensor(value, dtype)


def image_input(data: DataInfo, smallest: int = 1) -> tuple[Tensor, Tensor]:
    """An input for raw images and the standardised tensor behind it, to build a network on.

    Args:
        data: what the data looks like.
        smallest: the least height and width the network can take.

    Raises:
        DataError: if the examples are no images or are too small.
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
    """The same for examples of any shape."""
    inputs = keras.Input(data.image_shape, dtype=data.features[IMAGE].dtype, name=IMAGE)
    return inputs, Standardize(data.mean, data.spread, name="standardize")(inputs)
