"""Metrics by name through a run: the best model, hooks, the table of predictions, the leaderboard, the list of runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import modelyard
from conftest import engine_name
from modelyard.loop.metric_hooks import Ranking
from modelyard.models import metric as metric_module
from modelyard.registry import METRICS

pytestmark = pytest.mark.usefixtures("two_devices")
RANDOM = np.random.default_rng(0)
VALUES = RANDOM.random((80, 4)).astype(np.float32)
LABELS = (VALUES[:, 0] * 3).astype(np.int32)
DATA = {"train": (VALUES[:50], LABELS[:50]), "validation": (VALUES[50:], LABELS[50:])}
OWN = "cost"
FAST: dict[str, Any] = {"model": "mlp", "train_batch_size": 10, "learning_rate": 0.02}


@modelyard.register_model("pixels")
class Pixels(modelyard.Task):
    """A task whose labels are maps; 255 is no class."""

    def network(self) -> keras.Model:
        """One layer."""
        inputs, x = modelyard.image_input(self.data)
        return keras.Model(inputs, keras.layers.Conv2D(2, 1, name="logits")(x))

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Any:
        """Cross-entropy of the pixels that have a class."""
        labels = ops.cast(batch["label"], "int32")
        each = ops.sparse_categorical_crossentropy(ops.minimum(labels, 1), outputs, from_logits=True)
        return ops.mean(each * ops.cast(labels < 2, outputs.dtype), axis=(1, 2))

    def predictions(self, outputs: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Class and probabilities of each pixel."""
        return {"class": ops.argmax(outputs, axis=-1), "probabilities": ops.softmax(outputs, axis=-1)}


@pytest.fixture(scope="module", autouse=True)
def own_metric() -> Iterator[None]:
    """A metric that a Python program registers. Its name does not say that lower is better."""
    METRICS.names()
    before = dict(METRICS._entries)

    @modelyard.register_metric(OWN)
    class Cost(modelyard.Metric):
        lower_is_better = True

        def statistics(self, predictions: Any, examples: Any) -> Any:
            return abs(predictions["class"] - examples["label"]) ** 2

    yield
    METRICS._entries.clear()
    METRICS._entries.update(before)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, two_devices: None, own_metric: None) -> Path:
    """A folder of runs."""
    home = tmp_path_factory.mktemp("home")
    for seed, options in enumerate(({"train_steps": 15}, {"train_steps": 3, "learning_rate": 1e-4})):
        modelyard.train_and_evaluate(
            dataset=DATA, metrics=f"{OWN}, top_k(k=2), f1, auc", best_metric=OWN, eval_every="3 steps", log_every=3,
            hooks=f"+early_stop(metric={OWN}, patience=9)", model_dir=home / f"run-{seed}", engine=engine_name(),
            **{**FAST, **options},
        )  # fmt: skip
    return home


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["split"] == "validation"]


def test_a_metric_of_the_users_own_selects_the_best_model(home: Path) -> None:
    rows = rows_of(home / "run-0")
    assert {OWN, "top_k_2", "f1", "auc", "accuracy", "loss"} <= rows[-1].keys()
    state = json.loads((next((home / "run-0" / "best").iterdir()) / "state.json").read_text())
    best = state.get("memory", state)["best"]
    assert (best["metric"], best["mode"], best["value"]) == (OWN, "min", min(row[OWN] for row in rows))


def test_evaluate_and_predict_have_it_in_any_batches(home: Path) -> None:
    expected = modelyard.evaluate(home / "run-0", dataset=DATA).metrics
    step = modelyard.load(home / "run-0").step
    row = next(row for row in rows_of(home / "run-0") if row["step"] == step)
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    found = modelyard.predict(home / "run-0", (VALUES[50:], LABELS[50:]), output="a.csv")
    assert found.metrics == pytest.approx(expected, rel=1e-6)
    assert json.loads(Path("a.metrics.json").read_text())[OWN] == expected[OWN]
    cut = modelyard.evaluate(home / "run-0", dataset=DATA, eval_batch_size=7).metrics
    exact = [OWN, "accuracy", "top_k_2", "f1"]  # of classes; the others depend on the last bits of the kernels
    assert [cut[name] for name in exact] == [expected[name] for name in exact]
    assert cut == pytest.approx(expected, rel=1e-5)


def test_the_leaderboard_and_the_list_of_runs_know_what_is_better(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = modelyard.leaderboard(home, metric=OWN, output=Path("board"))
    means = [next(iter(entrant.scores.values())).mean for entrant in board.entrants]
    assert means == sorted(means)
    assert len(means) == 2
    assert means[0] < means[1]
    with pytest.raises(SystemExit):
        modelyard.main(["runs", "--runs_dir", str(home)])
    assert f"{OWN} {means[0]:.4f}" in capsys.readouterr().out


def test_what_is_better_is_declared_or_follows_from_the_name() -> None:
    for name, mode in (("loss", "min"), ("mape", "min"), ("accuracy", "max"), ("gain_over_loss", "min")):
        assert Ranking.choose(name, "auto", {name: 1.0}).mode == mode
    assert Ranking.choose("gain_over_loss", "auto", {"gain_over_loss": 1.0}, {"gain_over_loss": "max"}).mode == "max"


def test_a_metric_that_is_undefined_is_said_and_is_not_the_best(
    home: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    metric_module._say_undefined.cache_clear()
    only = LABELS == 0
    caplog.set_level(logging.WARNING)
    found = modelyard.predict(home / "run-0", (VALUES[only], LABELS[only]), output="a.csv")
    assert np.isnan(found.metrics["auc"])
    assert "the metric auc is NaN: it needs a class that some examples have and others have not" in caplog.text
    assert json.loads(Path("a.metrics.json").read_text(), parse_constant=pytest.fail)["auc"] is None
    ranking = Ranking("auc", "max")
    assert not ranking.is_better(float("nan"), 0.1)
    assert ranking.is_better(0.1, float("nan"))


def test_maps_are_measured_pixel_by_pixel_and_predicted() -> None:
    images = RANDOM.integers(0, 255, (30, 4, 4, 3)).astype(np.uint8)
    labels = (images[..., 0] > 128).astype(np.uint8)
    labels[:, 0] = 255
    data = modelyard.ArrayDataset(
        {"train": {"image": images, "label": labels}}, classes=["dark", "light"], maps={"label": 255}
    )
    modelyard.train(
        dataset=data, model="pixels", metrics="accuracy, iou", train_steps=4, train_batch_size=9, model_dir="run",
        engine=engine_name(),
    )  # fmt: skip
    expected = modelyard.evaluate("run", dataset=data).metrics
    found = modelyard.predict("run", split="validation", dataset=data, output="a.jsonl")
    assert found.metrics == expected
    rows = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    said, truth = (np.array([row[name] for row in rows]) for name in ("class", "truth"))
    assert expected["accuracy"] == (said == truth)[truth < 2].mean()
    assert np.sum(found.scores["confusion"]) == (truth < 2).sum()
