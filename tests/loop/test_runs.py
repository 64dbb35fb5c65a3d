"""Whole runs in this process: the run folder, resuming, best models, hooks."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

import modelyard
from conftest import engine_class
from modelyard.data.open_dataset import load_dataset
from modelyard.data.pipeline import Pipeline
from modelyard.errors import ConfigError, DataError, RunError, TrainingError, UserError
from modelyard.registry import OPTIMIZERS
from modelyard.run.checkpoint import list_best, list_checkpoints, read_checkpoint
from modelyard.run.directory import open_run_folder
from modelyard.run.examples import read_example_values
from modelyard.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("two_devices")
QUICK = {"model": "mlp", "dataset": "digits", "hidden_units": [16], "train_batch_size": 64, "log_every": 10}


def go(folder: str | Path = "run", **options: Any) -> modelyard.Result:
    return modelyard.train_and_evaluate(
        **{**QUICK, "train_steps": 40, "eval_every": 20, "model_dir": str(folder), **options}
    )


def metrics(folder: str | Path = "run") -> list[dict[str, Any]]:
    timeless = ("seconds", "examples_per_second", "average_examples_per_second")
    return [{k: v for k, v in row.items() if k not in timeless} for row in read_metrics(Path(folder) / "metrics.jsonl")]


def weights(folder: str | Path, step: int) -> dict[str, np.ndarray]:
    return read_checkpoint(Path(folder) / "checkpoints" / f"step-{step:08d}").weights


# -- the run folder ---------------------------------------------------------------------------------------------------


def test_the_run_folder_is_as_documented() -> None:
    result = go(hypothesis="it learns", test_at_end=True)
    run = Path("run")
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "manifest.json", "metrics.jsonl", "events", "checkpoints", "best", "examples", "runlogs",
        "splits.csv", ".lock", ".lock-evaluation",
    }  # fmt: skip
    assert list(list_checkpoints(run / "checkpoints")) == [0, 40]
    assert {p.name for p in (run / "checkpoints/step-00000040").iterdir()} == {
        "weights.safetensors", "optimizer.safetensors", "state.json",
    }  # fmt: skip
    assert {p.name for p in (run / "events").iterdir()} == {"train", "validation", "test"}
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["seeds"] == {"random_seed": 0, "split_seed": 0}
    assert manifest["dataset"]["sizes"] == {"train": 1295, "validation": 143, "test": 359}
    assert len(manifest["dataset"]["fingerprint"]) == 64
    assert {"keras", "numpy", "python"} <= set(manifest["starts"][0]["versions"])
    assert manifest["starts"][0]["engine"]["threads"] == 2
    rows = read_metrics(run / "metrics.jsonl")
    assert [(row["step"], row["split"]) for row in rows] == [
        (10, "train"), (20, "train"), (20, "validation"), (30, "train"), (40, "train"),
        (40, "validation"), (40, "test"),
    ]  # fmt: skip
    assert {"loss", "accuracy", "learning_rate", "seconds", "examples_per_second", "epoch"} <= set(rows[1])
    journal = Path("training_log.md").read_text()
    assert "**Hypothesis:** it learns" in journal
    assert f"- test accuracy: {result.metrics['accuracy']:.6g}" in journal
    assert result.split == "test"
    log = (run / "runlogs" / "chief.log").read_text()
    assert "versions: python" in log
    assert "all options: model=mlp" in log


def test_tensorboard_reads_scalars_images_and_graph() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    go()
    seen = EventAccumulator("run/events/train", size_guidance={"images": 0})
    seen.Reload()
    assert {"loss", "accuracy", "learning_rate"} <= set(seen.Tags()["scalars"])
    assert [event.step for event in seen.Scalars("loss")] == [10, 20, 30, 40]
    assert seen.Tags()["images"] == ["train/images"]
    assert seen.Images("train/images")[0].encoded_image_string.startswith(b"\x89PNG")
    names = [node.name for node in seen.Graph().node]
    assert names == ["image", "standardize", "flatten", "dense1", "logits"]
    validation = EventAccumulator("run/events/validation")
    validation.Reload()
    assert [event.step for event in validation.Scalars("accuracy")] == [20, 40]


def test_a_new_run_is_named_by_time_model_and_dataset_or_by_run_name() -> None:
    first = modelyard.train(**QUICK, train_steps=1)
    second = modelyard.train(**QUICK, train_steps=1, run_name="trial")
    assert Path(first.model_dir).name.endswith("-mlp-digits")
    assert Path(second.model_dir).name.endswith("-trial")
    assert Path(first.model_dir).parent == Path("runs")
    assert Path("runs/training_log.md").is_file()


def test_newest_checkpoints_and_best_models_are_kept() -> None:
    go(save_every="5 steps", keep_checkpoints=2, keep_best=3, eval_every="5 steps")
    assert list(list_checkpoints(Path("run/checkpoints"))) == [35, 40]
    kept = list_checkpoints(Path("run/best"))
    by_loss = sorted((row["accuracy"], -row["step"]) for row in metrics() if row["split"] == "validation")[-3:]
    assert sorted(kept) == sorted(-step for _, step in by_loss)


def test_values_of_each_example_are_written_with_every_model_that_is_kept() -> None:
    go(keep_best=2, eval_every="10 steps", eval_batch_size=50, test_at_end=True)
    run, kept = open_run_folder("run"), list_best(Path("run/best"))
    names = {f"validation-{path.name.removeprefix('step-')}.safetensors" for path in kept}
    tested = f"test-{kept[0].name.removeprefix('step-')}.safetensors"
    assert {path.name for path in Path("run/examples").iterdir()} == {*names, tested}
    for path in kept:
        found = read_example_values(run, "validation", int(path.name.removeprefix("step-")))
        assert found is not None
        (row,) = [row for row in metrics() if row["split"] == "validation" and row["step"] == found.step]
        assert found.values["accuracy"].mean(dtype=np.float64) == row["accuracy"]
        assert found.values["loss"].mean(dtype=np.float64) == pytest.approx(row["loss"], rel=1e-6)
        assert set(found.values) == {"accuracy", "loss", "label"}
    best, test = read_example_values(run, "validation"), read_example_values(run, "test")
    assert best is not None
    assert test is not None
    assert best.step == test.step == int(kept[0].name.removeprefix("step-"))
    stored = load_dataset(modelyard.load_config(**QUICK)).arrays("test")
    assert stored is not None
    np.testing.assert_array_equal(test.values["label"], stored["label"])


def test_a_run_without_values_of_examples_or_with_damaged_ones_is_read(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("modelyard").propagate = True
    go()
    run = open_run_folder("run")
    (file,) = Path("run/examples").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert read_example_values(run, "validation") is None
    assert f"{file.name} is skipped" in caplog.text
    shutil.rmtree("run/examples")
    assert read_example_values(run, "validation") is None
    go(train_steps=60)
    assert list_best(Path("run/best"))


def test_a_run_from_its_own_config_gives_the_same_metrics() -> None:
    go(
        "first",
        deterministic=True,
        augment="pad_and_crop(padding=1)",
        learning_rate_schedule="cosine",
        warmup="5 steps",
    )
    config = modelyard.load_config(config_file="first/config.yaml", model_dir="second")
    modelyard.train_and_evaluate(config)
    assert metrics("first") == metrics("second")
    assert yaml.safe_load(Path("first/config.yaml").read_text()) == yaml.safe_load(
        Path("second/config.yaml").read_text()
    )


def test_the_same_options_give_the_same_run_and_another_seed_another() -> None:
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        go(folder, random_seed=seed, deterministic=True)
    assert metrics("a") == metrics("b")
    assert metrics("a") != metrics("c")


# -- going on ---------------------------------------------------------------------------------------------------------


def test_a_longer_run_goes_on_where_it_was_and_writes_nothing_twice() -> None:
    go(train_steps=20, deterministic=True)
    go(train_steps=40, deterministic=True)
    go("whole", train_steps=40, deterministic=True)
    assert metrics("run") == metrics("whole")
    np.testing.assert_equal(weights("run", 40), weights("whole", 40))
    assert len(json.loads(Path("run/manifest.json").read_text())["starts"]) == 2


def test_reading_begins_beside_compiling_at_the_step_of_the_run_and_only_to_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []
    start = Pipeline.start

    def noted(pipeline: Pipeline, step: int, *rest: int) -> None:
        if pipeline._training is None:
            steps.append(step)
        start(pipeline, step, *rest)

    monkeypatch.setattr(Pipeline, "start", noted)
    go(train_steps=20, resident="never")
    assert steps == [0]
    go(train_steps=30, resident="never")
    assert steps == [0, 20]
    go(train_steps=30, resident="never")  # it is done
    modelyard.evaluate("run", split="test")
    assert steps == [0, 20]
    go("other", train_steps=20)
    assert steps == [0, 20], "resident data is not read ahead"


def test_a_finished_run_started_again_changes_nothing() -> None:
    first = go(test_at_end=True)
    before = metrics()
    second = go(test_at_end=True)
    assert metrics() == before
    assert second.metrics == pytest.approx(first.metrics)
    assert second.best == first.best


def test_a_run_restarted_after_its_best_evaluation_still_keeps_that_best() -> None:
    go(train_steps=30, eval_every="10 steps", optimizer="sgd")
    best = list(list_checkpoints(Path("run/best")))
    value = max(row["accuracy"] for row in metrics() if row["split"] == "validation")
    state = json.loads(Path(f"run/best/step-{best[0]:08d}/state.json").read_text())
    assert state["memory"]["best"]["value"] == value
    Path("run/metrics.jsonl").unlink()  # what is best is known from its own folder
    result = modelyard.resume("run", train_steps=31, hooks="+stop_at(value=2)")
    assert result.best["value"] >= value
    assert result.best["step"] in (best[0], 31)


def test_best_is_not_forgotten_when_later_models_are_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelyard.engine.base import Engine, Evaluation

    real = Engine.evaluate_examples
    scores = {10: 0.9, 20: 0.5, 30: 0.6, 40: 0.7}
    steps: list[int] = []

    def scored(self: Engine, split: str, progress: Any = None) -> Evaluation:
        steps.append(10 * (len(steps) + 1))
        found = real(self, split, progress)
        return Evaluation({**found.metrics, "accuracy": scores[steps[-1]]}, found.examples)

    monkeypatch.setattr(Engine, "evaluate_examples", scored)
    go(train_steps=20, eval_every="10 steps")
    assert list(list_checkpoints(Path("run/best"))) == [10]
    result = go(train_steps=40, eval_every="10 steps")
    assert list(list_checkpoints(Path("run/best"))) == [10]
    assert result.best["value"] == 0.9


def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("modelyard").propagate = True
    go(save_every="10 steps", deterministic=True)
    final = weights("run", 40)
    broken = Path("run/checkpoints/step-00000040/weights.safetensors")
    data = bytearray(broken.read_bytes())
    data[-3] ^= 1
    broken.write_bytes(data)
    with caplog.at_level(logging.WARNING, "modelyard"):
        go(save_every="10 steps", deterministic=True)
    assert "step-00000040/weights.safetensors is damaged" in caplog.text
    assert Path("run/checkpoints/damaged-step-00000040").is_dir()
    np.testing.assert_equal(weights("run", 40), final)


def test_a_run_folder_of_another_config_is_refused_with_the_differences() -> None:
    go()
    before = metrics()
    with pytest.raises(ConfigError) as caught:
        go(learning_rate=0.5, hidden_units=[8], random_seed=3)
    text = str(caught.value)
    assert "can't change when a run is resumed" in text
    for part in ("learning_rate: is 0.5 here, 0.001 in the run", "hidden_units", "random_seed"):
        assert part in text
    assert metrics() == before


def test_what_may_change_on_resume_may_change() -> None:
    go()
    result = go(
        train_steps=45, eval_batch_size=10, keep_checkpoints=1, log_every=5, hooks="-tensorboard", cpu_devices=2
    )
    assert result.step == 45


def test_resume_never_and_must() -> None:
    with pytest.raises(RunError, match="there is no run in run"):
        go(resume="must")
    go()
    with pytest.raises(RunError, match="resume is 'never'"):
        go(resume="never")
    assert go(resume="must").step == 40


def test_a_folder_that_is_no_run_is_left_alone() -> None:
    Path("thesis").mkdir()
    Path("thesis/chapter1.txt").write_text("dear to me")
    with pytest.raises(RunError, match="not empty and not a run folder"):
        go("thesis")
    assert [path.name for path in Path("thesis").iterdir()] == ["chapter1.txt"]


def test_a_start_that_fails_leaves_no_trace() -> None:
    with pytest.raises(DataError, match="images of at least"):
        go(model="simple_cnn", hidden_units=None, dataset="synthetic", synthetic_shape="2,2,1")
    assert not Path("run").exists()
    assert not Path("training_log.md").exists()
    assert go().step == 40
    with pytest.raises(UserError, match="devices"):
        go(cpu_devices=3, train_steps=50)
    assert yaml.safe_load(Path("run/config.yaml").read_text())["cpu_devices"] == 1
    assert go(train_steps=50).step == 50


def test_a_run_that_trained_nothing_starts_over_with_another_config() -> None:
    with pytest.raises(UserError, match=r"best_metric: there is no metric 'acuracy'.*'accuracy'"):
        go(best_metric="acuracy")
    assert not Path("run").exists()
    assert not Path("training_log.md").exists()
    assert go(best_metric="accuracy", random_seed=4).step == 40


@pytest.mark.parametrize("hooks", ["+early_stop(metric=los)", "+stop_at(metric=acc, value=1)"])
def test_a_metric_that_is_not_measured_is_refused_before_training(hooks: str) -> None:
    with pytest.raises(UserError, match="there is no metric") as caught:
        go(hooks=hooks)
    assert hooks[1:8] in str(caught.value)
    assert not Path("run").exists()


@pytest.mark.parametrize("options", [{"best_metric": "auc"}, {"hooks": "+early_stop(metric=auc)"}])
def test_a_metric_that_is_known_but_not_measured_is_to_be_added(options: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"the evaluations have no 'auc'. Add it to the metrics: --metrics auc"):
        go(**options)


def test_fewer_steps_than_are_done_are_refused_and_change_nothing() -> None:
    go()
    before = Path("run/config.yaml").read_text()
    with pytest.raises(RunError, match="is at step 40 already, and 10 are asked for"):
        go(train_steps=10)
    assert Path("run/config.yaml").read_text() == before


def test_the_best_is_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = go(best_model_dir="bests")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    second = modelyard.resume("../run", train_steps=41)
    assert Path(second.best["path"]).parent == tmp_path / "bests"
    assert second.best["value"] >= first.best["value"]
    assert list(Path().iterdir()) == []


def test_a_signal_in_an_evaluation_saves_at_once_and_the_evaluation_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import signal

    options = {"deterministic": True, "eval_batch_size": 20, "save_every": "1 h"}
    go("undisturbed", **options)
    engine = engine_class()
    real = engine.evaluate_batch
    calls: list[int] = []

    def interrupting(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments)

    monkeypatch.setattr(engine, "evaluate_batch", interrupting)
    with pytest.raises(modelyard.Interrupted, match=r"SIGTERM; everything is saved in .* modelyard\.resume\('.*run'\)"):
        go(**options)
    assert len(calls) == 3  # of eight batches
    assert max(list_checkpoints(Path("run/checkpoints"))) == 20
    go(**options)
    assert metrics("run") == metrics("undisturbed")
    np.testing.assert_equal(weights("run", 40), weights("undisturbed", 40))


def test_a_damaged_manifest_is_an_error() -> None:
    go()
    Path("run/manifest.json").write_text("{bad")
    with pytest.raises(RunError, match=r"manifest\.json is damaged"):
        modelyard.resume("run", train_steps=50)


def test_a_batch_larger_than_the_training_data_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    np.savez("small.npz", x_train=np.zeros((14, 4, 4), np.uint8), y_train=np.arange(14) % 2)
    go(dataset="small.npz", train_batch_size=64, train_steps=1, validation_fraction=0.2)
    assert "train_batch_size is 64, and there are only 12 training examples" in caplog.text


def test_options_that_nobody_changed_are_not_listed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "modelyard")
    go(train_steps=2, eval_every=2, engine="auto")
    (options,) = [line for line in caplog.messages if "options other than the defaults" in line]
    assert "data_dir" not in options
    caplog.clear()
    chosen = json.loads(Path("run/manifest.json").read_text())["starts"][-1]["engine"]["engine"]
    modelyard.evaluate("run", engine=chosen)
    assert not [line for line in caplog.messages if "when the run was last started" in line]


def test_changed_data_is_refused_on_resume() -> None:
    def save(value: int) -> None:
        labels = np.arange(60) % 3
        images = np.full((60, 4, 4), value, np.uint8) + labels[:, None, None].astype(np.uint8)
        np.savez("mine.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)

    save(1)
    go(dataset="mine.npz")
    save(2)
    with pytest.raises(DataError, match="is not the data this run started with"):
        go(dataset="mine.npz", train_steps=50)


def test_a_second_process_on_one_run_folder_is_refused() -> None:
    from modelyard.run.directory import RunDirectory

    go()
    with RunDirectory(Path("run")), pytest.raises(RunError, match=rf"in use by process {os.getpid()}"):
        go(train_steps=50)
    assert go(train_steps=50).step == 50


def test_the_best_folder_of_another_run_is_refused() -> None:
    go("one", best_model_dir="best")
    assert list_checkpoints(Path("best"))
    with pytest.raises(RunError, match="best models of another run"):
        go("two", best_model_dir="best")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("can't mount here")
    try:
        go(small / "run", save_every="10 steps", keep_checkpoints=1)
        before = weights(small / "run", 40)
        (small / "filler").write_bytes(b"x" * (os.statvfs(small).f_bavail * os.statvfs(small).f_frsize))
        with pytest.raises(RunError, match="disk is full"):
            go(small / "run", train_steps=80, save_every="10 steps", keep_checkpoints=1)
        np.testing.assert_equal(weights(small / "run", 40), before)
        (small / "filler").unlink()
        assert go(small / "run", train_steps=80, save_every="10 steps", keep_checkpoints=1).step == 80
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_that_cannot_be_written_is_a_clear_error() -> None:
    with pytest.raises(RunError, match=r"can't make the run folder /proc/nothing/run"):
        go("/proc/nothing/run")


# -- warm start and evaluation ----------------------------------------------------------------------------------


def test_checkpoint_path_starts_from_other_weights_once() -> None:
    go("first")
    start = weights("first", 40)
    best = read_checkpoint(next(iter(list_checkpoints(Path("first/best")).values()))).weights
    for path, expected in (("first", best), ("first/checkpoints/step-00000040", start)):
        folder = f"from-{path.replace('/', '-')}"
        go(folder, checkpoint_path=path, random_seed=9, save_every="10 steps", keep_checkpoints=9)
        np.testing.assert_equal(weights(folder, 0), expected)
    go(folder, checkpoint_path=path, random_seed=9, train_steps=50, save_every="10 steps", keep_checkpoints=9)
    with pytest.raises(ConfigError, match="checkpoint_path: there is no file or folder nowhere"):
        go("other", checkpoint_path="nowhere")
    with pytest.raises(UserError, match=r"checkpoint_path \S*first: strict, but .*Choose the model"):
        go("other", checkpoint_path="first", hidden_units=[5], strict=True)


def test_evaluate_takes_best_latest_or_a_step_on_any_split() -> None:
    trained = go(save_every="10 steps", keep_checkpoints=9)
    rows = {(row["step"], row["split"]): row for row in metrics()}
    best = modelyard.evaluate("run")
    assert best.step == trained.best["step"]
    latest = modelyard.evaluate("run", checkpoint="latest")
    assert latest.metrics["accuracy"] == rows[40, "validation"]["accuracy"]
    assert modelyard.evaluate("run", checkpoint=0).model_step == 0
    assert modelyard.evaluate("run", checkpoint="20").metrics["loss"] == pytest.approx(rows[20, "validation"]["loss"])
    assert modelyard.evaluate("run", checkpoint="0", split="test").metrics["accuracy"] < 0.5
    with pytest.raises(UserError, match=r"no checkpoint '7'.*Steps saved: 0, 10, 20, 30, 40"):
        modelyard.evaluate("run", checkpoint="7")
    with pytest.raises(RunError, match="does not exist"):
        modelyard.evaluate("elsewhere")


def test_train_does_not_evaluate_and_train_and_evaluate_can_go_on_from_it() -> None:
    modelyard.train(**QUICK, train_steps=20, model_dir="run")
    assert {row["split"] for row in metrics()} == {"train"}
    result = modelyard.train_and_evaluate(**QUICK, train_steps=20, model_dir="run", test_at_end=True)
    assert result.split == "test"
    again = modelyard.train_and_evaluate(**QUICK, train_steps=20, model_dir="run", test_at_end=True)
    assert [row["split"] for row in metrics()].count("validation") == 1
    assert again.validation == pytest.approx(result.validation)


# -- hooks ----------------------------------------------------------------------------------------------------


def test_early_stop_and_its_patience_survive_a_restart() -> None:
    stop = {"hooks": "+early_stop(metric=accuracy, patience=3, min_delta=1)", "eval_every": "10 steps"}
    result = go(train_steps=200, **stop)
    assert result.step == 40  # the first evaluation sets the mark, three more do not beat it by 1
    assert go(train_steps=200, **stop).step == 40
    go("parts", train_steps=20, **stop)
    assert go("parts", train_steps=200, **stop).step == 40
    assert go("parts", train_steps=60, eval_every="10 steps").step == 60


def test_stop_at_a_threshold() -> None:
    result = go(train_steps=500, hooks="+stop_at(value=0.5)", eval_every="5 steps")
    assert result.validation["accuracy"] >= 0.5
    assert result.step < 500


def test_the_nan_guard_names_the_step_and_keeps_the_checkpoints() -> None:
    with pytest.raises(
        TrainingError, match=r"the loss became (nan|inf) at step \d+\. The checkpoints before it are kept"
    ):
        go(optimizer="sgd", learning_rate=1e30)
    assert list(list_checkpoints(Path("run/checkpoints"))) == [0]


def test_weights_that_are_not_finite_are_not_saved() -> None:
    with pytest.raises(TrainingError, match="not finite after step"):
        go(optimizer="sgd", learning_rate=1e30, save_every="1 steps", keep_checkpoints=1, hooks="-nan_guard")
    saved = list_checkpoints(Path("run/checkpoints"))
    assert saved
    for path in saved.values():
        assert all(np.isfinite(value).all() for value in read_checkpoint(path).weights.values())


def test_weights_that_are_not_finite_are_not_kept_as_the_best() -> None:
    with pytest.raises(TrainingError, match="not finite after step"):
        go(optimizer="sgd", learning_rate=1e30, eval_every="1 steps", keep_best=9, hooks="-nan_guard, -checkpoint")
    for path in list_best(Path("run/best")):
        assert all(np.isfinite(value).all() for value in read_checkpoint(path).weights.values())


def test_a_run_that_is_evaluated_by_its_name_is_reported_with_its_folder() -> None:
    go("runs/named", train_steps=10)
    assert Path(modelyard.evaluate("named").model_dir) == Path("runs/named")


def test_a_damaged_best_is_passed_over_at_the_end() -> None:
    go(keep_best=2, eval_every="10 steps")
    best = modelyard.evaluate("run").model_step
    broken = Path(f"run/best/step-{best:08d}/weights.safetensors")
    broken.write_bytes(broken.read_bytes()[:-1] + b"x")
    assert go(keep_best=2, eval_every="10 steps", test_at_end=True).split == "test"


def test_evaluations_are_throttled_but_the_last_always_happens() -> None:
    go(eval_every="5 steps", eval_throttle_secs=3600)
    assert [row["step"] for row in metrics() if row["split"] == "validation"] == [5, 40]


def test_the_profiler_writes_a_profile() -> None:
    go(hooks="+profiler(start=5, steps=5)")
    assert list(Path("run/profile").rglob("*.xplane.pb"))


def test_hooks_can_be_replaced_taken_away_and_written_by_a_user() -> None:
    calls: list[tuple[str, int]] = []

    @modelyard.register_hook("recorder")
    class Recorder(modelyard.Hook):
        """Notes what happens."""

        def next_step(self, loop: Any) -> int | None:
            return 7 if loop.step < 7 else None

        def on_boundary(self, loop: Any) -> None:
            calls.append(("boundary", loop.step))

        def on_evaluation(self, loop: Any, split: str, row: dict[str, Any]) -> None:
            calls.append((split, row["step"]))

    go(hooks="recorder")
    assert ("boundary", 7) in calls
    assert ("validation", 40) in calls
    assert list_checkpoints(Path("run/checkpoints")) == {}
    assert not Path("run/metrics.jsonl").exists()
    go("second", hooks="-best,-tensorboard")
    assert not Path("second/best").exists()
    assert not Path("second/events").exists()
    with pytest.raises(ConfigError, match="mixes"):
        go("third", hooks="+profiler, log")


def test_hooks_with_the_old_method_names_work_with_a_warning() -> None:
    calls: dict[str, Any] = {}

    with pytest.warns(FutureWarning, match="Before") as first:

        class Before(modelyard.Hook):
            """Has the names of earlier versions."""

            def begin(self, loop: Any) -> None:
                calls.setdefault("begin", loop.step)

            def trained(self, loop: Any, metrics: Any) -> None:
                calls["trained"] = len(metrics["loss"])

            def reported(self, loop: Any, row: dict[str, Any]) -> None:
                calls["reported"] = row["split"]

            def evaluated(self, loop: Any, split: str, row: dict[str, Any]) -> None:
                calls["evaluated"] = split

            def settled(self, loop: Any) -> None:
                calls["settled"] = loop.step

            def interrupted(self, loop: Any) -> None:
                calls["interrupted"] = loop.step

            def end(self, loop: Any) -> None:
                calls["end"] = loop.step

            def memory(self) -> dict[str, Any]:
                return {"seen": calls.get("settled", 0)}

            def remember(self, memory: dict[str, Any]) -> None:
                calls["remembered"] = memory["seen"]

    assert len(first) == 1, "one for each class, with all its methods"
    assert str(first[0].message).count("→") == 9
    with pytest.warns(FutureWarning, match="Old has old method names.*: trained → on_steps$"):

        class Old(Before):
            """A subclass that calls its parent by the old name."""

            def trained(self, loop: Any, metrics: Any) -> None:
                super().trained(loop, metrics)

    modelyard.register_hook("old")(Old)
    go(hooks="+old")
    assert calls.pop("trained") > 0
    assert calls == {"begin": 0, "reported": "train", "evaluated": "validation", "settled": 40, "end": 40}
    go(hooks="+old", train_steps=41)
    assert (calls["remembered"], calls["settled"]) == (40, 41)
    with pytest.warns(FutureWarning, match="interrupted → on_interrupt$"):

        class Interrupts(Old):
            def interrupted(self, loop: Any) -> None:
                super().interrupted(loop)

    Interrupts(modelyard.Options()).on_interrupt(SimpleNamespace(step=3))  # type: ignore[arg-type]
    assert calls["interrupted"] == 3


def test_old_names_of_hook_methods_may_come_from_a_mixin() -> None:
    called: list[str] = []

    class Evaluates:
        def evaluated(self, loop: Any, split: str, row: dict[str, Any]) -> None:
            called.append(split)

    with pytest.warns(FutureWarning, match="evaluated → on_evaluation$"):

        class Mixed(Evaluates, modelyard.Hook):
            """Has a method of a class that is not a hook."""

    Mixed(modelyard.Options()).on_evaluation(None, "validation", {})  # type: ignore[arg-type]
    assert called == ["validation"]


def test_the_old_names_of_hook_methods_can_still_be_called() -> None:
    from modelyard.loop.hooks import Hook
    from modelyard.loop.metric_hooks import EarlyStop, EarlyStopOptions

    hook: Any = EarlyStop(EarlyStopOptions())
    hook.remember({"best": 0.5, "waited": 2})
    assert hook.memory() == hook.state_dict() == {"best": 0.5, "waited": 2}
    plain: Any = Hook(modelyard.Options())
    plain.trained(None, {})
    plain.settled(None)
    assert plain.memory() == {}


def test_a_user_hook_that_fails_does_not_cost_the_run() -> None:
    @modelyard.register_hook("clumsy")
    class Clumsy(modelyard.Hook):
        """Fails late."""

        def on_steps(self, loop: Any, metrics: Any) -> None:
            if loop.step >= 30:
                raise ZeroDivisionError("oh")

    with pytest.raises(ZeroDivisionError) as caught:
        go(hooks="+clumsy", save_every="10 steps")
    assert any("in the hook 'clumsy'" in note for note in caught.value.__notes__)
    assert any("modelyard resume" in note for note in caught.value.__notes__)
    assert max(list_checkpoints(Path("run/checkpoints"))) == 20
    assert go(save_every="10 steps").step == 40


# -- a user's own parts ---------------------------------------------------------------------------------------


def test_own_model_dataset_optimizer_and_options_by_name() -> None:
    import keras
    from pydantic import Field

    class StripeOptions(modelyard.Options):
        stripe_count: int = Field(90, description="how many")

    @modelyard.register_dataset("stripes", options=StripeOptions)
    def stripes(options: Any, context: modelyard.DataContext) -> modelyard.Dataset:
        labels = np.arange(options.stripe_count) % 2
        images = np.zeros((len(labels), 6, 6), np.uint8)
        images[labels == 0, ::2] = 255
        images[labels == 1, :, ::2] = 255
        images[:, 0, 0] = np.arange(len(labels))
        part = {"image": images, "label": labels}
        return modelyard.ArrayDataset({"train": part, "validation": part}, ["rows", "columns"])

    @modelyard.register_optimizer("plain")
    def plain(options: Any, learning_rate: Any) -> Any:
        return keras.optimizers.SGD(learning_rate, name="plain")

    result = go(dataset="stripes", stripe_count=120, optimizer="plain", learning_rate=0.1, train_steps=60)
    assert result.validation["accuracy"] == 1.0
    assert json.loads(Path("run/manifest.json").read_text())["dataset"]["sizes"]["train"] == 120


def test_the_script_of_a_run_is_named_only_if_its_config_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    @modelyard.register_optimizer("of_a_script")
    def of_a_script(options: Any, learning_rate: Any) -> Any:
        return keras.optimizers.SGD(learning_rate, name="of_a_script")

    go(optimizer="of_a_script", train_steps=1)
    monkeypatch.setattr("modelyard.loop.existing_run.started_by", lambda manifest: "mine.py")
    with pytest.raises(ConfigError, match="train_stepps") as misspelt:
        modelyard.resume("run", train_stepps=2)
    assert "mine.py" not in str(misspelt.value)
    monkeypatch.delitem(OPTIMIZERS._entries, "of_a_script")
    with pytest.raises(ConfigError, match=r"was started by the script mine\.py.* add --plugins mine\.py"):
        modelyard.resume("run")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("None", "must return a keras.Model; it returned NoneType"),
        ("keras.Model(i, keras.layers.Dense(3)(f))", "has 3 outputs, but there are 10 classes"),
        ("keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])", "has no named inputs"),
        ("keras.Model(o, keras.layers.Dense(10)(o))", "the model takes other, but an example has"),
    ],
)
def test_a_model_that_does_not_fit_is_explained(code: str, text: str) -> None:
    import keras

    name = f"misfit{abs(hash(code))}"

    @modelyard.register_model(name)
    def misfit(data: Any, options: Any) -> Any:
        i, x = modelyard.any_input(data)
        f = keras.layers.Flatten()(x)
        o = keras.Input((4,), name="other")
        return eval(code, {"keras": keras, "i": i, "f": f, "o": o})

    with pytest.raises(UserError, match=text):
        go(model=name, hidden_units=None)


def test_a_regression_task_chooses_its_best_by_loss() -> None:
    result = go(model="squares", hidden_units=None)
    assert result.best["metric"] == "loss"
    assert set(result.validation) == {"loss", "rmse"}


def test_data_may_move_but_not_change(tmp_path: Path, two_devices: None) -> None:
    import shutil

    from photos import photo_folder, save_photo

    options = {"model": "mlp", "image_size": 8, "train_batch_size": 4}
    first = photo_folder(tmp_path / "my photos", 12)
    made = modelyard.train_and_evaluate(dataset=str(first), train_steps=2, **options)
    assert "my_photos" in made.model_dir
    shutil.move(first, tmp_path / "moved")
    assert modelyard.resume(made.model_dir, dataset=str(tmp_path / "moved"), train_steps=4).step == 4
    save_photo(tmp_path / "moved" / "cat" / "new.jpg", 50)
    with pytest.raises(DataError, match=r"not the data this run started with: \d+ train"):
        modelyard.resume(made.model_dir, dataset=str(tmp_path / "moved"), train_steps=6)


def test_an_augmentation_that_mixes_three_neighbours_works(two_devices: None) -> None:
    from modelyard.registry import AUGMENTATIONS

    class Three:
        """Keeps three together."""

        group = 3

        def __init__(self, options: Any) -> None: ...

        def __call__(self, batch: Any, draws: Any) -> Any:
            assert batch["image"].shape[0] % 3 == 0
            return batch

    AUGMENTATIONS.register("three")(Three)
    modelyard.train(model="mlp", dataset="digits", augment="three", train_batch_size=48, train_steps=2)


def test_a_part_without_a_place_for_options_is_told_so(two_devices: None) -> None:
    from modelyard.registry import PREPROCESSINGS

    class Bare:
        """Has no __init__ of its own."""

        def batch(self, batch: Any, training: bool) -> Any:
            return batch

    PREPROCESSINGS.register("bare")(Bare)
    with pytest.raises(UserError, match=r"Define `def __init__\(self, options\)`"):
        modelyard.train(model="mlp", dataset="digits", preprocess="bare", train_steps=2)


def test_a_run_whose_vectors_have_one_mean_keeps_it_when_it_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Earlier versions had one mean for all columns.
    from modelyard.models import choose_task, data_info

    table = np.random.default_rng(0).normal([700, 1, -3], [90, 0.5, 2], (60, 3)).astype(np.float32)
    data, old = (table, np.arange(60) % 3), np.float32([5, 5, 5])
    options = {**QUICK, "dataset": data, "train_batch_size": 18, "validation_fraction": 0.5, "model_dir": "run"}

    def one_mean(*given: Any) -> Any:
        return replace(data_info.describe_data(*given), mean=old[:1], spread=10 * old[:1])

    with monkeypatch.context() as patch:
        patch.setattr(choose_task, "describe_data", one_mean)
        modelyard.train_and_evaluate(**options, train_steps=4)
        patch.undo()
        before = modelyard.load("run", checkpoint=4)
        assert json.loads(Path("run/manifest.json").read_text())["data"]["mean"] == [5]
        assert np.array_equal(before.model.get_layer("standardize").mean, old)
        values = before.predict(table)["probabilities"]
        modelyard.resume("run", dataset=data, train_steps=8)
        whole = modelyard.load("run", checkpoint=8)
        patch.setattr(choose_task, "describe_data", one_mean)
        modelyard.train_and_evaluate(**{**options, "model_dir": "other"}, train_steps=8)
        patch.undo()
    assert np.array_equal(whole.model.get_layer("standardize").mean, old)
    expected = modelyard.load("other", checkpoint=8).predict(table)["probabilities"]
    assert np.array_equal(whole.predict(table)["probabilities"], expected)
    assert not np.array_equal(values, expected)


def test_a_run_leaves_the_random_state_of_the_program() -> None:
    def state() -> str:
        return repr((random.getstate(), np.random.get_state()))

    before = state()
    go(train_steps=1)
    assert state() == before
    with pytest.raises(UserError, match="has no effect"):
        go("failed", train_steps=1, regression_loss="mae")
    assert state() == before
    modelyard.evaluate("run")
    modelyard.load("run").predict(np.zeros((1, 8, 8, 1), np.uint8))
    assert state() == before
    modelyard.find_learning_rate(**QUICK, steps=10, output="rates")
    assert state() == before


def test_a_result_is_taken_where_a_run_is() -> None:
    result = go(train_steps=2)
    assert modelyard.evaluate(result).metrics == modelyard.load(result).evaluate("validation").metrics == result.metrics
    assert modelyard.predict(result, np.zeros((1, 8, 8, 1), np.uint8)).examples == 1
    assert modelyard.resume(result, train_steps=3).step == 3


@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_a_run_leaves_the_precision_of_keras(precision: str) -> None:
    import keras

    def settings() -> tuple[str, str]:
        return keras.config.floatx(), keras.config.dtype_policy().name

    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    before = settings()
    go(train_steps=2, precision=precision)
    assert settings() == before
    modelyard.evaluate("run")
    assert settings() == before
    keras.config.set_dtype_policy("mixed_bfloat16")
    go("other", train_steps=1)
    mixed = settings()
    keras.config.set_dtype_policy("float32")
    assert mixed == ("float32", "mixed_bfloat16")


def test_classes_that_are_numbers_are_those_of_the_run(two_devices: None) -> None:
    arrays = {"image": np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32), "label": np.arange(60) % 3}
    data = modelyard.ArrayDataset({"train": arrays, "validation": arrays}, classes=[0, 1, 2])  # type: ignore[list-item]
    options = {**QUICK, "dataset": data, "train_batch_size": 18, "model_dir": "run"}
    result = modelyard.train_and_evaluate(**options, train_steps=4)
    assert modelyard.evaluate("run", dataset=data, split="validation").metrics == result.metrics
    assert modelyard.resume("run", dataset=data, train_steps=6).step == 6
