"""Checkpoints: whole or absent, with checksums, written while training continues.

``step-00001200/`` holds ``weights.safetensors``, ``optimizer.safetensors`` and ``state.json``. The last has the format
version, the step, the config, the state of the loop and the hooks, a SHA-256 of the other two files, and one of itself.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelyard import faults
from modelyard.errors import CheckpointError
from modelyard.run.integrity import CHECKSUM, json_checksum, parse_json
from modelyard.run.tensors import Arrays, pack_tensors, unpack_tensors
from modelyard.system.files import explain, remove_folder, whole_folder
from modelyard.system.untrusted import read_regular

FORMAT_VERSION = 1
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
DAMAGED = "damaged-"
LOOP_STATE = "memory"  # part of the file format
_NAME = re.compile(r"step-(\d{8,})")
_NOT_A_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
_LISTINGS = 10  # of the best models, while a run replaces them
_WITHOUT_CHECKSUM = {"format_version", "step", "sha256", LOOP_STATE}
"""All fields of a state.json that an earlier Modelyard wrote. With any other, a checksum is missing or misspelled."""
log = logging.getLogger("modelyard")


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
            data = pack_tensors(arrays)
            (partial / name).write_bytes(data)
            checksums[name] = hashlib.sha256(data).hexdigest()
        state = {
            "format_version": FORMAT_VERSION,
            "step": checkpoint.step,
            "sha256": checksums,
            LOOP_STATE: checkpoint.loop_state,
        }
        state[CHECKSUM] = json_checksum(state)
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
            arrays[name] = unpack_tensors(data, str(path / name))
        except CheckpointError as error:
            raise DamagedError(str(error)) from error
    return Checkpoint(state["step"], arrays[WEIGHTS], arrays[OPTIMIZER], state[LOOP_STATE])


def read_state(path: Path) -> dict[str, Any]:
    """The content of state.json: step, state of the loop, checksums.

    Raises:
        DamagedError: if it is damaged, or of another step than its folder.
        CheckpointError: if a newer Modelyard wrote it, or the file system fails.
    """
    try:
        state = parse_json(_read(path / STATE))
        problem = _problem_of(state, path)
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        raise DamagedError(f"{path / STATE} is damaged: {problem}.")
    return state


def _problem_of(state: dict[str, Any], path: Path) -> str | None:
    """Returns the first problem in the content of a state.json, or None."""
    version, given = state.get("format_version"), state.get(CHECKSUM)
    if not _is_count(version) or not version:
        return f"its format_version is {_shown(version)}"
    # A damaged version is not a newer one: with the right version, the checksum fits.
    if version > FORMAT_VERSION and json_checksum(state | {"format_version": FORMAT_VERSION}) != given:
        raise CheckpointError(
            f"{path} has format version {version}; this Modelyard reads up to {FORMAT_VERSION}. Install a newer."
        )
    if given != json_checksum(state) and (given is not None or not state.keys() <= _WITHOUT_CHECKSUM):
        return "its content does not have the checksum that it was written with"
    step, checksums, loop_state = (state.get(key) for key in ("step", "sha256", LOOP_STATE))
    if not _is_count(step):
        return f"its step is {_shown(step)}"
    if is_folder_name(path.name) and step != step_of(path):
        return f"its step is {_shown(step)}, that of its folder is {step_of(path)}"
    if not isinstance(checksums, dict):
        return "it has no checksums of the other files"
    if not isinstance(loop_state, dict):
        return "it has no state of the loop"
    wrong = [key for key, is_valid in _LOOP_STATE_TYPES.items() if key in loop_state and not is_valid(loop_state[key])]
    return f"its {wrong[0]} is {_shown(loop_state[wrong[0]])}" if wrong else None


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of many digits"
    return text if len(text) <= 40 else f"{text[:40]}…"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_best(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("metric"), str)
        and value.get("mode") in ("max", "min")
        and _is_number(value.get("value"))
        and _is_count(value.get("step"))
    )


_LOOP_STATE_TYPES: dict[str, Callable[[Any], bool]] = {
    "run": lambda value: isinstance(value, str),
    "config": lambda value: isinstance(value, dict),
    "window": _is_numbers,
    "window_steps": _is_count,
    "seconds": _is_number,
    "evaluated_step": lambda value: value is None or _is_count(value),
    "owes_evaluation": lambda value: isinstance(value, bool),
    "last_evaluation": _is_numbers,
    "paused": lambda value: isinstance(value, bool),
    "stopped": lambda value: value is None or isinstance(value, str),
    "stopped_under": lambda value: isinstance(value, list),
    "threads": _is_count,
    "replicas": _is_count,
    "total_steps": _is_count,
    "hooks": lambda value: isinstance(value, dict),
    "best": _is_best,
    "metrics": _is_numbers,
    "resumable": lambda value: isinstance(value, bool),
}
"""The fields of the state of the loop that Modelyard reads, each with a check of its type."""


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, sys.maxsize, DamagedError)  # a stranger's may be a link to /dev/zero, or a pipe
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing.") from error
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise DamagedError(f"{path} is damaged: {error.strerror}.") from error
        hint = " Check its permissions." if isinstance(error, PermissionError) else ""
        raise CheckpointError(f"{path} can't be read: {error.strerror}.{hint}") from error


def read_loop_state(path: Path) -> dict[str, Any]:
    """The state of the loop and the hooks in a checkpoint, without its weights."""
    return dict(read_state(path)[LOOP_STATE])


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in ``folder`` by step, oldest first."""
    with explain(folder, "read", CheckpointError):
        if not folder.is_dir():
            return {}
        found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def list_saved(checkpoints: Path, best: Path) -> dict[int, Path]:
    """The checkpoints and the best models by step, oldest first. Of a step that has both, the checkpoint."""
    return dict(sorted({**list_checkpoints(best), **list_checkpoints(checkpoints)}.items()))


