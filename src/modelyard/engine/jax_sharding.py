"""Where arrays lie on the devices of a run: whole on each, or a part on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from modelyard.data.dataset import Feature

_LARGE = 1 << 16
"""Elements from which on a parameter is worth dividing."""


class Layout:
    """How the arrays of a run are laid out.

    Args:
        mesh: all devices, in one row called "batch".
        shards: whether large parameters are divided over the devices.
    """

    def __init__(self, mesh: Mesh, shards: bool) -> None:
        self.mesh, self.shards = mesh, shards
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        self.divided = NamedSharding(mesh, PartitionSpec("batch"))
        self.divided_pieces = NamedSharding(mesh, PartitionSpec(None, "batch"))

    @property
    def replicas(self) -> int:
        """How many devices there are, over all processes."""
        return int(self.mesh.devices.size)

    def split(self, value: Any) -> Any:
        """Inside a program: has a batch divided over the devices."""
        return jax.lax.with_sharding_constraint(value, self.divided) if self.replicas > 1 else value

    def put_everywhere(self, array: NDArray[Any]) -> Any:
        """The whole array on every device."""
        return self._put(array, self.everywhere)

    def put_batch(self, array: NDArray[Any]) -> Any:
        """A batch, divided over the devices; ``array`` is this process's share of it."""
        return self._put_share(array, self.divided)

    def put_pieces(self, array: NDArray[Any], shape: tuple[int, int]) -> Any:
        """A batch in pieces, each divided over the devices; ``array`` is this process's share of all pieces."""
        return self._put_share(array.reshape(shape[0], -1, *array.shape[1:]), self.divided_pieces)

    def put_learned(self, array: NDArray[Any]) -> Any:
        """A parameter or a slot: divided along its longest fitting side if it is large and that was asked for."""
        return self._put(array, self._of_learned(array.shape))

    def shape_of(self, value: Any) -> jax.ShapeDtypeStruct:
        """What a program needs to know of an array."""
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)

    def batch_shapes(self, features: Mapping[str, Feature], shape: tuple[int, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """The same for a batch in pieces, before there is one."""
        return {
            name: jax.ShapeDtypeStruct((*shape, *feature.shape), feature.dtype, sharding=self.divided_pieces)
            for name, feature in features.items()
        }

    def fetch(self, value: Any) -> NDArray[Any]:
        """A copy on the host; where other processes hold parts of it, all must ask together."""
        if not value.is_fully_addressable and not value.is_fully_replicated:
            value = multihost_utils.process_allgather(value, tiled=True)
        return np.array(value)

    def fetch_all(self, values: list[Any]) -> list[NDArray[Any]]:
        """Copies of many, all on their way at once."""
        for value in values:
            value.copy_to_host_async()
        return [self.fetch(value) for value in values]

    def _of_learned(self, shape: tuple[int, ...]) -> NamedSharding:
        if not self.shards or np.prod(shape) < _LARGE:
            return self.everywhere
        sides = [(size, axis) for axis, size in enumerate(shape) if size % self.replicas == 0]
        if not sides:
            return self.everywhere
        axis = max(sides)[1]
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, "batch"))

    def _put(self, array: NDArray[Any], sharding: NamedSharding) -> Any:
        """Every process has the whole array; a copy, since JAX may else use the memory it is in."""
        array = np.array(array)
        if jax.process_count() == 1:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def _put_share(self, array: NDArray[Any], sharding: NamedSharding) -> Any:
        copied = np.array(array)
        if jax.process_count() > 1:
            return jax.make_array_from_process_local_data(sharding, copied)
        return jax.device_put(copied, sharding)
