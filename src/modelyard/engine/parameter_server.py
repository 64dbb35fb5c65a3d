"""Asynchronous training with parameter servers: the chief hands out steps, workers compute them as they come free.

The variables lie on the parameter servers. Step k is global batch k, computed in whole by one worker and applied when
it is done, whatever the others have changed meanwhile. The chief counts: a stretch is so many steps, each applied at
least once. A step whose worker dies under way is given to another, and what the first had already applied of it stays.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from modelyard.cluster.roles import CHIEF, PS, WORKER, Cluster, Member
from modelyard.config.schema import Config
from modelyard.data.dataset import TRAIN, Arrays
from modelyard.engine.base import Batches, Engine, State, StepMetrics
from modelyard.engine.tensorflow import TensorFlowEngine, set_precision
from modelyard.engine.tensorflow_server import waiting_threads
from modelyard.errors import ConfigError, PeerLostError, Problem, TrainingError
from modelyard.models.task import Task
from modelyard.run.machine import available_cores

log = logging.getLogger("modelyard")
_WORKER = re.compile(r"/job:worker/replica:0/task:(\d+)")
_LOST = re.compile(r"from remote target /job:(?P<role>ps|worker)/replica:0/task:(?P<index>\d+)")
AHEAD = 4
"""Steps for each worker that are handed out or wait to be: enough to keep it busy, few enough to fit into memory."""


class _Workers(logging.Filter):
    """What TensorFlow logs of workers, in words. What else its coordinator logs is raised as an error as well."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether TensorFlow's own words are to be logged too."""
        message = record.getMessage()
        worker = _WORKER.search(message)
        if worker is not None and record.msg.startswith("Worker %s failed"):
            log.warning(
                "worker %s was lost: its step goes to another, and it is taken back once all workers are there",
                worker[1],
            )
        elif worker is not None and record.msg.startswith("Worker %s has been recovered"):
            log.info("worker %s is back", worker[1])
        about_steps = ("closure", "Remote function", "Cluster update failed", "Worker %s failed")
        return record.levelno >= logging.ERROR and not any(words in record.msg for words in about_steps)


