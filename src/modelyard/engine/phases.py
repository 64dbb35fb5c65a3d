"""Phases of fine-tuning: where they begin and end, and which weights are trained in each."""

from __future__ import annotations

import logging
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import keras
import numpy as np
from keras import ops

from modelyard.compat.keras import own_trainable_variables, sublayers
from modelyard.config.calls import Call
from modelyard.config.durations import RunLength
from modelyard.config.schema import Config
from modelyard.config.weight_groups import Phase, boundaries, read_phases
from modelyard.errors import UserError, nearest

log = logging.getLogger("modelyard")
_HEAD = "head"


class Phases:
    """The phases of ``config.fine_tune``. A phase depends on the step alone, so a resumed run is in the right one."""

    def __init__(self, config: Config, run: RunLength) -> None:
        self.all = read_phases(config.fine_tune)
        self._starts = boundaries(self.all, run)
        # The layers that each trains, as the user wrote them.
        self._written = [
            Call(call.name, {key: value for key, value in call.arguments.items() if key not in ("until", "factor")})
            for call in config.fine_tune
        ]
        self._announced: int | None = None

    def __len__(self) -> int:
        return len(self.all)

    def begins_at(self, step: int) -> bool:
        """Returns whether a phase after the first begins with ``step``."""
        return step in self._starts

    def start(self, step: int) -> int:
        """Returns the first step of the phase of ``step``."""
        return [0, *self._starts][self.of(step)]

    def of(self, step: int) -> int:
        """Returns the phase of a step, from 0."""
        return bisect_right(self._starts, step)

    @property
    def periods(self) -> list[int]:
        """The steps at which phases begin; chunks should divide them, so that no chunk is cut."""
        return list(self._starts)

    def cut(self, step: int, count: int) -> Iterator[tuple[int, int]]:
        """Yields ``count`` steps from ``step`` on as chunks (first, length) that lie within one phase each."""
        end = step + count
        for start in [*(s for s in self._starts if step < s < end), end]:
            yield step, start - step
            step = start

    def scaled(self, schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns ``schedule`` times the factor of each phase."""
        factors = [phase.factor for phase in self.all]
        if all(factor == 1 for factor in factors):
            return schedule

        def learning_rate(step: Any) -> Any:
            factor: Any = np.float32(factors[0])
            for start, then in zip(self._starts, factors[1:], strict=True):
                factor = ops.where(step >= start, np.float32(then), factor)
            return schedule(step) * factor

        return learning_rate

    def announce(self, step: int, freezing: Freezing) -> None:
        """Logs what is trained from ``step`` on, once per phase."""
        phase = self.of(step)
        if not self._written or phase == self._announced:
            return
        self._announced = phase
        name, start, factor = "fine_tune", self.start(step), self.all[phase].factor
        if len(self) > 1:
            name = f"{'resuming in ' if step > start else ''}phase {phase + 1} of {len(self)} from step {start} on"
        trained, parameters = (f"{number:,}" for number in freezing.count(phase))
        factored = f", learning rate × {factor:g}" if factor != 1 else ""
        log.info("%s: %s, %s of %s parameters are trained%s", name, self._written[phase], trained, parameters, factored)


class Freezing:
    """The weights of ``model`` that are trained in each phase.

    A layer without a trained weight is frozen: its batch norm uses its moving statistics and does not change them.
    ``freeze_batch_norm`` freezes batch norm in all phases.
    """

    def __init__(self, model: keras.Model, phases: Sequence[Phase], freeze_batch_norm: bool = False) -> None:
        self._name = model.name
        learnable = list(model.trainable_variables)
        names = [self._short(v) for v in learnable]
        self._head = names[-1].rpartition("/")[0] if names else ""
        kept = [layer for layer in sublayers(model) if freeze_batch_norm and _is_batch_norm(layer)]
        if freeze_batch_norm and not kept:
            log.warning("freeze_batch_norm has no effect: %s has no batch norm", self._name)
        frozen = {self._short(v) for layer in kept for v in own_trainable_variables(layer)}
        chosen = [self._chosen(phase, names) - frozen for phase in phases]
        for number, some in enumerate(chosen, 1):
            if not some:
                raise UserError(f"fine_tune: phase {number} trains nothing: all that it names is frozen batch norm.")
        ever = set().union(*chosen)
        self.trained = [v for v, name in zip(learnable, names, strict=True) if name in ever]
        """The weights that are trained in any phase, in the order of the model."""
        self.active = [[self._short(v) in some for v in self.trained] for some in chosen]
        """For each phase, which of `trained` are trained in it."""
        known = {id(v) for v in learnable}
        # Layers that the model's author has frozen stay frozen.
        free = [layer for layer in sublayers(model) if layer.trainable]
        owners = [(layer, [self._short(v) for v in own_trainable_variables(layer) if id(v) in known]) for layer in free]
        self._flags = [_flags(owners, some, freeze_batch_norm) for some in chosen]
        self._parameters = int(model.count_params())

    def select(self, phase: int) -> None:
        """Freezes the layers that ``phase`` does not train, and no others. Called before a step is traced."""
        for layer, on in self._flags[phase]:  # a layer comes before its sublayers, which it switches too
            if layer.trainable != on:
                layer.trainable = on

    def count(self, phase: int) -> tuple[int, int]:
        """Returns the number of parameters that ``phase`` trains, and of all."""
        trained = sum(math.prod(v.shape) for v, on in zip(self.trained, self.active[phase], strict=True) if on)
        return trained, self._parameters

    def _short(self, variable: Any) -> str:
        return str(variable.path).removeprefix(f"{self._name}/")

    def _chosen(self, phase: Phase, names: Sequence[str]) -> set[str]:
        """Returns the names of the weights that a phase trains."""
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
        """Returns whether the pattern matches a weight, its layer or a parent of the layer."""
        parts = name.split("/")
        heads = ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]
        wanted = self._head if pattern == _HEAD and _HEAD not in parts else pattern
        return any(fnmatchcase(head, wanted) for head in heads)


def _layers_of(names: Iterable[str]) -> list[str]:
    """Returns the layers of weights of these names."""
    return list(dict.fromkeys(name.rpartition("/")[0] for name in names))


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Returns layers, weights and patterns (``block_16_*``) that a pattern without match may have meant."""
    whole = {*_layers_of(names), *names}
    begun = {name[: gap.end()] for name in sorted(whole) for gap in re.finditer("[_/]", name)}
    shown = {beginning.rstrip("_/"): f"{beginning}*" for beginning in sorted(begun)}
    shown.update((name, name) for name in sorted(whole))
    return [shown[name] for name in nearest(re.sub(r"[*?]", "", pattern).strip("_/"), shown)]


def _flags(owners: list[tuple[Any, list[str]]], chosen: set[str], freeze_batch_norm: bool) -> list[tuple[Any, bool]]:
    """Returns each layer that can be frozen, and if it is trained; batch norm without weights as the layer before."""
    flags = []
    before = next((bool(chosen & set(own)) for _, own in owners if own), False)  # for one at the beginning
    for layer, own in owners:
        if own:
            before = bool(chosen & set(own))
            flags.append((layer, before))
        elif _is_batch_norm(layer):
            flags.append((layer, before and not freeze_batch_norm))
    return flags


def _is_batch_norm(layer: Any) -> bool:
    return isinstance(layer, keras.layers.BatchNormalization)
