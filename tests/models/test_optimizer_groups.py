"""An optimizer for each group of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import engine_class
from modelyard.config.durations import RunLength
from modelyard.data.open_dataset import load_dataset
from modelyard.engine.base import Engine
from modelyard.errors import ConfigError, UserError

pytestmark = pytest.mark.usefixtures("two_devices")


def make(groups: str = "", **options: Any) -> Engine:
    from modelyard.loop.run import build

    usual = {"model": "tiny_norm", "dataset": "digits", "train_steps": 40, "train_batch_size": 32, "optimizer": "sgd"}
    config = modelyard.load_config(**{**usual, "learning_rate": 0.1, "optimizer_groups": groups, **options})
    data = load_dataset(config)
    engine = engine_class()(config)
    build(engine, config, data, RunLength(data.size("train"), 32, 40))
    return engine


def moved(engine: Engine, steps: int = 1) -> dict[str, Any]:
    before = engine.state().weights
    engine.train(0, steps)
    after = engine.state().weights
    return {name: after[name] - before[name] for name in after}


def test_a_group_has_its_own_rate_or_a_factor_and_the_first_match_wins() -> None:
    plain = moved(make(momentum=0))
    groups = (
        "sgd(match='logits/kernel', learning_rate=0.3, momentum=0), "
        "sgd(match='logits/*|*/beta', factor=0.5, momentum=0)"
    )
    grouped = moved(make(groups, momentum=0))
    times = {"logits/kernel": 3.0, "logits/bias": 0.5, "norm/beta": 0.5, "norm/gamma": 1.0, "conv/kernel": 1.0}
    for name, factor in times.items():
        assert np.abs(plain[name]).max() > 0
        np.testing.assert_allclose(grouped[name], factor * plain[name], rtol=2e-3, atol=1e-6)


def test_groups_follow_the_schedule_and_the_clipping_of_the_whole() -> None:
    same = "sgd(match='logits/*', momentum=0.9), sgd(match='*/gamma', learning_rate=0.1)"
    options = {"learning_rate_schedule": "cosine", "clip_norm": 0.5, "precision": "float64", "warmup": "5 steps"}
    one, other = moved(make(**options), 10), moved(make(same, **options), 10)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=1e-7)


def test_slots_keep_their_names_and_two_of_a_kind_their_own_counters() -> None:
    engine = make("sgd(match='logits/*'), adam(match='*/beta'), sgd(match='*/gamma', nesterov=true)")
    assert list(make("sgd(match='logits/*'), sgd(match='*/gamma')").state().optimizer) != []
    slots = engine.state().optimizer
    assert {"conv/kernel/momentum", "logits/kernel/momentum", "norm/gamma/momentum", "norm/beta/velocity"} <= set(slots)
    counters = {name for name in slots if name.endswith("iteration")}
    assert counters == {
        "iteration",
        "sgd/iteration",
        "group1/sgd/iteration",
        "group2/adam/iteration",
        "group3/sgd/iteration",
    }
    engine.train(0, 7)
    state = engine.state()
    assert all(state.optimizer[name] == 7 for name in counters)
    again = make("sgd(match='logits/*'), adam(match='*/beta'), sgd(match='*/gamma', nesterov=true)")
    again.load(state)
    engine.train(7, 3)
    again.train(7, 3)
    assert all(np.array_equal(v, again.state().weights[name]) for name, v in engine.state().weights.items())


def test_weight_decay_reaches_biases_and_normalization_only_in_a_group_that_names_them() -> None:
    options = {"momentum": 0, "learning_rate": 1e-6}  # so that gradients hardly move a weight
    group = "sgd(match='{}', learning_rate=0.1, weight_decay={}, momentum=0)"
    plain = moved(make(group.format("*/gamma", 0), **options))["norm/gamma"]
    for match, expected in (("*/gamma", -0.05), ("norm/*", 0.0)):  # of a scale that begins as 1
        change = moved(make(group.format(match, 0.5), **options))["norm/gamma"]
        np.testing.assert_allclose(change - plain, expected, atol=1e-4)


def test_groups_train_on_two_devices_as_on_one() -> None:
    groups = "adamw(match='logits/*', weight_decay=0.1), sgd(match='*/gamma')"
    options = {"optimizer": "muon", "precision": "float64", "learning_rate": 0.01}
    one, two = (moved(make(groups, cpu_devices=n, **options), 5) for n in (1, 2))
    for name in one:
        np.testing.assert_allclose(one[name], two[name], atol=1e-8)


def test_a_pattern_that_matches_nothing_names_what_is_near() -> None:
    with pytest.raises(UserError, match=r"match='logit/\*' matches no weight.*Near: .*logits/(kernel|bias)"):
        make("sgd(match='*/beta|logit/*')")
    with pytest.raises(UserError, match=r"matches no weight.*Near: conv/kernel"):
        make("sgd(match='nothing')")
    with pytest.raises(UserError, match=r"match='logits/bias' names is in groups before it"):
        make("sgd(match='logits/*'), adam(match='logits/bias')")


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ("sgd(match='a', momentun=0.9)", "no argument 'momentun'. Did you mean 'momentum'"),
        ("sgd(match='a', adam_beta1=0.9)", "no argument 'adam_beta1'"),
        ("sdg(match='a')", "Did you mean 'sgd'"),
        ("sgd(momentum=0.9)", "match"),
        ("sgd(match='a', momentum=2)", "momentum"),
        ("sgd(match='a', learning_rate=0)", "learning_rate"),
        ("sgd(match='a', learning_rate=1, factor=2)", "give one of them"),
        ("sgd(match='a||b')", "empty pattern"),
    ],
)
def test_mistakes_in_a_group_are_told_with_the_config(groups: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        modelyard.load_config(optimizer_groups=groups)
    assert told in str(error.value)
    assert "optimizer_groups" in str(error.value)


def test_loss_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        modelyard.load_config(optimizer_groups="sgd(match='a')", precision="float16")
