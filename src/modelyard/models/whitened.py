"""A small, fast network for CIFAR: fixed whitening of 2×2 patches, then groups of identity-initialized convolutions.

The design is Keller Jordan's, of "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024, arXiv 2404.00498) and the
programs airbench94_muon and airbench96 (github.com/KellerJordan/cifar10-airbench).
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from numpy.typing import NDArray

from modelyard.errors import DataError
from modelyard.models.catalog import WhitenedCnnOptions
from modelyard.models.data_info import DataInfo
from modelyard.models.task import image_input

_PATCH = 2
_MAX_IMAGES = 2048
_CHUNK = 256
_KERNEL = "whitening_kernel"
# Small enough to leave moments in float32 unchanged.
_EPSILON = 1e-12


def whitening_kernel(images: NDArray[Any], epsilon: float = 5e-4) -> NDArray[np.float32]:
    """Returns the kernel that maps 2×2 patches of ``images`` to uncorrelated values of equal variance.

    Args:
        images: standardized images, of shape [count, height, width, channels].
        epsilon: added to each eigenvalue, so that directions without variance are not amplified.

    Returns:
        Eigenvectors of the covariance of the patches, each divided by the root of its eigenvalue, of shape
        [2, 2, channels, 4 × channels].
    """
    channels = images.shape[-1]
    size = _PATCH * _PATCH * channels
    covariance, count = np.zeros((size, size)), 0
    for start in range(0, len(images), _CHUNK):
        windows = np.lib.stride_tricks.sliding_window_view(
            images[start : start + _CHUNK], (_PATCH, _PATCH), axis=(1, 2)
        )
        patches = windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, size).astype(np.float32)
        covariance += patches.T @ patches
        count += len(patches)
    values, vectors = np.linalg.eigh(covariance / count)
    # Libraries differ in the signs of eigenvectors: the largest value is made positive, so that all machines agree.
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(size)])
    scaled = vectors / np.sqrt(np.maximum(values, 0) + epsilon)
    kernel: NDArray[np.float32] = scaled.reshape(_PATCH, _PATCH, channels, size).astype(np.float32)
    return kernel


@keras.saving.register_keras_serializable(package="modelyard")
class Whiten(layers.Layer):
    """A 2×2 convolution with a kernel from training images, and its negated outputs as further channels.

    The kernel is not trained; it is saved with the model.

    Args:
        kernel: the result of `whitening_kernel`; None if it is loaded later.
        use_bias: whether a bias is trained.
    """

    def __init__(self, kernel: NDArray[np.float32] | None = None, use_bias: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.use_bias = use_bias
        self._initial = kernel

    def build(self, input_shape: Any) -> None:
        """Makes the kernel, and the bias if there is one."""
        channels = input_shape[-1]
        size = _PATCH * _PATCH * channels
        shape = (_PATCH, _PATCH, channels, size)
        initial = np.zeros(shape, np.float32) if self._initial is None else self._initial
        self.kernel = self.add_weight(
            name="kernel",
            shape=shape,
            initializer=lambda shape, dtype=None: ops.convert_to_tensor(initial, dtype),
            trainable=False,
        )
        self.bias = self.add_weight(name="bias", shape=(2 * size,), initializer="zeros") if self.use_bias else None

    def call(self, inputs: Any) -> Any:
        """Returns outputs with one pixel less in height and width."""
        # With so few channels a matrix product is faster on a GPU than a convolution, and half of it is enough.
        height, width = inputs.shape[1] - _PATCH + 1, inputs.shape[2] - _PATCH + 1
        offsets = [(row, column) for row in range(_PATCH) for column in range(_PATCH)]
        patches = ops.concatenate([inputs[:, r : r + height, c : c + width, :] for r, c in offsets], axis=-1)
        size = patches.shape[-1]
        values = ops.matmul(patches, ops.reshape(self.kernel, (size, size)))
        outputs = ops.concatenate([values, -values], axis=-1)
        return outputs if self.bias is None else outputs + self.bias

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns one pixel less in height and width, and eight times the channels."""
        batch, height, width, channels = input_shape
        return batch, height - _PATCH + 1, width - _PATCH + 1, 2 * _PATCH * _PATCH * channels

    def flops(self, input_shape: Any) -> int:
        """Returns the FLOPs of the product; the other half of the channels is its negative."""
        _, height, width, channels = input_shape
        return int(2 * (height - _PATCH + 1) * (width - _PATCH + 1) * (_PATCH * _PATCH * channels) ** 2)

    def get_config(self) -> dict[str, Any]:
        """Returns the config for Keras's format; the kernel is in the weights."""
        return {**super().get_config(), "use_bias": self.use_bias}


