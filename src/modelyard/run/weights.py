"""Weights from elsewhere, to start from: a run folder, a checkpoint folder or a .safetensors file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from modelyard import storage
from modelyard.errors import CheckpointError
from modelyard.run.checkpoint import OPTIMIZER, STATE, WEIGHTS, best_first, choose, read_checkpoint
from modelyard.run.directory import RunDirectory, open_run_folder


def read_weights(path: Path | str, cache_dir: str | None = None) -> dict[str, NDArray[Any]]:
    """The named weights in ``path``; of a run folder, the best model's if there is one, else the latest's.

    Args:
        path: a local path, or a URL.
        cache_dir: where copies of remote files are kept; None is the usual place.

    Raises:
        CheckpointError: if nothing readable is there.
    """
    if isinstance(path, str) and storage.is_remote(path):
        return _read_remote(path, storage.cache_folder(cache_dir))
    path = Path(path)
    if path.suffix == ".safetensors" and path.is_file():
        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or no safetensors file: {error}.") from error
    if (path / STATE).is_file():
        return read_checkpoint(path).weights
    if RunDirectory(path).exists():
        return _read_run(open_run_folder(path))  # knows its folder of best models
    raise CheckpointError(
        f"checkpoint_path {path} is no run folder, checkpoint folder or .safetensors file"
        + ("." if path.exists() else "; nothing is there.")
    )


def _read_run(directory: RunDirectory) -> dict[str, NDArray[Any]]:
    which = "best" if best_first(directory.best) else "latest"
    path = choose(directory.checkpoints, directory.best, which)
    directory.bring_weights(path)
    return read_checkpoint(path).weights


def _read_remote(url: str, cache: Path) -> dict[str, NDArray[Any]]:
    if url.endswith(".safetensors"):
        return read_weights(storage.local_copy(url, cache))
    if not storage.exists(storage.join(url, STATE)):
        return _read_run(open_run_folder(url, str(cache)))
    # Copies of single files lie in folders of their own; a checkpoint is read from one.
    with tempfile.TemporaryDirectory() as folder:
        for name in (STATE, WEIGHTS, OPTIMIZER):
            (Path(folder) / name).symlink_to(storage.local_copy(storage.join(url, name), cache))
        return read_checkpoint(Path(folder)).weights
