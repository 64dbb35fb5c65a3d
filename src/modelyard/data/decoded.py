"""A dataset that decodes raw examples as they are read, for training and for prediction."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import (
    ID,
    IMAGE,
    LABEL,
    TRAIN,
    Arrays,
    Crop,
    Dataset,
    DerivedSplits,
    Feature,
    empty_arrays,
)
from modelyard.data.image_spec import ImageOptions, ImageSpec, UndecodableError
from modelyard.data.raw_examples import ArrayExamples, ExampleSubset, RawExample, RawExamples
from modelyard.errors import DataError

_HINT = "`modelyard data verify` lists all such images, `modelyard convert --on_bad skip` leaves them out."


class DecodedDataset(Dataset):
    """Raw examples, decoded when they are read.

    Args:
        splits: the raw examples of each split.
        classes: the names of the classes.
        image: for training, the options that decide the image spec; for prediction, the spec of the run.
        labelled: whether the examples have labels.
        skip_bad: write black for an example that can't be read, and keep the reason in `bad`; else it is an error.
        arrays: the dataset that the splits are of, if they are not files.
    """

    def __init__(
        self,
        splits: Mapping[str, RawExamples],
        classes: Sequence[str],
        image: ImageOptions | ImageSpec,
        *,
        labelled: bool = True,
        skip_bad: bool = False,
        arrays: Dataset | None = None,
    ) -> None:
        self._predicts = isinstance(image, ImageSpec)
        if not self._predicts and not len(splits.get(TRAIN, ())):
            raise DataError("there are no training examples.")
        self.splits = {name: examples for name, examples in splits.items() if len(examples)}
        self._declared = tuple(splits)
        self.classes = tuple(classes)
        self.bad: dict[int, str] = {}
        self._image, self._labelled, self._skip_bad, self._arrays = image, labelled, skip_bad, arrays

    @property
    def declared_splits(self) -> Collection[str]:
        """The splits that there are files for, even if there are no examples in them."""
        return self._declared

    @property
    def columns(self) -> list[str]:
        """The columns of the training examples."""
        return self.splits[TRAIN].columns

    def column(self, split: str, name: str) -> NDArray[Any] | None:
        """Returns a column of the raw examples."""
        return self.splits[split].column(name)

    def divided(self, derived: DerivedSplits, drop: Collection[str] = ()) -> DecodedDataset:
        """Returns the dataset with these splits in place of train."""
        if self._arrays is not None:
            arrays = self._arrays.divided(derived, drop)
            divided = DecodedDataset(raw_examples_of(arrays), self.classes, self._image, arrays=arrays)
        else:
            whole = self.splits[TRAIN]
            cut = {split: ExampleSubset(whole, rows) for split, rows in derived.rows.items()}
            divided = DecodedDataset({**self.splits, **cut}, self.classes, self._image)
        divided.derived = derived
        return divided

    @cached_property
    def image_spec(self) -> ImageSpec:
        """The spec; in training of the first example. Converting and verifying need none: that one may be damaged."""
        if isinstance(self._image, ImageSpec):
            return self._image
        train = self.splits[TRAIN]
        return self._image.spec(train.load(0), train.name(0))

    @cached_property
    def features(self) -> dict[str, Feature]:
        """Shape and type of each array of an example."""
        features = {IMAGE: self.image_spec.feature, ID: Feature((), "int64")}
        if self._labelled:
            labels = next(iter(self.splits.values())).labels
            features[LABEL] = Feature(labels.shape[1:], labels.dtype.name)
        return features

    @property
    def crops(self) -> bool:
        """Whether a part of each image can be taken while decoding."""
        return len(self.image_spec.shape) == 3

    def sizes(self) -> dict[str, int]:
        """Returns the number of examples of each split."""
        return {name: len(examples) for name, examples in self.splits.items()}

    def arrays(self, split: str) -> Arrays | None:
        """Returns the whole split if it is an array that needs no conversion."""
        examples = self.splits[split]
        # Not in training: statistics of arrays are of more examples, and existing runs would change.
        if not self._predicts or not isinstance(examples, ArrayExamples):
            return None
        if examples.images.shape[1:] != self.image_spec.shape or examples.images.dtype != self.image_spec.dtype:
            return None
        named = {IMAGE: examples.images, LABEL: examples.labels, ID: examples.ids}
        return {name: named[name] for name in self.features}

    def labels(self, split: str) -> NDArray[np.int32] | None:
        """Returns the class of every example, if labels are classes."""
        self.size(split)
        examples = self.splits[split]
        return examples.labels if self._labelled and examples.label_kind == "class" else None

    def name(self, split: str, index: int) -> str:
        """Returns the path of the file, or the position in it."""
        return self.splits[split].name(index)

    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        """Decodes the examples of ``split`` at ``indices``."""
        out = empty_arrays(self.features, len(indices))
        self.read_into(split, indices, out)
        return out

    def read_into(self, split: str, indices: NDArray[np.int64], out: Arrays, crop: Crop | None = None) -> None:
        """Decodes the examples into ``out``."""
        self.size(split)
        examples = self.splits[split]
        if LABEL in out:
            out[LABEL][...] = examples.labels[indices]
        if ID in out:
            out[ID][...] = examples.ids[indices]
        for position, index in enumerate(indices.tolist() if IMAGE in out else ()):
            choose = None if crop is None else partial(crop, position)
            image = out[IMAGE][position]
            try:
                self.image_spec.write(examples.load(index), image, partial(examples.name, index), choose)
            except DataError as error:
                if self._skip_bad:
                    image[...] = 0
                    self.bad[index] = str(error)
                elif isinstance(error, UndecodableError) and not self._predicts:
                    raise DataError(f"{error} {_HINT}") from error
                else:
                    raise

    def fingerprint(self) -> str:
        """Hashes the raw examples, the classes and the image spec."""
        digest = hashlib.sha256(repr((self.classes, self.features[IMAGE], self.image_spec.fit)).encode())
        for name, examples in sorted(self.splits.items()):
            digest.update(f"{name}/{examples.fingerprint()}".encode())
        return digest.hexdigest()


class _DatasetExamples(RawExamples):
    """The examples of any dataset."""

    def __init__(self, dataset: Dataset, split: str) -> None:
        self.dataset, self.split = dataset, split
        labels: Any = dataset.labels(split)
        if labels is None:
            rows = np.arange(dataset.size(split))
            labels = np.concatenate([dataset.read(split, rows[i : i + 512])[LABEL] for i in range(0, len(rows), 512)])
        self.labels = np.asarray(labels)

    def load(self, index: int) -> RawExample:
        return np.asarray(self.dataset.read(self.split, np.array([index]))[IMAGE][0])

    def name(self, index: int) -> str:
        return self.dataset.name(self.split, index)

    @property
    def columns(self) -> list[str]:
        return self.dataset.columns

    def column(self, name: str) -> NDArray[Any] | None:
        return self.dataset.column(self.split, name)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.dataset.fingerprint()}/{self.split}".encode()).hexdigest()


def raw_examples_of(dataset: Dataset) -> dict[str, RawExamples]:
    """Returns the raw examples of each split of any dataset that has images or values, and labels."""
    if isinstance(dataset, DecodedDataset):
        return dict(dataset.splits)
    missing = [name for name in (IMAGE, LABEL) if name not in dataset.features]
    if missing:
        raise DataError(f"an example of this dataset has no {' and no '.join(missing)}.")
    return {split: _DatasetExamples(dataset, split) for split in dataset.sizes()}
