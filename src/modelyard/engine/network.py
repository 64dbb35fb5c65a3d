"""The network that an engine trains: a task, its Keras model and optimizer, and names for all their tensors.

The names are the same on every engine and in every process. Weights are named by their layer paths, optimizer slots by
the weight they belong to: ``conv1/kernel/momentum``. With ``ema_decay`` there are averages of the weights over steps,
which are evaluated instead of the weights. They are optimizer slots, ``conv1/kernel/average``, so that a checkpoint has
both. Moving statistics are averages already and are used as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.config.durations import RunLength
from modelyard.config.schema import Config
from modelyard.engine.phases import Freezing, Phases
from modelyard.errors import CheckpointError, UserError
from modelyard.models.optimizers import build_optimizer, first_slot_values
from modelyard.models.task import Task

Arrays = dict[str, NDArray[Any]]
SEED_STATE = "seed_generator_state"
_AVERAGE = "/average"


class LearningRate:
    """Passes the learning rate of a step to Keras's optimizers, which call it while they apply gradients.

    An optimizer takes no learning rate with the gradients, so the value is set for the time of that call alone.
    """

    def __init__(self) -> None:
        self._value: Any = None

    def __call__(self) -> Any:
        """Returns the learning rate."""
        return self._value

    @contextmanager
    def set_to(self, value: Any) -> Iterator[None]:
        """Sets the learning rate while the block applies gradients."""
        self._value = value
        try:
            yield
        finally:
            self._value = None


@dataclass(frozen=True)
class Network:
    """A task with its model and optimizer, and all their tensors by name."""

    task: Task
    model: keras.Model
    optimizer: Any
    """Built for the variables that are trained in any phase."""
    learning_rate: LearningRate
    phases: Phases
    freezing: Freezing
    """The variables that are trained in each phase."""
    weights: dict[str, Any]
    """The model's variables by name."""
    averages: list[Any]
    """Averages of the trained variables, in their order; none without ema_decay."""
    slots: dict[str, Any]
    """The optimizer's variables by name, the averages among them."""

    @property
    def trained(self) -> list[Any]:
        """The variables that have gradients in some phase."""
        return self.freezing.trained

    @property
    def statistics(self) -> list[Any]:
        """The variables without gradients."""
        trained = {id(v) for v in self.trained}
        return [v for v in self.weights.values() if id(v) not in trained]

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Returns the shapes of all weights and of all optimizer slots."""
        weights = {name: tuple(v.shape) for name, v in self.weights.items()}
        return weights, {name: tuple(v.shape) for name, v in self.slots.items()}

    def first_optimizer_state(self) -> dict[str, NDArray[Any]]:
        """Returns the first values of the optimizer's slots of weights and step counts, but not of loss scales.

        They are zeros, except for sums of squares that begin with another value.

        The optimizer is reset at each phase: its means are of gradients of the phase before, and its bias correction
        would move layers that were frozen until then several times too far.
        """
        averages = {id(v) for v in self.averages}
        own = {name: v for name, v in self.slots.items() if id(v) not in averages}
        known = {name: v for name, v in own.items() if name.rpartition("/")[0] in self.weights or "iteration" in name}
        first = first_slot_values(self.optimizer)
        return {name: np.full(tuple(v.shape), first.get(id(v), 0.0), np.float32) for name, v in known.items()}


def build_network(config: Config, task: Task, length: RunLength) -> Network:
    """Makes the model and its optimizer. To be called in an engine's `model_scope`."""
    phases, learning_rate = Phases(config, length), LearningRate()
    model = task.checked_network()
    optimizer = task.optimizer(config, build_optimizer(config, learning_rate, model.name))
    if config.precision == "float16" and isinstance(config.loss_scale, float):
        optimizer.loss_scale_factor = config.loss_scale
    elif config.precision == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale")
    freezing = Freezing(model, phases.all, config.freeze_batch_norm)
    optimizer.build(freezing.trained)
    weights = name_weights(model)
    averages = make_averages(weights, freezing.trained) if config.ema_decay else {}
    slots = name_optimizer_slots(optimizer, weights, averages)
    return Network(task, model, optimizer, learning_rate, phases, freezing, weights, list(averages.values()), slots)


# -- names of tensors -----------------------------------------------------------------------------------------------


def name_weights(model: Any) -> dict[str, Any]:
    """Returns the model's variables by name, without states of random generators: noise is computed from the step."""
    return _unique((_without_prefix(v.path, model.name), v) for v in model.variables if not v.path.endswith(SEED_STATE))


def seed_states(model: Any) -> list[Any]:
    """Returns the states of the model's random generators (dropout and the like), in a fixed order."""
    return [v for v in model.variables if v.path.endswith(SEED_STATE)]


def name_optimizer_slots(optimizer: Any, weights: dict[str, Any], averages: dict[str, Any]) -> dict[str, Any]:
    """Returns the optimizer's variables by name, and ``averages``, which have names already."""
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
    """Returns, for each of the optimizer's variables, the index in ``trained`` of its weight; None if it has none."""
    indices = {id(v): index for index, v in enumerate(trained)}
    numbers = {name: indices[id(v)] for name, v in weights.items() if id(v) in indices}
    names = {id(v): name for name, v in slots.items()}
    return [numbers.get(names[id(v)].rpartition("/")[0]) for v in optimizer.variables]


def check_names(what: str, expected: dict[str, tuple[int, ...]], given: dict[str, NDArray[Any]]) -> None:
    """Raises `CheckpointError` if tensors of the kind ``what`` are missing, unexpected, or of another shape."""
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
            raise UserError(f"two tensors of the model are named {name!r}. Give its layers different names.")
        named[name] = variable
    return named


# -- averages of weights --------------------------------------------------------------------------------------------


def make_averages(weights: dict[str, Any], trained: Iterable[Any]) -> dict[str, Any]:
    """Makes a variable per trained weight, named as its slot, with the same initial value."""
    names = {id(variable): name for name, variable in weights.items()}
    return {
        f"{names[id(v)]}{_AVERAGE}": keras.Variable(
            ops.convert_to_numpy(v.value), dtype=v.dtype, trainable=False, autocast=False, name="average"
        )
        for v in trained
    }


def next_average(average: Any, weight: Any, step: Any, decay: Any) -> Any:
    """Returns the average after ``step``, which counts from 0. ``weight`` is the weight after the step.

    The decay grows over the first steps, so that the initial weights fade soon.
    """
    t = ops.cast(step, average.dtype)
    kept = ops.minimum(ops.cast(decay, average.dtype), (1 + t) / (10 + t))
    return average * kept + weight * (1 - kept)


def is_average(slot: str) -> bool:
    """Returns whether the optimizer slot of this name is an average, in a run that has averages."""
    return slot.endswith(_AVERAGE)


def averaged_weights(config: Config, weights: Arrays, optimizer: Arrays) -> Arrays:
    """Returns the weights of a checkpoint that are evaluated: the averages, where the run has some."""
    averages = {name: optimizer[name + _AVERAGE] for name in weights if name + _AVERAGE in optimizer}
    return {**weights, **averages} if config.ema_decay else weights


def averages_to_load(slots: Iterable[str], weights: Arrays, optimizer: Arrays) -> Arrays:
    """Returns the values of the averages if weights are loaded and the rest of the optimizer is not.

    ``optimizer`` has the slots that were saved with the weights; if it is empty, the averages begin as the weights.
    """
    given = optimizer or {slot: weights[slot.removesuffix(_AVERAGE)] for slot in slots}
    return {slot: given[slot] for slot in slots if slot in given}
