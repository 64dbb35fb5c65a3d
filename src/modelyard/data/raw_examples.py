"""Raw examples: image files or arrays by index, before anything is decoded.

A source (a folder, a CSV file, records, arrays) gives one `RawExamples` per split. Decoding, splitting and conversion
are the same for all sources.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import Feature, LabelKind, label_kind
from modelyard.errors import DataError
from modelyard.system.untrusted import read_regular

LARGEST_IMAGE = 1 << 30
"""Bytes of an image file: 170 million pixels, the limit of `images.py`, of 6 bytes each."""

PATH = "path"
"""The column of the paths of image files, relative to their folder or table."""

RawExample = bytes | NDArray[np.generic]
"""An image file as it is (JPEG, PNG, …), or an array of pixels or values."""


class RawExamples(ABC):
    """The raw examples of one split. `load` may be called from several threads at once."""

    labels: NDArray[Any]
    """One class index per example; or float values; or 0 and 1 for each class."""
    extra: Mapping[str, NDArray[Any]] = MappingProxyType({})
    """Columns that are neither image nor label, which the source has read for `--split_group`."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def label_kind(self) -> LabelKind:
        """The kind of the labels."""
        return label_kind(Feature(self.labels.shape[1:], self.labels.dtype.name))

    @property
    def columns(self) -> list[str]:
        """The names that `column` knows."""
        return sorted(self.extra)

    def column(self, name: str) -> NDArray[Any] | None:
        """Returns one value per example, by which `--split_group` groups them; None if there is no such column."""
        return self.extra.get(name)

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """A number per example. Derived splits keep it."""
        return np.arange(len(self), dtype=np.int64)

    @abstractmethod
    def load(self, index: int) -> RawExample:
        """Returns one example. A `DataError` with its name is raised if it is damaged."""

    def others(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Returns the other inputs of some examples, besides the image, by name."""
        return {}

    @abstractmethod
    def name(self, index: int) -> str:
        """Returns the path of an example, or a file and a position in it."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Returns a hash that changes when the examples change. It need not read all of them."""


class FileExamples(RawExamples):
    """Examples that are image files.

    Args:
        root: the folder that the paths are relative to.
        paths: of the files, with forward slashes.
        labels: one class index per file, or an array of other labels.
        names: what messages and tables call the files; by default their paths.
    """

    def __init__(
        self,
        root: Path,
        paths: Sequence[str],
        labels: Sequence[int] | NDArray[Any],
        names: Sequence[str] | None = None,
    ) -> None:
        self.root, self.paths = root, list(paths)
        self._names = self.paths if names is None else list(names)
        self.labels = labels if isinstance(labels, np.ndarray) else np.asarray(labels, np.int32)

    @property
    def columns(self) -> list[str]:
        """The path, and the columns of the source."""
        return sorted({PATH, *self.extra})

    def column(self, name: str) -> NDArray[Any] | None:
        """Returns the paths, or a column of the source."""
        return np.array(self.paths) if name == PATH and name not in self.extra else self.extra.get(name)

    def load(self, index: int) -> bytes:
        """Reads the file."""
        path = self.root / self.paths[index]
        try:
            return read_regular(path, LARGEST_IMAGE, DataError)
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror or error}.") from error

    def name(self, index: int) -> str:
        """Returns the path, relative to the root, or the name that was given instead."""
        return self._names[index]

    def fingerprint(self) -> str:
        """Hashes names, sizes and labels."""
        digest = hashlib.sha256(self.labels.tobytes())
        for path in self.paths:
            try:
                size = (self.root / path).stat().st_size
            except OSError as error:
                raise DataError(f"{self.root / path} can't be read: {error.strerror or error}.") from error
            digest.update(f"{path}\0{size}\n".encode("utf-8", "surrogateescape"))  # names may be bytes
        return digest.hexdigest()


class ArrayExamples(RawExamples):
    """Examples in an array, in memory or memory-mapped."""

    def __init__(self, images: NDArray[np.generic], labels: NDArray[Any]) -> None:
        self.images, self.labels = images, labels

    def load(self, index: int) -> NDArray[np.generic]:
        """Returns the values of one example."""
        values: NDArray[np.generic] = np.asarray(self.images[index])
        return values

    def name(self, index: int) -> str:
        """Returns the index."""
        return str(index)

    def fingerprint(self) -> str:
        """Hashes all values."""
        digest = hashlib.sha256(self.labels.tobytes())
        digest.update(f"{self.images.dtype.str}/{self.images.shape}".encode())
        digest.update(np.ascontiguousarray(self.images).data)
        return digest.hexdigest()


class ExamplesWithInputs(RawExamples):
    """Examples of several named inputs.

    Args:
        inputs: arrays of the inputs besides the image, by name.
        images: the images; None if the model takes none.
        labels: the labels; by default those of the images.
    """

    def __init__(
        self, inputs: Mapping[str, NDArray[Any]], images: RawExamples | None, labels: NDArray[Any] | None = None
    ) -> None:
        self.inputs, self.images_of = dict(inputs), images
        if labels is None and images is None:
            labels = np.zeros(len(next(iter(inputs.values()))), np.int32)
        self.labels = labels if labels is not None else images.labels  # type: ignore[union-attr]

    def load(self, index: int) -> RawExample:
        """Returns the image of an example."""
        if self.images_of is None:
            raise DataError(f"example {index} has no image.")
        return self.images_of.load(index)

    def others(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Returns the other inputs of some examples."""
        return {name: values[indices] for name, values in self.inputs.items()}

    def name(self, index: int) -> str:
        """Returns the name of the image, or the position."""
        return str(index) if self.images_of is None else self.images_of.name(index)

    def fingerprint(self) -> str:
        """Hashes all inputs."""
        digest = hashlib.sha256(self.labels.tobytes())
        if self.images_of is not None:
            digest.update(self.images_of.fingerprint().encode())
        for name, values in sorted(self.inputs.items()):
            digest.update(f"{name}/{values.dtype.str}/{values.shape}".encode())
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()


class ExampleSubset(RawExamples):
    """Some of the examples of another source, such as those of a derived split."""

    def __init__(self, whole: RawExamples, indices: NDArray[np.int64]) -> None:
        self.whole, self.indices = whole, indices
        self.labels = whole.labels[indices]

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The ids in the whole."""
        return self.whole.ids[self.indices]

    @property
    def columns(self) -> list[str]:
        """The names in the whole."""
        return self.whole.columns

    def column(self, name: str) -> NDArray[Any] | None:
        """Returns these rows of a column of the whole."""
        values = self.whole.column(name)
        return None if values is None else values[self.indices]

    def load(self, index: int) -> RawExample:
        """Reads the example from the whole."""
        return self.whole.load(int(self.indices[index]))

    def others(self, indices: NDArray[np.int64]) -> Mapping[str, NDArray[Any]]:
        """Returns the other inputs from the whole."""
        return self.whole.others(self.indices[indices])

    def name(self, index: int) -> str:
        """Returns its name in the whole."""
        return self.whole.name(int(self.indices[index]))

    def fingerprint(self) -> str:
        """Hashes the whole and the chosen indices."""
        return hashlib.sha256(self.whole.fingerprint().encode() + self.indices.tobytes()).hexdigest()
