"""A run of one process has nothing to do with processes of several."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment
from waiting import PATIENCE

CODE = """
import sys, modelyard
modelyard.train_and_evaluate(
    model="mlp", dataset="digits", train_steps=2, train_batch_size=8, model_dir="run", hidden_units=[4], threads=1
)
found = [name for name in sys.modules if name.startswith("modelyard.distributed")]
assert not found, found
"""
ALONE = {"cluster": {"chief": ["127.0.0.1:2222"]}, "task": {"type": "chief", "index": 0}}


@pytest.mark.parametrize("tf_config", ["", json.dumps(ALONE)], ids=["no TF_CONFIG", "TF_CONFIG of one"])
def test_a_run_of_one_process_imports_nothing_of_distributed(tf_config: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**environment(), "TF_CONFIG": tf_config},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert Path("run/checkpoints").exists()
