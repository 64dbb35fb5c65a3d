"""Matching: which weights of a file belong to which weights of a model. Readers of files know nothing of models."""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from numpy.typing import NDArray

from modelyard.config.schema import parse_rename
from modelyard.errors import CheckpointError, nearest

SHOWN = 10
"""The number of names of each kind in an error or a table."""
# Names of weights in Keras 2 and TF-Slim.
_ALIASES = {"depthwise_kernel": "kernel", "weights": "kernel", "biases": "bias", "depthwise_weights": "kernel"}
_INSIDE_ANOTHER = 1000  # the cost of a name that matches only inside of another model

Shape = tuple[int, ...]
NameMap = dict[str, str]
"""Names of a model's weights to names in a file."""


class NamedWeights(dict[str, NDArray[Any]]):
    """The weights of a file by name: ``conv1/kernel``, or ``conv1/0`` where a file has only their numbers.

    Args:
        weights: arrays by name.
        numbered: for some names, the layer and the number of the weight in it: ``conv1/0``.
        paths: for some names, the weight's path in Keras 3: ``layers/conv2d/vars/0``.
        order: for some names, the index of the layer among those with weights, and the attribute: ``((2,), "kernel")``.
    """

    def __init__(
        self,
        weights: Mapping[str, NDArray[Any]],
        *,
        numbered: Mapping[str, str] | None = None,
        paths: Mapping[str, str] | None = None,
        order: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
    ) -> None:
        super().__init__(weights)
        self.numbered = dict(numbered or {})
        self.paths = dict(paths or {})
        self.order = dict(order or {})


