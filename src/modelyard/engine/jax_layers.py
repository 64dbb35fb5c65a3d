"""Convolution and batch norm as GPUs compute them fastest: the values of Keras's, added up in another order.

Keras computes them this way while the programs of the engine are traced, and not otherwise (`faster_layers`). On an
H200, ResNet-20 makes a third more steps per second for it (docs/measurements.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from modelyard.compat.keras import backend_functions_replaced

_CHANNELS = 64
"""Kernels for tensor cores compute at least so many channels at a time: with fewer, most of the work is for nothing."""
_DIMENSIONS = ("NHWC", "HWIO", "NHWC")


@contextmanager
def faster_layers(on_gpu: bool, replicas: int) -> Iterator[None]:
    """Has Keras's layers call the functions below while the block runs.

    Args:
        on_gpu: whether the devices are GPUs.
        replicas: the number of devices. XLA splits a sum of one value over devices, not one of two.
    """
    together = on_gpu and replicas == 1
    replaced: dict[str, Callable[[Any], Callable[..., Any]]] = {}
    replaced["moments"] = lambda _: partial(moments, together=together)
    if together:
        replaced["batch_normalization"] = lambda _: batch_normalization
    if on_gpu:
        replaced["conv"] = lambda original: partial(_conv, original)
    with backend_functions_replaced(replaced):
        yield


# -- convolution ------------------------------------------------------------------------------------------------------


def _conv(
    original: Callable[..., Any],
    inputs: Any,
    kernel: Any,
    strides: Any = 1,
    padding: Any = "valid",
    data_format: Any = None,
    dilation_rate: Any = 1,
) -> Any:
    """Keras's convolution, over groups of pixels where that is faster."""
    plain = padding == "same" and data_format != "channels_first" and all(map(_is_one, (strides, dilation_rate)))
    if plain and len(inputs.shape) == 4 and kernel.shape[2] == inputs.shape[3]:
        _, size, channels, filters = kernel.shape
        group = pixels_in_group(size, channels, filters, inputs.shape[2])
        if group > 1:
            return grouped_conv(jnp.asarray(inputs), jnp.asarray(kernel), group)
    return original(inputs, kernel, strides, padding, data_format, dilation_rate)


def _is_one(value: Any) -> bool:
    return value == 1 or (isinstance(value, Sequence) and all(part == 1 for part in value))


def pixels_in_group(size: int, channels: int, filters: int, width: int) -> int:
    """Returns how many neighbours in a row should be computed as one pixel with all of their channels.

    Args:
        size: the width of the kernel.
        channels, filters: the channels of the inputs and of the outputs.
        width: the width of the image.
    """
    group = 1
    while 2 * group * max(channels, filters) <= _CHANNELS and width % (2 * group) == 0:
        group *= 2
    # A group needs its two neighbours, and no further ones.
    return group if size % 2 and 1 < size <= 2 * group + 1 else 1


