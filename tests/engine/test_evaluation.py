"""Test-time augmentation: which views there are, and how much each counts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import modelyard
from modelyard.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("two_devices")
IMAGES = np.random.default_rng(0).integers(0, 255, (3, 5, 6, 2), np.uint8)


def by_hand(forward: Any, names: list[str]) -> Any:
    """Written out as in the reference: mirror means, then half of the plain and half of the two shifts."""

    def mirrored(images: Any) -> Any:
        return (forward(images) + forward(images[:, :, ::-1])) / 2 if "flip" in names else forward(images)

    if "shift" not in names:
        return mirrored(IMAGES)
    padded = np.pad(IMAGES, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="reflect")
    return mirrored(IMAGES) / 2 + (mirrored(padded[:, :-2, :-2]) + mirrored(padded[:, 2:, 2:])) / 4


@pytest.mark.parametrize(
    "one_by_one", [False, pytest.param(True, marks=pytest.mark.jax_only("TensorFlow computes all views at once"))]
)
@pytest.mark.parametrize("names", [[], ["flip"], ["shift"], ["flip", "shift"]])
def test_views_count_as_in_the_reference_in_one_pass(names: list[str], one_by_one: bool) -> None:
    from keras import ops

    from modelyard.engine.batch_functions import averaged

    kernel = np.random.default_rng(1).normal(size=(60, 4)).astype(np.float32)
    passes = []

    def plain(images: Any) -> Any:
        return np.tanh(images.reshape(len(images), -1).astype(np.float32) / 255 @ kernel)

    def forward(batch: dict[str, Any]) -> Any:
        passes.append(batch["image"].shape[0])
        flat = ops.cast(ops.reshape(batch["image"], (-1, 60)), "float32") / 255
        out = ops.tanh(flat @ kernel)
        return {"a": out, "b": [out[:, :1] * ops.cast(batch["other"], "float32")[:, None]]}

    other = np.array([1, 2, 3], np.int32)
    batch = {"image": ops.convert_to_tensor(IMAGES), "other": ops.convert_to_tensor(other)}
    got = averaged(forward, batch, names, one_by_one=one_by_one)
    assert len(passes) == 1
    np.testing.assert_allclose(np.asarray(got["a"]), by_hand(plain, names), atol=1e-5)
    np.testing.assert_allclose(np.asarray(got["b"][0]), by_hand(plain, names)[:, :1] * other[:, None], atol=1e-5)


@pytest.mark.parametrize("size", [11, 4, None])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("names", [["flip"], ["flip", "shift"]])
def test_only_images_whose_most_probable_class_is_less_probable_get_views(
    names: list[str], share: float, size: int | None
) -> None:
    from modelyard.engine.batch_functions import averaged, averaged_if_unsure

    random = np.random.default_rng(2)
    kernel = random.normal(size=(60, 4)).astype(np.float32)
    images = random.integers(0, 255, (size or 11, 5, 6, 2), np.uint8)

    class Kind:
        def predictions(self, outputs: Any, batch: Any) -> Any:
            return {"class": ops.argmax(outputs["a"], -1), "probabilities": ops.softmax(outputs["a"])}

    def forward(batch: dict[str, Any]) -> Any:
        out = ops.tanh(ops.cast(ops.reshape(batch["image"], (-1, 60)), "float32") / 255 @ kernel) * 3
        return {"a": out, "b": out[:, :1] * ops.cast(batch["other"], "float32")[:, None]}

    batch = {"image": ops.convert_to_tensor(images), "other": ops.arange(len(images))}
    first, every = forward(batch), averaged(forward, batch, names)
    most = np.asarray(ops.max(ops.softmax(first["a"]), -1))
    below = float(np.quantile(most, share)) if share < 1 else 1.0
    if size is None and keras.backend.backend() == "tensorflow":  # as in a SavedModel
        import tensorflow as tf

        shapes = {"image": tf.TensorSpec((None, 5, 6, 2), tf.uint8), "other": tf.TensorSpec((None,), tf.int32)}
        compiled = tf.function(lambda batch: averaged_if_unsure(forward, batch, names, Kind(), below), [shapes])  # type: ignore[arg-type]
        got = compiled(batch)
    else:
        got = averaged_if_unsure(forward, batch, names, Kind(), below)  # type: ignore[arg-type]
    unsure = (most < below)[:, None]
    assert unsure.sum() == pytest.approx(share * len(images), abs=1)
    for name in ("a", "b"):
        np.testing.assert_allclose(got[name], np.where(unsure, every[name], first[name]), atol=1e-5)


def test_examples_that_are_no_images_are_refused() -> None:
    from modelyard.engine.batch_functions import views_of

    with pytest.raises(DataError, match="needs images"):
        views_of(np.zeros((2, 7)), ["flip"])


def test_an_evaluation_averages_over_views() -> None:
    options = {"model": "mlp", "hidden_units": [16], "dataset": "digits", "train_steps": 60, "learning_rate": 0.01}
    modelyard.train(**options, model_dir="run")
    plain = modelyard.evaluate("run", split="test").metrics
    views = modelyard.evaluate("run", split="test", test_time_augmentation="shift").metrics
    again = modelyard.evaluate("run", split="test", test_time_augmentation="shift", eval_batch_size=7).metrics
    assert views["loss"] != plain["loss"]
    assert plain["accuracy"] > 0.5
    assert views["loss"] == pytest.approx(again["loss"], abs=1e-5)


def test_views_for_unsure_images_only_are_between_none_and_all_and_need_classes(tmp_path: Any) -> None:
    options = {"model": "mlp", "hidden_units": [16], "dataset": "digits", "train_steps": 60, "learning_rate": 0.01}
    modelyard.train(**options, model_dir="run")

    def loss(size: int = 500, **changed: Any) -> float:
        found = modelyard.evaluate("run", split="test", eval_batch_size=size, **changed).metrics["loss"]
        return float(found)

    views = {"test_time_augmentation": "shift"}
    plain, every = loss(), loss(**views)
    some = loss(**views, test_time_augmentation_below=0.6)
    assert len({round(plain, 6), round(some, 6), round(every, 6)}) == 3
    assert some == pytest.approx(loss(size=7, **views, test_time_augmentation_below=0.6), abs=1e-5)
    assert loss(**views, test_time_augmentation_below=1.0) == pytest.approx(every, abs=1e-5)
    labels = np.random.default_rng(0).normal(size=(20, 1)).astype(np.float32)
    np.savez("numbers.npz", x_train=np.zeros((20, 6, 6, 1), np.uint8), y_train=labels)
    with pytest.raises(modelyard.UserError, match="needs a task with one class for each image"):
        modelyard.train_and_evaluate(
            model="mlp", dataset="numbers.npz", train_steps=1, train_batch_size=4, model_dir="other",
            test_time_augmentation="flip", test_time_augmentation_below=0.9,
        )  # fmt: skip


def test_an_unknown_view_is_told() -> None:
    with pytest.raises(ConfigError, match="test_time_augmentation"):
        modelyard.load_config(test_time_augmentation="flop")
    with pytest.raises(ConfigError, match="test_time_augmentation_below: needs test_time_augmentation"):
        modelyard.load_config(test_time_augmentation_below=0.5)


def test_a_task_that_keeps_nothing_of_examples_is_evaluated() -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 6, 6, 1), np.uint8)

    @modelyard.register_dataset("unlabelled")
    def unlabelled(options: Any, config: Any) -> modelyard.ArrayDataset:
        return modelyard.ArrayDataset({"train": {"image": images}, "validation": {"image": images[:20]}})

    @modelyard.register_model("autoencoder")
    class Autoencoder(modelyard.Task):
        def network(self) -> keras.Model:
            image = keras.Input((6, 6, 1), name="image")
            return keras.Model(image, keras.layers.Dense(1, kernel_initializer="zeros")(image))

        def loss(self, outputs: Any, batch: Any) -> Any:
            return ops.mean(ops.square(outputs - ops.cast(batch["image"], "float32") / 255), axis=(1, 2, 3))

        def example_values(self, statistics: Any) -> dict[str, Any]:
            return {}

    options = {"train_steps": 1, "train_batch_size": 10, "eval_batch_size": 8, "learning_rate": 1e-30}
    result = modelyard.train_and_evaluate(model="autoencoder", dataset="unlabelled", model_dir="run", **options)
    assert result.metrics["loss"] == pytest.approx(np.mean((images[:20] / 255.0) ** 2), rel=1e-5)
