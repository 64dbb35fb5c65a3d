"""What goes into the loss of a classifier besides cross-entropy: weights of classes, focal loss, label smoothing.

All of it is linear in the label: the loss of a mixed label is the mean of the losses of its classes, by their shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.errors import ConfigError, Problem, unknown

Tensor = Any


def class_weights(
    given: str | Mapping[str, float] | Sequence[float], classes: Sequence[str], counts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """A weight for each class, such that the mean over the training split is 1.

    Args:
        given: "balanced", weights by the names of classes (1 for the others), or one for each class.
        classes: the names of the classes.
        counts: how many training examples each class has.

    Raises:
        ConfigError: for an unknown class, or another number of weights than there are classes.
    """
    if isinstance(given, str):  # balanced: classes without examples have no say
        weights = np.divide(1.0, counts, out=np.zeros(len(counts)), where=counts > 0)
    elif isinstance(given, Mapping):
        numbers = {name: number for number, name in enumerate(classes)}
        strange = [unknown("class", name, classes) for name in given if name not in numbers]
        if strange:
            raise _mistake(" ".join(strange))
        weights = np.ones(len(classes))
        for name, weight in given.items():
            weights[numbers[name]] = weight
    else:
        weights = np.asarray(given, np.float64)
        if len(weights) != len(classes):
            raise _mistake(f"has {len(weights)} weights, but there are {len(classes)} classes: {_some(classes)}.")
    mean = float(weights @ counts) / max(int(counts.sum()), 1)
    if mean <= 0:
        raise _mistake("leaves every training example without weight.")
    return (weights / mean).astype(np.float32)


def cross_entropy(target: Tensor, logits: Tensor, smoothing: float, gamma: float) -> Tensor:
    """The loss of each example: Σ over the classes of target · (1 − p)^γ · (−log p).

    Args:
        target: shares of the classes, [batch, classes]; they need not add up to 1.
        logits: of the same shape.
        smoothing: share of the target that is spread over all classes.
        gamma: of the focal loss; 0 is plain cross-entropy.
    """
    if smoothing:
        whole = ops.sum(target, axis=-1, keepdims=True)
        target = target * (1.0 - smoothing) + whole * (smoothing / logits.shape[-1])
    logs = ops.log_softmax(logits, axis=-1)
    if gamma:
        # Not 0: a power below 1 has no slope there, and 0 × ∞ is no number.
        target = target * ops.power(ops.maximum(-ops.expm1(logs), 1e-7), gamma)
    return -ops.sum(target * logs, axis=-1)


def _mistake(message: str) -> ConfigError:
    return ConfigError([Problem("options of the model", "class_weights", message)])


def _some(names: Sequence[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (" …" if len(names) > most else "")
