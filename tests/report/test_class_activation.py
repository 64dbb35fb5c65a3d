"""Class-activation maps: those of a computation with the network in two parts."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from conftest import compiled, engine_name
from modelyard.config.backend import select_engine

pytestmark = pytest.mark.usefixtures("two_devices")


def gradient(head: keras.Model, activations: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The gradient of the logit of each example's class by the activations, straight from the framework."""
    if engine_name() == "jax":
        import jax

        return np.asarray(jax.jit(jax.grad(lambda x: head(x)[np.arange(len(classes)), classes].sum()))(activations))
    import tensorflow as tf

    x = tf.constant(activations)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(tf.gather(head(x), classes, batch_dims=1))
    return tape.gradient(value, x).numpy()


def test_maps_are_those_of_a_network_in_two_parts() -> None:
    select_engine(engine_name())
    from modelyard.engine.class_activation import class_activation_maps

    keras.utils.set_random_seed(3)
    image = keras.Input((12, 10, 3), dtype="uint8", name="image")
    x = keras.layers.Rescaling(1 / 255)(image)
    x = keras.layers.Conv2D(6, 3, activation="relu")(x)
    inner_input = keras.Input((10, 8, 6))
    y = keras.layers.Conv2D(5, 3, strides=2, padding="same", activation="relu", name="last")(inner_input)
    inner = keras.Model(inner_input, keras.layers.Add()([y, y]), name="inner")  # layers inside of a layer
    places = inner(x)
    pooled = keras.layers.GlobalAveragePooling2D(keepdims=True)(places)  # 4-D, with one place
    hidden = keras.layers.Dense(7, activation="tanh")(keras.layers.Flatten()(pooled))
    beside = keras.layers.Flatten()(places)
    logits = keras.layers.Dense(4)(keras.layers.Concatenate()([hidden, beside]))
    model = keras.Model(image, logits)
    body = keras.Model(image, places)
    head_input = keras.Input(places.shape[1:])
    dense = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
    joined = keras.layers.Concatenate()(
        [dense[0](keras.layers.GlobalAveragePooling2D()(head_input)), keras.layers.Flatten()(head_input)]
    )
    head = keras.Model(head_input, dense[1](joined))

    images = np.random.default_rng(0).integers(0, 256, (3, 12, 10, 3)).astype(np.uint8)
    classes = np.array([2, 0, 3])
    activations = np.asarray(compiled(body)(images))
    weights = gradient(head, activations, classes).mean(axis=(1, 2), keepdims=True)
    expected = np.maximum((weights * activations).sum(axis=-1), 0)
    largest = expected.max(axis=(1, 2), keepdims=True)
    expected = expected / np.where(largest > 0, largest, 1)

    found = class_activation_maps(model, {"image": images}, classes)
    assert found is not None
    assert found[1].shape == (3, 5, 4)
    np.testing.assert_allclose(found[1], expected, atol=1e-5)
    assert expected.max() == 1

    flat = keras.Sequential([keras.Input((12,), name="image"), keras.layers.Dense(4)])
    assert class_activation_maps(flat, {"image": np.zeros((2, 12), np.float32)}, classes[:2]) is None
