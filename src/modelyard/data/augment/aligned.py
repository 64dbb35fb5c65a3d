"""Features that belong to places in the image: maps, such as masks, and boxes. Augmentation moves them with it.

A map has a value for each pixel. It is sampled at the nearest pixel, so that no values are mixed. A box is a row of
y_min, x_min, y_max, x_max as shares of height and width: 0, 0, 1, 1 is the whole image. A box that is partly outside
after a crop is cut off. One that is outside becomes a row of zeros, and rows of zeros stay as they are, so the number
of rows never changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from keras import ops

from modelyard.data.dataset import ID, IMAGE, LABEL, TRAIN, Dataset, Feature
from modelyard.errors import DataError

Corners = tuple[Any, Any, Any, Any]
"""y_min, x_min, y_max and x_max of boxes, float32 of shape [batch, boxes]."""
_CHECKED_EXAMPLES = 8


@dataclass(frozen=True)
class Aligned:
    """The features that move with the image.

    Args:
        maps: the value outside of the image of each map.
        boxes: names of the features that are boxes.
    """

    maps: Mapping[str, float] = field(default_factory=dict)
    boxes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.maps or self.boxes)

    @property
    def names(self) -> str:
        """All names, for messages."""
        return " and ".join(map(repr, (*self.maps, *self.boxes)))


def aligned_features(dataset: Dataset) -> Aligned:
    """Returns the maps and boxes that a dataset declares.

    Raises:
        DataError: if they do not have the shape or type of maps and boxes.
    """
    given = dataset.maps or {}
    maps = dict(given) if isinstance(given, Mapping) else dict.fromkeys(_names("maps", given), 0.0)
    boxes = _names("boxes", dataset.boxes or ())
    if not maps and not boxes:
        return Aligned()
    features = {name: feature for name, feature in dataset.features.items() if name not in (ID, IMAGE)}
    for kind, names in (("maps", maps), ("boxes", boxes)):
        wrong = next((name for name in names if name not in features), None)
        if wrong is not None:
            known = ", ".join(features) or "nothing"
            raise DataError(f"the dataset names {wrong!r} in {kind}, but besides the image its examples have: {known}.")
    height, width = dataset.features[IMAGE].shape[:2]
    for name, outside in maps.items():
        _check_map(name, features[name], (height, width), outside)
    for name in boxes:
        _check_boxes(name, features[name], dataset)
    return Aligned(maps, boxes)


def check_undeclared(dataset: Dataset, augmentation: str) -> None:
    """Checks that no feature looks like a map or boxes that the dataset does not declare.

    Raises:
        DataError: with the feature, the augmentation, and what to do.
    """
    size = dataset.features[IMAGE].shape[:2]
    declared = {*(dataset.maps or ()), *(dataset.boxes or ())}
    for name, feature in dataset.features.items():
        if name in (ID, IMAGE) or name in declared:
            continue
        if dataset.maps is None and feature.shape[:2] == size and len(feature.shape) in (2, 3):
            raise DataError(
                f"augmentation {augmentation!r} moves pixels of the image, but not the feature {name!r}, which has the "
                f"same height and width ({size[0]}×{size[1]}). If each of its values belongs to a pixel, give "
                f"maps=[{name!r}] to the dataset, and it moves too; else give maps=[]."
            )
        if dataset.boxes is None and len(feature.shape) == 2 and feature.shape[1] == 4 and name != LABEL:
            raise DataError(
                f"augmentation {augmentation!r} moves pixels of the image, but not the feature {name!r}, which has "
                f"rows of 4 numbers. If they are boxes (y_min, x_min, y_max, x_max as shares of height and width), "
                f"give boxes=[{name!r}] to the dataset, and they move too; else give boxes=[]."
            )


def _names(kind: str, given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise DataError(f"{kind} of the dataset must be a list of names of features; got {given!r}.")
    return tuple(given)


def _check_map(name: str, feature: Feature, size: tuple[int, ...], outside: float) -> None:
    if feature.shape[:2] != size or len(feature.shape) not in (2, 3):
        raise DataError(
            f"the map {name!r} has shape {feature.shape}, the image {size[0]}×{size[1]}. A map needs the height and "
            "width of the image, so that augmentation can move both."
        )
    dtype = np.dtype(feature.dtype)
    if dtype.kind not in "iubf":
        raise DataError(f"the map {name!r} holds {feature.dtype}; give numbers.")
    with np.errstate(all="ignore"):
        if np.asarray(outside).astype(dtype) != outside and np.isfinite(outside):
            raise DataError(f"the map {name!r} is {feature.dtype}, which can't hold {outside:g} outside of the image.")


def _check_boxes(name: str, feature: Feature, dataset: Dataset) -> None:
    form = "rows of y_min, x_min, y_max, x_max as shares of height and width, which are floats from 0 to 1"
    if feature.shape[-1:] != (4,) or len(feature.shape) > 2 or np.dtype(feature.dtype).kind != "f":
        raise DataError(f"the boxes {name!r} are {feature.dtype} of shape {feature.shape}; give {form}.")
    rows = np.arange(min(_CHECKED_EXAMPLES, dataset.size(TRAIN)))
    found = np.asarray(dataset.read(TRAIN, rows)[name], np.float32)
    if not ((found >= 0) & (found <= 1)).all():
        raise DataError(
            f"the boxes {name!r} have values from {found.min():g} to {found.max():g}; give {form}: divide pixels by "
            "the height or width."
        )


# -- moving ---------------------------------------------------------------------------------------------------------


class MovesPixels:
    """The base of augmentations that move pixels: maps and boxes move with the image, by the same draws."""

    moves_pixels = True
    aligned = Aligned()

    def prepare(self, info: Any) -> None:
        """Takes the names of maps and boxes from the `ImageInfo`."""
        self.aligned = info.aligned

    def moved(
        self,
        batch: dict[str, Any],
        image: Any,
        sample: Callable[[Any, float], Any],
        corners: Callable[[Corners], Corners],
    ) -> dict[str, Any]:
        """Returns the batch with the new image, and maps and boxes moved.

        Args:
            batch: named tensors.
            image: the images after the augmentation.
            sample: returns a map of shape [batch, height, width, channels] after it; its second argument is the value
                outside of the image.
            corners: returns boxes after it; they may be outside of the image.
        """
        changed = {IMAGE: image}
        for name, outside in self.aligned.maps.items():
            values = batch[name]
            flat = len(values.shape) == 3
            new = sample(values[..., None] if flat else values, outside)
            changed[name] = new[..., 0] if flat else new
        for name in self.aligned.boxes:
            changed[name] = _moved_boxes(batch[name], corners)
        return {**batch, **changed}


def _moved_boxes(boxes: Any, corners: Callable[[Corners], Corners]) -> Any:
    """Returns boxes of shape [batch, 4] or [batch, boxes, 4], moved and cut off at the edges."""
    rows = ops.cast(boxes if len(boxes.shape) == 3 else boxes[:, None], "float32")
    old = rows[..., 0], rows[..., 1], rows[..., 2], rows[..., 3]
    new = [ops.clip(value, 0.0, 1.0) for value in corners(old)]
    kept = ops.logical_and(_has_area(old), _has_area(new))
    moved = ops.where(kept[..., None], ops.stack(new, axis=-1), 0.0)
    return ops.cast(moved if len(boxes.shape) == 3 else moved[:, 0], boxes.dtype)


def _has_area(corners: Sequence[Any]) -> Any:
    return ops.logical_and(ops.greater(corners[2], corners[0]), ops.greater(corners[3], corners[1]))


def per_example(values: Any) -> Any:
    """Returns numbers per example, [batch], in the shape of corners of boxes."""
    return ops.cast(values, "float32")[:, None]
