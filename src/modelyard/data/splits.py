"""Derived splits: validation, test and folds that are cut from train. Pure functions of labels, groups and seed.

`divide` is the only place where splits are derived, for every kind of dataset.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config.schema import CORE_FIELDS, Config, split_group_of
from modelyard.data.dataset import (
    ID,
    IMAGE,
    LABEL,
    SPLITS,
    TEST,
    TRAIN,
    VALIDATION,
    Dataset,
    DerivedSplits,
    label_kind,
)
from modelyard.data.order import permutation
from modelyard.errors import DataError

log = logging.getLogger("modelyard")

# Domains separate the uses of one seed: the test examples do not depend on the validation split.
_VALIDATION_DOMAIN = 0x73706C6974
_TEST_DOMAIN = 0x7465737473706C
_FOLD_DOMAIN = 0x666F6C6473
SPLIT_OPTIONS = ("validation_fraction", "test_fraction", "split_group", "folds", "fold")
"""The options that decide the derived splits, beside the seed."""
_SHOWN = 5
_MOST_CLASSES = 1000
_MOST_LEFT_OUT = 10_000

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class SplitRules:
    """How train is divided.

    Args:
        validation_fraction: share of train that becomes the validation split, if there is none.
        test_fraction: share of train that becomes the test split, if there is none.
        group: examples with the same value in this column stay together; ``COLUMN:REGEX`` for a part of the value.
        folds: divide into so many folds; one of them is the validation split. 0: none.
        fold: which one, from 1.
        seed: of all derived splits.
        by_class: take the share of every class; else by chance alone.
    """

    validation_fraction: float = 0.0
    test_fraction: float = 0.0
    group: str | None = None
    folds: int = 0
    fold: int = 1
    seed: int = 0
    by_class: bool = True

    @classmethod
    def of(cls, config: Config) -> SplitRules:
        """Returns the rules of a config."""
        return cls(
            config.validation_fraction,
            config.test_fraction,
            config.split_group,
            config.folds or 0,
            config.fold or 1,
            config.split_seed,
            not is_regression(config),
        )


def is_regression(config: Config) -> bool:
    """Returns whether the config says that labels are numbers to predict, also those that are whole numbers."""
    # The code of a built-in model is not imported here. It has the task that the option names.
    return config.task == "regression" or getattr(config.entry("model").target, "predicts_numbers", False)


def divide(dataset: Dataset, rules: SplitRules) -> Dataset:
    """Returns the dataset with the splits that the rules derive from train. Splits that it brings stay.

    Raises:
        DataError: if there are too few examples or groups, or no such column.
    """
    brings = dataset.declared_splits
    if rules.folds and VALIDATION in brings:
        raise DataError(
            "the dataset brings a validation split, and folds would divide train alone. Put both into train for "
            "cross-validation, or leave --folds out."
        )
    cuts_test = rules.test_fraction > 0 and TEST not in brings
    cuts_validation = bool(rules.folds or rules.validation_fraction > 0) and VALIDATION not in brings
    if rules.test_fraction > 0 and not cuts_test:
        log.info("test_fraction has no effect: the dataset brings a test split")
    if VALIDATION in brings and rules.validation_fraction not in (0, CORE_FIELDS["validation_fraction"].default):
        log.info("validation_fraction has no effect: the dataset brings a validation split")
    if rules.group is not None:
        _warn_about_divided_groups(dataset, rules.group)
    if not (cuts_test or cuts_validation):
        if rules.group is not None:
            log.warning("split_group has no effect: no split is derived, the dataset has %s", ", ".join(brings))
        return dataset
    groups = None if rules.group is None else group_numbers(dataset, rules.group)
    count = dataset.size(TRAIN)
    if count == 1 and not (cuts_test or rules.folds):
        return dataset
    units, word = (count, "example(s)") if groups is None else (int(groups.max()) + 1, f"group(s) of {rules.group}")
    needed = cuts_test + (max(rules.folds, 2) if cuts_validation else 1)
    if units < needed:
        raise DataError(
            f"{needed} splits or folds are asked for, but train has only {units} {word}. Each needs at least one."
        )
    whole = dataset.fingerprint() if rules.folds else ""
    labels = dataset.labels(TRAIN) if rules.by_class else None
    if labels is None and rules.by_class and label_kind(dataset.features.get(LABEL)) == "class":
        log.info("derived splits are chosen by chance alone: the dataset does not know the classes without reading all")
    cut = _Cut(labels, count, groups, rules.seed)
    rows: dict[str, Rows] = {}
    if cuts_test:
        rows[TEST] = cut.hold_out(rules.test_fraction, _TEST_DOMAIN)
    if rules.folds:
        rows[VALIDATION] = cut.fold(rules.folds, rules.fold)
    elif cuts_validation:
        rows[VALIDATION] = cut.hold_out(rules.validation_fraction, _VALIDATION_DOMAIN)
    rows = {TRAIN: np.flatnonzero(cut.free), **{split: rows[split] for split in (VALIDATION, TEST) if split in rows}}
    derived = DerivedSplits(rows, {} if groups is None else _group_counts(rows, groups), whole)
    column = "" if rules.group is None else split_group_of(rules.group)[0]
    divided = dataset.divided(derived, drop=(column,) if column not in ("", ID, IMAGE, LABEL) else ())
    for split in rows:
        if split != TRAIN:
            _warn_about(divided, dataset, split, rules, count)
    return divided


class _Cut:
    """Parts of train that are taken one after the other.

    Args:
        classes: the class of each example; None if labels are no classes.
        count: the number of examples.
        groups: the number of the group of each example; None if examples are not grouped.
        seed: of all derived splits.
    """

    def __init__(self, classes: NDArray[np.generic] | None, count: int, groups: Rows | None, seed: int) -> None:
        self.classes, self.count, self.groups, self.seed = classes, count, groups, seed
        self.free = np.ones(count, bool)
        """Which examples are still in train."""

    def hold_out(self, fraction: float, domain: int) -> Rows:
        """Takes a fraction of all examples, from those that are still in train."""
        if self.groups is None:
            taken = hold_out(self.classes, self.count, fraction, self.seed, domain, self.free)
        else:
            share = min(fraction * self.count / int(self.free.sum()), 0.999)
            taken = self._parts((1 - share, share), domain)[1]
        self.free[taken] = False
        return taken

    def fold(self, folds: int, fold: int) -> Rows:
        """Takes one of the folds of the examples that are still in train."""
        if self.groups is None:
            order = shuffled(self.classes, self.count, self.seed, _FOLD_DOMAIN)
            taken = np.sort(order[self.free[order]][fold - 1 :: folds])
        else:
            taken = self._parts((1 / folds,) * folds, _FOLD_DOMAIN)[fold - 1]
        self.free[taken] = False
        return taken

    def _parts(self, shares: Sequence[float], domain: int) -> list[Rows]:
        assert self.groups is not None
        rows = np.flatnonzero(self.free)
        classes = np.zeros(self.count, np.int64) if self.classes is None else self.classes
        part = divide_groups(self.groups[rows], classes[rows], shares, self.seed, domain)
        return [rows[part == number] for number in range(len(shares))]


# -- examples ---------------------------------------------------------------------------------------------------------


def stratified(labels: NDArray[np.generic], fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Returns the indices of the larger and of the smaller part; the smaller has ``fraction`` of every class.

    A class with a single example stays in the larger part, unless all classes have a single example.
    """
    smaller = hold_out(labels, len(labels), fraction, seed)
    return np.setdiff1d(np.arange(len(labels)), smaller).astype(np.int64), smaller


