"""Training on arrays needs neither TensorFlow nor what decodes images and reads records."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from waiting import PATIENCE

HEAVY = ("cv2", "simplejpeg", "google_crc32c", "tensorflow", "PIL")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")


def without_them(code: str, *arguments: str) -> str:
    """What ``code`` prints where none of them can be imported."""
    blocked = f"import sys\nfor name in {HEAVY!r}:\n    sys.modules[name] = None\n"
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", blocked + code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_on_arrays_imports_none_of_them(tmp_path: Path) -> None:
    code = """
import modelyard
from modelyard.cli import app, components, training
from modelyard.data.open_dataset import load_dataset
from modelyard.engine.jax import JaxEngine
from modelyard.loop import metric_hooks, recording, run
for name in ("digits", "synthetic", "cifar10", sys.argv[1] + "/cifar10.npz"):
    print(load_dataset(modelyard.load_config(engine="jax", dataset=name, data_dir=sys.argv[1])).size("train"))
"""
    labels = np.arange(20) % 10
    images = np.zeros((20, 32, 32, 3), np.uint8)
    np.savez(tmp_path / "cifar10.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    *others, cifar, path = map(int, without_them(code, str(tmp_path)).split())
    assert min(others) > 500
    assert 0 < cifar == path < 20  # some are set aside for validation


def test_a_run_on_arrays_trains_and_is_tested_without_them(tmp_path: Path) -> None:
    code = """
import modelyard
result = modelyard.train_and_evaluate(
    engine="jax", model="mlp", hidden_units="4", dataset="synthetic", synthetic_shape="4,4,1", train_steps=3,
    test_at_end=True, model_dir=sys.argv[1],
)
"""
    without_them(code, str(tmp_path / "run"))
    assert '"test"' in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert list((tmp_path / "run" / "events").rglob("events.out.tfevents.*"))
