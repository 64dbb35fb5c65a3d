"""Keras's private APIs, and settings without a public API. Written for Keras 3.10 to 3.15."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np

from modelyard.config.schema import Config

_POLICIES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
_WIDE = "BIT64_TO_BIT32_DTYPE"
_TRUNCATION = 2.0
"""The limit of Keras's truncated normal distribution, in standard deviations."""
_replacing = threading.RLock()


def set_precision(config: Config) -> None:
    """Sets Keras's float type and dtype policy from ``config``."""
    keras.config.set_floatx("float64" if config.precision == "float64" else "float32")
    keras.config.set_dtype_policy(_POLICIES.get(config.precision, config.precision))
    if config.precision == "float64":
        from keras.src.backend.common import dtypes

        # On JAX Keras assumes that 64 bits are disabled, and computes batch norm in 32.
        getattr(dtypes, _WIDE, {})["float64"] = "float64"


@contextmanager
def session_of(config: Config) -> Iterator[None]:
    """Builds models as a run does while the block runs: with its precision and names. The user's settings come back."""
    with precision_kept():
        keras.utils.clear_session(free_memory=False)  # names must not depend on what was built before
        set_precision(config)
        yield


@contextmanager
def precision_kept() -> Iterator[None]:
    """Restores Keras's float type and dtype policy after the block."""
    from keras.src.backend.common import dtypes

    floatx, policy, wide = keras.config.floatx(), keras.config.dtype_policy(), getattr(dtypes, _WIDE, {})
    known = dict(wide)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
        wide.update(known)


def seed_initializers(seed: int) -> None:
    """Makes the initial weights of the next model depend only on ``seed``.

    `keras.utils.set_random_seed` would import TensorFlow and PyTorch if they are installed, to seed them too.
    """
    random.seed(seed)
    np.random.seed(seed)


# -- both backends ------------------------------------------------------------------------------------------------


def leave_summing_to_the_engine(optimizer: Any) -> None:
    """Stops an optimizer, and those inside it, from summing gradients: the engine does it, before clipping."""
    optimizer._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", [])]
    for each in inner:
        if each is not None:
            leave_summing_to_the_engine(each)


def all_layers(model: Any) -> list[Any]:
    """Returns the layers of a model, and the layers inside them."""
    return list(model._flatten_layers())


def sublayers(layer: Any) -> list[Any]:
    """Returns all layers inside a layer or model, each before its own sublayers."""
    return list(layer._flatten_layers(include_self=False))


def own_trainable_variables(layer: Any) -> list[Any]:
    """Returns the trainable variables of a layer without those of its sublayers."""
    return list(layer._trainable_variables)


