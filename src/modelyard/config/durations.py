"""Durations as people write them: "3 epochs", "500 steps", "10 min", "50 %"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

_UNITS = {
    "steps": ("step", "steps"),
    "epochs": ("epoch", "epochs"),
    "examples": ("example", "examples"),
    "percent": ("%", "percent"),
    "seconds": ("s", "sec", "secs", "second", "seconds"),
    "minutes": ("min", "mins", "minute", "minutes"),
    "hours": ("h", "hour", "hours"),
}
_UNIT_OF = {word: unit for unit, words in _UNITS.items() for word in words}
# A comma only before thousands: "1,5 epochs" must not become 15.
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?"
_IN_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
_SHOWN = {"percent": "%", "seconds": "s", "minutes": "min", "hours": "h"}


@dataclass(frozen=True)
class RunLength:
    """The lengths a duration is measured against."""

    examples: int
    batch_size: int
    total_steps: int

    @property
    def steps_per_epoch(self) -> Fraction:
        """How many steps an epoch takes; not always a whole number, since batches cross the ends of epochs."""
        return Fraction(self.examples, self.batch_size)


@dataclass(frozen=True)
class Duration:
    """A length of training, in steps, epochs, examples, percent of the run, or wall-clock time."""

    value: Fraction
    unit: str

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Reads "3 epochs"; a bare number counts steps.

        Example:
            >>> Duration.parse("10 min").seconds
            600.0
        """
        if isinstance(text, Duration):
            return text
        match = re.fullmatch(rf"\s*({_NUMBER})\s*([a-z%]*)\s*", str(text).lower())
        unit = _UNIT_OF.get(match[2] or "steps") if match else None
        if match is None or unit is None:
            raise ValueError(
                f"{text!r} is not a duration. Write a number and a unit: '500 steps', '3 epochs', '10 min', '50 %'."
            )
        value = Fraction(match[1].replace("_", "").replace(",", ""))
        if value <= 0:
            raise ValueError(f"a duration must be more than zero, got {text!r}.")
        if unit == "steps" and value.denominator != 1:
            raise ValueError(f"steps come in whole numbers, got {text!r}.")
        return cls(value, unit)

    @property
    def seconds(self) -> float | None:
        """The length in seconds, or None if it is not measured by the clock."""
        factor = _IN_SECONDS.get(self.unit)
        return None if factor is None else float(self.value) * factor

    def period(self, run: RunLength) -> Fraction:
        """The length in steps of ``run``; a fraction, so that the 7th epoch ends where seven epochs end."""
        if self.unit == "steps":
            return self.value
        if self.unit == "epochs":
            return self.value * run.steps_per_epoch
        if self.unit == "examples":
            return self.value / run.batch_size
        if self.unit == "percent":
            return self.value * run.total_steps / 100
        raise ValueError(f"{self} is wall-clock time and has no length in steps.")

    def steps(self, run: RunLength) -> int:
        """The length in whole steps of ``run``, rounded up."""
        return math.ceil(self.period(run))

    def __str__(self) -> str:
        over, under = self.value.numerator, self.value.denominator
        number = str(over) if under == 1 else f"{Decimal(over) / Decimal(under):f}"
        return f"{number} {_SHOWN.get(self.unit, self.unit)}"


class InSteps:
    """A cadence that fires at the steps where another full period has passed."""

    def __init__(self, period: Fraction) -> None:
        self.period = max(period, Fraction(1))

    def next_after(self, step: int) -> int:
        """The first firing step after ``step``."""
        turn = math.floor(step / self.period)
        while math.ceil(turn * self.period) <= step:
            turn += 1
        return math.ceil(turn * self.period)

    def fires_at(self, step: int) -> bool:
        """Whether ``step`` ends a period."""
        return step > 0 and self.next_after(step - 1) == step


def parse_duration(value: Any) -> Duration:
    """For fields of the config."""
    return Duration.parse(value)


DurationField = Annotated[Duration, PlainValidator(parse_duration), PlainSerializer(str)]
"""A config field that holds a duration."""
StepDuration = Annotated[
    Duration,
    PlainValidator(lambda value: _not_wall_clock(Duration.parse(value))),
    PlainSerializer(str),
]
"""The same, where wall-clock time would change the training itself and is refused."""


def _not_wall_clock(duration: Duration) -> Duration:
    if duration.seconds is not None:
        raise ValueError(f"'{duration}' is wall-clock time; give steps, epochs, examples or percent of the run.")
    return duration
