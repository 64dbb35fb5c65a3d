"""The inputs of a run's model: which features of an example its predictions read."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from modelyard.compat.keras import session_of
from modelyard.config.schema import Config
from modelyard.data.dataset import ID, IMAGE, LABEL, TEST
from modelyard.data.decoded import dataset_to_predict, examples_of
from modelyard.data.inputs import Inputs, spec_of
from modelyard.data.preprocess import batch_preprocessing, changes_batches, with_example_preprocessing
from modelyard.engine.batch_functions import network_outputs
from modelyard.models.choose_task import task_for
from modelyard.models.data_info import RecordedData
from modelyard.models.task import Task


def model_inputs(config: Config, recorded: RecordedData) -> Inputs:
    """Returns what predictions of a run read of an example, before its own preprocessing, in the dataset's order.

    They are the inputs of the network, and what the user's own preprocessing and `predictions` read besides. Those are
    tried on an example of zeros.
    """
    stored = {
        name: recorded.image if name == IMAGE else spec_of(feature)
        for name, feature in recorded.features.items()
        if name not in (ID, LABEL)
    }
    with session_of(config):
        task = task_for(config, recorded.data, recorded.label)
        network = task.checked_network()
        taken = [tensor.name for tensor in network.inputs]
        names = [name for name in stored if name in taken]
        while has_own_code(config, task):
            try:
                _predict_zeros(config, task, network, {name: stored[name] for name in names})
                break
            except KeyError as error:
                missing = error.args[0] if error.args else None
                if missing in names or missing not in stored:
                    return stored
                names = [name for name in stored if name in names or name == missing]
            except Exception:  # the user's code may not like zeros: it gets all that it gets in training
                return stored
    return {name: stored[name] for name in names}


def has_own_code(config: Config, task: Task, *, batches: bool = False) -> bool:
    """Returns whether the user's own code reads examples; with ``batches``, only what reads batches counts."""
    methods = (type(task).preprocess, type(task).predictions)
    preprocessing = changes_batches(config.preprocess) if batches else bool(config.preprocess)
    return preprocessing or not all(method.__module__.startswith("modelyard.") for method in methods)


def _predict_zeros(config: Config, task: Task, network: Any, inputs: Inputs) -> None:
    raw = examples_of({name: np.zeros((1, *spec.shape), spec.dtype) for name, spec in inputs.items()})
    dataset = with_example_preprocessing(dataset_to_predict(raw, (), inputs), config.preprocess)
    found = dataset.read(TEST, np.zeros(1, np.int64))
    batch = {name: ops.convert_to_tensor(values) for name, values in found.items() if name not in (ID, LABEL)}
    seen = task.preprocess(batch_preprocessing(config.preprocess)(batch, False), False)
    task.predictions(network_outputs(network, seen), seen)
