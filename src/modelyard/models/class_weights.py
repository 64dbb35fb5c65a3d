"""The option class_weights as people write it; what it means is in `class_loss.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from modelyard.config.calls import parse_list

BALANCED = "balanced"


def parse_weights(value: Any) -> str | dict[str, float] | tuple[float, ...] | None:
    """ "balanced"; weights by name, as a mapping or as "cat=2,dog=0.5"; or a weight for each class."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
        return None
    if isinstance(value, str) and value.strip().lower() == BALANCED:
        return BALANCED
    if isinstance(value, Mapping):
        found: Any = {str(name): _weight(weight) for name, weight in value.items()}
    else:
        parts = parse_list(value)
        named = [str(part).rpartition("=") for part in parts if isinstance(part, str) and "=" in part]
        if named and len(named) < len(parts):
            raise ValueError(f"mixes weights with and without a name, got {value!r}. Write 'cat=2,dog=0.5'.")
        names = [name.strip() for name, _, _ in named]
        if len(set(names)) < len(names):
            raise ValueError(f"names {max(names, key=names.count)!r} twice.")
        found = {name.strip(): _weight(w) for name, _, w in named} if named else tuple(map(_weight, parts))
    if not found:
        raise ValueError("is empty. Write balanced, 'cat=2,dog=0.5', or a weight for each class.")
    return found  # type: ignore[no-any-return]


def _weight(value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if isinstance(value, bool) or not 0 <= weight < math.inf:
        raise ValueError(f"{value!r} is no weight. Write balanced, 'cat=2,dog=0.5', or a weight for each class.")
    return weight


ClassWeights = Annotated[
    str | dict[str, float] | tuple[float, ...] | None,
    PlainValidator(parse_weights),
    PlainSerializer(lambda value: list(value) if isinstance(value, tuple) else value),
]
"""A field that holds them."""
