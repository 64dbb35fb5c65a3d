"""A dataset of stored examples: image files or values, decoded and made one size as they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import ID, IMAGE, LABEL, TRAIN, VALIDATION, Arrays, Crop, DataContext, Dataset, Feature
from modelyard.data.images import Box, Choose, Fit, UndecodableError, fill, size_of
from modelyard.data.raw_examples import ExampleSubset, RawExample, RawExamples
from modelyard.data.splits import are_classes, by_chance, stratified
from modelyard.errors import DataError


class DecodedDataset(Dataset):
    """Examples that are decoded when they are read.

    Args:
        splits: the stored examples of each split.
        classes: the names of the classes.
        size: height and width of the images to give; None if all are stored at one size.
        channels: 1 or 3; None: as stored in arrays, 3 for image files.
        fit: how images of another shape are made to fit.
    """

    def __init__(
        self,
        splits: Mapping[str, RawExamples],
        classes: Sequence[str],
        *,
        size: tuple[int, int] | None = None,
        channels: int | None = None,
        fit: Fit = "crop",
    ) -> None:
        if TRAIN not in splits or not len(splits[TRAIN]):
            raise DataError("there are no training examples.")
        self.splits = {name: items for name, items in splits.items() if len(items)}
        self.classes = tuple(classes)
        self._size, self._channels, self._fit = size, channels, fit
        self._ids = {name: items.ids for name, items in self.splits.items()}

    @cached_property
    def features(self) -> dict[str, Feature]:
        """What an example looks like, from the first one. Converting and checking go without: it may be damaged."""
        first = self.splits[TRAIN].load(0)
        shape, dtype = _shape(first, self._size, self._channels, self.splits[TRAIN].name(0))
        labels = self.splits[TRAIN].labels
        label = Feature(labels.shape[1:], labels.dtype.name)
        return {IMAGE: Feature(shape, dtype), LABEL: label, ID: Feature((), "int64")}

    @property
    def crops(self) -> bool:
        """Parts of images can be taken while they are decoded."""
        return len(self.features[IMAGE].shape) == 3

    def sizes(self) -> dict[str, int]:
        """How many examples each split has."""
        return {name: len(items) for name, items in self.splits.items()}

    def labels(self, split: str) -> NDArray[np.int32] | None:
        """The class of every example, if it has one."""
        self.size(split)
        labels = self.splits[split].labels
        return labels if are_classes(labels) else None

    def name(self, split: str, index: int) -> str:
        """The path of the file, or the place in it."""
        return self.splits[split].name(index)

    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        """The examples of ``split`` at ``indices``, decoded."""
        out = {name: np.empty((len(indices), *f.shape), f.dtype) for name, f in self.features.items()}
        self.read_into(split, indices, out)
        return out

    def read_into(self, split: str, indices: NDArray[np.int64], out: Arrays, crop: Crop | None = None) -> None:
        """Decodes the examples into ``out``."""
        self.size(split)
        items = self.splits[split]
        if LABEL in out:
            out[LABEL][...] = items.labels[indices]
        if ID in out:
            out[ID][...] = self._ids[split][indices]
        if IMAGE in out:
            for place, index in enumerate(indices.tolist()):
                self._fill(out[IMAGE][place], items.load(index), crop, place, items, index)

    def _fill(
        self,
        out: NDArray[np.generic],
        stored: RawExample,
        crop: Crop | None,
        place: int,
        items: RawExamples,
        index: int,
    ) -> None:
        if out.ndim != 3:
            if isinstance(stored, bytes) or stored.shape != out.shape:
                found = "an image file" if isinstance(stored, bytes) else f"shape {stored.shape}"
                raise DataError(f"{items.name(index)} is {found}, the others have shape {out.shape}.")
            out[...] = stored
            return
        choose: Choose | None = None
        if crop is not None:
            choose = partial(crop, place)
        elif self._size is None:
            choose = partial(_whole, out, partial(items.name, index))
        try:
            fill(out, stored, self._fit, choose, partial(items.name, index))
        except UndecodableError as error:
            hint = "`modelyard data verify` lists all such images, `modelyard convert --on_bad skip` leaves them out."
            raise DataError(f"{error} {hint}") from error

    def fingerprint(self) -> str:
        """Of the stored examples, the classes, and what is made of them."""
        digest = hashlib.sha256(repr((self.classes, self.features[IMAGE], self._fit)).encode())
        for name, items in sorted(self.splits.items()):
            digest.update(f"{name}/{items.fingerprint()}".encode())
        return digest.hexdigest()


def _whole(out: NDArray[np.generic], name: Callable[[], str], height: int, width: int) -> Box:
    """The whole image, which must be as large as the first."""
    if (height, width) != out.shape[:2]:
        raise DataError(
            f"{name()} is {height}×{width}, the first image {out.shape[0]}×{out.shape[1]}. "
            "Give one size for all: --image_size 224, for example."
        )
    return 0.0, 0.0, float(height), float(width)


class _DatasetExamples(RawExamples):
    """The examples of any dataset, as it reads them."""

    def __init__(self, dataset: Dataset, split: str) -> None:
        self.dataset, self.split = dataset, split
        labels: Any = dataset.labels(split)
        if labels is None:
            rows = np.arange(dataset.size(split))
            labels = np.concatenate([dataset.read(split, rows[i : i + 512])[LABEL] for i in range(0, len(rows), 512)])
        self.labels = np.asarray(labels)

    def load(self, index: int) -> RawExample:
        """The values of one example."""
        value = self.dataset.read(self.split, np.array([index]))[IMAGE][0]
        return np.asarray(value)

    def name(self, index: int) -> str:
        """As the dataset names it."""
        return self.dataset.name(self.split, index)

    def fingerprint(self) -> str:
        """That of the dataset, and the split."""
        return hashlib.sha256(f"{self.dataset.fingerprint()}/{self.split}".encode()).hexdigest()


def raw_examples_of(dataset: Dataset) -> dict[str, RawExamples]:
    """The stored examples of any dataset with images or values and labels."""
    if isinstance(dataset, DecodedDataset):
        return dict(dataset.splits)
    missing = [name for name in (IMAGE, LABEL) if name not in dataset.features]
    if missing:
        raise DataError(f"an example of this dataset has no {' and no '.join(missing)}.")
    return {split: _DatasetExamples(dataset, split) for split in dataset.sizes()}


def with_validation_examples(splits: Mapping[str, RawExamples], context: DataContext) -> dict[str, RawExamples]:
    """``splits`` with a validation split, taken from train where there is none."""
    if context.validation_fraction <= 0 or VALIDATION in splits or len(splits.get(TRAIN, ())) < 2:
        return dict(splits)
    whole = splits[TRAIN]
    if are_classes(whole.labels):
        larger, smaller = stratified(whole.labels, context.validation_fraction, context.split_seed)
    else:
        larger, smaller = by_chance(len(whole), context.validation_fraction, context.split_seed)
    return {**splits, TRAIN: ExampleSubset(whole, larger), VALIDATION: ExampleSubset(whole, smaller)}


def _shape(
    first: RawExample, size: tuple[int, int] | None, channels: int | None, name: str
) -> tuple[tuple[int, ...], str]:
    """Shape and type of the images that are given."""
    if isinstance(first, bytes):
        height, width, _ = size_of(first, name)
        return (*(size or (height, width)), channels or 3), "uint8"
    dtype = "uint8" if first.dtype == np.uint8 else "float32"
    shape = (*first.shape, 1) if first.ndim == 2 else first.shape
    if len(shape) != 3:
        if size is not None or channels is not None:
            raise DataError(f"image_size and image_channels are for images; these examples have shape {shape}.")
        return shape, dtype
    return (*(size or shape[:2]), channels or shape[2]), dtype
