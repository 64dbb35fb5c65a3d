"""Facts of a run's data, recorded in its manifest, so that its model can be built without the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelyard.config.schema import Config
from modelyard.data.dataset import ID, IMAGE, LABEL, Dataset, Feature
from modelyard.data.image_spec import ImageSpec
from modelyard.errors import RunError
from modelyard.models.task import DataInfo

_SAMPLE = 4


@dataclass(frozen=True)
class RecordedData:
    """The examples of a run: as its model sees them, and how a raw example becomes one of them.

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
    """Returns the facts as the manifest holds them, under the key ``data``."""
    stored = {name: feature for name, feature in dataset.stored.features.items() if name != ID}
    images = data.images
    unit_scale = images is not None and images.dtype.kind == "f" and float(images.max(initial=0)) <= 1
    return {
        "stored": _listed(stored),
        "label": _listed({LABEL: label})[LABEL] if (label := dataset.features.get(LABEL)) is not None else None,
        "seen": _listed({name: feature for name, feature in data.features.items() if name != ID}),
        "classes": list(data.classes),
        "outputs": data.outputs,
        "fit": getattr(config.options_of("dataset"), "image_fit", "crop"),
        "shares": bool(unit_scale),
        **{key: np.asarray(getattr(data, key)).tolist() for key in ("mean", "spread", "label_mean", "label_spread")},
    }


def read_recorded_data(recorded: Mapping[str, Any]) -> RecordedData:
    """Reads what `record_data` returned.

    Raises:
        RunError: if it is damaged.
    """
    try:
        seen, stored = _features(recorded["seen"]), _features(recorded["stored"])
        label = None if recorded["label"] is None else _features({LABEL: recorded["label"]})[LABEL]
        numbers = {
            key: np.asarray(recorded[key], np.float32) for key in ("mean", "spread", "label_mean", "label_spread")
        }
        classes = tuple(str(name) for name in recorded["classes"])
        fit, unit_scale, outputs = recorded["fit"], bool(recorded["shares"]), recorded["outputs"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"the manifest of this run is damaged where it describes the data: {error!r}.") from error
    sample = None
    if IMAGE in seen and len(seen[IMAGE].shape) == 3:
        # What networks compute from a sample is in their weights; some only ask for the range of values.
        sample = np.full((_SAMPLE, *seen[IMAGE].shape), 1 if unit_scale else 255, seen[IMAGE].dtype)
    spec = None
    if IMAGE in stored:
        image = stored[IMAGE]
        # The user's preprocessing may have scaled what the network sees; it is still to come.
        spec = ImageSpec(image.shape, image.dtype, fit, unit_scale and np.dtype(image.dtype).kind == "f")
    return RecordedData(
        DataInfo(
            seen,
            classes,
            numbers["mean"],
            numbers["spread"],
            sample,
            lambda: np.ones(len(classes), np.int64),  # class weights are for training
            numbers["label_mean"],
            numbers["label_spread"],
            outputs if outputs is None else int(outputs),
        ),
        stored,
        label,
        spec,
    )


def _listed(features: Mapping[str, Feature]) -> dict[str, Any]:
    return {name: {"shape": list(feature.shape), "dtype": feature.dtype} for name, feature in features.items()}


def _features(listed: Mapping[str, Any]) -> dict[str, Feature]:
    return {
        name: Feature(tuple(int(n) for n in kept["shape"]), np.dtype(kept["dtype"]).name)
        for name, kept in listed.items()
    }
