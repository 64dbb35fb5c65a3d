"""What a run remembers of its data, in its manifest, so that its model can be built where the data is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelyard.config.schema import Config
from modelyard.data.dataset import ID, IMAGE, LABEL, Dataset, Feature
from modelyard.errors import RunError
from modelyard.models.task import DataInfo

_SAMPLE = 4


@dataclass(frozen=True)
class RecordedData:
    """What the examples of a run look like, and how an image becomes one of them.

    Args:
        data: what the network sees.
        stored: features of an example before the user's preprocessing.
        label: of an example, after what is preprocessed example by example; None where there is none.
        fit: how images of another shape are made to fit.
        shares: whether pixels are floats from 0 to 1, where image files hold bytes.
    """

    data: DataInfo
    stored: dict[str, Feature]
    label: Feature | None
    fit: str
    shares: bool

    @property
    def image(self) -> Feature:
        """The image of an example before the user's preprocessing.

        Raises:
            RunError: if examples have none.
        """
        if IMAGE not in self.stored:
            raise RunError(f"the examples of this run are no images: they have {', '.join(self.stored)}.")
        return self.stored[IMAGE]


def record_data(config: Config, dataset: Dataset, data: DataInfo) -> dict[str, Any]:
    """What to write into the manifest."""
    stored = {name: feature for name, feature in dataset.stored.features.items() if name != ID}
    images = data.images
    shares = images is not None and images.dtype.kind == "f" and float(images.max(initial=0)) <= 1
    return {
        "stored": _listed(stored),
        "label": _listed({LABEL: label})[LABEL] if (label := dataset.features.get(LABEL)) is not None else None,
        "seen": _listed({name: feature for name, feature in data.features.items() if name != ID}),
        "classes": list(data.classes),
        "outputs": data.outputs,
        "fit": getattr(config.options_of("dataset"), "image_fit", "crop"),
        "shares": bool(shares),
        **{key: np.asarray(getattr(data, key)).tolist() for key in ("mean", "spread", "label_mean", "label_spread")},
    }


def read_recorded_data(kept: Mapping[str, Any]) -> RecordedData:
    """What `record_data` has written.

    Raises:
        RunError: if it is damaged.
    """
    try:
        seen, stored = _features(kept["seen"]), _features(kept["stored"])
        label = None if kept["label"] is None else _features({LABEL: kept["label"]})[LABEL]
        numbers = {key: np.asarray(kept[key], np.float32) for key in ("mean", "spread", "label_mean", "label_spread")}
        classes = tuple(str(name) for name in kept["classes"])
        fit, shares, outputs = str(kept["fit"]), bool(kept["shares"]), kept["outputs"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"the manifest of this run is damaged where it describes the data: {error!r}.") from error
    sample = None
    if IMAGE in seen and len(seen[IMAGE].shape) == 3:
        # What networks make of a sample is in their weights; some only ask which values there are.
        sample = np.full((_SAMPLE, *seen[IMAGE].shape), 1 if shares else 255, seen[IMAGE].dtype)
    return RecordedData(
        DataInfo(
            seen,
            classes,
            numbers["mean"],
            numbers["spread"],
            sample,
            lambda: np.ones(len(classes), np.int64),  # weights of classes are for training
            numbers["label_mean"],
            numbers["label_spread"],
            outputs if outputs is None else int(outputs),
        ),
        stored,
        label,
        fit,
        # What the network sees may have been made shares by the user's preprocessing; that is still to come.
        shares and IMAGE in stored and np.dtype(stored[IMAGE].dtype).kind == "f",
    )


def _listed(features: Mapping[str, Feature]) -> dict[str, Any]:
    return {name: {"shape": list(feature.shape), "dtype": feature.dtype} for name, feature in features.items()}


def _features(listed: Mapping[str, Any]) -> dict[str, Feature]:
    return {
        name: Feature(tuple(int(n) for n in kept["shape"]), np.dtype(kept["dtype"]).name)
        for name, kept in listed.items()
    }
