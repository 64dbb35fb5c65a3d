"""Examples to predict: stored images, or values, made what the run was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import ID, IMAGE, LABEL, TEST, Arrays, Crop, Dataset, Feature
from modelyard.data.raw_examples import ArrayExamples, RawExample, RawExamples
from modelyard.errors import DataError
from modelyard.models.recorded_data import RecordedData


class Examples(Dataset):
    """The split `test`, whose images have the size, the channels and the type that a run was trained with.

    Args:
        items: the stored examples.
        remembered: what the run knows of its data.
        labelled: whether the labels of the items are of the run's classes.
        skips: what can't be read is black, and `bad` says why; else it is an error.
    """

    def __init__(
        self, items: RawExamples, remembered: RecordedData, *, labelled: bool = False, skips: bool = False
    ) -> None:
        self.items, self.classes, self.skips = items, remembered.data.classes, skips
        self.bad: dict[int, str] = {}
        self._image, self._fit, self._shares = remembered.image, remembered.fit, remembered.shares
        self._features = {IMAGE: self._image, ID: Feature((), "int64")}
        if labelled:
            self._features[LABEL] = Feature(items.labels.shape[1:], items.labels.dtype.name)

    @property
    def features(self) -> dict[str, Feature]:
        """As the run was trained on; labels only where they are known."""
        return self._features

    def sizes(self) -> dict[str, int]:
        """All examples are one split."""
        return {TEST: len(self.items)}

    def name(self, split: str, index: int) -> str:
        """The path of the file, or the place in it."""
        return self.items.name(index)

    def arrays(self, split: str) -> Arrays | None:
        """All examples, where they are arrays that need no change."""
        images = self.items.images if isinstance(self.items, ArrayExamples) else None
        if images is None or images.shape[1:] != self._image.shape or images.dtype != self._image.dtype:
            return None
        named = {IMAGE: images, LABEL: self.items.labels, ID: self.items.ids}
        return {name: named[name] for name in self._features}

    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        """The examples at ``indices``, decoded."""
        out = {name: np.empty((len(indices), *f.shape), f.dtype) for name, f in self._features.items()}
        self.read_into(split, indices, out)
        return out

    def read_into(self, split: str, indices: NDArray[np.int64], out: Arrays, crop: Crop | None = None) -> None:
        """Decodes the examples into ``out``."""
        if LABEL in out:
            out[LABEL][...] = self.items.labels[indices]
        if ID in out:
            out[ID][...] = self.items.ids[indices]
        if IMAGE in out:
            for place, index in enumerate(indices.tolist()):
                try:
                    self.put(out[IMAGE][place], self.items.load(index), partial(self.items.name, index))
                except DataError as error:
                    if not self.skips:
                        raise
                    out[IMAGE][place] = 0
                    self.bad[index] = str(error)

    def put(self, out: NDArray[Any], stored: RawExample, name: Callable[[], str]) -> None:
        """Writes one stored example into ``out``, as in training.

        Raises:
            DataError: if it can't be decoded or has another shape.
        """
        if not isinstance(stored, bytes):
            _check_values(stored, out.dtype, name)
        if out.ndim != 3:
            if isinstance(stored, bytes) or stored.shape != out.shape:
                found = "an image file" if isinstance(stored, bytes) else f"of shape {stored.shape}"
                raise DataError(f"{name()} is {found}; the examples of this run have shape {out.shape}.")
            out[...] = stored
            return
        from modelyard.data.images import fill

        fill(out, stored, self._fit, None, name)  # type: ignore[arg-type]
        if self._shares and (isinstance(stored, bytes) or stored.dtype == np.uint8):
            out /= 255

    def fingerprint(self) -> str:
        """Of the stored examples, and what is made of them."""
        return hashlib.sha256(f"{self.items.fingerprint()}/{self._image}/{self._fit}".encode()).hexdigest()


def _check_values(stored: NDArray[Any], wanted: np.dtype[Any], name: Callable[[], str]) -> None:
    """Refuses values that would become others: shares, from 0 to 1, are all black as bytes."""
    if wanted.kind == "f" or stored.dtype == wanted:
        return
    with np.errstate(invalid="ignore"):
        same = np.array_equal(stored.astype(wanted), stored)
    if not same:
        low, high = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
        raise DataError(
            f"example {name()} holds {stored.dtype} from {stored.min():g} to {stored.max():g}; the run was trained on "
            f"{wanted}: whole numbers from {low} to {high}. Give the values as they were in training."
        )
