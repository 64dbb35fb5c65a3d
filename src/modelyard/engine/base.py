"""The engine contract.

An engine trains and evaluates one network on the devices of this process. It knows nothing of run folders, hooks or the
clock. State enters and leaves it as named NumPy arrays.

    implement:     variable_scope, set_up, train_chunk, evaluate_batch, predict_batch, state, assign, profile, describe
    may override:  initialize, data_memory, prepare, compiles_at, evaluation_batches, evaluation_results, fetch,
                   run_on_host
    for callers:   model_scope, build, train, evaluate, evaluate_examples, metric_names, predict, predict_labelled,
                   training_batch, load, close
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.cluster.description import ProcessGroup
from modelyard.compat.keras import set_precision
from modelyard.config.durations import RunLength
from modelyard.config.schema import Config
from modelyard.data.augment.build import build_augmentation, neighbours
from modelyard.data.dataset import ID, TRAIN, Arrays, Dataset
from modelyard.data.draws import halves
from modelyard.data.pipeline import RESIDENT_BYTES, Pipeline, check_batch_memory, share_of_batch
from modelyard.data.preprocess import batch_preprocessing
from modelyard.engine.batch_functions import BatchFunctions
from modelyard.engine.evaluation import (
    BatchResult,
    Evaluation,
    EvaluationSums,
    LabelledBatch,
    metrics_of,
    predictions_of,
    without_unread,
)
from modelyard.engine.network import Network, averages_to_load, check_names, is_average
from modelyard.errors import PeerLostError, TrainingError, UserError
from modelyard.models.schedules import build_schedule
from modelyard.run.checkpoint import Checkpoint

log = logging.getLogger("modelyard")
StepMetrics = dict[str, NDArray[np.floating[Any]]]
"""Named metrics of a chunk of steps, one number per step."""
_IN_FLIGHT = 2
"""Batches that the device computes while the results of earlier ones are fetched."""
_SHOWN_EXAMPLES = 32


@dataclass(frozen=True)
class State:
    """The state of training, as named arrays."""

    weights: dict[str, NDArray[Any]]
    optimizer: dict[str, NDArray[Any]]


class Engine(ABC):
    """Trains and evaluates one task. There is one subclass per framework.

    Args:
        config: the resolved config.
        group: the processes that train together; by default this one alone.
    """

    name: str
    replicas: int
    """The number of devices that train, over all processes."""
    devices: list[str]
    """The names of this process's devices."""
    threads: int
    steps_per_call: int
    """The number of steps in one compiled call. A chunk should be a multiple of it."""
    process: int
    """The index of this process among those that share every batch."""
    processes: int
    state_is_sharded: bool
    """Whether other processes hold parts of the state, so that all must take part in `state`."""
    network: Network
    dataset: Dataset
    pipeline: Pipeline
    schedule: Callable[[Any], Any]

    def __init__(self, config: Config, group: ProcessGroup | None = None) -> None:
        self.config, self.group = config, group or ProcessGroup()
        self.steps_per_call, self.process, self.processes, self.state_is_sharded = 1, 0, 1, False

    # -- for callers ------------------------------------------------------------------------------------------------

    @contextmanager
    def model_scope(self) -> Iterator[None]:
        """Makes Keras create the next model as this engine needs it: names, precision, seed, devices.

        Raises:
            UserError: if the batch size cannot be divided over the devices.
        """
        check_divisible(self.config, self.replicas)
        keras.utils.clear_session(free_memory=False)  # names must not depend on what was built before
        set_precision(self.config)  # which clear_session resets
        with self.variable_scope():
            yield

    def build(self, network: Network, dataset: Dataset, length: RunLength) -> None:
        """Takes the network, which was made in `model_scope`, and prepares to run it."""
        config = self.config
        self.network, self.dataset = network, dataset
        self.task, self.model, self.phases = network.task, network.model, network.phases
        self.optimizer = network.optimizer
        features = {name: feature for name, feature in dataset.features.items() if name != ID}
        check_batch_memory("train_batch_size", length.batch_size // self.processes, features)
        share = share_of_batch(length.batch_size, config.gradient_accumulation, self.processes, self.process)
        # Processes must decide the same, and a deterministic run the same after every start.
        is_fixed = self.processes > 1 or config.deterministic
        memory = (lambda: RESIDENT_BYTES) if is_fixed else self.data_memory
        self.pipeline = Pipeline(config, dataset, length, share, memory)
        per_replica = length.batch_size // (self.replicas * config.gradient_accumulation)
        augment = build_augmentation(
            config.augment, dataset, config.random_seed, per_replica, self.pipeline.crops_while_decoding
        )
        self.functions = BatchFunctions(config, network, augment, batch_preprocessing(config.preprocess))
        self.schedule = self.phases.scaled(build_schedule(config, length))
        if config.scale_learning_rate and self.replicas > 1:
            log.info("the learning rate is multiplied by %d, the number of devices", self.replicas)
            unscaled = self.schedule
            self.schedule = lambda step: unscaled(step) * self.replicas
        self.functions.metrics = metrics_of(self.task, config.metrics)
        # The features that a step reads besides the inputs of the network: labels, and whatever else the task needs.
        self.feature_names = list(self.pipeline.features)
        self.set_up()

    @cached_property
    def data_fingerprint(self) -> str:
        """The fingerprint of the dataset. All of it may be read for that, once."""
        found: str = self.dataset.once("fingerprint", self.dataset.fingerprint)
        return found

    def train(self, step: int, count: int) -> StepMetrics:
        """Trains ``count`` steps from ``step`` on. The step determines the global batch."""
        chunks = []
        for first, length in self.phases.cut(step, count):
            if self.phases.begins_at(first):
                self.assign({}, self.network.first_optimizer_state())
            chunks.append(self.train_chunk(first, length))
        if len(chunks) == 1:
            return chunks[0]
        return {name: np.concatenate([metrics[name] for metrics in chunks]) for name in chunks[0]}

    def evaluate(self, split: str, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Returns the metrics over ``split``, every example counted exactly once.

        Args:
            split: the split.
            progress: called with the number of examples done and of all.
        """
        return self.evaluate_examples(split, progress).metrics

    def evaluate_examples(self, split: str, progress: Callable[[int, int], None] | None = None) -> Evaluation:
        """Returns the metrics over ``split``, and the values of each example. Arguments as for `evaluate`."""
        size, batch_size = self.dataset.size(split), self._evaluation_batch_size(split)
        total = EvaluationSums(self.task, metrics_of(self.task, self.config.metrics), size)
        waiting: deque[BatchResult] = deque()

        def add() -> None:
            result = waiting.popleft()
            total.add(self.fetch(result.sums), self.fetch(result.examples))

        with closing(self.evaluation_results(split)) as batches:
            for number, result in enumerate(batches, start=1):
                waiting.append(result)
                if len(waiting) > _IN_FLIGHT:
                    add()
                if progress is not None:
                    progress(min(number * batch_size, size), size)
        while waiting:
            add()
        return total.result()

    def metric_names(self, split: str) -> list[str]:
        """Returns the names of the metrics of ``split``, from an evaluation of its first batch."""
        with closing(self.evaluation_results(split)) as batches:
            sums, examples = map(self.fetch, next(batches))
        size = min(self._evaluation_batch_size(split), self.dataset.size(split))
        total = EvaluationSums(self.task, metrics_of(self.task, self.config.metrics), size)
        total.add(sums, examples)
        return list(total.result().metrics)

    def _evaluation_batch_size(self, split: str) -> int:
        """Returns the batch size of the config, rounded up so that every replica has an equal part."""
        size = min(self.config.eval_batch_size, self.dataset.size(split))
        return -(-size // self.replicas) * self.replicas

    def predict(self, split: str, first: int = 0) -> Generator[dict[str, NDArray[Any]], None, None]:
        """Yields the predictions for the examples of ``split`` from ``first`` on, batch by batch in storage order."""
        waiting: deque[tuple[int, dict[str, Any]]] = deque()

        def fetched() -> dict[str, NDArray[Any]]:
            count, predictions = waiting.popleft()
            return {name: values[:count] for name, values in self.fetch(predictions).items()}

        for batch, weights in self.pipeline.evaluation(split, self._evaluation_batch_size(split), first=first):
            waiting.append((int(weights.sum()), self.predict_batch(batch)))
            if len(waiting) > _IN_FLIGHT:
                yield fetched()
        while waiting:
            yield fetched()

    def predict_labelled(
        self, split: str, first: int = 0, bad: Mapping[int, str] = MappingProxyType({})
    ) -> Generator[tuple[dict[str, NDArray[Any]], LabelledBatch], None, None]:
        """Yields predictions as `predict` does, with what `EvaluationSums.add` takes: an evaluation on the way.

        Args:
            split: the split.
            first: the example to start with.
            bad: the examples that could not be read, by number. They do not count.
        """
        self.functions.keeps_predictions = True
        waiting: deque[tuple[NDArray[np.bool_], BatchResult]] = deque()

        def fetched() -> tuple[dict[str, NDArray[Any]], LabelledBatch]:
            used, result = waiting.popleft()
            values = {name: array[: len(used)] for name, array in self.fetch(result.examples).items()}
            batch = LabelledBatch(self.fetch(result.sums), without_unread(values, self.functions.metrics), used)
            return predictions_of(values), batch

        size, number = self._evaluation_batch_size(split), first
        for batch, weights in self.pipeline.evaluation(split, size, first=first):
            count = int(weights.sum())
            used = np.array([n not in bad for n in range(number, number + count)])
            weights[:count] *= used
            waiting.append((used, self.evaluate_batch(batch, weights)))
            number += count
            if len(waiting) > _IN_FLIGHT:
                yield fetched()
        while waiting:
            yield fetched()

    def training_batch(self, step: int) -> dict[str, NDArray[Any]]:
        """Returns the first examples of a global batch as the network receives them, augmented and preprocessed."""
        together = neighbours(self.config.augment)
        count = max(_SHOWN_EXAMPLES - _SHOWN_EXAMPLES % together, together)
        examples, positions = self.pipeline.training_examples(step, count)
        rows = self.pipeline.rows(step, 1)[0, : len(positions)].astype(np.int32)
        epochs = (positions // self.pipeline.run.examples).astype(np.int32)

        def preprocess(examples: dict[str, Any], seeds: Any, *numbers: Any) -> dict[str, Any]:
            batch = {name: ops.convert_to_tensor(array) for name, array in examples.items()}
            low, high, rows, epochs = map(ops.convert_to_tensor, numbers)
            return self.functions.preprocess(batch, True, low, high, rows, epochs, seeds)

        seen = self.run_on_host(preprocess, examples, self.augmentation_seeds(), *halves(positions), rows, epochs)
        return {name: ops.convert_to_numpy(value) for name, value in seen.items()}

    def load(self, state: State | Checkpoint, *, weights_only: bool = False) -> None:
        """Loads what `state` returned, or a checkpoint.

        Args:
            state: weights and optimizer slots.
            weights_only: leave the optimizer as it is, except for averages of the weights, which belong to them. If
                there are no slots at all, the averages begin as the weights.

        Raises:
            CheckpointError: if the names or shapes are not those of this model; nothing is changed then.
        """
        weights, slots = self.network.shapes()
        check_names("weights", weights, state.weights)
        optimizer = state.optimizer
        if weights_only:
            slots = {slot: shape for slot, shape in slots.items() if self.config.ema_decay and is_average(slot)}
            optimizer = averages_to_load(slots, state.weights, optimizer)
        check_names("optimizer slots", slots, optimizer)
        self.assign(state.weights, optimizer)

    def close(self) -> None:
        """Stops reading ahead."""
        self.pipeline.close()

    # -- to implement -----------------------------------------------------------------------------------------------

    @abstractmethod
    def variable_scope(self) -> AbstractContextManager[Any]:
        """Seeds the initializers and creates variables on the right devices while the block runs."""

    @abstractmethod
    def set_up(self) -> None:
        """Prepares to run the network, at the end of `build`."""

    @abstractmethod
    def train_chunk(self, step: int, count: int) -> StepMetrics:
        """Trains ``count`` steps of one phase from ``step`` on, on this process's part of their batches."""

    @abstractmethod
    def evaluate_batch(self, batch: Arrays, weights: NDArray[np.float64]) -> BatchResult:
        """Evaluates a batch; the result may still be on the device.

        ``batch`` and ``weights`` are this process's part; the result is that of the parts of all processes. The weight
        of an example is 1, that of padding is 0.
        """

    @abstractmethod
    def predict_batch(self, batch: Arrays) -> dict[str, Any]:
        """Returns the predictions for each example of a batch; they may still be on the device."""

    @abstractmethod
    def state(self) -> State:
        """Returns a copy of the state."""

    @abstractmethod
    def assign(self, weights: dict[str, NDArray[Any]], optimizer: dict[str, NDArray[Any]]) -> None:
        """Sets the named variables."""

    @abstractmethod
    def profile(self, folder: Path) -> AbstractContextManager[Any]:
        """Profiles while the block runs, and writes the profile to ``folder``."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describes devices and versions, for the log and the manifest."""

    # -- may be overridden ------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Starts a new run with the initial weights that its task asks for, if any."""
        first = self.task.first_weights(self.model)
        if first:
            self.load(State({**self.state().weights, **first}, {}), weights_only=True)

    def data_memory(self) -> int:
        """Returns how many bytes of data may stay on each device, now that the network is there."""
        return RESIDENT_BYTES

    def prepare(self, periods: Sequence[Any], splits: Sequence[str] = (), step: int = 0) -> float:
        """Begins to read training data, and compiles ahead of time, so that the first step does not.

        Args:
            periods: the numbers of steps between the boundaries of the run, at which a chunk ends.
            splits: the splits that will be evaluated.
            step: the step at which training begins.

        Returns:
            The seconds that compiling took; 0 if the first step compiles.
        """
        if self.pipeline.resident(TRAIN) is None:
            self.pipeline.start(step)
        return 0.0

    def compiles_at(self, step: int) -> bool:
        """Returns whether training compiles before it trains ``step``, so that its time does not measure the speed."""
        return False

    def evaluation_batches(self, split: str) -> Generator[tuple[Any, Any], None, None]:
        """Yields this process's parts of batches in storage order, with weights; the last batch is padded."""
        return self.pipeline.evaluation(split, self._evaluation_batch_size(split), self.process, self.processes)

    def evaluation_results(self, split: str) -> Generator[BatchResult, None, None]:
        """Yields the results of one batch after the other."""
        with closing(self.evaluation_batches(split)) as batches:
            for batch, weights in batches:
                yield self.evaluate_batch(batch, weights)

    def fetch(self, values: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """Copies results to the host."""
        return {name: np.asarray(value) for name, value in values.items()}

    def augmentation_seeds(self) -> Any:
        """Returns the seeds of the augmentation if they are inputs of a program; None if they are constants."""
        return None

    def run_on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a small function of tensors once, on the host, so that no device compiles anything for it."""
        return function(*arguments)


def check_divisible(config: Config, replicas: int) -> None:
    """Raises `UserError` unless every replica gets an equal part of every batch."""
    batch, pieces = config.train_batch_size, config.gradient_accumulation
    if batch % (replicas * pieces):
        by = f"{replicas} devices" + (f" × {pieces} micro-batches (gradient_accumulation)" if pieces > 1 else "")
        fitting = max(batch // (replicas * pieces), 1) * replicas * pieces
        numbers = [n for n in range(1, replicas) if batch % (n * pieces) == 0]
        others = f", or {' or '.join(map(str, numbers[-3:]))} devices" if numbers else ""
        raise UserError(f"train_batch_size {batch} can't be divided evenly over {by}. Use {fitting}{others}.")


def lost_peer(group: ProcessGroup, error: Exception) -> Exception:
    """Returns the reason for an error of a process that cannot reach another one, as the process group knows it."""
    reason = group.explain(error)
    return reason if reason is not error else PeerLostError(f"another process of the run cannot be reached: {error}")


def out_of_memory(config: Config) -> TrainingError:
    """Returns the error for a device that has too little memory."""
    return TrainingError(
        f"the device ran out of memory at train_batch_size {config.train_batch_size} (eval_batch_size "
        f"{config.eval_batch_size}). Try a smaller one, gradient_accumulation to keep the batch and save memory, "
        "precision bfloat16, or resident never, which keeps no data on the device."
    )
