"""Checkpoints: whole or absent, with checksums, written while training continues.

``step-00001200/`` holds ``weights.safetensors``, ``optimizer.safetensors`` and ``state.json``. The last has the format
version, the step, the state of the loop and the hooks, and a SHA-256 of the other two.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from modelyard import faults
from modelyard.errors import CheckpointError
from modelyard.system.files import remove_folder, retried, whole_folder

FORMAT_VERSION = 1
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
DAMAGED = "damaged-"
_LOOP_STATE = "memory"  # part of the file format
_NAME = re.compile(r"step-(\d{8,})")
log = logging.getLogger("modelyard")

Arrays = dict[str, NDArray[Any]]


class DamagedError(CheckpointError):
    """A checkpoint that is incomplete or damaged. It can be set aside; other errors may pass."""


@dataclass(frozen=True)
class Checkpoint:
    """A point from which a run resumes.

    Args:
        step: how many steps were trained.
        weights: the model's weights by name.
        optimizer: the optimizer's slots by name.
        loop_state: the state of the loop and the hooks, as plain JSON values. In state.json its key is "memory".
    """

    step: int
    weights: Arrays
    optimizer: Arrays
    loop_state: dict[str, Any] = field(default_factory=dict)


def folder_name(step: int) -> str:
    """The folder of the checkpoint at ``step``."""
    return f"step-{step:08d}"


def is_folder_name(name: str) -> bool:
    """Whether ``name`` is the name of a checkpoint folder."""
    return _NAME.fullmatch(name) is not None


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Writes ``checkpoint`` into ``folder``, whole or not at all."""
    target = folder / folder_name(checkpoint.step)
    with whole_folder(target) as partial:
        checksums = {}
        for name, arrays in ((WEIGHTS, checkpoint.weights), (OPTIMIZER, checkpoint.optimizer)):
            # The format has no zero-dimensional big-endian or strided arrays; plain contiguous ones always work.
            data = save_safetensors({key: np.ascontiguousarray(a).reshape(a.shape) for key, a in arrays.items()})
            (partial / name).write_bytes(data)
            checksums[name] = hashlib.sha256(data).hexdigest()
        state = {
            "format_version": FORMAT_VERSION,
            "step": checkpoint.step,
            "sha256": checksums,
            _LOOP_STATE: checkpoint.loop_state,
        }
        faults.reach(faults.SAVE)
        (partial / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    return target


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder ``path``.

    Raises:
        DamagedError: if it is incomplete or damaged.
        CheckpointError: if a newer Modelyard wrote it, or the file system fails.
    """
    state = read_state(path)
    arrays = {}
    for name in (WEIGHTS, OPTIMIZER):
        data = _read(path / name)
        if hashlib.sha256(data).hexdigest() != state["sha256"].get(name):
            raise DamagedError(f"{path / name} is damaged: its checksum is not the one in {STATE}.")
        try:
            arrays[name] = load_safetensors(data)
        except SafetensorError as error:
            raise DamagedError(f"{path / name} is damaged: {error}.") from error
    return Checkpoint(state["step"], arrays[WEIGHTS], arrays[OPTIMIZER], state[_LOOP_STATE])


def read_state(path: Path) -> dict[str, Any]:
    """The content of state.json: step, state of the loop, checksums."""
    data = _read(path / STATE)
    try:
        state = json.loads(data)
        version = state["format_version"]
        if not isinstance(version, int):
            raise TypeError("format_version")
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version}; this Modelyard reads up to {FORMAT_VERSION}. Install a newer."
            )
        if not isinstance(state["step"], int) or not isinstance(state[_LOOP_STATE], dict):
            raise TypeError("step or loop state")
        return dict(state) | {"sha256": dict(state["sha256"])}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path / STATE} is damaged ({error}).") from error


def _read(path: Path) -> bytes:
    try:
        return retried(path, path.read_bytes)
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing.") from error
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}.") from error


def read_loop_state(path: Path) -> dict[str, Any]:
    """The state of the loop and the hooks in a checkpoint, without its weights."""
    return dict(read_state(path)[_LOOP_STATE])


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in ``folder`` by step, oldest first."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that can be read. Damaged ones are logged, set aside and skipped.

    Raises:
        CheckpointError: if all are damaged, the file system fails, or a newer Modelyard wrote the newest: resuming from
            an older one would undo its work.
    """
    for path in reversed(list_checkpoints(folder).values()):
        try:
            return read_checkpoint(path)
        except DamagedError as error:
            aside = _set_aside(path)
            log.warning("%s It was set aside as %s; the one before it is used.", error, aside.name)
    if folder.is_dir() and any(folder.glob(f"{DAMAGED}*")):
        raise CheckpointError(
            f"all checkpoints in {folder} are damaged and set aside as {DAMAGED}…; there is nothing to resume from. "
            "Restore them from a copy, or start a new run with another --model_dir."
        )
    return None


def _set_aside(path: Path) -> Path:
    first = path.with_name(f"{DAMAGED}{path.name}")
    names = itertools.chain([first], (first.with_name(f"{first.name}-{number}") for number in itertools.count(2)))
    return path.replace(next(aside for aside in names if not aside.exists()))


def select_checkpoint(checkpoints: Path, best: Path, which: str | int | None = None) -> Path:
    """The folder of the checkpoint that the user names.

    Args:
        checkpoints: the folder of the checkpoints.
        best: the folder of the best models.
        which: best, latest or a step; None is best if there is one, else latest.

    Raises:
        CheckpointError: if there is no such checkpoint, with those that exist.
    """
    latest, best_models = list_checkpoints(checkpoints), list_best(best)
    which = str(which) if which is not None else "best" if best_models else "latest"
    if which == "latest" and latest:
        return latest[max(latest)]
    if which == "best" and best_models:
        return best_models[0]
    if which.isdecimal():
        by_step = {**list_checkpoints(best), **latest}
        if int(which) in by_step:
            return by_step[int(which)]
    if not latest and not best_models:
        raise CheckpointError(
            f"there is no checkpoint in {checkpoints.parent}: nothing was saved yet, or its folders {checkpoints.name} "
            f"and {best.name} were not copied."
        )
    steps = ", ".join(map(str, latest)) or "none"
    bests = ", ".join(str(step_of(path)) for path in best_models) or "none"
    raise CheckpointError(
        f"there is no checkpoint {which!r} in {checkpoints.parent}. Steps saved: {steps}; best: {bests}. "
        "Give best, latest or one of these steps."
    )


def step_of(path: Path) -> int:
    """The step of a checkpoint folder."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint folder.")
    return int(match[1])


def list_best(folder: Path) -> list[Path]:
    """The checkpoints of the best models in ``folder``, best first; unreadable ones are left out."""
    ranked = []
    for step, path in list_checkpoints(folder).items():
        try:
            best = read_loop_state(path)["best"]
            value = float(best["value"])
            key = -value if best["mode"] == "max" else value
            ranked.append((math.inf if math.isnan(value) else key, step, path))  # not a number: last
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            log.warning("%s is skipped: %s", path, error)
    return [path for _, _, path in sorted(ranked)]


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest ``keep`` checkpoints."""
    for path in list(list_checkpoints(folder).values())[:-keep]:
        remove_folder(path)


class BackgroundWriter:
    """Runs writes in order in a thread, while training continues.

    At most one write waits, so memory stays bounded. An error is raised in the training thread at the next call.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Schedules ``write``; blocks while another one waits."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
            self._thread.start()
        self._queue.put(write)

    def flush(self) -> None:
        """Waits until everything is written."""
        if self._thread is not None:
            self._queue.join()
        self._raise()

    def close(self) -> None:
        """Waits until everything is written and ends the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        self._raise()

    def _work(self) -> None:
        while True:
            write = self._queue.get()
            try:
                if write is None:
                    return
                if self._error is None:
                    write()
            except BaseException as error:
                self._error = error
            finally:
                self._queue.task_done()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
