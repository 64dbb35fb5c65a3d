"""What every reader gives: arrays by name, and what else a file knows about where they belong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray


class NamedWeights(dict[str, NDArray[Any]]):
    """The weights of a file by name: ``conv1/kernel``, or ``conv1/0`` where a file has only their numbers.

    Args:
        weights: arrays by name.
        numbered: for some names, the layer and the number of the weight in it: ``conv1/0``.
        places: for some names, where Keras 3 keeps the weight: ``layers/conv2d/vars/0``.
        order: for some names, the place of the layer among those with weights, and the attribute: ``((2,), "kernel")``.
    """

    def __init__(
        self,
        weights: Mapping[str, NDArray[Any]],
        *,
        numbered: Mapping[str, str] | None = None,
        places: Mapping[str, str] | None = None,
        order: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
    ) -> None:
        super().__init__(weights)
        self.numbered = dict(numbered or {})
        self.places = dict(places or {})
        self.order = dict(order or {})
