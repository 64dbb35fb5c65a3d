"""Compiled programs that the runs of one process share.

Tracing and lowering again takes longer than a small network trains. The key of a program has all that it was traced
from, except its inputs (`jax_inputs.py`): the config without the numbers that are inputs, the data that shapes and
constants come from, the devices. Code of a user can't be part of a key, so runs with such code share nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import keras
import numpy as np

from modelyard.config.schema import COMPONENTS, Config
from modelyard.config.weight_groups import read_group
from modelyard.data.dataset import TRAIN, Dataset
from modelyard.engine.input_numbers import Number, group_option
from modelyard.errors import DataError
from modelyard.models.data_info import DataInfo
from modelyard.registry import AUGMENTATIONS, METRICS, PREPROCESSINGS, Entry

_KEPT = 4
"""The number of keys whose programs are kept."""
_OWN = "modelyard."
_INPUT = "an input"
_NOT_TRACED = frozenset({
    "random_seed", "learning_rate", "learning_rate_schedule", "warmup", "train_epochs", "train_steps", "pause_at",
    "recipe", "config_file", "config_set", "hyperparameter_file", "hyperparameter_set", "runs_dir", "model_dir",
    "run_name", "best_model_dir", "resume", "save_every", "keep_checkpoints", "keep_best", "hypothesis", "hooks",
    "log_every", "epochs_between_evals", "eval_every", "eval_throttle_secs", "best_metric", "best_mode",
    "test_at_end", "export_at_end", "optimizer_groups",
})  # fmt: skip
"""Options that no program depends on: what they say is an input, or the work of the host. The groups of weights are in
the key without the numbers that are inputs."""

Programs = dict[str, Any]
"""Compiled programs by name."""
_shared: OrderedDict[str, Programs] = OrderedDict()


def shared_programs(key: str | None) -> Programs:
    """Returns the programs of a key that were compiled so far, to which others may be added; without a key, none."""
    if key is None:
        return {}
    programs = _shared.setdefault(key, {})
    _shared.move_to_end(key)
    while len(_shared) > _KEPT:
        _shared.popitem(last=False)
    return programs


def forget_programs() -> None:
    """Forgets all programs that are shared."""
    _shared.clear()


def program_key(
    config: Config,
    dataset: Dataset,
    data: DataInfo,
    fingerprint: Callable[[], str],
    numbers: Sequence[Number],
    shapes: Sequence[Any],
    devices: Sequence[Any],
) -> str | None:
    """Returns the key of the programs of a run; None if it shares none.

    Args:
        config: the resolved config.
        dataset: the data of the run.
        data: what the network knows of it.
        fingerprint: returns the fingerprint of the data.
        numbers: the numbers that are inputs.
        shapes: shapes, types and places on the devices of state and inputs.
        devices: all devices.
    """
    if jax.process_count() > 1 or not is_own_code(config):
        return None
    parts = {
        "options": _options(config, numbers),
        "groups": _groups(config, numbers),
        "inputs": [(type(number.owner).__name__, number.option, number.attribute) for number in numbers],
        "data": [fingerprint(), dataset.features, dataset.sizes()[TRAIN], dataset.classes, dataset.maps, dataset.boxes],
        "statistics": [np.asarray(array).tolist() for array in _statistics(config, data)],
        "outputs": data.outputs,
        "shapes": [(array.shape, array.dtype, array.sharding) for array in shapes],
        "devices": [(device.id, device.device_kind) for device in devices],
        "keras": _keras_settings(),
        "jax": jax.config.values,
        "flags": os.environ.get("XLA_FLAGS"),
    }
    return hashlib.sha256(json.dumps(parts, default=str, sort_keys=True).encode()).hexdigest()


def is_own_code(config: Config) -> bool:
    """Returns whether no code of a user becomes part of a program."""
    if config.plugins:
        return False
    entries = [config.entry("model"), config.entry("optimizer")]
    entries += [read_group(call)[0] for call in config.optimizer_groups]
    for registry, calls in (
        (AUGMENTATIONS, config.augment),
        (METRICS, config.metrics),
        (PREPROCESSINGS, config.preprocess),
    ):
        entries += [registry.get(call.name) for call in calls]
    return all(_module_of(entry).startswith(_OWN) for entry in entries)


def _module_of(entry: Entry) -> str:
    return entry.target if isinstance(entry.target, str) else str(entry.target.__module__)


def _options(config: Config, numbers: Sequence[Number]) -> dict[str, Any]:
    """Returns the options that a program depends on; those that are inputs without their values."""
    fields = {name: set(config.entry(name).options.model_fields) for name in COMPONENTS}
    schedule = fields.pop("learning_rate_schedule")
    unused = _NOT_TRACED | (schedule - set().union(*fields.values()))
    found = {option: value for option, value in config.flat().items() if option not in unused}
    return found | {number.option: _INPUT for number in numbers if number.option in found}


def _groups(config: Config, numbers: Sequence[Number]) -> list[Any]:
    """Returns the groups of weights likewise."""
    inputs = {number.option for number in numbers}
    groups = []
    for index, call in enumerate(config.optimizer_groups, 1):
        entry, options = read_group(call)
        found = options.model_dump(mode="json", exclude={"learning_rate", "factor"})
        groups.append((entry.name, {k: _INPUT if group_option(index, k) in inputs else v for k, v in found.items()}))
    return groups


def _statistics(config: Config, data: DataInfo) -> list[Any]:
    """Returns the numbers of the data that may be constants of a program."""
    found: list[Any] = [data.mean, data.spread, data.label_mean, data.label_spread]
    if getattr(config.options_of("model"), "class_weights", None) is not None:
        with suppress(DataError):  # labels that are no classes have no weights
            found.append(data.counts)
    return found


def _keras_settings() -> list[Any]:
    policy = keras.config.dtype_policy()
    return [keras.config.floatx(), keras.config.epsilon(), keras.config.image_data_format(), policy.name]
