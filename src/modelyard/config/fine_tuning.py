"""Which layers are trained, and when: ``head(until='30 %'), layers(match='block_16*', factor=0.1)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from modelyard.config.calls import Call
from modelyard.config.durations import Duration, RunLength, StepDuration
from modelyard.errors import UserError
from modelyard.registry import Options, Registry


class PhaseOptions(Options):
    """What every phase has."""

    until: StepDuration | None = Field(None, description="where the next phase begins, such as '30 %' or '2 epochs'")
    factor: float = Field(1.0, gt=0, description="what the learning rate is multiplied by meanwhile")


class LayersOptions(PhaseOptions):
    """Layers by name."""

    match: str = Field(description="names of layers or weights, with * and ?, several separated by |; head is one")


class TopOptions(PhaseOptions):
    """The last layers."""

    layers: int = Field(ge=1, description="how many of the last layers with weights")


PHASES = Registry("phase")
_WHERE = "modelyard.config.fine_tuning:Phase"
PHASES.declare("all", _WHERE, options=PhaseOptions, summary="all layers")
PHASES.declare("head", _WHERE, options=PhaseOptions, summary="the last layer with weights")
PHASES.declare("layers", _WHERE, options=LayersOptions, summary="layers by name")
PHASES.declare("top", _WHERE, options=TopOptions, summary="the last layers")


@dataclass(frozen=True)
class Phase:
    """A part of a run in which some layers are trained and the others stay as they are.

    Args:
        patterns: what the names of the trained layers or weights look like; ``head`` stands for the last layer.
        top: or how many of the last layers; None for those that patterns name.
        until: where it ends; None for the last one.
        factor: what the learning rate is multiplied by.
    """

    patterns: tuple[str, ...]
    top: int | None
    until: Duration | None
    factor: float


ALL = Phase(("*",), None, None, 1.0)


def read_phases(calls: Sequence[Call]) -> tuple[Phase, ...]:
    """The phases that ``calls`` describe; one of all layers if there are none.

    Raises:
        UserError: if one is unknown, takes other arguments, or has no end and is not the last.
    """
    phases = tuple(_read(call) for call in calls) or (ALL,)
    for number, phase in enumerate(phases, 1):
        if number < len(phases) and phase.until is None:
            raise UserError(f"phase {number} of {len(phases)} has no end; say until='30 %' or the like.")
    if phases[-1].until is not None:
        raise UserError(f"the last phase lasts to the end of the run; leave out until='{phases[-1].until}'.")
    return phases


def _read(call: Call) -> Phase:
    options = call.options(PHASES)
    assert isinstance(options, PhaseOptions)
    patterns: tuple[str, ...] = ("*",) if call.name == "all" else ("head",)
    if isinstance(options, LayersOptions):
        patterns = tuple(pattern.strip() for pattern in options.match.split("|"))
        if not all(patterns):
            raise UserError(f"phase 'layers': match {options.match!r} has an empty pattern.")
    top = options.layers if isinstance(options, TopOptions) else None
    return Phase(patterns, top, options.until, options.factor)


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
