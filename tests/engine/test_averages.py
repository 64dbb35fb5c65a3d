"""Averages of the weights (ema_decay): what they are, and that they are what is evaluated; on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import Make, distance, engine_name, same_bits
from modelyard.engine.base import State
from modelyard.errors import CheckpointError, ConfigError, UserError
from modelyard.run.metrics import read_metrics

DECAY = 0.8
TRAINED = ("conv/kernel", "norm/gamma", "norm/beta", "logits/kernel", "logits/bias")
OPTIONS: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05, "ema_decay": DECAY}


def averaged(state: State) -> State:
    """The model that is evaluated, as one without averages."""
    return State({name: state.optimizer.get(f"{name}/average", w) for name, w in state.weights.items()}, {})


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_averages_are_those_that_numpy_computes_from_the_weights(make: Make, precision: str) -> None:
    engine = make(precision=precision, **OPTIONS)
    wide = np.float64 if precision == "float64" else np.float32
    expected = {name: engine.state().weights[name].astype(np.float64) for name in TRAINED}
    for step in range(10):
        engine.train(step, 1)
        state = engine.state()
        share = min(DECAY, (1 + step) / (10 + step))
        expected = {n: share * a + (1 - share) * state.weights[n].astype(np.float64) for n, a in expected.items()}
    found = {n.removesuffix("/average"): a for n, a in state.optimizer.items() if n.endswith("/average")}
    assert set(found) == set(TRAINED), "moving statistics have none"
    for name, average in found.items():
        assert average.dtype == wide, name
        np.testing.assert_allclose(average, expected[name], rtol=0, atol=1e-13 if wide == np.float64 else 1e-6)
        assert np.abs(average - state.weights[name]).max() > 1e-4


def test_training_goes_on_with_the_raw_weights_and_the_averages_are_what_is_evaluated(make: Make) -> None:
    engine, plain = (make(cpu_devices=2, precision="float64", **{**OPTIONS, "ema_decay": d}) for d in (DECAY, 0))
    first = engine.evaluate("test")  # a program that is made before there are averages worth the name
    for each in (engine, plain):
        each.train(0, 8)
        each.evaluate("test")
        each.train(8, 7)
    state = engine.state()
    assert distance(plain.state(), state) < 1e-12
    assert not any(name.endswith("/average") for name in plain.state().optimizer)
    found = engine.evaluate("test")
    assert abs(found["loss"] - plain.evaluate("test")["loss"]) > 1e-3
    assert abs(found["loss"] - first["loss"]) > 1e-3
    plain.load(averaged(state), weights_only=True)
    assert found == pytest.approx(plain.evaluate("test"), rel=1e-9)


def test_an_engine_that_takes_over_goes_on_bit_for_bit(make: Make) -> None:
    first, second = (make(deterministic=True, **OPTIONS) for _ in range(2))
    first.train(0, 7)
    second.load(first.state())
    for engine in (first, second):
        engine.train(7, 5)
    assert same_bits(first.state(), second.state())
    assert first.evaluate("test") == second.evaluate("test")


def test_two_devices_have_the_averages_of_one(make: Make) -> None:
    one, two = (make(cpu_devices=n, precision="float64", **OPTIONS) for n in (1, 2))
    for engine in (one, two):
        engine.train(0, 20)
    assert distance(one.state(), two.state()) < 1e-9
    before = two.evaluate("test")
    assert one.evaluate("test") == pytest.approx(before, rel=1e-9)
    two.load(two.state())  # from here on every device has what was saved
    assert two.evaluate("test") == before


def test_weights_alone_bring_their_averages_and_weights_from_elsewhere_begin_new_ones(make: Make) -> None:
    engine, other = make(**OPTIONS), make(**OPTIONS)
    engine.train(0, 10)
    state = engine.state()
    other.load(state, weights_only=True)
    assert other.evaluate("test") == pytest.approx(engine.evaluate("test"), rel=1e-6)
    assert int(other.state().optimizer["iteration"]) == 0
    other.load(State(state.weights, {}), weights_only=True)
    found = other.state()
    for name in TRAINED:
        np.testing.assert_array_equal(found.optimizer[f"{name}/average"], state.weights[name])


def test_a_checkpoint_without_averages_is_refused(make: Make) -> None:
    engine, plain = make(**OPTIONS), make(**{**OPTIONS, "ema_decay": 0})
    for only in (False, True):
        with pytest.raises(CheckpointError, match=r"optimizer slots missing: conv/kernel/average"):
            engine.load(plain.state(), weights_only=only)


@pytest.mark.parametrize("decay", [-0.1, 1, "much"])
def test_a_decay_that_is_no_share_is_refused(decay: Any) -> None:
    with pytest.raises(ConfigError, match="ema_decay"):
        modelyard.load_config(ema_decay=decay)


def test_a_run_evaluates_chooses_and_tests_the_averages(two_devices: None) -> None:
    options = {"model": "mlp", "dataset": "digits", "train_batch_size": 32, "engine": engine_name(), **OPTIONS}
    result = modelyard.train_and_evaluate(
        **options, train_steps=40, eval_every="20 steps", save_every="20 steps", test_at_end=True, model_dir="run"
    )
    rows = {(row["split"], row["step"]): row["loss"] for row in read_metrics(Path("run/metrics.jsonl"))}
    for step, split in ((20, "validation"), (40, "validation"), (result.model_step, "test")):
        again = modelyard.evaluate("run", checkpoint=step, split=split, engine=engine_name())
        assert again.metrics["loss"] == pytest.approx(rows[split, step], rel=1e-5)
    last = "run/checkpoints/step-00000040"
    raw = {**options, "ema_decay": 0, "learning_rate": 1e-30, "train_steps": 1, "checkpoint_path": last}
    found = modelyard.train_and_evaluate(**raw, model_dir="raw")
    assert abs(found.metrics["loss"] - rows["validation", 40]) > 1e-4, "which the raw weights don't give"
    with pytest.raises(UserError, match="ema_decay"):
        modelyard.resume("run", ema_decay=0.5, train_steps=50)
