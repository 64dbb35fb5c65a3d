"""Optimizers against Keras's own: the same gradients give the same weights."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from conftest import Make, same_bits

OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "momentum": ({}, lambda rate: keras.optimizers.SGD(rate, momentum=0.9)),
    "adagrad": ({}, lambda rate: keras.optimizers.Adagrad(rate)),
    "adadelta": ({}, lambda rate: keras.optimizers.Adadelta(rate)),
    "ftrl": ({}, lambda rate: keras.optimizers.Ftrl(rate)),
}
CHANGED: dict[str, tuple[dict[str, Any], Any]] = {
    "momentum": (
        {"momentum": 0.5, "nesterov": True},
        lambda rate: keras.optimizers.SGD(rate, momentum=0.5, nesterov=True),
    ),
    "adagrad": (
        {"adagrad_initial_accumulator_value": 0.3, "adagrad_epsilon": 1e-3},
        lambda rate: keras.optimizers.Adagrad(rate, initial_accumulator_value=0.3, epsilon=1e-3),
    ),
    "adadelta": (
        {"adadelta_rho": 0.5, "adadelta_epsilon": 1e-3},
        lambda rate: keras.optimizers.Adadelta(rate, rho=0.5, epsilon=1e-3),
    ),
    "ftrl": (
        {
            "ftrl_learning_rate_power": -0.3, "ftrl_initial_accumulator_value": 0.2, "ftrl_l1": 0.01, "ftrl_l2": 0.02,
            "ftrl_l2_shrinkage": 0.03, "ftrl_beta": 0.1,
        },
        lambda rate: keras.optimizers.Ftrl(
            rate, learning_rate_power=-0.3, initial_accumulator_value=0.2, l1_regularization_strength=0.01,
            l2_regularization_strength=0.02, l2_shrinkage_regularization_strength=0.03, beta=0.1,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("changed", [False, True], ids=["defaults", "options"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_the_optimizer_of_keras(make: Make, name: str, changed: bool) -> None:
    options, theirs = (CHANGED if changed else OPTIMIZERS)[name]
    engine = make(model="mlp", optimizer=name, learning_rate=0.5, **options)
    start, rng = engine.state().weights, np.random.default_rng(0)
    mine = engine.network.trained
    reference = [keras.Variable(ops.convert_to_numpy(v.value), name=f"v{i}") for i, v in enumerate(mine)]
    optimizer = theirs(0.5)
    optimizer.build(reference)
    for _ in range(4):
        gradients = [ops.convert_to_tensor(rng.normal(size=v.shape).astype(np.float32)) for v in mine]
        with engine.network.learning_rate.set_to(0.5):
            engine.optimizer.apply(gradients, mine)
        optimizer.apply(gradients, reference)
    for ours, keras_value, name_of in zip(mine, reference, mine, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(ours.value), ops.convert_to_numpy(keras_value.value))
        assert np.abs(ops.convert_to_numpy(ours.value)).sum() > 0, name_of.path
    assert any((start[n] != ops.convert_to_numpy(v.value)).any() for n, v in engine.network.weights.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_bits(make: Make, name: str) -> None:
    options: dict[str, Any] = {"optimizer": name, "learning_rate": 0.05, "deterministic": True}
    whole, first, second = (make(**options) for _ in range(3))
    whole.train(0, 6)
    first.train(0, 3)
    second.load(first.state())
    second.train(3, 3)
    assert same_bits(whole.state(), second.state())


@pytest.mark.parametrize("groups", [(), "adagrad(match='conv/*')"], ids=["one", "groups"])
@pytest.mark.parametrize("name", ["adagrad", "ftrl"])
def test_a_phase_begins_with_the_first_sums_of_squares(make: Make, name: str, groups: Any) -> None:
    option = {f"{name}_initial_accumulator_value": 0.25}
    engine = make(optimizer=name, optimizer_groups=groups, **option)
    start = engine.state().optimizer
    engine.train(0, 2)
    engine.assign({}, engine.network.first_optimizer_state())
    again = engine.state().optimizer
    assert {slot: values.tolist() for slot, values in again.items()} == {s: v.tolist() for s, v in start.items()}
    assert float(again["logits/kernel/accumulator"].flat[0]) == 0.25
