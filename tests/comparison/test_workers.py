"""Worker processes that run cell after cell: the same numbers as alone, and what ends with a worker."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

import modelyard
from conftest import COMMAND, environment, on_engine
from modelyard.comparison.executor import CellJob, RunningCell, Slot
from modelyard.comparison.workers import Workers, _settings
from modelyard.config import load_config
from waiting import PATIENCE, wait_until

SHORT = ("--train_steps", "40", "--train_batch_size", "32", "--eval_every", "20 steps", "--threads", "1")


def start(*words: str, faults: str = "") -> subprocess.Popen[str]:
    more = {"MODELYARD_FAULTS": faults} if faults else {}
    return subprocess.Popen(
        [*COMMAND, "matrix", *words, *on_engine()], env={**environment(), **more}, stderr=subprocess.PIPE, text=True
    )


def numbers(cell: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "second" not in key and key != "time"} for row in rows]


def weights(cell: Path) -> dict[str, str]:
    last = max((cell / "checkpoints").glob("step-*"))  # those before it depend on the time
    files = sorted(last.glob("*.safetensors"))
    assert files
    return {str(file.relative_to(cell)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def holder(cell: Path) -> int | None:
    path = cell / "runlogs/chief.pid"
    return int(path.read_text() or 0) or None if path.exists() else None


def workers_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "modelyard.cli.worker" in words and words[-1] == str(folder):
            found.append(process)
    return found


def test_cells_that_share_a_worker_have_the_bits_of_those_that_are_alone(tmp_path: Path) -> None:
    """And a crash, a mistake or other settings end the worker of that cell only."""
    Path("broken.npz").write_bytes(b"PK\x03\x04 and nothing more")
    Path("plan.yaml").write_text(
        "axes: {model: [mlp, simple_cnn], dataset: [digits, broken.npz], random_seed: [0, 1, 2]}\n"
        "exclude: [{model: simple_cnn, dataset: broken.npz}, {dataset: broken.npz, random_seed: [1, 2]}]\n"
        "options: {hidden_units: [16], dropout_rate: 0.3, augment: [flip_left_right, noise]}\n"
    )
    folder, alone = tmp_path / "shared", tmp_path / "alone"
    process = start("plan.yaml", "--output", str(folder), *SHORT, faults="kill@step=30:run=mlp-digits-seed1")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, errors
    assert "mlp-digits-seed1: failed after" in errors
    assert "killed by SIGKILL" in errors
    assert "broken.npz" in json.loads((folder / "failed.json").read_text())["mlp-broken-seed0"]
    assert "error: " in (folder / "runlogs/mlp-broken-seed0.log").read_text()
    logs = {path.stem: path.read_text() for path in (folder / "runlogs").glob("*-seed*.log")}
    assert sum("loading " in log for log in logs.values()) < len(logs)  # some found the engine loaded
    assert not workers_of(folder)

    again = start("--output", str(folder))  # the cell that was killed goes on
    _, errors = again.communicate(timeout=PATIENCE)
    assert "mlp-digits-seed1: done" in errors
    assert json.loads((folder / "failed.json").read_text()).keys() == {"mlp-broken-seed0"}

    own = [sys.executable, "-m", "modelyard"]
    modelyard.matrix("plan.yaml", output=alone, program=own, **_options())
    for name in (f"{model}-digits-seed{seed}" for model in ("mlp", "simple_cnn") for seed in range(3)):
        assert numbers(folder / "cells" / name) == numbers(alone / "cells" / name), name
        assert weights(folder / "cells" / name) == weights(alone / "cells" / name), name


def _options() -> dict[str, Any]:
    words = [*SHORT, *on_engine()]
    return {key.removeprefix("--"): value for key, value in zip(words[::2], words[1::2], strict=True)}


def test_a_signal_saves_the_cell_of_a_worker_and_no_worker_outlives_a_killed_matrix(tmp_path: Path) -> None:
    words = ("--models", "mlp", "--datasets", "digits", "--seeds", "2", "--output", str(tmp_path / "m"), "--jobs", "1")
    words = (*words, "--train_steps", "1000000", "--save_every", "10 steps", "--eval_every", "1000000 steps")
    process = start(*words)
    cell = tmp_path / "m/cells/mlp-digits-seed0"
    wait_until(lambda: any(cell.glob("checkpoints/step-0*[1-9]*")), "a checkpoint", process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, errors
    assert "mlp-digits-seed0: stopped" in errors
    assert not workers_of(tmp_path / "m")
    steps = sorted(path.name for path in cell.glob("checkpoints/step-*"))

    process = start("--output", str(tmp_path / "m"))
    wait_until(lambda: sorted(path.name for path in cell.glob("checkpoints/step-*")) > steps, "a step", process)
    [worker] = workers_of(tmp_path / "m")
    assert holder(cell) == worker.pid
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(
    "change", [{"precision": "float64"}, {"deterministic": True}, {"threads": 2}, {"num_gpus": 0}, {"engine": "jax"}]
)
def test_settings_that_a_process_has_once_are_those_of_all_cells_of_a_worker(change: dict[str, Any]) -> None:
    plain = load_config(model="mlp", dataset="digits", engine="tensorflow")
    other = load_config(model="simple_cnn", dataset="digits", engine="tensorflow", random_seed=3)
    changed = load_config(**{"model": "mlp", "dataset": "digits", "engine": "tensorflow", **change})
    first, second, third = (
        _settings(CellJob("a", (), config, config.threads, Slot({}, 1), Path())) for config in (plain, other, changed)
    )
    assert first == second
    assert first != third


def test_a_worker_that_has_grown_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    total = 1000
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
    workers = Workers([], Path("m"), [Slot({}, 1)] * 2)

    def is_replaced(first: int, now: int, is_idle: bool = True) -> bool:
        return workers._has_grown(cast(Any, SimpleNamespace(first_memory=first, memory=now, is_idle=is_idle)))

    assert is_replaced(100, 260)
    assert not is_replaced(140, 260)  # it has not doubled
    assert not is_replaced(10, 240)  # it is small
    assert not is_replaced(100, 260, is_idle=False)


@pytest.mark.parametrize("of_user", [{"plugins": ("mine.py",)}, {"model": "saved_model"}])
def test_cells_with_code_of_the_user_have_processes_of_their_own(of_user: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(model="mlp", dataset="digits").model_copy(update=of_user)
    workers = Workers([sys.executable, "-S", "-c", "print('alone')"], Path("m"), [Slot({}, 1)])
    ended: queue.SimpleQueue[RunningCell] = queue.SimpleQueue()
    cell = workers.start(CellJob("a", (), config, 1, Slot({}, 1), tmp_path), ended.put)
    assert ended.get(timeout=PATIENCE) is cell
    assert cell.reap() == 0
    assert (tmp_path / "a.log").read_text() == "alone\n"
    workers.close()
