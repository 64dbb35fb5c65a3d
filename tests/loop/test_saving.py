"""When a run is saved, and what it resumes from: the newest of the checkpoints and the best models."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import modelyard
from modelyard.errors import RunError
from modelyard.loop import trainer as trainer_module
from modelyard.loop.trainer import SavePace
from modelyard.run import checkpoint
from modelyard.run.checkpoint import OPTIMIZER, STATE, WEIGHTS, list_checkpoints, list_saved
from modelyard.run.metrics import read_metrics

OPTIONS = {
    "model": "mlp", "dataset": "digits", "hidden_units": [16], "train_batch_size": 64, "train_steps": 60,
    "eval_every": "20 steps", "log_every": 15, "save_every": "1 h", "best_metric": "loss", "deterministic": True,
    "hooks": "+early_stop(patience=1000, min_delta=9), -tensorboard",
}  # fmt: skip
FAILING = f"{OPTIONS['hooks']}, +fail_at_50"


pytestmark = pytest.mark.usefixtures("two_devices")


class FailAt50(modelyard.Hook):
    """Ends the run at step 50, like a kill: what was saved until then is there."""

    def on_steps(self, loop: Any, metrics: Any) -> None:
        if loop.step >= 50:
            raise ZeroDivisionError

    def next_step(self, loop: Any) -> int:
        return 50


def go(folder: Path, **options: Any) -> modelyard.Result:
    return modelyard.train_and_evaluate(**{**OPTIONS, "model_dir": str(folder), **options})


def rows(folder: Path) -> list[dict[str, Any]]:
    timeless = ("seconds", "examples_per_second", "average_examples_per_second")
    return [{k: v for k, v in row.items() if k not in timeless} for row in read_metrics(folder / "metrics.jsonl")]


def final_state(folder: Path) -> list[bytes]:
    return [(folder / "checkpoints/step-00000060" / name).read_bytes() for name in (WEIGHTS, OPTIMIZER)]


def loop_state(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / STATE).read_text())["memory"])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    go(folder)
    return folder


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    """A run that ended at step 50. Its only checkpoint is that of step 0, its best model that of step 40."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    modelyard.register_hook("fail_at_50")(FailAt50)
    with pytest.raises(ZeroDivisionError):
        go(folder, hooks=FAILING, keep_best=2)
    assert list(list_checkpoints(folder / "checkpoints")) == [0]
    assert list(list_checkpoints(folder / "best")) == [20, 40]
    return folder


@pytest.fixture
def killed(ended: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ended, tmp_path / "run"))


@pytest.fixture(autouse=True)
def _log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    caplog.set_level(logging.INFO, "modelyard")