def load_latest(folder: Path, best: Path | None = None, run_id: str | None = None) -> Checkpoint | None:
    """The newest checkpoint that can be read, of ``folder`` or of the best models. Damaged ones are logged and skipped.

    Args:
        folder: the folder of the checkpoints. Damaged ones are set aside.
        best: the folder of the best models; None leaves them out.
        run_id: the run of the best models; those of other runs are left out.

    Raises:
        CheckpointError: if all are damaged, the file system fails, or a newer Modelyard wrote the newest: resuming from
            an older one would undo its work.
    """
    saved = list_checkpoints(folder) if best is None or run_id is None else list_saved(folder, best)
    for path in reversed(saved.values()):
        is_best = path.parent != folder
        try:
            if is_best and not is_resumable(read_state(path), run_id):
                continue
            checkpoint = read_checkpoint(path)
        except DamagedError as error:
            if is_best:
                log.warning("%s It is skipped; the one before it is used.", error)
            else:
                aside = set_aside(path)
                log.warning("%s It was set aside as %s; the one before it is used.", error, aside.name)
            continue
        if is_best:
            log.info("the best model of step %d is the newest that was saved", checkpoint.step)
        return checkpoint
    if folder.is_dir() and any(folder.glob(f"{DAMAGED}*")):
        raise CheckpointError(
            f"all checkpoints in {folder} are damaged and set aside as {DAMAGED}…; there is nothing to resume from. "
            "Restore them from a copy, or start a new run with another --model_dir."
        )
    return None


def is_resumable(state: dict[str, Any], run_id: str | None = None) -> bool:
    """Whether a run can resume from the best model with this state.json.

    An earlier Modelyard wrote best models before all hooks had seen the evaluation.

    Args:
        state: the content of state.json.
        run_id: the run; None for any.
    """
    loop_state = state[LOOP_STATE]
    return bool(loop_state.get("resumable")) and run_id in (None, loop_state.get("run"))


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint; returns its new path."""
    first = path.with_name(f"{DAMAGED}{path.name}")
    names = itertools.chain([first], (first.with_name(f"{first.name}-{number}") for number in itertools.count(2)))
    with explain(path, "rename"):
        return path.replace(next(aside for aside in names if not os.path.lexists(aside)))


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
    by_step = list_saved(checkpoints, best)
    if which == "latest" and by_step:
        return by_step[max(by_step)]
    if which == "best" and best_models:
        return best_models[0]
    if which.isdecimal() and int(which) in by_step:
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


def rank_key(best: Mapping[str, Any], metrics: Mapping[str, Any]) -> tuple[float, float, int]:
    """A sort key of models, the best first: by the metric, then by the lower loss, then the earlier.

    Args:
        best: metric, mode, value and step.
        metrics: all metrics of the evaluation.
    """
    value, loss = float(best["value"]), float(metrics.get("loss", math.inf))
    key = -value if best["mode"] == "max" else value
    # Not a number: last.
    return math.inf if math.isnan(value) else key, math.inf if math.isnan(loss) else loss, int(best["step"])


def list_best(folder: Path) -> list[Path]:
    """The checkpoints of the best models in ``folder``, best first; unreadable ones are left out."""
    for _ in range(_LISTINGS):
        ranked, problems, listed = [], {}, list_checkpoints(folder)
        for path in listed.values():
            try:
                state = read_loop_state(path)
                ranked.append((rank_key(state["best"], state.get("metrics", {})), path))
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                problems[path] = error
        if not problems or listed == list_checkpoints(folder):  # else a run has just replaced one by a better one
            break
    for path, problem in problems.items():
        log.warning("%s is skipped: %s", path, problem)
    return [path for _, path in sorted(ranked)]


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest ``keep`` checkpoints."""
    for path in list(list_checkpoints(folder).values())[:-keep]:
        remove_folder(path)


class BackgroundWriter:
    """Runs writes in order in a thread, while training continues.

    At most one write waits, so memory stays bounded. An error is raised in the training thread at the next call.
    """

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        """Processor time of all writes that are done."""
        self.blocked_seconds = 0.0
        """How long training has waited for writes."""
        self._submitted = self._done = 0
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Schedules ``write``; blocks while another one waits."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoint-writer", daemon=True)
            self._thread.start()
        self._submitted += 1
        began = time.monotonic()
        self._queue.put(write)
        self.blocked_seconds += time.monotonic() - began

    @property
    def is_busy(self) -> bool:
        """Whether a write is under way or waits."""
        return self._done < self._submitted

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
            began = time.thread_time()
            try:
                if write is None:
                    return
                if self._error is None:
                    write()
            except BaseException as error:
                self._error = error
            finally:
                self.cpu_seconds += time.thread_time() - began
                self._done += write is not None
                self._queue.task_done()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
