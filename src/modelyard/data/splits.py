"""Splits that a dataset does not bring itself: stratified, by seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import ID, LABEL, TRAIN, VALIDATION, Arrays
from modelyard.data.order import permutation

_SPLIT_DOMAIN = 0x73706C6974


def stratified(labels: NDArray[np.generic], fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the larger and of the smaller part; the smaller holds ``fraction`` of every class.

    A class with a single example stays in the larger part, as long as there is another to take from.
    """
    chosen = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(round(len(members) * fraction), len(members) - 1)
        chosen.append(members[permutation(seed, _SPLIT_DOMAIN, int(label), len(members))[:count]])
    smaller = np.sort(np.concatenate(chosen))
    if len(smaller) == 0 and len(labels) > 1:
        order = permutation(seed, _SPLIT_DOMAIN, -1, len(labels))
        _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        spare = counts[classes[order]] > 1
        smaller = order[spare][:1] if spare.any() else order[:1]
    larger = np.setdiff1d(np.arange(len(labels)), smaller)
    return larger.astype(np.int64), smaller.astype(np.int64)


def by_chance(count: int, fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same for labels that are no classes."""
    order = permutation(seed, _SPLIT_DOMAIN, -1, count)
    smaller = min(max(round(count * fraction), 1), count - 1)
    return np.sort(order[smaller:]), np.sort(order[:smaller])


def are_classes(labels: NDArray[np.generic]) -> bool:
    """Whether labels are one whole number an example."""
    return labels.ndim == 1 and labels.dtype.kind in "iu"


def with_validation(splits: dict[str, Arrays], fraction: float, seed: int) -> dict[str, Arrays]:
    """``splits`` with a validation split, taken from train where there is none; ids stay those of the whole.

    A ``fraction`` of 0 leaves them as they are.
    A train split that is not sound comes back as it is: `ArrayDataset` says what is wrong with it.
    """
    if fraction <= 0 or VALIDATION in splits or TRAIN not in splits or LABEL not in splits[TRAIN]:
        return splits
    whole = {name: np.asarray(array) for name, array in splits[TRAIN].items()}
    labels = whole[LABEL]
    count = labels.shape[0] if labels.ndim else 0
    if count < 2 or labels.ndim > 2 or labels.size == 0 or labels.dtype.kind not in "iufb":
        return splits
    if not np.isfinite(labels).all():
        return splits
    if any(array.shape[:1] != (count,) for array in whole.values()):
        return splits
    whole.setdefault(ID, np.arange(count, dtype=np.int64))
    if labels.size == count and labels.dtype.kind in "iu":
        larger, smaller = stratified(labels.reshape(count), fraction, seed)
    else:
        larger, smaller = by_chance(count, fraction, seed)
    return {
        **splits,
        TRAIN: {name: array[larger] for name, array in whole.items()},
        VALIDATION: {name: array[smaller] for name, array in whole.items()},
    }
