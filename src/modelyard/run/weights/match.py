"""Which weights of a file a model takes: by name and shape, as far as the user's patterns allow."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from modelyard.config.schema import parse_rename
from modelyard.errors import CheckpointError, nearest
from modelyard.run.weights.named import NamedWeights
from modelyard.run.weights.views import Shape, View, by_name, by_order, by_place, hits

SHOWN = 10
"""How many names an error or a table shows of each kind."""


@dataclass(frozen=True)
class Matched:
    """What became of every weight, of the model and of the file."""

    loaded: dict[str, NDArray[Any]]
    """Weights of the model that the file has, in the right shape."""
    skipped: tuple[str, ...] = ()
    """Weights of the model that the patterns leave out."""
    missing: tuple[str, ...] = ()
    """Weights of the model that the file does not have."""
    wrong_shape: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    """Weights of the model that the file has in another shape: the file's and the model's."""
    unused: tuple[str, ...] = ()
    """Names of the file that stand for no weight of the model."""
    sources: dict[str, str] = field(default_factory=dict)
    """What the loaded weights are called in the file."""


def match(
    weights: Mapping[str, NDArray[Any]],
    expected: Mapping[str, Shape],
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[str] = (),
    strict: bool = False,
    places: Mapping[str, str] | None = None,
) -> Matched:
    """Finds the weights of a model among those of a file.

    Names are compared as they are, then without a model's name in front of them. Files of Keras and TensorFlow may
    also know a weight by its place or its order; of these ways the one that finds most is taken for the whole file.

    Args:
        weights: what `read_weights` gave.
        expected: names and shapes of the model's weights, in its order.
        include: patterns with * and ? on the model's names; only these are loaded. None: all.
        exclude: patterns on the model's names that are not loaded.
        rename: ``regex=replacement``, applied one after the other to the file's names; then only names count.
        strict: everything that is not excluded must be loaded.
        places: where Keras 3 would keep the model's weights, to their names (`modelyard.compat.keras.weight_paths`).

    Raises:
        CheckpointError: if nothing fits, a pattern fits nothing, or ``strict`` is not met.
    """
    wanted = _wanted(expected, include, exclude)
    shapes = {name: tuple(array.shape) for name, array in weights.items()}
    view = _best_view(weights, expected, shapes, rename, places or {})
    loaded, wrong_shape, missing = {}, {}, []
    for name in wanted:
        source = view.get(name)
        if source is None:
            missing.append(name)
        elif shapes[source] != tuple(expected[name]):
            wrong_shape[name] = (shapes[source], tuple(expected[name]))
        else:
            loaded[name] = weights[source]
    if not loaded:
        raise CheckpointError(_nothing_fits(wanted, weights, wrong_shape))
    if strict and (missing or wrong_shape):
        raise CheckpointError(_not_all(missing, wrong_shape))
    used = set(view.values())
    return Matched(
        loaded=loaded,
        skipped=tuple(name for name in expected if name not in wanted),
        missing=tuple(missing),
        wrong_shape=wrong_shape,
        unused=tuple(name for name in weights if name not in used),
        sources={name: view[name] for name in loaded},
    )


def shortened(names: Iterable[str], most: int = SHOWN) -> str:
    """Names in a line, the first of many."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def differing(shapes: Mapping[str, tuple[Shape, Shape]]) -> list[str]:
    """Weights of another shape, in words."""
    return [f"{name} ({by_shape(there)} in the file, {by_shape(here)} here)" for name, (there, here) in shapes.items()]


def by_shape(shape: Shape) -> str:
    """A shape for people: ``3×3×16``."""
    return "×".join(map(str, shape)) or "a number"


def _best_view(
    weights: Mapping[str, NDArray[Any]],
    expected: Mapping[str, Shape],
    shapes: Mapping[str, Shape],
    rename: Sequence[str],
    places: Mapping[str, str],
) -> View:
    if rename:
        return by_name(_renamed(weights, rename), expected)
    views = [by_name({name: name for name in weights}, expected)]
    if isinstance(weights, NamedWeights):
        if weights.numbered:
            views.append(by_name(weights.numbered, expected))
        if weights.places and places:
            views.append(by_place(weights.places, places, expected, shapes))
        if weights.order:
            views.append(by_order(weights.order, expected, shapes))
    return max(views, key=lambda view: (hits(view, expected, shapes), len(view)))  # the first of equals


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
            if not any(fnmatch.fnmatchcase(name, pattern) for name in expected):
                near = nearest(pattern, expected) or list(expected)[:3]
                raise CheckpointError(
                    f"{option}: {pattern!r} is no weight of the model. Near it: {', '.join(near)}. "
                    "* stands for anything."
                )

    def fits(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    wanted = [name for name in expected if (not include or fits(name, include)) and not fits(name, exclude)]
    if not wanted:
        raise CheckpointError("checkpoint_include and checkpoint_exclude leave no weight of the model to load.")
    return wanted


def _nothing_fits(
    wanted: Sequence[str], weights: Mapping[str, Any], wrong_shape: Mapping[str, tuple[Shape, Shape]]
) -> str:
    if not weights:
        return "there are no weights in the file."
    if wrong_shape:
        return f"nothing of the file fits the model; of another shape: {shortened(differing(wrong_shape))}."
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


def _not_all(missing: Sequence[str], wrong_shape: Mapping[str, tuple[Shape, Shape]]) -> str:
    parts = [f"missing in the file: {shortened(missing)}"] if missing else []
    parts += [f"of another shape: {shortened(differing(wrong_shape))}"] if wrong_shape else []
    return (
        f"strict, but not everything can be loaded; {'; '.join(parts)}. Choose the model, options and classes it has, "
        "exclude these (checkpoint_exclude), or leave strict out."
    )