class ParameterServerEngine(TensorFlowEngine):
    """The chief's side: makes the variables on the parameter servers and hands out steps.

    Args:
        config: the resolved config.
        cluster: the processes of the run; this one is the chief.
        spec: TensorFlow's cluster spec: addresses by role, with the port that this process's own server is to have.
    """

    def __init__(self, config: Config, cluster: Cluster, spec: dict[str, list[str]]) -> None:
        Engine.__init__(self, config)
        refuse_options(config)
        self.cluster, self.spec = cluster, spec
        self.replicas = 1  # each step is computed by one worker
        self.threads = config.threads or available_cores()
        self.devices = [f"{Member(WORKER, i)} at {address}" for i, address in enumerate(spec[WORKER])]
        self._lost: PeerLostError | None = None
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        set_precision(config)
        with self._talking():
            self.strategy, self.coordinator = _connect(tuple((role, tuple(at)) for role, at in spec.items()))

    # -- variables --------------------------------------------------------------------------------------------------

    def set_up_model(self, make_task: Callable[[], Task]) -> None:
        """Makes the variables on the parameter servers, then the functions that workers run."""
        with self._talking():
            super().set_up_model(make_task)
        self._counters = [v for v in self.optimizer.variables if v.path.endswith("/iteration")]
        self._evaluate_function = tf.function(self._replica_evaluate, autograph=False)

    @contextlib.contextmanager
    def variable_scope(self) -> Iterator[None]:
        """Each variable goes to the server that has the fewest bytes; an optimizer's slots go with their variable."""
        held = [0] * len(self.spec[PS])

        def place(make: Callable[..., Any], **options: Any) -> Any:
            # The strategy takes turns: variable number n goes to server n modulo servers.
            self.strategy.extended._variable_count = held.index(min(held))
            variable = make(**options)
            held[tf.DeviceSpec.from_string(variable.device).task] += variable.dtype.size * variable.shape.num_elements()
            return variable

        with self.strategy.scope(), tf.variable_creator_scope(place):
            yield

    # -- training ---------------------------------------------------------------------------------------------------

    def train(self, step: int, count: int) -> StepMetrics:
        """Trains ``count`` steps from ``step`` on, each on whichever worker is free."""
        if self._train_function is None:
            features = self.pipeline.features.items()
            batch = {name: tf.TensorSpec([self.config.train_batch_size, *f.shape], f.dtype) for name, f in features}
            function = tf.function(self._train_step, autograph=False)
            self._train_function = function.get_concrete_function(batch, tf.TensorSpec([], tf.int64))
            self._metric_names = [*self._replica_metric_names, "learning_rate"]
        with self._talking():
            table = np.stack(list(self._spread(lambda *_: self._train_function, self._training_batches(step, count))))
            for counter in self._counters:
                counter.assign(step + count)
        return {name: table[:, column] for column, name in enumerate(self._metric_names)}

    def _training_batches(self, step: int, count: int) -> Iterator[tuple[dict[str, Any], Any]]:
        """The global batches from ``step`` on, one at a time, with their steps."""
        held = self.pipeline.resident(TRAIN)
        if held is not None:
            for number, rows in enumerate(self.pipeline.rows(step, count)):
                yield (
                    _tensors({name: array[rows] for name, array in held.items()}),
                    tf.constant(step + number, tf.int64),
                )
            return
        size = self.config.train_batch_size
        while count:
            with self.pipeline.training(step, count) as (arrays, length):
                for number in range(length):
                    # Copied: the stream reads the next batches into the same places.
                    batch = {name: array[number * size : (number + 1) * size].copy() for name, array in arrays.items()}
                    yield _tensors(batch), tf.constant(step + number, tf.int64)
            step, count = step + length, count - length

    def _train_step(self, batch: dict[str, Any], step: Any) -> Any:
        """One step, as a worker runs it."""
        self._learning_rate = self.schedule(step)
        sums = self._replica_step([batch], tf.range(self.config.train_batch_size), step)
        return tf.concat([sums, [tf.cast(self._learning_rate, sums.dtype)]], axis=0)

    def apply_gradients(self, gradients: list[Any], step: Any) -> None:
        """Changes the variables. The optimizer is told which step this is: its own count would miss steps, since
        workers read and write it at the same time.
        """
        with keras.StatelessScope(state_mapping=[(counter, step) for counter in self._counters]) as scope:
            super().apply_gradients(gradients, step)
        # Slots were changed in place. What an optimizer changes by Keras's own means was only collected.
        counters = {id(counter) for counter in self._counters}
        for variable in self.optimizer.variables:
            value = scope.get_current_value(variable)
            if value is not None and id(variable) not in counters:
                variable.assign(value)

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate_batch(self, batch: Arrays, weights: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Sums over a batch of each statistic times the example's weight."""
        sums, _ = next(self.evaluate_batches(iter([(batch, weights)])))
        return sums

    def evaluate_batches(self, batches: Batches) -> Iterator[tuple[dict[str, NDArray[np.float64]], NDArray[Any]]]:
        """`evaluate_batch` for each of ``batches``, several at a time, in order."""
        weights: deque[NDArray[np.float64]] = deque()

        def calls() -> Iterator[tuple[dict[str, Any], Any]]:
            for batch, each in batches:
                weights.append(each)
                yield _tensors({name: array.copy() for name, array in batch.items()}), tf.constant(each)

        with self._talking():
            for sums in self._spread(self._evaluate_function.get_concrete_function, calls()):
                yield sums, weights.popleft()

    # -- workers and servers ----------------------------------------------------------------------------------------

    def _spread(self, traced: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Runs a function for each of ``calls``, on whichever worker is free. Gives the results in order.

        Args:
            traced: gives the function for the arguments of a call.
            calls: the arguments; taken one by one, only a few ahead of the workers.
        """
        scheduled: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results = queue.SimpleQueue()  # one for each stretch: after an error, late results are nobody's
        threading.Thread(target=_fetch, args=(scheduled, self._results), daemon=True).start()
        under_way, most = 0, AHEAD * len(self.spec[WORKER])
        try:
            for arguments in calls:
                # `coordinator.schedule` takes no Python function, and what it takes is no good: the result is fetched
                # after the call, and one whose worker dies in between is an error and not tried again.
                call = partial(_computed, traced(*arguments), arguments)
                scheduled.put(self.coordinator._cluster.schedule(call, (), {}))
                under_way += 1
                if under_way == most:
                    yield self._next_result()
                    under_way -= 1
            for _ in range(under_way):
                yield self._next_result()
        finally:
            scheduled.put(None)

    def _next_result(self) -> Any:
        if self._lost is not None:
            raise self._lost
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def abort(self, message: str) -> None:
        """Ends what the engine waits for, now or from now on, with a `PeerLostError`. Called from another thread.

        TensorFlow itself waits for ever for a worker that is there and does not answer.
        """
        self._lost = PeerLostError(message)
        self._results.put(self._lost)

    @contextlib.contextmanager
    def _talking(self) -> Iterator[None]:
        """Errors of other processes, in words."""
        try:
            yield
        except tf.errors.ResourceExhaustedError as error:
            raise TrainingError(
                f"a worker ran out of memory at train_batch_size {self.config.train_batch_size}, eval_batch_size "
                f"{self.config.eval_batch_size}. Try smaller ones, gradient_accumulation, or precision bfloat16."
            ) from error
        except tf.errors.OpError as error:
            lost = _LOST.search(str(error))
            if lost is None and not isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError):
                raise
            raise PeerLostError(self._who_was_lost(lost)) from error

    def _who_was_lost(self, lost: re.Match[str] | None) -> str:
        if lost is None:
            return "a process of the run was lost"
        role, index = lost["role"], int(lost["index"])
        what = {PS: "parameter server", WORKER: "worker"}[role]
        keeps = ", and with it a part of the variables; the run goes on from its last checkpoint" if role == PS else ""
        return f"{what} {index} at {self.spec[role][index]} was lost{keeps}."

    def state(self) -> State:
        """A copy of everything that is learned."""
        with self._talking():
            return super().state()

    def assign(self, weights: dict[str, NDArray[Any]], optimizer: dict[str, NDArray[Any]]) -> None:
        """Sets the named variables."""
        with self._talking():
            super().assign(weights, optimizer)


@lru_cache
def _connect(spec: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[Any, Any]:
    """The strategy and the coordinator; one for a process, which is part of the cluster from then on."""
    addresses = {role: list(at) for role, at in spec}
    tf.config.threading.set_inter_op_parallelism_threads(waiting_threads(addresses))
    tf.config.set_visible_devices([], "GPU")  # the chief does not compute
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(addresses), rpc_layer="grpc", task_type=CHIEF, task_id=0
    )
    tf.get_logger().addFilter(_Workers())
    tf.get_logger().setLevel(logging.INFO)  # that a worker is back is only an information
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


def _computed(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Runs ``function`` on the worker whose turn it is, and brings what it gives here."""
    return tf.nest.map_structure(lambda value: value.numpy(), function(*arguments))


def _fetch(scheduled: queue.SimpleQueue[Any], results: queue.SimpleQueue[Any]) -> None:
    """Waits for one result after the other, in a thread, so that whoever wants them can be woken by something else."""
    while (remote := scheduled.get()) is not None:
        try:
            results.put(remote.fetch())
        except Exception as error:  # raised by whoever takes it
            results.put(error)


def _tensors(batch: Arrays) -> dict[str, Any]:
    return {name: tf.constant(array) for name, array in batch.items()}


def refuse_options(config: Config) -> None:
    """Refuses what can't be where every worker trains at its own pace.

    Raises:
        ConfigError: with every such option.
    """
    several = config.num_gpus == "all" or (config.num_gpus != "auto" and config.num_gpus > 1)
    problems = {
        "deterministic": config.deterministic and "with parameter servers workers race by design, so no run repeats.",
        "scale_learning_rate": config.scale_learning_rate
        and "a step has one worker's batch here, however many workers there are; set learning_rate itself.",
        "precision": config.precision == "float16"
        and "float16 needs a loss scale, which workers would change under each other; use bfloat16 or float32.",
        "xla": config.xla and "can't compile steps whose variables lie on parameter servers.",
        "cpu_devices": config.cpu_devices > 1 and "a worker computes on one device; start more workers instead.",
        "num_gpus": several and "a worker computes on one GPU; start a worker for each.",
    }
    found = [Problem(config.origin(key), key, message) for key, message in problems.items() if message]
    if found:
        raise ConfigError(found)
