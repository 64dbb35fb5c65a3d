"""Layers that are trained, phase by phase, and layers that stay as they are; on every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conftest import Make, distance, same_bits
from modelyard.engine.base import State
from modelyard.errors import UserError

RESNET = {"model": "resnet20", "width": 4, "optimizer": "adamw", "learning_rate": 0.01, "l2_regularization": 1e-3}
PHASES = "head(until=3), layers(match='n*m|head', until=6, factor=0.1), all(factor=0.01)"


def changed(before: State, after: State) -> tuple[set[str], set[str]]:
    """The first parts of the names of weights and of slots that differ."""

    def of(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
        return {name.split("_")[0].split("/")[0] for name in one if not np.array_equal(one[name], other[name])}

    return of(before.weights, after.weights), of(before.optimizer, after.optimizer)


def test_each_phase_trains_its_layers_and_leaves_all_else_alone(make: Make) -> None:
    engine = make(fine_tune=PHASES, train_steps=9, optimizer="adamw", learning_rate=0.01, l2_regularization=1e-3)
    states = [engine.state()]
    rates = []
    for first in (0, 3, 6):
        rates.append(engine.train(first, 3)["learning_rate"])
        states.append(engine.state())
    expected = [{"logits"}, {"norm", "logits"}, {"conv", "norm", "logits"}]
    for before, after, layers in zip(states, states[1:], expected, strict=False):
        weights, slots = changed(before, after)
        assert weights == layers, "moving statistics of frozen layers stay, too"
        assert slots <= {*layers, "iteration"}, "the optimizer has seen nothing of the others"
    np.testing.assert_allclose(np.concatenate(rates), np.repeat([0.01, 0.001, 0.0001], 3), rtol=1e-6)


def test_a_stretch_over_a_boundary_is_cut_there_and_a_run_goes_on_from_any_step(make: Make) -> None:
    options = {"model": "tiny_norm", "fine_tune": "head(until=5), all(factor=0.5)", "train_steps": 10}
    whole, parts = make(**options), make(**options)
    whole.prepare([10])
    losses = whole.train(0, 10)["loss"]
    first = [parts.train(0, 3)["loss"], parts.train(3, 4)["loss"]]
    resumed = make(**options)
    resumed.load(parts.state())
    np.testing.assert_array_equal(losses, np.concatenate([*first, resumed.train(7, 3)["loss"]]))
    assert same_bits(whole.state(), resumed.state())


def test_two_devices_learn_the_same_in_every_phase(make: Make) -> None:
    options = {"precision": "float64", "fine_tune": "head(until=4), all", "train_steps": 8, "gradient_accumulation": 2}
    one, two = (make(cpu_devices=n, clip_norm=0.5, **options) for n in (1, 2))
    for engine in (one, two):
        engine.train(0, 8)
    assert distance(one.state(), two.state()) < 1e-9


def test_layers_are_not_moved_too_far_when_their_phase_begins(make: Make) -> None:
    engine = make(fine_tune="head(until=50), all", train_steps=60, learning_rate=0.01, optimizer="adam")
    engine.train(0, 50)
    before = engine.state()
    engine.train(50, 1)
    after = engine.state()
    moved = np.abs(after.weights["conv/kernel"] - before.weights["conv/kernel"])
    assert 0.005 < moved.max() < 0.0101, "Adam's first step is as long as the learning rate"
    assert int(after.optimizer["iteration"]) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_phases_go_with_groups_of_weights(make: Make, optimizer: str) -> None:
    groups = "adam(match='logits/bias', factor=0.1), adam(match='norm/*')"
    engine = make(fine_tune="head(until=2), all", train_steps=4, optimizer=optimizer, optimizer_groups=groups)
    before = engine.state()
    engine.train(0, 2)
    assert changed(before, engine.state())[0] == {"logits"}
    engine.train(2, 2)
    assert changed(before, engine.state())[0] == {"conv", "norm", "logits"}


def test_batch_norm_without_weights_is_frozen_with_the_layer_before_it(two_devices: None) -> None:
    import keras

    from modelyard.config.calls import Call
    from modelyard.config.weight_groups import read_phases
    from modelyard.engine.phases import Freezing

    inputs = keras.Input((4,))
    norm = keras.layers.BatchNormalization(center=False, scale=False, name="norm")
    hidden = norm(keras.layers.Dense(3, name="hidden")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2, name="logits")(hidden))
    freezing = Freezing(model, read_phases([Call.parse("head(until=5)"), Call.parse("all")]))
    freezing.select(0)
    assert not norm.trainable
    freezing.select(1)
    assert norm.trainable
    Freezing(model, read_phases([]), freeze_batch_norm=True).select(0)
    assert not norm.trainable


def test_without_phases_a_model_is_trained_as_its_author_made_it(two_devices: None) -> None:
    import keras

    from modelyard.config.weight_groups import read_phases
    from modelyard.engine.phases import Freezing

    inputs = keras.Input((4,))
    first = keras.layers.BatchNormalization(center=False, scale=False, name="first")
    frozen = keras.layers.BatchNormalization(trainable=False, name="frozen")
    hidden = frozen(keras.layers.Dense(3, name="hidden")(first(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(2, name="logits")(hidden))
    expected = [v.path for v in model.trainable_variables]
    freezing = Freezing(model, read_phases([]))
    freezing.select(0)
    assert first.trainable, "nothing stands before it"
    assert not frozen.trainable
    assert [v.path for v in freezing.trained] == expected


def test_frozen_batch_norm_keeps_all_it_began_with_while_the_rest_learns(make: Make) -> None:
    engine = make(freeze_batch_norm=True, train_steps=4)
    before = engine.state()
    engine.train(0, 4)
    after = engine.state()
    same = {name for name in before.weights if np.array_equal(before.weights[name], after.weights[name])}
    norms = {name for name in before.weights if "moving" in name or "gamma" in name or "beta" in name}
    assert norms
    assert norms <= same
    assert not any(name.endswith("kernel") for name in same)
    assert not any("gamma" in slot for slot in before.optimizer)


def test_the_last_layers_are_counted_by_layers_with_weights(make: Make) -> None:
    engine = make(**RESNET, fine_tune="top(layers=3)", train_steps=2)
    before = engine.state()
    engine.train(0, 2)
    after = engine.state()
    layers = {
        name.split("/")[0] for name in before.weights if not np.array_equal(before.weights[name], after.weights[name])
    }
    assert layers == {"logits", "stage3_block3_norm2", "stage3_block3_conv2"}


@pytest.mark.parametrize(
    ("fine_tune", "said"),
    [
        ("layers(match='stage9_*')", r"'stage9_\*' names no layer that can be trained. Near: .*stage"),
        ("layers(match='stagge2_*')", r"Near: stage2_\*, "),
        ("layers(match='*lojits*')", r"Near: logits"),
        ("head(until=5), all(until=5), head", "phases must follow one another within the run of 40 steps"),
        ("head(until='200 %'), all", "within the run of 40 steps"),
    ],
)
def test_phases_that_fit_no_run_are_told(make: Make, fine_tune: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make(**RESNET, fine_tune=fine_tune)


def test_batch_norm_that_is_frozen_is_not_enough_to_train(make: Make) -> None:
    with pytest.raises(UserError, match="phase 1 trains nothing"):
        make(**RESNET, fine_tune="layers(match='stem_norm')", freeze_batch_norm=True)


def test_what_has_no_effect_on_this_model_is_a_warning(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "modelyard"):
        make(model="mlp", hidden_units=[4], fine_tune="top(layers=2)")
        make(**RESNET, freeze_batch_norm=True)
        assert not caplog.messages
        make(model="mlp", hidden_units=[4], fine_tune="head(until=5), top(layers=3)", freeze_batch_norm=True)
    assert caplog.messages == [
        "freeze_batch_norm has no effect: mlp has no batch norm",
        "fine_tune: top(layers=3) is all of mlp, which has 2 layers with weights that can be trained",
    ]
