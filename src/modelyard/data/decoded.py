"""A dataset that decodes raw examples as they are read, for training and for prediction."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import (
    ID,
    IMAGE,
    LABEL,
    TEST,
    TRAIN,
    Arrays,
    Crop,
    Dataset,
    DerivedSplits,
    Feature,
    empty_arrays,
)
from modelyard.data.image_spec import ImageOptions, ImageSpec, UndecodableError
from modelyard.data.raw_examples import ArrayExamples, ExampleSubset, ExamplesWithInputs, RawExample, RawExamples
from modelyard.errors import DataError

_HINT = "`modelyard data verify` lists all such images; a new run with --on_bad skip leaves them out."
_CHANGED = "It could be decoded when this started. Restore it, or start a new run."


class DecodedDataset(Dataset):
    """Raw examples, decoded when they are read.

    Args:
        splits: the raw examples of each split.
        classes: the names of the classes.
        image: for training, the options that decide the image spec; for prediction, the spec of the run.
        labelled: whether the examples have labels.
        skip_bad: write black for an example that can't be read, and keep the reason in `bad`; else it is an error.
        arrays: the dataset that the splits are of, if they are not files.
        others: shape and type of the inputs besides the image, for prediction. ``image`` is None if there is no image.
    """

    def __init__(
        self,
        splits: Mapping[str, RawExamples],
        classes: Sequence[str],
        image: ImageOptions | ImageSpec | None,
        *,
        labelled: bool = True,
        skip_bad: bool = False,
        arrays: Dataset | None = None,
        others: Mapping[str, Feature] = MappingProxyType({}),
    ) -> None:
        self._predicts = not isinstance(image, ImageOptions)
        if not self._predicts and not len(splits.get(TRAIN, ())):
            raise DataError("there are no training examples.")
        self.splits = {name: examples for name, examples in splits.items() if len(examples)}
        self._declared = tuple(splits)
        self.classes = tuple(classes)
        self.bad: dict[int, str] = {}
        self._image, self._labelled, self._skip_bad, self._arrays = image, labelled, skip_bad, arrays
        self._others = dict(others)
        self.copies_read = not skip_bad  # what is bad is noted here
        self.is_built_in = arrays is None or arrays.is_built_in

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
        divided.derived, divided.left_out = derived, self.left_out
        return divided

    def without(self, bad: Mapping[str, Mapping[int, str]]) -> DecodedDataset:
        """Returns the dataset without rows that can't be decoded, each with its reason.

        Raises:
            DataError: if no training example is left.
        """
        left = dict(self.splits)
        for split, rows in bad.items():
            whole = self.splits[split]
            kept = np.setdiff1d(np.arange(len(whole), dtype=np.int64), np.array([*rows], np.int64))
            if split == TRAIN and not len(kept):
                raise DataError(f"no training example can be decoded, the first: {next(iter(rows.values()))}")
            left[split] = ExampleSubset(whole, kept)
        made = DecodedDataset(left, self.classes, self._image, arrays=self._arrays)
        made.left_out = {
            split: {self.splits[split].name(row): reason for row, reason in rows.items()} for split, rows in bad.items()
        }
        return made

    def stored_rows(self, split: str) -> NDArray[np.int64]:
        """Returns the rows of a derived split in train as it is stored, with what was left out."""
        return super().stored_rows(split) if self.left_out is None else self.splits[split].ids

    @cached_property
    def image_spec(self) -> ImageSpec:
        """The spec; in training of the first example. Converting and verifying need none: that one may be damaged."""
        if self._image is None:
            raise DataError(f"these examples have no image; they have {', '.join(self._others)}.")
        if isinstance(self._image, ImageSpec):
            return self._image
        train = self.splits[TRAIN]
        return self._image.spec(train.load(0), train.name(0))

    @cached_property
    def features(self) -> dict[str, Feature]:
        """Shape and type of each array of an example."""
        features = {} if self._image is None else {IMAGE: self.image_spec.feature}
        features |= {**self._others, ID: Feature((), "int64")}
        if self._labelled:
            labels = next(iter(self.splits.values())).labels
            features[LABEL] = Feature(labels.shape[1:], labels.dtype.name)
        return features

    @property
    def crops(self) -> bool:
        """Whether a part of each image can be taken while decoding."""
        return self._image is not None and len(self.image_spec.shape) == 3

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
        if wanted := [name for name in self._others if name in out]:
            given = examples.others(indices)
            for name in wanted:
                out[name][...] = given[name]
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
                    raise DataError(f"{error} {_CHANGED if self.left_out is not None else _HINT}") from error
                else:
                    raise
            except MemoryError as error:
                raise MemoryError(f"{examples.name(index)} can't be decoded") from error

    def fingerprint(self) -> str:
        """Hashes the raw examples, the classes and the image spec."""
        if self._others:  # only in prediction
            digest = hashlib.sha256(repr((self.classes, self.features)).encode())
        else:
            digest = hashlib.sha256(repr((self.classes, self.features[IMAGE], self.image_spec.fit)).encode())
        for name, examples in sorted(self.splits.items()):
            digest.update(f"{name}/{examples.fingerprint()}".encode())
        return digest.hexdigest()


class _DatasetExamples(RawExamples):
    """The examples of any dataset; ``inputs`` are the names of the inputs besides the image."""

    def __init__(self, dataset: Dataset, split: str, inputs: Collection[str] = ()) -> None:
        self.dataset, self.split, self._inputs = dataset, split, tuple(inputs)
        labels: Any = dataset.labels(split)
        if labels is None:
            rows = np.arange(dataset.size(split))
            labels = np.concatenate([dataset.read(split, rows[i : i + 512])[LABEL] for i in range(0, len(rows), 512)])
        self.labels = np.asarray(labels)

    def load(self, index: int) -> RawExample:
        return np.asarray(self.dataset.read(self.split, np.array([index]))[IMAGE][0])

    def others(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        out = empty_arrays({name: self.dataset.features[name] for name in self._inputs}, len(indices))
        if out:  # without the image, which `load` reads
            self.dataset.read_into(self.split, indices, out)
        return out

    def name(self, index: int) -> str:
        return self.dataset.name(self.split, index)

    @property
    def columns(self) -> list[str]:
        return self.dataset.columns

    def column(self, name: str) -> NDArray[Any] | None:
        return self.dataset.column(self.split, name)

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self.dataset.fingerprint()}/{self.split}".encode()).hexdigest()


def raw_examples_of(dataset: Dataset, inputs: Collection[str] = (IMAGE,)) -> dict[str, RawExamples]:
    """Returns the raw examples of each split of any dataset that has these inputs, and labels."""
    if isinstance(dataset, DecodedDataset) and set(inputs) == {IMAGE}:
        return dict(dataset.splits)
    missing = [name for name in (*inputs, LABEL) if name not in dataset.features]
    if missing:
        raise DataError(f"an example of this dataset has no {' and no '.join(missing)}.")
    others = [name for name in inputs if name != IMAGE]
    return {split: _DatasetExamples(dataset, split, others) for split in dataset.sizes()}


# -- examples to predict ----------------------------------------------------------------------------------------------


def examples_of(inputs: Mapping[str, NDArray[Any]], labels: NDArray[Any] | None = None) -> RawExamples:
    """Returns arrays, by the names of inputs, as raw examples. Without labels, all are 0."""
    others = {name: values for name, values in inputs.items() if name != IMAGE}
    if labels is None:
        labels = np.zeros(len(next(iter(inputs.values()))), np.int32)
    images = ArrayExamples(inputs[IMAGE], labels) if IMAGE in inputs else None
    return images if images is not None and not others else ExamplesWithInputs(others, images, labels)


def dataset_to_predict(
    examples: RawExamples,
    classes: Sequence[str],
    inputs: Mapping[str, ImageSpec],
    *,
    labelled: bool = False,
    skip_bad: bool = False,
) -> DecodedDataset:
    """Returns the dataset whose split `test` is the examples, decoded as the inputs say."""
    others = {name: spec.feature for name, spec in inputs.items() if name != IMAGE}
    return DecodedDataset(
        {TEST: examples}, classes, inputs.get(IMAGE), labelled=labelled, skip_bad=skip_bad, others=others
    )