@dataclass(frozen=True)
class Matched:
    """The result of a match: every weight of the model and of the file is in it."""

    loaded: dict[str, NDArray[Any]]
    """Weights of the model that the file has, in the right shape."""
    skipped: tuple[str, ...] = ()
    """Weights of the model that the patterns exclude."""
    missing: tuple[str, ...] = ()
    """Weights of the model that the file does not have."""
    wrong_shape: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Weights of the model that the file has in another shape: the file's and the model's."""
    unused: tuple[str, ...] = ()
    """Names of the file that match no weight of the model."""
    sources: dict[str, str] = field(default_factory=dict)
    """The names in the file of the loaded weights."""


def match(
    weights: Mapping[str, NDArray[Any]],
    expected: Mapping[str, Shape],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    strict: bool = False,
    paths: Mapping[str, str] | None = None,
) -> Matched:
    """Finds the weights of a model among those of a file.

    Names are compared as they are, then without a model's name in front of them. Files of Keras and TensorFlow may
    also identify a weight by its path or its order. The method that matches most is used for the whole file.

    Args:
        weights: the result of `load_weights`.
        expected: names and shapes of the model's weights, in its order.
        include: patterns with * and ? on the model's names; only these are loaded. None: all.
        exclude: patterns on the model's names that are not loaded.
        rename: ``regex=replacement``, applied one after the other to the file's names; then only names count.
        strict: everything that is not excluded must be loaded.
        paths: paths of the model's weights in Keras 3, to their names (`modelyard.compat.keras.weight_paths`).

    Raises:
        CheckpointError: if nothing matches, a pattern matches nothing, or ``strict`` is not met.
    """
    wanted = _wanted(expected, include, exclude)
    shapes = {name: tuple(array.shape) for name, array in weights.items()}
    names = _best_map(weights, expected, shapes, rename, paths or {})
    loaded, wrong_shape, missing = {}, {}, []
    for name in wanted:
        source = names.get(name)
        if source is None:
            missing.append(name)
        elif shapes[source] != tuple(expected[name]):
            wrong_shape[name] = (shapes[source], tuple(expected[name]))
        else:
            loaded[name] = weights[source]
    if not loaded:
        raise CheckpointError(_nothing_matches(wanted, weights, wrong_shape))
    if strict and (missing or wrong_shape):
        parts = [f"missing in the file: {shortened(missing)}"] if missing else []
        parts += [f"of another shape: {shortened(shape_differences(wrong_shape))}"] if wrong_shape else []
        raise CheckpointError(
            f"strict, but not everything can be loaded; {'; '.join(parts)}. Choose the model, options and classes it "
            "has, exclude these (checkpoint_exclude), or leave strict out."
        )
    used = set(names.values())
    return Matched(
        loaded=loaded,
        skipped=tuple(name for name in expected if name not in wanted),
        missing=tuple(missing),
        wrong_shape=wrong_shape,
        unused=tuple(name for name in weights if name not in used),
        sources={name: names[name] for name in loaded},
    )


def shortened(names: Iterable[str]) -> str:
    """The first names in a line, and the number of the others."""
    listed = list(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def shape_differences(shapes: Mapping[str, tuple[Shape, Shape]]) -> list[str]:
    """Describes weights of another shape."""
    return [
        f"{name} ({format_shape(there)} in the file, {format_shape(here)} here)"
        for name, (there, here) in shapes.items()
    ]


def format_shape(shape: Shape) -> str:
    """A shape as text: ``3×3×16``."""
    return "×".join(map(str, shape)) or "a number"


def _best_map(
    weights: Mapping[str, NDArray[Any]],
    expected: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
    rename: Sequence[str],
    paths: Mapping[str, str],
) -> NameMap:
    if rename:
        return match_names(_renamed(weights, rename), expected)
    maps = [match_names({name: name for name in weights}, expected)]
    if isinstance(weights, NamedWeights):
        if weights.numbered:
            maps.append(match_names(weights.numbered, expected))
        if weights.paths and paths:
            maps.append(_match_paths(weights.paths, paths, expected, shapes))
        if weights.order:
            maps.append(_match_order(weights.order, expected, shapes))
    return max(maps, key=lambda names: (_hits(names, expected, shapes), len(names)))  # the first of equals


def _renamed(weights: Iterable[str], rename: Sequence[str]) -> dict[str, str]:
    names = {name: name for name in weights}
    for rule in rename:
        pattern, replacement = parse_rename(rule)
        after = {source: pattern.sub(replacement, name) for source, name in names.items()}
        if after == names:
            raise CheckpointError(
                f"checkpoint_rename: {rule!r} changes no name of the file. It has: {shortened(names.values())}."
            )
        names = after
    return names


def _wanted(expected: Mapping[str, Shape], include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """The names that are to be loaded."""
    for option, patterns in (("checkpoint_include", include), ("checkpoint_exclude", exclude)):
        for pattern in patterns:
            if not fnmatch.filter(expected, pattern):
                near = nearest(pattern, expected) or list(expected)[:3]
                raise CheckpointError(
                    f"{option}: {pattern!r} matches no weight of the model. Similar names: {', '.join(near)}. "
                    "* matches anything."
                )

    def fits(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    wanted = [name for name in expected if (not include or fits(name, include)) and not fits(name, exclude)]
    if not wanted:
        raise CheckpointError("checkpoint_include and checkpoint_exclude leave no weight of the model to load.")
    return wanted


def _nothing_matches(
    wanted: Sequence[str], weights: Mapping[str, Any], wrong_shape: Mapping[str, tuple[Shape, Shape]]
) -> str:
    if not weights:
        return "there are no weights in the file."
    if wrong_shape:
        differing = shortened(shape_differences(wrong_shape))
        return f"no weight of the file fits the model; of another shape: {differing}."
    near = []
    for name in wanted:
        closest = difflib.get_close_matches(name, weights, n=1, cutoff=0.0)
        near += [(difflib.SequenceMatcher(None, name, other).ratio(), name, other) for other in closest]
        if len(near) >= 5 * SHOWN:
            break
    best = {other: (name, other) for _, name, other in sorted(near)}  # the best model's name for each of the file's
    pairs = [f"{name} ~ {other}" for name, other in list(best.values())[::-1][:5]]
    return (
        f"no weight of the file has the name of one of the model's. The closest (model ~ file): {', '.join(pairs)}. "
        "checkpoint_rename ('from=to', regular expressions) turns the file's names into the model's."
    )


# -- by name ----------------------------------------------------------------------------------------------------------


def match_names(names: Mapping[str, str], expected: Mapping[str, Shape]) -> NameMap:
    """Matches by the layer's name and the weight's name, or its number in the layer.

    One of the two may be inside of another model, whose name is in front: ``backbone/conv1/kernel``.

    Args:
        names: the file's names, to the names to compare.
        expected: the model's names, in its order.
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
    result = {}
    for target, claimed in claims.items():
        cost, source = min(claimed)
        if sum(other == cost for other, _ in claimed) == 1:  # else it is ambiguous
            result[target] = source
    return result


def _candidates(
    layer: str, members: Mapping[str, list[str]], inside: Mapping[str, list[str]]
) -> Iterator[tuple[int, str]]:
    """Layers of the model that a layer of the file may be, with the cost of each."""
    for cost, tail in enumerate([layer, *_tails(layer)]):
        if tail in members:
            yield cost, tail
    if len(inside.get(layer, ())) == 1:
        yield _INSIDE_ANOTHER, inside[layer][0]


