"""The phases of a run, in which different layers are trained: where they begin and end."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from keras import ops

from modelyard.config.calls import Call
from modelyard.config.durations import RunLength
from modelyard.config.fine_tuning import boundaries, read_phases
from modelyard.config.schema import Config
from modelyard.models.freezing import Freezing

log = logging.getLogger("modelyard")
_OF_ALL = ("until", "factor")


class Phases:
    """Which phase each step belongs to. It depends on the step alone, so that a resumed run goes on in the right one.

    Args:
        config: says what they are.
        run: its lengths.
    """

    def __init__(self, config: Config, run: RunLength) -> None:
        self.all = read_phases(config.fine_tune)
        self._starts = boundaries(self.all, run)
        # What each trains, as the user wrote it.
        self._written = [_without(call, _OF_ALL) for call in config.fine_tune]
        self._announced: int | None = None

    def __len__(self) -> int:
        return len(self.all)

    def begins_at(self, step: int) -> bool:
        """Whether a phase but the first begins with ``step``."""
        return step in self._starts

    def start(self, step: int) -> int:
        """The first step of the phase that ``step`` belongs to."""
        return [0, *self._starts][self.of(step)]

    def of(self, step: int) -> int:
        """The phase of a step."""
        return bisect_right(self._starts, step)

    @property
    def periods(self) -> list[int]:
        """Lengths of which a chunk should be a divisor, so that no chunk is cut."""
        return list(self._starts)

    def cut(self, step: int, count: int) -> Iterator[tuple[int, int]]:
        """``count`` steps from ``step`` on, in chunks that lie within one phase each."""
        end = step + count
        for start in [*(s for s in self._starts if step < s < end), end]:
            yield step, start - step
            step = start

    def scaled(self, schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``schedule`` times the factor of each phase."""
        factors = [phase.factor for phase in self.all]
        if all(factor == 1 for factor in factors):
            return schedule

        def learning_rate(step: Any) -> Any:
            factor: Any = np.float32(factors[0])
            for start, then in zip(self._starts, factors[1:], strict=True):
                factor = ops.where(step >= start, np.float32(then), factor)
            return schedule(step) * factor

        return learning_rate

    def announce(self, step: int, freezing: Freezing) -> None:
        """Says in the log what is trained from ``step`` on, if that is another phase than it was last told of.

        Args:
            step: about to be trained.
            freezing: knows the layers of each phase.
        """
        phase = self.of(step)
        if not self._written or phase == self._announced:
            return
        self._announced = phase
        start = self.start(step)
        which = f"phase {phase + 1} of {len(self)} from step {start} on: " if len(self) > 1 else "fine_tune: "
        trained, parameters = freezing.count(phase)
        factor = self.all[phase].factor
        log.info(
            "%s%s%s, %s of %s parameters are trained%s",
            "going on in " if step > start and len(self) > 1 else "",
            which,
            self._written[phase],
            f"{trained:,}",
            f"{parameters:,}",
            f", learning rate × {factor:g}" if factor != 1 else "",
        )


def _without(call: Call, keys: Sequence[str]) -> Call:
    return Call(call.name, {key: value for key, value in call.arguments.items() if key not in keys})
