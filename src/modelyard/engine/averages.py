"""Averages of the weights over steps, which are evaluated instead of the weights themselves (ema_decay).

They are kept as optimizer slots, ``conv1/kernel/average``, so that a checkpoint has both. Moving statistics are
averages already and are taken as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras import ops
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
_SLOT = "/average"


def make_averages(weights: dict[str, Any], trained: Iterable[Any]) -> dict[str, Any]:
    """A variable for each weight that is trained, by the name of its slot; each begins as the weight does.

    Args:
        weights: all weights by name.
        trained: those that have gradients.
    """
    names = {id(variable): name for name, variable in weights.items()}
    return {
        f"{names[id(v)]}{_SLOT}": keras.Variable(
            ops.convert_to_numpy(v.value), dtype=v.dtype, trainable=False, autocast=False, name="average"
        )
        for v in trained
    }


def next_average(average: Any, weight: Any, step: Any, decay: float) -> Any:
    """The average after a step. The first steps count for more, so that it soon forgets how training began.

    Args:
        average: the one before it.
        weight: the weight after the step.
        step: the step, from 0 on.
        decay: the share of ``average`` in it, in the end.
    """
    t = ops.cast(step, average.dtype)
    share = ops.minimum(ops.cast(decay, average.dtype), (1 + t) / (10 + t))
    return average * share + weight * (1 - share)


def is_average(slot: str) -> bool:
    """Whether the optimizer slot of this name is an average, in a run that has them."""
    return slot.endswith(_SLOT)


def averages_to_load(slots: Iterable[str], weights: Arrays, optimizer: Arrays) -> Arrays:
    """What the averages become when weights are loaded and the rest of the optimizer stays as it is.

    Args:
        slots: the names of the averages.
        weights: the weights that are loaded.
        optimizer: the slots that came with them; weights from elsewhere have none, and the averages begin as they do.
    """
    given = optimizer or {slot: weights[slot.removesuffix(_SLOT)] for slot in slots}
    return {slot: given[slot] for slot in slots if slot in given}
