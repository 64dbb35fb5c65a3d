"""The objectives of a search: one metric or several, their directions, and constraints.

A metric is one of the evaluations on validation, or a cost that the run folder knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from modelyard.errors import UserError, unknown
from modelyard.loop.metric_hooks import Ranking

AUTO = "auto"
COSTS = {"parameters": "min", "flops": "min", "seconds": "min", "ms_per_example": "min", "images_per_second": "max"}
"""Costs that are recorded in a run folder besides the evaluations, and their directions."""
_CONSTRAINT = re.compile(r"\s*([\w.@-]+)\s*(<=|>=|<|>)\s*([-+\w.]+)\s*")


def parse_metrics(text: str) -> tuple[str, ...]:
    """Parses ``accuracy, parameters``.

    Raises:
        ValueError: if there is none, one is twice, or all are costs.
    """
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"must be names separated by commas, such as 'accuracy, parameters'; got {text!r}.")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names {name!r} twice.")
    if all(name in COSTS for name in names):
        raise ValueError(f"has costs only: {', '.join(names)}. Add a metric of the evaluations, such as accuracy.")
    return names


@dataclass(frozen=True)
class Constraint:
    """A limit of a metric or a cost, such as ``parameters <= 100000``."""

    name: str
    limit: float
    is_upper: bool

    def violation(self, values: Mapping[str, float]) -> float:
        """Returns by how much a trial violates it, in parts of the limit; 0 or less if it does not."""
        value = values.get(self.name)
        if value is None or math.isnan(value):
            return math.inf
        above = value - self.limit if self.is_upper else self.limit - value
        return above / (abs(self.limit) or 1.0)

    def __str__(self) -> str:
        return f"{self.name}{'<=' if self.is_upper else '>='}{self.limit:.12g}"


def parse_constraints(text: str) -> tuple[Constraint, ...]:
    """Parses ``parameters<=100000, accuracy>=0.9``; empty text has none.

    Raises:
        ValueError: if it is none.
    """
    found = []
    for part in text.split(",") if text.strip() else ():
        match = _CONSTRAINT.fullmatch(part)
        try:
            limit = float(match[3]) if match else math.nan
        except ValueError:
            limit = math.nan
        if match is None or not math.isfinite(limit):
            raise ValueError(f"{part.strip()!r} is not a limit such as 'parameters<=100000' or 'accuracy>=0.9'.")
        found.append(Constraint(match[1], limit, match[2][0] == "<"))
    return tuple(found)


def choose_rankings(
    metrics: Sequence[str], constraints: Iterable[Constraint], values: Mapping[str, float], modes: Mapping[str, str]
) -> tuple[Ranking, ...]:
    """Returns the metrics with their directions, once a trial has shown which there are.

    Args:
        metrics: the names; ``auto`` is accuracy, or the loss if there is none.
        constraints: limits, whose metrics must exist, too.
        values: what a trial measures.
        modes: what is better of the metrics that say so.

    Raises:
        UserError: if no trial measures one of them.
    """
    known = list(dict.fromkeys((*values, *COSTS)))
    for option, names in (("metric", metrics), ("constraint", [one.name for one in constraints])):
        for name in names:
            if name != AUTO and name not in known:
                raise UserError(
                    f"{option}: {unknown('metric', name, known)} The trials are kept: run the same command with "
                    f"another --{option}. Other metrics need --metrics, in another --output."
                )
    return tuple(
        Ranking(name, COSTS[name]) if name in COSTS else Ranking.choose(name, AUTO, values, modes) for name in metrics
    )


def front_numbers(keys: Sequence[Sequence[float]]) -> list[int]:
    """Returns the front of each point: 0 if no other is better in one value and as good in all, and so on.

    Args:
        keys: the values of each point; lower is better.
    """
    numbers = [-1] * len(keys)
    left, front = set(range(len(keys))), 0
    while left:
        best = {i for i in left if not any(_dominates(keys[j], keys[i]) for j in left)}
        for i in best:
            numbers[i] = front
        left, front = left - best, front + 1
    return numbers


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(a < b for a, b in zip(one, other, strict=True))


def ranked(keys: Mapping[int, Sequence[float]]) -> list[int]:
    """Returns numbers of trials, the best first: by their front, then by the first metric, then the earlier.

    Args:
        keys: for each trial, its values; lower is better.
    """
    if all(len(key) == 1 for key in keys.values()):
        return sorted(keys, key=lambda number: (keys[number][0], number))
    numbers = list(keys)
    fronts = dict(zip(numbers, front_numbers([keys[number] for number in numbers]), strict=True))
    return sorted(numbers, key=lambda number: (fronts[number], keys[number][0], number))
