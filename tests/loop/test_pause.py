"""A run that pauses at pause_at goes on as if it had not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import modelyard
from conftest import engine_name
from modelyard.errors import ConfigError, RunError
from modelyard.run.directory import RunDirectory
from modelyard.run.metrics import read_metrics
from modelyard.run.summary import summarize

OPTIONS: dict[str, Any] = {
    "model": "mlp", "dataset": "digits", "hidden_units": [16], "train_batch_size": 64, "train_steps": 60,
    "eval_every": "20 steps", "log_every": 15, "deterministic": True, "learning_rate_schedule": "cosine",
    "test_at_end": True, "export_at_end": "keras", "best_metric": "loss", "hooks": "+early_stop(patience=1000)",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("two_devices")


def go(folder: str, **options: Any) -> modelyard.Result:
    return modelyard.train_and_evaluate(**{**OPTIONS, "engine": engine_name(), "model_dir": folder, **options})


def rows(folder: str | Path) -> list[dict[str, Any]]:
    timeless = ("seconds", "examples_per_second", "average_examples_per_second")
    return [{k: v for k, v in row.items() if k not in timeless} for row in read_metrics(Path(folder) / "metrics.jsonl")]


def saved(folder: str | Path) -> dict[str, Any]:
    """All that the run has at its end: the weights, the optimizer and the state of the hooks."""
    last = Path(folder) / "checkpoints/step-00000060"
    state = json.loads((last / "state.json").read_text())["memory"]
    kept = {key: state[key] for key in ("window", "evaluated_step", "stopped", "paused")}
    arrays = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    return {**arrays, **kept, "early_stop": state["hooks"]["early_stop"]}


def status(folder: str) -> str:
    return str(summarize(RunDirectory(Path(folder)))["status"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    go(str(folder))
    return folder


def test_a_paused_run_is_evaluated_and_saved_and_goes_on_bit_for_bit(undisturbed: Path) -> None:
    first = go("run", pause_at="20 steps")
    assert (first.step, first.paused, first.split, first.exports) == (20, True, "validation", ())
    assert status("run") == "paused at step 20 of 60"
    whole = rows(undisturbed)
    assert rows("run") == [row for row in whole if row["step"] <= 20]
    again = go("run", pause_at="20 steps")
    assert (again.step, again.paused, again.validation) == (20, True, first.validation)
    assert modelyard.resume("run", pause_at="66 %").step == 40
    assert rows("run") == [row for row in whole if row["step"] <= 40]
    last = modelyard.resume("run")
    assert (last.step, last.paused, last.split, len(last.exports)) == (60, False, "test", 1)
    assert status("run") == "finished"
    assert rows("run") == whole
    assert saved("run") == saved(undisturbed)
    assert "pause_at" not in Path("run/config.yaml").read_text()


def test_a_pause_between_evaluations_adds_one_and_changes_nothing_else(undisturbed: Path) -> None:
    result = go("run", pause_at="26 steps")
    assert status("run") == "paused at step 26 of 60"
    with pytest.raises(RunError, match="at step 26 already, and pause_at is step 10; nothing was changed"):
        modelyard.resume("run", pause_at="10 steps")
    assert modelyard.resume("run", pause_at="200 steps").step == 60, "the run is not longer than it was"
    more = [row for row in rows("run") if row["step"] == 26]
    assert [row["split"] for row in more] == ["validation"]
    assert more[0]["loss"] == pytest.approx(result.validation["loss"])
    assert [row for row in rows("run") if row["step"] != 26] == rows(undisturbed)
    assert saved("run") == saved(undisturbed)


def test_a_run_that_a_hook_stops_before_is_not_paused() -> None:
    result = go("run", pause_at="50 steps", hooks="+stop_at(metric=loss, value=100)", export_at_end="")
    assert (result.step, result.paused, result.split) == (20, False, "test")
    assert status("run") == "stopped early"


def test_training_without_evaluation_pauses_too(undisturbed: Path) -> None:
    options = {**OPTIONS, "model_dir": "run", "engine": engine_name()}
    assert modelyard.train(**options, pause_at="26 steps").paused
    assert modelyard.resume("run").step == 60
    weights = "checkpoints/step-00000060/weights.safetensors"
    assert (Path("run") / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_a_matrix_and_a_time_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pause_at.*wall-clock"):
        go("run", pause_at="1 h")
    with pytest.raises(ConfigError, match=r"pause_at: is not supported here"):
        modelyard.matrix(models=["mlp"], datasets=["digits"], output="m", pause_at="1 epochs")


class FailAt41(modelyard.Hook):
    """Ends the run at step 41, like a kill."""

    def on_steps(self, loop: Any, metrics: Any) -> None:
        if loop.step >= 41:
            raise ZeroDivisionError

    def next_step(self, loop: Any) -> int:
        return 41


def test_a_run_whose_checkpoint_is_at_the_pause_already_is_paused() -> None:
    modelyard.register_hook("fail_at_41")(FailAt41)
    with pytest.raises(ZeroDivisionError):
        go("run", save_every="20 steps", hooks="+fail_at_41")
    assert status("run") == "interrupted"
    assert modelyard.resume("run", pause_at="40 steps", hooks="").paused
    assert status("run") == "paused at step 40 of 60"
    assert [row["step"] for row in rows("run") if row["split"] == "validation"] == [20, 40]
