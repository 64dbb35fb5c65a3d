"""Why a file of weights is not that of a network, in words."""

from __future__ import annotations

import keras

from modelyard.models.places import places
from modelyard.run.weights.match import by_shape
from modelyard.run.weights.named import NamedWeights
from modelyard.run.weights.views import View, by_name


def misfit(weights: NamedWeights, model: keras.Model) -> str | None:
    """What differs between a file and a network, with an example; None if all weights are there in their shapes.

    Args:
        weights: those of the file.
        model: the network.
    """
    mine = {v.path: v for v in model.variables}
    expected = {name: tuple(v.shape) for name, v in mine.items()}
    view = _view(weights, model)
    wrong = [name for name in expected if name in view and weights[view[name]].shape != expected[name]]
    if wrong:
        name = wrong[0]
        there, here = by_shape(weights[view[name]].shape), by_shape(expected[name])
        rest = f"{len(wrong)} of {len(expected)} weights have another shape"
        return f"{name} is {there} in the file and {here} in the network; {rest}"
    missing = [name for name in expected if name not in view]
    if missing:
        name, count = missing[0], len(missing)
        there = next((f", which begins with {n} ({by_shape(a.shape)})" for n, a in weights.items()), "")
        return f"{count} of {len(expected)} weights are not in the file{there}: {name} ({by_shape(expected[name])}), …"
    return None


def _view(weights: NamedWeights, model: keras.Model) -> View:
    """The network's weights to the file's: by name, or by place where the file has other names or none."""
    mine = {v.path: v for v in model.variables}
    expected = {name: tuple(v.shape) for name, v in mine.items()}
    named = max(by_name({n: n for n in weights}, expected), by_name(weights.numbered, expected), key=len)
    if 2 * len(named) >= len(expected) or not weights.places:
        return named
    there = {place: name for name, place in weights.places.items()}
    return {name: there[place] for place, name in places(model, mine).items() if place in there}
