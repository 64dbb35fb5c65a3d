"""A user's own arrays: one .npz file, or .npy files in a folder."""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import ID, TEST, TRAIN, VALIDATION, ArrayDataset, Arrays, DataContext
from modelyard.errors import DataError
from modelyard.system.untrusted import check_archive, check_memory, open_regular

_MOST_CLASSES = 1 << 20
_NAMES = {TRAIN: ("train",), VALIDATION: ("validation", "val"), TEST: ("test",)}
_ARRAYS = (*(f"{axis}_{name}" for names in _NAMES.values() for name in names for axis in "xy"), "classes")
_MAPPED = "Save the arrays as .npy files in a folder, which are memory-mapped."
_TO_PREDICT = ("image", "images", "x", "x_test", "x_validation", "x_val", "x_train")


def read_npz(path: Path, context: DataContext) -> ArrayDataset:
    """Reads the splits in ``path``: x_train, y_train, and likewise validation and test if they exist.

    Raises:
        DataError: if the file is missing, is not an .npz file, or holds Python objects (those could run code).
    """
    with _open(path, "save x_train and y_train with numpy.savez") as file:
        return _dataset(path, file.names(), file.read, context)


def read_npz_to_predict(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Reads the images of one split in ``path``, and their labels if it has some.

    Raises:
        DataError: if the file can't be read, or it is not clear which array to read.
    """
    with _open(path, "save it with numpy.savez(path, x=…)") as file:
        names = file.names()
        name = next((name for name in _TO_PREDICT if name in names), next(iter(names), ""))
        if len(names) > 1 and name not in _TO_PREDICT:
            raise DataError(f"{path} must hold images named x or image; it holds: {_shown(names)}.")
        images: NDArray[Any] = file.read(name) if name else np.empty(0)
        label = "label" if name in ("image", "images") else "y" + name[1:]
        labels = file.read(label) if label in names else None
    if images.ndim < 2 or not len(images):
        raise DataError(f"{path}: {name or 'its array'} has shape {images.shape}; examples are needed.")
    if labels is not None and not labels.ndim:
        raise DataError(f"{path}: {label} is a single value; a label per example is needed.")
    if labels is not None and len(labels) != len(images):
        raise DataError(f"{path}: {len(images)} examples but {len(labels)} labels.")
    return images[..., None] if images.ndim == 3 else images, labels


def read_npz_inputs(path: Path, names: Sequence[str]) -> tuple[dict[str, NDArray[Any]], NDArray[Any] | None]:
    """Reads the arrays in ``path`` that have one of these names, and the labels: ``label`` or ``y``.

    Raises:
        DataError: if the file can't be read.
    """
    with _open(path, "save it with numpy.savez(path, NAME=…), an array per input") as file:
        present = file.names()
        label = next((name for name in ("label", "y") if name in present and name not in names), None)
        arrays = {name: file.read(name) for name in names if name in present}
        return arrays, None if label is None else file.read(label)


def read_npy_to_predict(path: Path) -> NDArray[Any]:
    """Reads the images in a .npy file, memory-mapped.

    Raises:
        DataError: if it can't be read, or holds Python objects.
    """
    with _readable(path, ".npy file of a plain array"), open_regular(path, DataError) as file:
        _check_header(file, os.fstat(file.fileno()).st_size)
        images: NDArray[Any] = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    if images.ndim < 2 or not len(images):
        raise DataError(f"{path}: its array has shape {images.shape}; examples are needed, the first axis counts them.")
    return images[..., None] if images.ndim == 3 else images


def read_npy_folder(folder: Path, context: DataContext) -> ArrayDataset:
    """Reads x_train.npy, y_train.npy and so on in ``folder``; images are memory-mapped.

    If a validation split is derived from train, both are copied.

    Raises:
        DataError: if a file is missing, damaged, or holds Python objects.
    """

    def read(name: str) -> NDArray[Any]:
        path = folder / f"{name}.npy"
        with _readable(path, ".npy file of a plain array"), open_regular(path, DataError) as file:
            size = os.fstat(file.fileno()).st_size
            needed = _check_header(file, size)
            if name.startswith("x_"):
                return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
            check_memory(path, needed, DataError)
            file.seek(0)
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))

    names = [*_ARRAYS, *([f"{context.split_group}_train"] if context.split_group else [])]
    present = [name for name in names if os.path.lexists(folder / f"{name}.npy")]  # a link may lead nowhere
    return _dataset(folder, present, read, context)


def _shown(names: Sequence[str], most: int = 20) -> str:
    """Returns the first of the names that a file has; it may have any number of them."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(name[:100] for name in names[:most])}{more}" if names else "nothing"


class _Npz:
    """The arrays of an open .npz file. No Python object is made from it."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self.path, self.archive = path, archive

    def names(self) -> list[str]:
        return [name.removesuffix(".npy") for name in self.archive.namelist() if name.endswith(".npy")]

    def read(self, name: str) -> NDArray[Any]:
        member = self.archive.getinfo(f"{name}.npy")
        with self.archive.open(member) as file:
            needed = _check_header(file, member.file_size)
        check_memory(self.path, needed, DataError, _MAPPED)
        with self.archive.open(member) as file:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _check_header(file: IO[bytes], size: int) -> int:
    """Returns the bytes of an array in a .npy file of ``size`` bytes.

    Raises:
        ValueError: if it is not a plain array that the file holds.
    """
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format is for arrays with fields")
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, _, dtype = readers[version](file)
    if dtype.hasobject or dtype.kind == "V" or not dtype.itemsize:
        raise ValueError(f"it holds values of type {dtype}")
    needed: int = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or needed > size - file.tell():
        raise ValueError(f"its header declares {needed:,} bytes of values, but it has {size - file.tell():,}")
    return needed


@contextlib.contextmanager
def _open(path: Path, advice: str) -> Iterator[_Npz]:
    with _readable(path, ".npz file of plain arrays"), open_regular(path, DataError) as file:
        if file.read(6) == b"\x93NUMPY":
            file.seek(0)
            _check_header(file, os.fstat(file.fileno()).st_size)
            raise DataError(f"{path} is a single array (.npy); {advice}.")
        with zipfile.ZipFile(file) as archive:
            check_archive(path, archive, DataError)
            yield _Npz(path, archive)


@contextlib.contextmanager
def _readable(path: Path, as_what: str) -> Iterator[None]:
    """Raises the errors of damaged files as errors about ``path``."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}.") from error
    except Exception as error:  # of the zip, of its compression, of NumPy, of Python's parser for the header
        raise DataError(f"{path} can't be read as an {as_what}: {error}") from error


