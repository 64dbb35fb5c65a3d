"""Which task a network becomes: classification, regression, multi-label; as the option says, or as the labels are."""

from __future__ import annotations

import logging

from modelyard.config.schema import Config
from modelyard.data.dataset import LABEL, Feature, label_kind
from modelyard.errors import ConfigError, DataError, Problem
from modelyard.models.multi_label import MultiLabel
from modelyard.models.regression import Regressor
from modelyard.models.task import Classifier, DataInfo, Task

log = logging.getLogger("modelyard")

KINDS: dict[str, type[Task]] = {"classification": Classifier, "regression": Regressor, "multi_label": MultiLabel}
_BY_LABEL = {"class": "classification", "none": "classification", "values": "regression", "flags": "multi_label"}
_OWNERS = {
    "label_smoothing": "classification",
    "class_weights": "classification",
    "focal_gamma": "classification",
    "regression_loss": "regression",
    "huber_delta": "regression",
}
"""Options that have a meaning for one task only."""


def kind_of_network(config: Config, data: DataInfo, stored: Feature | None) -> type[Task]:
    """What the network of a registered function is trained as.

    Args:
        config: the resolved config; its option ``task`` decides.
        data: what the network sees.
        stored: the label as the dataset has it; preprocessing may make shares of the classes of it.

    Raises:
        DataError: if the labels are not such as the task needs.
    """
    kind: str = config.task
    if kind == "auto":
        kind = _BY_LABEL[label_kind(stored)]
        if kind != "classification" and stored is not None:
            log.info("task %s: labels are %s", kind, _in_words(stored))
    label = data.features.get(LABEL)
    found = label_kind(label)
    shares = label is not None and found == "values" and label.shape == (len(data.classes),)
    if kind == "classification" and label is not None and found != "class" and not shares:
        raise DataError(
            f"classification needs a class (a whole number) for each example; labels are "
            f"{_in_words(label)}. Set --task {_BY_LABEL[found]}, or of rows take the argmax."
        )
    return KINDS[kind]


def _in_words(label: Feature) -> str:
    return f"{label.dtype}, " + (f"of shape {label.shape}" if label.shape else "one for each example")


def check_options(config: Config, kind: type[Task]) -> None:
    """Refuses options that have no meaning for the task, where they were set for this run.

    Raises:
        ConfigError: with those that were typed; what stands in a file, which may serve many runs, is only said.
    """
    names = [name for name, known in KINDS.items() if issubclass(kind, known)]
    if config.task != "auto" and names != [config.task]:
        message = f"is {config.task}, but the model {config.model!r} is a task of its own. Leave it out."
        raise ConfigError([Problem(config.origin("task"), "task", message)])
    options = config.options_of("model")
    problems = []
    for key, owner in _OWNERS.items():
        fields = type(options).model_fields
        if not names or key not in fields or getattr(options, key) == fields[key].default:
            continue
        if owner not in names:
            problems.append(Problem(config.origin(key), key, f"has no use here: it is for {owner}."))
        elif key == "huber_delta" and getattr(options, "regression_loss", "huber") != "huber":
            problems.append(Problem(config.origin(key), key, "has no use here: it is for --regression_loss huber."))
    typed = [problem for problem in problems if problem.where in ("command line", "Python")]
    if typed:
        raise ConfigError(typed)
    for problem in problems:
        log.info("note: %s", problem)
