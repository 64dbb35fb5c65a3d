"""The stages that every process of a run goes through, whatever its part: data, engine, model, state."""

from __future__ import annotations

import logging
import math
from fractions import Fraction
from typing import TYPE_CHECKING

from modelyard.cluster.crew import Crew
from modelyard.cluster.roles import PARAMETER_SERVERS
from modelyard.config import Config
from modelyard.config.backend import choose_engine, select_engine
from modelyard.config.durations import Run
from modelyard.data.dataset import TRAIN, Dataset
from modelyard.errors import ConfigError, Problem
from modelyard.registry import ENGINES
from modelyard.run.checkpoint import Checkpoint

if TYPE_CHECKING:
    from modelyard.engine.base import Engine

log = logging.getLogger("modelyard")


def open_dataset(config: Config) -> Dataset:
    """The data of the run."""
    from modelyard.data.load import load_dataset

    return load_dataset(config)


def create_engine(config: Config, crew: Crew) -> Engine:
    """The engine of this process, together with those of its crew."""
    name = select_engine(config.engine)
    log.info("engine %s (%s)", name, choose_engine(config.engine)[1])
    if crew.cluster.mode == PARAMETER_SERVERS and crew.cluster.leads:
        from modelyard.engine.parameter_server import ParameterServerEngine

        return ParameterServerEngine(config, crew)
    engine: Engine = ENGINES.get(name).load()(config, crew)
    return engine


def run_lengths(config: Config, dataset: Dataset) -> Run:
    """How long the run is: N epochs are ceil(N × examples / batch) steps."""
    examples = dataset.size(TRAIN)
    if config.train_steps is not None:
        total = config.train_steps
    elif config.train_epochs is not None:
        # As written, not as a binary float: 1.1 epochs of 100 examples are 110, not 110.00000000000001.
        total = math.ceil(Fraction(repr(config.train_epochs)) * examples / config.train_batch_size)
    else:
        raise ConfigError([Problem("config", "train_steps", "is missing, and so is train_epochs; give one.")])
    return Run(examples, config.train_batch_size, total)


def build(engine: Engine, config: Config, dataset: Dataset, run: Run) -> None:
    """Makes the model and what trains it."""
    from modelyard.models.task import build_task

    engine.build(lambda: build_task(config, dataset), dataset, run)
    log.info("model %s: %s parameters", config.model, f"{engine.model.count_params():,}")


def load_state(engine: Engine, checkpoint: Checkpoint, weights_only: bool = False) -> None:
    """Brings a checkpoint into the engine, and into those of its crew."""
    from modelyard.engine.base import State

    engine.load(State(checkpoint.weights, checkpoint.optimizer), weights_only=weights_only)
