"""Small networks: the simple CNN, the CNN of the MNIST guide, the multi-layer perceptron."""

from __future__ import annotations

import keras
from keras import layers

from modelyard.models.catalog import MlpOptions, MnistCnnOptions, SimpleCnnOptions
from modelyard.models.task import DataInfo, any_input, image_input


def simple_cnn(data: DataInfo, options: SimpleCnnOptions) -> keras.Model:
    """Returns convolutions of 3×3, each followed by pooling, and one dense layer."""
    inputs, x = image_input(data, smallest=2 ** len(options.filters))
    for number, filters in enumerate(options.filters, 1):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu", name=f"conv{number}")(x)
        x = layers.MaxPooling2D(2, name=f"pool{number}")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(options.dense_units, activation="relu", name="dense")(x)
    if options.dropout_rate:
        x = layers.Dropout(options.dropout_rate, name="dropout")(x)
    return keras.Model(inputs, layers.Dense(data.num_classes, name="logits")(x), name="simple_cnn")


def mnist_cnn(data: DataInfo, options: MnistCnnOptions) -> keras.Model:
    """Returns two convolutions of 5×5 with 32 and 64 filters, and 1,024 dense units."""
    inputs, x = image_input(data, smallest=4)
    for number, filters in enumerate((32, 64), 1):
        x = layers.Conv2D(filters, 5, padding="same", activation="relu", name=f"conv{number}")(x)
        x = layers.MaxPooling2D(2, name=f"pool{number}")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(1024, activation="relu", name="dense")(x)
    if options.dropout_rate:
        x = layers.Dropout(options.dropout_rate, name="dropout")(x)
    return keras.Model(inputs, layers.Dense(data.num_classes, name="logits")(x), name="mnist_cnn")


def mlp(data: DataInfo, options: MlpOptions) -> keras.Model:
    """Returns dense layers on the flattened example."""
    inputs, x = any_input(data)
    x = layers.Flatten(name="flatten")(x)
    for number, units in enumerate(options.hidden_units, 1):
        x = layers.Dense(units, activation="relu", name=f"dense{number}")(x)
        if options.dropout_rate:
            x = layers.Dropout(options.dropout_rate, name=f"dropout{number}")(x)
    return keras.Model(inputs, layers.Dense(data.num_classes, name="logits")(x), name="mlp")
