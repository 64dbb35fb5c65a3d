"""A model's view of its data: `DataInfo`, from the dataset or, without the data, from the manifest of the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.config.calls import Call
from modelyard.config.schema import Config
from modelyard.data.dataset import ID, IMAGE, LABEL, TRAIN, Dataset, Feature
from modelyard.data.image_spec import ImageSpec
from modelyard.data.preprocess import batch_preprocessing
from modelyard.errors import DataError, RunError

_STATISTICS_EXAMPLES = 4096
_RECORDED_IMAGES = 4
_MOST_VALUES = 1 << 31
"""An example that is said to have more values is not memory to ask for."""
_STATISTICS = ("mean", "spread", "label_mean", "label_spread")


@dataclass(frozen=True)
class DataInfo:
    """Shapes, classes and statistics of the data.

    Args:
        features: shape and type of each feature of an example.
        classes: the class names.
        mean: mean of the training images, by channel; of vectors, by column.
        spread: their standard deviation.
        images: a sample of them; None if examples are not images.
        count: counts the training examples of each class.
        label_mean: mean of the training labels.
        label_spread: their standard deviation.
        outputs: the number of outputs, if it is not the number of classes.
        results: what models have computed from the images, by name, for the next model of the same data.
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
    results: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_classes(self) -> int:
        """The number of outputs that a network needs: one per class, or per number to predict."""
        return len(self.classes) if self.outputs is None else self.outputs

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The number of training examples of each class, counted on first use.

        Raises:
            DataError: if labels are not class indices.
        """
        label = self.features.get(LABEL)
        if self.count is None or label is None or label.shape != () or "int" not in label.dtype:
            raise DataError("these examples have no class as a label, so classes cannot be counted.")
        return self.count()

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Height, width and channels; for other examples, their shape.

        Raises:
            DataError: if examples have no image.
        """
        if IMAGE not in self.features:
            known = ", ".join(name for name in self.features if name not in (ID, LABEL))
            raise DataError(
                f"this model takes one input, named {IMAGE!r}; an example has {known}. Give one array as x, or "
                "register a model whose inputs have these names: see docs/models.md, Several inputs."
            )
        return self.features[IMAGE].shape


