"""A user's own arrays in one .npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from modelyard.data.dataset import TEST, TRAIN, VALIDATION, ArrayDataset, Arrays, DataContext, Dataset
from modelyard.data.splits import with_validation
from modelyard.errors import DataError, UserError
from modelyard.registry import Options

_NAMES = {TRAIN: ("train",), VALIDATION: ("validation", "val"), TEST: ("test",)}


def read_npz(path: Path, context: DataContext) -> Dataset:
    """The splits in ``path``: x_train, y_train, and the same for validation and test where they exist.

    Raises:
        DataError: if the file is missing, is no .npz, or holds Python objects (those could run code and are refused).
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: dict[str, Any] = {name: file[name] for name in file.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path} can't be read as an .npz file of plain arrays: {error}") from error
    splits: dict[str, Arrays] = {}
    for split, names in _NAMES.items():
        for name in names:
            if f"x_{name}" in arrays and f"y_{name}" in arrays:
                splits[split] = {"image": arrays[f"x_{name}"], "label": arrays[f"y_{name}"]}
    if TRAIN not in splits:
        raise DataError(
            f"{path} must hold arrays named x_train and y_train; it holds: {', '.join(arrays) or 'nothing'}."
        )
    classes = [str(name) for name in arrays["classes"].tolist()] if "classes" in arrays else None
    for split, part in splits.items():
        if len(part["image"]) != len(part["label"]):
            raise DataError(f"{path}: {len(part['image'])} images but {len(part['label'])} labels for {split}.")
    return ArrayDataset(with_validation(splits, context.validation_fraction, context.split_seed), classes)


def named_file(options: Options, context: DataContext) -> Dataset:
    """The name ``npz`` alone names no file."""
    raise UserError("to train on your own arrays, give the file: --dataset FILE.npz")
