"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100, from their official files or an .npz, in ``data_dir``."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import TEST, TRAIN, ArrayDataset, Arrays, DataContext, Dataset
from modelyard.data.sources.npz import read_npz
from modelyard.data.splits import with_validation
from modelyard.errors import DataError
from modelyard.registry import Options

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

_IDX_FILES = {
    TRAIN: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    TEST: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def mnist(options: Options, context: DataContext) -> Dataset:
    """MNIST from its IDX files, plain or .gz."""
    return _idx("mnist", context, tuple(str(i) for i in range(10)))


def fashion_mnist(options: Options, context: DataContext) -> Dataset:
    """Fashion-MNIST from its IDX files, plain or .gz."""
    return _idx("fashion_mnist", context, FASHION_CLASSES)


def cifar10(options: Options, context: DataContext) -> Dataset:
    """CIFAR-10 from the python version: the archive or the folder in it."""
    batches = {TRAIN: [f"data_batch_{i}" for i in range(1, 6)], TEST: ["test_batch"]}
    return _cifar("cifar10", "cifar-10-batches-py", "cifar-10-python.tar.gz", batches, "labels", context)


def cifar100(options: Options, context: DataContext) -> Dataset:
    """CIFAR-100 with its fine labels, from the python version: the archive or the folder in it."""
    batches = {TRAIN: ["train"], TEST: ["test"]}
    return _cifar("cifar100", "cifar-100-python", "cifar-100-python.tar.gz", batches, "fine_labels", context)


def _places(name: str, context: DataContext) -> list[Path]:
    """``--data_dir data`` may be the folder of all datasets or of this one."""
    return [context.data_dir / name, context.data_dir]


def _npz_of(name: str, context: DataContext) -> Path | None:
    return next((p / f"{name}.npz" for p in _places(name, context) if (p / f"{name}.npz").is_file()), None)


def _missing(name: str, context: DataContext, files: str) -> DataError:
    return DataError(
        f"{name} is not in {context.data_dir}: `modelyard data fetch {name}` downloads it. "
        f"Or put {files} or {name}.npz there, or name another folder with --data_dir."
    )


def _finish(splits: dict[str, Arrays], classes: tuple[str, ...] | None, context: DataContext) -> Dataset:
    return ArrayDataset(with_validation(splits, context.validation_fraction, context.split_seed), classes)


def _named(dataset: Dataset, classes: tuple[str, ...] | None) -> Dataset:
    """An .npz without class names gets the official ones."""
    unnamed = dataset.classes == tuple(str(i) for i in range(len(dataset.classes)))
    if classes is not None and unnamed and len(dataset.classes) <= len(classes):
        dataset.classes = classes
    return dataset


# -- MNIST's IDX files ----------------------------------------------------------------------------------------------


def _idx(name: str, context: DataContext, classes: tuple[str, ...]) -> Dataset:
    npz = _npz_of(name, context)
    if npz is not None:
        return _named(read_npz(npz, context), classes)
    splits: dict[str, Arrays] = {}
    for split, files in _IDX_FILES.items():
        paths = [_idx_path(name, file, context) for file in files]
        images, labels = (_read_idx(path) for path in paths)
        if len(images) != len(labels):
            raise DataError(f"{paths[0]} holds {len(images)} images, {paths[1]} {len(labels)} labels.")
        splits[split] = {"image": images, "label": labels}
    return _finish(splits, classes, context)


def _idx_path(name: str, file: str, context: DataContext) -> Path:
    for folder in _places(name, context):
        for variant in (file, file + ".gz", file.replace("-idx", ".idx"), file.replace("-idx", ".idx") + ".gz"):
            if (folder / variant).is_file():
                return folder / variant
    raise _missing(name, context, f"{file}.gz and the other three IDX files")


def _read_idx(path: Path) -> NDArray[np.uint8]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or raw[3] == 0 or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is no IDX file of bytes.")
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3]))
    offset = 4 + 4 * raw[3]
    expected = int(np.prod(shape, dtype=object))
    if len(raw) - offset != expected:
        raise DataError(f"{path} is cut off or damaged: {len(raw) - offset} bytes of data where {expected} belong.")
    return np.frombuffer(raw, np.uint8, offset=offset).reshape(shape)