def _member(leaf: str, names: list[str], size: int) -> str | None:
    if leaf.isdecimal():
        return names[int(leaf)] if size == len(names) and int(leaf) < size else None
    return next((name for name in names if _split(name)[1] in (leaf, _ALIASES.get(leaf))), None)


def _tails(layer: str) -> list[str]:
    parts = layer.split("/")
    return ["/".join(parts[start:]) for start in range(1, len(parts))]


# -- by path and by order ---------------------------------------------------------------------------------------------


def _match_paths(
    paths: Mapping[str, str], model: Mapping[str, str], expected: Mapping[str, Shape], shapes: Mapping[str, Shape]
) -> NameMap:
    """Matches by path in Keras 3, as in ``layers/conv2d_1/vars/0``: its layer is the second of its class."""
    file = {path: name for name, path in paths.items()}
    pairs: list[tuple[Mapping[str, str], Mapping[str, str]]] = [(file, model)]
    pairs += [(_below(prefix, file), model) for prefix in _containers(file)]
    pairs += [(file, _below(prefix, model)) for prefix in _containers(model)]
    maps = [_match_equal_paths(here, there, expected, shapes) for here, there in pairs]
    return max(maps, key=lambda names: _hits(names, expected, shapes))


def _match_equal_paths(
    here: Mapping[str, str], there: Mapping[str, str], expected: Mapping[str, Shape], shapes: Mapping[str, Shape]
) -> NameMap:
    """Matches equal paths if all layers agree but one (the last, with other classes)."""
    sizes, model_sizes = (Counter(_split(path)[0] for path in side) for side in (here, there))
    names: NameMap = {}
    misfits = set()
    for path in here.keys() & there.keys():
        layer = _split(path)[0]
        same = sizes[layer] == model_sizes[layer]
        if same:
            names[there[path]] = here[path]
        if not same or shapes[here[path]] != expected[there[path]]:
            misfits.add(layer)
    return names if len(misfits) <= 1 else {}


def _containers(paths: Iterable[str]) -> list[str]:
    """The folders of models inside of the model: ``layers/functional/``."""
    split = [path.split("/") for path in paths]
    found = ("/".join(parts[:at]) + "/" for parts in split for at in range(2, len(parts)) if parts[at] == "layers")
    return list(dict.fromkeys(found))


def _below(prefix: str, paths: Mapping[str, str]) -> dict[str, str]:
    """Paths relative to ``prefix``. Those outside of it are moved away: both may have a layers/dense."""
    return {path.removeprefix(prefix) if path.startswith(prefix) else f"../{path}": paths[path] for path in paths}


def _match_order(
    order: Mapping[str, tuple[tuple[int, ...], str]], expected: Mapping[str, Shape], shapes: Mapping[str, Shape]
) -> NameMap:
    """Matches by the order of the layers with weights, if the shapes in all of them but the last agree."""
    ordered = sorted(order.items(), key=lambda item: item[1][0])
    file = [{leaf: name for name, (_, leaf) in group} for _, group in groupby(ordered, key=lambda item: item[1][0])]
    model = [{_split(name)[1]: name for name in names} for names in _by_layer(expected).values()]
    # Built-in models begin with a layer that standardizes, which others need not have.
    maps = [_align(file, model[skip:], expected, shapes) for skip in (0, 1)]
    return max(maps, key=lambda names: _hits(names, expected, shapes))


def _align(
    file: list[dict[str, str]],
    model: list[dict[str, str]],
    expected: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
) -> NameMap:
    names: NameMap = {}
    shorter = min(len(file), len(model))
    for number, (given, there) in enumerate(zip(file, model, strict=False), 1):
        here = {leaf if leaf in there else _ALIASES.get(leaf, leaf): source for leaf, source in given.items()}
        same = here.keys() == there.keys()
        fits = same and all(shapes[here[leaf]] == expected[there[leaf]] for leaf in here)
        if not fits and number < shorter:
            return {}
        if same:
            names.update({there[leaf]: here[leaf] for leaf in here})
    return names


def _hits(names: NameMap, expected: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> int:
    """The number of matched weights that have the right shape."""
    return sum(expected[name] == shapes[source] for name, source in names.items())


def _by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        layers[_split(name)[0]].append(name)
    return dict(layers)


def _split(name: str) -> tuple[str, str]:
    layer, _, leaf = name.rpartition("/")
    return layer, leaf
