"""Successive halving: a trial pauses at rungs, and only the best of a rung are trained further.

It is asynchronous: nothing waits until a rung is full. A trial that is among the best ``1/factor`` of those that have
come to its rung is resumed at its checkpoint. Several brackets with later first rungs are Hyperband.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from modelyard.config import Config
from modelyard.config.durations import Duration
from modelyard.tuning.objectives import ranked

_MOST_RUNGS = 20
_DIGITS = 10**12
"""Rungs are given to runs as decimal numbers, rounded down: a third of 2,700 steps must not become 901."""


@dataclass(frozen=True)
class Halving:
    """The rungs of a search.

    Args:
        factor: of each rung, one trial in so many is trained further, and so many times as long.
        first: where the first rung is, as the user wrote it; empty for ``1/factor³`` of a run.
        brackets: the number of brackets; in each, the first rung is ``factor`` times as late as in the one before.
    """

    factor: int
    first: str = ""
    brackets: int = 1

    @cached_property
    def first_rung(self) -> Duration:
        """The first rung of the first bracket.

        Raises:
            ValueError: if it is none.
        """
        text = self.first.strip() or f"1/{self.factor**3}"
        top, slash, bottom = text.partition("/")
        if slash:
            if not (top.strip().isdecimal() and bottom.strip().isdecimal() and 0 < int(top) < int(bottom)):
                raise ValueError(f"{text!r} is not a part of a run, such as 1/27.")
            return Duration(Fraction(100 * int(top), int(bottom)), "percent")
        duration = Duration.parse(text)
        if duration.seconds is not None or (duration.unit == "percent" and duration.value >= 100):
            raise ValueError(f"must be a part of a run such as 1/27, or '100 steps' or '2 epochs'; got {text!r}.")
        return duration

    @cached_property
    def _pattern(self) -> list[int]:
        """The brackets of consecutive trials: as many of each as in Hyperband, spread evenly."""
        last = self.brackets - 1
        weights = [
            math.ceil(Fraction(self.brackets, last - at + 1) * self.factor ** (last - at)) for at in range(last + 1)
        ]
        found, credit = [], [0] * self.brackets
        for _ in range(sum(weights)):
            credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
            chosen = max(range(self.brackets), key=lambda at: (credit[at], -at))
            credit[chosen] -= sum(weights)
            found.append(chosen)
        return found

    def bracket(self, number: int) -> int:
        """Returns the bracket of a trial."""
        return self._pattern[number % len(self._pattern)]

    def rungs(self, config: Config, number: int) -> list[Duration]:
        """Returns where a trial pauses, in order. Those after the end of its run are never reached.

        A rung is rounded up to the next evaluation, if both are given in the same unit or as parts of the run.
        """
        length = Duration(Fraction(config.train_steps or 0), "steps")
        if config.train_steps is None:
            length = Duration(Fraction(repr(config.train_epochs)), "epochs")
        every = config.eval_every or Duration(Fraction(repr(config.epochs_between_evals)), "epochs")
        every, bracket = _in_unit(every, length), self.bracket(number)
        found: list[Duration] = []
        for at in range(bracket, bracket + _MOST_RUNGS):
            first = self.first_rung
            rung = _in_unit(Duration(first.value * self.factor**at, first.unit), length)
            value = rung.value
            if every.unit == rung.unit:
                value = math.ceil(value / every.value) * every.value
            value = Fraction(math.ceil(value)) if rung.unit == "steps" else Fraction(int(value * _DIGITS), _DIGITS)
            if rung.unit == length.unit and value >= length.value:
                break
            if value > 0 and (not found or value > found[-1].value):
                found.append(Duration(value, rung.unit))
        return found


def _in_unit(duration: Duration, length: Duration) -> Duration:
    """Returns a percentage of a run in the unit of its length; other durations as they are."""
    if duration.unit != "percent":
        return duration
    return Duration(duration.value * length.value / 100, length.unit)


@dataclass(frozen=True)
class Standing:
    """How far a trial has come.

    Args:
        bracket: its bracket.
        scores: its keys at the rungs that it has reached, lower is better.
        waits: whether it is paused at the last of them and may go on.
    """

    bracket: int
    scores: Sequence[Sequence[float]]
    waits: bool


def next_promotion(standings: Mapping[int, Standing], factor: int, without_place: bool = False) -> int | None:
    """Returns the trial to resume: of the highest rung that has one, the best that is in the top ``1/factor``.

    Args:
        standings: all trials by their numbers.
        factor: the reduction factor.
        without_place: whether the best that waits may go on, even if it is not in the top ``1/factor``.
    """
    reached = {(one.bracket + at, one.bracket) for one in standings.values() for at in range(len(one.scores))}
    for level, bracket in sorted(reached, reverse=True):
        at = level - bracket
        keys = {
            number: one.scores[at]
            for number, one in standings.items()
            if one.bracket == bracket and len(one.scores) > at
        }
        for number in ranked(keys)[: None if without_place else len(keys) // factor]:
            one = standings[number]
            if one.waits and len(one.scores) == at + 1 and all(map(math.isfinite, one.scores[at])):
                return number
    return None
