"""Groups of weights with an optimizer of their own: ``sgd(match='logits/*', learning_rate=0.1, momentum=0.85)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from pydantic import Field, create_model

from modelyard.config.calls import Call
from modelyard.errors import UserError
from modelyard.registry import OPTIMIZERS, Entry, Options


class GroupOptions(Options):
    """What a group has besides the options of its optimizer."""

    match: str = Field(description="names of weights, with * and ?, several separated by |")
    learning_rate: float | None = Field(None, gt=0, description="the group's own peak; it follows the same schedule")
    factor: float = Field(1.0, gt=0, description="or what the main learning rate is multiplied by")


@dataclass(frozen=True)
class OptimizerGroup:
    """A group, checked.

    Args:
        patterns: what the names of its weights look like.
        learning_rate: its own peak learning rate, or None.
        factor: what the main learning rate is multiplied by otherwise.
        entry: its optimizer.
        options: the options of its optimizer.
    """

    patterns: tuple[str, ...]
    learning_rate: float | None
    factor: float
    entry: Entry
    options: Options


def read_group(call: Call) -> OptimizerGroup:
    """The group that ``call`` describes.

    Raises:
        UserError: if there is no such optimizer, or it takes other arguments.
    """
    entry = OPTIMIZERS.get(call.name)
    schema = create_model("Group", __base__=(GroupOptions, entry.options))
    group = cast(GroupOptions, call.checked(entry, schema))
    patterns = tuple(pattern.strip() for pattern in group.match.split("|"))
    if not all(patterns):
        raise UserError(f"optimizer {call.name!r}: match {group.match!r} has an empty pattern.")
    if {"learning_rate", "factor"} <= set(call.arguments):
        raise UserError(f"optimizer {call.name!r}: learning_rate stands beside factor; give one of the two.")
    own = {key: value for key, value in call.arguments.items() if key not in GroupOptions.model_fields}
    return OptimizerGroup(patterns, group.learning_rate, group.factor, entry, entry.options(**own))
