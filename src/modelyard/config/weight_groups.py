"""Groups of weights with settings of their own: the options ``optimizer_groups`` and ``fine_tune``.

``sgd(match='logits/*', learning_rate=0.1)`` is an optimizer for the weights whose names match.
``head(until='30 %'), layers(match='block_16*', factor=0.1)`` are phases: the layers that are trained, and how long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import Field, create_model

from modelyard.config.calls import Call
from modelyard.config.durations import Duration, RunLength, StepDuration
from modelyard.errors import UserError
from modelyard.registry import OPTIMIZERS, Entry, Options, Registry

# -- optimizer_groups --------------------------------------------------------------------------------------------------


class GroupOptions(Options):
    """Options of a group besides those of its optimizer."""

    match: str = Field(description="names of weights, with * and ?, several separated by |")
    learning_rate: float | None = Field(None, gt=0, description="peak of the group; it follows the same schedule")
    factor: float = Field(1.0, gt=0, description="multiplies the main learning rate, instead of learning_rate")


@dataclass(frozen=True)
class OptimizerGroup:
    """A group of weights with its optimizer.

    Args:
        patterns: patterns of the names of its weights.
        learning_rate: its own peak learning rate, or None.
        factor: multiplies the main learning rate if it has none of its own.
        entry: its optimizer.
        options: the options of its optimizer.
    """

    patterns: tuple[str, ...]
    learning_rate: float | None
    factor: float
    entry: Entry
    options: Options


def read_group(call: Call) -> OptimizerGroup:
    """Reads a group.

    Raises:
        UserError: for an unknown optimizer or wrong arguments.
    """
    entry = OPTIMIZERS.get(call.name)
    schema = create_model("Group", __base__=(GroupOptions, entry.options))
    group = cast(GroupOptions, call.options(OPTIMIZERS, schema))
    if {"learning_rate", "factor"} <= set(call.arguments):
        raise UserError(f"optimizer {call.name!r}: learning_rate cannot be combined with factor; give one of them.")
    own = {key: value for key, value in call.arguments.items() if key not in GroupOptions.model_fields}
    patterns = _patterns(f"optimizer {call.name!r}", group.match)
    return OptimizerGroup(patterns, group.learning_rate, group.factor, entry, entry.options(**own))


def _patterns(owner: str, match: str) -> tuple[str, ...]:
    patterns = tuple(pattern.strip() for pattern in match.split("|"))
    if not all(patterns):
        raise UserError(f"{owner}: match {match!r} has an empty pattern.")
    return patterns


# -- fine_tune ---------------------------------------------------------------------------------------------------------


class PhaseOptions(Options):
    """Options of every phase."""

    until: StepDuration | None = Field(None, description="end of the phase, such as '30 %' or '2 epochs'")
    factor: float = Field(1.0, gt=0, description="multiplies the learning rate during the phase")


class LayersOptions(PhaseOptions):
    """Layers by name."""

    match: str = Field(description="names of layers or weights, with * and ?, several separated by |; head is one")


class TopOptions(PhaseOptions):
    """The last layers."""

    layers: int = Field(ge=1, description="number of last layers with weights")


@dataclass(frozen=True)
class Phase:
    """A part of a run in which some layers are trained and the others are frozen.

    Args:
        patterns: patterns of the names of the trained layers or weights; ``head`` is the last layer.
        top: the number of last layers to train instead; None to use the patterns.
        until: the end; None for the last phase.
        factor: multiplies the learning rate.
    """

    patterns: tuple[str, ...] = ("*",)
    top: int | None = None
    until: Duration | None = None
    factor: float = 1.0


PHASES = Registry("phase")
for _name, _options, _summary in (
    ("all", PhaseOptions, "all layers"),
    ("head", PhaseOptions, "the last layer with weights"),
    ("layers", LayersOptions, "layers by name"),
    ("top", TopOptions, "the last layers"),
):
    PHASES.declare(_name, f"{__name__}:Phase", options=_options, summary=_summary)


def read_phases(calls: Sequence[Call]) -> tuple[Phase, ...]:
    """Reads the phases; without any there is one, of all layers.

    Raises:
        UserError: for an unknown phase, wrong arguments, or a phase without an end that is not the last.
    """
    phases = tuple(_read_phase(call) for call in calls) or (Phase(),)
    for number, phase in enumerate(phases[:-1], 1):
        if phase.until is None:
            raise UserError(f"phase {number} of {len(phases)} has no end; add one, such as until='30 %'.")
    if phases[-1].until is not None:
        raise UserError(f"the last phase lasts to the end of the run; remove until='{phases[-1].until}'.")
    return phases


def _read_phase(call: Call) -> Phase:
    options = cast(PhaseOptions, call.options(PHASES))
    patterns: tuple[str, ...] = ("*",) if call.name == "all" else ("head",)
    if isinstance(options, LayersOptions):
        patterns = _patterns("phase 'layers'", options.match)
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