def test_a_run_resumes_from_a_newer_best_model_bit_for_bit(
    killed: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go(killed)
    assert "resuming at step 40 of 60" in caplog.text
    assert final_state(killed) == final_state(undisturbed)
    assert rows(killed) == rows(undisturbed)
    last = "checkpoints/step-00000060"
    hooks = [loop_state(folder / last)["hooks"]["early_stop"] for folder in (killed, undisturbed)]
    assert hooks[0] == hooks[1]
    assert sorted(list_checkpoints(killed / "checkpoints")) == [0, 40, 60]


def test_a_damaged_newest_best_model_is_passed_over_and_kept_again(
    killed: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(killed / "best/step-00000040" / WEIGHTS)
    modelyard.resume(killed, hooks=OPTIONS["hooks"])
    assert "step-00000040/weights.safetensors is damaged" in caplog.text
    assert "resuming at step 20 of 60" in caplog.text
    assert final_state(killed) == final_state(undisturbed)
    assert rows(killed) == rows(undisturbed)
    assert sorted(path.name for path in (killed / "best").iterdir()) == [
        "damaged-step-00000040", "step-00000040", "step-00000060",
    ]  # fmt: skip


def test_a_run_whose_checkpoints_are_all_damaged_resumes_from_its_best_model(
    killed: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(killed / "checkpoints/step-00000000" / WEIGHTS)
    go(killed, train_steps=60)
    assert "resuming at step 40 of 60" in caplog.text
    assert final_state(killed) == final_state(undisturbed)


def test_a_best_model_of_an_earlier_version_is_not_resumed_from(killed: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was saved before all hooks had seen its evaluation."""
    for path in list_checkpoints(killed / "best").values():
        state = json.loads((path / STATE).read_text())
        del state["memory"]["resumable"]
        (path / STATE).write_text(
            json.dumps({key: state[key] for key in ("format_version", "step", "sha256", "memory")})
        )
    go(killed)
    assert "resuming at step 0 of 60" in caplog.text


def test_the_best_models_of_another_run_are_not_resumed_from(killed: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds the best models of another run"):
        go(tmp_path / "new", best_model_dir=str(killed / "best"))


def test_a_best_model_elsewhere_is_resumed_from(
    tmp_path: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    modelyard.register_hook("fail_at_50")(FailAt50)
    elsewhere = {"best_model_dir": str(tmp_path / "best")}
    with pytest.raises(ZeroDivisionError):
        go(tmp_path / "run", hooks=FAILING, **elsewhere)
    modelyard.resume(tmp_path / "run", hooks=OPTIONS["hooks"])
    assert "resuming at step 40 of 60" in caplog.text
    assert final_state(tmp_path / "run") == final_state(undisturbed)


def test_by_default_no_evaluation_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model is not among the best: there, a checkpoint is saved."""
    modelyard.register_hook("fail_at_50")(FailAt50)
    monkeypatch.setattr(SavePace, "share", float("inf"))
    monkeypatch.setattr(SavePace, "least_seconds", 0.0)
    monkeypatch.setattr(trainer_module.BackgroundWriter, "is_busy", False)
    with pytest.raises(ZeroDivisionError):
        go(tmp_path / "run", hooks=FAILING, save_every="auto", best_mode="max")
    assert list(list_checkpoints(tmp_path / "run/best")) == [20]
    assert list(list_saved(tmp_path / "run/checkpoints", tmp_path / "run/best")) == [0, 20, 40]
    assert list(list_checkpoints(tmp_path / "run/checkpoints")) == [0, 40], "one of 20 is not necessary"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "the run is finished: all 60 steps are trained. To train longer: modelyard resume {} --train_steps 120"),
        (
            {"hooks": "+stop_at(metric=accuracy, value=0)", "train_steps": None, "train_epochs": 2},
            "the run was stopped at step 20 of 41: accuracy",
        ),
    ],
    ids=["all steps", "stopped"],
)
def test_a_run_that_has_nothing_to_train_says_why_and_how_to_train_longer(
    tmp_path: Path, undisturbed: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], said: str
) -> None:
    run = Path(shutil.copytree(undisturbed, tmp_path / "run")) if not options else tmp_path / "run"
    if options:
        go(run, **options)
    modelyard.resume(run)
    assert said.format(run) in caplog.text
    assert ("--train_epochs 4" in caplog.text) == bool(options)
    assert "resuming at step" not in caplog.text


def test_a_training_row_is_written_at_every_evaluation(undisturbed: Path) -> None:
    written = [(row["split"], row["step"]) for row in rows(undisturbed)]
    assert written == [
        ("train", 15), ("train", 20), ("validation", 20), ("train", 30), ("train", 40), ("validation", 40),
        ("train", 45), ("train", 60), ("validation", 60),
    ]  # fmt: skip


