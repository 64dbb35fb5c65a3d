"""The search for a learning rate: what it reads from losses, what it leaves behind, on every engine."""

from __future__ import annotations

import csv
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import engine_name, on_engine
from modelyard.errors import ConfigError, UserError
from modelyard.loop.learning_rate_finder import _read, divergence, draw, smooth

RATES = np.logspace(-6, 0, 100).tolist()


def falling(fastest: float, diverges: float) -> np.ndarray:
    """A loss from 2.3 to 0.3 that falls fastest at one rate and grows beyond another."""
    decades = np.log10(RATES)
    loss = 0.3 + 2 / (1 + np.exp(6 * (decades - math.log10(fastest))))
    return loss + np.where(decades > math.log10(diverges), 50 * (decades - math.log10(diverges)), 0)


def test_the_steepest_descent_and_the_divergence_are_found() -> None:
    found = _read(RATES, falling(1e-3, 1e-1).tolist(), 100, Path("x"))
    assert found.steepest == pytest.approx(1e-3, rel=0.2)
    assert found.diverged == pytest.approx(1e-1, rel=0.4)
    assert found.diverged is not None
    assert found.tenth == found.diverged / 10
    assert found.suggestion == found.steepest, "the smaller of the two"
    near = _read(RATES, falling(2e-2, 3e-2).tolist(), 100, Path("x"))
    assert near.suggestion == near.tenth
    assert near.steepest is not None
    assert near.tenth is not None
    assert near.tenth < near.steepest


def test_noise_does_not_hide_the_descent() -> None:
    for seed in range(5):
        noise = np.random.default_rng(seed).normal(0, 0.1, 100)
        found = _read(RATES, (falling(1e-3, 1e-1) + noise).tolist(), 100, Path("x"))
        assert found.steepest == pytest.approx(1e-3, rel=1.5)


def test_noise_alone_is_no_descent() -> None:
    suggested = 0
    for seed in range(40):
        for steps in (20, 100):
            noise = np.random.default_rng(seed).normal(2.3, 0.1, steps)
            suggested += _read(RATES[:steps], noise.tolist(), steps, Path("x")).suggestion is not None
    assert suggested <= 2


def test_a_loss_that_is_no_number_ends_it() -> None:
    losses = falling(1e-3, 10)
    losses[80:] = math.nan
    found = _read(RATES, losses.tolist(), 100, Path("x"))
    assert found.diverged == RATES[80]
    assert len(found.losses) == 81
    assert found.suggestion is not None
    assert found.as_json()["losses"][-1] is None
    assert found.as_json()["losses"][0] == pytest.approx(2.3, abs=0.01)


def test_a_loss_that_only_grows_gives_no_steepest() -> None:
    found = _read(RATES, np.linspace(1, 2, 100).tolist(), 100, Path("x"))
    assert (found.steepest, found.diverged, found.suggestion) == (None, None, None)
    draw(found, "nothing to mark")


def test_a_loss_below_zero_does_not_count_as_diverged() -> None:
    assert divergence(-np.linspace(1, 5, 100), 100) is None
    assert divergence(np.concatenate([-np.ones(50), np.full(50, 5.0)]), 100) is not None


def test_smoothing_does_not_lag() -> None:
    line = np.linspace(3, 1, 60)
    np.testing.assert_allclose(smooth(line, 100), line)
    spike = np.zeros(60)
    spike[30] = 11
    np.testing.assert_allclose(smooth(spike, 100)[25:36], 1.0)


def test_the_plot_is_well_formed_whatever_its_title_and_losses() -> None:
    losses = falling(1e-3, 1e-1)
    losses[-1] = 1e30
    found = _read(RATES, losses.tolist(), 100, Path("x"))
    text = draw(found, "a <b> & 'c'")
    root = ElementTree.fromstring(text)
    lines = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert [line.get("class") for line in lines] == ["raw", "smooth"]
    points = [tuple(map(float, p.split(","))) for p in str(lines[0].get("points")).split()]
    assert len(points) == 100
    assert all(abs(value) <= 1e4 for point in points for value in point)
    assert points[0][0] == 70
    assert points[50][0] - points[49][0] == pytest.approx(points[11][0] - points[10][0], abs=0.11), "a log axis"
    assert "suggested" in text


