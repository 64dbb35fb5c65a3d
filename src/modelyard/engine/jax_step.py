"""One training step, and many, as pure functions for JAX to compile; and the placement of their arrays on devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from modelyard.config.schema import Config
from modelyard.data.augment.build import augmentation_seeds
from modelyard.data.dataset import Feature
from modelyard.data.draws import fold
from modelyard.engine.batch_functions import BatchFunctions
from modelyard.engine.input_numbers import Number, input_numbers, set_to, values_of
from modelyard.engine.jax_inputs import RunInputs, StepInputs
from modelyard.engine.network import Network, next_average, seed_states, slot_owners

_AXIS = "batch"
"""The name of the axis along which the devices lie."""
_LARGE = 1 << 16
"""The number of elements from which a parameter is worth sharding."""
_COPIED_BYTES = 1 << 30
"""The state is copied on the device only if it is smaller: a large model needs the memory."""


class Layout:
    """The placement of a run's arrays on the devices.

    Args:
        devices: all devices.
        shards: whether large parameters are sharded over the devices.
    """

    def __init__(self, devices: Sequence[Any], shards: bool) -> None:
        self.mesh, self.shards = Mesh(np.array(devices), (_AXIS,)), shards
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.sharded = NamedSharding(self.mesh, PartitionSpec(_AXIS))
        self.sharded_pieces = NamedSharding(self.mesh, PartitionSpec(None, None, _AXIS))

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return bool(self.mesh.devices.flat[0].platform == "cpu")

    @property
    def on_gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return bool(self.mesh.devices.flat[0].platform == "gpu")

    @property
    def replicas(self) -> int:
        """The number of devices, over all processes."""
        return int(self.mesh.devices.size)

    def split(self, value: Any) -> Any:
        """Inside a program: shards a batch over the devices."""
        return jax.lax.with_sharding_constraint(value, self.sharded) if self.replicas > 1 else value

    def replicate(self, array: NDArray[Any]) -> Any:
        """Copies an array to every device."""
        return self._put(array, self.replicated)

    def put_batch(self, array: NDArray[Any]) -> Any:
        """Shards a batch over the devices; ``array`` is this process's part of it."""
        return self._put_part(np.array(array), self.sharded)

    def put_pieces(self, array: NDArray[Any], batches: int, pieces: int) -> Any:
        """Shards each piece of some batches over the devices; ``array`` is this process's part of all of them.

        The array must not change before the result is ready.
        """
        parts = array.reshape(batches, pieces, -1, *array.shape[1:])
        # On a CPU JAX could go on to use its memory.
        return self._put_part(np.array(parts) if self.on_cpu else parts, self.sharded_pieces)

    def put_state(self, array: NDArray[Any]) -> Any:
        """Copies a parameter or a slot; sharded along its longest divisible axis if it is large and `shards` is set."""
        return self._put(array, self._state_sharding(array.shape))

    def shape_of(self, value: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape, type and sharding of an array, to compile a program for it."""
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)

    def batch_shapes(
        self, features: Mapping[str, Feature], shape: tuple[int, int, int]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the same for batches, before there are any: their number, the pieces of each, the size of a piece."""
        return {
            name: jax.ShapeDtypeStruct((*shape, *feature.shape), feature.dtype, sharding=self.sharded_pieces)
            for name, feature in features.items()
        }

    def fetch(self, value: Any) -> NDArray[Any]:
        """Copies to the host; if other processes hold parts of it, all must call this together."""
        if not value.is_fully_addressable and not value.is_fully_replicated:
            value = multihost_utils.process_allgather(value, tiled=True)
        return np.array(value)

    def fetch_all(self, values: list[Any]) -> list[NDArray[Any]]:
        """Copies many arrays to the host at once."""
        for value in values:
            value.copy_to_host_async()
        return [self.fetch(value) for value in values]

    def _state_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        if not self.shards or np.prod(shape) < _LARGE:
            return self.replicated
        sides = [(size, axis) for axis, size in enumerate(shape) if size % self.replicas == 0]
        if not sides:
            return self.replicated
        axis = max(sides)[1]
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, _AXIS))

    def _put(self, array: NDArray[Any], sharding: NamedSharding) -> Any:
        """Copies an array that every process has in whole."""
        if self.on_cpu:  # JAX could otherwise share its memory
            array = np.array(array)
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def _put_part(self, array: NDArray[Any], sharding: NamedSharding) -> Any:
        if jax.process_count() > 1:
            return jax.make_array_from_process_local_data(sharding, array)
        return jax.device_put(array, sharding)


