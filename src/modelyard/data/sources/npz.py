"""A user's own arrays: one .npz file, or .npy files in a folder."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from modelyard.data.dataset import TEST, TRAIN, VALIDATION, ArrayDataset, Arrays, DataContext
from modelyard.data.splits import with_validation
from modelyard.errors import DataError

# What a damaged file can raise, depending on the byte: the zip, its compression, or the header of an array.
UNREADABLE = (
    ValueError, OSError, EOFError, KeyError, RuntimeError, MemoryError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError, SyntaxError,
)  # fmt: skip
_NAMES = {TRAIN: ("train",), VALIDATION: ("validation", "val"), TEST: ("test",)}


def read_npz(path: Path, context: DataContext) -> ArrayDataset:
    """The splits in ``path``: x_train, y_train, and the same for validation and test where they exist.

    Raises:
        DataError: if the file is missing, is no .npz, or holds Python objects (those could run code and are refused).
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}.")
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(f"{path} is a single array (.npy); save x_train and y_train with numpy.savez.")
        with loaded as file:
            arrays: dict[str, Any] = {name: np.asarray(file[name]) for name in file.files}
    except UNREADABLE as error:
        raise DataError(f"{path} can't be read as an .npz file of plain arrays: {error}") from error
    return _dataset(path, arrays, context)


def read_npy_folder(folder: Path, context: DataContext) -> ArrayDataset:
    """The same from x_train.npy, y_train.npy and so on in ``folder``; mapped into memory, not loaded.

    Without a validation split they are copied: one is taken from train.

    Raises:
        DataError: if a file is missing, damaged, or holds Python objects.
    """
    arrays: dict[str, Any] = {}
    names = [f"{axis}_{name}" for names in _NAMES.values() for name in names for axis in "xy"]
    for name in (*names, "classes"):
        path = folder / f"{name}.npy"
        if path.is_file():
            try:
                arrays[name] = np.load(path, mmap_mode="r" if name.startswith("x_") else None, allow_pickle=False)
            except UNREADABLE as error:
                raise DataError(f"{path} can't be read as an .npy file of a plain array: {error}") from error
    return _dataset(folder, arrays, context)


def _dataset(path: Path, arrays: dict[str, Any], context: DataContext) -> ArrayDataset:
    splits: dict[str, Arrays] = {}
    for split, names in _NAMES.items():
        for name in names:
            if (f"x_{name}" in arrays) != (f"y_{name}" in arrays):
                raise DataError(f"{path} holds only one of x_{name} and y_{name}; images need labels.")
            if f"x_{name}" in arrays:
                splits[split] = {"image": arrays[f"x_{name}"], "label": arrays[f"y_{name}"]}
    if TRAIN not in splits:
        raise DataError(
            f"{path} must hold arrays named x_train and y_train; it holds: {', '.join(arrays) or 'nothing'}."
        )
    if "classes" in arrays and arrays["classes"].ndim != 1:
        raise DataError(f"{path}: classes must be a list of names, got shape {arrays['classes'].shape}.")
    classes = [str(name) for name in arrays["classes"].tolist()] if "classes" in arrays else None
    for split, part in splits.items():
        if part["image"].ndim and part["label"].ndim and len(part["image"]) != len(part["label"]):
            raise DataError(f"{path}: {len(part['image'])} images but {len(part['label'])} labels for {split}.")
    return ArrayDataset(with_validation(splits, context.validation_fraction, context.split_seed), classes)
