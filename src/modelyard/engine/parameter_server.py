"""Asynchronous training with parameter servers: the chief schedules steps, idle workers compute them.

The variables are on the parameter servers. Step k is global batch k, computed in whole by one worker and applied when
it is done, whatever the others have changed meanwhile. The chief counts: each step of a chunk is applied at least once.
A step whose worker dies is given to another; updates that the first has already applied stay.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import queue
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from modelyard.cluster.description import CHIEF, PS, WORKER, Cluster, Member, ProcessGroup
from modelyard.compat.keras import set_precision
from modelyard.compat.tensorflow import place_next_variable, schedule_python
from modelyard.config.schema import Config
from modelyard.data.dataset import TRAIN, Arrays
from modelyard.engine.base import Engine, State, StepMetrics
from modelyard.engine.catalog import parameter_server_problems
from modelyard.engine.evaluation import BatchResult
from modelyard.engine.tensorflow import TensorFlowEngine
from modelyard.engine.tensorflow_strategy import server_at
from modelyard.errors import ClusterError, ConfigError, PeerLostError, TrainingError, UserError
from modelyard.system.machine import available_cores

log = logging.getLogger("modelyard")
_WORKER = re.compile(r"/job:worker/replica:0/task:(\d+)")
_LOST = re.compile(r"from remote target /job:(ps|worker)/replica:0/task:(\d+)")
SERVERS_SECONDS = 60
"""The time that the other servers may take to answer, after all processes have joined."""
AHEAD = 4
"""Steps per worker that are scheduled ahead: enough to keep it busy, few enough to fit into memory."""


class _Workers(logging.Filter):
    """Replaces TensorFlow's log messages about workers by ours. Its other messages are raised as errors as well."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether TensorFlow's own message is logged too."""
        message = record.getMessage()
        worker = _WORKER.search(message)
        if worker is not None and record.msg.startswith("Worker %s failed"):
            log.warning(
                "worker %s was lost: its step goes to another worker, and it can rejoin once all workers are there",
                worker[1],
            )
        elif worker is not None and record.msg.startswith("Worker %s has been recovered"):
            log.info("worker %s is back", worker[1])
        about_steps = ("closure", "Remote function", "Cluster update failed", "Worker %s failed")
        return record.levelno >= logging.ERROR and not any(words in record.msg for words in about_steps)


class ParameterServerEngine(TensorFlowEngine):
    """The chief's engine: makes the variables on the parameter servers and schedules steps.

    Args:
        config: the resolved config.
        group: the processes of the run; this one is the chief. Its ``spec`` is TensorFlow's cluster spec, with the
            addresses of chief, workers and parameter servers.
    """

    def __init__(self, config: Config, group: ProcessGroup) -> None:
        Engine.__init__(self, config, group)
        problems = parameter_server_problems(config)
        if problems:
            raise ConfigError(problems)
        self.spec = group.spec
        self.replicas = 1  # each step is computed by one worker
        self.devices = [WORKER]
        self.threads = config.threads or available_cores()
        self._lost: PeerLostError | None = None
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        group.on_peer_lost(self.abort)
        set_precision(config)
        with self._explained_errors():
            addresses = tuple((role, tuple(at)) for role, at in self.spec.items())
            self.strategy, self.coordinator = _connect(addresses, self.threads)

    # -- variables --------------------------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Prepares the functions that workers run."""
        super().set_up()
        self._counters = [v for v in self.optimizer.variables if v.path.endswith("/iteration")]
        self._evaluate_function = tf.function(self._replica_evaluate, autograph=False)

    @contextlib.contextmanager
    def variable_scope(self) -> Iterator[None]:
        """Places each variable on the server with the fewest bytes; an optimizer's slots go with their variable."""
        sizes = [0] * len(self.spec[PS])

        def place(make: Callable[..., Any], **options: Any) -> Any:
            place_next_variable(self.strategy, sizes.index(min(sizes)))
            variable = make(**options)
            server = tf.DeviceSpec.from_string(variable.device).task
            sizes[server] += variable.dtype.size * variable.shape.num_elements()
            return variable

        with self._explained_errors(), super().variable_scope(), tf.variable_creator_scope(place):
            yield

    # -- training ---------------------------------------------------------------------------------------------------

    def train_chunk(self, step: int, count: int) -> StepMetrics:
        """Trains ``count`` steps from ``step`` on, each on an idle worker."""
        function = self.function_for(step, self._trace)
        with self._explained_errors():
            table = np.stack(list(self._spread(lambda *_: function, self._training_batches(step, count))))
            for counter in self._counters:
                counter.assign(step + count - self.phases.start(step))
        return {name: table[:, column] for column, name in enumerate(self._metric_names)}

    def _trace(self) -> Any:
        """Traces a step here, since workers cannot."""
        features = self.pipeline.features.items()
        batch = {name: tf.TensorSpec([self.config.train_batch_size, *f.shape], f.dtype) for name, f in features}
        numbers = tf.TensorSpec([self.config.train_batch_size], tf.int32)
        function = tf.function(self._train_step, autograph=False)
        traced = function.get_concrete_function(batch, numbers, tf.TensorSpec([], tf.int64))
        self._metric_names = [*self._replica_metric_names, "learning_rate"]
        return traced

    def _training_batches(self, step: int, count: int) -> Iterator[tuple[dict[str, Any], Any, Any]]:
        """Yields the global batches from ``step`` on, with the row numbers of their examples and their steps."""
        all_rows = self.pipeline.rows(step, count)
        for number, (rows, batch) in enumerate(zip(all_rows, self._host_batches(step, count, all_rows), strict=True)):
            yield _tensors(batch), tf.constant(rows, tf.int32), tf.constant(step + number, tf.int64)

    def _host_batches(self, step: int, count: int, all_rows: NDArray[Any]) -> Iterator[Arrays]:
        resident, size = self.pipeline.resident(TRAIN), self.config.train_batch_size
        if resident is not None:
            yield from ({name: array[rows] for name, array in resident.items()} for rows in all_rows)
            return
        while count:
            with self.pipeline.training(step, count) as (arrays, length):
                for first in range(0, length * size, size):
                    # Copied: the stream reads the next batches into the same memory.
                    yield {name: array[first : first + size].copy() for name, array in arrays.items()}
            step, count = step + length, count - length

    def _train_step(self, batch: dict[str, Any], numbers: Any, step: Any) -> Any:
        """Computes one step on a worker."""
        learning_rate = self.schedule(step)
        sums = self._replica_step([batch], tf.range(self.config.train_batch_size), numbers, step, learning_rate)
        return tf.concat([sums, [tf.cast(learning_rate, sums.dtype)]], axis=0)

    def apply_gradients(self, gradients: list[Any], step: Any) -> None:
        """Applies the gradients with the optimizer's step count set to ``step``: its own count would miss steps,
        since workers read and write it at the same time.
        """
        counted = step - self._phase_start
        with keras.StatelessScope(state_mapping=[(counter, counted) for counter in self._counters]) as scope:
            super().apply_gradients(gradients, step)
        # Slots were changed in place. Variables that an optimizer assigns through Keras were only collected.
        counters = {id(counter) for counter in self._counters}
        for variable in self.optimizer.variables:
            value = scope.get_current_value(variable)
            if value is not None and id(variable) not in counters:
                variable.assign(value)

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate_batch(self, batch: Arrays, weights: NDArray[np.float64]) -> BatchResult:
        """Evaluates a batch."""
        (result,) = self._evaluated([(batch, weights)])
        return result

    def evaluation_results(self, split: str) -> Generator[BatchResult, None, None]:
        """Yields the results of one batch after the other. Workers compute several at once."""
        yield from self._evaluated(self.evaluation_batches(split))

    def _evaluated(self, batches: Iterable[tuple[Arrays, NDArray[np.float64]]]) -> Iterator[BatchResult]:
        # Copied: batches that are read ahead are overwritten when the next one is read.
        calls = ((_tensors({name: a.copy() for name, a in batch.items()}), tf.constant(w)) for batch, w in batches)
        with self._explained_errors():
            for result in self._spread(self._evaluate_function.get_concrete_function, calls):
                yield BatchResult(*result)

    # -- workers and servers ----------------------------------------------------------------------------------------

    def _spread(self, traced: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Runs a function for each of ``calls`` on an idle worker. Yields the results in order.

        Args:
            traced: returns the function for the arguments of a call.
            calls: the arguments; read one by one, only a few ahead of the workers.
        """
        scheduled: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._results = queue.SimpleQueue()  # one per chunk: after an error, late results are dropped
        threading.Thread(target=_fetch, args=(scheduled, self._results), daemon=True).start()
        pending, most = 0, AHEAD * len(self.spec[WORKER])
        try:
            for arguments in calls:
                call = partial(_computed, traced(*arguments), arguments)
                scheduled.put(schedule_python(self.coordinator, call))
                pending += 1
                if pending == most:
                    yield self._next_result()
                    pending -= 1
            for _ in range(pending):
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
        """Raises a `PeerLostError` where the engine waits, now or later. Called from another thread.

        TensorFlow itself waits forever for a worker that is alive and does not answer.
        """
        self._lost = PeerLostError(message)
        self._results.put(self._lost)

    @contextlib.contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Explains errors that come from other processes."""
        try:
            yield
        except Exception as error:
            reason = self.group.explain(self._translated(error))
            if reason is error:
                raise
            raise reason from error

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, tf.errors.ResourceExhaustedError):
            return TrainingError(
                f"a worker ran out of memory at train_batch_size {self.config.train_batch_size}, eval_batch_size "
                f"{self.config.eval_batch_size}. Try smaller ones, gradient_accumulation, or precision bfloat16."
            )
        if isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError | tf.errors.CancelledError):
            return PeerLostError(self._who_was_lost(str(error)))
        return error

    def _who_was_lost(self, error: str) -> str:
        named = sorted(_LOST.findall(error))  # a parameter server before the workers that miss it
        if not named:
            return "TensorFlow lost a process of the run and does not report which."
        role, index = named[0][0], int(named[0][1])
        what, kept = ("parameter server", ", and with it its part of the variables") if role == PS else (role, "")
        return f"{what} {index} at {self.spec[role][index]} was lost{kept}. Resume the run from its last checkpoint."

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Returns a copy of the state."""
        with self._explained_errors():
            return super().state()

    def assign(self, weights: dict[str, NDArray[Any]], optimizer: dict[str, NDArray[Any]]) -> None:
        """Sets the named variables."""
        with self._explained_errors():
            super().assign(weights, optimizer)

    def describe(self) -> dict[str, Any]:
        """Describes devices and versions."""
        named = {role: [f"{Member(role, i)} at {a}" for i, a in enumerate(self.spec[role])] for role in (WORKER, PS)}
        return super().describe() | {"devices": named[WORKER], "parameter_servers": named[PS]}


@lru_cache
def _connect(spec: tuple[tuple[str, tuple[str, ...]], ...], threads: int) -> tuple[Any, Any]:
    """Returns the strategy and the coordinator; one per process, which is part of the cluster from then on."""
    addresses = {role: list(at) for role, at in spec}
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(threads, waiting_threads(addresses)))
        tf.config.set_visible_devices([], "GPU")  # the chief does not compute
    except RuntimeError as error:
        raise UserError(
            f"TensorFlow already runs in this process and cannot join a cluster any more: {error} Start a new process."
        ) from error
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(addresses), rpc_layer="grpc", task_type=CHIEF, task_id=0
    )
    tf.get_logger().addFilter(_Workers())
    tf.get_logger().setLevel(logging.INFO)  # it logs at this level that a worker is back
    # TensorFlow holds the GIL while it waits for the servers, so our own health check cannot run meanwhile.
    faulthandler.dump_traceback_later(SERVERS_SECONDS, exit=True)
    try:
        with server_at(addresses[CHIEF][0], addresses):
            strategy = tf.distribute.ParameterServerStrategy(resolver)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return strategy, tf.distribute.coordinator.ClusterCoordinator(strategy)


def _computed(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Runs ``function`` on the current worker and copies its result here."""
    return tf.nest.map_structure(lambda value: value.numpy(), function(*arguments))


