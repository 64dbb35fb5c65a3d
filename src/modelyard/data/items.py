"""Stored examples: what a source holds, by number, before anything is decoded.

A source (a folder, a CSV file, records, arrays) is one `Items` a split. From there on all sources are alike: the same
decoding, the same splits, the same conversion.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.errors import DataError

Stored = bytes | NDArray[np.generic]
"""An image file as it is (JPEG, PNG, …), or an array of pixels or values."""


class Items(ABC):
    """The stored examples of one split. `load` may be called from several threads at once."""

    labels: NDArray[Any]
    """A class number each; or float values, or 0 and 1 for each class."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def ids(self) -> NDArray[np.int64]:
        """A number for each example that it keeps through derived splits."""
        return np.arange(len(self), dtype=np.int64)

    @abstractmethod
    def load(self, index: int) -> Stored:
        """The stored image or values of one example.

        Raises:
            DataError: if it can't be read or is damaged, naming the place.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Where the example is, for messages and lists: a path, or a file and a place in it."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the stored examples change; costs no reading of them all."""


class FileItems(Items):
    """Image files.

    Args:
        root: the folder that the paths are relative to.
        paths: of the files, with forward slashes.
        labels: a class number each, or an array of other labels.
    """

    def __init__(self, root: Path, paths: Sequence[str], labels: Sequence[int] | NDArray[Any]) -> None:
        self.root, self.paths = root, list(paths)
        self.labels = labels if isinstance(labels, np.ndarray) else np.asarray(labels, np.int32)

    def load(self, index: int) -> bytes:
        """The bytes of the file."""
        path = self.root / self.paths[index]
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror or error}.") from error

    def name(self, index: int) -> str:
        """The path, relative to the root."""
        return self.paths[index]

    def fingerprint(self) -> str:
        """Of names, sizes and labels."""
        digest = hashlib.sha256(self.labels.tobytes())
        for path in self.paths:
            try:
                size = (self.root / path).stat().st_size
            except OSError as error:
                raise DataError(f"{self.root / path} can't be read: {error.strerror or error}.") from error
            digest.update(f"{path}\0{size}\n".encode("utf-8", "surrogateescape"))  # names are bytes on some systems
        return digest.hexdigest()


class ArrayItems(Items):
    """Arrays in memory, or memory-mapped."""

    def __init__(self, images: NDArray[np.generic], labels: NDArray[Any]) -> None:
        self.images, self.labels = images, labels

    def load(self, index: int) -> NDArray[np.generic]:
        """The values of one example."""
        values: NDArray[np.generic] = np.asarray(self.images[index])
        return values

    def name(self, index: int) -> str:
        """Its number."""
        return str(index)

    def fingerprint(self) -> str:
        """Of all values."""
        digest = hashlib.sha256(self.labels.tobytes())
        digest.update(f"{self.images.dtype.str}/{self.images.shape}".encode())
        digest.update(np.ascontiguousarray(self.images).data)
        return digest.hexdigest()


class ChosenItems(Items):
    """Some of the examples of other items, such as those of a split that was derived."""

    def __init__(self, items: Items, indices: NDArray[np.int64]) -> None:
        self.items, self.indices = items, indices
        self.labels = items.labels[indices]

    @property
    def ids(self) -> NDArray[np.int64]:
        """Those of the others."""
        return self.items.ids[self.indices]

    def load(self, index: int) -> Stored:
        """As the other items store it."""
        return self.items.load(int(self.indices[index]))

    def name(self, index: int) -> str:
        """As the other items name it."""
        return self.items.name(int(self.indices[index]))

    def fingerprint(self) -> str:
        """Of the others, and which were chosen."""
        return hashlib.sha256(self.items.fingerprint().encode() + self.indices.tobytes()).hexdigest()
