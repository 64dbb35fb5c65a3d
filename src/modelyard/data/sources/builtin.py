"""The built-in datasets.

Digits comes with scikit-learn, the synthetic dataset is computed. MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 are read
from their official files, or from NAME.npz, in ``data_dir``.
"""

from __future__ import annotations

import math
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.catalog import SyntheticOptions
from modelyard.data.dataset import TEST, TRAIN, VALIDATION, ArrayDataset, Arrays, DataContext, Dataset
from modelyard.data.order import raw_draws
from modelyard.data.sources.npz import read_npz
from modelyard.data.sources.plain_pickle import load_plain_pickle
from modelyard.data.splits import stratified
from modelyard.errors import DataError
from modelyard.registry import Options
from modelyard.system.untrusted import check_expansion, inflated, open_regular, read_regular

FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

_TEST_FRACTION, _TEST_SEED = 0.2, 0
_PATTERNS, _NOISE = 0x7061747465726E, 0x6E6F697365


def digits(options: Options, context: DataContext) -> Dataset:
    """1,797 images of 8×8 grey values. The test split does not depend on a seed."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = np.rint(loaded.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = loaded.target.astype(np.int32)
    splits = {
        split: {"image": images[rows], "label": labels[rows], "id": rows}
        for split, rows in zip((TRAIN, TEST), stratified(labels, _TEST_FRACTION, _TEST_SEED), strict=True)
    }
    return ArrayDataset(splits)


def synthetic(options: SyntheticOptions, context: DataContext) -> Dataset:
    """A pattern per class, with noise. The same options and split_seed give the same images on every machine."""
    shape, classes = options.synthetic_shape, options.synthetic_classes
    patterns = _uniform(context.split_seed, _PATTERNS, 0, classes * int(np.prod(shape))).reshape(classes, *shape)
    sizes = {TRAIN: options.synthetic_examples}
    sizes[VALIDATION] = sizes[TEST] = max(options.synthetic_examples // 5, 1)
    weight = options.synthetic_noise / (1 + options.synthetic_noise)
    splits = {}
    for number, (split, size) in enumerate(sizes.items()):
        labels = (np.arange(size) % classes).astype(np.int32)
        noise = _uniform(context.split_seed, _NOISE, number, size * int(np.prod(shape))).reshape(size, *shape)
        images = (1 - weight) * patterns[labels] + weight * noise
        splits[split] = {"image": np.rint(images * 255).astype(np.uint8), "label": labels}
    return ArrayDataset(splits, [str(i) for i in range(classes)])


def _uniform(seed: int, domain: int, number: int, count: int) -> NDArray[np.float32]:
    words = raw_draws(seed, domain, number, (count + 1) // 2).view(np.uint32)[:count]
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


# -- files in data_dir ------------------------------------------------------------------------------------------------


def _find(name: str, context: DataContext, *files: str, exists: Callable[[Path], bool] = Path.is_file) -> Path | None:
    """Returns the first file that exists. ``--data_dir`` is the folder of all datasets or of this one."""
    candidates = [folder / file for folder in (context.data_dir / name, context.data_dir) for file in files]
    return next((path for path in candidates if exists(path)), None)


def _missing(name: str, context: DataContext, files: str) -> DataError:
    return DataError(
        f"{name} is not in {context.data_dir}: `modelyard data fetch {name}` downloads it. "
        f"Or put {files} or {name}.npz there, or name another folder with --data_dir."
    )


def _from_npz(name: str, context: DataContext, classes: tuple[str, ...] | None) -> Dataset | None:
    """Returns the dataset in NAME.npz, if there is one. Without class names it gets the official ones."""
    path = _find(name, context, f"{name}.npz")
    if path is None:
        return None
    dataset = read_npz(path, context)
    unnamed = dataset.classes == tuple(str(i) for i in range(len(dataset.classes)))
    if classes is not None and unnamed and len(dataset.classes) <= len(classes):
        dataset.classes = classes
    return dataset


def files_of(name: str, data_dir: Path) -> list[Path] | None:
    """Returns the files and folders that a built-in dataset may be read from; None if it is not one of them."""
    if name in ("digits", "synthetic"):
        return []
    if name in _CIFAR:
        files = list(_CIFAR[name])
    elif name in ("mnist", "fashion_mnist"):
        files = _idx_names(*(file for pair in _IDX_FILES.values() for file in pair))
    else:
        return None
    return [folder / file for folder in (data_dir / name, data_dir) for file in (f"{name}.npz", *files)]


# -- MNIST: IDX files -------------------------------------------------------------------------------------------------

_MOST_AXES = 32  # of an array
_DEFLATE = 1032  # it never compresses more
_LONGEST_IDX_HEADER = 4 + 4 * _MOST_AXES
_IDX_FILES = {
    TRAIN: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    TEST: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def mnist(options: Options, context: DataContext) -> Dataset:
    """MNIST from its IDX files, plain or .gz."""
    return _idx("mnist", context, tuple("0123456789"))


def fashion_mnist(options: Options, context: DataContext) -> Dataset:
    """Fashion-MNIST from its IDX files, plain or .gz."""
    return _idx("fashion_mnist", context, FASHION_CLASSES)


def _idx(name: str, context: DataContext, classes: tuple[str, ...]) -> Dataset:
    dataset = _from_npz(name, context, classes)
    if dataset is not None:
        return dataset
    splits: dict[str, Arrays] = {}
    for split, files in _IDX_FILES.items():
        paths = [_idx_path(name, file, context) for file in files]
        images, labels = (_read_idx(path) for path in paths)
        if len(images) != len(labels):
            raise DataError(f"{paths[0]} holds {len(images)} images, {paths[1]} {len(labels)} labels.")
        splits[split] = {"image": images, "label": labels}
    return ArrayDataset(splits, classes)


def _idx_names(*files: str) -> list[str]:
    """Returns the names that these files may have."""
    spelled = [(file, file.replace("-idx", ".idx")) for file in files]
    return [f"{name}{ending}" for names in spelled for name in names for ending in ("", ".gz")]


def _idx_path(name: str, file: str, context: DataContext) -> Path:
    path = _find(name, context, *_idx_names(file))
    if path is None:
        raise _missing(name, context, f"{file}.gz and the other three IDX files")
    return path


def _read_idx(path: Path) -> NDArray[np.uint8]:
    raw = bytearray()
    try:
        pieces = inflated(path, DataError) if path.suffix == ".gz" else _pieces(path)
        for piece in pieces:
            raw += piece
            if len(raw) > _LONGEST_IDX_HEADER:
                content = sum(_idx_header(raw, path)[1:])
                if len(raw) > content:
                    break
                # What deflate cannot hold is a damaged header: not all of it is there.
                stored = path.stat().st_size
                check_expansion(path, min(content, _DEFLATE * stored), stored, DataError)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    shape, offset, expected = _idx_header(raw, path)
    if len(raw) - offset != expected:
        more = "more than " if len(raw) - offset > expected else ""
        found = f"{more}{min(len(raw) - offset, expected)}"
        raise DataError(f"{path} is truncated or damaged: it has {found} bytes of data, not {expected}.")
    return np.frombuffer(raw, np.uint8, offset=offset).reshape(shape)


def _idx_header(raw: bytearray, path: Path) -> tuple[tuple[int, ...], int, int]:
    """Returns the shape, the length of the header and the number of bytes after it."""
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or not 1 <= raw[3] <= _MOST_AXES or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is not an IDX file of bytes.")
    shape = tuple(int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3]))
    return shape, 4 + 4 * raw[3], math.prod(shape)


def _pieces(path: Path) -> Iterator[bytes]:
    with open_regular(path, DataError) as file:
        while piece := file.read(1 << 20):
            yield piece


# -- CIFAR: pickles ---------------------------------------------------------------------------------------------------


_CIFAR = {
    "cifar10": ("cifar-10-batches-py", "cifar-10-python.tar.gz"),
    "cifar100": ("cifar-100-python", "cifar-100-python.tar.gz"),
}
"""The folder of each, and the archive that holds it."""
_LARGEST_PICKLE = 1 << 30
"""The largest official one has 155 MB."""


def cifar10(options: Options, context: DataContext) -> Dataset:
    """CIFAR-10 from the Python version: the archive, or the folder in it."""
    batches = {TRAIN: [f"data_batch_{i}" for i in range(1, 6)], TEST: ["test_batch"]}
    return _cifar("cifar10", batches, b"labels", context)


def cifar100(options: Options, context: DataContext) -> Dataset:
    """CIFAR-100 with its fine labels, from the Python version: the archive, or the folder in it."""
    batches = {TRAIN: ["train"], TEST: ["test"]}
    return _cifar("cifar100", batches, b"fine_labels", context)


def _cifar(name: str, batches: dict[str, list[str]], label_key: bytes, context: DataContext) -> Dataset:
    folder, archive = _CIFAR[name]
    classes = CIFAR10_CLASSES if name == "cifar10" else None
    dataset = _from_npz(name, context, classes)
    if dataset is not None:
        return dataset
    path = _find(name, context, folder, archive, exists=Path.exists)
    if path is None:
        raise _missing(name, context, f"{archive} or the folder {folder}")
    read = _folder_reader(path) if path.is_dir() else _archive_reader(path, folder)
    splits: dict[str, Arrays] = {}
    for split, files in batches.items():
        images, labels = zip(*(_cifar_batch(read, file, label_key) for file in files), strict=True)
        splits[split] = {"image": np.concatenate(images), "label": np.concatenate(labels)}
    if classes is None:
        try:
            classes = tuple(n.decode() for n in load_plain_pickle(read("meta"), "meta")[b"fine_label_names"])
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise DataError(f"the file meta of {name} holds no fine_label_names.") from error
    return ArrayDataset(splits, classes)


def _folder_reader(folder: Path) -> Callable[[str], bytes]:
    def read(file: str) -> bytes:
        try:
            return read_regular(folder / file, _LARGEST_PICKLE, DataError)
        except OSError as error:
            raise DataError(f"{folder / file} can't be read: {error.strerror}.") from error

    return read


def _archive_reader(archive: Path, folder: str) -> Callable[[str], bytes]:
    """Reads the archive in memory, to its end, where the checksum is."""
    members: dict[str, bytes] = {}
    try:
        stream: Any = _Stream(_archive_pieces(archive))
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20) as tar:
            for member in tar:
                if not member.isfile() or not member.name.startswith(f"{folder}/"):
                    continue
                if member.issparse() or member.size > _LARGEST_PICKLE:
                    raise DataError(f"{archive} is damaged or not the official archive: {member.name} is too large.")
                content = tar.extractfile(member)
                members[member.name] = content.read() if content is not None else b""
        while stream.read(1 << 20):
            pass
    except (OSError, tarfile.TarError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise DataError(f"{archive} is damaged or not the official archive ({error}).") from error

    def read(file: str) -> bytes:
        if f"{folder}/{file}" not in members:
            raise DataError(f"{archive} is damaged or not the official archive: it has no {folder}/{file}.")
        return members[f"{folder}/{file}"]

    return read


def _archive_pieces(archive: Path) -> Iterator[bytes]:
    with open_regular(archive, DataError) as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return inflated(archive, DataError) if compressed else _pieces(archive)


class _Stream:
    """Reads an iterator of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces, self.piece, self.at = pieces, b"", 0

    def read(self, size: int) -> bytes:
        """Returns ``size`` bytes; fewer at the end."""
        parts: list[bytes] = []
        while size > 0:
            if self.at == len(self.piece):
                piece = next(self.pieces, None)
                if piece is None:
                    break
                self.piece, self.at = piece, 0
            parts.append(self.piece[self.at : self.at + size])
            self.at += len(parts[-1])
            size -= len(parts[-1])
        return b"".join(parts)


def _cifar_batch(
    read: Callable[[str], bytes], file: str, label_key: bytes
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    batch = load_plain_pickle(read(file), file)
    try:
        data, found = batch[b"data"], batch[label_key]
        # Lists in lists may refer to each other: NumPy would follow them forever.
        if not isinstance(data, np.ndarray) or not (
            isinstance(found, np.ndarray) or all(type(n) is int for n in found)
        ):
            raise TypeError("its data must be an array, its labels numbers")
        images = np.asarray(data, np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = np.asarray(found, np.int32)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{file} is not a CIFAR batch: {error}") from error
    if labels.shape != (len(images),):
        raise DataError(f"{file} is not a CIFAR batch: {len(images)} images, but labels of shape {labels.shape}.")
    return np.ascontiguousarray(images), labels