def _fetch(scheduled: queue.SimpleQueue[Any], results: queue.SimpleQueue[Any]) -> None:
    """Waits for the results in order, in a thread, so that the main thread can be woken by something else."""
    while (remote := scheduled.get()) is not None:
        try:
            results.put(remote.fetch())
        except Exception as error:  # raised in `_next_result`
            results.put(error)


def _tensors(batch: Arrays) -> dict[str, Any]:
    return {name: tf.constant(array) for name, array in batch.items()}


# -- the servers of workers and parameter servers -----------------------------------------------------------------

_running: list[tf.distribute.Server] = []
"""Servers of this process. Without a reference, Python would stop them."""


def waiting_threads(spec: dict[str, list[str]]) -> int:
    """Returns the number of threads for operations that wait for other processes.

    A step over several processes holds a thread of each until it is done. With too few threads the steps deadlock;
    with one thread, the first step does.
    """
    return 4 + 2 * len(spec[WORKER])


def serve_tensorflow(cluster: Cluster, spec: dict[str, list[str]], threads: int = 0, gpu: int | None = 0) -> None:
    """Starts this process's TensorFlow server, which serves until the process ends; returns at once.

    Args:
        cluster: the processes of the run; this one is a worker or a parameter server.
        spec: TensorFlow's cluster spec: addresses by role, with the port that the chief's own server has.
        threads: the number of threads that compute; 0: one per core.
        gpu: the GPU that a worker uses, if it exists; None for the CPU.

    Raises:
        ClusterError: if it cannot listen on its address.
    """
    me = cluster.me
    threads = threads or available_cores()
    options = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=max(threads, waiting_threads(spec))
    )
    if me.role == WORKER and gpu is not None and gpu < len(tf.config.list_physical_devices("GPU")):
        options.gpu_options.visible_device_list = str(gpu)
        options.gpu_options.allow_growth = True
    else:
        options.device_count["GPU"] = 0
    try:
        with server_at(spec[me.role][me.index], spec):
            server = tf.distribute.Server(
                tf.train.ClusterSpec(spec), job_name=me.role, task_index=me.index, protocol="grpc", config=options
            )
    except tf.errors.OpError as error:
        raise ClusterError(
            f"{me} cannot listen on {spec[me.role][me.index]}: {error.message}. Is another process using that port?"
        ) from error
    _running.append(server)
