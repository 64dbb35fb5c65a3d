"""Opens the dataset that a config names."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from modelyard.config.schema import Config, is_path, split_group_of
from modelyard.data.dataset import (
    LABEL,
    TRAIN,
    VALIDATION,
    DataContext,
    Dataset,
    GeneratorDataset,
    check_dataset,
    label_kind,
)
from modelyard.data.kept_dataset import load_kept
from modelyard.data.preprocess import with_example_preprocessing
from modelyard.data.splits import SplitRules, divide, is_regression
from modelyard.errors import DataError
from modelyard.storage import cache_folder
from modelyard.system.machine import available_cores

log = logging.getLogger("modelyard")


def load_dataset(config: Config, *, kept: bool = False) -> Dataset:
    """Returns the dataset of a config, with the user's preprocessing of examples.

    Args:
        config: the resolved config.
        kept: whether it may be that of the last run of this process, and is kept for the next one.
    """
    dataset = load_kept(config, open_dataset) if kept else open_dataset(config)
    if not is_regression(config):
        _warn_about_labels(dataset)
        _warn_about_classes(dataset)
    return with_example_preprocessing(dataset, config.preprocess)


def open_dataset(config: Config) -> Dataset:
    """Returns the dataset of a config as a run reads it, before the user's preprocessing.

    Bad examples are left out if the config says so, then splits are derived from train.
    """
    dataset = open_stored(config)
    if config.on_bad == "skip":
        from modelyard.data.left_out import leave_out_bad

        dataset = leave_out_bad(dataset, cache_folder(config.cache_dir), config.input_threads or available_cores())
    return divide(dataset, SplitRules.of(config))


def open_stored(config: Config) -> Dataset:
    """Returns the dataset of a config as it is stored, with the splits that it brings."""
    context = DataContext(
        Path(config.data_dir).expanduser(),
        config.split_seed,
        config.validation_fraction,
        cache_folder(config.cache_dir),
        config.dataset if is_path(config.dataset) else "",
        "" if config.split_group is None else split_group_of(config.split_group)[0],
        config.given_dataset,
    )
    entry, options = config.entry("dataset"), config.options_of("dataset")
    dataset = entry.load()(options, context)
    if isinstance(dataset, GeneratorDataset):
        from modelyard.data.sources.generated import materialise

        return materialise(dataset, entry, options, context)
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"the dataset {config.dataset!r} returned {type(dataset).__name__}; it must return a modelyard.Dataset, "
            "such as modelyard.ArrayDataset({'train': {'image': …, 'label': …}})."
        )
    if not type(dataset).__module__.startswith("modelyard."):
        check_dataset(dataset)
    return dataset


def _warn_about_labels(dataset: Dataset) -> None:
    """Warns about labels that are probably class indices, but have another type."""
    kind, arrays = label_kind(dataset.features.get(LABEL)), dataset.arrays(TRAIN)
    if kind in ("class", "map", "none") or arrays is None:
        return
    labels = np.asarray(arrays[LABEL])
    if kind == "flags" and bool((labels.sum(axis=1) == 1).all()):
        log.warning(
            "labels are rows of 0 and 1, so this is multi-label, but every training example has exactly one class. If "
            "classes exclude each other, save their indices: y.argmax(axis=1)"
        )
    if kind == "values" and labels.ndim == 2 and bool(((labels == 0) | (labels == 1)).all()):
        log.warning(
            "labels are rows of 0 and 1 as floats, so this is a regression. If each number says whether a class "
            "applies, save them as whole numbers, for multi-label: y.astype('uint8'). If classes exclude each other, "
            "save their indices: y.argmax(axis=1)"
        )
    whole = labels.ndim == 1 and kind == "values" and bool((labels == np.rint(labels)).all())
    if whole and labels.min() >= 0 and len(np.unique(labels)) < 100:
        log.warning("labels are floats, so this is a regression. If they are classes, save them as whole numbers")


def _warn_about_classes(dataset: Dataset) -> None:
    labels, classes = dataset.labels(TRAIN), dataset.classes
    if labels is not None and classes:
        counts = np.bincount(labels, minlength=len(classes))
        empty = [name for name, count in zip(classes, counts, strict=False) if not count]
        if empty:
            more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
            log.warning("no training example of: %s%s", ", ".join(empty[:5]), more)
        if len(classes) == 1:
            log.warning("there is only one class, %s: the model has nothing to learn", classes[0])
        if len(classes) > max(20, len(labels) // 4) and all(map(_is_number, classes)):
            log.warning(
                "each of %d numbers is a class. For a regression, save the labels as floats, or for a .csv use "
                "--label_kind numbers",
                len(classes),
            )
    validation = dataset.sizes().get(VALIDATION)
    if validation is not None and validation < len(classes):
        log.warning(
            "validation has %d example(s) for %d classes: its metrics mean little; see --validation_fraction",
            validation,
            len(classes),
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
