"""Data on the devices, which stays there between the runs of one process that read the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from modelyard.config.schema import Config
from modelyard.data.dataset import ArrayDataset, Dataset

_READING = (
    "dataset", "data_dir", "validation_fraction", "test_fraction", "split_group", "folds", "fold", "split_seed",
    "on_bad", "precision", "shard_parameters",
)  # fmt: skip
"""Options of how data is read and placed."""


@dataclass
class DeviceData:
    """Splits on the devices.

    Args:
        train: the training split; None if it is not there.
        evaluation: batches with their weights, by split and batch size.
    """

    train: dict[str, Any] | None = None
    evaluation: dict[tuple[str, int], list[tuple[dict[str, Any], Any]]] = field(default_factory=dict)

    def bytes_on(self, device: Any) -> int:
        """Returns how many bytes of a device it takes."""
        arrays = jax.tree.leaves((self.train, list(self.evaluation.values())))
        return sum(
            shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device
        )


_kept: dict[tuple[Any, ...], DeviceData] = {}
"""The data of the last run, if others may use it."""


def device_data(key: tuple[Any, ...] | None) -> DeviceData:
    """Returns the data of a key, as far as it is on the devices. That of another key is freed, so that there is room.

    Without a key, it is that of one run alone.
    """
    found = DeviceData() if key is None else _kept.get(key, DeviceData())
    _kept.clear()
    if key is not None:
        _kept[key] = found
    return found


def kept_bytes_on(device: Any) -> int:
    """Returns how many bytes of a device are kept for other runs. They are freed if another run reads other data."""
    return sum(data.bytes_on(device) for data in _kept.values())


def data_key(
    config: Config, dataset: Dataset, fingerprint: Callable[[], str], devices: Sequence[Any]
) -> tuple[Any, ...] | None:
    """Returns the key of the data of a run; None if no other run may use it.

    Only data in memory has a fingerprint of all its values.
    """
    if jax.process_count() > 1 or type(dataset) is not ArrayDataset:
        return None
    options = config.flat()
    own = config.entry("dataset").options.model_fields
    read = {name: options[name] for name in (*_READING, *own)}
    return fingerprint(), str(read), str(dataset.features), str(dataset.sizes()), tuple(devices)
