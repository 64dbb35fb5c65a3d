"""What a report computes from predictions, and the rules that say what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score, log_loss, r2_score

from modelyard.charts.curves import curves_of
from modelyard.models.metric_types import CLASSIFICATION, MULTI_LABEL, REGRESSION
from modelyard.reporting.calibration import calibration
from modelyard.reporting.facts import Finding, RunFacts, Score, SplitFacts
from modelyard.reporting.findings import find
from modelyard.reporting.scores import (
    Predictions,
    by_class,
    contradicted,
    doubtful,
    intervals,
    most_confused,
    order_of_confusions,
    threshold_curves,
)

RANDOM = np.random.default_rng(1)


def softmax(logits: Any) -> Any:
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def classified(logits: Any, labels: Any, **metrics: float) -> Predictions:
    shares = softmax(logits).astype(np.float32)
    found = shares.argmax(axis=1)
    scores = {"accuracy": float((found == labels).mean()), **metrics}
    names = [f"class {n}" for n in range(shares.shape[1])]
    return Predictions(CLASSIFICATION, labels, {"class": found, "probabilities": shares}, scores, {}, names)


def drawn(logits: Any) -> Any:
    """A label for each example, by the probabilities of its logits."""
    return (softmax(logits).cumsum(axis=1) > RANDOM.random(len(logits))[:, None]).argmax(axis=1)


def test_the_temperature_mends_logits_that_are_too_large() -> None:
    logits = RANDOM.normal(size=(6000, 4)) * 2
    labels = drawn(logits)
    found = calibration(classified(3 * logits, labels))
    assert found is not None
    assert found.temperature == pytest.approx(3, rel=0.07)
    assert found.error > 0.1
    assert found.error_after < 0.03
    assert found.log_loss == pytest.approx(log_loss(labels, softmax(3 * logits)), rel=1e-4)
    assert found.log_loss_after < found.log_loss
    right = calibration(classified(logits, labels))
    assert right is not None
    assert right.temperature == pytest.approx(1, abs=0.07)
    assert sum(one.count for one in right.bins) == 6000


def test_intervals_cover_the_score_as_often_as_they_say() -> None:
    covered = 0
    for _ in range(40):
        labels = RANDOM.integers(0, 3, 150)
        logits = RANDOM.normal(size=(150, 3)) + 1.2 * (labels[:, None] == np.arange(3))
        low, high = intervals(classified(logits, labels))["accuracy"]
        covered += low <= 0.672 <= high  # the accuracy of such logits, of 4 million
    assert covered >= 33


def test_an_interval_is_the_same_each_time_and_of_the_metric() -> None:
    labels = RANDOM.integers(0, 3, 300)
    logits = RANDOM.normal(size=(300, 3)) + (labels[:, None] == np.arange(3))
    f1 = f1_score(labels, logits.argmax(axis=1), average="macro")
    found = classified(logits, labels, f1=f1)
    assert intervals(found) == intervals(found)
    low, high = intervals(found)["f1"]
    assert low < f1 < high
    assert high - low == pytest.approx(0.11, abs=0.03)
    other = classified(logits, labels, f1=0.123)  # a metric of one's own with a known name
    assert "f1" not in intervals(other)
    true = RANDOM.normal(50, 10, (200, 2))
    said = true + RANDOM.normal(0, 5, (200, 2))
    metrics = {"r2": r2_score(true, said), "rmse": float(np.sqrt(((said - true) ** 2).mean()))}
    ends = intervals(Predictions(REGRESSION, true, {"values": said}, metrics, {}, ["a", "b"]))
    assert {*ends} == {"r2", "rmse"}
    assert ends["r2"][0] < metrics["r2"] < ends["r2"][1]


def test_scores_by_label_are_those_of_scikit_learn() -> None:
    true = RANDOM.integers(0, 2, (200, 4)).astype(np.uint8)
    shares = np.clip(0.5 * true + RANDOM.random((200, 4)) * 0.6, 0, 1)
    outputs = {"labels": (shares > 0.5).astype(np.uint8), "probabilities": shares}
    found = Predictions(MULTI_LABEL, true, outputs, {}, {}, list("abcd"))
    for n, one in enumerate(by_class(found, None)):
        assert one.f1 == pytest.approx(f1_score(true[:, n], outputs["labels"][:, n]))
        assert one.average_precision == pytest.approx(average_precision_score(true[:, n], shares[:, n]))
        assert one.threshold is not None
        assert one.threshold_f1 == pytest.approx(f1_score(true[:, n], shares[:, n] > one.threshold))
        assert one.threshold_f1 >= max(f1_score(true[:, n], shares[:, n] > t) for t in np.linspace(0, 1, 50))
    curve = threshold_curves(found)["F1"]
    assert curve[9] == pytest.approx(f1_score(true, outputs["labels"], average="macro"))


def test_classes_that_are_confused_stand_together() -> None:
    matrix = np.full((6, 6), 1) + 50 * np.eye(6, dtype=int)
    for a, b in ((0, 3), (1, 4), (2, 5)):
        matrix[a, b] += 20
        matrix[b, a] += 10
    order = order_of_confusions(matrix)
    assert sorted(order) == list(range(6))
    assert {frozenset(order[n : n + 2]) for n in (0, 2, 4)} == {frozenset((0, 3)), frozenset((1, 4)), frozenset((2, 5))}
    top = most_confused(matrix, list("abcdef"), 3)
    assert {(one.label, one.predicted, one.count) for one in top} == {("a", "d", 21), ("b", "e", 21), ("c", "f", 21)}
    assert order_of_confusions(np.eye(4, dtype=int)) == [0, 1, 2, 3]
    assert order_of_confusions(np.zeros((1, 1), int)) == [0]


def test_a_wrong_label_is_doubtful_and_a_hard_example_is_not() -> None:
    labels = RANDOM.integers(0, 3, 300)
    shares = np.full((300, 3), 0.005)
    shares[np.arange(300), labels] = 0.99
    wrong = labels.copy()
    wrong[[7, 30]] = (wrong[[7, 30]] + 1) % 3
    shares[50] = [0.4, 0.35, 0.25]
    assert sorted(doubtful(wrong, shares)) == [7, 30]
    shares[7] = np.where(np.arange(3) == labels[7], 0.7, 0.15)  # as a weak model has it
    assert doubtful(wrong, shares) == [30]
    assert contradicted(wrong, shares) == [30]


def history(train: Any, validation: Any, **more: Any) -> RunFacts:
    """A run with these losses."""
    rows = [{"step": 10 * n + 10, "split": "train", "loss": value} for n, value in enumerate(train)]
    rows += [{"step": 10 * n + 10, "split": "validation", "loss": value} for n, value in enumerate(validation)]
    steps = 10 * len(train)
    facts = {"status": "finished", "step": steps, "total_steps": steps, **more}
    return RunFacts("run", "runs/run", rows=tuple(rows), curves=curves_of(rows), **facts)


def rules(run: RunFacts, split: SplitFacts | None = None) -> dict[str, Finding]:
    return {one.rule: one for one in find(run, split)}


FALLING = [1.0, 0.7, 0.5, 0.4, 0.33, 0.29, 0.27, 0.26, 0.255, 0.253, 0.252, 0.2515]


def test_a_good_run_has_no_findings() -> None:
    found = find(history(FALLING, [value + 0.02 for value in FALLING]), None)
    assert {one.level for one in found} == {"fine"}
    assert {one.rule for one in found} == {"completeness", "overfitting", "stability", "progress"}


def test_rules_of_training() -> None:
    rising = [1.0, 0.8, 0.6, 0.55, 0.5, 0.5, 0.55, 0.6, 0.66, 0.7, 0.75, 0.8]
    found = rules(history(FALLING, rising))["overfitting"]
    assert found.level == "problem"
    assert "from step 50 on" in found.text
    assert found.numbers["rise"] == pytest.approx(0.6)
    steady = np.linspace(2, 1, 12).tolist()
    assert rules(history(steady, steady))["progress"].level == "warning"
    assert rules(history(FALLING, FALLING))["progress"].level == "fine"
    jumping = [*FALLING[:5], 2.0, *FALLING[6:]]
    found = rules(history(jumping, FALLING))["stability"]
    assert found.level == "warning"
    assert "step 60, to 2.0000" in found.text
    assert rules(history([*FALLING[:8], None, None, 0.3], FALLING))["stability"].level == "problem"
    assert rules(history(FALLING, FALLING, status="interrupted"))["completeness"].level == "warning"
    for status in ("running", "paused at step 120 of 400"):
        assert rules(history(FALLING, FALLING, status=status))["completeness"].level == "note"


@pytest.mark.parametrize(
    ("seen", "unseen", "named"),
    [(0.99, 0.7, "overfitting"), (0.6, 0.58, "underfitting"), (0.7, 0.95, None), (0.97, 0.96, None)],
)
def test_accuracy_in_training_says_whether_more_data_or_a_larger_model_helps(
    seen: float, unseen: float, named: str | None
) -> None:
    rows = [{"step": n, "split": "train", "loss": 1 / n, "accuracy": seen * n / 12} for n in range(1, 13)]
    rows += [{"step": n, "split": "validation", "loss": 1 / n, "accuracy": unseen * n / 12} for n in range(1, 13)]
    rows[9:12] = [{**row, "accuracy": seen} for row in rows[9:12]]
    run = RunFacts("run", "run", curves=curves_of(rows), sizes={"validation": 1000})
    found = {rule for rule, one in rules(run).items() if one.level != "fine"} - {"progress"}
    assert found == ({named} if named else set())


def test_rules_of_scores() -> None:
    score = Score("accuracy", 0.31, 0.25, 0.37, 0.3)
    split = SplitFacts("test", CLASSIFICATION, 10, 200, (score,), "the most frequent class")
    assert rules(RunFacts("run", "run"), split)["baseline"].level == "problem"
    better = SplitFacts("test", CLASSIFICATION, 10, 2000, (Score("accuracy", 0.9, 0.88, 0.92, 0.3),))
    assert rules(RunFacts("run", "run"), better)["baseline"].level == "fine"
    sizes = {"validation": 1000, "test": 1000}
    run = RunFacts("run", "run", scores={"validation": {"accuracy": 0.9}, "test": {"accuracy": 0.8}}, sizes=sizes)
    assert rules(run, better)["test"].level == "problem"
    near = RunFacts("run", "run", scores={"validation": {"accuracy": 0.9}, "test": {"accuracy": 0.89}}, sizes=sizes)
    assert rules(near, better)["test"].level == "fine"
    few = RunFacts("run", "run", classes=("a", "b"), counts={"train": [300, 7]})
    assert "‘b’ (7)" in rules(few)["few examples"].text or "b (7)" in rules(few)["few examples"].text
    assert rules(few)["balance"].level == "note"
