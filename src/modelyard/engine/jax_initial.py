"""Initial weights drawn by NumPy: JAX would compile a program for every shape, longer than some trainings take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.backend.jax import random

_FARTHEST = 2.0
"""Where Keras cuts off its truncated normal distribution, in standard deviations."""


@contextmanager
def drawn_by_numpy() -> Iterator[None]:
    """While this is open, Keras's initializers draw from NumPy's generators."""
    replaced = {"normal": _normal, "uniform": _uniform, "truncated_normal": _truncated_normal}
    originals = {name: getattr(random, name) for name in replaced}
    for name, function in replaced.items():
        setattr(random, name, _where_it_can(function, originals[name]))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(random, name, function)


def _where_it_can(by_numpy: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Layers that draw noise are traced while a model is built, with shapes and seeds that are no numbers yet."""

    def draw(shape: Any, *arguments: Any, **named: Any) -> Any:
        if all(isinstance(size, int) for size in shape) and not isinstance(named.get("seed"), jax.Array):
            with suppress(jax.errors.TracerArrayConversionError):
                return by_numpy(shape, *arguments, **named)
        return original(shape, *arguments, **named)

    return draw


def _generator(seed: Any) -> np.random.Generator:
    words = seed if isinstance(seed, int) else np.asarray(random.jax_draw_seed(seed)).tolist()
    return np.random.default_rng(words)


def _normal(shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    return _tensor(_generator(seed).standard_normal(shape) * stddev + mean, dtype)


def _uniform(shape: Any, minval: float = 0.0, maxval: float = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    return _tensor(_generator(seed).uniform(minval, maxval, shape), dtype)


def _truncated_normal(shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    generator = _generator(seed)
    values = generator.standard_normal(shape)
    while (outside := np.abs(values) > _FARTHEST).any():
        values[outside] = generator.standard_normal(int(outside.sum()))
    return _tensor(values * stddev + mean, dtype)


def _tensor(values: Any, dtype: Any) -> Any:
    return jnp.asarray(np.asarray(values).astype(dtype or keras.config.floatx()))
