"""The dataset contract: splits, features, and examples by index.

A dataset of your own is a function that returns a `Dataset`, registered by name:

    @modelyard.register_dataset("stripes")
    def stripes(options, context):
        return modelyard.ArrayDataset({"train": {"image": images, "label": labels}})
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from modelyard.errors import DataError
from modelyard.storage import cache_folder

Arrays = Mapping[str, NDArray[np.generic]]
"""Named arrays whose first axis counts examples."""

Maps = Mapping[str, float] | Sequence[str] | None
"""Names of maps, or their values outside of the image by name."""

Crop = Callable[[int, int, int], tuple[float, float, float, float]]
"""``crop(position, height, width)`` returns top, left, height and width of the part of an image to take. ``position``
counts the examples that are read together."""

TRAIN, VALIDATION, TEST = "train", "validation", "test"
SPLITS = (TRAIN, VALIDATION, TEST)
LABEL, IMAGE, ID = "label", "image", "id"


@dataclass(frozen=True)
class Feature:
    """Shape and type of one named array of an example."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def as_json(self) -> dict[str, Any]:
        """Returns the form that manifests and exports store."""
        return {"shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Feature:
        """Reads `as_json`.

        Raises:
            KeyError, TypeError, ValueError: if it is invalid.
        """
        return cls(tuple(int(size) for size in stored["shape"]), np.dtype(stored["dtype"]).name)


def empty_arrays(features: Mapping[str, Feature], count: int) -> dict[str, NDArray[Any]]:
    """Returns uninitialized arrays for ``count`` examples."""
    return {name: np.empty((count, *feature.shape), feature.dtype) for name, feature in features.items()}


LabelKind = Literal["class", "values", "flags", "map", "none"]


def label_kind(feature: Feature | None) -> LabelKind:
    """Returns the kind of labels: a class index, values (floats), flags (0 or 1 for each class), a map, or none.

    A map has a value for each pixel: two axes or more.
    """
    if feature is None:
        return "none"
    if len(feature.shape) > 1:
        return "map"
    if "float" in feature.dtype:
        return "values"
    return "flags" if feature.shape else "class"


@dataclass(frozen=True)
class DataContext:
    """Settings that a dataset may need besides its own options.

    Args:
        data_dir: folder of downloaded files.
        split_seed: seed of derived splits.
        validation_fraction: share of train that becomes the validation split, if there is none.
        cache_dir: folder for files that can be created again.
        source: the path of the dataset, if it is given by path.
        split_group: the column whose equal values stay in one split; a source need not read other columns.
        given: the examples, if a Python program gives them.
    """

    data_dir: Path
    split_seed: int
    validation_fraction: float
    cache_dir: Path = field(default_factory=cache_folder)
    source: str = ""
    split_group: str = ""
    given: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class DerivedSplits:
    """Splits that are derived from train.

    Args:
        rows: for each split, train included, the rows of the whole train split, sorted.
        groups: the number of groups in each split; empty if examples are not grouped.
        fingerprint: of the dataset before it was divided into folds; empty without folds.
    """

    rows: Mapping[str, NDArray[np.int64]]
    groups: Mapping[str, int]
    fingerprint: str = ""


class Dataset(ABC):
    """Examples by split and index. Subclass it for data that does not fit in memory; else use `ArrayDataset`."""

    classes: tuple[str, ...]
    derived: DerivedSplits | None = None
    """The splits that were derived from train, if any were."""
    left_out: Mapping[str, Mapping[str, str]] | None = None
    """Examples that can't be decoded and were left out (`--on_bad skip`): for each split their names and why."""
    maps: Maps = None
    """The features that have a value for each pixel of the image, such as masks. Augmentation moves them with it. A
    dictionary gives the value outside of the image, which is 0 otherwise. None: it is not known which are maps."""
    boxes: Sequence[str] | None = None
    """The features that are boxes: rows of y_min, x_min, y_max, x_max as shares of height and width."""
    value_columns: Sequence[str] = ()
    """The names of the columns of vectors, if they are known."""
    results: dict[str, Any] | None = None
    """Values that were computed from the examples, if those never change; else None."""

    @property
    @abstractmethod
    def features(self) -> dict[str, Feature]:
        """Shape and type of each array of an example."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Returns the number of examples of each split."""

    @abstractmethod
    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        """Returns the examples of ``split`` at ``indices``, in that order."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns a hash that changes when the data changes."""

    copies_read = True
    """Whether copies of it in other processes may read examples (`--input_workers`)."""
    is_built_in = False
    """Whether no code of a user reads it: then copies in other processes read the same, and nothing hangs there."""

    @property
    def crops(self) -> bool:
        """Whether `read_into` can decode a part of each image only."""
        return False

    def read_into(self, split: str, indices: NDArray[np.int64], out: Arrays, crop: Crop | None = None) -> None:
        """Reads examples into ``out``. Several threads may call it at once.

        Args:
            split: which split.
            indices: which examples.
            out: arrays to fill; not all features need one.
            crop: which part of each image to take; only if ``crops`` is true.
        """
        examples = self.read(split, indices)
        for name, array in out.items():
            _check_shape(self, name, examples, array.shape)
            array[...] = examples[name]

    def arrays(self, split: str) -> Arrays | None:
        """Returns the whole split, if it is in memory."""
        return None

    def labels(self, split: str) -> NDArray[np.int32] | None:
        """Returns the class index of every example, if labels are classes and known without reading the examples."""
        arrays = self.arrays(split)
        if arrays is None or label_kind(self.features.get(LABEL)) != "class":
            return None
        return np.asarray(arrays[LABEL], np.int32)

    def name(self, split: str, index: int) -> str:
        """Returns the path of an example, or its index; for messages."""
        return str(index)

    @property
    def declared_splits(self) -> Collection[str]:
        """The splits that the dataset brings, empty ones included. They are not derived."""
        return self.sizes()

    @property
    def columns(self) -> list[str]:
        """The names that `column` knows."""
        return sorted(name for name, feature in self.features.items() if not feature.shape and name != LABEL)

    def column(self, split: str, name: str) -> NDArray[Any] | None:
        """Returns one value per example, by which `--split_group` groups them; None if there is no such feature."""
        feature, arrays = self.features.get(name), self.arrays(split)
        if feature is None or feature.shape:
            return None
        if arrays is not None:
            return np.asarray(arrays[name])
        size, at_once = self.size(split), 1024
        parts = [np.arange(start, min(start + at_once, size)) for start in range(0, size, at_once)]
        return np.concatenate([np.asarray(self.read(split, rows)[name]) for rows in parts])

    def divided(self, derived: DerivedSplits, drop: Collection[str] = ()) -> Dataset:
        """Returns the dataset with these splits in place of train, without the features in ``drop``."""
        return _DividedDataset(self, derived, drop)

    @property
    def stored(self) -> Dataset:
        """The dataset before the user's preprocessing of examples."""
        return self

    def stored_rows(self, split: str) -> NDArray[np.int64]:
        """Returns the rows of a derived split in train as it is stored."""
        assert self.derived is not None
        return self.derived.rows[split]

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Returns what ``compute`` returns; if the examples never change, it is called once for each name."""
        if self.results is None:
            return compute()
        if name not in self.results:
            self.results[name] = compute()
        return self.results[name]

    def size(self, split: str) -> int:
        """Returns the number of examples of ``split``. A missing split is an error."""
        sizes = self.sizes()
        if split not in sizes:
            raise DataError(f"the dataset has no {split} split. It has: {', '.join(sizes)}.")
        return sizes[split]


def check_dataset(dataset: Dataset) -> None:
    """Checks a dataset of the user's own class, and reads its first examples.

    Raises:
        DataError: if something of it is missing or has another form.
    """
    name, classes = type(dataset).__name__, getattr(dataset, "classes", None)
    if classes is None or isinstance(classes, str):
        raise DataError(
            f"{name}.classes must be the names of the classes, in the order of their indices, or () if labels are no "
            f"classes; it is {'missing' if classes is None else repr(classes)}."
        )
    features = dataset.features
    wrong = next((key for key, feature in features.items() if not isinstance(feature, Feature)), None)
    if wrong is not None:
        raise DataError(
            f"{name}.features[{wrong!r}] is {features[wrong]!r}; it must be a modelyard.Feature, such as "
            "Feature((8, 8, 1), 'uint8') or Feature((), 'int32')."
        )
    sizes = dataset.sizes()
    if TRAIN not in sizes:
        raise DataError(f"a dataset needs a train split; {name}.sizes() has: {', '.join(sizes) or 'nothing'}.")
    count = min(sizes[TRAIN], 2)
    examples = dataset.read(TRAIN, np.arange(count))
    for key, feature in features.items():
        _check_shape(dataset, key, examples, (count, *feature.shape))


def _check_shape(dataset: Dataset, name: str, examples: Arrays, expected: tuple[int, ...]) -> None:
    """Raises DataError if `read` did not return what was asked for."""
    found = np.shape(examples[name]) if name in examples else None
    if found != expected:
        raise DataError(
            f"{type(dataset).__name__}.read returned {'nothing' if found is None else f'an array of shape {found}'} as "
            f"{name!r}, expected shape {expected}: {expected[0]} examples were asked for."
        )


class _DividedDataset(Dataset):
    """Any dataset with splits that are derived from its train split."""

    def __init__(self, whole: Dataset, derived: DerivedSplits, drop: Collection[str]) -> None:
        self._whole, self.derived, self._drop = whole, derived, drop
        self._arrays: dict[str, Arrays] = {}
        self.classes, self.maps, self.boxes = whole.classes, whole.maps, whole.boxes
        self.copies_read, self.is_built_in = whole.copies_read, whole.is_built_in
        self.value_columns = whole.value_columns

    @property
    def features(self) -> dict[str, Feature]:
        return {name: feature for name, feature in self._whole.features.items() if name not in self._drop}

    @property
    def crops(self) -> bool:
        return self._whole.crops

    def sizes(self) -> dict[str, int]:
        return {**self._whole.sizes(), **{split: len(rows) for split, rows in self._rows.items()}}

    @property
    def _rows(self) -> Mapping[str, NDArray[np.int64]]:
        assert self.derived is not None
        return self.derived.rows

    def _find(self, split: str, indices: NDArray[np.int64]) -> tuple[str, NDArray[np.int64]]:
        """Returns split and rows in the whole."""
        return (TRAIN, self._rows[split][indices]) if split in self._rows else (split, indices)

    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        self.size(split)
        return {n: a for n, a in self._whole.read(*self._find(split, indices)).items() if n not in self._drop}

    def read_into(self, split: str, indices: NDArray[np.int64], out: Arrays, crop: Crop | None = None) -> None:
        self._whole.read_into(*self._find(split, indices), out, crop)

    def arrays(self, split: str) -> Arrays | None:
        if split not in self._arrays:
            found = self._whole.arrays(TRAIN if split in self._rows else split)
            if found is None:
                return None
            kept = {name: array for name, array in found.items() if name not in self._drop}
            rows = self._rows.get(split)
            self._arrays[split] = kept if rows is None else {name: array[rows] for name, array in kept.items()}
        return self._arrays[split]

    def labels(self, split: str) -> NDArray[np.int32] | None:
        if split not in self._rows:
            return self._whole.labels(split)
        labels = self._whole.labels(TRAIN)
        return None if labels is None else labels[self._rows[split]]

    def name(self, split: str, index: int) -> str:
        found, rows = self._find(split, np.array([index]))
        return self._whole.name(found, int(rows[0]))

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._whole.fingerprint().encode())
        for split, rows in sorted(self._rows.items()):
            digest.update(split.encode() + np.ascontiguousarray(rows, np.int64).data)
        return digest.hexdigest()


class ArrayDataset(Dataset):
    """A dataset in memory.

    Args:
        splits: the named arrays of each split: ``image`` (uint8 or float); ``label`` (class indices from 0; for
            regression floats, one or several per example; for multi-label rows of 0 and 1, one for each class); and
            optionally ``id``, which predictions repeat. ``(x, y)`` is image and label.
        classes: names of the classes, by default their indices; for regression, names of the values.
        maps: the arrays that have a value for each pixel of the image, such as masks: see `Dataset`.
        boxes: the arrays that are boxes in the image.

    Raises:
        DataError: if a split is empty, arrays differ in length, or a label is out of range.
    """

    def __init__(
        self,
        splits: Mapping[str, Arrays | tuple[Any, Any]],
        classes: Sequence[str] | None = None,
        *,
        maps: Maps = None,
        boxes: Sequence[str] | None = None,
    ) -> None:
        if TRAIN not in splits:
            raise DataError(f"a dataset needs a train split; this one has: {', '.join(splits) or 'nothing'}.")
        self.extra: dict[str, NDArray[Any]] = {}
        """Values of the training examples that are no features, which the source has read for `--split_group`."""
        self.maps, self.boxes = maps, boxes
        mapped = LABEL in (maps or ())
        self._splits: dict[str, Arrays] = {name: _checked(name, arrays, mapped) for name, arrays in splits.items()}
        kind = label_kind(self.features.get(LABEL))
        if kind == "map":
            outside = maps.get(LABEL, 0) if isinstance(maps, Mapping) else 0
            self.classes = _map_classes(classes, [a[LABEL] for a in self._splits.values() if LABEL in a], outside)
        elif kind in ("values", "flags"):
            self.classes = _label_names(classes, self.features[LABEL], kind)
        else:
            self.classes = self._class_names(classes)
        expected = _signature(self._splits[TRAIN])
        for name, arrays in self._splits.items():
            if (found := _signature(arrays)) != expected:
                raise DataError(f"examples of the {name} split are {found}, those of train {expected}.")

    def _class_names(self, given: Sequence[str] | None) -> tuple[str, ...]:
        labels = {name: arrays[LABEL] for name, arrays in self._splits.items() if LABEL in arrays}
        highest = max((int(label.max()) for label in labels.values()), default=-1)
        classes = tuple(given) if given is not None else tuple(str(i) for i in range(highest + 1))
        for name, label in labels.items():
            worst = int(label.argmax())
            if label.ndim == 1 and int(label[worst]) >= len(classes):
                raise DataError(
                    f"label {int(label[worst])} of example {worst} of the {name} split is out of range: "
                    f"there are {len(classes)} classes, 0 to {len(classes) - 1}."
                )
        return classes

    @property
    def columns(self) -> list[str]:
        """The names that `column` knows."""
        return sorted({*super().columns, *self.extra})

    def column(self, split: str, name: str) -> NDArray[Any] | None:
        """Returns one value per example, by which `--split_group` groups them; None if there is no such feature."""
        return self.extra[name] if split == TRAIN and name in self.extra else super().column(split, name)

    def divided(self, derived: DerivedSplits, drop: Collection[str] = ()) -> ArrayDataset:
        """Returns the dataset with these splits in place of train. Ids are kept."""
        train = self._splits[TRAIN]
        cut = {split: {name: array[rows] for name, array in train.items()} for split, rows in derived.rows.items()}
        divided = copy.copy(self)
        divided.derived, divided.results = derived, None
        divided._splits = {
            split: {name: array for name, array in arrays.items() if name not in drop}
            for split, arrays in {**self._splits, **cut}.items()
        }
        return divided

    @property
    def features(self) -> dict[str, Feature]:
        """Shape and type of each array of an example."""
        return {k: Feature(v.shape[1:], v.dtype.name) for k, v in self._splits[TRAIN].items()}

    def sizes(self) -> dict[str, int]:
        """Returns the number of examples of each split."""
        return {name: len(arrays[ID]) for name, arrays in self._splits.items()}

    def arrays(self, split: str) -> Arrays:
        """Returns the whole split."""
        self.size(split)
        return self._splits[split]

    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        """Returns the examples of ``split`` at ``indices``, in that order."""
        return {name: array[indices] for name, array in self.arrays(split).items()}

    def read_into(self, split: str, indices: NDArray[np.int64], out: Arrays, crop: Crop | None = None) -> None:
        """Copies the examples into ``out``."""
        for name, array in out.items():
            np.take(self.arrays(split)[name], indices, axis=0, out=array, mode="clip")

    def fingerprint(self) -> str:
        """Hashes all values of all splits."""
        digest = hashlib.sha256(repr(self.classes).encode())
        if self.maps or self.boxes:
            outside = sorted(self.maps.items()) if isinstance(self.maps, Mapping) else sorted(self.maps or ())
            digest.update(f"maps {outside} boxes {sorted(self.boxes or ())}".encode())
        for name, arrays in sorted(self._splits.items()):
            for key, array in sorted(arrays.items()):
                digest.update(f"{name}/{key}/{array.dtype.str}/{array.shape}".encode())
                # NumPy gives no buffer of text and dates.
                digest.update(array.tobytes() if array.dtype.kind in "UMm" else np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class GeneratorDataset:
    """A dataset from Python generators.

    Each generator runs once. Its examples are kept as records in the cache, so their order is shuffled and a run can be
    resumed as with any other dataset. If the code in the file or the options change, new records are created:

        @modelyard.register_dataset("rings")
        def rings(options, context):
            def train():
                for number in range(1000):
                    yield {"image": draw(number), "label": number % 2}
            return modelyard.GeneratorDataset({"train": train}, classes=["thin", "thick"])

    Args:
        splits: for each split a function without arguments that yields examples: ``image`` (an array, or the bytes of
            an image file) and ``label`` (a class index, or a class name).
        classes: the class names; by default the indices that occur.
        image_size: height and width to resize images to, if they differ in size.
        version: change it to generate the examples again after a change outside of the file.
    """

    splits: Mapping[str, Callable[[], Iterable[Mapping[str, Any]]]]
    classes: Sequence[str] | None = None
    image_size: tuple[int, int] | None = None
    version: str = ""


# -- checks of arrays -------------------------------------------------------------------------------------------------


def _signature(arrays: Arrays) -> str:
    """Shapes and types of an example. Text may differ in length."""
    types = {k: "text" if v.dtype.kind in "US" else v.dtype.name for k, v in arrays.items()}
    return ", ".join(f"{k} {types[k]} {'×'.join(map(str, v.shape[1:])) or 'single'}" for k, v in sorted(arrays.items()))


def _checked(
    split: str, arrays: Arrays | tuple[Any, Any], label_is_map: bool = False
) -> dict[str, NDArray[np.generic]]:
    if isinstance(arrays, tuple) and len(arrays) == 2:
        examples, labels = arrays
        arrays = {**(examples if isinstance(examples, Mapping) else {IMAGE: examples}), LABEL: labels}
    if not isinstance(arrays, Mapping):
        raise DataError(
            f"the {split} split is {type(arrays).__name__}; give (x, y) or named arrays: {{'image': x, 'label': y}}."
        )
    checked = {name: np.asarray(array) for name, array in arrays.items()}
    for name, array in checked.items():
        if array.ndim == 0:
            raise DataError(f"{name} of the {split} split is a single value; its first axis must count examples.")
    lengths = {name: len(array) for name, array in checked.items()}
    if not lengths or any(array.size == 0 for array in checked.values()):
        raise DataError(f"the {split} split is empty.")
    if len(set(lengths.values())) != 1:
        raise DataError(f"the arrays of the {split} split differ in length: {lengths}.")
    if LABEL in checked:
        checked[LABEL] = (_checked_map if label_is_map else _checked_labels)(split, checked[LABEL])
    if IMAGE in checked:
        checked[IMAGE] = _checked_images(split, checked[IMAGE])
    checked.setdefault(ID, np.arange(next(iter(lengths.values())), dtype=np.int64))
    for name, array in checked.items():
        if array.dtype.kind == "O":
            if not all(isinstance(value, str) for value in array.flat):
                raise DataError(f"{name} of the {split} split holds Python objects; give numbers or text.")
            checked[name] = array.astype(np.str_)  # else the fingerprint would hash addresses
    return checked


_LABEL_MAPS = "If each pixel has a label, give modelyard.ArrayDataset(…, maps=['label'])."


def _checked_map(split: str, labels: NDArray[np.generic]) -> NDArray[np.generic]:
    """Checks labels that have a value for each pixel."""
    if labels.ndim < 3 or labels.dtype.kind not in "iubf":
        raise DataError(
            f"labels of the {split} split are maps, so they must be numbers with the height and width of the image; "
            f"got {labels.dtype} of shape {labels.shape}."
        )
    if labels.dtype.kind == "f":
        return _checked_values(split, labels)
    if labels.min() < 0:
        worst = np.argwhere(np.asarray(labels, np.float64) < 0)[0]
        raise DataError(f"the label {labels[tuple(worst)]} in example {worst[0]} of the {split} split is below 0.")
    if labels.max() >= 1 << 20:
        raise DataError(f"the label {labels.max()} in a map of the {split} split is out of range.")
    return labels if labels.dtype.itemsize == 1 else labels.astype(np.int32)


def _map_classes(given: Sequence[str] | None, labels: Sequence[NDArray[np.generic]], outside: float) -> tuple[str, ...]:
    """Returns the names of the classes of pixels. The value outside of the image, if it is not 0, is no class."""
    if given is not None or labels[0].dtype.kind == "f":
        return tuple(given or ())
    highest = max(int(np.max(each, where=(each != outside) | (outside == 0), initial=0)) for each in labels)
    return tuple(str(number) for number in range(highest + 1))


def _checked_labels(split: str, labels: NDArray[np.generic]) -> NDArray[np.generic]:
    if labels.ndim == 2 and labels.shape[1] == 1 and labels.dtype.kind != "b":
        labels = labels[:, 0]
    if labels.ndim in (1, 2) and labels.dtype.kind == "f":
        return _checked_values(split, labels)
    if labels.ndim == 2 and labels.dtype.kind in "iub":
        return _checked_flags(split, labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"labels of the {split} split must be whole numbers, one per example (or floats, for regression; or rows "
            f"of 0 and 1, for several classes per example); got {labels.dtype} of shape {labels.shape}. "
            + ("Give names as classes." if labels.ndim < 3 else _LABEL_MAPS)
        )
    wide = labels.astype(np.int64)
    if wide.min() < 0 or wide.max() >= 1 << 20:
        worst = int(wide.argmin() if wide.min() < 0 else wide.argmax())
        problem = "below 0" if wide[worst] < 0 else "out of range"
        raise DataError(f"label {int(wide[worst])} of example {worst} of the {split} split is {problem}.")
    return wide.astype(np.int32)


def _checked_values(split: str, labels: NDArray[np.generic]) -> NDArray[np.generic]:
    with np.errstate(over="ignore"):
        values = labels.astype(np.float32)
    wrong = np.argwhere(~np.isfinite(values))
    if len(wrong):
        raise DataError(f"label {labels[tuple(wrong[0])]} of example {wrong[0][0]} of the {split} split is not finite.")
    return values


def _checked_flags(split: str, labels: NDArray[np.generic]) -> NDArray[np.generic]:
    wrong = np.argwhere((labels != 0) & (labels != 1))
    if len(wrong):
        raise DataError(
            f"labels of the {split} split are rows of whole numbers, so each must be 0 or 1 (whether that class "
            f"applies), but example {wrong[0][0]} has {labels[tuple(wrong[0])]}. For regression give floats."
        )
    return labels.astype(np.uint8)


def _label_names(given: Sequence[str] | None, label: Feature, kind: LabelKind) -> tuple[str, ...]:
    """The names of flags or values."""
    count = label.shape[0] if label.shape else 1
    if given is None:
        return tuple(str(i) for i in range(count)) if kind == "flags" else ()
    if len(given) != count:
        raise DataError(f"{len(given)} names are given, but a label has {count} number(s).")
    return tuple(given)


def _checked_images(split: str, images: NDArray[np.generic]) -> NDArray[np.generic]:
    if images.dtype.kind in "iub" and images.dtype != np.uint8:
        if images.min() < 0 or images.max() > 255:
            raise DataError(
                f"images of the {split} split are {images.dtype} with values from {images.min()} to {images.max()}; "
                "give uint8 (0 to 255) or floats."
            )
        images = images.astype(np.uint8)
    elif images.dtype.kind == "f":
        images = images.astype(np.float32, copy=False)  # it may be memory-mapped
        # In parts: a memory-mapped file may be larger than memory.
        if not all(np.isfinite(images[start : start + 1024]).all() for start in range(0, len(images), 1024)):
            raise DataError(f"images of the {split} split hold values that are not finite.")
    elif images.dtype != np.uint8:
        raise DataError(f"images of the {split} split are {images.dtype}; give uint8 (0 to 255) or floats.")
    if images.ndim == 1:
        raise DataError(f"images of the {split} split are single numbers; give an array per example.")
    return images[..., None] if images.ndim == 3 else images
