"""modelyard.json: what an export is, for whoever serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import modelyard
from modelyard.data.dataset import TEST
from modelyard.run.metrics import read_metrics
from modelyard.system.files import write_text

if TYPE_CHECKING:
    from modelyard.serving.exporting.exportable import Exportable

DESCRIPTION = "modelyard.json"
DEFAULT, BYTES = "serving_default", "bytes"
"""The signatures of images and of files; `serve` takes requests to both by the same names."""
IMAGE_BYTES = "image_bytes"
_NO_METRICS = ("step", "epoch", "split", "time", "seconds", "examples_per_second")


def describe(model: Exportable, form: str, version: int) -> dict[str, Any]:
    """What is known of the model.

    Args:
        model: what was exported.
        form: the format.
        version: the number of its folder.
    """
    run = model.run
    memory = run.checkpoint.memory
    tests = [row for row in read_metrics(run.directory.metrics) if row.get("split") == TEST]
    return {
        "format": form,
        "version": version,
        "model": run.config.model,
        "dataset": run.config.dataset,
        "step": run.step,
        "image": {"shape": list(model.image.shape), "dtype": model.image.dtype},
        "takes_files": model.takes_files,
        "fit": model.kept.fit,
        "shares": model.kept.shares,
        "kind": model.task_type,
        "classes": list(model.classes),
        "outputs": model.outputs,
        "metrics": _numbers(memory.get("last_evaluation") or {}),
        "test": _numbers(tests[-1]) if tests else {},
        "modelyard": modelyard.__version__,
    }


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Writes modelyard.json."""
    write_text(folder / DESCRIPTION, json.dumps(description, indent=1) + "\n")


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if name not in _NO_METRICS and isinstance(value, int | float) and not isinstance(value, bool)
    }
