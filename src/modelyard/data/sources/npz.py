"""A user's own arrays: one .npz file, or .npy files in a folder."""

from __future__ import annotations

import contextlib
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import TEST, TRAIN, VALIDATION, ArrayDataset, Arrays, DataContext
from modelyard.errors import DataError

# The errors of damaged files: of the zip, of its compression, or of the header of an array.
_UNREADABLE = (
    ValueError, OSError, EOFError, KeyError, RuntimeError, MemoryError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError, SyntaxError,
)  # fmt: skip
_NAMES = {TRAIN: ("train",), VALIDATION: ("validation", "val"), TEST: ("test",)}
_TO_PREDICT = ("image", "images", "x", "x_test", "x_validation", "x_val", "x_train")


def read_npz(path: Path, context: DataContext) -> ArrayDataset:
    """Reads the splits in ``path``: x_train, y_train, and likewise validation and test if they exist.

    Raises:
        DataError: if the file is missing, is not an .npz file, or holds Python objects (those could run code).
    """
    with _open(path, "save x_train and y_train with numpy.savez") as file:
        arrays = {name: np.asarray(file[name]) for name in file}
    return _dataset(path, arrays, context)


def read_npz_to_predict(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Reads the images of one split in ``path``, and their labels if it has some.

    Raises:
        DataError: if the file can't be read, or it is not clear which array to read.
    """
    with _open(path, "save it with numpy.savez(path, x=…)") as file:
        name = next((name for name in _TO_PREDICT if name in file), next(iter(file), ""))
        if len(file) > 1 and name not in _TO_PREDICT:
            raise DataError(f"{path} must hold images named x or image; it holds: {', '.join(file)}.")
        images: NDArray[Any] = np.asarray(file[name]) if name else np.empty(0)
        label = "label" if name in ("image", "images") else "y" + name[1:]
        labels = np.asarray(file[label]) if label in file else None
    if images.ndim < 2 or not len(images):
        raise DataError(f"{path}: {name or 'its array'} has shape {images.shape}; examples are needed.")
    if labels is not None and len(labels) != len(images):
        raise DataError(f"{path}: {len(images)} examples but {len(labels)} labels.")
    return images[..., None] if images.ndim == 3 else images, labels


def read_npy_folder(folder: Path, context: DataContext) -> ArrayDataset:
    """Reads x_train.npy, y_train.npy and so on in ``folder``; images are memory-mapped.

    If a validation split is derived from train, both are copied.

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
            except _UNREADABLE as error:
                raise DataError(f"{path} can't be read as an .npy file of a plain array: {error}") from error
    return _dataset(folder, arrays, context)


@contextlib.contextmanager
def _open(path: Path, advice: str) -> Iterator[Mapping[str, NDArray[Any]]]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(f"{path} is a single array (.npy); {advice}.")
        with loaded as file:
            yield file
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}.") from error
    except _UNREADABLE as error:
        raise DataError(f"{path} can't be read as an .npz file of plain arrays: {error}") from error


def _dataset(path: Path, arrays: Mapping[str, Any], context: DataContext) -> ArrayDataset:
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
    return ArrayDataset(splits, classes).with_validation(context)
