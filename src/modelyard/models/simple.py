"""Small networks: the simple CNN, the CNN of the MNIST guide, the multi-layer perceptron."""

from __future__ import annotations

import keras
from keras import layers

from modelyard.models.catalog import MlpOptions, MnistCnnOptions, SimpleCnnOptions
from modelyard.models.task import DataInfo, any_input, image_input


def simple_cnn(data: DataInfo, options: SimpleCnnOptions) -> keras.Model:
    """Returns convolutions of 3×3, each followed by pooling, and one dense layer."""
    return _cnn("simple_cnn", data, options.filters, 3, options.dense_units, options.dropout_rate)


def mnist_cnn(data: DataInfo, options: MnistCnnOptions) -> keras.Model:
    """Returns two convolutions of 5×5 with 32 and 64 filters, and 1,024 dense units."""
    return _cnn("mnist_cnn", data, (32, 64), 5, 1024, options.dropout_rate)


def _cnn(
    name: str, data: DataInfo, filters: tuple[int, ...], kernel: int, units: int, dropout_rate: float
) -> keras.Model:
    inputs, x = image_input(data, smallest=2 ** len(filters))
    for number, count in enumerate(filters, 1):
        x = layers.Conv2D(count, kernel, padding="same", activation="relu", name=f"conv{number}")(x)
        x = layers.MaxPooling2D(2, name=f"pool{number}")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(units, activation="relu", name="dense")(x)
    if dropout_rate:
        x = layers.Dropout(dropout_rate, name="dropout")(x)
    return keras.Model(inputs, layers.Dense(data.num_classes, name="logits")(x), name=name)


def mlp(data: DataInfo, options: MlpOptions) -> keras.Model:
    """Returns dense layers on the flattened example."""
    inputs, x = any_input(data)
    x = layers.Flatten(name="flatten")(x)
    for number, units in enumerate(options.hidden_units, 1):
        x = layers.Dense(units, activation="relu", name=f"dense{number}")(x)
        if options.dropout_rate:
            x = layers.Dropout(options.dropout_rate, name=f"dropout{number}")(x)
    return keras.Model(inputs, layers.Dense(data.num_classes, name="logits")(x), name="mlp")
