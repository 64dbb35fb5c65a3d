"""Weights from elsewhere, to start from: a run folder, a checkpoint folder or a .safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from modelyard.errors import CheckpointError
from modelyard.run.checkpoint import STATE, best_first, choose, read_checkpoint
from modelyard.run.directory import RunDirectory, open_run_folder


def read_weights(path: Path) -> dict[str, NDArray[Any]]:
    """The named weights in ``path``; of a run folder, the best model's if there is one, else the latest's.

    Raises:
        CheckpointError: if nothing readable is there.
    """
    if path.suffix == ".safetensors" and path.is_file():
        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or no safetensors file: {error}.") from error
    if (path / STATE).is_file():
        return read_checkpoint(path).weights
    if RunDirectory(path).exists():
        directory = open_run_folder(path)  # knows its folder of best models
        which = "best" if best_first(directory.best) else "latest"
        return read_checkpoint(choose(directory.checkpoints, directory.best, which)).weights
    raise CheckpointError(
        f"checkpoint_path {path} is no run folder, checkpoint folder or .safetensors file"
        + ("." if path.exists() else "; nothing is there.")
    )
