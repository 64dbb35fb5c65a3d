"""The examples to predict: images or values in a user's files, with or without labels."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config.schema import Config
from modelyard.data.catalog import FilesOptions
from modelyard.data.dataset import Feature
from modelyard.data.raw_examples import RawExamples
from modelyard.data.sources.files import read_to_predict
from modelyard.errors import unknown
from modelyard.storage import cache_folder

log = logging.getLogger("modelyard")
COLUMNS = ("image_column", "label_column", "label_kind", "value_columns", *(
    name for name in FilesOptions.model_fields if name.startswith("record_")))  # fmt: skip
"""Options of columns and records. They may differ from training."""
Labelled = tuple[RawExamples, bool]
"""Examples, and whether they have labels of the run's classes."""


def open_sources(
    sources: Sequence[str], config: Config, classes: Sequence[str], columns: Mapping[str, Any], label: Feature
) -> Labelled:
    """Returns the examples at some paths, in order.

    Args:
        sources: image files, folders of them, patterns; or one .csv file, .npz file, or records.
        config: the config of the run; its dataset options are the defaults of ``columns``.
        classes: the classes of the run. Labels that are not among them are left out.
        columns: options of `COLUMNS`.
        label: shape and type of the run's labels.

    Raises:
        DataError: if there is nothing, or nothing that can be read.
    """
    known = config.options_of("dataset")
    own = known.model_dump() if isinstance(known, FilesOptions) else {}
    options = FilesOptions.model_validate({**own, **columns})
    found = read_to_predict(sources, options, cache_folder(config.cache_dir))
    examples, labels = found.examples, found.labels
    if labels is None:
        return examples, False
    if isinstance(labels, np.ndarray):
        problem = _label_mismatch(labels, label, len(classes))
    else:
        numbers = {name: number for number, name in enumerate(classes)}
        wrong = next((name for name in labels if name not in numbers), None)
        problem = None if wrong is None else unknown("class", wrong, classes)
        if problem is None:
            examples.labels = np.array([numbers[name] for name in labels], np.int32)
    if problem is None:
        return examples, True
    if not found.from_folders:  # folders may have other names for other reasons
        log.warning("labels are left out: %s", problem)
    examples.labels = np.zeros(len(examples), np.int32)
    return examples, False


def _label_mismatch(labels: NDArray[np.generic], label: Feature, classes: int) -> str | None:
    """Returns how ``labels`` differ from those of a run with ``classes`` classes; None if they do not."""
    if labels.shape[1:] != label.shape:
        return f"each has shape {labels.shape[1:]}, those of the run {label.shape}"
    if labels.dtype.kind not in "biuf":
        return f"they are {labels.dtype}, those of the run {label.dtype}"
    numbers = labels.astype(np.float64)
    if np.dtype(label.dtype).kind == "f":
        return None if np.isfinite(numbers).all() else "some are not finite"
    most = 1 if label.shape else classes - 1
    wrong = ~((numbers >= 0) & (numbers <= most) & (numbers == np.trunc(numbers)))
    if not wrong.any():
        return None
    found = f"there is a {numbers[wrong][0]:g}"
    return f"{found}, and flags are 0 or 1" if label.shape else f"{found}, and the run has {classes} classes"
