"""Runs that train on everything: validation_fraction 0."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import DataError, UserError
from modelyard.run.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("two_devices")
QUICK = {"model": "mlp", "dataset": "digits", "hidden_units": [16], "log_every": 10, "validation_fraction": 0}


def go(**options: Any) -> modelyard.Result:
    return modelyard.train_and_evaluate(**{**QUICK, "train_steps": 40, "model_dir": "run", **options})


def test_the_last_model_is_tested_and_nothing_is_evaluated_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="modelyard")
    result = go(test_at_end=True, eval_every="10 steps")
    assert (result.split, result.model_step, result.best, result.validation) == ("test", 40, {}, {})
    splits = [row["split"] for row in read_metrics(Path("run/metrics.jsonl"))]
    assert splits == ["train"] * 4 + ["test"]
    told = [record.getMessage() for record in caplog.records if "no validation split" in record.getMessage()]
    assert len(told) == 1
    assert "after the last step is tested" in told[0]
    assert not any(Path("run/best").glob("*"))
    assert modelyard.evaluate("run", split="test").metrics["loss"] == pytest.approx(result.metrics["loss"], abs=1e-6)
    with pytest.raises(DataError, match=r"no validation split\. It has: train, test"):
        modelyard.evaluate("run")
    assert modelyard.resume("run").metrics == pytest.approx(result.metrics)


def test_without_a_test_the_result_is_that_of_training() -> None:
    assert go().split == "train"


@pytest.mark.parametrize("hook", ["early_stop(patience=1)", "stop_at(value=0.5)"])
def test_hooks_that_hang_on_evaluations_say_so(hook: str) -> None:
    with pytest.raises(UserError, match=r"needs a validation split.*the splits are train, test"):
        go(hooks=f"+{hook}")


def test_a_plugin_that_has_only_train_gets_one_unless_none_is_wanted() -> None:
    @modelyard.register_dataset("bare")
    def bare(options: Any, context: Any) -> Any:
        """Train only."""
        images, labels = np.zeros((20, 4, 4, 1), np.uint8), np.arange(20) % 2
        return modelyard.ArrayDataset({"train": {"image": images, "label": labels}})

    assert go(dataset="bare", validation_fraction=0.1, model_dir="cut").split == "validation"
    assert go(dataset="bare").split == "train"


def _images(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 255, (count, 8, 8, 3), np.uint8)


def test_files_of_all_kinds_stay_whole(tmp_path: Path) -> None:
    from PIL import Image

    np.savez(tmp_path / "arrays.npz", x_train=_images(20), y_train=np.arange(20) % 2)
    lines = ["path,label"]
    for number, image in enumerate(_images(20)):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
        lines.append(f"photos/{'ab'[number % 2]}/{number}.png,{'ab'[number % 2]}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    modelyard.convert(str(tmp_path / "photos"), str(tmp_path / "records"))
    for name in ("arrays.npz", "photos", "list.csv", "records"):
        sizes = [
            load_dataset(modelyard.load_config(dataset=str(tmp_path / name), validation_fraction=share)).sizes()
            for share in (0, 0.2)
        ]
        assert sizes == [{"train": 20}, {"train": 16, "validation": 4}], name
