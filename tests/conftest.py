"""Shared by all tests. TensorFlow is set up once per process, with two CPU devices and two threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
COMMAND = [sys.executable, "-m", "modelyard"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own, where no project.yaml is picked up by accident."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def two_devices() -> None:
    """TensorFlow in this process, with two logical CPU devices to choose from."""
    from modelyard.config.backend import select_engine

    select_engine("tensorflow")
    import tensorflow as tf

    if not getattr(two_devices_ready, "done", False):
        tf.config.threading.set_intra_op_parallelism_threads(2)
        tf.config.threading.set_inter_op_parallelism_threads(2)
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        tf.config.list_logical_devices()  # starts it: from here on nothing changes
        two_devices_ready.done = True  # type: ignore[attr-defined]
    import parts  # noqa: F401 - registers the models of the tests


def two_devices_ready() -> None:
    """Carries the mark that TensorFlow is set up."""


def environment(**extra: str) -> dict[str, str]:
    """For a process of its own: quiet, and with the tests' parts on its path."""
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "200", **extra}


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``modelyard`` with the given words as a process, and waits for it."""

    def run(*words: str, code: int | None = 0, **extra: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *words], capture_output=True, text=True, timeout=300, env=environment(**extra), check=False
        )
        if code is not None:
            assert done.returncode == code, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The object in the last line of standard output."""
    value: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return value
