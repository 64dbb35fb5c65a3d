"""Labels that come with what is predicted: whether they can be the truth of a run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import Feature


def why_no_truth(labels: NDArray[np.generic], like: Feature, classes: int) -> str | None:
    """What is wrong with ``labels``; None if they are such as a run was trained with.

    Args:
        labels: of all examples.
        like: shape and type of a label of the run.
        classes: how many classes the run has.
    """
    if labels.shape[1:] != like.shape:
        return f"each has shape {labels.shape[1:]}, those of the run {like.shape}"
    if labels.dtype.kind not in "biuf":
        return f"they are {labels.dtype}, those of the run {like.dtype}"
    numbers = labels.astype(np.float64)
    if np.dtype(like.dtype).kind == "f":
        return None if np.isfinite(numbers).all() else "some are not finite"
    most = 1 if like.shape else classes - 1
    wrong = ~((numbers >= 0) & (numbers <= most) & (numbers == np.trunc(numbers)))
    if not wrong.any():
        return None
    found = f"there is a {numbers[wrong][0]:g}"
    return f"{found}, and flags are 0 or 1" if like.shape else f"{found}, and the run has {classes} classes"
