"""Mean and variance for batch norm from one pass over the activations, as other frameworks compute them.

Keras computes the mean first and then the mean of the squared differences from it, so that every activation is read
twice. On an accelerator that is a kernel more for every layer, and its time is that of reading memory.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from keras.src.backend.jax import nn


def compute_moments_in_one_pass() -> None:
    """Has Keras's batch norm use `moments`."""
    nn.moments = moments


def moments(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> tuple[Any, Any]:
    """Mean and variance over ``axes``, in at least 32 bits; the batch is whole here, so they are synchronised."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, axes, keepdims=keepdims)
    variance = jnp.maximum(jnp.mean(jnp.square(wide), axes, keepdims=keepdims) - jnp.square(mean), 0)
    return mean.astype(x.dtype), variance.astype(x.dtype)