# -- CIFAR's pickles ------------------------------------------------------------------------------------------------


def _cifar(
    name: str, folder: str, archive: str, batches: dict[str, list[str]], label_key: str, context: DataContext
) -> Dataset:
    official = CIFAR10_CLASSES if name == "cifar10" else None
    npz = _npz_of(name, context)
    if npz is not None:
        return _named(read_npz(npz, context), official)
    read = next(_cifar_readers(name, folder, archive, context), None)
    if read is None:
        raise _missing(name, context, f"{archive} or the folder {folder}")
    splits: dict[str, Arrays] = {}
    for split, files in batches.items():
        parts = [_cifar_batch(read, file, label_key) for file in files]
        images = np.concatenate([part[0] for part in parts])
        labels = np.concatenate([part[1] for part in parts])
        splits[split] = {"image": images, "label": labels}
    if official is None:
        try:
            official = tuple(n.decode() for n in load_plain_pickle(read("meta"), "meta")[b"fine_label_names"])
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise DataError(f"the file meta of {name} holds no fine_label_names.") from error
    return _finish(splits, official, context)


def _cifar_readers(name: str, folder: str, archive: str, context: DataContext) -> Iterator[Callable[[str], bytes]]:
    for place in _places(name, context):
        if (place / folder).is_dir():
            yield partial(_file_of, place / folder)
        elif (place / archive).is_file():
            yield _members_of(place / archive, folder)


def _file_of(folder: Path, file: str) -> bytes:
    try:
        return (folder / file).read_bytes()
    except OSError as error:
        raise DataError(f"{folder / file} can't be read: {error.strerror}.") from error


def _members_of(archive: Path, folder: str) -> Callable[[str], bytes]:
    """The files of the archive, read in place and to its end, where the checksum stands: nothing is unpacked."""
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None and member.name.startswith(f"{folder}/"):
                    members[member.name] = content.read()
            while tar.fileobj is not None and tar.fileobj.read(1 << 20):
                pass
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is damaged or not the official archive ({error}).") from error

    def read(file: str) -> bytes:
        if f"{folder}/{file}" not in members:
            raise DataError(f"{archive} is damaged or not the official archive: it has no {folder}/{file}.")
        return members[f"{folder}/{file}"]

    return read


def _cifar_batch(
    read: Callable[[str], bytes], file: str, label_key: str
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    batch = load_plain_pickle(read(file), file)
    try:
        images = np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = np.asarray(batch[label_key.encode()], np.int32)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{file} is not a CIFAR batch: {error}") from error
    if labels.shape != (len(images),):
        raise DataError(f"{file} is not a CIFAR batch: {len(images)} images, but labels of shape {labels.shape}.")
    return np.ascontiguousarray(images), labels


class _PlainUnpickler(pickle.Unpickler):
    """Loads arrays and basic types. A pickle that names anything else could run code, and is refused."""

    _MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")

    def find_class(self, module: str, name: str) -> Any:
        """The few names a pickle of arrays needs."""
        if module in self._MULTIARRAY and name == "_reconstruct":
            return _reconstruct
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which a file of arrays does not need")


def _reconstruct(subtype: Any, shape: Any, dtype: Any) -> NDArray[Any]:
    if subtype is not np.ndarray:
        raise pickle.UnpicklingError("it holds something that is no array")
    return np.ndarray.__new__(np.ndarray, shape, dtype)


def load_plain_pickle(raw: bytes, name: str) -> Any:
    """The content of a pickle of arrays and basic types.

    Raises:
        DataError: if it is damaged or names anything else.
    """
    try:
        return _PlainUnpickler(io.BytesIO(raw), encoding="bytes").load()
    except Exception as error:
        raise DataError(f"{name} was refused: {error}.") from error