def hold_out(
    classes: NDArray[np.generic] | None,
    count: int,
    fraction: float,
    seed: int,
    domain: int = _VALIDATION_DOMAIN,
    free: NDArray[np.bool_] | None = None,
) -> Rows:
    """Returns rows to hold out: ``fraction`` of every class. At least one of two or more rows, and never all of them.

    Args:
        classes: the class of each example; None to choose by chance alone.
        count: the number of examples.
        fraction: share of all examples.
        seed: of derived splits.
        domain: separates the uses of the seed.
        free: the examples that can be taken; by default all.
    """
    free = np.ones(count, bool) if free is None else free
    left = int(free.sum())
    by_chance = permutation(seed, domain, -1, count)
    by_chance = by_chance[free[by_chance]]
    if classes is None:
        return np.sort(by_chance[: min(max(round(count * fraction), 1), left - 1)])
    chosen = []
    for members in _shuffled_classes(classes, seed, domain):
        most = round(len(members) * fraction)
        members = members[free[members]]
        chosen.append(members[: max(min(most, len(members) - 1), 0)])
    smaller = np.sort(np.concatenate(chosen))
    if len(smaller) == 0 and left > 1:
        _, numbers = np.unique(classes, return_inverse=True)
        spare = np.bincount(numbers[by_chance], minlength=int(numbers.max()) + 1)[numbers[by_chance]] > 1
        smaller = by_chance[spare][:1] if spare.any() else by_chance[:1]
    return smaller