def test_of_equally_good_models_the_one_with_the_lower_loss_is_kept_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelyard.engine.base import Engine, Evaluation

    real = Engine.evaluate_examples
    losses = iter([0.5, 0.3, 0.4, 0.3, 0.2])

    def scored(self: Engine, split: str, progress: Any = None) -> Evaluation:
        found = real(self, split, progress)
        return Evaluation({**found.metrics, "accuracy": 0.9, "loss": next(losses)}, found.examples)

    monkeypatch.setattr(Engine, "evaluate_examples", scored)
    kept = []
    for steps in (2, 3, 4, 5):  # each is a start of its own
        result = go(tmp_path / "run", train_steps=steps, eval_every="1 steps", best_metric="accuracy")
        kept.append((result.best["step"], list(list_checkpoints(tmp_path / "run/best"))))
    assert kept == [(2, [2]), (2, [2]), (2, [2]), (5, [5])], "the earlier one, if the loss is the same, too"


def test_a_hook_that_evaluates_at_the_start_keeps_the_weights_it_evaluated(tmp_path: Path) -> None:
    @modelyard.register_hook("evaluate_first")
    class EvaluateFirst(modelyard.Hook):
        order = 95

        def on_begin(self, loop: Any) -> None:
            loop.evaluate("validation")

    go(tmp_path / "run", train_steps=2, keep_best=9, hooks="+evaluate_first, -tensorboard")
    best = {step: loop_state(path) for step, path in list_checkpoints(tmp_path / "run/best").items()}
    assert {step: (state["best"]["step"], state["resumable"]) for step, state in best.items()} == {
        0: (0, False), 2: (2, True),
    }  # fmt: skip
    first = tmp_path / "run/checkpoints/step-00000000"
    assert (tmp_path / "run/best/step-00000000" / WEIGHTS).read_bytes() == (first / WEIGHTS).read_bytes()


def test_a_best_model_that_is_replaced_while_it_is_looked_for_is_not_missed(
    killed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best, real = killed / "best", checkpoint.read_loop_state
    shutil.move(best / "step-00000040", killed / "new")

    def replaced(path: Path) -> dict[str, Any]:
        if (killed / "new").exists():  # the run does this between the listing and the reading
            shutil.move(killed / "new", best / "step-00000040")
            shutil.rmtree(best / "step-00000020")
        return real(path)

    monkeypatch.setattr(checkpoint, "read_loop_state", replaced)
    assert checkpoint.select_checkpoint(killed / "checkpoints", best).parent == best
    assert "skipped" not in caplog.text


# -- when save_every is auto ------------------------------------------------------------------------------------------


def test_saving_never_takes_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(trainer_module, "available_cores", lambda: 4)
    writer: Any = SimpleNamespace(is_busy=False, blocked_seconds=0.0, cpu_seconds=0.0)
    pace = SavePace(writer)

    def is_due(at: float, evaluated: int | None = None) -> bool:
        nonlocal now
        now = 100.0 + at
        return pace.is_due(at, evaluated)

    pace.begin(None)
    pace.snapshot_seconds += 0.25
    writer.cpu_seconds += 1.0  # a quarter of four cores
    assert [at for at in range(0, 40, 5) if is_due(at)] == [25, 30, 35], "0.25 s + 0.25 s are 2 % of 25 s"
    assert [at for at in range(0, 40, 5) if is_due(at, evaluated=7)] == [25, 30, 35]
    pace.forget_cost()
    assert [at for at in range(0, 20, 5) if is_due(at)] == [10, 15]
    after_an_evaluation = [at for at in (0, 0.25, 0.75, 1, 1.25, 5) if is_due(at, evaluated=7)]
    assert after_an_evaluation == [1, 1.25, 5], "without waiting for 10 s, but a second after the save before"
    writer.is_busy = True
    assert not is_due(1000.0), "training does not wait for slow storage"


def test_save_every_is_auto_by_default() -> None:
    config = modelyard.load_config(model="mlp", dataset="digits")
    assert config.save_every is None
    assert config.flat()["save_every"] == "auto"
    assert modelyard.load_config(model="mlp", dataset="digits", save_every="10 min").flat()["save_every"] == "10 min"
