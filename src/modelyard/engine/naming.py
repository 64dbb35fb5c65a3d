"""Names for every tensor of a run, the same on every engine and in every process.

Weights are named by their layer paths, optimizer slots by the weight they belong to: ``conv1/kernel/momentum``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from modelyard.errors import CheckpointError, UserError

SEED_STATE = "seed_generator_state"


def name_weights(model: Any) -> dict[str, Any]:
    """The model's variables by name. States of random generators are left out: noise is computed from the step."""
    return _unique((_without_prefix(v.path, model.name), v) for v in model.variables if not v.path.endswith(SEED_STATE))


def seed_states(model: Any) -> list[Any]:
    """The states of the model's random generators (dropout and the like), in a fixed order."""
    return [v for v in model.variables if v.path.endswith(SEED_STATE)]


def name_optimizer_slots(optimizer: Any, weights: dict[str, Any], averages: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's variables by name, and ``averages``, which have names already."""
    # Keras joins the path of the weight and the slot with underscores; longer paths first, since one may begin another.
    owners = sorted(((v.path.replace("/", "_") + "_", name) for name, v in weights.items()), key=lambda o: -len(o[0]))
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    named = []
    for variable in optimizer.variables:
        *scope, leaf = variable.path.split("/")
        owner = next(((prefix, name) for prefix, name in owners if leaf.startswith(prefix)), None)
        if owner is not None:
            leaf = f"{owner[1]}/{leaf[len(owner[0]) :]}"
        elif scope and scope[0] != inner.name:  # a wrapper, as for loss scaling, counts for itself
            leaf = variable.path
        named.append((leaf, variable))
    return _unique([*named, *averages.items()])


def slot_owners(optimizer: Any, weights: dict[str, Any], slots: dict[str, Any], trained: list[Any]) -> list[int | None]:
    """For each of the optimizer's variables, which of ``trained`` it belongs to; None for those that serve all."""
    places = {id(v): place for place, v in enumerate(trained)}
    numbers = {name: places[id(v)] for name, v in weights.items() if id(v) in places}
    names = {id(v): name for name, v in slots.items()}
    return [numbers.get(names[id(v)].rpartition("/")[0]) for v in optimizer.variables]


def check_names(what: str, expected: dict[str, tuple[int, ...]], given: dict[str, NDArray[Any]]) -> None:
    """Refuses tensors that are not those of this model.

    Args:
        what: they are, for the message.
        expected: the shapes of the model's by name.
        given: the tensors.

    Raises:
        CheckpointError: naming those that are missing, too many, or of another shape.
    """
    missing = sorted(set(expected) - set(given))
    extra = sorted(set(given) - set(expected))
    shapes = [
        f"{name} is {given[name].shape}, not {shape}"
        for name, shape in expected.items()
        if name in given and tuple(given[name].shape) != tuple(shape)
    ]
    problems = [
        f"{label}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for label, names in (("missing", missing), ("not in the model", extra), ("of another shape", shapes))
        if names
    ]
    if problems:
        raise CheckpointError(f"the checkpoint is of another model; {what} {'; '.join(problems)}.")


def _without_prefix(path: str, prefix: str) -> str:
    return path[len(prefix) + 1 :] if path.startswith(f"{prefix}/") else path


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, variable in pairs:
        if name in named:
            raise UserError(f"two tensors of the model are called {name!r}. Give its layers different names.")
        named[name] = variable
    return named
