"""What a model computes for one example, counted from shapes."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _engine(two_devices: None) -> None:
    """Keras on the engine that is tested."""


def count(shape: tuple[int, ...], *layers: Any) -> int:
    import keras

    from modelyard.models.flops import flops

    return flops(keras.Sequential([keras.Input(shape), *layers]))


def test_a_product_counts_a_multiplication_and_an_addition_for_each_weight() -> None:
    from keras import layers

    assert count((8,), layers.Dense(4)) == 2 * 8 * 4
    assert count((5, 8), layers.Dense(4)) == 5 * 2 * 8 * 4
    assert count((5, 8), layers.EinsumDense("abc,cde->abde", output_shape=(None, 2, 3))) == 5 * 2 * 8 * 6
    assert count((5, 8), layers.EinsumDense("...x,xy->...y", output_shape=3)) == 5 * 2 * 8 * 3


def test_convolutions_count_by_their_output_strides_groups_and_dilation() -> None:
    from keras import layers

    image = (8, 8, 4)
    assert count(image, layers.Conv2D(6, 3, padding="same")) == 2 * 64 * 9 * 4 * 6
    assert count(image, layers.Conv2D(6, 3, strides=2, padding="same")) == 2 * 16 * 9 * 4 * 6
    assert count(image, layers.Conv2D(6, 3, groups=2)) == 2 * 36 * 9 * 2 * 6
    assert count(image, layers.Conv2D(6, 3, dilation_rate=2)) == 2 * 16 * 9 * 4 * 6
    assert count(image, layers.DepthwiseConv2D(3, depth_multiplier=2)) == 2 * 36 * 9 * 4 * 2
    assert count(image, layers.SeparableConv2D(6, 3)) == 2 * 36 * (9 * 4 + 4 * 6)
    assert count(image, layers.Conv2DTranspose(6, 3, strides=2)) == 2 * 64 * 9 * 6 * 4
    assert count((10, 3), layers.Conv1D(5, 3)) == 2 * 8 * 3 * 3 * 5


def test_attention_counts_projections_and_both_products() -> None:
    import keras

    from modelyard.models.flops import flops

    x = keras.Input((7, 12))
    model = keras.Model(x, keras.layers.MultiHeadAttention(num_heads=2, key_dim=3)(x, x))
    assert flops(model) == 2 * (4 * 7 * 12 * 6 + 2 * 7 * 7 * 6)


def test_shared_layers_count_for_each_call_and_nested_models_for_what_is_in_them() -> None:
    import keras

    from modelyard.models.flops import flops

    x = keras.Input((8,))
    shared = keras.layers.Dense(8)
    inner = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    model = keras.Model(x, inner(shared(shared(x))))
    assert flops(model) == 2 * 2 * 64 + 2 * 24
    squared = keras.Model(x, keras.ops.matmul(keras.ops.reshape(x, (-1, 2, 4)), keras.ops.reshape(x, (-1, 4, 2))))
    assert flops(squared) == 2 * 2 * 2 * 4


def test_layers_without_a_graph_are_followed_and_may_speak_for_themselves() -> None:
    import keras

    class Block(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.head = keras.layers.Dense(8), keras.layers.MultiHeadAttention(2, 3)

        def call(self, x: Any) -> Any:
            return self.one(self.one(self.head(x, x)))

    class Own(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x

        def flops(self, input_shape: tuple[int, ...]) -> int:
            assert input_shape == (1, 5, 8)
            return 77

    attention = 2 * (4 * 5 * 8 * 6 + 2 * 5 * 5 * 6)
    assert count((5, 8), Block()) == attention + 2 * (5 * 2 * 64)
    assert count((5, 8), Own(), Block()) == 77 + attention + 2 * (5 * 2 * 64)


def test_a_shape_that_is_not_known_is_said() -> None:
    from keras import layers

    with pytest.raises(ValueError, match="not known"):
        count((None, None, 3), layers.Conv2D(6, 3))


def test_the_built_in_models_count_as_by_hand() -> None:
    import numpy as np

    import modelyard
    from modelyard.data.dataset import ArrayDataset
    from modelyard.models.choose_task import build_task
    from modelyard.models.flops import flops

    images = np.random.default_rng(0).integers(0, 255, (40, 32, 32, 3), np.uint8)
    data = ArrayDataset({"train": {"image": images, "label": np.arange(40) % 10}})

    def of(**options: Any) -> int:
        return flops(build_task(modelyard.load_config(dataset="digits", **options), data).network())

    assert of(model="resnet20") == pytest.approx(2 * 40.8e6, rel=0.02)  # the paper's network: 41 million products
    assert of(model="mlp", hidden_units=[16]) == 2 * (3072 * 16 + 160)
    whiten = 31 * 31 * 12 * 12
    groups = 9 * 8 * (30 * 30 * 24 + 15 * 15 * 8 + 14 * 14 * 8 + 7 * 7 * 8 + 6 * 6 * 8 + 3 * 3 * 8)
    assert of(model="whitened_cnn", widths=[8, 8, 8], depth=2) == 2 * (whiten + groups + 8 * 10)


@pytest.mark.slow
def test_known_networks_have_the_known_numbers() -> None:
    import keras

    from modelyard.models.flops import flops

    assert flops(keras.applications.ResNet50(weights=None)) == pytest.approx(7.7e9, rel=0.02)
    assert flops(keras.applications.MobileNetV2(weights=None)) == pytest.approx(0.6e9, rel=0.02)
    assert flops(keras.applications.VGG16(weights=None)) == pytest.approx(30.9e9, rel=0.02)
