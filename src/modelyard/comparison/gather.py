"""Results of runs, read from their folders alone."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.comparison.folder import PLAN, MatrixFolder, is_finished
from modelyard.config.yaml_file import is_run_config
from modelyard.errors import RunError, UserError
from modelyard.run.checkpoint import best_first, step_of
from modelyard.run.directory import CONFIG, RunDirectory, open_run_folder, read_json, run_options
from modelyard.run.metrics import read_metrics
from modelyard.run.summary import summarize

_NOT_METRICS = ("step", "epoch", "split", "seconds")
_ENDED = ("finished", "stopped early")


@dataclass(frozen=True)
class ScoredRun:
    """A run that has ended.

    Args:
        name: its folder, seen from the folder of all.
        options: its config.
        fingerprint: of its data.
        scores: the metrics of each split, of the best model where one was kept.
        parameters: how many numbers the model has.
        flops: what it computes for an example.
        seconds: of training.
        images_per_second: while training.
        started: when it was first started, as text that sorts by time.
    """

    name: str
    options: Mapping[str, Any]
    fingerprint: str
    scores: Mapping[str, Mapping[str, float]]
    parameters: int | None
    flops: int | None
    seconds: float | None
    images_per_second: float | None
    started: str


@dataclass(frozen=True)
class Unfinished:
    """A run that is not counted: its name, how it stands, and why if that is known."""

    name: str
    status: str
    reason: str = ""


def gather(folder: Path) -> tuple[list[ScoredRun], list[Unfinished]]:
    """All runs in ``folder`` and below, ended ones and others, by name.

    Raises:
        RunError: if there is no such folder.
    """
    if storage.is_remote(str(folder)):
        raise RunError(f"{folder}: a leaderboard is made of a folder on this machine; copy the runs here first.")
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder. Name one with runs in it, such as runs or the output of a matrix.")
    runs: list[ScoredRun] = []
    others: list[Unfinished] = []
    found, matrices = _walk(folder)
    failures = _failures(folder, matrices)
    for path in found:
        name = str(path.relative_to(folder))
        reason = failures.pop(path.resolve(), "")
        try:
            directory = RunDirectory(path)
            status = summarize(directory)["status"]
            if status in _ENDED:
                if is_finished(directory, bool(run_options(directory).get("test_at_end"))):
                    runs.append(_read(open_run_folder(path), name))
                    continue
                status = "interrupted"  # before the test
        except (UserError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            status, reason = "damaged", reason or str(error)
        status, _, more = str(status).partition(": ")
        others.append(Unfinished(name, "failed" if reason and status != "damaged" else status, reason or more))
    others += [
        Unfinished(_relative(path, folder), "failed" if reason else "not begun", reason)
        for path, reason in failures.items()
        if not (path / CONFIG).exists()
    ]
    return runs, sorted(others, key=lambda one: one.name)


def _walk(folder: Path) -> tuple[list[Path], list[Path]]:
    """The run folders and the folders of matrices; nothing in a run folder is looked at."""
    runs, matrices = [], []
    for place, folders, files in os.walk(folder):
        folders.sort()
        if CONFIG in files and is_run_config(Path(place) / CONFIG):
            folders.clear()
            runs.append(Path(place))
        elif PLAN in files:
            matrices.append(Path(place))
    return runs, matrices


def _failures(folder: Path, matrices: list[Path]) -> dict[Path, str]:
    """The cells of these matrices, and of one that the folder is in: why they failed, if they did."""
    found: dict[Path, str] = {}
    around = [path for path in folder.resolve().parents[:2] if (path / PLAN).is_file()]
    for place in (*around, *matrices):
        with contextlib.suppress(UserError):  # a plan that can't be read: its runs are there all the same
            matrix = MatrixFolder(place)
            failed = matrix.failures()
            for name in matrix.known_names():
                path = matrix.run(name).path.resolve()
                if path.is_relative_to(folder.resolve()):
                    found[path] = failed.get(name, "")
    return found


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder.resolve()))


def _read(directory: RunDirectory, name: str) -> ScoredRun:
    manifest = read_json(directory.manifest)
    rows = [*read_metrics(directory.metrics), *read_metrics(directory.evaluations)]
    best = best_first(directory.best)
    scores = {}
    for split in ("test", "validation"):
        mine = [row for row in rows if row.get("split") == split]
        of_best = [row for row in mine if best and row.get("step") == step_of(best[0])]
        if mine:
            row = (of_best or mine)[-1]
            scores[split] = {
                key: float(value)
                for key, value in row.items()
                if key not in _NOT_METRICS and isinstance(value, int | float) and math.isfinite(value)
            }
    speeds = [row["average_examples_per_second"] for row in rows if row.get("average_examples_per_second")]
    size, starts = manifest.get("model") or {}, manifest.get("starts") or [{}]
    return ScoredRun(
        name,
        run_options(directory),
        str((manifest.get("dataset") or {}).get("fingerprint", "")),
        scores,
        _whole(size.get("parameters")),
        _whole(size.get("flops")),
        max((float(r["seconds"]) for r in rows if r.get("split") != "test" and r.get("seconds")), default=None),
        float(speeds[-1]) if speeds else None,
        str(starts[0].get("time", "")),
    )


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
