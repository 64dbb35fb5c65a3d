"""modelyard.json: the facts of an export, written by `export`, read by `serve` and `predict`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import modelyard
from modelyard.data.dataset import TEST
from modelyard.data.image_spec import ImageSpec
from modelyard.errors import DataError
from modelyard.run.metrics import read_metrics
from modelyard.system.files import write_text

if TYPE_CHECKING:
    from modelyard.serving.exporting.exportable import Exportable

DESCRIPTION = "modelyard.json"
DEFAULT, BYTES = "serving_default", "bytes"
"""The signatures of images and of files; `serve` takes requests to both by the same names."""
IMAGE_BYTES = "image_bytes"
TASK_TYPES = ("classification", "multi_label", "regression", "other")
_NO_METRICS = ("step", "epoch", "split", "time", "seconds", "examples_per_second")


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model.

    Args:
        model: its name in Modelyard.
        dataset: the training dataset.
        step: the step of its weights.
        task_type: one of `TASK_TYPES`.
        classes: class names, in the order of the probabilities.
        image: the spec of the images it takes.
        test: its metrics on the test split; empty if it was not tested.
    """

    model: str
    dataset: str
    step: int
    task_type: str
    classes: tuple[str, ...]
    image: ImageSpec
    test: Mapping[str, float] = field(default_factory=dict)


def describe(model: Exportable, form: str, version: int) -> dict[str, Any]:
    """Returns the content of modelyard.json.

    Args:
        model: the exported model.
        form: the format of the export.
        version: the number of its folder.
    """
    run = model.run
    image = replace(model.recorded.image, shape=model.image.shape, dtype=model.image.dtype)
    tests = [row for row in read_metrics(run.directory.metrics) if row.get("split") == TEST]
    return {
        "format": form,
        "version": version,
        "model": run.config.model,
        "dataset": run.config.dataset,
        "step": run.step,
        "takes_files": model.takes_files,
        **image.as_json(),
        "kind": model.task_type,
        "classes": list(model.classes),
        "outputs": model.outputs,
        "metrics": _metrics(run.checkpoint.loop_state.get("last_evaluation") or {}),
        "test": _metrics(tests[-1]) if tests else {},
        "modelyard": modelyard.__version__,
    }


def write_description(folder: Path, description: dict[str, Any]) -> None:
    """Writes modelyard.json."""
    write_text(folder / DESCRIPTION, json.dumps(description, indent=1) + "\n")


def read_description(folder: Path) -> ModelInfo:
    """Reads modelyard.json of an exported version.

    Raises:
        DataError: if it is missing or invalid.
    """
    file = folder / DESCRIPTION
    try:
        kept = json.loads(file.read_bytes())
        image = ImageSpec.from_json(kept)
        task_type = str(kept["kind"])
        test = kept.get("test") or {}
        classes = tuple(str(name) for name in kept.get("classes") or ())
        info = ModelInfo(
            str(kept["model"]),
            Path(str(kept["dataset"])).name,
            int(kept["step"]),
            task_type if task_type in TASK_TYPES else "other",
            classes,
            image,
            finite_numbers(test),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is missing or damaged: {error!r}. Export the model again.") from error
    if kept.get("format", "saved_model") != "saved_model":
        raise DataError(f"{folder} is an export as {kept['format']}; only a SavedModel can be loaded here.")
    if not image.shape or min(image.shape) < 1:
        raise DataError(f"{file} has the image shape {image.shape}, which is invalid. Export the model again.")
    return info


def finite_numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers among ``found``."""
    return {
        str(name): float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
    }


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a row of metrics.jsonl."""
    return {
        name: float(value)
        for name, value in row.items()
        if name not in _NO_METRICS and isinstance(value, int | float) and not isinstance(value, bool)
    }