def grouped_conv(inputs: Any, kernel: Any, group: int) -> Any:
    """Returns a convolution with padding "same", computed over groups of neighbours in a row.

    The channels of a group are those of its pixels, one after the other, which moves nothing in memory. The kernel gets
    zeros where a pixel of one group does not belong to the window of a pixel of the other.

    Args:
        inputs: [batch, height, width, channels]; the width is a multiple of ``group``.
        kernel: [height, width, channels, filters]; odd sizes.
        group: the number of pixels.
    """
    batch, height, width, channels = inputs.shape
    tall, wide, _, filters = kernel.shape
    # A window over three groups has 3 × group columns; the kernel of the pixel ``place`` begins at its left neighbour.
    starts = [group + place - wide // 2 for place in range(group)]
    parts = [
        jnp.pad(kernel, ((0, 0), (start, 3 * group - wide - start), (0, 0), (0, 0))).reshape(
            tall, 3, group * channels, filters
        )
        for start in starts
    ]
    pixels = inputs.reshape(batch, height, width // group, group * channels).astype(kernel.dtype)
    outputs = lax.conv_general_dilated(
        pixels, jnp.concatenate(parts, axis=-1), (1, 1), "SAME", dimension_numbers=_DIMENSIONS
    )
    return outputs.reshape(batch, height, width, filters)


# -- batch norm -------------------------------------------------------------------------------------------------------


def moments(
    x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False, together: bool = False
) -> tuple[Any, Any]:
    """Returns mean and variance over ``axes`` in at least 32 bits, from one pass. The batch is that of all devices.

    Keras computes the mean first, then the mean of the squared differences from it, and reads every activation twice.
    """
    axes = tuple(axis % x.ndim for axis in (axes if isinstance(axes, list | tuple) else (axes,)))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Squares of values far from zero would cancel in the variance, so one of the values is subtracted.
    one = wide
    for axis in axes:
        one = lax.slice_in_dim(one, 0, 1, axis=axis)
    shift = lax.stop_gradient(one)
    moved = wide - shift
    count = wide.size // one.size
    sums = _sums(moved, jnp.square(moved), axes) if together else _apart(moved, jnp.square(moved), axes)
    mean, square = (total / count for total in sums)
    mean, variance = mean + shift, jnp.maximum(square - jnp.square(mean), 0)
    if not keepdims:
        mean, variance = jnp.squeeze(mean, axes), jnp.squeeze(variance, axes)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return mean, variance
    if wide.dtype != x.dtype:  # as Keras does: the squares of values of float16 can be beyond it
        most = float(jnp.finfo(jnp.float16).max)
        mean, variance = jnp.clip(mean, -most, most), jnp.clip(variance, -most, most)
    return mean.astype(x.dtype), variance.astype(x.dtype)


def batch_normalization(
    x: Any,
    mean: Any,
    variance: Any,
    axis: int,
    offset: Any = None,
    scale: Any = None,
    epsilon: float = 1e-3,
) -> Any:
    """Returns normalized values, as Keras's function of this name; both sums of its gradient are computed together."""
    shape = [1] * len(x.shape)
    shape[axis] = -1
    factor = lax.rsqrt(jnp.reshape(variance, shape) + epsilon)
    if scale is not None:
        factor = factor * jnp.reshape(scale, shape)
    summand = -jnp.reshape(mean, shape) * factor
    if offset is not None:
        summand = summand + jnp.reshape(offset, shape)
    dtype = jnp.result_type(x, factor, summand)  # a gradient must have the type of what it belongs to
    return _scaled(*(jnp.asarray(each, dtype) for each in (x, factor, summand)))


@jax.custom_vjp  # type: ignore[untyped-decorator]
def _scaled(x: Any, factor: Any, summand: Any) -> Any:
    """Returns ``x * factor + summand``; the gradients of both are computed together."""
    return x * factor + summand


def _scaled_forward(x: Any, factor: Any, summand: Any) -> tuple[Any, Any]:
    return x * factor + summand, (x, factor)


def _scaled_backward(kept: Any, gradient: Any) -> tuple[Any, Any, Any]:
    x, factor = kept
    axes = tuple(axis for axis, size in enumerate(factor.shape) if size == 1)
    return gradient * factor, *_sums(gradient * x, gradient, axes)


_scaled.defvjp(_scaled_forward, _scaled_backward)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _sums(one: Any, other: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the sums of two arrays of one shape over ``axes``, which stay with size 1.

    One kernel adds up both. XLA makes two of two sums, at least for their last part.
    """
    zeros = (jnp.zeros((), one.dtype), jnp.zeros((), other.dtype))
    both = lax.reduce((one, other), zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), axes)
    return jnp.expand_dims(both[0], axes), jnp.expand_dims(both[1], axes)


def _apart(one: Any, other: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the same; XLA adds up each by itself."""
    return jnp.sum(one, axes, keepdims=True), jnp.sum(other, axes, keepdims=True)


def _tangents_of_sums(axes: tuple[int, ...], given: Any, tangents: Any) -> Any:
    return _sums(given[0], given[1], axes), _apart(tangents[0], tangents[1], axes)


_sums.defjvp(_tangents_of_sums)
