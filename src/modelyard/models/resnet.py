"""Residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015): those for CIFAR of section 4.2,
ResNet-18 for small images, and ResNet-50.

Those for CIFAR have 6n+2 layers: a convolution, three stages of n blocks with 16, 32 and 64 filters, global pooling,
one dense layer. Their shortcuts carry no parameters (option A): where a stage begins, they take every second pixel and
pad the channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
from keras import layers, ops

from modelyard.models.catalog import ClassifierOptions, ResNetOptions, WideResNetOptions
from modelyard.models.task import DataInfo, image_input


@keras.saving.register_keras_serializable(package="modelyard")
class PadShortcut(layers.Layer):
    """Every second pixel, and zeros for the new channels."""

    def __init__(self, filters: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filters = filters

    def call(self, inputs: Any) -> Any:
        """Half the height and width, ``filters`` channels."""
        missing = self.filters - inputs.shape[-1]
        before = missing // 2
        return ops.pad(inputs[:, ::2, ::2, :], [[0, 0], [0, 0], [0, 0], [before, missing - before]])

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Height and width rounded up."""
        batch, height, width, _ = input_shape
        return batch, -(-height // 2), -(-width // 2), self.filters

    def get_config(self) -> dict[str, Any]:
        """For saving in Keras's format."""
        return {**super().get_config(), "filters": self.filters}


def cifar_resnet(depth: int, data: DataInfo, options: ResNetOptions) -> keras.Model:
    """The network with ``depth`` = 6n+2 layers."""

    def shortcut(x: Any, filters: int, name: str) -> Any:
        return PadShortcut(filters, name=f"{name}_shortcut")(x)

    return _residual(f"resnet{depth}", data, options, (3, (depth - 2) // 6), shortcut)


def resnet18(data: DataInfo, options: WideResNetOptions) -> keras.Model:
    """Four stages of two blocks, for images that the first layers of the one for ImageNet would make too small."""

    def shortcut(x: Any, filters: int, name: str) -> Any:
        x = _conv(filters, 2, f"{name}_shortcut_conv", size=1)(x)
        return _norm(options, f"{name}_shortcut_norm")(x)

    return _residual("resnet18", data, options, (4, 2), shortcut)


def _residual(
    name: str, data: DataInfo, options: ResNetOptions, shape: tuple[int, int], shortcut: Callable[[Any, int, str], Any]
) -> keras.Model:
    """Stages of blocks of two convolutions; ``shortcut`` is the way around a block that halves height and width."""
    stages, blocks = shape
    inputs, x = image_input(data, smallest=2 ** (stages - 1))
    x = _conv(options.width, 1, "stem_conv")(x)
    x = layers.ReLU(name="stem_relu")(_norm(options, "stem_norm")(x))
    for stage in range(stages):
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


def resnet50(data: DataInfo, options: ClassifierOptions) -> keras.Model:
    """ResNet-50 as Keras builds it, on standardised images."""
    inputs, x = image_input(data, smallest=32)
    body = keras.applications.ResNet50(weights=None, include_top=False, input_tensor=x, pooling="avg")
    return keras.Model(inputs, layers.Dense(data.num_classes, name="logits")(body.output), name="resnet50")


def _conv(filters: int, strides: int, name: str, size: int = 3) -> layers.Layer:
    return layers.Conv2D(
        filters, size, strides=strides, padding="same", use_bias=False, kernel_initializer="he_normal", name=name
    )


def _norm(options: ResNetOptions, name: str) -> layers.Layer:
    return layers.BatchNormalization(momentum=options.batch_norm_momentum, epsilon=1e-5, name=name)


resnet20 = partial(cifar_resnet, 20)
resnet32 = partial(cifar_resnet, 32)
resnet44 = partial(cifar_resnet, 44)
resnet56 = partial(cifar_resnet, 56)
resnet110 = partial(cifar_resnet, 110)
