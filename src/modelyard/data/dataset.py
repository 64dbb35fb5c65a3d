"""The dataset contract: which splits there are, what an example looks like, and examples by index.

A dataset of your own is a function that returns a `Dataset`, registered by name:

    @modelyard.register_dataset("stripes")
    def stripes(options, context):
        return modelyard.ArrayDataset({"train": {"image": images, "label": labels}})
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from modelyard.errors import DataError
from modelyard.storage import cache_folder

Arrays = Mapping[str, NDArray[np.generic]]
"""Named arrays whose first axis counts examples."""

Crop = Callable[[int, int, int], tuple[float, float, float, float]]
"""``crop(place, height, width)``: top, left, height and width of the part of an image to take, where ``place`` counts
the examples that are read together."""

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)
LABEL, IMAGE, ID = "label", "image", "id"


@dataclass(frozen=True)
class Feature:
    """Shape and type of one named array of an example."""

    shape: tuple[int, ...]
    dtype: str


LabelKind = Literal["class", "values", "flags", "none"]


def label_kind(feature: Feature | None) -> LabelKind:
    """What labels are: a class (a whole number an example), values (floats), flags (whole numbers, one for each class)
    or nothing.
    """
    if feature is None:
        return "none"
    if "float" in feature.dtype:
        return "values"
    return "flags" if feature.shape else "class"


@dataclass(frozen=True)
class DataContext:
    """What a dataset may need to know besides its own options.

    Args:
        data_dir: folder of downloaded files.
        split_seed: decides derived splits.
        validation_fraction: share of train set aside where there is no validation split.
        cache_dir: folder for what is made once and can be made again.
        source: the path, where a dataset is named by one.
    """

    data_dir: Path
    split_seed: int
    validation_fraction: float
    cache_dir: Path = field(default_factory=cache_folder)
    source: str = ""


class Dataset(ABC):
    """Examples by split and index. Subclass it for data that does not fit in memory; else use `ArrayDataset`."""

    classes: tuple[str, ...]

    @property
    @abstractmethod
    def features(self) -> dict[str, Feature]:
        """What an example looks like."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """How many examples each split has."""

    @abstractmethod
    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        """The examples of ``split`` at ``indices``, in that order."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the data changes."""

    @property
    def crops(self) -> bool:
        """Whether `read_into` can take a part of each image while decoding."""
        return False

    def read_into(self, split: str, indices: NDArray[np.int64], out: Arrays, crop: Crop | None = None) -> None:
        """The same, written into ``out``, which may lack features. May be called from several threads at once.

        Args:
            split: which split.
            indices: which examples.
            out: arrays to fill.
            crop: which part of each image to take; only where ``crops`` is true.
        """
        found = self.read(split, indices)
        for name, array in out.items():
            array[...] = found[name]

    def arrays(self, split: str) -> Arrays | None:
        """The whole split, if it is in memory."""
        return None

    def labels(self, split: str) -> NDArray[np.int32] | None:
        """The class of every example, if it has one and that is known without reading them."""
        arrays = self.arrays(split)
        if arrays is None or label_kind(self.features.get(LABEL)) != "class":
            return None
        return np.asarray(arrays[LABEL], np.int32)

    def name(self, split: str, index: int) -> str:
        """Where an example comes from, for people: a path, or its number."""
        return str(index)

    @property
    def stored(self) -> Dataset:
        """The dataset before the user's preprocessing of examples."""
        return self

    def size(self, split: str) -> int:
        """How many examples ``split`` has; a missing split is an error."""
        sizes = self.sizes()
        if split not in sizes:
            raise DataError(f"the dataset has no {split} split. It has: {', '.join(sizes)}.")
        return sizes[split]