@pytest.mark.usefixtures("two_devices")
class TestOnAnEngine:
    def test_it_trains_with_a_growing_rate_and_leaves_a_table_and_a_plot(self, tmp_path: Path) -> None:
        run = tmp_path / "runs" / "mine"
        options: dict[str, Any] = {"model": "mlp", "dataset": "digits", "optimizer": "sgd", "engine": engine_name()}
        found = modelyard.find_learning_rate(
            **options, runs_dir=str(tmp_path / "runs"), model_dir=str(run), learning_rate_schedule="cosine",
            warmup="10 %", highest=100.0,
        )  # fmt: skip
        rates = np.array(found.learning_rates)
        assert rates[0] == pytest.approx(1e-6)
        np.testing.assert_allclose(np.diff(np.log10(rates)), 8 / 99, rtol=1e-3)
        assert len(rates) < 100, "it diverged before the end"
        assert found.diverged is not None
        assert found.steepest is not None
        assert 1e-3 < found.steepest < found.diverged
        folder = Path(found.folder)
        assert folder.parent == tmp_path / "runs"
        assert folder.name.startswith("lr-finder-")
        assert sorted(p.name for p in folder.iterdir()) == ["learning_rates.csv", "learning_rates.svg"]
        assert not run.exists()
        assert [p.name for p in (tmp_path / "runs").iterdir()] == [folder.name]
        rows = list(csv.DictReader((folder / "learning_rates.csv").open()))
        assert [float(row["learning_rate"]) for row in rows] == pytest.approx(found.learning_rates)
        assert [float(row["smoothed_loss"]) for row in rows] == pytest.approx(found.smoothed)
        ElementTree.fromstring((folder / "learning_rates.svg").read_text())

    def test_the_losses_are_those_of_a_run_with_that_schedule(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"model": "mlp", "dataset": "digits", "engine": engine_name()}
        found = modelyard.find_learning_rate(**options, steps=20, output=tmp_path / "found", random_seed=3)
        result = modelyard.train(
            **options, train_steps=20, random_seed=3, learning_rate_schedule="range_test", learning_rate=1.0,
            model_dir=str(tmp_path / "run"), log_every="1 steps", hooks="-tensorboard",
        )  # fmt: skip
        from modelyard.run.metrics import read_metrics

        rows = read_metrics(Path(result.model_dir) / "metrics.jsonl")
        losses = [row["loss"] for row in rows if row["split"] == "train"][: len(found.losses)]
        assert found.losses[:10] == pytest.approx(losses[:10], rel=1e-4)

    def test_what_makes_no_sense_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"lowest 1 and highest 0.1 must be greater than 0, and lowest the smaller"):
            modelyard.find_learning_rate(lowest=1.0, highest=0.1)
        with pytest.raises(UserError, match="steps is 3; at least 10 are needed"):
            modelyard.find_learning_rate(steps=3)
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(UserError, match=r"holds thesis.tex; name a new folder"):
            modelyard.find_learning_rate(output=tmp_path)
        with pytest.raises(ConfigError, match="there is no model 'mpl'"):
            modelyard.find_learning_rate(model="mpl")


@pytest.mark.usefixtures("two_devices")
def test_the_command_prints_a_table_and_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "mlp", "--dataset", "digits", *on_engine(), "--steps", "40", "--highest", "100"]
    for verb, more in (("find-learning-rate", []), ("find_learning_rate", ["--json"])):
        with pytest.raises(SystemExit) as ended:
            modelyard.main([verb, *words, "--optimizer", "sgd", "--output", str(tmp_path / "a"), *more])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        if more:
            told = json.loads(shown.splitlines()[-1])
            assert told["suggestion"] == min(r for r in (told["steepest"], told["tenth"]) if r is not None)
        else:
            assert "smoothed" in shown
            assert "suggestion: --learning_rate" in shown
            assert "the loss diverges at" in shown
    assert (tmp_path / "a" / "learning_rates.svg").is_file()
