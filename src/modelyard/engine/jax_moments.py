"""Mean and variance for batch norm from one pass over the activations, as other frameworks compute them.

Keras computes the mean first and then the mean of the squared differences from it, so that every activation is read
twice. On an accelerator that is a kernel more for every layer, and its time is that of reading memory.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from keras.src.backend.jax import nn


def compute_moments_in_one_pass() -> None:
    """Has Keras's batch norm use `moments`."""
    if hasattr(nn, "moments"):  # else Keras has another way by now, which is right too
        nn.moments = moments


def moments(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> tuple[Any, Any]:
    """Mean and variance over ``axes``, in at least 32 bits; the batch is whole here, so they are synchronised."""
    axes = tuple(axes) if isinstance(axes, list | tuple) else (axes,)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # Squares of what is far from zero would leave no digits for the variance: the first example's mean goes first.
    shift = lax.stop_gradient(jnp.mean(lax.slice_in_dim(wide, 0, 1, axis=axes[0]), axes, keepdims=True))
    moved = wide - shift
    mean = jnp.mean(moved, axes, keepdims=True)
    variance = jnp.maximum(jnp.mean(jnp.square(moved), axes, keepdims=True) - jnp.square(mean), 0)
    mean = mean + shift
    if not keepdims:
        mean, variance = jnp.squeeze(mean, axes), jnp.squeeze(variance, axes)
    return mean.astype(x.dtype), variance.astype(x.dtype)
