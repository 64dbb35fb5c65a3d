"""Exports that a config asks for: of the best model, once, and never at the cost of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import modelyard
from cluster_processes import PARTS, cluster
from conftest import engine_name
from modelyard.comparison.matrix_folder import is_finished
from modelyard.errors import ConfigError, UserError
from modelyard.run.directory import RunDirectory
from modelyard.serving.exporting import export as exporting
from waiting import PATIENCE

OPTIONS: dict[str, Any] = {
    "model": "tiny_norm", "dataset": "digits", "train_steps": 30, "eval_every": "10 steps", "train_batch_size": 32,
}  # fmt: skip
WORDS = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
pytestmark = pytest.mark.tensorflow_only("exports are made by TensorFlow")


def go(folder: Path, **options: Any) -> modelyard.Result:
    return modelyard.train_and_evaluate(**{**OPTIONS, "engine": engine_name(), "model_dir": str(folder), **options})


def steps_of(base: Path) -> dict[str, int]:
    return {path.name: json.loads((path / "modelyard.json").read_text())["step"] for path in base.iterdir()}


@pytest.fixture
def broken_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras files that can't be written."""
    whole = exporting._format_functions

    def fail(*given: Any) -> None:
        raise ValueError("no room for it")

    monkeypatch.setattr(exporting, "_format_functions", lambda form: (fail, None) if form == "keras" else whole(form))


def test_the_best_model_is_exported_once(two_devices: None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = go(run, export_at_end="keras,tflite")
    assert result.exports == (str(run / "export-keras" / "1"), str(run / "export-tflite" / "1"))
    assert steps_of(run / "export-keras") == steps_of(run / "export-tflite") == {"1": result.best["step"]}
    # Started again, the run finds everything done.
    assert modelyard.resume(run).exports == result.exports
    assert list(steps_of(run / "export-keras")) == ["1"]
    # Made longer, with another best model, it is exported anew.
    longer = modelyard.resume(run, train_steps=60, export_at_end="keras")
    version = "1" if longer.best["step"] == result.best["step"] else "2"
    assert steps_of(run / "export-keras")[version] == longer.best["step"]
    assert longer.exports == (str(run / "export-keras" / version),)


def test_without_evaluations_the_last_model_is_exported(two_devices: None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {**OPTIONS, "train_steps": 5, "engine": engine_name(), "export_at_end": ["keras"]}
    assert modelyard.train(**options, model_dir=str(run)).exports == (str(run / "export-keras" / "1"),)
    assert steps_of(run / "export-keras") == {"1": 5}
    modelyard.resume(run, train_steps=8)
    assert steps_of(run / "export-keras") == {"1": 5, "2": 8}


@pytest.mark.usefixtures("broken_keras")
def test_an_export_that_fails_leaves_the_run_and_the_other_exports(two_devices: None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(modelyard.ExportFailedError) as caught:
        go(run, export_at_end="keras,tflite")
    assert caught.value.result.step == 30
    assert caught.value.result.exports == (str(run / "export-tflite" / "1"),)
    assert "not its export as keras: ValueError: no room for it" in str(caught.value)
    assert f"export {run} --format keras" in str(caught.value)
    assert "--format tflite" not in str(caught.value)
    assert [path.name for path in (run / "export-keras").iterdir()] == []
    # A cell of a matrix that has no export yet is not done.
    assert is_finished(RunDirectory(run), False, ["tflite"])
    assert not is_finished(RunDirectory(run), False, ["tflite", "keras"])


@pytest.mark.usefixtures("broken_keras")
def test_the_command_shows_the_result_and_how_to_try_again(
    two_devices: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = [*WORDS, "--engine", engine_name(), "--model_dir", str(run), "--export_at_end", "keras"]
    with pytest.raises(SystemExit) as left:
        modelyard.main(["train-and-evaluate", *words])
    shown = capsys.readouterr()
    assert left.value.code == 2
    assert f"run folder: {run}" in shown.out
    assert f"export {run} --format keras" in shown.err


def test_what_would_fail_at_the_end_is_said_before_training(
    two_devices: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match="export_at_end"):
        go(run, export_at_end="pickle")
    monkeypatch.setattr(exporting, "is_installed", lambda name: name != "tf2onnx")
    with pytest.raises(UserError, match="onnx needs tf2onnx"):
        go(run, export_at_end="saved_model,onnx")
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.parametrize("members", [{"worker": 1, "evaluator": 1}, {"worker": 2}])
def test_in_a_cluster_one_process_exports(tmp_path: Path, members: dict[str, int]) -> None:
    run = tmp_path / "run"
    words = ["train-and-evaluate", *PARTS, *WORDS, "--threads", "1", "--save_every", "10 steps"]
    for start in ("first", "again"):
        with cluster(tmp_path / start, **members) as both:
            both.start_all(*words, "--model_dir", str(run), "--export_at_end", "keras")
            assert set(both.wait(PATIENCE).values()) == {0}, both.said()
            assert both.said().count("exported: ") == 1
        best = [int(path.name.removeprefix("step-")) for path in (run / "best").iterdir()]
        assert steps_of(run / "export-keras") == {"1": best[0]}
