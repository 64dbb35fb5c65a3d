"""From a config to its dataset."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from modelyard.config.schema import Config, is_path
from modelyard.data.dataset import LABEL, TRAIN, VALIDATION, DataContext, Dataset, label_kind
from modelyard.data.preprocess import with_example_preprocessing
from modelyard.data.sources.generator import GeneratorDataset
from modelyard.errors import DataError
from modelyard.storage import cache_folder

log = logging.getLogger("modelyard")


def load_dataset(config: Config) -> Dataset:
    """The dataset that ``config`` names, with the user's own preprocessing of examples."""
    dataset = open_dataset(config, config.validation_fraction)
    _warn(dataset)
    return with_example_preprocessing(dataset, config.preprocess)


def _warn(dataset: Dataset) -> None:
    """Says what may be meant so, but makes poor results."""
    _warn_of_labels(dataset)
    labels = dataset.labels(TRAIN)
    if labels is not None and dataset.classes:
        counts = np.bincount(labels, minlength=len(dataset.classes))
        empty = [name for name, count in zip(dataset.classes, counts, strict=False) if not count]
        if empty:
            more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
            log.warning("no training example of: %s%s", ", ".join(empty[:5]), more)
        if len(dataset.classes) == 1:
            log.warning("there is only one class, %s: nothing to tell apart", dataset.classes[0])
        if len(dataset.classes) > max(20, len(labels) // 4) and all(map(_is_number, dataset.classes)):
            log.warning("each of %d numbers is a class; to learn values: --label_kind numbers", len(dataset.classes))
    validation = dataset.sizes().get(VALIDATION)
    if validation is not None and validation < len(dataset.classes):
        log.warning(
            "validation has %d example(s) for %d classes: its scores say little; see --validation_fraction",
            validation,
            len(dataset.classes),
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _warn_of_labels(dataset: Dataset) -> None:
    """Classes that were saved as something else."""
    kind, arrays = label_kind(dataset.features.get(LABEL)), dataset.arrays(TRAIN)
    if kind in ("class", "none") or arrays is None:
        return
    labels = np.asarray(arrays[LABEL])
    if kind == "flags" and bool((labels.sum(axis=1) == 1).all()):
        log.warning("every training example has exactly one class: if that is so by nature, save labels.argmax(axis=1)")
    whole = labels.ndim == 1 and kind == "values" and bool((labels == np.rint(labels)).all())
    if whole and labels.min() >= 0 and len(np.unique(labels)) < 100:
        log.warning("labels are floats, so they are taken for values; if they are classes, save them as whole numbers")


def open_dataset(config: Config, validation_fraction: float) -> Dataset:
    """The dataset that ``config`` names, as it is stored.

    Args:
        config: the resolved config.
        validation_fraction: share of train to set aside where there is no validation split; 0 for none.
    """
    context = DataContext(
        Path(config.data_dir).expanduser(),
        config.split_seed,
        validation_fraction,
        cache_folder(config.cache_dir),
        config.dataset if is_path(config.dataset) else "",
    )
    entry, options = config.entry("dataset"), config.options_of("dataset")
    loaded = entry.load()(options, context)
    if isinstance(loaded, GeneratorDataset):
        from modelyard.data.sources.generated import materialise

        return materialise(loaded, entry, options, context)
    if not isinstance(loaded, Dataset):
        raise DataError(
            f"the dataset {config.dataset!r} returned {type(loaded).__name__}; it must return a modelyard.Dataset, "
            "such as modelyard.ArrayDataset({'train': {'image': …, 'label': …}})."
        )
    return loaded
