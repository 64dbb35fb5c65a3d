"""What an engine trains: the task, its Keras model and optimizer, and all their tensors by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from modelyard.config.schema import Config
from modelyard.engine.averages import make_averages
from modelyard.engine.naming import name_optimizer_slots, name_weights
from modelyard.engine.phases import Phases
from modelyard.models.freezing import Freezing
from modelyard.models.optimizers import build_optimizer
from modelyard.models.task import Task


@dataclass(frozen=True)
class Network:
    """A model and all that belongs to it.

    Args:
        task: gives loss and metrics.
        model: the network.
        optimizer: built for what is trained in any phase.
        freezing: what is trained in which phase.
        weights: the model's variables by name.
        averages: averages of what is trained, in its order; none without ema_decay.
        slots: the optimizer's variables by name, the averages among them.
    """

    task: Task
    model: keras.Model
    optimizer: Any
    freezing: Freezing
    weights: dict[str, Any]
    averages: list[Any]
    slots: dict[str, Any]

    @property
    def trained(self) -> list[Any]:
        """The variables that have gradients in some phase."""
        return self.freezing.trained

    @property
    def statistics(self) -> list[Any]:
        """Those that have none."""
        learned = {id(v) for v in self.trained}
        return [v for v in self.weights.values() if id(v) not in learned]

    def cleared_optimizer(self) -> dict[str, NDArray[Any]]:
        """The optimizer's variables as they begin: what it knows of weights, and counts of steps; no loss scales.

        It begins anew with each phase. Its means are of gradients that are over; and where it corrects for how few
        steps it has seen, layers that were frozen until then would be moved several times too far.
        """
        averages = {id(v) for v in self.averages}
        own = {name: v for name, v in self.slots.items() if id(v) not in averages}
        known = {name: v for name, v in own.items() if name.rpartition("/")[0] in self.weights or "iteration" in name}
        return {name: np.zeros(tuple(v.shape), np.float32) for name, v in known.items()}


def build_network(
    config: Config, make_task: Callable[[], Task], phases: Phases, learning_rate: Callable[[], Any]
) -> Network:
    """Makes it, where variables are to live.

    Args:
        config: the resolved config.
        make_task: makes the task.
        phases: of the run.
        learning_rate: is asked at each step.
    """
    task = make_task()
    model = task.checked_network()
    optimizer = task.optimizer(config, build_optimizer(config, learning_rate, model.name))
    if config.precision == "float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale")
    freezing = Freezing(model, phases.all, config.freeze_batch_norm)
    optimizer.build(freezing.trained)
    weights = name_weights(model)
    averages = make_averages(weights, freezing.trained) if config.ema_decay else {}
    slots = name_optimizer_slots(optimizer, weights, averages)
    return Network(task, model, optimizer, freezing, weights, list(averages.values()), slots)
