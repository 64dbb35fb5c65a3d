"""Which weights of a model are trained in each phase of a run; the others stay as they are."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import keras

from modelyard.config.fine_tuning import Phase
from modelyard.errors import UserError, nearest

log = logging.getLogger("modelyard")
_HEAD = "head"


class Freezing:
    """The weights of ``model`` that are trained, phase by phase.

    A layer of which nothing is trained is frozen: its batch norm uses its moving statistics and leaves them alone.

    Args:
        model: the network, as its author made it.
        phases: what is trained, one after the other.
        freeze_batch_norm: leave batch norm frozen in all of them.
    """

    def __init__(self, model: keras.Model, phases: Sequence[Phase], freeze_batch_norm: bool = False) -> None:
        self._name = model.name
        learnable = list(model.trainable_variables)
        names = [self._short(v) for v in learnable]
        self._head = names[-1].rpartition("/")[0] if names else ""
        kept = [layer for layer in _layers(model) if freeze_batch_norm and _is_batch_norm(layer)]
        if freeze_batch_norm and not kept:
            log.warning("freeze_batch_norm has no effect: %s has no batch norm", self._name)
        frozen = {self._short(v) for layer in kept for v in _own(layer)}
        chosen = [self._chosen(phase, names) - frozen for phase in phases]
        for number, some in enumerate(chosen, 1):
            if not some:
                raise UserError(f"fine_tune: phase {number} trains nothing; all it names is frozen batch norm.")
        ever = set().union(*chosen)
        self.trained = [v for v, name in zip(learnable, names, strict=True) if name in ever]
        """What is trained in any phase, in the order of the model."""
        self.active = [[self._short(v) in some for v in self.trained] for some in chosen]
        """For each phase, which of those are trained in it."""
        known = {id(v) for v in learnable}
        # What its author has frozen is left alone.
        free = [layer for layer in _layers(model) if layer.trainable]
        owners = [(layer, [self._short(v) for v in _own(layer) if id(v) in known]) for layer in free]
        self._flags = [_flags(owners, some, freeze_batch_norm) for some in chosen]
        self._parameters = int(model.count_params())

    def select(self, phase: int) -> None:
        """Freezes the layers that ``phase`` leaves alone, and no others; it is for whoever traces a step next."""
        for layer, on in self._flags[phase]:  # a layer stands before its parts, which it would switch with it
            if layer.trainable != on:
                layer.trainable = on

    def count(self, phase: int) -> tuple[int, int]:
        """How many parameters ``phase`` trains, and how many the model has."""
        trained = sum(math.prod(v.shape) for v, on in zip(self.trained, self.active[phase], strict=True) if on)
        return trained, self._parameters

    def _short(self, variable: Any) -> str:
        return str(variable.path).removeprefix(f"{self._name}/")

    def _chosen(self, phase: Phase, names: Sequence[str]) -> set[str]:
        """The names of the weights that a phase trains."""
        if phase.top is not None:
            layers = _layers_of(names)
            if phase.top > len(layers):
                message = "fine_tune: top(layers=%d) is all of %s, which has %d layers with weights that can be trained"
                log.warning(message, phase.top, self._name, len(layers))
            last = set(layers[-phase.top :])
            return {name for name in names if name.rpartition("/")[0] in last}
        found: set[str] = set()
        for pattern in phase.patterns:
            fitting = {name for name in names if self._fits(name, pattern)}
            if not fitting:
                near = _near(pattern, names) or _layers_of(names)[-5:]
                raise UserError(f"fine_tune: {pattern!r} names no layer that can be trained. Near: {', '.join(near)}.")
            found |= fitting
        return found

    def _fits(self, name: str, pattern: str) -> bool:
        """Whether a weight, its layer or what the layer is a part of is called so."""
        parts = name.split("/")
        heads = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        wanted = self._head if pattern == _HEAD and _HEAD not in parts else pattern
        return any(fnmatchcase(head, wanted) for head in heads)


def _layers_of(names: Iterable[str]) -> list[str]:
    """The layers that weights of these names belong to."""
    return list(dict.fromkeys(name.rpartition("/")[0] for name in names))


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Layers, weights, and groups of them (``block_16_*``) that a pattern without match may have meant."""
    whole = {*_layers_of(names), *names}
    begun = {name[: gap.end()] for name in sorted(whole) for gap in re.finditer("[_/]", name)}
    shown = {beginning.rstrip("_/"): f"{beginning}*" for beginning in sorted(begun)}
    shown.update((name, name) for name in sorted(whole))
    return [shown[name] for name in nearest(re.sub(r"[*?]", "", pattern).strip("_/"), shown)]


def _flags(owners: list[tuple[Any, list[str]]], chosen: set[str], freeze_batch_norm: bool) -> list[tuple[Any, bool]]:
    """Each layer that can be frozen, and whether it is trained. Batch norm without weights goes with what is before."""
    flags = []
    before = next((bool(chosen & set(own)) for _, own in owners if own), False)  # for one that nothing stands before
    for layer, own in owners:
        if own:
            before = bool(chosen & set(own))
            flags.append((layer, before))
        elif _is_batch_norm(layer):
            flags.append((layer, before and not freeze_batch_norm))
    return flags


def _layers(model: keras.Model) -> list[Any]:
    return list(model._flatten_layers(include_self=False))


def _own(layer: Any) -> list[Any]:
    """The weights of a layer itself, without those of its parts."""
    return list(layer._trainable_variables)


def _is_batch_norm(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization)
