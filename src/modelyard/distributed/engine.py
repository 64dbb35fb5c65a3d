"""Makes any engine distributed: the coordinator broadcasts each call before it makes it, the followers repeat it.

What depends on the clock, a signal or a hook is decided by the coordinator alone, so nothing of it has to be agreed on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard import faults
from modelyard.config.durations import RunLength
from modelyard.data.dataset import Arrays, Dataset
from modelyard.distributed.connection import Message
from modelyard.distributed.coordinator import Coordinator
from modelyard.distributed.follower import Follower
from modelyard.engine.base import Engine, State, StepMetrics
from modelyard.engine.evaluation import BatchResult
from modelyard.engine.network import Network
from modelyard.errors import ClusterError
from modelyard.run.tensors import pack_tensors, unpack_tensors
from modelyard.system.activity import COMPILING, TRAINING, report

_WEIGHTS, _OPTIMIZER = "weights/", "optimizer/"


class CoordinatedEngine(Engine):
    """The coordinator's engine.

    Args:
        engine: the engine of this process.
        group: the processes that train together with this one.
    """

    group: Coordinator

    def __init__(self, engine: Engine, group: Coordinator) -> None:
        self.local, self.group = engine, group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def build(self, network: Network, dataset: Dataset, length: RunLength) -> None:
        """Builds the local engine; each process builds its own."""
        self.local.build(network, dataset, length)

    def initialize(self) -> None:
        """Sends the coordinator's initial weights to all, whatever each machine has drawn."""
        self.local.initialize()
        self.load(self.state())

    def prepare(self, periods: Sequence[Any], splits: Sequence[str] = (), step: int = 0) -> float:
        """Compiles in all processes."""
        self.group.broadcast("prepare", periods=[float(p) for p in periods], splits=list(splits), step=step)
        return self.local.prepare(periods, splits, step)

    def compiles_at(self, step: int) -> bool:
        """Returns whether the local engine compiles before it trains ``step``."""
        return self.local.compiles_at(step)

    def train(self, step: int, count: int) -> StepMetrics:
        """Trains in all processes."""
        self.group.broadcast("train", step=step, count=count)
        with self.group.explained():
            return self.local.train(step, count)

    def train_chunk(self, step: int, count: int) -> StepMetrics:
        """Not called: `train` has the local engine train."""
        raise NotImplementedError

    def variable_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Creates variables where the local engine wants them."""
        return self.local.variable_scope()

    def set_up(self) -> None:
        """Not called: `build` has the local engine do it."""
        raise NotImplementedError

    def evaluation_batches(self, split: str) -> Generator[tuple[Any, Any], None, None]:
        """Yields this process's part of every batch; all processes take part until the generator is closed."""
        self.group.broadcast("evaluate", split=split)
        try:
            for batch in self.local.evaluation_batches(split):
                self.group.broadcast("batch")
                yield batch
        finally:
            with contextlib.suppress(ClusterError):  # a process is lost; that is being raised already
                self.group.broadcast("end_evaluation")

    def evaluate_batch(self, batch: Arrays, weights: NDArray[np.float64]) -> BatchResult:
        """Evaluates this process's part of a batch."""
        with self.group.explained():
            return self.local.evaluate_batch(batch, weights)

    def fetch(self, values: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """Brings results to the host."""
        with self.group.explained():
            return self.local.fetch(values)

    def predict_batch(self, batch: Arrays) -> dict[str, Any]:
        """Predicts in this process alone."""
        return self.local.predict_batch(batch)

    def state(self) -> State:
        """Returns a copy of everything that is learned, from all processes that hold a part of it."""
        if self.local.state_is_sharded:
            self.group.broadcast("gather")
        return self.local.state()

    def assign(self, weights: dict[str, NDArray[Any]], optimizer: dict[str, NDArray[Any]]) -> None:
        """Sets the named variables in all processes."""
        both = ((_WEIGHTS, weights), (_OPTIMIZER, optimizer))
        named = {prefix + name: array for prefix, arrays in both for name, array in arrays.items()}
        self.group.broadcast("load", pack_tensors(named))
        self.local.assign(weights, optimizer)

    def profile(self, folder: Path) -> contextlib.AbstractContextManager[Any]:
        """Profiles this process."""
        return self.local.profile(folder)

    def augmentation_seeds(self) -> Any:
        """Returns those of the local engine."""
        return self.local.augmentation_seeds()

    def run_on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function in this process alone."""
        return self.local.run_on_host(function, *arguments)

    def describe(self) -> dict[str, Any]:
        """Describes the devices of this process."""
        return self.local.describe()

    def close(self) -> None:
        """Stops reading ahead."""
        self.local.close()


def follow(engine: Engine, group: Follower) -> tuple[int, Message]:
    """Repeats the coordinator's calls on the engine of a follower until the run ends.

    Returns:
        The last step, and the command that ended the run.
    """
    step = 0
    while (command := group.next_command()).kind != "end":
        fields = command.fields
        with group.explained():
            if command.kind == "train":
                doing = COMPILING if engine.compiles_at(fields["step"]) else TRAINING
                report(doing, fields["step"], fields["step"] + fields["count"])
                engine.train(fields["step"], fields["count"])
                faults.trained(fields["step"], fields["count"])
                step = fields["step"] + fields["count"]
            elif command.kind == "evaluate":
                report("evaluating", step or None)
                with contextlib.closing(engine.evaluation_batches(fields["split"])) as batches:
                    _evaluate(engine, batches, group)
            elif command.kind == "prepare":
                report(COMPILING)
                engine.prepare(fields["periods"], fields["splits"], fields["step"])
            elif command.kind == "gather":
                engine.state()
            elif command.kind == "load":
                named = unpack_tensors(command.payload, "the state that the coordinator sent")
                engine.assign(_with_prefix(named, _WEIGHTS), _with_prefix(named, _OPTIMIZER))
            else:
                raise ClusterError(f"the coordinator sent an unknown command: {command.kind!r}.")
        if command.kind == "train":
            report(TRAINING, step)
    return step, command


def _evaluate(engine: Engine, batches: Iterator[tuple[Any, Any]], group: Follower) -> None:
    while group.next_command().kind == "batch":
        engine.evaluate_batch(*next(batches))


def _with_prefix(named: dict[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): array for name, array in named.items() if name.startswith(prefix)}