class ArrayDataset(Dataset):
    """A dataset in memory.

    Args:
        splits: for each split the named arrays: ``image`` (uint8 or float), ``label`` (whole numbers from 0; floats,
            one or several an example, for regression; rows of 0 and 1, one for each class, for several classes an
            example) and, if there are ids to pass through to predictions, ``id``.
        classes: names of the classes, by default their numbers; or of the values that are predicted.

    Raises:
        DataError: if a split is empty, arrays differ in length, or a label is out of range.
    """

    def __init__(self, splits: Mapping[str, Arrays], classes: Sequence[str] | None = None) -> None:
        if TRAIN not in splits:
            raise DataError(f"a dataset needs a train split; this one has: {', '.join(splits) or 'nothing'}.")
        self._splits = {name: _checked(name, arrays) for name, arrays in splits.items()}
        kind = label_kind(self.features.get(LABEL))
        if kind in ("values", "flags"):
            self.classes = _names(classes, self.features[LABEL], kind)
        else:
            self.classes = self._classes(classes)
        looks = {name: _looks(arrays) for name, arrays in self._splits.items()}
        for name, look in looks.items():
            if look != looks[TRAIN]:
                raise DataError(f"examples of the {name} split are {look}, those of train {looks[TRAIN]}.")

    def _classes(self, named: Sequence[str] | None) -> tuple[str, ...]:
        labels = {name: arrays[LABEL] for name, arrays in self._splits.items() if LABEL in arrays}
        highest = max((int(label.max()) for label in labels.values()), default=-1)
        classes = tuple(named) if named is not None else tuple(str(i) for i in range(highest + 1))
        for name, label in labels.items():
            worst = int(label.argmax())
            if label.ndim == 1 and int(label[worst]) >= len(classes):
                raise DataError(
                    f"label {int(label[worst])} of example {worst} of the {name} split is out of range: "
                    f"there are {len(classes)} classes, 0 to {len(classes) - 1}."
                )
        return classes

    @property
    def features(self) -> dict[str, Feature]:
        """What an example looks like."""
        return {k: Feature(v.shape[1:], v.dtype.name) for k, v in self._splits[TRAIN].items()}

    def sizes(self) -> dict[str, int]:
        """How many examples each split has."""
        return {name: len(arrays[ID]) for name, arrays in self._splits.items()}

    def arrays(self, split: str) -> Arrays:
        """The whole split."""
        self.size(split)
        return self._splits[split]

    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        """The examples of ``split`` at ``indices``, in that order."""
        return {name: array[indices] for name, array in self.arrays(split).items()}

    def read_into(self, split: str, indices: NDArray[np.int64], out: Arrays, crop: Crop | None = None) -> None:
        """The same, written into ``out``."""
        for name, array in out.items():
            np.take(self.arrays(split)[name], indices, axis=0, out=array, mode="clip")

    def fingerprint(self) -> str:
        """A hash of all values of all splits."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for name, arrays in sorted(self._splits.items()):
            for key, array in sorted(arrays.items()):
                digest.update(f"{name}/{key}/{array.dtype.str}/{array.shape}".encode())
                # NumPy gives no buffer of text and dates.
                digest.update(array.tobytes() if array.dtype.kind in "UMm" else np.ascontiguousarray(array).data)
        return digest.hexdigest()


def _looks(arrays: Arrays) -> str:
    """Shapes and types of an example; text may differ in length."""
    types = {k: "text" if v.dtype.kind in "US" else v.dtype.name for k, v in arrays.items()}
    return ", ".join(f"{k} {types[k]} {'×'.join(map(str, v.shape[1:])) or 'single'}" for k, v in sorted(arrays.items()))


def _checked(split: str, arrays: Arrays) -> dict[str, NDArray[np.generic]]:
    checked = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in checked.items():
        if array.ndim == 0:
            raise DataError(f"{name} of the {split} split is a single value; its first axis must count examples.")
    lengths = {name: len(array) for name, array in checked.items()}
    if not lengths or any(array.size == 0 for array in checked.values()):
        raise DataError(f"the {split} split is empty.")
    if len(set(lengths.values())) != 1:
        raise DataError(f"the arrays of the {split} split differ in length: {lengths}.")
    count = next(iter(lengths.values()))
    if LABEL in checked:
        checked[LABEL] = _labels(split, checked[LABEL])
    if IMAGE in checked:
        checked[IMAGE] = _images(split, checked[IMAGE])
    checked.setdefault(ID, np.arange(count, dtype=np.int64))
    for name, array in checked.items():
        if array.dtype.kind == "O":
            if not all(isinstance(value, str) for value in array.flat):
                raise DataError(f"{name} of the {split} split holds Python objects; give numbers or text.")
            checked[name] = array.astype(np.str_)  # a fingerprint of objects would be one of their addresses
    return checked


def _labels(split: str, labels: NDArray[np.generic]) -> NDArray[np.generic]:
    if labels.ndim == 2 and labels.shape[1] == 1 and labels.dtype.kind != "b":
        labels = labels[:, 0]
    if labels.ndim in (1, 2) and labels.dtype.kind == "f":
        return _values(split, labels)
    if labels.ndim == 2 and labels.dtype.kind in "iub":
        return _flags(split, labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"labels of the {split} split must be whole numbers, one an example (or floats, for regression; or rows of "
            f"0 and 1, for several classes an example); got {labels.dtype} of shape {labels.shape}. "
            "Give names as classes."
        )
    wide = labels.astype(np.int64)
    if wide.min() < 0:
        worst = int(wide.argmin())
        raise DataError(f"label {int(wide[worst])} of example {worst} of the {split} split is below 0.")
    if wide.max() >= 1 << 20:
        worst = int(wide.argmax())
        raise DataError(f"label {int(wide[worst])} of example {worst} of the {split} split is out of range.")
    return wide.astype(np.int32)


def _values(split: str, labels: NDArray[np.generic]) -> NDArray[np.generic]:
    """Floats to predict."""
    with np.errstate(over="ignore"):
        values = labels.astype(np.float32)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        raise DataError(f"label {labels[tuple(wrong[0])]} of example {wrong[0][0]} of the {split} split is not finite.")
    return values


def _flags(split: str, labels: NDArray[np.generic]) -> NDArray[np.generic]:
    """For each class, whether it applies."""
    wrong = np.argwhere((labels != 0) & (labels != 1))
    if len(wrong):
        raise DataError(
            f"labels of the {split} split are rows of whole numbers, so each must be 0 or 1 (whether that class "
            f"applies), but example {wrong[0][0]} has {labels[tuple(wrong[0])]}. For regression give floats."
        )
    return labels.astype(np.uint8)


def _names(given: Sequence[str] | None, label: Feature, kind: str) -> tuple[str, ...]:
    """Names of the classes that apply or not, or of the values."""
    count = label.shape[0] if label.shape else 1
    if given is None:
        return tuple(str(i) for i in range(count)) if kind == "flags" else ()
    if len(given) != count:
        raise DataError(f"{len(given)} names are given, but a label has {count} number(s).")
    return tuple(given)


def _images(split: str, images: NDArray[np.generic]) -> NDArray[np.generic]:
    if images.dtype.kind in "iub" and images.dtype != np.uint8:
        if images.min() < 0 or images.max() > 255:
            raise DataError(
                f"images of the {split} split are {images.dtype} with values from {images.min()} to {images.max()}; "
                "give uint8 (0 to 255) or floats."
            )
        images = images.astype(np.uint8)
    elif images.dtype.kind == "f":
        images = images.astype(np.float32, copy=False)  # it may be mapped from a file
        # Some at a time: what is mapped from a file may be larger than memory.
        if not all(np.isfinite(images[start : start + 1024]).all() for start in range(0, len(images), 1024)):
            raise DataError(f"images of the {split} split hold values that are not finite.")
    elif images.dtype != np.uint8:
        raise DataError(f"images of the {split} split are {images.dtype}; give uint8 (0 to 255) or floats.")
    if images.ndim == 1:
        raise DataError(f"images of the {split} split are single numbers; give an array an example.")
    return images[..., None] if images.ndim == 3 else images