def shuffled(classes: NDArray[np.generic] | None, count: int, seed: int, domain: int) -> Rows:
    """Returns all rows, class by class, each class by chance: dealt out in turn, every class is shared out evenly."""
    if classes is None:
        return permutation(seed, domain, -1, count)
    return np.concatenate(_shuffled_classes(classes, seed, domain))


def _shuffled_classes(classes: NDArray[np.generic], seed: int, domain: int) -> list[Rows]:
    found = [(int(label), np.flatnonzero(classes == label)) for label in np.unique(classes)]
    return [members[permutation(seed, domain, label, len(members))] for label, members in found]


# -- groups -----------------------------------------------------------------------------------------------------------


def group_numbers(dataset: Dataset, group: str) -> Rows:
    """Returns the number of the group of each training example.

    Raises:
        DataError: if there is no such column, or the regular expression does not match.
    """
    values = _group_values(dataset, group, TRAIN)
    if values is None:
        column = split_group_of(group)[0]
        known = ", ".join(dataset.columns) or "none"
        raise DataError(
            f"split_group: there is no column or feature {column!r} with one value per example. There are: {known}. "
            "For image files, take a part of the path: --split_group 'path:([^/_]+)_'."
        )
    _, numbers = np.unique(values, return_inverse=True)
    return numbers.reshape(-1).astype(np.int64)


def groups_in_two_splits(dataset: Dataset, group: str) -> list[tuple[str, str, str]]:
    """Returns the groups that are in two splits that a dataset brings: the value, the split, the other split.

    A split whose source has not read the column is left out.
    """
    found: dict[str, dict[str, None]] = {}
    for split, size in dataset.sizes().items():
        values = _group_values(dataset, group, split) if size else None
        # Numbers as ids are often those of rows, which start from 0 in each split.
        if values is not None and (split_group_of(group)[0] != ID or values.dtype.kind in "US"):
            found[split] = dict.fromkeys(map(str, values.tolist()))
    return [
        (value.replace("\0", " "), split, other)
        for split, other in itertools.combinations(sorted(found, key=lambda split: (*SPLITS, split).index(split)), 2)
        for value in found[split]
        if value in found[other]
    ]


def _warn_about_divided_groups(dataset: Dataset, group: str) -> None:
    divided = groups_in_two_splits(dataset, group)
    if divided:
        column = split_group_of(group)[0]
        pairs = Counter(f"{split} and {other}" for _, split, other in divided)
        where = ", ".join(f"{count} in {pair}" for pair, count in pairs.items())
        shown = ", ".join(value for value, *_ in divided[:_SHOWN]) + (" …" if len(divided) > _SHOWN else "")
        log.warning(
            "split_group: the dataset brings splits that divide groups of %s: %s (%s). What is learned of a group then "
            "counts as known of others: change the splits of the data",
            *(column, where, shown),
        )


def _group_values(dataset: Dataset, group: str, split: str) -> NDArray[Any] | None:
    """Returns the group of each example of a split; None if there is no such column."""
    column, pattern = split_group_of(group)
    values = dataset.column(split, column)
    if values is None:
        return None
    if values.shape != (count := dataset.size(split),):
        raise DataError(f"split_group: {column} has shape {values.shape}, not a value for each of {count} examples.")
    if pattern is not None:
        texts = [str(value) for value in values.tolist()]
        matches = [re.search(pattern, text) for text in texts]
        wrong = next((text for text, match in zip(texts, matches, strict=True) if match is None), None)
        if wrong is not None:
            raise DataError(f"split_group: {pattern!r} does not match {wrong!r}, a value of {column}.")
        values = np.array(["\0".join(part or "" for part in match.groups()) for match in matches if match is not None])
    return values


