"""A user's own preprocessing, for training and evaluation alike.

    @modelyard.register_preprocessing("centre")
    class Centre:
        def __init__(self, options): ...
        def example(self, example, training): ...   # NumPy, one example, before batching
        def batch(self, batch, training): ...       # keras.ops, a batch, inside the compiled step, after augmentation

Either method is enough. ``example`` is told whether the example is of the train split; it must give the same for the
same example, so it may be called once and its result kept. ``batch`` is told whether this is a training step.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config.calls import Call, build_component
from modelyard.data.dataset import TRAIN, Arrays, Crop, Dataset, Feature
from modelyard.errors import DataError, UserError
from modelyard.registry import PREPROCESSINGS

Example = dict[str, Any]
Batch = dict[str, Any]


def build_preprocessing(calls: Sequence[Call]) -> list[Any]:
    """The preprocessings of a config."""
    built = []
    for call in calls:
        made = build_component(call, PREPROCESSINGS)
        if not any(callable(getattr(made, method, None)) for method in ("example", "batch")):
            raise UserError(f"the preprocessing {call.name!r} has neither example(example, training) nor batch(…).")
        built.append(made)
    return built


def batch_preprocessing(calls: Sequence[Call]) -> Callable[[Batch, bool], Batch]:
    """What happens to batches, as one function of (batch, training)."""
    steps = _steps(calls, "batch")

    def preprocess(batch: Batch, training: bool) -> Batch:
        for name, step in steps:
            batch = _checked(name, step(batch, training), "batch")
        return batch

    return preprocess


def changes_batches(calls: Sequence[Call]) -> bool:
    """Whether any of the preprocessings works on batches."""
    return bool(_steps(calls, "batch"))


def with_example_preprocessing(dataset: Dataset, calls: Sequence[Call]) -> Dataset:
    """``dataset`` with what happens to each example."""
    steps = _steps(calls, "example")
    return _PreprocessedDataset(dataset, steps) if steps else dataset


def _steps(calls: Sequence[Call], method: str) -> list[tuple[str, Callable[[Any, bool], Any]]]:
    """The calls that have ``method``, and that method."""
    found = [
        (str(call), getattr(made, method, None)) for call, made in zip(calls, build_preprocessing(calls), strict=True)
    ]
    return [(name, step) for name, step in found if callable(step)]


def _checked(name: str, returned: Any, what: str) -> dict[str, Any]:
    if not isinstance(returned, dict):
        raise UserError(f"the preprocessing {name} returned {type(returned).__name__}; it must return the {what}.")
    return returned


class _PreprocessedDataset(Dataset):
    """A dataset whose examples go through functions of a user."""

    def __init__(self, dataset: Dataset, steps: Sequence[tuple[str, Callable[[Example, bool], Example]]]) -> None:
        self._dataset, self._steps = dataset, steps
        self.classes = dataset.classes
        split = next(iter(dataset.sizes()))  # train, where there is one
        first = self._one(split, dataset.read(split, np.array([0])), 0)
        self._features = {name: Feature(np.shape(v), np.asarray(v).dtype.name) for name, v in first.items()}

    @property
    def stored(self) -> Dataset:
        """The dataset before that."""
        return self._dataset

    @property
    def features(self) -> dict[str, Feature]:
        """What an example looks like afterwards."""
        return self._features

    def sizes(self) -> dict[str, int]:
        """How many examples each split has."""
        return self._dataset.sizes()

    def labels(self, split: str) -> NDArray[np.int32] | None:
        """Those of the dataset."""
        return self._dataset.labels(split)

    def name(self, split: str, index: int) -> str:
        """As the dataset names it."""
        return self._dataset.name(split, index)

    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        """The examples, preprocessed."""
        out = {name: np.empty((len(indices), *f.shape), f.dtype) for name, f in self.features.items()}
        self.read_into(split, indices, out)
        return out

    def read_into(self, split: str, indices: NDArray[np.int64], out: Arrays, crop: Crop | None = None) -> None:
        """The same, written into ``out``."""
        found = self._dataset.read(split, indices)
        for place, index in enumerate(indices.tolist()):
            example = self._one(split, found, place)
            for name, array in out.items():
                value = np.asarray(example[name]) if name in example else None
                # A fraction must not become a whole number unseen.
                if (
                    value is None
                    or value.shape != array.shape[1:]
                    or not np.can_cast(value.dtype, array.dtype, "same_kind")
                ):
                    got = f"{value.dtype} of shape {value.shape}" if value is not None else "nothing"
                    raise DataError(
                        f"preprocessing gave {got} as {name} of {self.name(split, index)} ({split}); "
                        f"of the first example it gave {array.dtype} of shape {array.shape[1:]}."
                    )
                array[place] = value

    def _one(self, split: str, found: Arrays, place: int) -> Example:
        example: Example = {name: array[place] for name, array in found.items()}
        for name, step in self._steps:
            example = _checked(name, step(example, split == TRAIN), "example")
        return example

    def fingerprint(self) -> str:
        """That of the dataset, the calls, and their code."""
        digest = hashlib.sha256(self._dataset.fingerprint().encode())
        for name, step in self._steps:
            try:
                code = inspect.getsource(type(getattr(step, "__self__", step)))
            except (OSError, TypeError):
                code = ""
            digest.update(f"{name}\n{code}".encode())
        return digest.hexdigest()
