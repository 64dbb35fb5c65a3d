"""Runs at a glance, read from their folders."""

from __future__ import annotations

from typing import Any

from modelyard.errors import CheckpointError, UserError
from modelyard.run.checkpoint import list_best, list_saved, read_loop_state
from modelyard.run.directory import RunDirectory, is_running, open_run_folder, run_options
from modelyard.run.metrics import read_metrics

PAUSED = "paused"
"""The first word of the status of a run that has come to its pause_at."""
_BESIDES = ("step", "epoch", "split", "seconds")


def summarize(directory: RunDirectory) -> dict[str, Any]:
    """Model, dataset, how far it is, and its results."""
    try:
        if directory.mirror is None:
            directory = open_run_folder(directory.path)  # knows its folder of best models
        return _summary(directory)
    except UserError as error:  # one run that can't be read does not hide the others
        return {"run": directory.name, "status": f"damaged: {error}"}


def _summary(directory: RunDirectory) -> dict[str, Any]:
    options = run_options(directory)
    rows = [*read_metrics(directory.metrics), *read_metrics(directory.evaluations)]
    saved = list_saved(directory.checkpoints, directory.best)
    step = max(saved, default=0)
    return {
        "run": directory.name,
        "model": options.get("model"),
        "dataset": options.get("dataset"),
        "step": step,
        "status": status(directory),
        "best": _best(directory),
        "validation": _last(rows, "validation"),
        "test": _last(rows, "test"),
        "seconds": max((row.get("seconds") or 0 for row in rows), default=None),
    }


def compare(directories: list[RunDirectory]) -> dict[str, Any]:
    """Summaries side by side, and the options in which the runs differ."""
    options = [run_options(directory) for directory in directories]
    keys = dict.fromkeys(key for one in options for key in one)
    different = {
        key: [one.get(key) for one in options]
        for key in keys
        if any(one.get(key) != options[0].get(key) for one in options)
    }
    return {"runs": [summarize(directory) for directory in directories], "options": different}


def status(directory: RunDirectory) -> str:
    """Returns whether a run is running, finished, stopped early, paused, interrupted, not begun or damaged."""
    if is_running(directory):
        return "running"
    saved = list_saved(directory.checkpoints, directory.best)
    step = max(saved, default=0)
    if not saved:
        return "not begun"
    try:
        state = read_loop_state(saved[step])
    except CheckpointError:
        return "damaged"
    if state.get("stopped"):
        return "stopped early"
    total = state.get("total_steps", 0)
    if step >= total:
        return "finished"
    return f"{PAUSED} at step {step} of {total}" if state.get("paused") else "interrupted"


def _best(directory: RunDirectory) -> dict[str, Any] | None:
    paths = list_best(directory.best)
    if not paths:
        return None
    best = read_loop_state(paths[0])["best"]
    return {best["metric"]: best["value"]}


def _last(rows: list[dict[str, Any]], split: str) -> dict[str, Any] | None:
    found = [row for row in rows if row.get("split") == split]
    return {k: v for k, v in found[-1].items() if k not in _BESIDES} if found else None