def _dataset(
    path: Path, names: Sequence[str], read: Callable[[str], NDArray[Any]], context: DataContext
) -> ArrayDataset:
    """Returns the dataset of the arrays with these names, which ``read`` returns."""
    arrays = {name: read(name) for name in _ARRAYS if name in names}
    splits: dict[str, Arrays] = {}
    for split, endings in _NAMES.items():
        for name in endings:
            if (f"x_{name}" in arrays) != (f"y_{name}" in arrays):
                raise DataError(f"{path} holds only one of x_{name} and y_{name}; images need labels.")
            if f"x_{name}" in arrays:
                splits[split] = {"image": arrays[f"x_{name}"], "label": arrays[f"y_{name}"]}
    if TRAIN not in splits:
        raise DataError(f"{path} must hold arrays named x_train and y_train; it holds: {_shown(names)}.")
    if "classes" in arrays and arrays["classes"].ndim != 1:
        raise DataError(f"{path}: classes must be a list of names, got shape {arrays['classes'].shape}.")
    if "classes" in arrays and len(arrays["classes"]) > _MOST_CLASSES:
        raise DataError(
            f"{path}: classes has {len(arrays['classes']):,} names; at most {_MOST_CLASSES:,} are supported."
        )
    classes = [str(name) for name in arrays["classes"].tolist()] if "classes" in arrays else None
    for split, part in splits.items():
        if part["image"].ndim and part["label"].ndim and len(part["image"]) != len(part["label"]):
            raise DataError(f"{path}: {len(part['image'])} images but {len(part['label'])} labels for {split}.")
    dataset = ArrayDataset(splits, classes)
    if context.split_group not in ("", ID):
        dataset.extra[context.split_group] = _groups(path, names, read, context.split_group, dataset.size(TRAIN))
    return dataset


def _groups(
    path: Path, names: Sequence[str], read: Callable[[str], NDArray[Any]], group: str, count: int
) -> NDArray[Any]:
    """Reads the array by which the training examples are grouped."""
    if f"{group}_train" not in names:
        raise DataError(f"{path} has no array {group}_train for split_group; it holds: {_shown(names)}.")
    groups = read(f"{group}_train")
    if groups.shape != (count,):
        raise DataError(f"{path}: {group}_train has shape {groups.shape}; it needs a value per image, {count}.")
    return groups
