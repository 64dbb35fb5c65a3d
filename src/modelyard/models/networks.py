"""Built-in networks: small CNNs, a multi-layer perceptron, residual networks, a vision transformer.

The CIFAR ResNets have 6n+2 layers (He et al., "Deep Residual Learning for Image Recognition", 2015, section 4.2): a
convolution, three stages of n blocks with 16, 32 and 64 filters, global pooling, one dense layer. Their shortcuts have
no parameters (option A): at the start of a stage they take every second pixel and pad the channels. The wide ones are
those of Zagoruyko and Komodakis, "Wide Residual Networks", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
from keras import layers, ops

from modelyard.errors import UserError
from modelyard.models.catalog import (
    BasicResNetOptions,
    MlpOptions,
    MnistCnnOptions,
    ResNetOptions,
    SimpleCnnOptions,
    VitOptions,
    WideResNetOptions,
)
from modelyard.models.data_info import DataInfo
from modelyard.models.task import any_input, image_input

_LARGE_IMAGE = 96
_MAX_PATCH = 16
_MIN_PATCHES = 8


# -- small networks ----------------------------------------------------------------------------------------------------


def simple_cnn(data: DataInfo, options: SimpleCnnOptions) -> keras.Model:
    """3×3 convolutions, each followed by pooling, and one dense layer."""
    return _cnn("simple_cnn", data, options.filters, 3, options.dense_units, options.dropout_rate)


def mnist_cnn(data: DataInfo, options: MnistCnnOptions) -> keras.Model:
    """Two 5×5 convolutions with 32 and 64 filters, and 1,024 dense units."""
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
    """Dense layers on the flattened example."""
    inputs, x = any_input(data)
    x = layers.Flatten(name="flatten")(x)
    for number, units in enumerate(options.hidden_units, 1):
        x = layers.Dense(units, activation="relu", name=f"dense{number}")(x)
        if options.dropout_rate:
            x = layers.Dropout(options.dropout_rate, name=f"dropout{number}")(x)
    return keras.Model(inputs, layers.Dense(data.num_classes, name="logits")(x), name="mlp")


# -- residual networks -------------------------------------------------------------------------------------------------


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
    """A ResNet for CIFAR with ``depth`` = 6n+2 layers."""

    def shortcut(x: Any, filters: int, name: str) -> Any:
        return PadShortcut(filters, name=f"{name}_shortcut")(x)

    return _residual(f"resnet{depth}", data, options, [(depth - 2) // 6] * 3, shortcut)


def basic_resnet(name: str, blocks: Sequence[int], data: DataInfo, options: BasicResNetOptions) -> keras.Model:
    """ResNet-18 or ResNet-34: four stages of blocks of two convolutions. Large images are downsampled first."""

    def shortcut(x: Any, filters: int, name: str) -> Any:
        x = _conv(filters, 2, f"{name}_shortcut_conv", size=1)(x)
        return _norm(options, f"{name}_shortcut_norm")(x)

    large = options.stem == "large" or (options.stem == "auto" and min(data.image_shape[:2]) >= _LARGE_IMAGE)
    return _residual(name, data, options, blocks, shortcut, large)


def _residual(
    name: str,
    data: DataInfo,
    options: ResNetOptions,
    stages: Sequence[int],
    shortcut: Callable[[Any, int, str], Any],
    large: bool = False,
) -> keras.Model:
    """Returns stages of blocks of two convolutions, ``stages`` being the number of blocks of each stage.

    ``shortcut`` makes the shortcut of a block that halves height and width. ``large`` divides both by four first.
    """
    inputs, x = image_input(data, smallest=2 ** (len(stages) - 1) * (4 if large else 1))
    x = _conv(options.width, 2, "stem_conv", size=7)(x) if large else _conv(options.width, 1, "stem_conv")(x)
    x = layers.ReLU(name="stem_relu")(_norm(options, "stem_norm")(x))
    if large:
        x = layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    for stage, blocks in enumerate(stages):
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
    """Three stages of blocks that normalize first."""
    if (options.depth - 4) % 6:
        near = 6 * round((options.depth - 4) / 6) + 4
        raise UserError(f"--depth of a wide ResNet must be 6 n + 4, got {options.depth}. Use {near}.")
    inputs, x = image_input(data, smallest=4)
    x = _conv(16, 1, "stem_conv")(x)
    for stage in range(3):
        filters = 16 * options.widen * 2**stage
        for number in range((options.depth - 4) // 6):
            block = f"stage{stage + 1}_block{number + 1}"
            strides = 2 if stage > 0 and number == 0 else 1
            ready = layers.ReLU(name=f"{block}_relu1")(_norm(options, f"{block}_norm1")(x))
            # If the shape changes, the shortcut begins after the first normalization.
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


# -- vision transformer ------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="modelyard")
class Positions(layers.Layer):
    """Adds a learned position embedding to each token."""

    def build(self, input_shape: Any) -> None:
        """Makes one vector per token."""
        self.table = self.add_weight(
            name="table", shape=input_shape[1:], initializer=keras.initializers.TruncatedNormal(stddev=0.02)
        )

    def call(self, inputs: Any) -> Any:
        """Returns tokens of the same shape."""
        return inputs + ops.cast(self.table, inputs.dtype)


def vit(data: DataInfo, options: VitOptions) -> keras.Model:
    """Patches as tokens, learned positions, blocks that normalize first, mean pooling."""
    inputs, x = image_input(data, smallest=1)
    height, width = data.image_shape[:2]
    patch = options.patch_size or _largest_patch(height, width)
    if height % patch or width % patch:
        raise UserError(
            f"--patch_size {patch} does not divide both sides of images of {height}×{width}. Use a divisor of both."
        )
    if options.embedding % options.heads:
        raise UserError(f"--embedding {options.embedding} must be a multiple of --heads {options.heads}.")
    x = layers.Conv2D(options.embedding, patch, strides=patch, name="patches")(x)
    x = layers.Reshape((-1, options.embedding), name="tokens")(x)
    x = Positions(name="positions")(x)
    for number in range(1, options.blocks + 1):
        x = _transformer_block(x, options, f"block{number}")
    x = layers.LayerNormalization(epsilon=1e-6, name="last_norm")(x)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(data.num_classes, name="logits")(x), name="vit")


def _largest_patch(height: int, width: int) -> int:
    """Returns the largest patch that divides both sides, with at least eight patches along the shorter if possible."""
    limit = min(max(min(height, width) // _MIN_PATCHES, 1), _MAX_PATCH)
    return max(p for p in range(1, limit + 1) if height % p == 0 and width % p == 0)


def _transformer_block(x: Any, options: VitOptions, name: str) -> Any:
    seen = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x)
    seen = layers.MultiHeadAttention(
        options.heads, options.embedding // options.heads, dropout=options.dropout_rate, name=f"{name}_attention"
    )(seen, seen)
    x = layers.Add(name=f"{name}_add1")([x, seen])
    hidden = layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x)
    hidden = layers.Dense(round(options.embedding * options.mlp_ratio), activation="gelu", name=f"{name}_dense1")(
        hidden
    )
    hidden = layers.Dense(options.embedding, name=f"{name}_dense2")(hidden)
    if options.dropout_rate:
        hidden = layers.Dropout(options.dropout_rate, name=f"{name}_dropout")(hidden)
    return layers.Add(name=f"{name}_add2")([x, hidden])
