"""Groups of weights with settings of their own: the options ``optimizer_groups`` and ``fine_tune``.

``sgd(match='logits/*', learning_rate=0.1)`` is an optimizer for the weights whose names match.
``head(until='30 %'), layers(match='block_16*', factor=0.1)`` are phases: the layers that are trained, and how long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, create_model, model_validator

from modelyard.config.calls import Call
from modelyard.config.durations import RunLength, StepDuration
from modelyard.errors import UserError
from modelyard.registry import OPTIMIZERS, Entry, Options, Registry


def _split(match: Any) -> tuple[str, ...]:
    patterns = tuple(pattern.strip() for pattern in str(match).split("|"))
    if not all(patterns):
        raise ValueError(f"{match!r} has an empty pattern.")
    return patterns


Patterns = Annotated[tuple[str, ...], BeforeValidator(_split)]


# -- optimizer_groups --------------------------------------------------------------------------------------------------


class OptimizerGroup(Options):
    """A group of weights; `read_group` adds the options of its optimizer."""

    match: Patterns = Field(description="names of weights, with * and ?, several separated by |")
    learning_rate: float | None = Field(None, gt=0, description="peak of the group; it follows the same schedule")
    factor: float = Field(1.0, gt=0, description="multiplies the main learning rate, instead of learning_rate")

    @model_validator(mode="after")
    def _check_learning_rate(self) -> OptimizerGroup:
        if {"learning_rate", "factor"} <= self.model_fields_set:
            raise ValueError("learning_rate cannot be combined with factor; give one of them.")
        return self


def read_group(call: Call) -> tuple[Entry, OptimizerGroup]:
    """Reads a group: its optimizer, and its options with those of the optimizer.

    Raises:
        UserError: for an unknown optimizer or wrong arguments.
    """
    entry = OPTIMIZERS.get(call.name)
    schema = create_model("Group", __base__=(OptimizerGroup, entry.options))
    return entry, cast(OptimizerGroup, call.options(OPTIMIZERS, schema))


# -- fine_tune ---------------------------------------------------------------------------------------------------------


class Phase(Options):
    """A part of a run in which some layers are trained and the others are frozen; by default all are trained."""

    until: StepDuration | None = Field(None, description="end of the phase, such as '30 %' or '2 epochs'")
    factor: float = Field(1.0, gt=0, description="multiplies the learning rate during the phase")

    @property
    def patterns(self) -> tuple[str, ...]:
        """Names of the layers or weights that are trained; ``head`` is the last layer."""
        return ("*",)

    @property
    def top(self) -> int | None:
        """The number of last layers that are trained, instead of those that the patterns match."""
        return None


class _Head(Phase):
    @property
    def patterns(self) -> tuple[str, ...]:
        return ("head",)


class _Layers(Phase):
    match: Patterns = Field(description="names of layers or weights, with * and ?, several separated by |; head is one")

    @property
    def patterns(self) -> tuple[str, ...]:
        return self.match


class _Top(Phase):
    layers: int = Field(ge=1, description="number of last layers with weights")

    @property
    def top(self) -> int | None:
        return self.layers


PHASES = Registry("phase")
for _name, _options, _summary in (
    ("all", Phase, "all layers"),
    ("head", _Head, "the last layer with weights"),
    ("layers", _Layers, "layers by name"),
    ("top", _Top, "the last layers"),
):
    PHASES.declare(_name, f"{__name__}:{_options.__name__}", options=_options, summary=_summary)


def read_phases(calls: Sequence[Call]) -> tuple[Phase, ...]:
    """Reads the phases; without any there is one, of all layers.

    Raises:
        UserError: for an unknown phase, wrong arguments, or a phase without an end that is not the last.
    """
    phases = tuple(cast(Phase, call.options(PHASES)) for call in calls or [Call("all")])
    for number, phase in enumerate(phases[:-1], 1):
        if phase.until is None:
            raise UserError(f"phase {number} of {len(phases)} has no end; add one, such as until='30 %'.")
    if phases[-1].until is not None:
        raise UserError(f"the last phase lasts to the end of the run; remove until='{phases[-1].until}'.")
    return phases


def boundaries(phases: Sequence[Phase], run: RunLength) -> list[int]:
    """The steps at which another phase begins.

    Raises:
        UserError: if they are not in order, or not within the run.
    """
    steps = [phase.until.steps(run) for phase in phases if phase.until is not None]
    for before, after in zip([0, *steps], [*steps, run.total_steps], strict=True):
        if after <= before:
            raise UserError(
                f"fine_tune: phases must follow one another within the run of {run.total_steps} steps, and they end at "
                f"{', '.join(map(str, steps))}."
            )
    return steps