def describe_data(dataset: Dataset, preprocess: Sequence[Call] = ()) -> DataInfo:
    """Returns the `DataInfo` of ``dataset``, after the user's preprocessing of batches.

    The statistics are of examples spread evenly over the training split.
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
    images = None
    if IMAGE in features:
        values = np.asarray(found[IMAGE])
        images = values if len(features[IMAGE].shape) == 3 else None
        moments = np.array([_moments(column) for column in values.reshape(-1, channels).T])
        if len(features[IMAGE].shape) == 1:  # columns of a table, each in units of its own
            # A column whose values are all the same has no spread to divide by.
            same = moments[:, 1] <= np.finfo(np.float32).eps * np.abs(moments[:, 0])
            moments[same, 1] = 1
        else:
            moments[:, 1] = np.maximum(moments[:, 1], 1e-6)
        mean, spread = moments.astype(np.float32).T
    label_mean: NDArray[np.float32] | float = 0.0
    label_spread: NDArray[np.float32] | float = 1.0
    if LABEL in features and len(features[LABEL].shape) < 2:
        labels = np.asarray(found[LABEL], np.float64)
        label_mean, deviation = labels.mean(axis=0).astype(np.float32), labels.std(axis=0)
        # Labels that are all the same have no spread to divide by.
        label_spread = np.where(deviation > 0, np.maximum(deviation, 1e-12), 1.0).astype(np.float32)
    return DataInfo(features, dataset.classes, mean, spread, images, lambda: _count(dataset), label_mean, label_spread)


def _count(dataset: Dataset) -> NDArray[np.int64]:
    """Returns the number of training examples of each class; reads only labels, and only if they are not known."""
    labels = dataset.labels(TRAIN)
    if labels is None:
        size, at_once = dataset.size(TRAIN), 1024
        labels = np.empty(size, np.int32)
        for start in range(0, size, at_once):
            rows = np.arange(start, min(start + at_once, size))
            dataset.read_into(TRAIN, rows, {LABEL: labels[start : start + at_once]})
    return np.bincount(labels, minlength=len(dataset.classes)).astype(np.int64)


def _moments(values: NDArray[Any]) -> tuple[float, float]:
    """Returns mean and standard deviation; of bytes by counting them, which is faster."""
    if values.dtype != np.uint8:
        wide = values.astype(np.float64)
        return float(wide.mean()), float(wide.std())
    frequencies = np.bincount(values, minlength=256) / max(len(values), 1)
    mean = float(frequencies @ np.arange(256))
    return mean, float(np.sqrt(frequencies @ (np.arange(256) - mean) ** 2))


# -- in the manifest ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedData:
    """The data of a run as its manifest describes it.

    Args:
        data: the model's view.
        features: of an example before the user's preprocessing.
        label: of an example after the user's preprocessing of examples; None if there is none.
        image_spec: of images before the user's preprocessing; None if examples have none.
    """

    data: DataInfo
    features: dict[str, Feature]
    label: Feature | None
    image_spec: ImageSpec | None

    @property
    def image(self) -> ImageSpec:
        """The image spec.

        Raises:
            RunError: if examples have no image.
        """
        if self.image_spec is None:
            raise RunError(f"the examples of this run are not images: they have {', '.join(self.features)}.")
        return self.image_spec


def record_data(config: Config, dataset: Dataset, data: DataInfo) -> dict[str, Any]:
    """Returns the section ``data`` of the manifest."""
    images, label = data.images, dataset.features.get(LABEL)
    return {
        "stored": {name: _to_json(feature) for name, feature in dataset.stored.features.items() if name != ID},
        "label": None if label is None else _to_json(label),
        "seen": {name: _to_json(feature) for name, feature in data.features.items() if name != ID},
        "classes": list(data.classes),
        "outputs": data.outputs,
        "fit": getattr(config.options_of("dataset"), "image_fit", "crop"),
        "value_columns": list(dataset.stored.value_columns),
        "shares": images is not None and images.dtype.kind == "f" and float(images.max(initial=0)) <= 1,
        **{key: np.asarray(getattr(data, key)).tolist() for key in _STATISTICS},
    }


def read_recorded_data(recorded: Mapping[str, Any]) -> RecordedData:
    """Reads the section that `record_data` returned.

    Raises:
        RunError: if it is damaged.
    """
    try:
        seen, stored = ({k: _from_json(v) for k, v in recorded[part].items()} for part in ("seen", "stored"))
        label = None if recorded["label"] is None else _from_json(recorded["label"])
        statistics: dict[str, Any] = {key: np.asarray(recorded[key], np.float32) for key in _STATISTICS}
        classes = tuple(str(name) for name in recorded["classes"])
        fit, unit_scale = recorded["fit"], bool(recorded["shares"])
        outputs = None if recorded["outputs"] is None else int(recorded["outputs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"the manifest of this run is damaged: its data section cannot be read ({error!r}).") from error
    images = None
    if IMAGE in seen and len(seen[IMAGE].shape) == 3:
        # Networks only need the range of values here: what they compute from images is in their weights.
        images = np.full((_RECORDED_IMAGES, *seen[IMAGE].shape), 1 if unit_scale else 255, seen[IMAGE].dtype)
    spec = None
    if IMAGE in stored:
        image = stored[IMAGE]
        # The scale is that after the user's preprocessing, which these images have not had yet.
        spec = ImageSpec(image.shape, image.dtype, fit, unit_scale and np.dtype(image.dtype).kind == "f")
    data = DataInfo(
        seen,
        classes,
        images=images,
        count=lambda: np.ones(len(classes), np.int64),  # class weights are only for training
        outputs=outputs,
        **statistics,
    )
    return RecordedData(data, stored, label, spec)


def _to_json(feature: Feature) -> dict[str, Any]:
    return {"shape": list(feature.shape), "dtype": feature.dtype}


def _from_json(recorded: Mapping[str, Any]) -> Feature:
    shape = tuple(int(n) for n in recorded["shape"])
    if min(shape, default=0) < 0 or math.prod(shape) > _MOST_VALUES:
        raise ValueError(f"shape {shape}")
    return Feature(shape, np.dtype(recorded["dtype"]).name)
