"""What replicas sum with each other, in as few journeys as can be.

Keras's synchronised batch norm makes three sums of every layer's input and sends each to the others by itself, forwards
and, for the gradients, back. All replicas have equal shares of a batch here, so that mean and variance of each share
are enough, and they go together: a third of the journeys.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import nn


def synchronise_in_one_journey() -> None:
    """Has Keras's synchronised batch norm compute its statistics by `moments_of_all`."""
    if hasattr(nn, "_compute_moments_sync"):  # else Keras has another way by now, which is right too
        nn._compute_moments_sync = moments_of_all


def moments_of_all(x: Any, axes: Any, keepdims: bool) -> tuple[Any, Any]:
    """Mean and variance over ``axes`` and over all replicas, whose shares are equally large."""
    context = tf.distribute.get_replica_context()
    mean, variance = tf.nn.moments(x, axes, keepdims=True)
    if context is not None and context.num_replicas_in_sync > 1:
        together = tf.stack([mean, variance, tf.square(mean)])
        together = context.all_reduce(tf.distribute.ReduceOp.SUM, together) / context.num_replicas_in_sync
        mean, variance, squared = tf.unstack(together)
        variance += tf.maximum(squared - tf.square(mean), 0.0)  # within the shares, and between them
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def here(variable: Any) -> Any:
    """The copy of a Keras variable on the replica whose code is being made: to assign it without telling the others."""
    value = variable.value
    return value._get() if isinstance(value, tf.distribute.DistributedValues) else value


def all_reduce(context: Any, tensors: list[Any]) -> list[Any]:
    """Sums over all replicas, all tensors of a type in one piece."""
    reduced: dict[int, Any] = {}
    for dtype in sorted({t.dtype.name for t in tensors}):
        places = [place for place, t in enumerate(tensors) if t.dtype.name == dtype]
        flat = tf.concat([tf.reshape(tensors[place], [-1]) for place in places], axis=0)
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, flat)
        sizes = [tensors[place].shape.num_elements() for place in places]
        for place, part in zip(places, tf.split(total, sizes), strict=True):
            reduced[place] = tf.reshape(part, tensors[place].shape)
    return [reduced[place] for place in range(len(tensors))]


def leave_summing_to_the_engine(optimizer: Any) -> None:
    """The engine sums gradients over the replicas, before clipping; a Keras optimizer, or those in it, would again."""
    optimizer._all_reduce_sum_gradients = lambda grads_and_vars: grads_and_vars
    inner = [getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "_inner_optimizers", [])]
    for each in inner:
        if each is not None:
            leave_summing_to_the_engine(each)
