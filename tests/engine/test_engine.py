"""What every engine must do: run on TensorFlow, and with ``--engine jax`` on JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import Make, distance, engine_class, engine_name, same_bits
from modelyard.config.backend import nvidia_gpus
from modelyard.data import pipeline
from modelyard.engine import base
from modelyard.engine.base import State
from modelyard.errors import CheckpointError, TrainingError, UserError

AUGMENT = "pad_and_crop(padding=1), flip_left_right"


def test_two_devices_see_the_same_global_batches_augmentation_included(make: Make) -> None:
    engines = [make(model="watcher", precision="float64", augment=AUGMENT, cpu_devices=n) for n in (1, 2)]
    one, two = (engine.train(3, 60) for engine in engines)  # over the end of an epoch
    for name in ("pixels", "leaning", "squares"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-13)
    assert len(np.unique(one["leaning"])) == 60


def test_two_devices_and_pieces_mix_the_same_neighbours(make: Make) -> None:
    options = {"model": "watcher", "precision": "float64", "augment": "cutmix, rand_augment, mixup(alpha=0.3)"}
    divided = [(1, 1), (2, 1), (2, 2)]
    one, *others = (make(cpu_devices=n, gradient_accumulation=k, **options).train(50, 10) for n, k in divided)
    assert len(np.unique(one["leaning"])) == 10
    for other in others:
        for name in ("pixels", "leaning", "squares", "loss", "accuracy"):
            np.testing.assert_allclose(one[name], other[name], rtol=1e-9)


def test_the_learning_rate_is_multiplied_by_the_devices_only_if_asked_for(make: Make) -> None:
    rates = [
        make(cpu_devices=n, learning_rate=0.01, scale_learning_rate=scaled).train(0, 1)["learning_rate"][0]
        for n, scaled in ((1, True), (2, False), (2, True))
    ]
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.02], rtol=1e-6)


def test_training_is_equal_on_one_and_two_devices_in_float64(make: Make) -> None:
    options = {"precision": "float64", "augment": AUGMENT, "clip_norm": 0.5, "l2_regularization": 1e-3}
    engines = [make(cpu_devices=n, optimizer="sgd", learning_rate=0.05, **options) for n in (1, 2)]
    for engine in engines:
        engine.train(0, 120)
    assert distance(engines[0].state(), engines[1].state()) < 1e-9


def test_training_is_equal_on_one_and_two_devices_in_float32_at_first(make: Make) -> None:
    engines = [make(cpu_devices=n, augment=AUGMENT) for n in (1, 2)]
    losses = [engine.train(0, 10)["loss"] for engine in engines]
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-4)
    assert distance(engines[0].state(), engines[1].state()) < 1e-4


def test_optimizers_inside_an_optimizer_do_not_sum_over_devices_again(make: Make) -> None:
    import keras

    @modelyard.register_model("two_rates")
    class TwoRates(modelyard.Classifier):
        """One optimizer for the head, another for the rest."""

        def network(self) -> keras.Model:
            import parts

            return parts.tiny_norm(self.data, self.options)

        def optimizer(self, config: Any, default: Any) -> Any:
            head = keras.optimizers.SGD(0.01, name="head")
            rest = keras.optimizers.SGD(0.1, name="rest")
            return keras.optimizers.MultiOptimizer(lambda variable: head if "logits" in variable.path else rest)

    engines = [make(model="two_rates", precision="float64", cpu_devices=n) for n in (1, 2)]
    for engine in engines:
        engine.train(0, 5)
    assert distance(engines[0].state(), engines[1].state()) < 1e-9


def test_batch_norm_without_sync_leaves_no_state_that_only_one_device_has(make: Make) -> None:
    engine = make(cpu_devices=2, sync_batch_norm=False)
    engine.train(0, 5)
    with_own_state = engine.evaluate("test")
    engine.load(engine.state())  # from here on every device has what was saved
    assert engine.evaluate("test") == with_own_state


def test_replicas_share_no_dropout_noise(make: Make) -> None:
    import keras
    from keras import ops

    @modelyard.register_model("noise_alone")
    class NoiseAlone(modelyard.Classifier):
        """What comes out depends on the noise and on nothing else."""

        def network(self) -> keras.Model:
            inputs, x = modelyard.any_input(self.data)
            x = ops.ones_like(keras.layers.Flatten(name="flatten")(x))
            x = keras.layers.Dropout(0.5, name="dropout")(x)
            return keras.Model(inputs, keras.layers.Dense(self.data.num_classes, name="logits")(x))

        def metrics(self, outputs: Any, batch: dict[str, Any]) -> dict[str, Any]:
            noise = outputs[:, 0]
            return {"noise": noise, "squared": ops.square(noise)}

    engine = make(model="noise_alone", precision="float64", cpu_devices=2, train_batch_size=2)
    seen = engine.train(0, 20)  # one example for each device
    spread = seen["squared"] - seen["noise"] ** 2
    assert spread.min() > 1e-9
    assert len(np.unique(seen["noise"])) == 20, "and steps share none either"


def test_evaluation_does_not_depend_on_batch_size_or_devices(make: Make) -> None:
    trained = make()
    trained.train(0, 30)
    state = trained.state()
    size = trained.dataset.size("test")
    labels = trained.dataset.arrays("test")["label"]  # type: ignore[index]
    results = []
    for options in ({"eval_batch_size": n} for n in (1, 7, size, 10 * size)):
        engine = make(**options)
        engine.load(state)
        results.append(engine.evaluate_examples("test"))
    for batch in (7, size):
        engine = make(eval_batch_size=batch, cpu_devices=2)
        engine.load(state)
        results.append(engine.evaluate_examples("test"))
    first = results[0]
    for result in results:
        assert result.metrics["accuracy"] == first.metrics["accuracy"]
        assert result.metrics["loss"] == pytest.approx(first.metrics["loss"], abs=1e-5)
        np.testing.assert_array_equal(result.examples["label"], labels)
        np.testing.assert_array_equal(result.examples["accuracy"], first.examples["accuracy"])
        np.testing.assert_allclose(result.examples["loss"], first.examples["loss"], atol=1e-4)
    assert first.examples["accuracy"].mean(dtype=np.float64) == first.metrics["accuracy"]
    assert 0.5 < first.metrics["accuracy"] < 1


def test_evaluation_counts_every_example_once(make: Make) -> None:
    for batch in (7, 100):
        engine = make(model="watcher", precision="float64", eval_batch_size=batch)
        images = engine.dataset.arrays("validation")["image"]  # type: ignore[index]
        result = engine.evaluate("validation")
        assert result["pixels"] == pytest.approx(images.astype(np.float64).sum() / len(images), rel=1e-12)


def test_a_metric_need_not_be_a_mean_of_examples(make: Make) -> None:
    engine = make(model="squares", eval_batch_size=50)
    result = engine.evaluate("validation")
    assert result["rmse"] == pytest.approx(result["loss"] ** 0.5)


def test_steps_do_not_depend_on_how_they_are_cut_into_stretches(make: Make) -> None:
    options = {"model": "tiny_dropout", "augment": AUGMENT, "deterministic": True}
    whole, parts = make(**options), make(**options)
    losses = whole.train(0, 20)["loss"]
    pieces = [parts.train(step, count)["loss"] for step, count in ((0, 1), (1, 6), (7, 13))]
    np.testing.assert_array_equal(losses, np.concatenate(pieces))
    assert same_bits(whole.state(), parts.state())


@pytest.mark.parametrize("devices", [1, 2])
def test_a_restored_engine_goes_on_bit_for_bit(make: Make, devices: int) -> None:
    options = {"model": "tiny_dropout", "augment": AUGMENT, "deterministic": True, "cpu_devices": devices}
    undisturbed, first = make(**options), make(**options)
    undisturbed.train(0, 24)
    first.train(0, 11)
    second = make(**options)
    second.load(first.state())
    second.train(11, 13)
    assert same_bits(undisturbed.state(), second.state())


def test_a_device_with_much_memory_holds_more_data(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(**options: Any) -> bool:
        engine = make(**options)
        engine.prepare([10])
        engine.close()
        return engine.pipeline.resident("train") is not None

    assert held()
    monkeypatch.setattr(pipeline, "RESIDENT_BYTES", 1)
    monkeypatch.setattr(base, "RESIDENT_BYTES", 1)
    assert not held()
    monkeypatch.setattr(engine_class(), "data_memory", lambda engine: (engine.state(), 1 << 30)[1])  # it has its model
    assert held()
    assert not held(deterministic=True), "what a machine has must not change bits"


def test_data_is_read_from_the_step_at_which_training_begins(make: Make) -> None:
    engine = make(resident="never")
    engine.prepare([10], ["test"], 7)
    assert engine.pipeline._training is not None
    stream = engine.pipeline._training.result()
    assert stream._first == 7
    engine.train(7, 2)
    assert stream._first == 9
    engine.close()


def test_data_that_is_not_resident_gives_the_same_bits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelyard.data import pipeline

    monkeypatch.setattr(pipeline, "STREAM_BYTES", 6 * 64 * 64)  # six batches, so that they come in several pieces
    options = {"augment": AUGMENT, "deterministic": True}
    resident, streamed = make(resident="always", **options), make(resident="never", **options)
    assert resident.pipeline.resident("train") is not None
    assert streamed.pipeline.resident("train") is None
    resident.train(0, 10)
    streamed.train(0, 10)
    if engine_name() == "jax":  # two programs, which XLA may each put in another order
        assert distance(resident.state(), streamed.state()) < 1e-6
    else:
        assert same_bits(resident.state(), streamed.state())


@pytest.mark.parametrize("pieces", [1, 2])
def test_devices_get_their_own_shares_of_batches_that_are_read_ahead(make: Make, pieces: int) -> None:
    options = {"augment": AUGMENT, "precision": "float64", "deterministic": True, "gradient_accumulation": pieces}
    resident, streamed = (make(cpu_devices=2, resident=how, **options) for how in ("always", "never"))
    losses = [engine.train(0, 10)["loss"] for engine in (resident, streamed)]
    np.testing.assert_array_equal(*losses)
    assert same_bits(resident.state(), streamed.state())


def test_accumulated_gradients_are_those_of_the_whole_batch(make: Make) -> None:
    options = {"model": "mlp", "precision": "float64", "optimizer": "sgd", "l2_regularization": 1e-3}
    whole, pieces = make(**options), make(gradient_accumulation=4, **options)
    losses = [engine.train(0, 30)["loss"] for engine in (whole, pieces)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    assert distance(whole.state(), pieces.state()) < 1e-9


RATES = {"sgd": 0.02, "momentum": 0.02, "adagrad": 0.05, "adadelta": 1.0, "ftrl": 0.05}


@pytest.mark.parametrize(
    "optimizer", ["sgd", "adam", "adamw", "rmsprop", "muon", "momentum", "adagrad", "adadelta", "ftrl"]
)
def test_every_optimizer_learns_and_its_state_survives(make: Make, optimizer: str) -> None:
    rate = RATES.get(optimizer, 2e-3)
    engine = make(optimizer=optimizer, learning_rate=rate)
    losses = engine.train(0, 40)["loss"]
    assert losses[-5:].mean() < 0.6 * losses[:3].mean()
    other = make(optimizer=optimizer, learning_rate=rate)
    other.load(engine.state())
    assert same_bits(engine.state(), other.state())
    np.testing.assert_allclose(engine.train(40, 3)["loss"], other.train(40, 3)["loss"], rtol=1e-4)


def test_muon_orthogonalises_convolutions_and_leaves_the_head_to_adam(make: Make) -> None:
    slots = make(optimizer="muon").state().optimizer
    assert "conv/kernel/velocity" not in slots
    assert "conv/kernel/momentum" in slots
    assert "logits/kernel/velocity" in slots


def test_weight_decay_leaves_biases_and_normalisation_alone(make: Make) -> None:
    engine = make(optimizer="sgd", weight_decay=0.5, learning_rate=1e-9, momentum=0.0)
    before = engine.state().weights
    engine.config = engine.config.model_copy()
    engine.train(0, 1)
    after = engine.state().weights
    assert np.abs(after["norm/gamma"] - before["norm/gamma"]).max() < 1e-7
    strong = make(optimizer="sgd", weight_decay=0.5, learning_rate=0.1, momentum=0.0, clip_norm=1e-12)
    before = strong.state().weights
    strong.train(0, 1)
    after = strong.state().weights
    np.testing.assert_allclose(after["conv/kernel"], before["conv/kernel"] * 0.95, rtol=1e-5)
    np.testing.assert_allclose(after["norm/gamma"], before["norm/gamma"], rtol=1e-6)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_learns(make: Make, precision: str) -> None:
    engine = make(precision=precision, cpu_devices=2)
    assert engine.model.get_layer("conv").compute_dtype == precision
    losses = engine.train(0, 40)["loss"]
    assert losses[-5:].mean() < 0.7 * losses[:3].mean()
    state = engine.state()
    assert all(value.dtype == np.float32 for value in state.weights.values())
    assert ("loss_scale/dynamic_scale" in state.optimizer) == (precision == "float16")


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_a_fixed_loss_scale_changes_no_update(make: Make, clip_norm: float | None) -> None:
    options = {"precision": "float16", "optimizer": "sgd", "learning_rate": 0.02, "clip_norm": clip_norm}
    dynamic, fixed = make(**options, loss_scale="dynamic"), make(**options, loss_scale=256)
    start = fixed.state().weights["logits/kernel"]
    losses = [engine.train(0, 6)["loss"] for engine in (dynamic, fixed)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)
    assert "loss_scale/dynamic_scale" in dynamic.state().optimizer
    assert not [name for name in fixed.state().optimizer if "scale" in name]
    moved = [engine.state().weights["logits/kernel"] - start for engine in (dynamic, fixed)]
    assert np.linalg.norm(moved[0] - moved[1]) < 0.05 * np.linalg.norm(moved[0])
    # Gradients of float16 vanish without a scale, and are infinite with one that is too large.
    tiny, huge = make(**options, loss_scale=1e-9), make(**options, loss_scale=1e30)
    before = tiny.state().weights["conv/kernel"]
    tiny.train(0, 1)
    assert np.array_equal(tiny.state().weights["conv/kernel"], before)
    huge.train(0, 1)
    assert not np.isfinite(huge.state().weights["conv/kernel"]).all()


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_float16_resumes_to_the_bit_and_the_dynamic_scale_with_it(make: Make, loss_scale: float | str) -> None:
    options = {"precision": "float16", "loss_scale": loss_scale, "optimizer": "adam", "deterministic": True}
    whole, first, second = (make(**options) for _ in range(3))
    if loss_scale == "dynamic":  # gradients are infinite until it has been halved often enough
        for engine in (whole, first):
            engine.assign({}, {"loss_scale/dynamic_scale": np.float32(2.0**40)})
    whole.train(0, 40)
    first.train(0, 13)
    half = first.state()
    second.load(half)
    second.train(13, 27)
    assert same_bits(whole.state(), second.state())
    if loss_scale == "dynamic":
        scales = [float(state.optimizer["loss_scale/dynamic_scale"]) for state in (half, whole.state())]
        assert 2.0**40 > scales[0] > scales[1], "it changed before and after"


def test_xla_gives_the_same_training(make: Make) -> None:
    plain, compiled = make(model="mlp"), make(model="mlp", xla=True)
    np.testing.assert_allclose(plain.train(0, 5)["loss"], compiled.train(0, 5)["loss"], rtol=1e-4)


def test_names_do_not_depend_on_what_was_built_before(make: Make) -> None:
    first, second = (make(optimizer="adam").state() for _ in range(2))
    assert list(first.weights) == list(second.weights)
    assert list(first.optimizer) == list(second.optimizer)
    assert {"conv/kernel", "norm/moving_mean", "logits/bias"} <= set(first.weights)
    assert {"iteration", "conv/kernel/momentum", "logits/bias/velocity"} <= set(first.optimizer)


def test_a_seed_gives_the_same_weights_and_another_seed_others(make: Make) -> None:
    same = [make(random_seed=5).state().weights["conv/kernel"] for _ in range(2)]
    np.testing.assert_array_equal(*same)
    assert not np.array_equal(same[0], make(random_seed=6).state().weights["conv/kernel"])


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(make: Make) -> None:
    engine = make()
    before = engine.state()
    with pytest.raises(CheckpointError, match=r"missing.*norm/gamma"):
        engine.load(make(model="mlp").state())
    bigger = State({**before.weights, "logits/bias": np.zeros(11, np.float32)}, before.optimizer)
    with pytest.raises(CheckpointError, match=r"of another shape: logits/bias is \(11,\), not \(10,\)"):
        engine.load(bigger)
    assert same_bits(before, engine.state())


def test_a_batch_that_devices_cannot_share_is_refused(make: Make) -> None:
    with pytest.raises(UserError, match=r"train_batch_size: must be divisible by 2 devices, got 33"):
        make(cpu_devices=2, train_batch_size=33)
    from modelyard.engine.base import check_divisible

    engine = make(cpu_devices=2)
    engine.config = engine.config.model_copy(update={"train_batch_size": 33})
    with pytest.raises(UserError, match=r"can't be divided evenly over 2 devices\. Use 32"):
        check_divisible(engine.config, engine.replicas)


def test_gpus_that_are_not_there_are_refused(make: Make) -> None:
    if nvidia_gpus():
        pytest.skip("this machine has a GPU")
    for options, text in (({"num_gpus": 2}, r"num_gpus.* 2 "), ({"gpu_id": 0}, "gpu_id 0 ")):
        with pytest.raises(UserError, match=rf"{text}.*(TensorFlow|JAX).* sees.*modelyard doctor"):
            make(**options)


def test_more_devices_than_the_process_began_with_are_refused(make: Make) -> None:
    with pytest.raises(UserError, match="Start a new process"):
        make(cpu_devices=5, train_batch_size=35)


@pytest.mark.tensorflow_only("JAX compiles every step with XLA")
def test_xla_that_cannot_be_deterministic_says_so(make: Make) -> None:
    engine = make(model="simple_cnn", xla=True, deterministic=True)
    with pytest.raises(TrainingError, match=r"xla and deterministic"):
        engine.train(0, 1)


def test_resuming_at_a_distant_step_computes_no_more_than_two_epochs_of_order(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from modelyard.data import order

    engine = make(model="watcher")
    computed = []
    real = order.permutation
    monkeypatch.setattr(order, "permutation", lambda *a: computed.append(a[2]) or real(*a))
    for step in (10, 10_000_000):
        computed.clear()
        engine.pipeline.order = order.Order(0, engine.dataset.size("train"))
        engine.train(step, 1)
        assert len(computed) <= 2, f"at step {step}: epochs {computed}"
