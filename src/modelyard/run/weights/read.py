"""Reading weights from a path or URL: a run, a checkpoint, a safetensors file, a file of Keras, or of TensorFlow."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard import storage
from modelyard.errors import CheckpointError
from modelyard.run.checkpoint import OPTIMIZER, STATE, WEIGHTS, read_checkpoint, select_checkpoint
from modelyard.run.directory import RunDirectory, open_run_folder
from modelyard.run.tensors import unpack_tensors
from modelyard.run.weights.keras_files import read_h5, read_keras
from modelyard.run.weights.match import NamedWeights
from modelyard.run.weights.tensorflow_checkpoint import STATE_FILE, find_prefix, latest_of, read_tensorflow
from modelyard.system.files import explain
from modelyard.system.untrusted import read_regular

_SUPPORTED = (
    "a run folder, a checkpoint folder, a .safetensors, .keras, .weights.h5 or .h5 file, or a TensorFlow checkpoint "
    "(its prefix, its .index file or its folder)"
)


def load_weights(path: Path | str, cache_dir: str | None = None) -> NamedWeights:
    """Loads weights by name from anything that ``checkpoint_path`` supports. No code in a file is run.

    Of a run folder, the best model is loaded if there is one, else the latest.

    Args:
        path: a local path, or a URL.
        cache_dir: the folder for copies of remote files; None is the default.

    Raises:
        CheckpointError: if there are no readable weights.

    Example:
        >>> weights = modelyard.load_weights("mobilenet_v2.weights.h5")
        >>> {name: array.shape for name, array in weights.items()}
    """
    if isinstance(path, str) and storage.is_remote(path):
        return _load_remote(path, storage.cache_folder(cache_dir))
    path = Path(path).expanduser()
    reader = _READERS.get(path.suffix.lower())
    if reader is not None and path.exists() and not path.is_dir():
        return reader(path)
    if (path / STATE).is_file():
        return NamedWeights(read_checkpoint(path).weights)
    if RunDirectory(path).exists():
        return _load_run(open_run_folder(path))  # it reads best_model_dir
    prefix = find_prefix(path)
    if prefix is not None:
        return read_tensorflow(prefix)
    raise CheckpointError(
        f"checkpoint_path {path} " + (f"is not {_SUPPORTED}." if path.exists() else "does not exist.")
    )


def _read_safetensors(path: Path) -> NamedWeights:
    with explain(path, "read", CheckpointError):
        data = read_regular(path, sys.maxsize, CheckpointError)
    return NamedWeights(unpack_tensors(data, str(path)))


_READERS: dict[str, Callable[[Path], NamedWeights]] = {
    ".safetensors": _read_safetensors,
    ".keras": read_keras,
    ".h5": read_h5,
    ".hdf5": read_h5,
}


def _load_run(directory: RunDirectory) -> NamedWeights:
    path = select_checkpoint(directory.checkpoints, directory.best)
    directory.download_weights(path)
    return NamedWeights(read_checkpoint(path).weights)


def _load_remote(url: str, cache: Path) -> NamedWeights:
    if Path(url).suffix.lower() in _READERS:
        return load_weights(storage.local_copy(url, cache))
    files = _checkpoint_files(url)
    if not files:
        return _load_run(open_run_folder(url, str(cache)))
    with tempfile.TemporaryDirectory() as folder:  # in one folder: the cache has a folder per file
        for file in files:
            Path(folder, file.rpartition("/")[2]).symlink_to(storage.local_copy(file, cache))
        return load_weights(folder)


def _checkpoint_files(url: str) -> list[str]:
    """The files of a checkpoint of Modelyard or TensorFlow; none if ``url`` is something else."""
    if storage.exists(storage.join(url, STATE)):
        return [storage.join(url, file) for file in (STATE, WEIGHTS, OPTIMIZER)]
    prefix = url.removesuffix(".index")
    if not storage.exists(f"{prefix}.index"):
        state = storage.read_if_there(storage.join(url, STATE_FILE))
        latest = latest_of(state.decode("utf-8", "replace")) if state is not None else None
        if latest is None:
            return []
        prefix = storage.join(url, latest)
    return [f"{prefix}.index", *storage.list_files(f"{prefix}.data-*")]


def check_finite(weights: Mapping[str, NDArray[Any]], shown: str, hint: str) -> None:
    """Refuses weights that contain NaN or infinity: the first step of training would fail.

    Args:
        weights: arrays by name.
        shown: their origin, for the error.
        hint: the advice at the end of the error.

    Raises:
        CheckpointError: with the first of them, and how many of its values are not finite.
    """
    found = {name: int(np.sum(~np.isfinite(array))) for name, array in weights.items() if array.dtype.kind not in "iub"}
    bad = {name: count for name, count in found.items() if count}
    if bad:
        name, count = next(iter(bad.items()))
        more = f", and so {'do' if len(bad) > 2 else 'does'} {len(bad) - 1} more" if len(bad) > 1 else ""
        raise CheckpointError(
            f"{shown}: {name} holds {count:,} values of {weights[name].size:,} that are not finite (NaN or infinity)"
            f"{more}. {hint}"
        )