class TrainState(NamedTuple):
    """Everything that training changes, as lists of arrays."""

    trained: list[Any]
    statistics: list[Any]
    slots: list[Any]
    averages: list[Any]
    """Averages of `trained`, in the same order; none without ema_decay."""

    @property
    def evaluated(self) -> tuple[list[Any], list[Any]]:
        """Weights and statistics of the model that is evaluated."""
        return self.averages or self.trained, self.statistics


def joined(values: Sequence[Any]) -> dict[str, Any]:
    """Inside a program: returns all values of each type as one array, which is copied to the host at once."""
    found: dict[str, list[Any]] = {}
    for value in values:
        found.setdefault(str(value.dtype), []).append(value.reshape(-1))
    return {name: jnp.concatenate(parts) for name, parts in found.items()}


def separated(together: dict[str, Any], values: Sequence[Any]) -> list[NDArray[Any]]:
    """Returns arrays with the shapes of ``values`` from the result of `joined`, on the host."""
    for array in together.values():
        array.copy_to_host_async()
    whole, starts, found = {name: np.array(array) for name, array in together.items()}, dict.fromkeys(together, 0), []
    for value in values:
        name = str(value.dtype)
        start = starts[name]
        starts[name] = start + value.size
        found.append(whole[name][start : start + value.size].reshape(value.shape))
    return found


def may_be_copied(state: TrainState) -> bool:
    """Returns whether the state is small enough for a copy of it on the device."""
    return bool(sum(value.nbytes for part in state for value in part) < _COPIED_BYTES)


def _filters_first(state: TrainState) -> Any:
    """Returns a state with the kernels of 2D convolutions as [filters, height, width, channels]."""
    return jax.tree.map(lambda value: value.transpose(3, 0, 1, 2) if value.ndim == 4 else value, state)


def _filters_last(state: TrainState) -> Any:
    """Returns the state with kernels as Keras has them: [height, width, channels, filters]."""
    return jax.tree.map(lambda value: value.transpose(1, 2, 3, 0) if value.ndim == 4 else value, state)


def train_state(network: Network) -> TrainState:
    """Returns the variables of a network in the order of a state."""
    return TrainState(network.trained, network.statistics, list(network.optimizer.variables), network.averages)


@partial(jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["names"])
@dataclass(frozen=True)
class MetricTable:
    """The metrics of one step, or of many: a row per step. A compiled program returns the names with the values."""

    values: Any
    names: tuple[str, ...]