def divide_groups(
    groups: Rows, classes: NDArray[np.generic], shares: Sequence[float], seed: int, domain: int
) -> NDArray[np.int64]:
    """Returns the part of each example, so that groups stay whole and every part has its share of every class.

    The largest groups come first, each to the part that needs its classes most: the sum of the squared differences
    from the wanted counts, each divided by the wanted count, grows least. No part is empty.

    Args:
        groups: the group of each example.
        classes: the class of each example.
        shares: of the parts; their sum is 1.
        seed: orders groups of one size.
        domain: separates the uses of the seed.

    Raises:
        DataError: if there are fewer groups than parts.
    """
    names, numbers = np.unique(groups, return_inverse=True)
    if len(names) < len(shares):
        raise DataError(f"{len(names)} group(s) can't be divided into {len(shares)} parts.")
    found, labels = np.unique(classes, return_inverse=True)
    total = len(found)
    pairs, counts = np.unique(numbers * total + labels, return_counts=True)
    starts = np.searchsorted(pairs // total, np.arange(len(names) + 1))
    sizes = np.bincount(numbers)
    # The last column counts all classes.
    wanted = np.outer(shares, np.append(np.bincount(labels), len(groups)))
    have = np.zeros_like(wanted)
    order = permutation(seed, domain, -1, len(names))
    order = order[np.argsort(-sizes[order], kind="stable")]
    part = np.empty(len(names), np.int64)
    for group in order.tolist():
        mine = slice(starts[group], starts[group + 1])
        columns = np.append(pairs[mine] % total, total)
        added = np.append(counts[mine], sizes[group])
        growth = (2 * added * (have[:, columns] - wanted[:, columns]) + added**2) / wanted[:, columns]
        costs = [math.fsum(row) for row in growth.tolist()]  # exact: the same on every machine
        part[group] = costs.index(min(costs))
        have[part[group], columns] += added
    for empty in set(range(len(shares))) - set(part.tolist()):
        several = np.bincount(part, minlength=len(shares))[part[order]] > 1
        part[order[several][-1]] = empty  # the smallest group of those that can be spared
    return part[numbers]


def _group_counts(rows: dict[str, Rows], groups: Rows) -> dict[str, int]:
    return {split: len(np.unique(groups[chosen])) for split, chosen in rows.items()}


# -- what is recorded of them -----------------------------------------------------------------------------------------


def describe_splits(dataset: Dataset) -> dict[str, Any]:
    """Returns what the manifest of a run says of its splits: examples of each class, and groups.

    With folds it has the fingerprint of the data before it was divided, too: that of all folds is the same.
    """
    derived, splits = dataset.derived, {}
    for split in dataset.sizes():
        labels = dataset.labels(split)
        counts = None if labels is None else np.bincount(labels, minlength=len(dataset.classes))
        splits[split] = {
            "derived": derived is not None and split in derived.rows,
            "classes": None if counts is None else counts[:_MOST_CLASSES].tolist(),
            **({"groups": derived.groups[split]} if derived is not None and split in derived.groups else {}),
        }
    undivided = {"undivided": derived.fingerprint} if derived is not None and derived.fingerprint else {}
    left_out = {} if dataset.left_out is None else {"left_out": _described_left_out(dataset.left_out)}
    return {"splits": splits, **undivided, **left_out}


def _described_left_out(left_out: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Returns how many examples of each split were left out, and the first ones with the reason."""
    return {
        split: {"count": len(bad), "examples": dict(itertools.islice(bad.items(), _MOST_LEFT_OUT))}
        for split, bad in left_out.items()
    }


def held_out(dataset: Dataset) -> Iterator[tuple[str, int, str]]:
    """Yields the examples that were taken from train: their split, their row in the whole train split, their name."""
    for split in dataset.derived.rows if dataset.derived is not None else ():
        arrays = dataset.arrays(split)
        ids = None if arrays is None else arrays.get(ID)
        for index, row in enumerate(dataset.stored_rows(split).tolist() if split != TRAIN else ()):
            yield split, row, dataset.name(split, index) if ids is None else str(ids[index])


# -- warnings ---------------------------------------------------------------------------------------------------------


def _warn_about(divided: Dataset, whole: Dataset, split: str, rules: SplitRules, count: int) -> None:
    """Warns about classes that a derived split lacks, and about groups so large that its size is another."""
    size = divided.size(split)
    labels, found = whole.labels(TRAIN), divided.labels(split)
    if rules.by_class and labels is not None and found is not None and size >= len(divided.classes):
        missing = np.setdiff1d(labels, found)
        if len(missing):
            names = [divided.classes[int(label)] for label in missing[:_SHOWN]]
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            log.warning("no %s example of: %s%s", split, ", ".join(names), more)
    asked = rules.test_fraction if split == TEST else rules.validation_fraction
    if rules.group is not None and not (rules.folds and split == VALIDATION) and not 0.5 <= size / (asked * count) <= 2:
        log.warning(
            "the groups of %s are large: %s has %d of %d examples, %.3g of them were asked for",
            rules.group, split, size, count, asked,
        )  # fmt: skip
