"""The numbers of a run that its compiled program takes as inputs: one program serves all their values.

Only numbers in this module are inputs. A number that Python compares, such as a momentum of 0, stays part of the
program, and so does everything else in the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from modelyard.engine.batch_functions import BatchFunctions
from modelyard.engine.network import Network
from modelyard.models.muon import KernelMuon
from modelyard.models.optimizers import GroupedOptimizer, ScaledRate, Sgd
from modelyard.models.task_types import Classifier

_DECAY = {"weight_decay": "weight_decay"}
_OF_OPTIMIZERS: dict[type[keras.optimizers.Optimizer], dict[str, str]] = {
    Sgd: {"momentum": "momentum", **_DECAY},
    KernelMuon: {"momentum": "momentum", "adam_weight_decay": "weight_decay", **_DECAY},
    keras.optimizers.AdamW: _DECAY,
    keras.optimizers.RMSprop: _DECAY,
    keras.optimizers.Adagrad: _DECAY,
    keras.optimizers.Adadelta: _DECAY,
}
"""For each optimizer, the attributes that may be tensors while it is traced, with the option of each. Keras computes
1 - beta from the betas of Adam, which would lose digits as a tensor."""


@dataclass(frozen=True)
class Number:
    """A number that is an attribute of some object, which reads it while a program is traced.

    Args:
        option: the option of the config that sets it; of a group of weights with its number, as in "2 momentum".
        owner: the object.
        attribute: the name of its attribute.
    """

    option: str
    owner: Any
    attribute: str

    @property
    def value(self) -> float:
        """The number itself."""
        return float(getattr(self.owner, self.attribute))


def group_option(group: int, option: str) -> str:
    """Returns the name of an option of a group of weights, the first of which is 1."""
    return f"{group} {option}"


def input_numbers(network: Network, functions: BatchFunctions) -> list[Number]:
    """Returns the numbers of a network and of its functions of a batch, in a fixed order. Those that are 0 are none."""
    optimizer = getattr(network.optimizer, "inner_optimizer", network.optimizer)  # that of a wrapper for loss scaling
    members = [optimizer]
    if type(optimizer) is GroupedOptimizer:
        members = [optimizer.groups.main, *(member for _, member in optimizer.groups.members)]
    found = []
    for group, member in enumerate(members):
        for attribute, option in _OF_OPTIMIZERS.get(type(member), {}).items():
            found.append(Number(group_option(group, option) if group else option, member, attribute))
        rate = getattr(member, "_learning_rate", None)
        if isinstance(rate, ScaledRate):
            found.append(Number(group_option(group, "learning_rate"), rate, "factor"))
    if isinstance(network.task, Classifier):
        found.append(Number("label_smoothing", network.task, "label_smoothing"))
    found.append(Number("l2_regularization", functions, "l2_regularization"))
    return [number for number in found if getattr(number.owner, number.attribute)]


def values_of(numbers: Sequence[Number]) -> NDArray[Any]:
    """Returns the values of some numbers, as the input of a program."""
    return np.array([number.value for number in numbers], keras.config.floatx())


@contextmanager
def set_to(numbers: Sequence[Number], values: Any) -> Iterator[None]:
    """Sets the numbers to ``values``, the input of a program, while it is traced."""
    before = [getattr(number.owner, number.attribute) for number in numbers]
    try:
        for index, number in enumerate(numbers):
            setattr(number.owner, number.attribute, values[index])
        yield
    finally:
        for number, value in zip(numbers, before, strict=True):
            setattr(number.owner, number.attribute, value)
