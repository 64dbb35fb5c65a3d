"""The TensorFlow engine: one device, or all devices of a machine by `tf.distribute`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from modelyard.cluster.description import ProcessGroup
from modelyard.compat.keras import fuse_batch_norm_sync, leave_summing_to_the_engine, sublayers
from modelyard.compat.tensorflow import local_value
from modelyard.config.schema import Config
from modelyard.data.dataset import TRAIN, Arrays
from modelyard.data.draws import fold
from modelyard.engine.base import Engine, State, StepMetrics, lost_peer, out_of_memory
from modelyard.engine.evaluation import BatchResult
from modelyard.engine.network import next_average, seed_states
from modelyard.engine.tensorflow_strategy import all_reduce, one_machine, set_up_devices, several_machines
from modelyard.errors import TrainingError, UserError

tf.get_logger().setLevel("ERROR")  # its advice on retracing does not apply here
_UNREACHABLE = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


class TensorFlowEngine(Engine):
    """Many compiled steps per call: a `tf.while_loop` around `strategy.run`, over data that lies on the devices."""

    name = "tensorflow"

    def __init__(self, config: Config, group: ProcessGroup | None = None) -> None:
        super().__init__(config, group)
        if self.group.size > 1:
            self.strategy, self.devices = several_machines(config, self.group)
            self.process, self.processes = self.group.rank, self.group.size
        else:
            self.devices = set_up_devices(config)
            self.strategy = one_machine(tuple(self.devices))
        self.replicas = len(self.devices) * self.processes
        self.threads = tf.config.threading.get_intra_op_parallelism_threads()
        if config.xla and self.replicas > 1:
            raise UserError("xla needs one device with the tensorflow engine. Turn it off, or use one device.")
        if config.shard_parameters:
            raise UserError("shard_parameters needs the JAX engine: use --engine jax, or --no_shard_parameters.")
        if config.deterministic:
            tf.config.experimental.enable_op_determinism()

    @contextmanager
    def variable_scope(self) -> Iterator[None]:
        """Creates variables under the strategy."""
        keras.utils.set_random_seed(fold(self.config.random_seed, 1))
        with self.strategy.scope():
            yield

    def set_up(self) -> None:
        """Prepares the functions to compile."""
        fuse_batch_norm_sync()
        for layer in sublayers(self.model):
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = self.config.sync_batch_norm and self.replicas > 1
        leave_summing_to_the_engine(self.optimizer)
        # Pairs of a weight and its average; none without ema_decay.
        self._averages = list(zip(self.network.trained, self.network.averages, strict=False))
        self._seeds = seed_states(self.model)
        self._changing: dict[int, Any] = {}
        self._statistics = self.network.statistics
        self._resident: list[dict[str, Any]] | None = None
        self._train_functions: dict[int, Any] = {}
        self._active: list[Any] = []
        self._phase_start = 0
        self._metric_names: list[str] = []
        self._evaluate_function = tf.function(self._evaluate_on_replicas, autograph=False)
        self._predict_function = tf.function(self._predict_on_replicas, autograph=False)

    # -- training ---------------------------------------------------------------------------------------------------

    def train_chunk(self, step: int, count: int) -> StepMetrics:
        """Trains ``count`` steps from ``step`` on."""
        if not self._train_functions:
            resident = self.pipeline.resident(TRAIN)
            self._resident = None if resident is None else self._copies(resident)
        function = self.function_for(step, self._compile_training)
        pieces = []
        while count:
            if self._resident is not None:
                length = count
                numbers = self.pipeline.rows(step, count).astype(np.int32)
                pieces.append(self._run_chunk(function, self._resident, numbers, numbers, step))
            else:
                with self.pipeline.training(step, count) as (arrays, length):
                    data, rows = self._distributed(arrays, length)
                    numbers = self.pipeline.rows(step, length).astype(np.int32)
                    pieces.append(self._run_chunk(function, data, rows, numbers, step))
            step, count = step + length, count - length
        table = np.concatenate(pieces)
        return {name: table[:, column] for column, name in enumerate(self._metric_names)}

    def compiles_at(self, step: int) -> bool:
        """Returns True for the first chunk of each phase, which is traced then."""
        return self.phases.of(step) not in self._train_functions

    def function_for(self, step: int, make: Callable[[], Any]) -> Any:
        """Returns the compiled function of the phase of ``step``; ``make`` makes one that is not traced yet."""
        phase = self.phases.of(step)
        if phase not in self._train_functions:
            # It is traced in its first call, which reads these.
            freezing = self.network.freezing
            freezing.select(phase)
            self._phase_start, self._changing = self.phases.start(step), {}
            self._active = [v for v, on in zip(freezing.trained, freezing.active[phase], strict=True) if on]
            self._train_functions[phase] = make()
        return self._train_functions[phase]

    def _distributed(self, arrays: Arrays, count: int) -> tuple[list[dict[str, Any]], NDArray[np.int32]]:
        """Returns each device's parts of ``count`` batches, and the rows of the examples in them."""
        pieces, replicas = self.config.gradient_accumulation, len(self.devices)
        share = self.config.train_batch_size // (pieces * self.replicas)
        local = np.arange(count * pieces * share, dtype=np.int32).reshape(count, pieces, 1, share)
        rows = np.broadcast_to(local, (count, pieces, self.replicas, share)).reshape(count, -1)
        distributed = []
        for replica, device in enumerate(self.devices):
            with tf.device(device):
                mine = {}
                for name, array in arrays.items():
                    cut = array.reshape(count, pieces, replicas, share, *array.shape[1:])[:, :, replica]
                    mine[name] = tf.convert_to_tensor(cut.reshape(-1, *array.shape[1:]))
                distributed.append(mine)
        return distributed, rows

    def _run_chunk(
        self, function: Any, data: list[dict[str, Any]], rows: NDArray[np.int32], numbers: NDArray[np.int32], step: int
    ) -> NDArray[Any]:
        try:
            table: NDArray[Any] = function(data, rows, numbers, np.int64(step)).numpy()
            return table
        except tf.errors.ResourceExhaustedError as error:
            raise out_of_memory(self.config) from error
        except _UNREACHABLE as error:
            if self.processes == 1:
                raise
            raise lost_peer(self.group, error) from error
        except tf.errors.UnimplementedError as error:
            what = str(error.message).strip().splitlines()[-1 if self.config.xla else 0]
            hints = [name for name in ("xla", "deterministic") if getattr(self.config, name)]
            raise TrainingError(
                f"TensorFlow cannot run this model with {' and '.join(hints) or 'this engine'}: {what}"
            ) from error

    def _copies(self, arrays: Arrays) -> list[dict[str, Any]]:
        """Copies the arrays to every device."""
        copies = []
        for device in self.devices:
            with tf.device(device):
                copies.append({name: tf.convert_to_tensor(arrays[name]) for name in self.feature_names})
        return copies

    def _compile_training(self) -> Any:
        features = self.pipeline.features
        data = {name: tf.TensorSpec([None, *f.shape], f.dtype) for name, f in features.items()}
        batch_size = self.config.train_batch_size
        signature = (
            [data] * len(self.devices),
            tf.TensorSpec([None, batch_size], tf.int32),
            tf.TensorSpec([None, batch_size], tf.int32),
            tf.TensorSpec([], tf.int64),
        )
        return tf.function(self._train_steps, input_signature=signature, autograph=False)

    def _train_steps(self, data: list[dict[str, Any]], rows: Any, numbers: Any, first: Any) -> Any:
        """Trains one step per row of ``rows`` and ``numbers``, in one compiled loop."""
        count = tf.shape(rows)[0]
        run_step = tf.function(self._replica_step, jit_compile=True) if self.config.xla else self._replica_step

        def body(i: Any, table: Any) -> tuple[Any, Any]:
            step = first + tf.cast(i, tf.int64)
            learning_rate = self.schedule(step)
            sums = self.strategy.run(run_step, args=(data, rows[i], numbers[i], step, learning_rate))
            metrics = self.strategy.experimental_local_results(sums)[0]  # every replica has the sums over all
            metrics = tf.concat([metrics, [tf.cast(learning_rate, metrics.dtype)]], axis=0)
            return i + 1, table.write(i, metrics)

        table = tf.TensorArray(keras.config.floatx(), size=count)
        # Steps depend on each other; looking for parallelism between them only costs time.
        _, table = tf.while_loop(lambda i, _: i < count, body, (tf.constant(0), table), parallel_iterations=1)
        self._metric_names = [*self._replica_metric_names, "learning_rate"]
        return table.stack()

    def _replica_step(self, data: list[dict[str, Any]], rows: Any, numbers: Any, step: Any, learning_rate: Any) -> Any:
        """Computes one replica's part of one step. Returns the means of loss and metrics over the global batch.

        Args:
            data: for each device, the arrays that hold its examples.
            rows: the indices of the examples in those arrays.
            numbers: the indices of the examples in the training split.
            step: the step.
            learning_rate: the learning rate of the step.
        """
        context = tf.distribute.get_replica_context()
        replica = _replica_number(context)
        mine = data[replica - self.process * len(self.devices)]
        batch_size, pieces = self.config.train_batch_size, self.config.gradient_accumulation
        share = batch_size // (pieces * self.replicas)
        gradients: list[Any] | None = None
        sums: Any = 0.0
        for piece in range(pieces):
            start = (piece * self.replicas + replica) * share
            position = step * batch_size + start + tf.range(share, dtype=tf.int64)
            low = tf.cast(tf.bitwise.bitwise_and(position, tf.constant(0xFFFFFFFF, tf.int64)), tf.uint32)
            high = tf.cast(tf.bitwise.right_shift(position, tf.constant(32, tf.int64)), tf.uint32)
            chosen = rows[start : start + share]
            batch = {name: tf.gather(array, chosen) for name, array in mine.items()}
            epochs = tf.cast(position // self.pipeline.run.examples, tf.int32)
            batch = self.functions.preprocess(batch, True, low, high, numbers[start : start + share], epochs)
            noise = piece * self.replicas + replica
            new_gradients, new_sums = self._gradients(batch, step, noise)
            sums = sums + new_sums
            gradients = new_gradients if gradients is None else _added(gradients, new_gradients)
        assert gradients is not None
        if self.replicas > 1:
            gradients, sums = self._summed(context, gradients, sums)
        if self.config.clip_norm is not None:
            gradients = self._clipped(gradients, self.config.clip_norm)
        with self.network.learning_rate.set_to(learning_rate):
            self.apply_gradients(gradients, step)
        return sums

    def apply_gradients(self, gradients: list[Any], step: Any) -> None:
        """Applies the gradients and updates the averages."""
        self.optimizer.apply(gradients, self._active)
        # Every replica has the same weights by now, and computes the same averages of them.
        for weight, average in self._averages:
            value = next_average(
                local_value(average).read_value(), local_value(weight).read_value(), step, self.config.ema_decay
            )
            local_value(average).assign(value)

    def _gradients(self, batch: dict[str, Any], step: Any, noise: int) -> tuple[list[Any], Any]:
        """Returns gradients and sums of loss and metrics, each divided by the global batch size."""
        parts = self.replicas * self.config.gradient_accumulation
        seeds = [(state, self._seed_value(i, step, noise)) for i, state in enumerate(self._seeds)]
        with tf.GradientTape() as tape:
            # Within the scope nothing is assigned: the values that layers would assign are collected.
            with keras.StatelessScope(state_mapping=seeds, collect_losses=True) as scope:
                outputs = self.functions.outputs(batch, training=True)
                losses = list(self.model.losses)
            kernels = [v.value for v in self._active if v.path.endswith("kernel")]
            total, means = self.functions.objective(outputs, batch, losses, kernels, parts)
            total = self.optimizer.scale_loss(total)
        gradients = tape.gradient(total, [v.value for v in self._active])
        self._assign_statistics(scope)
        self._replica_metric_names = list(means)
        return gradients, tf.stack(list(means.values()))

    def _clipped(self, gradients: list[Any], most: float) -> list[Any]:
        """Clips gradients of the global batch to a norm of at most ``most``."""
        scale = getattr(self.optimizer, "dynamic_scale", None)
        fixed = 1.0 if self.optimizer.loss_scale_factor is None else self.optimizer.loss_scale_factor
        limit = most * fixed if scale is None else most * tf.cast(scale.value, tf.float32)
        clipped, _ = tf.clip_by_global_norm([g for g in gradients if g is not None], limit)
        remaining = iter(clipped)
        return [None if g is None else next(remaining) for g in gradients]

    def _seed_value(self, generator: int, step: Any, noise: int) -> Any:
        """Returns the state of a random generator: a function of seed, step and replica, so that no two share noise."""
        first = fold(self.config.random_seed, 2, generator, noise) & 0x7FFFFFFF
        return tf.stack([tf.constant(first, tf.int64), step * 1009])  # room for many draws before the next step's

    def _assign_statistics(self, scope: Any) -> None:
        for variable in self._statistics:
            value = scope.get_current_value(variable)
            if value is not None:
                local_value(variable).assign(value)
                self._changing[id(variable)] = variable

    def _summed(self, context: Any, gradients: list[Any], sums: Any) -> tuple[list[Any], Any]:
        """Sums gradients and metrics over all replicas in one operation: between machines each costs a round trip.

        Unless batch norm is synchronised, moving averages are averaged over the replicas with them, so that all
        replicas have the same state. They are linear in the batches, so once per step is enough.
        """
        present = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        averages = [] if self.config.sync_batch_norm else [local_value(v) for v in self._changing.values()]
        # TensorFlow keeps the order within a function: these reads follow the assignments above.
        tensors = [*present, sums, *(average.read_value() for average in averages)]
        reduced = all_reduce(context, tensors)
        for average, total in zip(averages, reduced[len(present) + 1 :], strict=True):
            average.assign(total / self.replicas)
        remaining = iter(reduced)
        return [None if g is None else next(remaining) for g in gradients], reduced[len(present)]

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate_batch(self, batch: Arrays, weights: NDArray[np.float64]) -> BatchResult:
        """Evaluates a batch."""
        tensors = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
        found = self._evaluate_function(tensors, tf.convert_to_tensor(weights))
        return BatchResult(*({name: value.numpy() for name, value in part.items()} for part in found))

    def _evaluate_on_replicas(self, batch: dict[str, Any], weights: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        sums, examples = self.strategy.run(self._replica_evaluate, args=(batch, weights))
        total = partial(self.strategy.reduce, tf.distribute.ReduceOp.SUM, axis=None)
        return (
            {name: total(value) for name, value in sums.items()},
            {name: total(value) for name, value in examples.items()},
        )

    def _part_of_replica(self, values: Any) -> Any:
        """Returns the part of each array that belongs to the replica that is traced."""
        replica = _replica_number(tf.distribute.get_replica_context()) - self.process * len(self.devices)
        share = tf.nest.flatten(values)[0].shape[0] // len(self.devices)
        return tf.nest.map_structure(lambda value: value[replica * share : (replica + 1) * share], values)

    def _replica_evaluate(self, batch: dict[str, Any], weights: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        batch, weights = self._part_of_replica((batch, weights))
        with self._averaged():
            statistics, examples = self.functions.evaluation(batch)
        sums = {
            name: tf.tensordot(weights, tf.cast(value, tf.float64), axes=[[0], [0]])
            for name, value in statistics.items()
        }
        return sums, {name: self._at_their_places(values) for name, values in examples.items()}

    def _at_their_places(self, values: Any) -> Any:
        """Returns values of this replica's examples within those of the whole batch, 0 for the others.

        The sum over the replicas then has all values, without another kind of message between processes.
        """
        replica, share = _replica_number(tf.distribute.get_replica_context()), values.shape[0]
        if values.dtype in (tf.bool, tf.uint8, tf.int8, tf.uint16, tf.int16):  # devices sum no such numbers
            values = tf.cast(values, tf.int32)
        ends = [replica * share, (self.replicas - 1 - replica) * share]
        return tf.pad(values, [ends, *[[0, 0]] * (len(values.shape) - 1)])

    def predict_batch(self, batch: Arrays) -> dict[str, NDArray[Any]]:
        """Returns the predictions for each example of a batch."""
        found = self._predict_function({name: tf.convert_to_tensor(array) for name, array in batch.items()})
        return {name: values.numpy() for name, values in found.items()}

    def _predict_on_replicas(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = self.strategy.run(self._replica_predict, args=(batch,))
        return {
            name: tf.concat(self.strategy.experimental_local_results(values), axis=0) for name, values in found.items()
        }

    def _replica_predict(self, batch: dict[str, Any]) -> dict[str, Any]:
        with self._averaged():
            return self.functions.predictions(self._part_of_replica(batch))

    def use_averages_as_weights(self) -> None:
        """Replaces the weights by their averages, if there are any: for exports, which only predict."""
        for weight, average in self._averages:
            weight.assign(average.value)
        self._averages = []

    def _averaged(self) -> AbstractContextManager[Any]:
        """Makes the network compute with the averages of its weights while the block runs, if there are any."""
        if not self._averages:
            return nullcontext()
        scope: AbstractContextManager[Any] = keras.StatelessScope(
            [(v, local_value(average)) for v, average in self._averages]
        )
        return scope

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Returns a copy of the state."""
        return State(
            {name: np.array(v.value.numpy()) for name, v in self.network.weights.items()},
            {name: np.array(v.value.numpy()) for name, v in self.network.slots.items()},
        )

    def assign(self, weights: dict[str, NDArray[Any]], optimizer: dict[str, NDArray[Any]]) -> None:
        """Sets the named variables on all devices."""
        for variables, values in ((self.network.weights, weights), (self.network.slots, optimizer)):
            for name, value in values.items():
                variables[name].assign(value.astype(variables[name].dtype))

    def profile(self, folder: Path) -> AbstractContextManager[Any]:
        """Profiles while the block runs, and writes the profile to ``folder``."""
        context: AbstractContextManager[Any] = tf.profiler.experimental.Profile(str(folder))
        return context

    def describe(self) -> dict[str, Any]:
        """Describes devices and versions."""
        return {
            "engine": self.name,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "devices": list(self.devices),
            "threads": self.threads,
            "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
        }


def _replica_number(context: Any) -> int:
    """Returns the replica that is being traced; each gets code for its own part of the batch."""
    number = tf.get_static_value(context.replica_id_in_sync_group)
    if number is None:
        raise RuntimeError("the replica id is not known while its code is traced")
    return int(number)


def _added(some: list[Any], others: list[Any]) -> list[Any]:
    """Adds gradients of two pieces of a batch; None stays None."""
    return [one if other is None else one + other for one, other in zip(some, others, strict=True)]
