"""Chooses the task of a run: the model's own, or the one that fits the labels, and checks its options."""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

from modelyard.config import Config
from modelyard.data.dataset import ID, IMAGE, LABEL, Dataset, Feature, label_kind
from modelyard.errors import ConfigError, DataError, Problem, UserError
from modelyard.models.data_info import DataInfo, describe_data
from modelyard.models.metric import build_metric
from modelyard.models.task import Task
from modelyard.models.task_types import Classifier, MultiLabel, Regressor, describe_label
from modelyard.registry import METRICS, Entry

log = logging.getLogger("modelyard")
TASK_TYPES: dict[str, type[Task]] = {"classification": Classifier, "regression": Regressor, "multi_label": MultiLabel}
_BY_LABEL = {"class": "classification", "none": "classification", "values": "regression", "flags": "multi_label"}
_OWNERS = {
    "label_smoothing": "classification",
    "class_weights": "classification",
    "focal_gamma": "classification",
    "regression_loss": "regression",
    "huber_delta": "regression",
}
"""The task of options that have no effect in others."""


def choose_type(config: Config, data: DataInfo, stored: Feature | None) -> type[Task]:
    """Returns the task for the network of a registered function.

    ``stored`` is the label in the dataset, which preprocessing may convert to class probabilities.

    Raises:
        DataError: if the labels do not fit the task.
    """
    name: str = config.task
    if name == "auto":
        if stored is not None and label_kind(stored) == "map":
            raise DataError(
                f"labels are {describe_label(stored)}, which fits no built-in task: they take one label per example. "
                "Write a modelyard.Task with your own loss and metrics, and register it as the model."
            )
        name = _BY_LABEL[label_kind(stored)]
        if name != "classification" and stored is not None:
            log.info("task %s: labels are %s", name, describe_label(stored))
    label = data.features.get(LABEL)
    found = label_kind(label)
    soft = label is not None and found == "values" and label.shape == (len(data.classes),)
    if name == "classification" and label is not None and found != "class" and not soft:
        raise DataError(
            f"classification needs one class index (an integer) per example; labels are {describe_label(label)}. "
            f"Set --task {_BY_LABEL.get(found, 'auto')}, or take the argmax of one-hot rows."
        )
    return TASK_TYPES[name]


def check_options(config: Config, task_type: type[Task]) -> None:
    """Checks for options that have no effect in the task. Those in files, which may serve many runs, are logged.

    Raises:
        ConfigError: for options from the command line or Python.
    """
    names = [name for name, known in TASK_TYPES.items() if issubclass(task_type, known)]
    if config.task != "auto" and names != [config.task]:
        message = f"is {config.task}, but the model {config.model!r} defines its own task. Remove the option."
        raise ConfigError([Problem(config.origin("task"), "task", message)])
    options = config.options_of("model")
    problems = []
    for key, owner in _OWNERS.items():
        fields = type(options).model_fields
        if not names or key not in fields or getattr(options, key) == fields[key].default:
            continue
        if owner not in names:
            problems.append(Problem(config.origin(key), key, f"has no effect here: it is for {owner}."))
        elif key == "huber_delta" and getattr(options, "regression_loss", "huber") != "huber":
            problems.append(Problem(config.origin(key), key, "has no effect here: it is for --regression_loss huber."))
    typed = [problem for problem in problems if problem.where in ("command line", "Python")]
    for call in config.metrics:
        tasks = build_metric(call).tasks
        if names and tasks and not set(names) & set(tasks):
            fitting = [entry.name for entry in METRICS.entries() if _fits(entry, names)]
            message = f"{call} is for {' and '.join(tasks)}; this is {names[0]}, which has: {', '.join(fitting)}."
            typed.append(Problem(config.origin("metrics"), "metrics", message))
    if typed:
        raise ConfigError(typed)
    for problem in problems:
        log.info("note: %s", problem)


def _fits(entry: Entry, tasks: list[str]) -> bool:
    """Returns whether a metric is for one of some tasks."""
    return bool(set(tasks) & set(getattr(entry.load(), "tasks", ())))


def build_task(config: Config, dataset: Dataset) -> Task:
    """Returns the task of the model that ``config`` names, for ``dataset``."""
    describe = partial(describe_data, dataset, config.preprocess)
    data: DataInfo = describe() if config.preprocess else dataset.once("description", describe)
    task = task_for(config, data, dataset.features.get(LABEL))
    unused = [name for name in task.data.features if name not in (ID, IMAGE, LABEL)]
    if unused and isinstance(config.entry("model").target, str):  # a built-in model
        log.warning(
            "the model %s takes one input, %r. It does not use %s. For a model that does, see docs/models.md, "
            "Several inputs",
            *(config.model, IMAGE, ", ".join(unused)),
        )
    return task


def task_for(config: Config, data: DataInfo, label: Feature | None) -> Task:
    """Returns the task of the model that ``config`` names; ``label`` is that of the dataset, before preprocessing."""
    target = config.entry("model").load()
    options = config.options_of("model")
    if not inspect.isclass(target):
        base = choose_type(config, data, label)
        check_options(config, base)
        own: dict[str, Any] = {"network": lambda task: target(task.data, task.options)}
        if hasattr(target, "first_weights"):  # a backbone, which may have pretrained weights
            own["first_weights"] = lambda task, model: target.first_weights(model, task.options)
        task: type[Task] = type(base.__name__, (base,), own)
        return task(options, data)
    if not issubclass(target, Task):
        raise UserError(f"the model {config.model!r} is a class, but not a subclass of modelyard.Task.")
    check_options(config, target)
    return target(options, data)
