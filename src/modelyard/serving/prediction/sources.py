"""The examples to predict: those of a user's files, with labels or without."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from modelyard.config.schema import Config
from modelyard.data.catalog import FilesOptions
from modelyard.data.dataset import Feature
from modelyard.data.raw_examples import RawExamples
from modelyard.data.sources.files import read_to_predict
from modelyard.errors import unknown
from modelyard.serving.prediction.truth import why_no_truth
from modelyard.storage import cache_folder

log = logging.getLogger("modelyard")
COLUMNS = ("image_column", "label_column", "label_kind", "value_columns", *(
    name for name in FilesOptions.model_fields if name.startswith("record_")))  # fmt: skip
"""Options of tables and records. They may differ from those of training."""


@dataclass(frozen=True)
class ToPredict:
    """The examples, and whether their labels are of the run's classes."""

    items: RawExamples
    labelled: bool


def open_sources(
    sources: Sequence[str], config: Config, classes: Sequence[str], columns: Mapping[str, Any], label: Feature
) -> ToPredict:
    """Opens the examples at some paths, in their order.

    Args:
        sources: image files, folders of them, patterns; or one .csv file, .npz file, or records.
        config: of the run: how it reads tables and records.
        classes: of the run; labels with these names are the truth.
        columns: options of `COLUMNS` that differ from training.
        label: of an example of the run; other labels are left out.

    Raises:
        DataError: if there is nothing, or nothing that can be read.
    """
    known = config.options_of("dataset")
    own = known.model_dump() if isinstance(known, FilesOptions) else {}
    options = FilesOptions.model_validate({**own, **columns})
    found = read_to_predict(sources, options, cache_folder(config.cache_dir))
    examples, labels = found.examples, found.labels
    if labels is None:
        return ToPredict(examples, labelled=False)
    if isinstance(labels, np.ndarray):
        problem = why_no_truth(labels, label, len(classes))
    else:
        numbers = {name: number for number, name in enumerate(classes)}
        wrong = next((name for name in labels if name not in numbers), None)
        problem = None if wrong is None else unknown("class", wrong, classes)
        if problem is None:
            examples.labels = np.array([numbers[name] for name in labels], np.int32)
    if problem is None:
        return ToPredict(examples, labelled=True)
    if not found.from_folders:
        log.warning("labels are left out: %s", problem)
    examples.labels = np.zeros(len(examples), np.int32)
    return ToPredict(examples, labelled=False)
