"""Metrics by name: the values of scikit-learn, in any batches; a user's own; mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics as sk

import modelyard
from modelyard.config.calls import Call
from modelyard.errors import ConfigError, UserError
from modelyard.models import metric
from modelyard.models.metric import MetricSet, build_metric
from modelyard.models.metric_types import standard_metrics
from modelyard.registry import METRICS

Arrays = dict[str, NDArray[Any]]
COUNT = 211


def classified(classes: int = 5) -> tuple[Arrays, Arrays]:
    """Predictions with ties, a class without examples, and one that is never predicted."""
    random = np.random.default_rng(0)
    labels = random.integers(0, classes - 1, COUNT).astype(np.int32)
    logits = random.normal(size=(COUNT, classes)) + 1.5 * np.eye(classes)[labels]
    logits[:, 0] -= 9
    scores = np.exp(np.round(logits, 1))
    probabilities = (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)
    return {"probabilities": probabilities, "class": probabilities.argmax(axis=1)}, {"label": labels}


def flagged() -> tuple[Arrays, Arrays]:
    random = np.random.default_rng(1)
    labels = random.integers(0, 2, (COUNT, 4)).astype(np.uint8)
    probabilities = np.clip(labels * 0.3 + random.random((COUNT, 4)) * 0.7, 0.01, 0.99).round(2).astype(np.float32)
    return {"probabilities": probabilities, "labels": (probabilities > 0.5).astype(np.uint8)}, {"label": labels}


def numbered(*numbers: int) -> tuple[Arrays, Arrays]:
    random = np.random.default_rng(2)
    labels = (100 + 10 * random.normal(size=(COUNT, *numbers))).astype(np.float32)
    return {"values": labels + random.normal(size=labels.shape).astype(np.float32)}, {"label": labels}


def measured(call: str, data: tuple[Arrays, Arrays], batch: int = COUNT) -> float:
    """The metric over all examples, batch by batch."""
    predictions, examples = data
    metrics = MetricSet([build_metric(Call.parse(call))])
    for start in range(0, COUNT, batch):
        rows = slice(start, start + batch)
        metrics.add({k: v[rows] for k, v in predictions.items()}, {k: v[rows] for k, v in examples.items()})
    (value,) = metrics.results().values()
    return value


@pytest.fixture
def own_metrics() -> Iterator[None]:
    """Removes what a test registers."""
    METRICS.names()
    before = dict(METRICS._entries)
    yield
    METRICS._entries.clear()
    METRICS._entries.update(before)


@pytest.mark.parametrize("average", ["macro", "weighted", "micro"])
def test_precision_recall_and_f1_are_those_of_scikit_learn(average: str) -> None:
    for data, found in ((classified(), "class"), (flagged(), "labels")):
        predictions, examples = data
        for name, theirs in (("precision", sk.precision_score), ("recall", sk.recall_score), ("f1", sk.f1_score)):
            expected = theirs(examples["label"], predictions[found], average=average, zero_division=0)
            assert measured(f"{name}(average={average})", data) == pytest.approx(expected, rel=1e-13)


def test_metrics_of_classes_are_those_of_scikit_learn() -> None:
    data = classified()
    (predictions, examples), every = data, np.arange(5)
    label, scores = examples["label"], predictions["probabilities"]
    assert measured("accuracy", data) == sk.accuracy_score(label, predictions["class"])
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        expected = sk.balanced_accuracy_score(label, predictions["class"])
    assert measured("balanced_accuracy", data) == pytest.approx(expected, rel=1e-13)
    assert measured("log_loss", data) == pytest.approx(sk.log_loss(label, scores, labels=every), rel=1e-6)
    areas = [sk.roc_auc_score(label == n, scores[:, n]) for n in range(4)]  # the last class has no examples
    assert measured("auc", data) == pytest.approx(np.mean(areas), rel=1e-13)
    precision = [sk.average_precision_score(label == n, scores[:, n]) for n in range(4)]
    assert measured("average_precision", data) == pytest.approx(np.mean(precision), rel=1e-12)


def test_metrics_of_maps_take_each_pixel_as_a_decision() -> None:
    random = np.random.default_rng(3)
    labels = random.integers(0, 3, (COUNT, 4, 5)).astype(np.uint8)
    probabilities = random.random((COUNT, 4, 5, 3)).astype(np.float32) + 0.5 * np.eye(3, dtype=np.float32)[labels]
    labels[:, 0] = 255  # is left out
    found = probabilities.argmax(axis=-1)
    data: tuple[Arrays, Arrays] = ({"probabilities": probabilities, "class": found}, {"label": labels})
    with_channel = (data[0], {"label": labels[..., None]})
    flat = (labels[:, 1:].ravel(), found[:, 1:].ravel())
    for call, expected in {
        "accuracy": sk.accuracy_score(*flat),
        "balanced_accuracy": sk.balanced_accuracy_score(*flat),
        "f1": sk.f1_score(*flat, average="macro"),
        "precision(average=weighted)": sk.precision_score(*flat, average="weighted"),
        "iou": sk.jaccard_score(*flat, average="macro"),
    }.items():
        assert measured(call, data, 64) == pytest.approx(expected, rel=1e-13), call
        assert measured(call, with_channel, 64) == measured(call, data)
    metrics = MetricSet((), standard_metrics("classification"))
    assert metrics.predictions == ("class",)
    metrics.add({"class": found}, {"label": labels})
    assert metrics.results()["accuracy"] == sk.accuracy_score(*flat)
    for call in ("auc", "top_k", "log_loss", "calibration_error"):
        with pytest.raises(UserError, match=f"'{call}.*' is not supported for maps. Supported: accuracy, .*iou"):
            measured(call, data)


def test_iou_is_that_of_scikit_learn() -> None:
    for data, found in ((classified(), "class"), (flagged(), "labels")):
        expected = sk.jaccard_score(data[1]["label"], data[0][found], average="macro", zero_division=0)
        assert measured("iou", data) == pytest.approx(expected, rel=1e-13)


def test_top_k_counts_the_classes_before_the_right_one() -> None:
    predictions, examples = classified()
    order = np.argsort(-predictions["probabilities"], axis=1, kind="stable")  # of equal ones, the first
    for k in (1, 2, 3):
        expected = (order[:, :k] == examples["label"][:, None]).any(axis=1).mean()
        assert measured(f"top_k(k={k})", (predictions, examples)) == pytest.approx(expected, rel=1e-13)
    assert measured("top_k(k=1)", (predictions, examples)) == measured("accuracy", (predictions, examples))


def test_the_calibration_error_is_the_mean_distance_of_the_bins() -> None:
    predictions, examples = classified()
    most, right = predictions["probabilities"].max(axis=1), predictions["class"] == examples["label"]
    bins = np.digitize(most, np.linspace(0, 1, 11)[1:-1], right=True)
    distances = [abs((right[bins == n] - most[bins == n].astype(float)).sum()) for n in range(10)]
    found = measured("calibration_error(bins=10)", (predictions, examples))
    assert found == pytest.approx(sum(distances) / COUNT, rel=1e-9)


def test_metrics_of_flags_are_those_of_scikit_learn() -> None:
    data = flagged()
    predictions, examples = data
    label, scores = examples["label"], predictions["probabilities"]
    assert measured("exact_match", data) == sk.accuracy_score(label, predictions["labels"])
    assert measured("binary_accuracy", data) == pytest.approx((predictions["labels"] == label).mean(), rel=1e-13)
    assert measured("auc", data) == pytest.approx(sk.roc_auc_score(label, scores), rel=1e-13)
    expected = sk.average_precision_score(label, scores, average="macro")
    assert measured("average_precision", data) == pytest.approx(expected, rel=1e-12)
    losses = [sk.log_loss(label[:, n], scores[:, n]) for n in range(4)]
    assert measured("log_loss", data) == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("numbers", [(), (3,)])
def test_metrics_of_numbers_are_those_of_scikit_learn(numbers: tuple[int, ...]) -> None:
    data = numbered(*numbers)
    label, found = data[1]["label"].astype(np.float64), data[0]["values"].astype(np.float64)
    assert measured("mae", data) == pytest.approx(sk.mean_absolute_error(label, found), rel=1e-12)
    assert measured("mse", data) == pytest.approx(sk.mean_squared_error(label, found), rel=1e-12)
    assert measured("rmse", data) == pytest.approx(np.sqrt(sk.mean_squared_error(label, found)), rel=1e-12)
    assert measured("mape", data) == pytest.approx(sk.mean_absolute_percentage_error(label, found), rel=1e-12)
    assert measured("median_absolute_error", data) == pytest.approx(sk.median_absolute_error(label, found), rel=1e-12)
    assert measured("r2", data) == pytest.approx(sk.r2_score(label, found), rel=1e-9)


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_every_metric_has_the_same_bits_in_any_batches(batch: int) -> None:
    data = {"classification": classified(), "multi_label": flagged(), "regression": numbered(3)}
    for entry in METRICS.entries():
        for task in getattr(entry.target, "tasks", ()):
            whole, cut = (measured(entry.name, data[task], size) for size in (COUNT, batch))
            assert cut == whole, (entry.name, task)


@pytest.mark.usefixtures("own_metrics")
def test_a_metric_of_the_users_own_is_a_function_or_a_class() -> None:
    @modelyard.register_metric("near_miss")
    def near_miss(predictions: Arrays, examples: Arrays) -> Any:
        return abs(predictions["class"] - examples["label"]) <= 1

    @modelyard.register_metric("kappa")
    class Kappa(modelyard.Metric):
        whole = True

        def statistics(self, predictions: Arrays, examples: Arrays) -> Any:
            return {"found": predictions["class"], "label": examples["label"]}

        def result(self, totals: Any, count: int) -> float:
            return float(sk.cohen_kappa_score(totals["label"], totals["found"]))

    data = classified()
    label, found = data[1]["label"], data[0]["class"]
    assert measured("near_miss", data, 7) == pytest.approx((abs(found - label) <= 1).mean(), rel=1e-13)
    assert measured("kappa", data, 7) == sk.cohen_kappa_score(label, found)


@pytest.mark.usefixtures("own_metrics")
def test_a_metric_that_fails_or_has_no_value_per_example_is_named() -> None:
    @modelyard.register_metric("of_masks")
    def of_masks(predictions: Arrays, examples: Arrays) -> Any:
        return predictions["mask"]

    @modelyard.register_metric("one_number")
    def one_number(predictions: Arrays, examples: Arrays) -> Any:
        return 0.5

    with pytest.raises(UserError, match=r"'of_masks' failed: KeyError: 'mask'\. It gets the predictions probab"):
        measured("of_masks", classified())
    with pytest.raises(UserError, match="'one_number' must return one value per example, 211 here"):
        measured("one_number", classified())


def test_all_mistakes_in_metrics_are_reported_with_the_others() -> None:
    with pytest.raises(ConfigError) as caught:
        modelyard.load_config(metrics="f11, top_k(j=3), auc, auc", model="mlpx")
    text = str(caught.value)
    for part in ("there is no metric 'f11'. Did you mean 'f1'", "takes no argument 'j'", "names 'auc' twice", "'mlpx'"):
        assert part in text


def test_r2_of_one_example_is_not_defined(caplog: pytest.LogCaptureFixture) -> None:
    metric._say_undefined.cache_clear()  # it is said once in a process
    metrics = MetricSet([build_metric(Call.parse("r2"))])
    metrics.add({"values": np.ones(1)}, {"label": np.zeros(1)})
    assert np.isnan(metrics.results()["r2"])
    assert "the metric r2 is NaN: it needs two examples or more" in caplog.text
