"""The JAX engine: many steps compiled into one program, on one device or many, in one process or many.

On accelerators many steps are one `lax.scan` over data that lies on the device; on CPUs, where convolutions inside a
loop are several times slower, they are compiled one by one. Several devices share every batch by sharding: the program
is that of one device, and XLA cuts it up. So batch norm sees the whole batch, as it does on one.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from numpy.typing import NDArray

from modelyard.cluster.description import ProcessGroup
from modelyard.compat.keras import drawn_by_numpy, seed_initializers
from modelyard.config.schema import Config
from modelyard.data.augment.build import augmentation_seeds
from modelyard.data.dataset import TRAIN, Arrays
from modelyard.data.draws import fold
from modelyard.engine.base import Engine, State, StepMetrics, lost_peer, out_of_memory
from modelyard.engine.evaluation import BatchResult
from modelyard.engine.jax_cache import compile_all, counted_compilations
from modelyard.engine.jax_data import DeviceData, data_key, device_data, kept_bytes_on
from modelyard.engine.jax_devices import set_up_devices
from modelyard.engine.jax_inputs import LearningRates, StepInputs
from modelyard.engine.jax_layers import faster_layers
from modelyard.engine.jax_programs import Programs, program_key, shared_programs
from modelyard.engine.jax_step import (
    Layout,
    MetricTable,
    TrainingStep,
    TrainState,
    joined,
    may_be_copied,
    separated,
    train_state,
)
from modelyard.errors import UserError
from modelyard.system.machine import available_cores
from modelyard.system.network import expects_loopback

log = logging.getLogger("modelyard")
_MOST_TOGETHER = 64
_LEAST_TOGETHER = 8
"""Bounds of the steps in one program: enough that the cost of starting it does not matter."""
_WAITING = 2
"""Programs that wait on the device for their turn, if their batches are streamed."""
_STREAMED_BYTES = 16 << 20
"""Streamed batches are trained on together up to this size: large ones take longer than the start of a program."""
_UNREACHABLE = ("UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "Gloo", "NCCL", "Connection")
"""Words in XLA's errors if another process is gone."""


class _Batches(NamedTuple):
    """Batches on the device, or on their way to it."""

    first: int
    """The step of the first one."""
    steps: int
    arrays: dict[str, Any]
    inputs: StepInputs


