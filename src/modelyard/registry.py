"""Models, datasets, hooks, optimizers and the rest, by name.

Built-in components are *declared*: name, options and help are known at once, and the code is imported when it is used.
Listing and checking names therefore imports nothing heavy. A user's components are *registered* with a decorator.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from modelyard.errors import UserError, unknown

Target = TypeVar("Target", bound=Callable[..., Any])


class Options(BaseModel):
    """Typed options of a component. Each field needs a description; it is an option of runs with that component."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), coerce_numbers_to_str=True, allow_inf_nan=False
    )


@dataclass(frozen=True)
class Entry:
    """One registered component."""

    kind: str
    name: str
    target: str | Callable[..., Any]
    options: type[Options]
    summary: str

    def load(self) -> Callable[..., Any]:
        """Returns the function or class; imports it if it was only declared."""
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        loaded: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        return loaded


class Registry:
    """Components of one kind. ``catalog`` names the module that declares the built-in ones, imported on first use.

    Example:
        >>> colours = Registry("colour")
        >>> @colours.register("red")
        ... def red():
        ...     "The colour of tomatoes."
        >>> colours.names()
        ['red']
    """

    def __init__(self, kind: str, catalog: str | None = None) -> None:
        self.kind = kind
        self.default_options: type[Options] = Options
        self._catalog = catalog
        self._entries: dict[str, Entry] = {}

    def declare(self, name: str, target: str, *, options: type[Options] = Options, summary: str) -> None:
        """Adds a built-in component whose code is at ``module:attribute``."""
        self._add(Entry(self.kind, name, target, options, summary))

    def register(self, name: str | None = None, *, options: type[Options] | None = None) -> Callable[[Target], Target]:
        """Decorator that adds a function or class under ``name`` (by default its own).

        Args:
            name: its name in options.
            options: its typed options; by default its attribute ``Options``, or else the default of this kind.
        """

        def add(target: Target) -> Target:
            self._load_catalog()
            own: type[Options] = options if options is not None else getattr(target, "Options", self.default_options)
            summary = (target.__doc__ or "").strip().partition("\n")[0]
            self._add(Entry(self.kind, name or target.__name__, target, own, summary))
            return target

        return add

    def get(self, name: str) -> Entry:
        """Returns the component ``name``; the error for an unknown name lists the closest ones."""
        self._load_catalog()
        try:
            return self._entries[name]
        except KeyError:
            raise UserError(unknown(self.kind, name, self._entries)) from None

    def names(self) -> list[str]:
        """Returns all names, in the order they were added."""
        self._load_catalog()
        return list(self._entries)

    def entries(self) -> list[Entry]:
        """Returns all components, in the order they were added."""
        self._load_catalog()
        return list(self._entries.values())

    def _add(self, entry: Entry) -> None:
        known = self._entries.get(entry.name)
        if known is not None and not _same_code(known.target, entry.target):
            raise UserError(f"a {self.kind} named {entry.name!r} exists already. Give yours another name.")
        self._entries[entry.name] = entry

    def _load_catalog(self) -> None:
        if self._catalog is not None:
            module, self._catalog = self._catalog, None
            importlib.import_module(module)


def _same_code(one: str | Callable[..., Any], other: str | Callable[..., Any]) -> bool:
    """Whether both are the same code: a plugin that is imported twice registers its functions again."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return one.__qualname__ == other.__qualname__ and (
        one.__module__ == other.__module__ or _file_of(one) == _file_of(other) != ""
    )


def _file_of(target: Callable[..., Any]) -> str:
    """Returns the file of a function or class, whose module may have several names; "" if it has none."""
    file = getattr(sys.modules.get(target.__module__), "__file__", None)
    return os.path.realpath(file) if isinstance(file, str) else ""


MODELS = Registry("model", "modelyard.models.catalog")
DATASETS = Registry("dataset", "modelyard.data.catalog")
OPTIMIZERS = Registry("optimizer", "modelyard.models.catalog")
SCHEDULES = Registry("learning-rate schedule", "modelyard.models.catalog")
AUGMENTATIONS = Registry("augmentation", "modelyard.data.catalog")
PREPROCESSINGS = Registry("preprocessing", "modelyard.data.catalog")
ENGINES = Registry("engine", "modelyard.engine.catalog")
HOOKS = Registry("hook", "modelyard.loop.catalog")
METRICS = Registry("metric", "modelyard.models.metric_types")

register_model = MODELS.register
register_dataset = DATASETS.register
register_optimizer = OPTIMIZERS.register
register_schedule = SCHEDULES.register
register_augmentation = AUGMENTATIONS.register
register_preprocessing = PREPROCESSINGS.register
register_hook = HOOKS.register
register_metric = METRICS.register