class TrainingStep:
    """A training step of a network in one phase of fine-tuning, and its evaluation, as pure functions.

    Args:
        config: the resolved config.
        network: the task with its model and optimizer.
        phase: the index of the phase.
        layout: the placement of arrays on the devices.
        functions: the functions of the task on a batch.
        examples: the number of training examples.
    """

    def __init__(
        self,
        config: Config,
        network: Network,
        phase: int,
        layout: Layout,
        functions: BatchFunctions,
        examples: int,
    ) -> None:
        self.config, self.layout, self.network, self._phase = config, layout, network, phase
        self._functions, self._examples = functions, examples
        self.clip_norm: Any = config.clip_norm
        self.ema_decay: Any = config.ema_decay
        own = [Number(name, self, name) for name in ("clip_norm", "ema_decay") if getattr(self, name)]
        self.numbers = [*input_numbers(network, functions), *own]
        """The numbers that are inputs of the programs."""
        self.model, self.optimizer = network.model, network.optimizer
        self.trained, self.statistics = network.trained, network.statistics
        self.generators = seed_states(network.model)
        self.active = network.freezing.active[phase]
        """Which of the variables are trained in this phase."""
        self._owners = slot_owners(network.optimizer, network.weights, network.slots, network.trained)
        self._kernels = [i for i, v in enumerate(self.trained) if v.path.endswith("kernel")]
        # Batch norm over the examples of one device needs a program per device.
        self.per_device_batch_norm = not self.config.sync_batch_norm and self.layout.replicas > 1
        self._parts = self.config.gradient_accumulation * (self.layout.replicas if self.per_device_batch_norm else 1)

    def run_inputs(self) -> RunInputs:
        """Returns the inputs that are the same at all steps of this run."""
        seed, parts = self.config.random_seed, range(self._parts)
        noise = [
            [fold(seed, 2, generator, part) & 0x7FFFFFFF for part in parts] for generator in range(len(self.generators))
        ]
        words = np.array(noise, np.uint32).reshape(len(self.generators), len(parts))
        inputs = augmentation_seeds(self.config.augment, seed), words, values_of(self.numbers)
        return RunInputs(*map(self.layout.replicate, inputs))

    # -- many steps -------------------------------------------------------------------------------------------------

    def over_resident(
        self, state: TrainState, data: dict[str, Any], inputs: StepInputs, run: RunInputs
    ) -> tuple[TrainState, MetricTable]:
        """Trains a step for each row of ``inputs``, on examples of ``data``."""

        return self._steps(state, inputs, None, lambda state, inputs, _: self._step(state, data, None, inputs, run))

    def over_batches(
        self, state: TrainState, batches: dict[str, Any], inputs: StepInputs, run: RunInputs
    ) -> tuple[TrainState, MetricTable]:
        """Trains a step for each row of ``inputs``, on ``batches``, each of which is given in pieces."""
        return self._steps(
            state, inputs, batches, lambda state, inputs, pieces: self._step(state, None, pieces, inputs, run)
        )

    def _steps(
        self, state: TrainState, inputs: StepInputs, batches: Any, step: Callable[..., tuple[TrainState, MetricTable]]
    ) -> tuple[TrainState, MetricTable]:
        if inputs.rows.shape[0] == 1:
            state, metrics = step(state, *jax.tree.map(lambda part: part[0], (inputs, batches)))
            return state, MetricTable(metrics.values[None], metrics.names)
        # cuDNN reads kernels with their filters first. They stay so between the steps, or each would transpose all.
        transposes = self.layout.on_gpu and self.layout.replicas == 1 and may_be_copied(state)

        def one(state: TrainState, given: tuple[StepInputs, Any]) -> tuple[TrainState, MetricTable]:
            state, metrics = step(_filters_last(state) if transposes else state, *given)
            return _filters_first(state) if transposes else state, metrics

        state, metrics = lax.scan(one, _filters_first(state) if transposes else state, (inputs, batches))
        return _filters_last(state) if transposes else state, metrics

    # -- one step ---------------------------------------------------------------------------------------------------

    def _step(
        self, state: TrainState, data: Any, pieces: Any, inputs: StepInputs, run: RunInputs
    ) -> tuple[TrainState, MetricTable]:
        self.network.freezing.select(self._phase)
        positions = self._positions(inputs)
        step, learning_rate = inputs.numbers[0], inputs.learning_rate
        if self.per_device_batch_norm:
            split = PartitionSpec(None, _AXIS)
            statistics, gradients, sums = jax.shard_map(
                self._gradients,
                mesh=self.layout.mesh,
                in_specs=(PartitionSpec(), PartitionSpec(), split, split, PartitionSpec(), PartitionSpec()),
                out_specs=PartitionSpec(),
                check_vma=False,
            )(state, data, pieces, positions, step, run)
        else:
            statistics, gradients, sums = self._gradients(state, data, pieces, positions, step, run)
        with set_to(self.numbers, run.numbers):
            if self.config.clip_norm is not None:
                gradients = self._clipped(gradients, self.clip_norm, state.slots)
            with self.network.learning_rate.set_to(learning_rate):
                trained, slots = self._applied(gradients, state)
            pairs = zip(state.averages, trained, strict=False)  # none without ema_decay
            averages = [next_average(average, weight, step, self.ema_decay) for average, weight in pairs]
        values = jnp.append(sums.values, learning_rate.astype(sums.values.dtype))
        metrics = MetricTable(values, (*sums.names, "learning_rate"))
        return TrainState(list(trained), statistics, list(slots), averages), metrics

    def _applied(self, gradients: list[Any], state: TrainState) -> tuple[list[Any], list[Any]]:
        """Returns weights and slots after the optimizer; those of frozen weights do not change."""
        trained, slots = self.optimizer.stateless_apply(
            state.slots, self._merged(gradients, [jnp.zeros_like(w) for w in state.trained]), state.trained
        )
        if all(self.active):
            return trained, slots
        kept = [new if on else old for new, old, on in zip(trained, state.trained, self.active, strict=True)]
        moved = [owner is None or self.active[owner] for owner in self._owners]
        return kept, [new if on else old for new, old, on in zip(slots, state.slots, moved, strict=True)]

    def _merged(self, active: list[Any], others: list[Any]) -> list[Any]:
        """Returns ``active`` for the variables that this phase trains, ``others`` for the rest."""
        remaining = iter(active)
        return [next(remaining) if on else other for on, other in zip(self.active, others, strict=True)]

    def _positions(self, inputs: StepInputs) -> dict[str, Any]:
        """Returns the position, row and epoch of each example of a batch, cut into pieces."""
        _, low, high, epoch, first, _ = inputs.numbers
        index = jnp.arange(inputs.rows.shape[0], dtype=jnp.uint32)
        lows = low + index
        positions = {
            "low": lows,
            "high": high + (lows < low).astype(jnp.uint32),
            "rows": inputs.rows,
            "epochs": (epoch + (first + index) // jnp.uint32(self._examples)).astype(jnp.int32),
        }
        pieces = self.config.gradient_accumulation
        return {name: value.reshape(pieces, -1) for name, value in positions.items()}

    def _gradients(
        self, state: TrainState, data: Any, pieces: Any, positions: Any, step: Any, run: RunInputs
    ) -> tuple[Any, Any, Any]:
        """Returns new statistics, gradients of the mean loss, and means of loss and metrics, over all pieces."""

        def add_piece(carried: Any, inputs: Any) -> tuple[Any, Any]:
            statistics, gradients, sums = carried
            number, positions, batch = inputs
            if data is not None:
                batch = {name: jnp.take(array, positions["rows"], axis=0) for name, array in data.items()}
            if not self.per_device_batch_norm:
                batch = {name: self.layout.split(value) for name, value in batch.items()}
            batch = self._functions.preprocess(batch, True, **positions, seeds=run.augmentation)
            noise = self._noise(step, number, run.noise)

            def objective(active: list[Any]) -> tuple[Any, Any]:
                trained = self._merged(active, state.trained)
                return self._objective(trained, statistics, noise, state.slots, batch)

            active = [weight for weight, on in zip(state.trained, self.active, strict=True) if on]
            new, (statistics, new_sums) = jax.grad(objective, has_aux=True)(active)
            if gradients is not None:
                new, new_sums = jax.tree.map(jnp.add, (gradients, sums), (new, new_sums))
            return (statistics, new, new_sums), None

        count = self.config.gradient_accumulation
        inputs = (jnp.arange(count), positions, pieces)
        first = jax.tree.map(lambda x: x[0], inputs)
        with set_to(self.numbers, run.numbers):
            carried, _ = add_piece((state.statistics, None, None), first)
            if count > 1:
                rest = jax.tree.map(lambda x: x[1:], inputs)
                carried, _ = lax.scan(add_piece, carried, rest, unroll=self.layout.on_cpu or 1)
        statistics, gradients, sums = carried
        if self.per_device_batch_norm:
            gradients, sums = lax.psum((gradients, sums), _AXIS)
            statistics = [lax.pmean(s, _AXIS) if moved else s for s, moved in zip(statistics, self._moved, strict=True)]
        return statistics, gradients, sums

    def _objective(self, trained: Any, statistics: Any, noise: Any, slots: Any, batch: Any) -> tuple[Any, Any]:
        mapping = [*zip(self.trained, trained, strict=True), *zip(self.statistics, statistics, strict=True)]
        mapping += [*zip(self.generators, noise, strict=True), *zip(self.optimizer.variables, slots, strict=True)]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = self._functions.outputs(batch, training=True)
            losses = list(self.model.losses)
            kernels = [trained[i] for i in self._kernels if self.active[i]]
            total, means = self._functions.objective(outputs, batch, losses, kernels, self._parts)
            total = self.optimizer.scale_loss(total)
        changed = [scope.get_current_value(v) for v in self.statistics]
        # The others are equal on every device; their mean would differ in the last bit.
        self._moved = [
            new is not old and jnp.issubdtype(new.dtype, jnp.floating)
            for new, old in zip(changed, statistics, strict=True)
        ]
        return total, (changed, MetricTable(jnp.stack(list(means.values())), tuple(means)))

    def _noise(self, step: Any, piece: Any, words: Any) -> list[Any]:
        """Returns the states of the random generators: a function of seed, step, piece and, if apart, device."""
        part = piece * self.layout.replicas + lax.axis_index(_AXIS) if self.per_device_batch_norm else piece
        # Room for many draws before the next step's.
        return [jnp.stack([words[i, part], step * jnp.uint32(1009)]) for i in range(len(self.generators))]

    def _clipped(self, gradients: list[Any], most: Any, slots: list[Any]) -> list[Any]:
        """Clips gradients of the whole batch to a norm of at most ``most``."""
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))
        scale = getattr(self.optimizer, "dynamic_scale", None)
        if scale is not None:
            index = next(i for i, v in enumerate(self.optimizer.variables) if v is scale)
            most = most * slots[index]
        elif self.optimizer.loss_scale_factor is not None:
            most = most * self.optimizer.loss_scale_factor
        # A norm that is not finite makes the gradients NaN, so that the step is detected.
        factor = jnp.where(jnp.isfinite(norm), jnp.minimum(most / jnp.maximum(norm, 1e-30), 1), jnp.nan)
        return [g * factor.astype(g.dtype) for g in gradients]

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self, trained: Any, statistics: Any, numbers: Any, batch: dict[str, Any], weights: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns sums over a batch of each statistic times the example's weight, and values of each example."""
        mapping = [*zip(self.trained, trained, strict=True), *zip(self.statistics, statistics, strict=True)]
        with keras.StatelessScope(state_mapping=mapping), set_to(self.numbers, numbers):
            values, examples = self._functions.evaluation(batch)
        sums = {
            name: jnp.tensordot(weights, value.astype(weights.dtype), axes=[[0], [0]]) for name, value in values.items()
        }
        return sums, examples

    def predict(self, trained: Any, statistics: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the predictions for each example of a batch."""
        mapping = [*zip(self.trained, trained, strict=True), *zip(self.statistics, statistics, strict=True)]
        with keras.StatelessScope(state_mapping=mapping):
            return self._functions.predictions(batch)
