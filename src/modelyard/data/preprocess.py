"""A user's own preprocessing, for training and evaluation.

    @modelyard.register_preprocessing("center")
    class Center:
        def __init__(self, options): ...
        def example(self, example, training): ...   # NumPy, one example, before batching
        def batch(self, batch, training): ...       # keras.ops, a batch, inside the compiled step, after augmentation

One of the methods is enough. In ``example``, ``training`` is whether the example is of the train split. It must return
the same for the same example: its result may be kept. In ``batch``, ``training`` is whether this is a training step.
A class whose ``example`` adds masks or boxes names them in the attributes ``maps`` and ``boxes``, as a `Dataset` does.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config.calls import Call, build_component
from modelyard.data.dataset import TRAIN, Arrays, Crop, Dataset, Feature, empty_arrays
from modelyard.errors import DataError, UserError
from modelyard.registry import PREPROCESSINGS

Example = dict[str, Any]
Batch = dict[str, Any]


def batch_preprocessing(calls: Sequence[Call]) -> Callable[[Batch, bool], Batch]:
    """Returns the preprocessing of batches as one function of (batch, training)."""
    steps = _steps(calls, "batch")

    def preprocess(batch: Batch, training: bool) -> Batch:
        for name, step in steps:
            batch = _checked(name, step(batch, training), "batch")
        return batch

    return preprocess


def changes_batches(calls: Sequence[Call]) -> bool:
    """Returns whether any of the preprocessings works on batches."""
    return bool(_steps(calls, "batch"))


def with_example_preprocessing(dataset: Dataset, calls: Sequence[Call]) -> Dataset:
    """Returns ``dataset`` with the preprocessing of examples."""
    steps = _steps(calls, "example")
    return _PreprocessedDataset(dataset, steps) if steps else dataset


def _declared(attribute: str, sources: Sequence[Any], features: Collection[str]) -> dict[str, float] | None:
    """Returns the maps or boxes that any of ``sources`` declares, with values outside of the image; None without."""
    parts = [part for part in (getattr(source, attribute, None) for source in sources) if part is not None]
    if not parts:
        return None
    values = [part.items() if isinstance(part, Mapping) else ((name, 0.0) for name in part) for part in parts]
    return {name: value for items in values for name, value in items if name in features}


def _steps(calls: Sequence[Call], method: str) -> list[tuple[str, Callable[[Any, bool], Any]]]:
    """Returns ``method`` of each preprocessing that has it, by name."""
    steps = []
    for call in calls:
        built = build_component(call, PREPROCESSINGS)
        methods = {name: step for name in ("example", "batch") if callable(step := getattr(built, name, None))}
        if not methods:
            raise UserError(f"the preprocessing {call.name!r} has neither example(example, training) nor batch(…).")
        if method in methods:
            steps.append((str(call), methods[method]))
    return steps


def _checked(name: str, returned: Any, expected: str) -> dict[str, Any]:
    if not isinstance(returned, dict):
        raise UserError(f"the preprocessing {name} returned {type(returned).__name__}; it must return the {expected}.")
    return returned


class _PreprocessedDataset(Dataset):
    """A dataset with the preprocessing of examples. Features are those of the first example."""

    def __init__(self, dataset: Dataset, steps: Sequence[tuple[str, Callable[[Example, bool], Example]]]) -> None:
        self._dataset, self._steps = dataset, steps
        self.classes, self.copies_read = dataset.classes, dataset.copies_read
        split = next(iter(dataset.sizes()))  # train, if there is one
        first = self._preprocessed(split, dataset.read(split, np.array([0])), 0)
        self._features = {name: Feature(np.shape(v), np.asarray(v).dtype.name) for name, v in first.items()}
        sources = [dataset, *(getattr(step, "__self__", step) for _, step in steps)]
        self.maps = _declared("maps", sources, self._features)
        boxes = _declared("boxes", sources, self._features)
        self.boxes = None if boxes is None else list(boxes)

    @property
    def stored(self) -> Dataset:
        return self._dataset

    @property
    def features(self) -> dict[str, Feature]:
        return self._features

    def sizes(self) -> dict[str, int]:
        return self._dataset.sizes()

    def labels(self, split: str) -> NDArray[np.int32] | None:
        return self._dataset.labels(split)

    def name(self, split: str, index: int) -> str:
        return self._dataset.name(split, index)

    def read(self, split: str, indices: NDArray[np.int64]) -> Arrays:
        out = empty_arrays(self.features, len(indices))
        self.read_into(split, indices, out)
        return out

    def read_into(self, split: str, indices: NDArray[np.int64], out: Arrays, crop: Crop | None = None) -> None:
        examples = self._dataset.read(split, indices)
        for position, index in enumerate(indices.tolist()):
            example = self._preprocessed(split, examples, position)
            for name, array in out.items():
                value = np.asarray(example[name]) if name in example else None
                # same_kind: floats are not truncated to integers
                if (
                    value is None
                    or value.shape != array.shape[1:]
                    or not np.can_cast(value.dtype, array.dtype, "same_kind")
                ):
                    found = f"{value.dtype} of shape {value.shape}" if value is not None else "nothing"
                    raise DataError(
                        f"preprocessing returned {found} as {name} of {self.name(split, index)} ({split}); "
                        f"for the first example it returned {array.dtype} of shape {array.shape[1:]}."
                    )
                array[position] = value

    def _preprocessed(self, split: str, examples: Arrays, position: int) -> Example:
        example: Example = {name: array[position] for name, array in examples.items()}
        for name, step in self._steps:
            example = _checked(name, step(example, split == TRAIN), "example")
        return example

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._dataset.fingerprint().encode())
        for name, step in self._steps:
            try:
                code = inspect.getsource(type(getattr(step, "__self__", step)))
            except (OSError, TypeError):
                code = ""
            digest.update(f"{name}\n{code}".encode())
        return digest.hexdigest()
