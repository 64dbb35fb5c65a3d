"""Splits that are cut from train: the same in training, resume, evaluate and predict, also after the data has moved."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import modelyard
from conftest import engine_name

pytestmark = pytest.mark.usefixtures("two_devices")
VALUES = np.random.default_rng(0).random((60, 5)).astype(np.float32)
LABELS = (VALUES[:, 0] * 3).astype(np.int32)
FAST: dict[str, Any] = {"model": "mlp", "train_batch_size": 10, "train_steps": 4, "eval_every": "4 steps"}


@modelyard.register_dataset("train_only")
def train_only(options: Any, context: Any) -> modelyard.ArrayDataset:
    """A plugin's dataset without a validation split."""
    return modelyard.ArrayDataset({"train": {"image": VALUES, "label": LABELS}}, classes=["a", "b", "c"])


def held_out(run: str) -> dict[str, list[int]]:
    """The rows of each split in splits.csv."""
    rows: dict[str, list[int]] = {}
    with open(Path(run) / "splits.csv", newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["split"], []).append(int(row["row"]))
    return rows


def last_validation(run: str) -> dict[str, float]:
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["split"] == "validation"][-1]


@pytest.mark.parametrize("dataset", ["train_only", (VALUES, LABELS)], ids=["plugin", "arrays"])
def test_a_validation_split_is_cut_and_stays_the_same(dataset: Any) -> None:
    given = {} if isinstance(dataset, str) else {"dataset": dataset}
    modelyard.train_and_evaluate(
        dataset=dataset, validation_fraction=0.2, test_fraction=0.2, model_dir="run", engine=engine_name(), **FAST
    )
    rows = held_out("run")
    assert {split: len(found) for split, found in rows.items()} == {"validation": 12, "test": 12}
    assert not set(rows["validation"]) & set(rows["test"])
    measured = last_validation("run")
    for split in ("validation", "test"):
        found = modelyard.evaluate("run", split=split, **given).metrics
        own = modelyard.load("run").evaluate((VALUES[rows[split]], LABELS[rows[split]])).metrics
        assert own == found  # the examples that splits.csv lists, in this order
        if split == "validation":
            assert found["accuracy"] == measured["accuracy"]
            assert found["loss"] == pytest.approx(measured["loss"], rel=1e-6)
        table = modelyard.predict("run", split=split, output=f"{split}.csv", **given)
        assert table.metrics == found
    before = (Path("run") / "splits.csv").read_bytes()
    modelyard.resume("run", train_steps=8, **given)
    assert (Path("run") / "splits.csv").read_bytes() == before
    assert last_validation("run")["step"] == 8


def test_groups_of_a_folder_stay_together_after_it_has_moved() -> None:
    random = np.random.default_rng(0)
    for name in (f"{kind}/p{person}-{shot}.png" for kind in ("cat", "dog") for person in range(8) for shot in range(2)):
        Path("photos", name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (6, 6, 3), np.uint8)).save(Path("photos", name))
    modelyard.train_and_evaluate(
        dataset="photos", split_group="path:(p[0-9])-", test_fraction=0.25, test_at_end=True, model_dir="run",
        engine=engine_name(), **FAST,
    )  # fmt: skip
    with open("run/splits.csv", newline="") as file:
        listed = [(row["split"], row["example"]) for row in csv.DictReader(file)]
    people = {split: {Path(name).name[:2] for where, name in listed if where == split} for split, _ in listed}
    assert people["test"]
    assert not people["test"] & people["validation"]
    sizes = {split: sum(where == split for where, _ in listed) for split in people}
    assert sizes == {split: 4 * len(found) for split, found in people.items()}  # both classes, both shots
    tested = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()][-1]
    shutil.move("photos", "elsewhere")
    found = modelyard.evaluate("run", split="test", dataset="elsewhere").metrics
    assert found["accuracy"] == tested["accuracy"]
    assert found["loss"] == pytest.approx(tested["loss"], rel=1e-6)
