"""`modelyard report`: its numbers are those of evaluate and of scikit-learn, and any folder becomes a page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, confusion_matrix, precision_recall_fscore_support

import modelyard
from conftest import engine_name
from modelyard import storage
from modelyard.cli.app import main
from modelyard.errors import DataError, UserError
from modelyard.reporting.facts import number
from modelyard.reporting.page import MARKER
from object_store import BUCKET, object_store

pytestmark = pytest.mark.usefixtures("two_devices")
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, 4, 400)
IMAGES = np.clip(RANDOM.normal(60, 40, (400, 8, 8, 3)) + 30 * LABELS[:, None, None, None], 0, 255).astype(np.uint8)
HOSTILE = ["<script>alert(1)</script>", "x" * 100_000, '"><img src=x onerror=alert(2)>', "{{ 7 * 7 }}\x1b[2J\ud800"]
NAMES = np.array(HOSTILE, object)[LABELS]
PARTS = {"train": slice(0, 200), "validation": slice(200, 300), "test": slice(300, 400)}
GIVEN = {name: (IMAGES[part], NAMES[part].tolist()) for name, part in PARTS.items()}
OPTIONS: dict[str, Any] = {
    "model": "tiny_norm",
    "engine": engine_name(),
    "train_batch_size": 20,
    "log_every": 5,
    "eval_every": 5,
}
ENGINE = {"engine": engine_name()}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, two_devices: None) -> Path:
    """A tested run on images whose classes have hostile names."""
    folder = tmp_path_factory.mktemp("report")
    modelyard.train_and_evaluate(
        dataset=GIVEN, train_steps=20, test_at_end=True, ema_decay=0.7, augment="flip_left_right",
        hypothesis="<b>bold</b>", metrics="f1, calibration_error", model_dir=folder / "run", **OPTIONS,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def made(home: Path) -> modelyard.Report:
    return modelyard.report(home / "run", dataset=GIVEN, **ENGINE)


@pytest.fixture(scope="module")
def page(made: modelyard.Report) -> str:
    return Path(made.path).read_text(encoding="utf-8")


class Page(HTMLParser):
    """The tags of a page, with their attributes, and whether all are closed."""

    VOID = ("meta", "img", "link", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID and not tag.startswith("?"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_scores_are_those_of_evaluate_predict_and_scikit_learn(home: Path, made: modelyard.Report, page: str) -> None:
    facts = made.facts["split"]
    evaluated = modelyard.evaluate(home / "run", split="test", dataset=GIVEN, **ENGINE).metrics
    assert {one["name"]: one["value"] for one in facts["scores"]} == evaluated
    assert next(iter(evaluated)) == "loss"
    for value in evaluated.values():
        assert f"<td>{number(value)}</td>" in page
    test = GIVEN["test"]
    found = modelyard.load(home / "run", **ENGINE).predict(test)
    assert facts["matrix"] == found.scores["confusion"]
    true, said = LABELS[PARTS["test"]], found["class"]
    order = np.argsort(modelyard.load(home / "run").classes)  # classes are sorted by name in the run
    true = np.searchsorted(np.array(sorted(HOSTILE), object), NAMES[PARTS["test"]])
    assert list(order) == [0, 1, 2, 3]
    assert facts["matrix"] == confusion_matrix(true, said).tolist()
    expected = precision_recall_fscore_support(true, said, zero_division=0)
    for name, values in zip(("precision", "recall", "f1", "examples"), expected, strict=True):
        assert [one[name] or 0 for one in facts["classes"]] == pytest.approx(values.tolist(), abs=1e-12)
    for n, one in enumerate(facts["classes"]):
        score = average_precision_score(true == n, found["probabilities"][:, n])
        assert one["average_precision"] == pytest.approx(score, abs=1e-12)
        assert one["train_examples"] == int((NAMES[PARTS["train"]] == sorted(HOSTILE)[n]).sum())
    assert facts["calibration"]["error"] == pytest.approx(evaluated["calibration_error"], abs=1e-12)
    assert facts["wrong"] == int((said != true).sum())
    margins = found["probabilities"].max(axis=1) - found["probabilities"][np.arange(100), true]
    assert facts["mistakes"][0]["row"] == int(np.argmax(margins))


def test_the_score_has_an_interval_and_a_baseline(made: modelyard.Report) -> None:
    accuracy = made.facts["split"]["scores"][0]
    assert accuracy["name"] == "accuracy"
    share = accuracy["value"]
    half = 1.96 * np.sqrt(share * (1 - share) / 100)
    assert accuracy["low"] == pytest.approx(share - half, abs=0.03)
    assert accuracy["high"] == pytest.approx(share + half, abs=0.03)
    train = np.unique(NAMES[PARTS["train"]].astype(str), return_counts=True)
    most = train[0][np.argmax(train[1])]
    assert accuracy["baseline"] == pytest.approx((NAMES[PARTS["test"]].astype(str) == most).mean())
    assert f"{share:.4f}" in made.facts["verdict"]
    assert "100 test examples" in made.facts["verdict"]


def test_the_page_needs_no_network_and_runs_no_text_of_the_run(page: str) -> None:
    assert len(page.encode()) < 3_000_000
    parsed = Page(page)
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        for name in ("src", "href", "action", "data"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "alert(1)" not in scripts[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "49" not in [word.strip() for word in parsed.words]  # {{ 7 * 7 }}
    assert "x" * 500 not in page
    assert "\x1b" not in page


def test_the_page_has_what_is_to_be_seen(made: modelyard.Report, page: str) -> None:
    parsed = Page(page)
    pictures = [attributes for tag, attributes in parsed.tags if tag == "img"]
    assert all(attributes.get("alt") is not None for attributes in pictures)
    assert sum("shade" in (attributes.get("class") or "") for attributes in pictures) == min(
        9, made.facts["split"]["wrong"]
    )
    charts = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert len(charts) >= 5
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in charts)
    headings = [word for word in parsed.words if word in ("Curves", "Confusions", "Classes", "Calibration", "Data")]
    assert headings == ["Curves", "Confusions", "Classes", "Calibration", "Data"]
    assert "Training images as the network sees them" in page
    assert any("layer relu" in word for word in parsed.words)
    options = {one["name"]: one for one in made.facts["run"]["options"]}
    assert options["train_batch_size"]["value"] == "20"
    assert options["train_batch_size"]["default"] == "64"
    assert "engine" not in options or options["engine"]["value"] == engine_name()
    assert json.loads(Path(made.path).with_suffix(".json").read_text()) == made.facts
    assert str(made).startswith(made.facts["verdict"])


def test_without_the_data_the_page_has_what_the_run_recorded(
    home: Path, made: modelyard.Report, tmp_path: Path
) -> None:
    gone = modelyard.report(home / "run", output=tmp_path / "gone.html", **ENGINE)
    whole, recorded = (one.facts["split"] for one in (made, gone))
    assert [one["why"] for one in gone.facts["missing"] if "only a Python program can give" in one["why"]]
    assert recorded["from_records"]
    assert not whole["from_records"]
    scores = {one["name"]: one for one in recorded["scores"]}
    expected = {one["name"]: one for one in whole["scores"]}
    assert scores["accuracy"] == pytest.approx(expected["accuracy"])
    assert [one["recall"] for one in recorded["classes"]] == pytest.approx([one["recall"] for one in whole["classes"]])
    page = (tmp_path / "gone.html").read_text()
    assert "This report is not complete" in page
    assert "only a Python program can give" in page
    assert "Curves" in page


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


ODD_ROWS = "\n".join(
    [
        '{"step": 3, "split": "train", "loss": "<script>", "accuracy": [1]}',
        '{"step": 4, "split": "validation", "loss": null}',
        '{"step": 1e3}',
        "[]",
        '{"step": 5, "split": "test", "accuracy": 1e400, "loss": -1e308}',
        '{"half',
    ]
)
DAMAGES: dict[str, Callable[[Path], None]] = {
    "config": lambda run: cut(run / "config.yaml"),
    "manifest": lambda run: cut(run / "manifest.json"),
    "manifest of other types": lambda run: (run / "manifest.json").write_text(
        '{"dataset": [1], "starts": 7, "model": "x"}'
    ),
    "metrics": lambda run: (run / "metrics.jsonl").write_text(ODD_ROWS),
    "no checkpoints": lambda run: [shutil.rmtree(run / name) for name in ("checkpoints", "best")],  # type: ignore[dict-item,return-value]
    "weights": lambda run: [cut(path) for path in run.rglob("weights.safetensors")],  # type: ignore[dict-item,return-value]
    "states": lambda run: [path.write_text("{") for path in run.rglob("state.json")],  # type: ignore[dict-item,return-value]
    "examples": lambda run: [cut(path) for path in (run / "examples").iterdir()],  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_becomes_a_page_that_says_what_is_missing(home: Path, tmp_path: Path, damage: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(home / "run", run, ignore=shutil.ignore_patterns("report.*"))
    DAMAGES[damage](run)
    made = modelyard.report(run, **ENGINE)
    page = (run / "report.html").read_text()
    assert MARKER in page
    assert Page(page).open == []
    assert made.facts["missing"]
    assert "<script>alert" not in page


def test_a_run_that_was_killed_has_a_page(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(home / "run", run, ignore=shutil.ignore_patterns("report.*", "step-00000020*", "*00000020*"))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]) + lines[4][:20])
    facts = modelyard.report(run, split="validation", dataset=GIVEN, **ENGINE).facts
    assert facts["run"]["status"] == "interrupted"
    assert facts["split"]["examples"] == 100
    text = next(one["text"] for one in facts["findings"] if one["rule"] == "completeness")
    assert "did not finish" in text
    assert "of 20" in text


def test_other_files_are_not_replaced_and_mistakes_are_told_first(home: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine")
    with pytest.raises(UserError, match="exists and is no report"):
        modelyard.report(home / "run", output=mine)
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(UserError, match=r"other\.json exists and is no report"):
        modelyard.report(home / "run", output=tmp_path / "other.html")
    with pytest.raises(UserError, match=r"must end in \.html"):
        modelyard.report(home / "run", output=tmp_path / "other.pdf")
    with pytest.raises(UserError, match="no folder"):
        modelyard.report(home / "run", output=tmp_path / "no" / "other.html")
    with pytest.raises(DataError, match="tset"):
        modelyard.report(home / "run", split="tset")
    with pytest.raises(UserError, match="7777"):
        modelyard.report(home / "run", checkpoint=7777)
    with pytest.raises(UserError, match="eval_batch_size"):
        modelyard.report(home / "run", eval_batch_size="many")
    with pytest.raises(UserError, match=r"not a run folder|does not exist"):
        modelyard.report(tmp_path / "nothing")
    assert mine.read_text() == "<p>mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "other.json"]


def test_the_command_prints_findings_or_json(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", str(home / "run"), "--output", str(tmp_path / "page.html"), "--engine", engine_name()]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "Accuracy" in shown
    assert "page.html" in shown
    assert "\x1b[2J" not in shown
    with pytest.raises(SystemExit):
        main([*words, "--json"])
    facts = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert facts["findings"]
    assert facts == json.loads((tmp_path / "page.json").read_text())


def test_a_regression_and_several_labels(tmp_path: Path) -> None:
    x = RANDOM.normal(size=(160, 5)).astype(np.float32)
    y = (x @ np.arange(5) + RANDOM.normal(size=160)).astype(np.float32) * 100 + 7
    options = {**OPTIONS, "model": "mlp"}
    modelyard.train_and_evaluate(dataset=(x, y), train_steps=15, model_dir=tmp_path / "number", **options)
    made = modelyard.report(tmp_path / "number", dataset=(x, y), **ENGINE)
    scores = {one["name"]: one for one in made.facts["split"]["scores"]}
    evaluated = modelyard.evaluate(tmp_path / "number", dataset=(x, y), split="validation", **ENGINE).metrics
    assert {name: one["value"] for name, one in scores.items()} == evaluated
    for name in ("r2", "mae", "rmse", "loss"):
        assert scores[name]["low"] <= scores[name]["value"] <= scores[name]["high"]
    assert scores["r2"]["baseline"] == 0
    page = Path(made.path).read_text()
    assert "Predicted against true" in page
    assert "Worst predictions" in page
    assert Page(page).open == []

    flags = (x[:, :3] + RANDOM.normal(size=(160, 3)) > 0.3).astype(np.uint8)
    modelyard.train_and_evaluate(
        dataset=(x, flags), task="multi_label", train_steps=15, model_dir=tmp_path / "labels", **options
    )
    made = modelyard.report(tmp_path / "labels", dataset=(x, flags), **ENGINE)
    split = made.facts["split"]
    evaluated = modelyard.evaluate(tmp_path / "labels", dataset=(x, flags), split="validation", **ENGINE).metrics
    assert {one["name"]: one["value"] for one in split["scores"]} == evaluated
    assert split["scores"][0]["name"] == "macro_f1"
    f1 = [one["f1"] or 0 for one in split["classes"]]
    assert np.mean(f1) == pytest.approx(evaluated["macro_f1"])
    assert all(one["threshold_f1"] >= (one["f1"] or 0) for one in split["classes"])
    assert "Thresholds" in Path(made.path).read_text()


def test_a_run_on_an_object_store_has_its_report_there(home: Path, made: modelyard.Report, tmp_path: Path) -> None:
    with object_store():
        url = f"s3://{BUCKET}/runs/one"
        storage.upload_folder(home / "run", url)
        storage.remove(f"{url}/report.html")
        found = modelyard.report(url, dataset=GIVEN, cache_dir=str(tmp_path), **ENGINE)
        assert found.path == f"{url}/report.html"
        assert json.loads(storage.read_bytes(f"{url}/report.json")) == found.facts
        assert found.facts["split"] == made.facts["split"]
        assert MARKER in storage.read_bytes(found.path).decode()
