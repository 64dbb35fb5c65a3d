"""Values of each example of a split, for the models that a run keeps: what comparisons of runs are paired over.

``examples/validation-00000900.safetensors`` has one array per name, in storage order: ``loss``, every metric that is a
mean over the examples (accuracy: 1 for right, 0 for wrong), and ``label`` if it is one number. A run of an earlier
Modelyard has no such files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from modelyard.errors import CheckpointError, RunError
from modelyard.run.checkpoint import list_best, step_of
from modelyard.run.directory import RunDirectory
from modelyard.run.tensors import Arrays, pack_tensors, unpack_tensors
from modelyard.system.files import explain, whole_file
from modelyard.system.untrusted import read_regular

_NAME = re.compile(r"(\w+)-(\d{8,})\.safetensors")
_MOST_BYTES = 4 << 30
log = logging.getLogger("modelyard")


@dataclass(frozen=True)
class ExampleValues:
    """Values of each example of a split, by a model of a run.

    Args:
        split: the split.
        step: the step of the model.
        values: arrays of one length, by name, in storage order.
    """

    split: str
    step: int
    values: Arrays


def write_example_values(directory: RunDirectory, split: str, step: int, values: Arrays) -> None:
    """Writes the values of a split by the model of ``step``, whole or not at all."""
    folder = directory.examples
    with explain(folder, "write to"):
        folder.mkdir(parents=True, exist_ok=True)
        # Not synced, since training and testing would wait for the disk. A file that a power cut damaged is skipped.
        with whole_file(folder / _name(split, step), synced=False) as file:
            file.write(pack_tensors(values))


def keep_example_values(directory: RunDirectory, split: str, steps: Collection[int]) -> None:
    """Removes the values of a split by models of other steps."""
    with explain(directory.examples, "remove files in"):
        for step, path in _files(directory.examples, split).items():
            if step not in steps:
                path.unlink(missing_ok=True)


def read_example_values(directory: RunDirectory, split: str, step: int | None = None) -> ExampleValues | None:
    """Reads the values of a split by one of the models that a run keeps.

    Args:
        directory: the run folder.
        split: validation or test.
        step: the step of the model; None for the best that is kept, else the newest.

    Returns:
        The values; None if there are none, or if they are damaged.
    """
    files: dict[int, Path] = {}
    for folder in directory.all_examples:
        if directory.mirror is not None:
            directory.mirror.fetch_folder(folder)
        files |= _files(folder, split)
    if step is None:
        best = [step_of(path) for path in list_best(directory.best)[:1]]
        step = next((found for found in best if found in files), max(files, default=0))
    if step not in files:
        return None
    path = files[step]
    try:
        values = unpack_tensors(read_regular(path, _MOST_BYTES, RunError), str(path))
    except (OSError, CheckpointError, RunError) as error:
        log.warning("%s is skipped: %s", path, error)
        return None
    if len({array.shape[:1] for array in values.values()}) != 1 or () in {array.shape for array in values.values()}:
        log.warning("%s is skipped: its arrays differ in length", path)
        return None
    return ExampleValues(split, step, values)


def _name(split: str, step: int) -> str:
    return f"{split}-{step:08d}.safetensors"


def _files(folder: Path, split: str) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    found = {path: _NAME.fullmatch(path.name) for path in folder.iterdir()}
    return {int(match[2]): path for path, match in found.items() if match is not None and match[1] == split}
