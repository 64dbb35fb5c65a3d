"""The inputs of compiled programs, besides state and data: those of each step, and those of the whole run.

What differs between runs of one network is here, and not in the program: the learning rate of each step, seeds, and the
numbers of `input_numbers.py`. So one program serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from modelyard.data.pipeline import Pipeline

if TYPE_CHECKING:
    from modelyard.engine.jax_step import Layout

_BLOCK = 1024
"""Learning rates are computed for so many steps at a time: none depends on how steps are cut into chunks."""


class StepInputs(NamedTuple):
    """The inputs of some steps: one row per step."""

    rows: Any
    """Indices of the examples in the training split, int32 [steps, batch]."""
    numbers: Any
    """uint32 [steps, 6]: the step, both halves of its first position in the stream, the epoch, the index in it, and the
    bits of the learning rate, as one array since each has a price at every step."""

    @classmethod
    def of(cls, step: int, count: int, pipeline: Pipeline, rates: LearningRates, layout: Layout) -> StepInputs:
        """Returns the inputs of ``count`` steps from ``step`` on."""
        size, examples = pipeline.run.batch_size, pipeline.run.examples
        first = (np.arange(step, step + count, dtype=np.uint64)) * np.uint64(size)
        columns = [np.arange(step, step + count), first & 0xFFFFFFFF, first >> 32, first // examples, first % examples]
        bits = rates.of(step, count).view(np.uint32)
        numbers = np.stack([*(column.astype(np.uint32) for column in columns), bits], axis=1)
        rows = pipeline.rows(step, count).astype(np.int32)
        return cls(layout.replicate(rows), layout.replicate(numbers))

    @classmethod
    def shapes(cls, count: int, batch_size: int, layout: Layout) -> StepInputs:
        """Returns shapes and types, to compile a program for ``count`` steps."""
        return cls(
            jax.ShapeDtypeStruct((count, batch_size), np.int32, sharding=layout.replicated),
            jax.ShapeDtypeStruct((count, 6), np.uint32, sharding=layout.replicated),
        )

    @property
    def learning_rate(self) -> Any:
        """Inside a program: the learning rate of one step, whose inputs these are."""
        return lax.bitcast_convert_type(self.numbers[5], np.float32)


class RunInputs(NamedTuple):
    """The inputs that are the same at all steps of a run."""

    augmentation: Any
    """The seeds of the augmentation."""
    noise: Any
    """For each random generator of the model, one word per part of a batch."""
    numbers: Any
    """The values of the numbers that are inputs."""


class LearningRates:
    """The learning rates of a run, computed on the host.

    Args:
        schedule: the learning rate at a step.
    """

    def __init__(self, schedule: Callable[[Any], Any]) -> None:
        self._schedule = schedule
        self._block = lru_cache(maxsize=2)(self._compute)

    def of(self, step: int, count: int) -> NDArray[np.float32]:
        """Returns the learning rates of ``count`` steps from ``step`` on."""
        first, last = step // _BLOCK, (step + count - 1) // _BLOCK
        blocks = [self._block(number) for number in range(first, last + 1)]
        found = blocks[0] if first == last else np.concatenate(blocks)
        start = step - first * _BLOCK
        return found[start : start + count]

    def _compute(self, block: int) -> NDArray[np.float32]:
        # Not as one program: that would be another one for each schedule.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            steps = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.int32)
            rates = np.asarray(jax.vmap(self._schedule)(steps)).astype(np.float32)
        if jax.process_count() > 1:  # CPUs of different types may differ in the last bit
            rates = np.asarray(multihost_utils.broadcast_one_to_all(rates))
        return rates
