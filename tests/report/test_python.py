"""From Python: the curves of a run, a table of runs, the card of a model."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

import modelyard
from conftest import engine_name
from modelyard.charts.curves import Curves
from modelyard.charts.draw import Series, draw
from modelyard.models.metric_types import CLASSIFICATION
from modelyard.reporting.card import model_card
from modelyard.reporting.facts import RunFacts
from modelyard.reporting.folder import read_run_facts
from modelyard.run.directory import open_run_folder

pytestmark = pytest.mark.usefixtures("two_devices")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> modelyard.Result:
    return modelyard.train_and_evaluate(
        model="mlp", dataset="digits", train_steps=6, eval_every=3, log_every=3, engine=engine_name(),
        learning_rate=0.01, model_dir=tmp_path_factory.mktemp("runs") / "one", test_at_end=True,
    )  # fmt: skip


def test_a_result_plots_its_curves_without_a_plotting_library(result: modelyard.Result, tmp_path: Path) -> None:
    curves = result.plot()
    assert [*curves.by_metric][:2] == ["loss", "accuracy"]
    assert curves.by_metric["accuracy"]["validation"].steps == [3, 6]
    assert curves.by_metric["accuracy"]["test"].values == [result.metrics["accuracy"]]
    assert "<svg" in curves._repr_html_()
    assert "best: step" in curves._repr_html_()
    root = ElementTree.parse(curves.save(tmp_path / "curves.svg")).getroot()
    assert root.tag.endswith("svg")
    assert "loss" in repr(curves)


def test_curves_of_odd_rows_are_drawn_or_left_out() -> None:
    rows: list[dict[str, Any]] = [
        {"step": n, "split": "train", "loss": value, "<b>": 1.0}
        for n, value in enumerate([1.0, None, float("nan"), "2", [3], 10**400, -1e308, True, 0.5])
    ]
    rows += [
        {"step": "x", "split": "train", "loss": 1.0},
        {"split": "train"},
        {"step": 3, "split": "other", "loss": 1.0},
    ]
    curves = Curves(rows)
    assert curves.by_metric["loss"]["train"].values == [1.0, None, 0.5]
    assert "&lt;b&gt;" in curves._repr_html_()
    assert "<b>" not in curves._repr_html_()
    ElementTree.fromstring(curves._repr_svg_())
    assert Curves([])._repr_svg_()
    assert draw([Series("a", [], [])], "x", "nothing") == ""
    assert draw([Series("a", [1, 1], [2, 2], "bars")], "x", "one bar")


def test_runs_are_rows(result: modelyard.Result, tmp_path: Path) -> None:
    shutil.copytree(result.model_dir, tmp_path / "runs" / "one")
    shutil.copytree(result.model_dir, tmp_path / "runs" / "two")
    (tmp_path / "runs" / "two" / "config.yaml").write_text("half of a")
    (tmp_path / "runs" / "other").mkdir()
    rows = modelyard.runs(tmp_path / "runs" / "*")
    assert [row["run"] for row in rows] == ["one", "two"]
    assert rows == modelyard.runs(str(tmp_path / "runs"))
    one, two = rows
    assert one["test_accuracy"] == result.metrics["accuracy"]
    assert (one["model"], one["dataset"], one["step"], one["status"]) == ("mlp", "digits", 6, "finished")
    assert "damaged" in two["status"]
    frame = rows.to_pandas()
    assert frame["test_accuracy"][0] == result.metrics["accuracy"]
    assert "one" in str(rows)
    assert modelyard.runs(tmp_path / "nothing") == []


def front_matter(card: str) -> dict[str, Any]:
    _, head, rest = card.split("---\n", 2)
    assert rest.startswith("\n# ")
    found: dict[str, Any] = yaml.safe_load(head)
    return found


def test_a_card_has_what_a_hub_reads(result: modelyard.Result) -> None:
    facts = read_run_facts(open_run_folder(result.model_dir))
    card = model_card(facts, result.model_step, CLASSIFICATION, True, "keras")
    head = front_matter(card)
    assert head["library_name"] == "keras"
    assert "license" not in head
    assert "accuracy" in head["metrics"]
    tested = head["model-index"][0]["results"][0]
    assert tested["task"]["type"] == "image-classification"
    assert tested["dataset"]["split"] == "test"
    assert {one["type"]: one["value"] for one in tested["metrics"]}["accuracy"] == result.metrics["accuracy"]
    assert "- learning\\_rate: 0.01" in card
    assert f"| accuracy | {result.metrics['accuracy']:.4f} |" in card
    untested = model_card(facts, 1, CLASSIFICATION, True)  # of a step that was not evaluated
    assert "model-index" not in front_matter(untested)


def test_a_card_of_hostile_names_is_yaml_and_text() -> None:
    name = "a: b\n---\n# [x](javascript:1) <script>"
    facts = RunFacts(
        name, "runs/x", model=name, dataset=name, classes=(name,) * 3, hypothesis=name, sizes={name: 3},
        rows=({"split": "test", "step": 3, "accuracy": 0.5, "odd: name": 1.0},),
    )  # fmt: skip
    card = model_card(facts, 3, CLASSIFICATION, True)
    head = front_matter(card)
    assert {one["name"] for one in head["model-index"][0]["results"][0]["metrics"]} == {"accuracy", "odd: name"}
    body = card.split("---\n", 2)[2]
    assert "<script" not in body.replace("\\<script", "")
    assert "](javascript" not in body.replace("\\](", "")
    assert card.count("\n---\n") == 1