@contextmanager
def layer_call_replaced(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces `Layer.__call__` while the block runs; ``make`` takes the original and returns the replacement."""
    with _attributes_replaced(keras.layers.Layer, {"__call__": make(keras.layers.Layer.__call__)}):
        yield


# -- TensorFlow ---------------------------------------------------------------------------------------------------


def fuse_batch_norm_sync() -> None:
    """Makes synchronized batch norm send mean and variance together, in one message per layer instead of three.

    Keras sums three values of every layer's input and sends each by itself, in the forward and in the backward pass.
    All replicas have equal parts of a batch here, so mean and variance of each part are enough.
    """
    from keras.src.backend.tensorflow import nn

    if hasattr(nn, "_compute_moments_sync"):
        nn._compute_moments_sync = synchronized_moments


def synchronized_moments(x: Any, axes: Any, keepdims: bool) -> tuple[Any, Any]:
    """Returns mean and variance over ``axes`` and over all replicas, whose parts of the batch are equally large."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    if context is not None and context.num_replicas_in_sync > 1:
        together = tf.stack([mean, variance, tf.square(mean)])
        together = context.all_reduce(tf.distribute.ReduceOp.SUM, together) / context.num_replicas_in_sync
        mean, variance, squared = tf.unstack(together)
        variance += tf.maximum(squared - tf.square(mean), 0.0)  # within the parts plus between them
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


# -- JAX ----------------------------------------------------------------------------------------------------------


@contextmanager
def backend_functions_replaced(replaced: Mapping[str, Callable[[Any], Callable[..., Any]]]) -> Iterator[None]:
    """Replaces functions of layers in Keras's JAX backend while the block runs, in one thread at a time.

    A server may compile a new model while another thread compiles the old one for batches of another size.

    Args:
        replaced: names in `keras.src.backend.jax.nn`, and functions that take the original and return another.
    """
    from keras.src.backend.jax import nn

    with _replacing, _attributes_replaced(nn, {name: make(getattr(nn, name)) for name, make in replaced.items()}):
        yield


@contextmanager
def _attributes_replaced(owner: Any, replaced: Mapping[str, Any]) -> Iterator[None]:
    originals = {name: getattr(owner, name) for name in replaced}
    for name, value in replaced.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


@contextmanager
def drawn_by_numpy() -> Iterator[None]:
    """Makes Keras's initializers draw from NumPy's generators while the block runs.

    JAX would compile a program for every shape, which can take longer than training.
    """
    from keras.src.backend.jax import random as drawing

    replaced = {"normal": _normal, "uniform": _uniform, "truncated_normal": _truncated_normal}
    drawn = {name: _unless_traced(function, getattr(drawing, name)) for name, function in replaced.items()}
    with _attributes_replaced(drawing, drawn):
        yield


def _unless_traced(by_numpy: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Draws with JAX if shapes or seeds are traced, such as for layers that draw noise while a model is built."""
    import jax

    def draw(shape: Any, *arguments: Any, **named: Any) -> Any:
        if all(isinstance(size, int) for size in shape) and not isinstance(named.get("seed"), jax.Array):
            with suppress(jax.errors.TracerArrayConversionError):
                return by_numpy(shape, *arguments, **named)
        return original(shape, *arguments, **named)

    return draw


def _generator(seed: Any) -> np.random.Generator:
    from keras.src.backend.jax import random as drawing

    words = seed if isinstance(seed, int) else np.asarray(drawing.jax_draw_seed(seed)).tolist()
    return np.random.default_rng(words)


def _normal(shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    return _tensor(_generator(seed).standard_normal(shape) * stddev + mean, dtype)


def _uniform(shape: Any, minval: float = 0.0, maxval: float = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    return _tensor(_generator(seed).uniform(minval, maxval, shape), dtype)


def _truncated_normal(shape: Any, mean: float = 0.0, stddev: float = 1.0, dtype: Any = None, seed: Any = None) -> Any:
    generator = _generator(seed)
    values = generator.standard_normal(shape)
    while (outside := np.abs(values) > _TRUNCATION).any():
        values[outside] = generator.standard_normal(int(outside.sum()))
    return _tensor(values * stddev + mean, dtype)


def _tensor(values: Any, dtype: Any) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(np.asarray(values).astype(dtype or keras.config.floatx()))


# -- graph -------------------------------------------------------------------------------------------------------------


def input_layers(layer: keras.Layer) -> list[str]:
    """Returns the names of the layers whose outputs ``layer`` receives."""
    return list(dict.fromkeys(parent.operation.name for node in layer._inbound_nodes for parent in node.parent_nodes))


# -- files -------------------------------------------------------------------------------------------------------------


def weight_paths(model: keras.Model, weights: Mapping[str, Any]) -> dict[str, str]:
    """Maps paths in Keras's files, such as ``layers/conv2d_1/vars/0``, to names of weights.

    Keras 3 identifies layers in its files by class and number, not by name.

    Args:
        model: the model.
        weights: its variables by name.
    """
    from keras.src.saving import saving_lib

    class Recorder(saving_lib.H5IOStore):
        """Keeps what Keras would write to a file."""

        def __init__(self) -> None:
            self.groups: dict[str, dict[str, Any]] = {}

        def make(self, path: str, metadata: Any = None) -> dict[str, Any]:
            return self.groups.setdefault(path, {})

        def __bool__(self) -> bool:
            return True

    recorder = Recorder()
    saving_lib._save_state(model, recorder, None, inner_path="", visited_saveables=set())
    names = {id(variable): name for name, variable in weights.items()}
    return {
        f"{path}/vars/{number}".removeprefix("/"): names[id(variable)]
        for path, variables in recorder.groups.items()
        for number, variable in variables.items()
        if id(variable) in names
    }
