"""Splits that a dataset does not bring itself: stratified, by seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import ID, LABEL, TRAIN, VALIDATION, Arrays
from modelyard.data.order import permutation

_SPLIT_DOMAIN = 0x73706C6974


def stratified(labels: NDArray[np.generic], fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the larger and of the smaller part; the smaller holds ``fraction`` of every class.

    A class with a single example stays in the larger part.
    """
    chosen = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(round(len(members) * fraction), len(members) - 1)
        chosen.append(members[permutation(seed, _SPLIT_DOMAIN, int(label), len(members))[:count]])
    smaller = np.sort(np.concatenate(chosen))
    if len(smaller) == 0 and len(labels) > 1:
        smaller = permutation(seed, _SPLIT_DOMAIN, -1, len(labels))[:1]
    larger = np.setdiff1d(np.arange(len(labels)), smaller)
    return larger.astype(np.int64), smaller.astype(np.int64)


def with_validation(splits: dict[str, Arrays], fraction: float, seed: int) -> dict[str, Arrays]:
    """``splits`` with a validation split, taken from train where there is none; ids stay those of the whole."""
    if VALIDATION in splits or TRAIN not in splits or LABEL not in splits[TRAIN]:
        return splits
    whole = dict(splits[TRAIN])
    count = len(whole[LABEL])
    if count < 2:
        return splits
    whole.setdefault(ID, np.arange(count, dtype=np.int64))
    larger, smaller = stratified(np.asarray(whole[LABEL]).reshape(count, -1)[:, 0], fraction, seed)
    return {
        **splits,
        TRAIN: {name: np.asarray(array)[larger] for name, array in whole.items()},
        VALIDATION: {name: np.asarray(array)[smaller] for name, array in whole.items()},
    }
