"""Devices, threads and processes of JAX, fixed before it starts; and the placement of arrays on the devices."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from modelyard.cluster.description import ProcessGroup
from modelyard.config.schema import Config
from modelyard.data.dataset import Feature
from modelyard.engine.jax_cache import use_cache
from modelyard.engine.jax_processes import join_processes, meet
from modelyard.errors import UserError
from modelyard.system.machine import available_cores

log = logging.getLogger("modelyard")
_LARGE = 1 << 16
"""The number of elements from which a parameter is worth sharding."""


def set_up_devices(config: Config, group: ProcessGroup) -> list[Any]:
    """Returns the devices of all processes that train together, this one included.

    Raises:
        UserError: if the devices that the config asks for do not exist.
    """
    threads = str(config.threads or available_cores())
    os.environ.update(PJRT_NPROC=threads, NPROC=threads)  # the CPU client sizes its thread pool by these
    if config.deterministic:
        _add_xla_flag("--xla_gpu_deterministic_ops=true")
    if config.num_gpus == 0:
        _before_start("jax_platforms", "cpu")
    platforms = (jax.config.jax_platforms or "").split(",")
    if platforms != [""] and "cpu" not in platforms:  # models are built on the host
        _before_start("jax_platforms", ",".join([*platforms, "cpu"]))
    if config.cpu_devices > max(jax.config.jax_num_cpu_devices, 1):
        _before_start("jax_num_cpu_devices", config.cpu_devices)
    if config.gpu_id is not None:
        _before_start("jax_cuda_visible_devices", str(config.gpu_id))
    elif config.num_gpus == "auto" and group.size == 1:
        _before_start("jax_cuda_visible_devices", "0")  # JAX takes most of the memory of every GPU that it sees
    elif isinstance(config.num_gpus, int) and config.num_gpus > 0:
        # JAX takes most of the memory of every GPU that it sees, so it sees only as many as are used.
        _before_start("jax_cuda_visible_devices", ",".join(map(str, range(config.num_gpus))))
    use_cache(config)
    if group.size > 1:
        join_processes(config, group)
    local = _local_devices(config, several=group.size > 1)
    wanted = [name for name in platforms if name not in ("", "cpu")]
    if wanted and "cpu" not in platforms and config.num_gpus != 0 and all(d.platform == "cpu" for d in local):
        raise UserError(
            f"JAX_PLATFORMS={','.join(wanted)} asks for an accelerator, but JAX sees none. Unset it to train on the "
            "CPU, or install one of JAX's builds for it (pip install 'modelyard[jax-gpu]'); `modelyard doctor` checks "
            "the machine."
        )
    if group.size == 1:
        return local
    meet(group)
    return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))


def wake_devices(config: Config) -> None:
    """Starts the accelerators, which takes two seconds, while Keras is imported and the model is built."""
    waiting = [d for d in set_up_devices(config, ProcessGroup()) if d.platform != "cpu"]

    def begin() -> None:
        with contextlib.suppress(Exception):  # whoever needs them gets the error
            jax.block_until_ready([jax.device_put(np.zeros(1, np.float32), d) for d in waiting])

    if waiting:
        threading.Thread(target=begin, name="modelyard-devices", daemon=True).start()


def _before_start(option: str, value: Any) -> None:
    """Sets an option that JAX reads when it starts; if it already runs, its devices are checked later."""
    try:
        jax.config.update(option, value)
    except RuntimeError:
        log.debug("JAX already runs; %s does not change", option)


def _add_xla_flag(flag: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _local_devices(config: Config, several: bool) -> list[Any]:
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        raise UserError(f"JAX cannot start: {str(error).strip()} `modelyard doctor` checks the machine.") from error
    accelerators = [d for d in devices if d.platform != "cpu"]
    wanted = config.num_gpus
    if config.gpu_id is not None or wanted not in ("auto", 0):
        count = 1 if config.gpu_id is not None else len(accelerators) if wanted == "all" else int(wanted)
        if len(accelerators) < max(count, 1):
            asked = f"gpu_id {config.gpu_id}" if config.gpu_id is not None else f"num_gpus {wanted}"
            raise UserError(
                f"{asked} asks for an accelerator, but JAX sees {len(accelerators) or 'none'} "
                f"(its devices: {', '.join(map(str, devices))}). Install one of JAX's builds for it "
                "(pip install 'modelyard[jax-gpu]'), or leave the option out; `modelyard doctor` checks the machine."
            )
        return accelerators[:count]
    if wanted == "auto" and accelerators and (config.cpu_devices == 1 or several):
        return accelerators if several else accelerators[:1]
    cpus: list[Any] = jax.local_devices(backend="cpu")
    if len(cpus) < config.cpu_devices:
        raise UserError(
            f"JAX already runs with {len(cpus)} CPU device(s) in this process, cpu_devices asks for "
            f"{config.cpu_devices}. Start a new process."
        )
    return cpus[: config.cpu_devices]


class Layout:
    """The placement of a run's arrays on the devices.

    Args:
        mesh: all devices, along one axis named "batch".
        shards: whether large parameters are sharded over the devices.
    """

    def __init__(self, mesh: Mesh, shards: bool) -> None:
        self.mesh, self.shards = mesh, shards
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.sharded = NamedSharding(mesh, PartitionSpec("batch"))
        self.sharded_pieces = NamedSharding(mesh, PartitionSpec(None, "batch"))

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPUs."""
        return bool(self.mesh.devices.flat[0].platform == "cpu")

    @property
    def replicas(self) -> int:
        """The number of devices, over all processes."""
        return int(self.mesh.devices.size)

    def split(self, value: Any) -> Any:
        """Inside a program: shards a batch over the devices."""
        return jax.lax.with_sharding_constraint(value, self.sharded) if self.replicas > 1 else value

    def put_everywhere(self, array: NDArray[Any]) -> Any:
        """Copies an array to every device."""
        return self._put(array, self.everywhere)

    def put_batch(self, array: NDArray[Any]) -> Any:
        """Shards a batch over the devices; ``array`` is this process's part of it."""
        return self._put_part(array, self.sharded)

    def put_pieces(self, array: NDArray[Any], shape: tuple[int, int]) -> Any:
        """Shards each piece of a batch over the devices; ``array`` is this process's part of all pieces."""
        return self._put_part(array.reshape(shape[0], -1, *array.shape[1:]), self.sharded_pieces)

    def put_state(self, array: NDArray[Any]) -> Any:
        """Copies a parameter or a slot; sharded along its longest divisible axis if it is large and `shards` is set."""
        return self._put(array, self._state_sharding(array.shape))

    def shape_of(self, value: Any) -> jax.ShapeDtypeStruct:
        """Returns the shape, type and sharding of an array, to compile a program for it."""
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)

    def batch_shapes(self, features: Mapping[str, Feature], shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the same for a batch in pieces, before there is one."""
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
            return self.everywhere
        sides = [(size, axis) for axis, size in enumerate(shape) if size % self.replicas == 0]
        if not sides:
            return self.everywhere
        axis = max(sides)[1]
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, "batch"))

    def _put(self, array: NDArray[Any], sharding: NamedSharding) -> Any:
        """Copies an array that every process has in whole; JAX could otherwise share its memory."""
        array = np.array(array)
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def _put_part(self, array: NDArray[Any], sharding: NamedSharding) -> Any:
        copied = np.array(array)
        if jax.process_count() > 1:
            return jax.make_array_from_process_local_data(sharding, copied)
        return jax.device_put(copied, sharding)
