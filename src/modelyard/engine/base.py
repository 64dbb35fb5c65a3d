"""What an engine must do, and what every engine does alike.

An engine trains: ``train(step, count)`` runs whole stretches of compiled steps; ``evaluate`` goes through a split once;
``state`` and ``load`` give and take everything that is learned, as named NumPy arrays. It knows nothing of run folders,
hooks or the clock.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from keras import ops
from numpy.typing import NDArray
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from modelyard.cluster.crew import Crew
from modelyard.cluster.follower import Follower
from modelyard.cluster.wire import Message
from modelyard.config.durations import RunLength
from modelyard.config.schema import Config
from modelyard.data.augment.build import build_augmentation, neighbours
from modelyard.data.dataset import Arrays, Dataset
from modelyard.data.draws import halves
from modelyard.data.pipeline import Pipeline, share_of_batch
from modelyard.data.preprocess import batch_preprocessing
from modelyard.engine.averages import averages_to_load, is_average
from modelyard.engine.naming import check_names
from modelyard.engine.network import Network
from modelyard.engine.phases import Phases
from modelyard.engine.views import averaged
from modelyard.errors import ClusterError, TrainingError, UserError
from modelyard.models.cut_floats import warn_of_cut_floats
from modelyard.models.schedules import build_schedule
from modelyard.models.task import Task

log = logging.getLogger("modelyard")
_WEIGHTS, _OPTIMIZER = "weights/", "optimizer/"
StepMetrics = dict[str, NDArray[np.floating[Any]]]
"""Named metrics of a stretch, one number a step."""


@dataclass(frozen=True)
class State:
    """Everything that is learned, as named arrays."""

    weights: dict[str, NDArray[Any]]
    optimizer: dict[str, NDArray[Any]]


class Engine(ABC):
    """Trains and evaluates one task. Subclasses: one for each framework.

    Args:
        config: the resolved config.
        crew: the other processes of the run; what the lead's engine is asked to do, it has theirs do too.
    """

    name: str
    replicas: int
    devices: list[str]
    """The names of this process's devices."""
    threads: int
    grain = 1
    """How many steps are trained together at the least cost: a stretch should be a multiple of it."""
    process = 0
    """The place of this process among those that share every batch."""
    processes = 1

    def __init__(self, config: Config, crew: Crew) -> None:
        self.config = config
        self.crew = crew

    def build(self, make_task: Callable[[], Task], dataset: Dataset, run: RunLength) -> None:
        """Makes the model, the optimizer and the compiled steps.

        Args:
            make_task: makes the task; called where the engine wants its variables to live.
            dataset: the data of all splits.
            run: the lengths of the run.
        """
        self.check_divisible()
        self.dataset = dataset
        pieces = self.config.gradient_accumulation
        mine = share_of_batch(run.batch_size, pieces, self.processes, self.process)
        self.pipeline = Pipeline(self.config, dataset, run, mine)
        share = run.batch_size // (self.replicas * self.config.gradient_accumulation)
        self._prepare = batch_preprocessing(self.config.preprocess)
        self._augment = build_augmentation(
            self.config.augment, dataset, self.config.random_seed, share, self.pipeline.crops_while_decoding
        )
        self.phases = Phases(self.config, run)
        self.schedule = self._scaled(self.phases.scaled(build_schedule(self.config, run)))
        self.set_up_model(make_task)
        # What the step reads besides the inputs of the network: labels, and whatever else the task may want.
        self.feature_names = list(self.pipeline.features)

    def begin(self) -> None:
        """Has a new run begin with the weights that its task wants, if it wants any."""
        first = self.task.first_weights(self.model)
        if first:
            self.load(State({**self.state().weights, **first}, {}), weights_only=True)

    def preprocess(
        self,
        batch: dict[str, Any],
        training: bool,
        low: Any = None,
        high: Any = None,
        rows: Any = None,
        epochs: Any = None,
        seeds: Any = None,
    ) -> dict[str, Any]:
        """A batch as the network sees it: augmented for training, then the user's preprocessing, then the task's own.

        Args:
            batch: named tensors.
            training: whether this is a training step.
            low, high: for training, the two 32-bit halves of each example's position in the stream.
            rows: for training, the number of each example in its split.
            epochs: for training, the epoch that each example's position belongs to.
            seeds: what augmentations draw from, if it is not to be compiled into the program.
        """
        if training:
            batch = self._augment(batch, low, high, rows, epochs, seeds)
        batch = self.task.preprocess(self._prepare(batch, training), training)
        warn_of_cut_floats(self.task, self.model, batch)
        return self.task.weigh(batch) if training else batch

    def evaluation_outputs(self, forward: Callable[[dict[str, Any]], Any], batch: dict[str, Any]) -> Any:
        """What the network gives for a preprocessed batch in evaluation, averaged over views where the config says so.

        Args:
            forward: from a batch to the network's outputs.
            batch: named tensors.
        """
        return averaged(forward, batch, self.config.test_time_augmentation)

    def close(self) -> None:
        """Ends what reads ahead."""
        self.pipeline.close()

    def check_divisible(self) -> None:
        """Every replica gets an equal share of every batch."""
        batch, pieces = self.config.train_batch_size, self.config.gradient_accumulation
        if batch % (self.replicas * pieces):
            by = f"{self.replicas} devices" + (f" × {pieces} pieces (gradient_accumulation)" if pieces > 1 else "")
            fitting = max(batch // (self.replicas * pieces), 1) * self.replicas * pieces
            numbers = [n for n in range(1, self.replicas) if batch % (n * pieces) == 0]
            others = f", or {' or '.join(map(str, numbers[-3:]))} devices" if numbers else ""
            raise UserError(f"train_batch_size {batch} can't be divided evenly over {by}. Use {fitting}{others}.")

    def adopt(self, network: Network) -> None:
        """Takes what is trained for its own."""
        self.network = network
        self.task, self.model, self.optimizer = network.task, network.model, network.optimizer
        self._weights, self._slots = network.weights, network.slots

    @abstractmethod
    def set_up_model(self, make_task: Callable[[], Task]) -> None:
        """Makes task, model and optimizer, and whatever runs them."""

    def _scaled(self, schedule: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if not self.config.scale_learning_rate or self.replicas == 1:
            return schedule
        log.info("the learning rate is multiplied by %d, the number of devices", self.replicas)
        return lambda step: schedule(step) * self.replicas

    def prepare(self, periods: Sequence[Any], splits: Sequence[str] = ()) -> float:
        """Gets ready to train, and to evaluate on ``splits``, so that nothing is compiled in the first step.

        Args:
            periods: the numbers of steps between the boundaries of the run, at which a stretch ends.
            splits: what will be evaluated.

        Returns:
            The seconds that it took to compile; 0 if the first step will.
        """
        return 0.0

    def compiles_at(self, step: int) -> bool:
        """Whether training compiles before it trains ``step``, so that its time says nothing of the speed."""
        return False

    def train(self, step: int, count: int) -> StepMetrics:
        """Trains ``count`` steps from ``step`` on, on the global batches that those steps have."""
        stretches = []
        for first, length in self.phases.cut(step, count):
            self.phases.announce(first, self.network.freezing)
            self.crew.tell("train", step=first, count=length)
            with self._explained():
                stretches.append(self._train_in_phase(first, length))
        if len(stretches) == 1:
            return stretches[0]
        return {name: np.concatenate([metrics[name] for metrics in stretches]) for name in stretches[0]}

    def _train_in_phase(self, step: int, count: int) -> StepMetrics:
        """Every process does this, at the same steps."""
        if self.phases.begins_at(step):
            self.assign({}, self.network.cleared_optimizer())
        return self.train_stretch(step, count)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What fails because another process is gone is told as that."""
        try:
            yield
        except Exception as error:
            reason = self.crew.explain(error)
            if reason is error:
                raise
            raise reason from error

    @abstractmethod
    def train_stretch(self, step: int, count: int) -> StepMetrics:
        """Trains ``count`` steps of one phase from ``step`` on in this process, on its share of their batches."""

    @abstractmethod
    def evaluate_batch(self, batch: Arrays, weights: NDArray[np.float64]) -> dict[str, Any]:
        """Sums over a batch of each statistic times the example's weight; they may still be under way to the host.

        Args:
            batch: this process's share of the batch.
            weights: 1 for every example in it, 0 for those that only fill it up.

        Returns:
            Sums over the whole batch, the shares of all processes together.
        """

    @abstractmethod
    def state(self) -> State:
        """A copy of everything that is learned."""

    def gather(self) -> State:
        """This process's part in `state`, where what is learned is divided over processes."""
        return self.state()

    @abstractmethod
    def assign(self, weights: dict[str, NDArray[Any]], optimizer: dict[str, NDArray[Any]]) -> None:
        """Sets the named variables."""

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """The shapes of all weights and of all optimizer slots."""
        weights = {name: tuple(v.shape) for name, v in self._weights.items()}
        return weights, {name: tuple(v.shape) for name, v in self._slots.items()}

    @abstractmethod
    def start_profile(self, folder: Path) -> None:
        """Begins a profile, to be written to ``folder``."""

    @abstractmethod
    def stop_profile(self) -> None:
        """Ends the profile and writes it."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Devices and versions, for the log and the manifest."""

    def evaluate(self, split: str, progress: Callable[[int, int], None] | None = None) -> dict[str, float]:
        """Metrics over ``split``, every example counted exactly once.

        Args:
            split: which one.
            progress: called with the number of examples done and of all.
        """
        size = self.dataset.size(split)
        totals: dict[str, NDArray[np.float64]] = {}
        waiting: deque[dict[str, Any]] = deque()

        def add() -> None:
            with self._explained():
                for name, value in waiting.popleft().items():
                    totals[name] = totals.get(name, 0.0) + np.asarray(value, np.float64)

        with contextlib.closing(self._evaluation(split)) as batches:
            for done, sums in batches:
                waiting.append(sums)
                if len(waiting) > 2:  # the device has something to do meanwhile
                    add()
                if progress is not None:
                    progress(done, size)
        while waiting:
            add()
        return self._summary({name: total / size for name, total in totals.items()})

    @abstractmethod
    def predict_batch(self, batch: Arrays) -> dict[str, Any]:
        """What the task predicts for each example of a batch; it may still be under way to the host."""

    def predict(self, split: str, first: int = 0) -> Generator[dict[str, NDArray[Any]], None, None]:
        """What the task predicts for the examples of ``split``, one batch after the other in storage order.

        Args:
            split: which one.
            first: the example to begin with.
        """
        waiting: deque[tuple[int, dict[str, Any]]] = deque()

        def fetched() -> dict[str, NDArray[Any]]:
            count, found = waiting.popleft()
            return {name: np.asarray(values)[:count] for name, values in found.items()}

        for batch, weights in self.pipeline.evaluation(split, self._evaluation_batch_size(split), first=first):
            waiting.append((int(weights.sum()), self.predict_batch(batch)))
            if len(waiting) > 2:  # the device has something to do meanwhile
                yield fetched()
        while waiting:
            yield fetched()

    def predictions(self, forward: Callable[[dict[str, Any]], Any], batch: dict[str, Any]) -> dict[str, Any]:
        """What the task predicts for a batch of raw examples, as tensors.

        Args:
            forward: from a batch to the network's outputs.
            batch: named tensors.
        """
        seen = self.preprocess(batch, False)
        return self.task.predictions(self.evaluation_outputs(forward, seen), seen)

    def metric_names(self, split: str) -> list[str]:
        """What an evaluation on ``split`` measures, found out on its first batch."""
        with contextlib.closing(self._evaluation(split)) as batches:
            done, sums = next(batches)
        means = {name: np.asarray(total, np.float64) / done for name, total in sums.items()}
        return list(self._summary(means))

    def _evaluation(self, split: str) -> Generator[tuple[int, dict[str, Any]], None, None]:
        """The sums of one batch after the other, with the number of examples done. All processes take part until it is
        closed.
        """
        size, batch_size = self.dataset.size(split), self._evaluation_batch_size(split)
        self.crew.tell("evaluate", split=split)
        try:
            for number, (batch, weights) in enumerate(self._evaluation_batches(split), start=1):
                self.crew.tell("batch")
                with self._explained():
                    sums = self.evaluate_batch(batch, weights)
                yield min(number * batch_size, size), sums
        finally:
            with contextlib.suppress(ClusterError):  # someone is gone; that is on its way up already
                self.crew.tell("enough")

    def _evaluation_batches(self, split: str) -> Generator[tuple[Arrays, NDArray[np.float64]], None, None]:
        """This process's shares of batches in storage order; the last is filled up with examples of weight 0."""
        return self.pipeline.evaluation(split, self._evaluation_batch_size(split), self.process, self.processes)

    def _summary(self, means: dict[str, Any]) -> dict[str, float]:
        loss = float(means.pop("loss"))
        return {"loss": loss, **self.task.summarize(means)}

    def _evaluation_batch_size(self, split: str) -> int:
        """As the config says, filled up so that every replica has an equal share."""
        batch_size = min(self.config.eval_batch_size, self.dataset.size(split))
        return -(-batch_size // self.replicas) * self.replicas

    def out_of_memory(self) -> TrainingError:
        """The error for a device that has too little memory."""
        return TrainingError(
            f"the device ran out of memory at train_batch_size {self.config.train_batch_size} (eval_batch_size "
            f"{self.config.eval_batch_size}). Try a smaller one, gradient_accumulation to keep the batch and save "
            "memory, precision bfloat16, or resident never."
        )

    def load(self, state: State, *, weights_only: bool = False) -> None:
        """Takes back what `state` gave.

        Args:
            state: weights and optimizer slots.
            weights_only: leave the optimizer as it is, but for averages of the weights, which belong to them: where
                there are no slots at all, the averages begin as the weights.

        Raises:
            CheckpointError: if the names or shapes are not those of this model; nothing is changed then.
        """
        weights, slots = self.shapes()
        check_names("weights", weights, state.weights)
        optimizer = state.optimizer
        if weights_only:
            slots = {slot: shape for slot, shape in slots.items() if self.config.ema_decay and is_average(slot)}
            optimizer = averages_to_load(slots, state.weights, optimizer)
        check_names("optimizer slots", slots, optimizer)
        if self.processes > 1:
            both = ((_WEIGHTS, state.weights), (_OPTIMIZER, optimizer))
            named = {
                prefix + name: np.ascontiguousarray(a).reshape(a.shape) for prefix, s in both for name, a in s.items()
            }
            self.crew.tell("load", save_safetensors(named))
        self.assign(state.weights, optimizer)

    def follow(self, crew: Follower) -> tuple[int, Message]:
        """Does what the lead's engine does, until the run is over; gives the last step and the order that said so."""
        step = 0
        while (order := crew.order()).kind != "end":
            if order.kind == "train":
                with self._explained():
                    self._train_in_phase(order.fields["step"], order.fields["count"])
                step = order.fields["step"] + order.fields["count"]
            elif order.kind == "evaluate":
                with contextlib.closing(self._evaluation_batches(order.fields["split"])) as batches:
                    while crew.order().kind == "batch":
                        with self._explained():
                            self.evaluate_batch(*next(batches))
            elif order.kind == "prepare":
                self.prepare(order.fields["periods"], order.fields["splits"])
            elif order.kind == "gather":
                self.gather()
            elif order.kind == "load":
                named = load_safetensors(order.payload)
                weights = {k.removeprefix(_WEIGHTS): a for k, a in named.items() if k.startswith(_WEIGHTS)}
                slots = {k.removeprefix(_OPTIMIZER): a for k, a in named.items() if k.startswith(_OPTIMIZER)}
                self.assign(weights, slots)
            else:
                raise ClusterError(f"the lead asks for {order.kind!r}, which this process does not know.")
        return step, order

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, compiled where running it operation by operation takes longer."""
        return function

    def training_batch(self, step: int, most: int = 32) -> dict[str, NDArray[Any]]:
        """The first examples of a global batch as the network sees them, augmented and preprocessed."""
        together = neighbours(self.config.augment)
        examples, positions = self.pipeline.training_examples(step, max(most - most % together, together))
        batch = {name: ops.convert_to_tensor(array) for name, array in examples.items()}
        low, high = (ops.convert_to_tensor(half) for half in halves(positions))
        rows = ops.convert_to_tensor(self.pipeline.rows(step, 1)[0, : len(positions)].astype(np.int32))
        epochs = ops.convert_to_tensor((positions // self.pipeline.run.examples).astype(np.int32))
        seen = self.compiled(lambda *given: self.preprocess(given[0], True, *given[1:]))(batch, low, high, rows, epochs)
        return {name: ops.convert_to_numpy(value) for name, value in seen.items()}
