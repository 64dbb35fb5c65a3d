"""Scores are the same wherever they are computed: evaluate, predict, an export, a loaded run, after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import modelyard
from conftest import engine_name
from modelyard.errors import ConfigError, DataError, UserError
from modelyard.serving.prediction import predict as predict_module

pytestmark = pytest.mark.usefixtures("two_devices")
RANDOM = np.random.default_rng(0)
VALUES = RANDOM.random((90, 5)).astype(np.float32)
TARGETS = np.stack([1000 * VALUES[:, 0], 0.01 * VALUES[:, 1] + 0.003 * VALUES[:, 2]], axis=1)
LABELS: dict[str, Any] = {
    "classes": (VALUES[:, 0] * 3).astype(np.int64),
    "flags": (VALUES[:, :3] > 0.5).astype(np.uint8),
    "targets": TARGETS.astype(np.float32),
}
METRICS = {"classes": "top_k(k=2), f1, auc, log_loss", "flags": "f1(average=micro), auc", "targets": "mape"}


@modelyard.register_model("rooted")
class Rooted(modelyard.Regressor):
    """A task with a metric of its own, that is no mean."""

    def network(self) -> keras.Model:
        """One dense layer."""
        inputs, x = modelyard.any_input(self.data)
        return keras.Model(inputs, keras.layers.Dense(self.data.num_classes, name="value")(x))

    def metrics(self, outputs: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """The squares of the errors, to be rooted."""
        error = outputs - ops.cast(batch["label"], outputs.dtype)
        return {**super().metrics(outputs, batch), "fourth": ops.mean(ops.square(ops.square(error)), axis=-1)}

    def summarize(self, means: dict[str, Any]) -> dict[str, float]:
        """The root of the mean."""
        return {**super().summarize(means), "fourth": float(means["fourth"]) ** 0.25}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    """Runs on all kinds of labels; the files are those they were trained on."""
    home = tmp_path_factory.mktemp("home")
    for name, labels in LABELS.items():
        parts = {"train": slice(0, 50), "test": slice(50, 90)}
        arrays = {
            f"{kind}_{part}": a[rows] for part, rows in parts.items() for kind, a in (("x", VALUES), ("y", labels))
        }
        np.savez(home / f"{name}.npz", **arrays)
        np.savez(home / f"{name}-test.npz", x=VALUES[50:], y=labels[50:])
        for model in ("mlp", "rooted")[: 1 + (name == "targets")]:
            modelyard.train(
                dataset=str(home / f"{name}.npz"), model=model, train_steps=8, train_batch_size=10, log_every=8,
                metrics=METRICS[name], model_dir=home / f"{name}-{model}", engine=engine_name(), learning_rate=0.02,
            )  # fmt: skip
    return home


@pytest.mark.parametrize("run", ["classes-mlp", "flags-mlp", "targets-mlp", "targets-rooted"])
def test_evaluate_predict_and_a_loaded_run_say_the_same(home: Path, run: str) -> None:
    kind = run.split("-")[0]
    expected = modelyard.evaluate(home / run, split="test").metrics
    assert {"classes": "auc", "flags": "binary_accuracy", "targets": "mape"}[kind] in expected
    assert ("fourth" in expected) == (run == "targets-rooted")
    of_split = modelyard.predict(home / run, split="test", output="a.csv")
    of_file = modelyard.predict(home / run, home / f"{kind}-test.npz", output="b.csv")
    assert of_split.metrics == of_file.metrics == expected  # all bits
    assert json.loads(Path("a.metrics.json").read_text())["examples"] == 40
    small = modelyard.predict(home / run, split="test", output="c.csv", eval_batch_size=6)
    assert small.metrics == pytest.approx(expected, rel=1e-5)
    loaded = modelyard.load(home / run)
    x, y = VALUES[50:], LABELS[kind][50:]
    assert loaded.evaluate((x, y)).metrics == expected
    scores = loaded.predict((x, y)).scores
    own = {"loss", "fourth"}
    assert {name: scores[name] for name in expected if name not in own} == pytest.approx(
        {name: value for name, value in expected.items() if name not in own}, rel=1e-6
    )


def write_table(path: str, labels: str, columns: list[str]) -> None:
    rows = np.concatenate([VALUES[50:], LABELS[labels][50:].reshape(40, -1)], axis=1)
    lines = [",".join([*"abcde", *columns]), *(",".join(f"{value:.6g}" for value in row) for row in rows)]
    Path(path).write_text("\n".join(lines) + "\n")


def test_label_columns_of_numbers_and_flags_are_read(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"value_columns": "a,b,c,d,e", "overwrite": True, "output": "a.csv"}
    for kind, columns in (("targets", ["p", "q"]), ("flags", ["0", "1", "2"])):
        write_table("table.csv", kind, columns)
        expected = modelyard.evaluate(home / f"{kind}-mlp", split="test").metrics
        found = modelyard.predict(home / f"{kind}-mlp", "table.csv", label_column=",".join(columns), **options)
        assert found.metrics == pytest.approx(expected, rel=1e-3)
        assert not modelyard.predict(home / f"{kind}-mlp", "table.csv", **options).metrics
        assert "left out" not in caplog.text
    with pytest.raises(DataError, match=r"there is no column 'z'.* Name the right one with --label_column"):
        modelyard.predict(home / "targets-mlp", "table.csv", label_column="0,z", **options)
    text = Path("table.csv").read_text().splitlines()
    Path("table.csv").write_text("\n".join([*text[:5], text[5].rpartition(",")[0] + ",", *text[6:]]))
    assert not modelyard.predict(home / "flags-mlp", "table.csv", label_column="0,1,2", **options).metrics
    assert "labels are left out: table.csv:6: the label is empty" in caplog.text
    with pytest.raises(ConfigError, match="label_column: has no effect here: it is for csv files, these are npz files"):
        modelyard.predict(home / "flags-mlp", home / "flags-test.npz", label_column="0", output="b.csv")


def test_columns_of_several_targets_are_found_by_name(home: Path) -> None:
    write_table("named.csv", "targets", ["p", "q"])
    options: dict[str, Any] = {"value_columns": "a,b,c,d,e", "label_kind": "numbers"}
    modelyard.train(
        dataset="named.csv", model="mlp", label_column="p,q", train_steps=2, train_batch_size=10, model_dir="run",
        engine=engine_name(), **options,
    )  # fmt: skip
    found = [modelyard.predict("run", "named.csv", output=f"{n}.csv").metrics for n in range(1)]
    found += [modelyard.predict("run", "named.csv", label_column=c, output=f"{c}.csv").metrics for c in ("p,q", "q,p")]
    assert found[0]["mae"] == found[1]["mae"] == found[2]["mae"]


def test_r2_of_several_targets_is_the_mean_of_theirs(home: Path) -> None:
    found = modelyard.load(home / "targets-mlp").predict((VALUES[50:], TARGETS[50:]))
    errors = ((found["values"] - TARGETS[50:]) ** 2).mean(axis=0)
    expected = (1 - errors / TARGETS[50:].var(axis=0)).mean()
    predicted = modelyard.predict(home / "targets-mlp", split="test", output="a.csv")
    assert found.scores["r2"] == pytest.approx(expected, rel=1e-5)
    assert predicted.metrics["r2"] == pytest.approx(expected, rel=1e-5)


def test_scores_after_a_stop_are_those_of_all_rows(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StoppedError(BaseException):
        pass

    def save_and_stop(writer: Any, file: Any, rows: int) -> None:
        save(writer, file, rows)
        raise StoppedError

    save = predict_module._TableWriter._save_progress
    for run in ("classes-mlp", "targets-rooted"):
        plain = modelyard.predict(home / run, split="test", output="plain.csv", eval_batch_size=8, overwrite=True)
        with monkeypatch.context() as patch:
            patch.setattr(predict_module._TableWriter, "_save_progress", save_and_stop)
            with pytest.raises(StoppedError):
                modelyard.predict(home / run, split="test", output=f"{run}.csv", eval_batch_size=8)
        assert json.loads(Path(f".partial-{run}.csv.json").read_text())["rows"] == 8
        again = modelyard.predict(home / run, split="test", output=f"{run}.csv", eval_batch_size=8)
        assert again.scores == plain.scores
    assert not [*Path().glob(".partial-*")]


@modelyard.register_metric("endless")
def endless(predictions: Any, examples: Any) -> Any:
    """A metric that is infinite."""
    return np.full(len(examples["label"]), np.inf)


def test_the_file_of_scores_is_json_also_if_one_is_infinite(home: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.csv"
    done = modelyard.predict(home / "classes-mlp", home / "classes-test.npz", output=output, metrics="endless")
    assert done.metrics["endless"] == np.inf
    found = json.loads((tmp_path / "a.metrics.json").read_text(), parse_constant=pytest.fail)
    assert found["endless"] is None


def test_an_example_that_cannot_be_read_does_not_count(home: Path) -> None:
    from modelyard.data.raw_examples import ArrayExamples

    class Damaged(ArrayExamples):
        def load(self, index: int) -> Any:
            if index in (3, 17):
                raise DataError(f"{index} is damaged")
            return super().load(index)

    from modelyard.serving.prediction.table import Table

    run = predict_module.open_model(home / "classes-mlp", None, "Python", {"eval_batch_size": 8, "resident": "never"})
    labels = LABELS["classes"][50:]
    examples = Damaged(VALUES[50:, :].copy(), labels)
    table = Table(run.classes, top=1, probabilities=False, labelled=True, errors=True)
    found = predict_module._TableWriter(run, examples, table, Path("a.csv"), False).run()
    good = np.setdiff1d(np.arange(40), [3, 17])
    expected = modelyard.load(home / "classes-mlp").evaluate((VALUES[50:][good], labels[good])).metrics
    assert found.skipped == 2
    assert found.scores["examples"] == 38
    assert found.metrics == pytest.approx(expected, rel=1e-6)
    assert np.sum(found.scores["confusion"]) == 38


def test_results_print_as_text_and_tables(home: Path) -> None:
    run = modelyard.load(home / "classes-mlp")
    found = run.predict((VALUES[50:], LABELS["classes"][50:]))
    matrix = str(found.scores).split("labels (rows) and predictions (columns)\n")[1].splitlines()
    assert [line.split()[0] for line in matrix[1:]] == list(run.classes)
    assert [[int(n) for n in line.split()[1:]] for line in matrix[1:]] == found.scores["confusion"]
    assert repr(found).startswith("<modelyard.Predicted: class int")
    lines = str(run.metrics).splitlines()
    assert lines[0].split()[:3] == ["step", "epoch", "split"]
    assert len(lines) == len(run.metrics) + 1
    assert "<td>train</td>" in run.metrics._repr_html_()
    result = run.evaluate("test")
    assert str(result).startswith(f"test, model of step 8: loss {result.metrics['loss']:.4g}  accuracy ")
    table = modelyard.predict(home / "classes-mlp", split="test", output="a.csv")
    assert str(table).startswith("40 predictions by the model of step 8 in ")
    assert str(table.scores) in str(table)


def test_a_metric_of_another_task_is_refused_without_the_task_too() -> None:
    from modelyard.config.calls import Call
    from modelyard.engine.evaluation import standard_metrics_and

    with pytest.raises(UserError, match="the metric 'mae' is for regression; this is classification"):
        standard_metrics_and([Call.parse("mae")], "classification")
    assert len(standard_metrics_and([Call.parse("mae")], "other").metrics) == 1


def test_labels_that_are_all_the_same_have_an_r2_of_0() -> None:
    from modelyard.models.metric import MetricSet
    from modelyard.models.metric_types import standard_metrics

    labels = np.full(1000, 0.1, np.float32)
    metrics = MetricSet(standard_metrics("regression"))
    metrics.add({"values": labels + np.float32(0.2)}, {"label": labels})
    assert metrics.results()["r2"] == 0.0
