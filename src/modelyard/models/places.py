"""Where Keras 3 keeps the weights of a model in its files, which tell layers by class and number and not by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras


def places(model: keras.Model, weights: Mapping[str, Any]) -> dict[str, str]:
    """Places such as ``layers/conv2d_1/vars/0`` to names of weights.

    Args:
        model: the model.
        weights: its variables by name.
    """
    names = {id(variable): name for name, variable in weights.items()}
    found: dict[str, str] = {}
    for path, layer in _walk(model, "", set()):
        own: dict[str, Any] = {}
        layer.save_own_variables(own)
        for number, variable in own.items():
            name = names.get(id(variable))
            if name is not None:
                found[f"{path}vars/{number}"] = name
    return found


def _walk(layer: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The layers in the order of Keras's `saving_lib`, each where it is met first."""
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield path, layer
    if isinstance(layer, keras.Sequential) or getattr(layer, "inputs", None):  # a functional model
        yield from _walk_list(layer.layers, f"{path}layers/", seen)
    if isinstance(layer, keras.Model):
        plain = set(dir(keras.Model)) | set(dir(keras.Sequential))
    else:
        plain = set(dir(keras.layers.Layer))
    own = vars(layer).keys() | {name for name in dir(type(layer)) if isinstance(getattr(type(layer), name), property)}
    # Private attributes come last; what every layer has leads to the same layers again, or to none.
    for name in sorted(own - plain - _INTERNAL, key=lambda name: f"~{name}" if name.startswith("_") else name):
        try:
            child = getattr(layer, name)
        except Exception:
            continue
        if isinstance(child, keras.layers.Layer):
            yield from _walk(child, f"{path}{name}/", seen)
        elif isinstance(child, list | tuple | dict):
            yield from _walk_list(child.values() if isinstance(child, dict) else child, f"{path}{name}/", seen)


def _walk_list(layers: Iterable[Any], path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    numbers: dict[str, int] = {}
    for layer in layers:
        if isinstance(layer, keras.layers.Layer):
            name = _snake_case(type(layer).__name__)
            numbers[name] = numbers.get(name, -1) + 1
            yield from _walk(layer, f"{path}{name}_{numbers[name]}/" if numbers[name] else f"{path}{name}/", seen)


_INTERNAL = {"_layers", "_operations", "_operations_by_depth", "_functional", "_tracker", "_inbound_nodes", "_nodes"}


def _snake_case(name: str) -> str:
    """As Keras does it: Conv2D is conv2d, BatchNormalization is batch_normalization."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
