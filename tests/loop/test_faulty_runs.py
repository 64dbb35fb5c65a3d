"""Faults of disks and code in the middle of a run: what it says, what it keeps, and that it ends the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import modelyard
from modelyard import faults
from modelyard.errors import UNAVAILABLE, RunError
from modelyard.run.checkpoint import list_best, list_checkpoints
from modelyard.run.metrics import read_metrics
from modelyard.system import files
from modelyard.system.files import PARTIAL
from photos import photo_folder

pytestmark = pytest.mark.usefixtures("two_devices")
STEPS = 40


def go(folder: Path | str, **options: Any) -> modelyard.Result:
    """A small run on digits, with checkpoints, evaluations and best models."""
    chosen = {"dataset": "digits", "model": "mlp", "hidden_units": [16], "train_batch_size": 32, **options}
    return modelyard.train_and_evaluate(
        model_dir=str(folder), deterministic=True, train_steps=STEPS, eval_every="10 steps", save_every="5 steps",
        log_every="10 steps", **chosen,
    )  # fmt: skip


def outcome(folder: Path | str) -> tuple[Any, ...]:
    """Everything that is learned and written, without times."""
    run = Path(folder)
    last = list_checkpoints(run / "checkpoints")[STEPS]
    kept = ("step", "split", "loss", "accuracy", "learning_rate")
    rows = [{key: row[key] for key in kept if key in row} for row in read_metrics(run / "metrics.jsonl")]
    tensors = [(last / name).read_bytes() for name in ("weights.safetensors", "optimizer.safetensors")]
    best = {path.name: (path / "weights.safetensors").read_bytes() for path in list_best(run / "best")}
    return tensors, rows, best


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> tuple[Any, ...]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    go(folder)
    return outcome(folder)


@pytest.mark.parametrize(
    "fault", ["enospc@save=1", "enospc@save=4", "enospc@file=25", "eio@file=3", "crash@step=23", "crash@evaluate=2"]
)
def test_a_run_that_a_fault_has_ended_is_resumed_exactly(
    fault: str, undisturbed: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.VARIABLE, fault)
    kind, message, status = RunError, "the disk is full: .* Make space", 2  # a person has to do something
    if "eio" in fault:
        message, status = "can't write .* Input/output error", UNAVAILABLE
    elif "crash" in fault:
        kind, message = faults.InjectedCrashError, fault
    with pytest.raises(kind, match=message) as raised:
        go("run")
    assert getattr(raised.value, "exit_status", status) == status
    assert STEPS not in list_checkpoints(Path("run/checkpoints"))
    result = go("run")  # the variable is still set: the fault happens once in a run
    assert result.step == STEPS
    assert outcome("run") == undisturbed
    assert not list(Path("run").rglob(f"{PARTIAL}*"))
    assert (Path("run/runlogs/chief.log").read_text()).count(f"FAULT INJECTED: {fault}") == 1


def test_errors_that_pass_and_slow_storage_change_nothing(
    undisturbed: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setenv(faults.VARIABLE, "eio@save=2, eio@save=5, eio@save=6, slow@save=20ms")
    go("run")
    log = Path("run/runlogs/chief.log").read_text()
    assert log.count("Input/output error (eio@save") == 3
    assert outcome("run") == undisturbed


def test_images_that_cannot_be_read_for_a_moment_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    photos = photo_folder(tmp_path / "photos", 60)
    options = {"dataset": str(photos), "image_size": 16, "train_batch_size": 8}
    go("undisturbed", **options)
    monkeypatch.setattr(files, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setenv(faults.VARIABLE, "eio@read=0.1")
    go("run", **options)
    assert outcome("run") == outcome("undisturbed")
    tried = [record for record in caplog.records if "Next try in 0 s" in record.getMessage()]
    assert tried
    monkeypatch.setenv(faults.VARIABLE, "eio@read=1.0")
    with pytest.raises(modelyard.UserError, match=r"photos.* can't be read: Input/output error") as raised:
        go("unreadable", **options)
    assert raised.value.exit_status == UNAVAILABLE