class JaxEngine(Engine):
    """Many compiled steps per call, with state that never leaves the devices."""

    name = "jax"
    _copies: Generator[_Batches, None, None] | None = None
    _next_batches: _Batches | None = None

    def __init__(self, config: Config, group: ProcessGroup | None = None) -> None:
        super().__init__(config, group)
        self.process, self.processes = self.group.rank, self.group.size
        with expects_loopback("JAX", self.group.spec.get("worker", ())):
            every = set_up_devices(config, self.group)
        self.devices = [f"{d.platform}:{d.id}" for d in every if d.process_index == jax.process_index()]
        self.replicas = len(every)
        self.on_cpu, self.on_gpu = (every[0].platform == name for name in ("cpu", "gpu"))
        self.threads = config.threads or available_cores()
        self.layout = Layout(every, config.shard_parameters)
        self.state_is_sharded = self.layout.shards and self.processes > 1
        if config.xla:
            log.debug("xla has no effect: JAX always compiles with XLA")
        if config.shard_parameters and self.replicas == 1:
            raise UserError("shard_parameters shards large parameters over several devices, but there is one device.")
        if config.shard_parameters and not config.sync_batch_norm:
            raise UserError("shard_parameters needs sync_batch_norm, which is on by default.")

    @contextmanager
    def _types(self) -> Iterator[None]:
        """Enables 64-bit numbers while the block runs, if the config asks for them."""
        with jax.enable_x64(self.config.precision == "float64"):
            yield

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        """Builds models without compiling anything."""
        with self._types(), jax.default_device(jax.local_devices(backend="cpu")[0]), drawn_by_numpy():
            yield

    @contextmanager
    def variable_scope(self) -> Iterator[None]:
        """Creates variables on the host, so that no device compiles anything for them."""
        seed_initializers(fold(self.config.random_seed, 1))
        with self._on_host():
            yield

    def initialize(self) -> None:
        """Starts a new run with the initial weights of its task, which may build other models to read them."""
        with self._on_host():
            super().initialize()

    def set_up(self) -> None:
        """Copies the variables to the devices."""
        self.functions.views_one_by_one = True  # convolutions of a training batch's size, whose kernels XLA has
        rest = (self.layout, self.functions, self.pipeline.run.examples)
        self._steps = [TrainingStep(self.config, self.network, phase, *rest) for phase in range(len(self.phases))]
        variables = train_state(self.network)
        self._index = {id(v): (part, number) for part, vs in enumerate(variables) for number, v in enumerate(vs)}
        with self._types():
            self._state = TrainState(*([self.layout.put_state(np.asarray(v.value)) for v in vs] for vs in variables))
            self._run_inputs = self._steps[0].run_inputs()
        self._rates = LearningRates(self.schedule)
        self._programs: Programs = {}
        self._shared: Programs = {}
        self._is_ready = False
        self._data: dict[str, Any] | None = None
        self._last_inputs: tuple[Any, Any] = (None, None)
        self._device_data = DeviceData()

    def data_memory(self) -> int:
        """Returns half of what is free on the device that has the least; activations and gradients need the rest."""
        devices = self.layout.mesh.local_devices
        stats = [device.memory_stats() or {} for device in devices]
        if not all("bytes_limit" in each for each in stats):  # a CPU
            return super().data_memory()
        # Data of an earlier run is used or freed: the answer is that of a process of its own.
        kept = [kept_bytes_on(device) for device in devices]
        return min(int(s["bytes_limit"] - s["bytes_in_use"]) + k for s, k in zip(stats, kept, strict=True)) // 2

    # -- compiling --------------------------------------------------------------------------------------------------

    def prepare(self, periods: Sequence[Any], splits: Sequence[str] = (), step: int = 0) -> float:
        """Copies the data to the devices or begins to read it, and compiles; returns the seconds of compiling."""
        all_periods = [*periods, *self.phases.periods]
        self.steps_per_call, self._is_ready = 1, True
        with self._types(), self._explained_errors():
            if self._data is None:
                self._place_data()
            if not self.on_cpu and not self.config.deterministic:
                self.steps_per_call = _choose_steps_per_call(all_periods, self._most_together())
            if self._data is None:
                self.pipeline.start(step, self.steps_per_call)
            batches = [next(iter(self.evaluation_batches(split))) for split in splits]
            began = time.perf_counter()
            lengths = {self.steps_per_call}
            if any(steps % self.steps_per_call for steps in (*all_periods, step)):
                lengths.add(1)
            self._shared = shared_programs(self._program_key())
            known = len(self._shared)
            with counted_compilations() as counts:
                self._compile("resident" if self._data is not None else "streamed", lengths, batches)
            is_new = not self._programs or len(self._shared) > known
            if not self.on_cpu and is_new:
                self._run_once(batches)
            if self._data is not None:
                self._inputs(step, self.steps_per_call)  # of the first chunk, before the clock runs
        seconds = time.perf_counter() - began
        how = "steps one by one" if self.steps_per_call == 1 else f"{self.steps_per_call} steps at a time"
        if not is_new:
            log.info("compiled by an earlier run of this process (%s)", how)
            return seconds
        found = ", found in the cache" if counts["found"] and not counts["compiled"] else ""
        log.info("compiled in %.1f s (%s%s)", seconds, how, found)
        return seconds

    def _program_key(self) -> str | None:
        """Returns the key of the programs that runs of this process share; None if this run shares none."""
        return program_key(
            self.config, self.dataset, self.task.data, lambda: self.data_fingerprint, self._steps[0].numbers,
            jax.tree.leaves((self._state, self._run_inputs)), list(self.layout.mesh.devices.flat),
        )  # fmt: skip

    def _place_data(self) -> None:
        """Brings the training split to the devices if it stays there, or finds it there."""
        is_resident = self.pipeline.is_resident(TRAIN)  # before data of other runs is freed
        devices = list(self.layout.mesh.devices.flat)
        self._device_data = device_data(data_key(self.config, self.dataset, lambda: self.data_fingerprint, devices))
        if not is_resident:
            self._device_data.train = None
        elif self._device_data.train is None:
            resident = self.pipeline.resident(TRAIN) or {}
            self._device_data.train = {name: self.layout.replicate(array) for name, array in resident.items()}
            if not self.on_cpu:  # there JAX may use the same memory
                self.pipeline.release(TRAIN)
        self._data = self._device_data.train

    def _run_once(self, batches: list[tuple[Any, Any]]) -> None:
        """Runs the programs once, on copies: an accelerator loads kernels and allocates memory then."""
        if self._joins_state():
            self._fetched_state()
        if self._data is not None and may_be_copied(self._state):
            copies = jax.tree.map(jnp.copy, self._state)
            inputs = self._inputs(0, self.steps_per_call)
            _, table = self._program("resident", self.steps_per_call, 0)(copies, self._data, inputs, self._run_inputs)
            jax.block_until_ready(table)
        for batch, weights in batches:
            jax.block_until_ready(self.evaluate_batch(batch, weights))

    def _compile(self, kind: str, lengths: set[int], batches: list[tuple[Any, Any]]) -> None:
        """Compiles the programs of the run: for each number of steps in ``lengths``, and for evaluation."""
        which = [(kind, length, phase) for phase in range(len(self.phases)) for length in sorted(lengths)]
        wanted: dict[str, Callable[[], Any]] = {_name(*program): partial(self._lowered, *program) for program in which}
        if self._joins_state():
            wanted["state"] = self._lowered_state
        for batch, weights in batches:
            placed = self._placed(batch, weights)
            wanted[_name("evaluate", placed[1].shape[0])] = partial(self._lowered_for, "evaluate", *placed)
        new = {name: lower() for name, lower in wanted.items() if name not in self._shared}
        if new:
            self._shared.update(zip(new, self._compile_all(list(new.values())), strict=True))
        self._programs.update({name: self._shared[name] for name in wanted})

    def _compile_all(self, lowered: list[Any]) -> list[Any]:
        return compile_all(lowered, self.config.autotune, self.replicas)

    def _program(self, kind: str, count: int, phase: int) -> Any:
        """Returns the compiled program for ``count`` steps, on "resident" or "streamed" data."""
        return self._compiled(_name(kind, count, phase), lambda: self._lowered(kind, count, phase))

    def _evaluation_program(self, kind: str, size: int, *placed: Any) -> Any:
        """Returns the compiled program that evaluates or predicts a batch of this size."""
        return self._compiled(_name(kind, size), lambda: self._lowered_for(kind, *placed))

    def _compiled(self, name: str, lower: Callable[[], Any]) -> Any:
        """Returns the program of this name; compiles it if it was not compiled ahead of time."""
        if name not in self._programs:
            (self._programs[name],) = self._compile_all([lower()])
        return self._programs[name]

    def _lowered(self, kind: str, count: int, phase: int) -> Any:
        inputs = StepInputs.shapes(count, self.config.train_batch_size, self.layout)
        state, run = jax.tree.map(self.layout.shape_of, (self._state, self._run_inputs))
        if kind == "resident":
            data: Any = jax.tree.map(self.layout.shape_of, self._data)
            function: Any = self._steps[phase].over_resident
        else:
            pieces, size = self.config.gradient_accumulation, self.config.train_batch_size
            data = self.layout.batch_shapes(self.pipeline.features, (count, pieces, size // pieces))
            function = self._steps[phase].over_batches
        outputs = (jax.tree.map(lambda s: s.sharding, state), self.layout.replicated)
        with faster_layers(self.on_gpu, self.replicas):
            return jax.jit(function, donate_argnums=0, out_shardings=outputs).lower(state, data, inputs, run)

    def _lowered_for(self, kind: str, *placed: Any) -> Any:
        """Lowers evaluation or prediction for arrays of these shapes."""
        function: Any = self._steps[0].predict
        given: tuple[Any, ...] = placed
        if kind == "evaluate":
            function, given = self._steps[0].evaluate, (self._run_inputs.numbers, *placed)
        shapes = jax.tree.map(self.layout.shape_of, (*self._state.evaluated, *given))
        with faster_layers(self.on_gpu, self.replicas):
            return jax.jit(function, out_shardings=self.layout.replicated).lower(*shapes)

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Translates XLA's errors when memory runs out or another process is gone."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            text = str(error)
            if "RESOURCE_EXHAUSTED" in text or "Out of memory" in text:
                raise out_of_memory(self.config) from error
            if self.processes == 1 or not any(word in text for word in _UNREACHABLE):
                raise
            raise lost_peer(self.group, error) from error

    # -- training ---------------------------------------------------------------------------------------------------

    def train_chunk(self, step: int, count: int) -> StepMetrics:
        """Trains ``count`` steps from ``step`` on."""
        if not self._is_ready:
            self.prepare([count], step=step)
        with self._types(), self._explained_errors():
            run = self._over_resident if self._data is not None else self._over_stream
            tables = run(step, count)
            values = np.concatenate([np.asarray(table.values) for table in tables])
        return {name: values[:, column] for column, name in enumerate(tables[0].names)}

    def _over_resident(self, step: int, count: int) -> list[MetricTable]:
        tables, phase = [], self.phases.of(step)
        while count:
            length = self.steps_per_call if count >= self.steps_per_call else 1
            program = self._program("resident", length, phase)
            inputs = self._inputs(step, length)
            self._state, table = program(self._state, self._data, inputs, self._run_inputs)
            tables.append(table)
            step, count = step + length, count - length
        if step < self.pipeline.run.total_steps:
            self._inputs(step, self.steps_per_call)  # of the next chunk, while the device is busy with this one
        return tables

    def _inputs(self, step: int, count: int) -> StepInputs:
        """Returns the inputs of ``count`` steps from ``step`` on; keeps the last ones that it made."""
        if self._last_inputs[0] != (step, count):
            self._last_inputs = (step, count), StepInputs.of(step, count, self.pipeline, self._rates, self.layout)
        inputs: StepInputs = self._last_inputs[1]
        return inputs

    def _over_stream(self, step: int, count: int) -> list[MetricTable]:
        """Trains on batches that are copied to the device while those before them are trained on."""
        tables: list[MetricTable] = []
        waiting: deque[MetricTable] = deque()
        phase = self.phases.of(step)
        while count:
            batches = self._copied(step, count)
            step, count = step + batches.steps, count - batches.steps
            # Before the program starts: on GPUs, a copy waits for all that was started before it.
            self._copy_ahead(step)
            program = self._program("streamed", batches.steps, phase)
            self._state, table = program(self._state, batches.arrays, batches.inputs, self._run_inputs)
            tables.append(table)
            waiting.append(table)
            if len(waiting) > _WAITING:
                jax.block_until_ready(waiting.popleft())
        return tables

    def _copied(self, step: int, most: int) -> _Batches:
        """Returns at most ``most`` batches from ``step`` on; if they were not copied ahead, begins to copy there."""
        batches, self._next_batches = self._next_batches, None
        if batches is not None and batches.first == step and batches.steps <= most:
            return batches
        if self._copies is not None:
            self._copies.close()
        # Large batches are copied one by one, and also ahead of the next chunk.
        self._copies = self._copy(step, None if self.steps_per_call == 1 else most)
        return next(self._copies)

    def _copy_ahead(self, step: int) -> None:
        """Begins to copy the batches from ``step`` on. An error is raised when they are needed."""
        if self._copies is not None and step < self.pipeline.run.total_steps:
            with suppress(Exception):
                self._next_batches = next(self._copies, None)

    def _copy(self, step: int, count: int | None) -> Generator[_Batches, None, None]:
        """Copies ``count`` batches from ``step`` on, or without end. Yields some as soon as their copy has begun."""
        pieces, size = self.config.gradient_accumulation, len(self.pipeline.share)
        while count != 0:
            with self.pipeline.training(step, count or 1) as (read, length):
                end = step + length
                while step < end:
                    together = self.steps_per_call if end - step >= self.steps_per_call else 1
                    rows = slice((step - end + length) * size, (step - end + length + together) * size)
                    arrays = {
                        name: self.layout.put_pieces(array[rows], together, pieces) for name, array in read.items()
                    }
                    yield _Batches(step, together, arrays, self._inputs(step, together))
                    jax.block_until_ready(arrays)  # the stream reads the next batches into the same memory
                    step += together
            count = None if count is None else count - length

    def close(self) -> None:
        """Stops reading ahead, and frees the memory of the devices after training."""
        if self._copies is not None:
            self._copies.close()
        self._copies = self._next_batches = None
        super().close()
        if self._is_ready:
            self._data, self._device_data, self._programs = None, DeviceData(), {}
            self._state, self._last_inputs, self._is_ready = TrainState([], [], [], []), (None, None), False

    def _most_together(self) -> int:
        """Returns the most steps in one program: more cost nothing if the data is resident."""
        if self._data is not None:
            return _MOST_TOGETHER
        batch = sum(feature.nbytes for feature in self.pipeline.features.values()) * len(self.pipeline.share)
        return min(max(_STREAMED_BYTES // batch, 1), _MOST_TOGETHER)

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate_batch(self, batch: Arrays, weights: NDArray[np.float64]) -> BatchResult:
        """Evaluates a batch; the result may still be computed."""
        with self._types(), self._explained_errors():
            placed = self._placed(batch, weights)
            program = self._evaluation_program("evaluate", placed[1].shape[0], *placed)
            return BatchResult(*program(*self._state.evaluated, self._run_inputs.numbers, *placed))

    def fetch(self, values: dict[str, Any]) -> dict[str, NDArray[Any]]:
        """Copies results to the host; errors of the computation are raised here."""
        with self._explained_errors():
            return super().fetch(values)

    def predict_batch(self, batch: Arrays) -> dict[str, Any]:
        """Returns the predictions for each example of a batch; they may still be computed."""
        with self._types(), self._explained_errors():
            placed = {name: self.layout.put_batch(array) for name, array in batch.items()}
            program = self._evaluation_program("predict", next(iter(placed.values())).shape[0], placed)
            found: dict[str, Any] = program(*self._state.evaluated, placed)
            return found

    def _placed(self, batch: Any, weights: Any) -> tuple[dict[str, Any], Any]:
        if isinstance(weights, jax.Array):
            return batch, weights
        values = {name: self.layout.put_batch(array) for name, array in batch.items()}
        return values, self.layout.put_batch(weights.astype(keras.config.floatx()))

    def evaluation_batches(self, split: str) -> Generator[tuple[Any, Any], None, None]:
        """Yields batches with weights; those of a split that fits stay on the devices for the next evaluation."""
        if not self.pipeline.is_resident(split):
            yield from super().evaluation_batches(split)
            return
        key = split, self._evaluation_batch_size(split)
        if key not in self._device_data.evaluation:
            with self._types(), self._explained_errors():
                self._device_data.evaluation[key] = [self._placed(*each) for each in super().evaluation_batches(split)]
        yield from self._device_data.evaluation[key]

    def run_on_host(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of tensors on the host, as one program."""
        shapes = [(array.shape, str(array.dtype)) for array in jax.tree.leaves(arguments)]
        name = f"{function.__qualname__} {shapes}"
        with self._types(), jax.default_device(jax.local_devices(backend="cpu")[0]):
            if name not in self._shared:
                self._shared[name] = jax.jit(function).lower(*arguments).compile()
            return self._shared[name](*arguments)

    def augmentation_seeds(self) -> Any:
        """Returns the seeds of the augmentation, which are inputs of all programs."""
        return augmentation_seeds(self.config.augment, self.config.random_seed)

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Returns a copy of the state; integers as 64 bits, whatever JAX counts with."""
        with self._types(), self._explained_errors():
            values = self._fetched_state()

        def named(variables: dict[str, Any]) -> dict[str, NDArray[Any]]:
            found = {name: values[part][n] for name, v in variables.items() for part, n in [self._index[id(v)]]}
            return {name: a.astype(np.int64) if a.dtype.kind in "iu" else a for name, a in found.items()}

        return State(named(self.network.weights), named(self.network.slots))

    def _fetched_state(self) -> TrainState:
        arrays, tree = jax.tree.flatten(self._state)
        if not self._joins_state():
            return jax.tree.unflatten(tree, self.layout.fetch_all(arrays))  # type: ignore[no-any-return]
        together = self._compiled("state", self._lowered_state)(arrays)
        return jax.tree.unflatten(tree, separated(together, arrays))  # type: ignore[no-any-return]

    def _joins_state(self) -> bool:
        """Returns whether the state is copied to the host as one array: many small ones take much longer."""
        return not self.on_cpu and self.replicas == 1 and may_be_copied(self._state)

    def _lowered_state(self) -> Any:
        return jax.jit(joined).lower(jax.tree.map(self.layout.shape_of, jax.tree.leaves(self._state)))

    def assign(self, weights: dict[str, NDArray[Any]], optimizer: dict[str, NDArray[Any]]) -> None:
        """Sets the named variables on all devices."""
        state = [list(part) for part in self._state]
        with self._types():
            for variables, values in ((self.network.weights, weights), (self.network.slots, optimizer)):
                for name, value in values.items():
                    part, number = self._index[id(variables[name])]
                    state[part][number] = self.layout.put_state(value.astype(state[part][number].dtype))
        self._state = TrainState(*state)

    def profile(self, folder: Path) -> AbstractContextManager[Any]:
        """Profiles while the block runs, and writes the profile to ``folder``."""
        context: AbstractContextManager[Any] = jax.profiler.trace(str(folder))
        return context

    def describe(self) -> dict[str, Any]:
        """Describes devices and versions."""
        return {
            "engine": self.name,
            "jax": jax.__version__,
            "keras": keras.__version__,
            "devices": list(self.devices),
            "kind": self.layout.mesh.devices.flat[0].device_kind,
            "threads": self.threads,
        }


def _name(kind: str, size: int, phase: int = 0) -> str:
    return f"{kind} {size}" + (f" phase {phase + 1}" if phase else "")


def _choose_steps_per_call(periods: Sequence[Any], most: int) -> int:
    """Returns the number of steps to compile together: a divisor of all periods if possible, so that none is left."""
    whole = [int(p) for p in periods if p == int(p) and p >= 1]
    if len(whole) == len(periods) and whole:
        common = math.gcd(*whole)
        fitting = max(n for n in range(1, most + 1) if common % n == 0)
        if fitting >= min(_LEAST_TOGETHER, most):
            return fitting
    # Otherwise a number that leaves few steps over, which are trained one by one.
    most = max(min([most, *(int(p) for p in periods)]), 1)
    return min(range((most + 1) // 2, most + 1), key=lambda n: (sum(int(p) % n / p for p in periods), -n))
