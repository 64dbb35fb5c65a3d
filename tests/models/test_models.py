"""The built-in models: shapes, sizes, names, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import modelyard
from modelyard.data.open_dataset import load_dataset
from modelyard.errors import DataError

pytestmark = pytest.mark.usefixtures("two_devices")


def network(**options: Any) -> Any:
    import keras

    from modelyard.models.choose_task import build_task

    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session(free_memory=False)
    config = modelyard.load_config(**options)
    return build_task(config, load_dataset(config)).network()


# He et al. 2015, table 6: 0.27, 0.46, 0.66, 0.85 and 1.7 million parameters.
@pytest.mark.parametrize(
    ("name", "millions"), [("resnet20", 0.27), ("resnet32", 0.46), ("resnet44", 0.66), ("resnet56", 0.85)]
)
def test_resnets_have_the_size_of_the_paper(name: str, millions: float) -> None:
    model = network(model=name, dataset="synthetic", synthetic_examples=50)
    learned = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert round(learned / 1e6, 2) == millions


@pytest.mark.slow
def test_resnet110_has_the_size_of_the_paper() -> None:
    model = network(model="resnet110", dataset="synthetic", synthetic_examples=50)
    assert round(sum(int(np.prod(v.shape)) for v in model.trainable_variables) / 1e6, 1) == 1.7


@pytest.mark.parametrize("name", ["simple_cnn", "mnist_cnn", "mlp", "resnet20"])
@pytest.mark.parametrize("shape", ["8,8,1", "33,20,3"])
def test_models_take_images_of_any_size_and_name_every_layer(name: str, shape: str) -> None:
    model = network(model=name, dataset="synthetic", synthetic_examples=50, synthetic_shape=shape, synthetic_classes=7)
    height, width, channels = map(int, shape.split(","))
    assert model(np.zeros((2, height, width, channels), np.uint8)).shape == (2, 7)
    import re

    automatic = [
        layer.name for layer in model.layers if re.fullmatch(r"(conv2d|dense|flatten|add|re_lu)(_\d+)?", layer.name)
    ]
    ours = {"simple_cnn": ["flatten", "dense"], "mnist_cnn": ["flatten", "dense"], "mlp": ["flatten"], "resnet20": []}
    assert automatic == ours[name]


def test_a_model_for_images_refuses_other_data() -> None:
    with pytest.raises(DataError, match=r"images of at least 4×4.*have shape 2×2×1"):
        network(model="simple_cnn", dataset="synthetic", synthetic_examples=50, synthetic_shape="2,2,1")
    with pytest.raises(DataError, match=r"have shape 12.*mlp takes any shape"):
        network(model="resnet20", dataset="synthetic", synthetic_examples=50, synthetic_shape="12")
    assert network(model="mlp", dataset="synthetic", synthetic_examples=50, synthetic_shape="12") is not None


def test_label_smoothing_is_the_usual_cross_entropy_with_soft_targets() -> None:
    from modelyard.models.choose_task import build_task

    config = modelyard.load_config(model="mlp", dataset="digits", label_smoothing=0.2)
    task = build_task(config, load_dataset(config))
    logits = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32)
    labels = np.array([1, 2, 3, 9], np.int32)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    targets = np.full((4, 10), 0.02) + 0.8 * np.eye(10)[labels]
    got = np.asarray(task.loss(logits, {"label": labels}))
    np.testing.assert_allclose(got, -(targets * log_probabilities).sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_mixed_labels_count_by_their_shares(smoothing: float) -> None:
    from modelyard.models.choose_task import build_task

    config = modelyard.load_config(model="mlp", dataset="digits", label_smoothing=smoothing)
    task = build_task(config, load_dataset(config))
    logits = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32)
    one, other = np.eye(10)[[1, 2, 3, 9]], np.eye(10)[[4, 2, 0, 8]]
    shares = (0.7 * one + 0.3 * other).astype(np.float32)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    targets = smoothing / 10 + (1 - smoothing) * shares
    got = np.asarray(task.loss(logits, {"label": shares}))
    np.testing.assert_allclose(got, -(targets * log_probabilities).sum(axis=1), rtol=1e-5)
    # Shares of one class each are the class itself.
    classes = np.array([1, 2, 3, 9], np.int32)
    whole = np.asarray(task.loss(logits, {"label": one.astype(np.float32)}))
    np.testing.assert_allclose(whole, np.asarray(task.loss(logits, {"label": classes})), rtol=1e-5)
    logits[0, 1] = logits[1, 4] = 9
    assert np.asarray(task.metrics(logits, {"label": shares})["accuracy"])[:2].tolist() == [1, 0]


def test_images_are_standardised_by_the_training_split() -> None:
    import keras

    model = network(model="mlp", dataset="digits")
    standardized = keras.Model(model.inputs, model.get_layer("standardize").output)
    config = modelyard.load_config(model="mlp", dataset="digits")
    images = load_dataset(config).read("train", np.arange(1000))["image"]
    values = np.asarray(standardized(images))
    assert abs(values.mean()) < 0.05
    assert abs(values.std() - 1) < 0.05


def test_columns_of_vectors_are_standardised_each_by_itself() -> None:
    from modelyard.models.data_info import describe_data

    random = np.random.default_rng(0)
    table = np.stack([random.normal(700, 90, 500), random.normal(0.01, 1e-4, 500), np.full(500, 0.1)], axis=1)
    data = describe_data(modelyard.ArrayDataset({"train": {"image": table}}))
    seen = table.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(data.mean, seen.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(data.spread, [*seen.std(axis=0)[:2], 1], rtol=1e-6)  # the last is all the same


def test_a_model_of_one_input_names_the_inputs_that_it_does_not_take(caplog: pytest.LogCaptureFixture) -> None:
    vectors, labels = np.zeros((20, 3), np.float32), np.arange(20) % 2
    network(model="mlp", dataset=({"image": vectors, "age": vectors}, labels))
    assert "the model mlp takes one input, 'image'. It does not use age." in caplog.text
    with pytest.raises(DataError, match="takes one input, named 'image'; an example has a, b"):
        network(model="mlp", dataset=({"a": vectors, "b": vectors}, labels))
