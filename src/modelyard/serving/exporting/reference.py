"""What a run itself predicts, on the engine it was trained with: the measure of its exports.

Keras has one backend for a process, so what JAX predicts is computed by a process of its own, which this module is,
too: ``python -m modelyard.serving.exporting.reference REQUEST.json IMAGES.npy PREDICTIONS.npz``.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.config.accelerators import is_installed
from modelyard.data.dataset import ID, IMAGE
from modelyard.errors import ConfigError, RunError, UserError
from modelyard.run.manifest import read_manifest
from modelyard.serving.run_model import OpenRun, open_run

log = logging.getLogger("modelyard")
Predictions = dict[str, NDArray[Any]]
_UNKNOWN = 3

EXACT = {
    "precision": "float32",
    "num_gpus": 0,
    "gpu_id": None,
    "cpu_devices": 1,
    "xla": False,
    "deterministic": False,
    "shard_parameters": False,
}
"""Exports compute in 32 bits, and are compared on the CPU: a GPU rounds products of matrices more coarsely."""


def engine_of(run: OpenRun) -> str:
    """The engine that the run was trained with last."""
    starts = read_manifest(run.directory).get("starts") or [{}]
    return str((starts[-1].get("engine") or {}).get("engine", run.config.engine))


def is_elsewhere(run: OpenRun) -> bool:
    """Whether the run's own predictions need a process of their own, as this one is TensorFlow's."""
    return engine_of(run) == "jax" and is_installed("jax")


def predict_with(run: OpenRun, engine: str, images: NDArray[Any]) -> Predictions:
    """What the checkpoint predicts for a batch of images, as the dataset gives them, in this process."""
    exact = replace(run, config=run.config.model_copy(update={**EXACT, "engine": engine}))
    made, _ = exact.engine()
    batch = {IMAGE: images, ID: np.arange(len(images), dtype=np.int64)}
    found = {name: np.asarray(values) for name, values in made.predict_batch(batch).items()}
    made.close()
    return found


def predict_elsewhere(run: OpenRun, engine: str, images: NDArray[Any], options: dict[str, Any]) -> Predictions | None:
    """The same, in a process of its own; None where that does not know the run's parts, as a script registers them.

    Raises:
        RunError: if that process fails.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        request, given, found = folder / "request.json", folder / "images.npy", folder / "predictions.npz"
        asked = {"run": run.directory.address, "step": run.step, "options": {**options, "engine": engine}}
        request.write_text(json.dumps(asked), encoding="utf-8")
        np.save(given, images)
        words = [sys.executable, "-m", "modelyard.serving.exporting.reference", *map(str, (request, given, found))]
        done = subprocess.run(words, env=child_environment(engine), capture_output=True, text=True, check=False)
        if done.returncode == _UNKNOWN:
            log.warning("%s So the export is compared with the run's model on TensorFlow.", done.stderr.strip())
            return None
        if done.returncode or not found.exists():
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise RunError(f"what the run itself predicts, on {engine}, could not be computed: {last}")
        with np.load(found) as arrays:
            return dict(arrays)


def child_environment(engine: str) -> dict[str, str]:
    """For a process with another engine, which finds this very Modelyard, and leaves the GPUs alone."""
    kept = {**os.environ, "KERAS_BACKEND": engine}  # also for whoever imports Keras before the engine is chosen
    home = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [home, kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}


def main(words: list[str]) -> None:
    """Computes what was asked for; an error is one line on standard error."""
    request, given, found = map(Path, words)
    asked = json.loads(request.read_text(encoding="utf-8"))
    try:
        run = open_run(asked["run"], asked["step"], **asked["options"])
        np.savez(found, **predict_with(run, asked["options"]["engine"], np.load(given)))  # type: ignore[arg-type]
    except UserError as error:
        status = _UNKNOWN if isinstance(error, ConfigError) else error.status
        print(" ".join(str(error).split()), file=sys.stderr)  # noqa: T201 - for the process that asked
        sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
