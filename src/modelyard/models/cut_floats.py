"""A warning where floats of a task's own preprocessing would be cut to whole numbers on their way into the network."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from keras import ops

if TYPE_CHECKING:
    from modelyard.models.task import Task

log = logging.getLogger("modelyard")


def warn_of_cut_floats(task: Task, model: Any, batch: dict[str, Any]) -> None:
    """Says, once a task, where Keras casts floats that `preprocess` gives to whole numbers, which the network takes."""
    for tensor in model.inputs:
        given = batch.get(tensor.name)
        cut = given is not None and "int" in str(tensor.dtype) and "float" in str(ops.dtype(given))
        if cut and "_told_of_cut_floats" not in vars(task):
            vars(task)["_told_of_cut_floats"] = True
            log.warning(
                "%s.preprocess gives %s as floats, but the network's input takes %s: what is behind the point is cut. "
                "Make the input keras.Input(…, dtype='float32', name=%r), or scale in the network.",
                *(type(task).__name__, tensor.name, tensor.dtype, tensor.name),
            )
