"""The stages that every process of a run goes through, whatever its part: data, engine, model, state."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from modelyard.cluster.crew import Crew
from modelyard.cluster.roles import PARAMETER_SERVERS
from modelyard.config import Config
from modelyard.config.backend import choose_engine, import_engine, select_engine
from modelyard.config.durations import RunLength
from modelyard.data.dataset import TRAIN, Dataset
from modelyard.errors import CheckpointError, ConfigError, Problem
from modelyard.registry import ENGINES
from modelyard.run.checkpoint import Checkpoint, list_checkpoints, read_state
from modelyard.run.directory import RunDirectory

if TYPE_CHECKING:
    from modelyard.engine.base import Engine

log = logging.getLogger("modelyard")


def open_dataset(config: Config) -> Dataset:
    """The data of the run."""
    from modelyard.data.load import load_dataset

    return load_dataset(config)


def create_engine(config: Config, crew: Crew) -> Engine:
    """The engine of this process, together with those of its crew."""
    name = import_engine(config.engine)
    if name == "jax" and crew.size == 1:
        from modelyard.engine.jax_devices import wake_devices

        wake_devices(config, crew)
    select_engine(name)
    log.info("engine %s (%s)", name, choose_engine(config.engine)[1])
    if crew.cluster.mode == PARAMETER_SERVERS and crew.cluster.leads:
        from modelyard.engine.parameter_server import ParameterServerEngine

        return ParameterServerEngine(config, crew)
    engine: Engine = ENGINES.get(name).load()(config, crew)
    return engine


def run_lengths(config: Config, dataset: Dataset) -> RunLength:
    """How long the run is: N epochs are ceil(N × examples / batch) steps."""
    examples = dataset.size(TRAIN)
    if config.train_steps is not None:
        total = config.train_steps
    elif config.train_epochs is not None:
        # As written, not as a binary float: 1.1 epochs of 100 examples are 110, not 110.00000000000001.
        total = math.ceil(Fraction(repr(config.train_epochs)) * examples / config.train_batch_size)
    else:
        raise ConfigError([Problem("config", "train_steps", "is missing, and so is train_epochs; give one.")])
    return RunLength(examples, config.train_batch_size, total)


def is_finished(directory: RunDirectory, config: Config, run: Callable[[], RunLength]) -> bool:
    """Whether the newest checkpoint is the last that the run will have, as ``config`` now says.

    Args:
        directory: the run folder.
        config: the config; a finished run may be asked for more steps.
        run: gives its lengths; called only where something is saved.
    """
    saved = list_checkpoints(directory.checkpoints)
    try:
        memory = read_state(saved[max(saved)])["memory"] if saved else None
    except CheckpointError:
        return False
    if memory is None:
        return False
    total = run().total_steps
    return max(saved) >= total or stopped_by(memory, config, total) is not None


def stopped_by(memory: Mapping[str, Any], config: Config, total_steps: int) -> str | None:
    """Why a hook has stopped the run; it stays stopped until the hooks or the number of steps change."""
    unchanged = memory.get("total_steps") == total_steps and memory.get("stopped_under") == stop_rules(config)
    return memory.get("stopped") if unchanged else None


def stop_rules(config: Config) -> list[str]:
    """What may stop the run before its last step."""
    return [str(call) for call in config.hooks]


def build(engine: Engine, config: Config, dataset: Dataset, run: RunLength) -> None:
    """Makes the model and what trains it."""
    from modelyard.models.task import build_task

    engine.build(lambda: build_task(config, dataset), dataset, run)
    log.info("model %s: %s parameters", config.model, f"{engine.model.count_params():,}")


def load_state(engine: Engine, checkpoint: Checkpoint, weights_only: bool = False) -> None:
    """Brings a checkpoint into the engine, and into those of its crew."""
    from modelyard.engine.base import State

    engine.load(State(checkpoint.weights, checkpoint.optimizer), weights_only=weights_only)
