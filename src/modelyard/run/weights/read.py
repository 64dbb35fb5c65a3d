"""Which reader a path needs: a folder of ours, a file of Keras, a TensorFlow checkpoint, local or remote."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from modelyard import storage
from modelyard.errors import CheckpointError
from modelyard.run.checkpoint import OPTIMIZER, STATE, WEIGHTS, read_checkpoint, select_checkpoint
from modelyard.run.directory import RunDirectory, open_run_folder
from modelyard.run.weights.keras_files import read_hdf5, read_keras
from modelyard.run.weights.named import NamedWeights
from modelyard.run.weights.tensorflow_checkpoint import STATE_FILE, find_prefix, newest_of, read_tensorflow

KINDS = (
    "a run folder, a checkpoint folder, a .safetensors, .keras, .weights.h5 or .h5 file, or a TensorFlow checkpoint "
    "(its prefix, its .index file or its folder)"
)


def read_weights(path: Path | str, cache_dir: str | None = None) -> NamedWeights:
    """The named weights in ``path``; of a run folder, the best model's if there is one, else the latest's.

    Nothing in a file is run: only arrays are read.

    Args:
        path: a local path, or a URL.
        cache_dir: where copies of remote files are kept; None is the usual place.

    Raises:
        CheckpointError: if nothing readable is there.
    """
    if isinstance(path, str) and storage.is_remote(path):
        return _read_remote(path, storage.cache_folder(cache_dir))
    path = Path(path).expanduser()
    reader = _FILES.get(path.suffix.lower())
    if reader is not None and path.is_file():
        return reader(path)
    if (path / STATE).is_file():
        return NamedWeights(read_checkpoint(path).weights)
    if RunDirectory(path).exists():
        return _read_run(open_run_folder(path))  # knows its folder of best models
    prefix = find_prefix(path)
    if prefix is not None:
        return read_tensorflow(prefix)
    raise CheckpointError(f"checkpoint_path {path} is not {KINDS}" + ("." if path.exists() else "; nothing is there."))


def load_weights(path: Path | str) -> dict[str, NDArray[Any]]:
    """The weights in a file or folder by name: whatever ``checkpoint_path`` takes. Nothing in it is run.

    Args:
        path: a local path, or a URL.

    Raises:
        CheckpointError: if nothing readable is there.

    Example:
        >>> weights = modelyard.load_weights("mobilenet_v2.weights.h5")
        >>> {name: array.shape for name, array in weights.items()}
    """
    return read_weights(path)


def _read_safetensors(path: Path) -> NamedWeights:
    try:
        return NamedWeights(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or no safetensors file: {error}.") from error


_FILES = {".safetensors": _read_safetensors, ".keras": read_keras, ".h5": read_hdf5, ".hdf5": read_hdf5}


def _read_run(directory: RunDirectory) -> NamedWeights:
    path = select_checkpoint(directory.checkpoints, directory.best)
    directory.bring_weights(path)
    return NamedWeights(read_checkpoint(path).weights)


def _read_remote(url: str, cache: Path) -> NamedWeights:
    reader = _FILES.get(Path(url).suffix.lower())
    if reader is not None:
        return reader(storage.local_copy(url, cache))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if storage.exists(storage.join(url, STATE)):
            _bring(folder, (storage.join(url, file) for file in (STATE, WEIGHTS, OPTIMIZER)), cache)
            return NamedWeights(read_checkpoint(folder).weights)
        prefix = _remote_prefix(url)
        if prefix is not None:
            _bring(folder, [f"{prefix}.index", *storage.list_files(f"{prefix}.data-*")], cache)
            return read_tensorflow(folder / prefix.rpartition("/")[2])
    return _read_run(open_run_folder(url, str(cache)))


def _remote_prefix(url: str) -> str | None:
    prefix = url.removesuffix(".index")
    if storage.exists(f"{prefix}.index"):
        return prefix
    state = storage.read_if_there(storage.join(url, STATE_FILE))
    newest = newest_of(state.decode("utf-8", "replace")) if state is not None else None
    return storage.join(url, newest) if newest is not None else None


def _bring(folder: Path, urls: Iterable[str], cache: Path) -> None:
    """Copies of single files lie in folders of their own; what belongs together is read from one."""
    for url in urls:
        (folder / url.rpartition("/")[2]).symlink_to(storage.local_copy(url, cache))
