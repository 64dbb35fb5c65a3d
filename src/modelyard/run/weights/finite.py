"""Weights to begin with must be numbers: with others a run fails at its first step, and blames the learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.errors import CheckpointError


def check_finite(weights: Mapping[str, NDArray[Any]], shown: str, hint: str) -> None:
    """Refuses weights that hold NaN or infinity.

    Args:
        weights: arrays by name.
        shown: where they are from.
        hint: what to do about it.

    Raises:
        CheckpointError: naming the first of them, and how many of its values are not finite.
    """
    found = {name: int(np.sum(~np.isfinite(array))) for name, array in weights.items() if array.dtype.kind not in "iub"}
    bad = {name: count for name, count in found.items() if count}
    if bad:
        name, count = next(iter(bad.items()))
        more = f", and so {'do' if len(bad) > 2 else 'does'} {len(bad) - 1} more" if len(bad) > 1 else ""
        raise CheckpointError(
            f"{shown}: {name} holds {count:,} values of {weights[name].size:,} that are not finite (NaN or infinity)"
            f"{more}. {hint}"
        )