@keras.saving.register_keras_serializable(package="modelyard")
class MaxPool(layers.Layer):
    """Maximum over squares that do not overlap; rows and columns that are left over are dropped.

    It reshapes and reduces, since XLA's gradient of a pooling window is slow on GPUs and not deterministic.
    """

    def __init__(self, size: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = size

    def call(self, inputs: Any) -> Any:
        """Returns height and width divided by the size."""
        k = self.size
        _, height, width, channels = self.compute_output_shape(inputs.shape)
        squares = ops.reshape(inputs[:, : height * k, : width * k, :], (-1, height, k, width, k, channels))
        return ops.max(squares, axis=(2, 4))

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape, rounded down."""
        batch, height, width, channels = input_shape
        return batch, height // self.size, width // self.size, channels

    def get_config(self) -> dict[str, Any]:
        """Returns the config for Keras's format."""
        return {**super().get_config(), "size": self.size}


@keras.saving.register_keras_serializable(package="modelyard")
class IdentityKernel(keras.initializers.Initializer):
    """The first filters copy the input channels; the rest are uniform up to 1 / √(inputs of a filter)."""

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        """Returns a kernel of shape [height, width, inputs, outputs]."""
        height, width, inputs, outputs = shape
        same = min(inputs, outputs)
        limit = 1 / math.sqrt(height * width * inputs)
        noise = keras.random.uniform(shape, -limit, limit, dtype=dtype)
        identity = np.zeros((height, width, inputs, outputs), np.float32)
        identity[height // 2, width // 2, np.arange(same), np.arange(same)] = 1
        rest = (np.arange(outputs) >= same).astype(np.float32)
        return noise * ops.convert_to_tensor(rest, noise.dtype) + ops.convert_to_tensor(identity, noise.dtype)


@keras.saving.register_keras_serializable(package="modelyard")  # type: ignore[untyped-decorator]
def fast_gelu(x: Any) -> Any:
    """Returns GELU by its tanh approximation, which differs by less than the precision of bfloat16."""
    return ops.gelu(x, approximate=True)


@keras.saving.register_keras_serializable(package="modelyard")  # type: ignore[untyped-decorator]
def quick_gelu(x: Any) -> Any:
    """Returns GELU by its sigmoid approximation (Hendrycks and Gimpel 2016): faster, off by at most 0.02."""
    return x * ops.sigmoid(1.702 * x)


_ACTIVATIONS = {"silu": "silu", "gelu": fast_gelu, "quick_gelu": quick_gelu}


def whitened_cnn(data: DataInfo, options: WhitenedCnnOptions) -> keras.Model:
    """Returns the network, for images of 32×32 and other sizes."""
    pooled = 2 ** len(options.widths)
    inputs, x = image_input(data, smallest=3 * pooled + 1)
    if data.images is None:
        raise DataError("whitened_cnn computes its first layer from training images; this dataset has none.")
    if _KERNEL not in data.results:
        sample = (data.images[:: -(-len(data.images) // _MAX_IMAGES)].astype(np.float32) - data.mean) / data.spread
        data.results[_KERNEL] = whitening_kernel(sample)
    x = Whiten(data.results[_KERNEL], options.whiten_bias, name="whiten")(x)
    x = _activation(options, "whiten_act")(x)
    for number, width in enumerate(options.widths, 1):
        x = _group(x, width, options, f"group{number}")
    x = layers.Flatten(name="flatten")(MaxPool(3, name="pool")(x))
    spread_of_one = keras.initializers.RandomUniform(-math.sqrt(3), math.sqrt(3))
    full = keras.config.floatx()  # the head is cheap, and its outputs are large before they are scaled
    logits = layers.Dense(
        data.num_classes, use_bias=False, kernel_initializer=spread_of_one, dtype=full, name="logits"
    )(x)
    scale = options.logit_scale if options.logit_scale is not None else 1 / options.widths[-1]
    return keras.Model(inputs, layers.Rescaling(scale, dtype=full, name="scale")(logits), name="whitened_cnn")


def _group(x: Any, width: int, options: WhitenedCnnOptions, name: str) -> Any:
    # The pool drops the last row and column of an odd number: they are not computed. That is a tenth of the network.
    border = tuple((1, 1 - size % 2) for size in x.shape[1:3])
    x = _conv(width, f"{name}_conv1", "valid")(layers.ZeroPadding2D(border, name=f"{name}_border")(x))
    x = MaxPool(2, name=f"{name}_pool")(x)
    x = _activation(options, f"{name}_act1")(_norm(options, f"{name}_norm1")(x))
    first = x
    for number in range(2, options.depth + 1):
        x = _norm(options, f"{name}_norm{number}")(_conv(width, f"{name}_conv{number}")(x))
        if number == 3:
            x = layers.Add(name=f"{name}_add")([x, first])
        x = _activation(options, f"{name}_act{number}")(x)
    return x


def _activation(options: WhitenedCnnOptions, name: str) -> layers.Layer:
    return layers.Activation(_ACTIVATIONS[options.activation], name=name)


def _conv(width: int, name: str, padding: str = "same") -> layers.Layer:
    return layers.Conv2D(width, 3, padding=padding, use_bias=False, kernel_initializer=IdentityKernel(), name=name)


def _norm(options: WhitenedCnnOptions, name: str) -> layers.Layer:
    return layers.BatchNormalization(momentum=options.batch_norm_momentum, epsilon=_EPSILON, scale=False, name=name)
