"""Residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015): those for CIFAR of section 4.2,
ResNet-18 and ResNet-34; and wide ones (Zagoruyko and Komodakis, "Wide Residual Networks", 2016).

Those for CIFAR have 6n+2 layers: a convolution, three stages of n blocks with 16, 32 and 64 filters, global pooling,
one dense layer. Their shortcuts have no parameters (option A): where a stage begins, they take every second pixel and
pad the channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
from keras import layers, ops

from modelyard.errors import UserError
from modelyard.models.catalog import BasicResNetOptions, ResNetOptions, WideResNetOptions
from modelyard.models.task import DataInfo, image_input

_LARGE = 96


@keras.saving.register_keras_serializable(package="modelyard")
class PadShortcut(layers.Layer):
    """A shortcut without parameters: every second pixel, and zeros for the new channels."""

    def __init__(self, filters: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filters = filters

    def call(self, inputs: Any) -> Any:
        """Returns half the height and width, and ``filters`` channels."""
        missing = self.filters - inputs.shape[-1]
        before = missing // 2
        return ops.pad(inputs[:, ::2, ::2, :], [[0, 0], [0, 0], [0, 0], [before, missing - before]])

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape, rounded up."""
        batch, height, width, _ = input_shape
        return batch, -(-height // 2), -(-width // 2), self.filters

    def get_config(self) -> dict[str, Any]:
        """Returns the config for Keras's format."""
        return {**super().get_config(), "filters": self.filters}


def cifar_resnet(depth: int, data: DataInfo, options: ResNetOptions) -> keras.Model:
    """Returns the network with ``depth`` = 6n+2 layers."""

    def shortcut(x: Any, filters: int, name: str) -> Any:
        return PadShortcut(filters, name=f"{name}_shortcut")(x)

    return _residual(f"resnet{depth}", data, options, [(depth - 2) // 6] * 3, shortcut)


def basic_resnet(name: str, blocks: Sequence[int], data: DataInfo, options: BasicResNetOptions) -> keras.Model:
    """Returns four stages of blocks of two convolutions; large images are downsampled first."""

    def shortcut(x: Any, filters: int, name: str) -> Any:
        x = _conv(filters, 2, f"{name}_shortcut_conv", size=1)(x)
        return _norm(options, f"{name}_shortcut_norm")(x)

    large = options.stem == "large" or (options.stem == "auto" and min(data.image_shape[:2]) >= _LARGE)
    return _residual(name, data, options, blocks, shortcut, large)


def _residual(
    name: str,
    data: DataInfo,
    options: ResNetOptions,
    shape: Sequence[int],
    shortcut: Callable[[Any, int, str], Any],
    large: bool = False,
) -> keras.Model:
    """Returns stages of blocks of two convolutions.

    Args:
        name: the name of the network.
        data: shapes and statistics of the data.
        options: the variants.
        shape: the number of blocks of each stage.
        shortcut: the shortcut of a block that halves height and width.
        large: whether images are downsampled four times first.
    """
    inputs, x = image_input(data, smallest=2 ** (len(shape) - 1) * (4 if large else 1))
    x = _conv(options.width, 2, "stem_conv", size=7)(x) if large else _conv(options.width, 1, "stem_conv")(x)
    x = layers.ReLU(name="stem_relu")(_norm(options, "stem_norm")(x))
    if large:
        x = layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    for stage, blocks in enumerate(shape):
        filters = options.width * 2**stage
        for number in range(blocks):
            strides = 2 if stage > 0 and number == 0 else 1
            block = f"stage{stage + 1}_block{number + 1}"
            around = x if strides == 1 else shortcut(x, filters, block)
            x = _conv(filters, strides, f"{block}_conv1")(x)
            x = layers.ReLU(name=f"{block}_relu1")(_norm(options, f"{block}_norm1")(x))
            x = _norm(options, f"{block}_norm2")(_conv(filters, 1, f"{block}_conv2")(x))
            x = layers.ReLU(name=f"{block}_relu2")(layers.Add(name=f"{block}_add")([x, around]))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    if options.dropout_rate:
        x = layers.Dropout(options.dropout_rate, name="dropout")(x)
    logits = layers.Dense(data.num_classes, kernel_initializer="he_normal", name="logits")(x)
    return keras.Model(inputs, logits, name=name)


def wide_resnet(data: DataInfo, options: WideResNetOptions) -> keras.Model:
    """Returns three stages of blocks that normalise first."""
    if (options.depth - 4) % 6:
        near = 6 * round((options.depth - 4) / 6) + 4
        raise UserError(f"a wide ResNet has 6 n + 4 layers, and depth is {options.depth}. Use {near}.")
    inputs, x = image_input(data, smallest=4)
    x = _conv(16, 1, "stem_conv")(x)
    for stage in range(3):
        filters = 16 * options.widen * 2**stage
        for number in range((options.depth - 4) // 6):
            block = f"stage{stage + 1}_block{number + 1}"
            strides = 2 if stage > 0 and number == 0 else 1
            ready = layers.ReLU(name=f"{block}_relu1")(_norm(options, f"{block}_norm1")(x))
            # Where the shape changes, the shortcut begins after the first normalisation.
            around = x if number else _conv(filters, strides, f"{block}_shortcut_conv", size=1)(ready)
            x = _conv(filters, strides, f"{block}_conv1")(ready)
            x = layers.ReLU(name=f"{block}_relu2")(_norm(options, f"{block}_norm2")(x))
            if options.dropout_rate:
                x = layers.Dropout(options.dropout_rate, name=f"{block}_dropout")(x)
            x = layers.Add(name=f"{block}_add")([_conv(filters, 1, f"{block}_conv2")(x), around])
    x = layers.ReLU(name="last_relu")(_norm(options, "last_norm")(x))
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    logits = layers.Dense(data.num_classes, kernel_initializer="he_normal", name="logits")(x)
    return keras.Model(inputs, logits, name="wide_resnet")


def _conv(filters: int, strides: int, name: str, size: int = 3) -> layers.Layer:
    return layers.Conv2D(
        filters, size, strides=strides, padding="same", use_bias=False, kernel_initializer="he_normal", name=name
    )


def _norm(options: ResNetOptions | WideResNetOptions, name: str) -> layers.Layer:
    return layers.BatchNormalization(momentum=options.batch_norm_momentum, epsilon=1e-5, name=name)


resnet18 = partial(basic_resnet, "resnet18", (2, 2, 2, 2))
resnet34 = partial(basic_resnet, "resnet34", (3, 4, 6, 3))
resnet20 = partial(cifar_resnet, 20)
resnet32 = partial(cifar_resnet, 32)
resnet44 = partial(cifar_resnet, 44)
resnet56 = partial(cifar_resnet, 56)
resnet110 = partial(cifar_resnet, 110)
