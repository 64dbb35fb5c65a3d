"""Durations with units: "3 epochs", "500 steps", "10 min", "50 %"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator

_UNITS = {
    "steps": "step steps",
    "epochs": "epoch epochs",
    "examples": "example examples",
    "percent": "% percent",
    "seconds": "s sec secs second seconds",
    "minutes": "min mins minute minutes",
    "hours": "h hour hours",
}
_UNIT_OF = {word: unit for unit, words in _UNITS.items() for word in words.split()}
# Commas only separate thousands: "1,5 epochs" must not become 15.
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?"
_IN_SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
_SHOWN = {"percent": "%", "seconds": "s", "minutes": "min", "hours": "h"}


@dataclass(frozen=True)
class RunLength:
    """The lengths that convert durations to steps."""

    examples: int
    batch_size: int
    total_steps: int

    @property
    def steps_per_epoch(self) -> Fraction:
        """Steps per epoch; not always a whole number, since batches cross the ends of epochs."""
        return Fraction(self.examples, self.batch_size)


@dataclass(frozen=True)
class Duration:
    """A length of training, in steps, epochs, examples, percent of the run, or wall-clock time."""

    value: Fraction
    unit: str

    @classmethod
    def parse(cls, text: object) -> Duration:
        """Parses "3 epochs"; a number without a unit counts steps.

        Example:
            >>> Duration.parse("10 min").seconds
            600.0
        """
        if isinstance(text, Duration):
            return text
        match = re.fullmatch(rf"({_NUMBER})\s*([a-z%]*)", str(text).strip().lower())
        unit = _UNIT_OF.get(match[2] or "steps") if match else None
        if match is None or unit is None:
            raise ValueError(
                f"{text!r} is not a duration. Write a number and a unit: '500 steps', '3 epochs', '10 min', '50 %'."
            )
        value = Fraction(match[1].replace("_", "").replace(",", ""))
        if value <= 0:
            raise ValueError(f"a duration must be greater than zero, got {text!r}.")
        if unit == "steps" and value.denominator != 1:
            share = f"{float(value) * 100:g}" if value < 1 else "50"
            raise ValueError(
                f"must be a whole number of steps, got {text!r}. A part of the run is '{share} %', of an epoch "
                f"'{match[1]} epochs'."
            )
        return cls(value, unit)

    @property
    def seconds(self) -> float | None:
        """The length in seconds. None if it is not wall-clock time."""
        factor = _IN_SECONDS.get(self.unit)
        return None if factor is None else float(self.value) * factor

    def period(self, run: RunLength) -> Fraction:
        """The exact length in steps of ``run``, so that many periods do not accumulate rounding errors."""
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
        numerator, denominator = self.value.as_integer_ratio()
        number = str(numerator) if denominator == 1 else f"{Decimal(numerator) / denominator:f}"
        return f"{number} {_SHOWN.get(self.unit, self.unit)}"


class InSteps:
    """A cadence that fires at each step that completes a period."""

    def __init__(self, period: Fraction) -> None:
        self.period = max(period, Fraction(1))

    def next_after(self, step: int) -> int:
        """The first step after ``step`` that completes a period."""
        turn = math.floor(step / self.period)
        while math.ceil(turn * self.period) <= step:
            turn += 1
        return math.ceil(turn * self.period)

    def fires_at(self, step: int) -> bool:
        """Whether ``step`` completes a period."""
        return step > 0 and self.next_after(step - 1) == step


def _parse_step_duration(value: object) -> Duration:
    duration = Duration.parse(value)
    if duration.seconds is not None:
        raise ValueError(f"'{duration}' is wall-clock time; give steps, epochs, examples or percent of the run.")
    return duration


AUTO = "auto"


def _parse_cadence(value: object) -> Duration | None:
    if value is None or str(value).strip().lower() == AUTO:
        return None
    try:
        return Duration.parse(value)
    except ValueError as error:
        raise ValueError(f"{error} Or {AUTO}.") from error


DurationOrAuto = Annotated[
    Duration | None,
    PlainValidator(_parse_cadence),
    PlainSerializer(lambda value: AUTO if value is None else str(value)),
]
"""The type of a config field that holds a duration, or None for auto."""
StepDuration = Annotated[Duration, PlainValidator(_parse_step_duration), PlainSerializer(str)]
"""The same without wall-clock time, which would change the result of training."""
