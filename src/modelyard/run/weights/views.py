"""Ways to see the names of a file as names of a model. Each gives a view: names of the model to names of the file."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

Shape = tuple[int, ...]
View = dict[str, str]

# What a weight is called elsewhere: Keras 2, TF-Slim.
_ALIASES = {"depthwise_kernel": "kernel", "weights": "kernel", "biases": "bias", "depthwise_weights": "kernel"}
_INSIDE_ANOTHER = 1000


def hits(view: View, expected: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> int:
    """How many weights of the model a view gives in the right shape."""
    return sum(expected[name] == shapes[source] for name, source in view.items())


def by_name(names: Mapping[str, str], expected: Mapping[str, Shape]) -> View:
    """By the layer's name and the weight's name, or its number in the layer. One of the two may be inside of another
    model, whose name stands in front: ``backbone/conv1/kernel``.

    Args:
        names: names of the file to the names that stand for them.
        expected: names and shapes of the model, in its order.
    """
    members = _by_layer(expected)
    inside = defaultdict(list)
    for layer in members:
        for tail in _tails(layer):
            inside[tail].append(layer)
    # Numbers mean the same only in layers with equally many weights: batch norm's first may be gamma or beta.
    numbered = Counter(layer for layer, leaf in map(_split, names.values()) if leaf.isdecimal())
    claims: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for source, name in names.items():
        layer, leaf = _split(name)
        for cost, found in _candidates(layer, members, inside):
            target = _member(leaf, members[found], numbered[layer])
            if target is not None:
                claims[target].append((cost, source))
                break
    view = {}
    for target, claimed in claims.items():
        cost, source = min(claimed)
        if sum(other == cost for other, _ in claimed) == 1:  # else nobody can tell which is meant
            view[target] = source
    return view


def by_place(
    places: Mapping[str, str],
    model_places: Mapping[str, str],
    expected: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
) -> View:
    """By where Keras 3 keeps a weight, as in ``layers/conv2d_1/vars/0``: its layer is the second of its class.

    Args:
        places: names of the file to their places.
        model_places: places to names of the model.
        expected, shapes: the shapes of the model and of the file.
    """
    views = []
    for prefix in ["", *_containers(places.values())]:
        here = {_outside(place, prefix): source for source, place in places.items()}
        views.append(_fitting(here, dict(model_places), expected, shapes))
    for prefix in _containers(model_places):
        there = {_outside(place, prefix): name for place, name in model_places.items()}
        views.append(_fitting({place: source for source, place in places.items()}, there, expected, shapes))
    return max(views, key=lambda view: hits(view, expected, shapes))


def by_order(
    order: Mapping[str, tuple[tuple[int, ...], str]], expected: Mapping[str, Shape], shapes: Mapping[str, Shape]
) -> View:
    """By the order of the layers with weights, if all layers agree but for the last: else one might pass for another.

    Args:
        order: names of the file to the number of their layer and their attribute.
        expected, shapes: the shapes of the model and of the file.
    """
    ordered = sorted(order.items(), key=lambda item: item[1][0])
    given = [{leaf: name for name, (_, leaf) in group} for _, group in groupby(ordered, key=lambda item: item[1][0])]
    wanted = [{_split(name)[1]: name for name in names} for names in _by_layer(expected).values()]
    # Models of ours begin with a layer that standardises, which others need not have.
    views = [_aligned(given, wanted[skip:], expected, shapes) for skip in (0, 1)]
    return max(views, key=lambda view: hits(view, expected, shapes))


def _aligned(
    given: list[dict[str, str]],
    wanted: list[dict[str, str]],
    expected: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
) -> View:
    view: View = {}
    shorter = min(len(given), len(wanted))
    for number, (here, there) in enumerate(zip(given, wanted, strict=False), 1):
        here = {leaf if leaf in there else _ALIASES.get(leaf, leaf): source for leaf, source in here.items()}
        same = here.keys() == there.keys()
        fits = same and all(shapes[here[leaf]] == expected[there[leaf]] for leaf in here)
        if not fits and number < shorter:
            return {}
        if same:
            view.update({there[leaf]: here[leaf] for leaf in here})
    return view


def _fitting(
    here: dict[str, str], there: dict[str, str], expected: Mapping[str, Shape], shapes: Mapping[str, Shape]
) -> View:
    """What is at the same places, if all layers agree but for one (the last, with other classes)."""
    sizes, model_sizes = (Counter(_split(place)[0] for place in side) for side in (here, there))
    view: View = {}
    misfits = set()
    for place in here.keys() & there.keys():
        layer = _split(place)[0]
        same = sizes[layer] == model_sizes[layer]
        if same:
            view[there[place]] = here[place]
        if not same or shapes[here[place]] != expected[there[place]]:
            misfits.add(layer)
    return view if len(misfits) <= 1 else {}


def _containers(places: Iterable[str]) -> list[str]:
    """Where models inside of the model are kept: ``layers/functional/``."""
    found: dict[str, None] = {}
    for place in places:
        parts = place.split("/")
        for at in range(2, len(parts)):
            if parts[at] == "layers":
                found["/".join(parts[:at]) + "/"] = None
    return list(found)


def _outside(place: str, prefix: str) -> str:
    if not prefix:
        return place
    # What is outside of it makes room: both may have a layers/dense.
    return place.removeprefix(prefix) if place.startswith(prefix) else f"../{place}"


def _by_layer(names: Mapping[str, Shape]) -> dict[str, list[str]]:
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        layers[_split(name)[0]].append(name)
    return dict(layers)


def _candidates(
    layer: str, members: Mapping[str, list[str]], inside: Mapping[str, list[str]]
) -> Iterator[tuple[int, str]]:
    if layer in members:
        yield 0, layer
    for cost, tail in enumerate(_tails(layer), 1):
        if tail in members:
            yield cost, tail
    if len(inside.get(layer, ())) == 1:
        yield _INSIDE_ANOTHER, inside[layer][0]


def _member(leaf: str, names: list[str], size: int) -> str | None:
    if leaf.isdecimal():
        return names[int(leaf)] if size == len(names) and int(leaf) < size else None
    for name in names:
        if _split(name)[1] in (leaf, _ALIASES.get(leaf)):
            return name
    return None


def _tails(layer: str) -> list[str]:
    parts = layer.split("/")
    return ["/".join(parts[start:]) for start in range(1, len(parts))]


def _split(name: str) -> tuple[str, str]:
    layer, _, leaf = name.rpartition("/")
    return layer, leaf
