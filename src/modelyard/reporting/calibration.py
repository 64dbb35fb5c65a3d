"""Whether probabilities are what they say: reliability, the expected calibration error, and the temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.models.metric_types import CLASSIFICATION, MULTI_LABEL
from modelyard.reporting.scores import Predictions

Array = NDArray[Any]
BINS = 15
"""As the metric calibration_error has them."""
_LEAST, _MOST = 0.05, 20.0


@dataclass(frozen=True)
class Bin:
    """Predictions of about the same probability: their number, the mean probability, and how many are right."""

    count: int
    probability: float
    right: float


@dataclass(frozen=True)
class Calibration:
    """The calibration of a model on a split.

    Args:
        bins: the reliability diagram, without empty bins.
        error: the expected calibration error (ECE).
        probability: the mean probability of what is predicted.
        right: the fraction that is right.
        temperature: the number to divide the logits by, which gives the lowest loss on this split.
        error_after: the calibration error with it.
        log_loss, log_loss_after: the cross-entropy without and with it.
    """

    bins: tuple[Bin, ...]
    error: float
    probability: float
    right: float
    temperature: float
    error_after: float
    log_loss: float
    log_loss_after: float


def calibration(found: Predictions) -> Calibration | None:
    """Returns the calibration of classes, or of the decisions of a multi-label model; None for other tasks."""
    if found.task not in (CLASSIFICATION, MULTI_LABEL) or not len(found):
        return None
    from scipy.optimize import minimize_scalar

    given = found.outputs["probabilities"].astype(np.float64)
    single = found.task == CLASSIFICATION
    logits = _logits(given, single)

    def loss(log_temperature: float) -> float:
        return _log_loss(logits / np.exp(log_temperature), found.labels, single)

    best = minimize_scalar(loss, bounds=(np.log(_LEAST), np.log(_MOST)), method="bounded")
    temperature = float(np.exp(best.x))
    said, right = _decisions(given, found.labels, single)
    after = _decisions(_probabilities(logits / temperature, single), found.labels, single)
    bins = tuple(_bins(said, right))
    return Calibration(
        bins, _error(said, right), float(said.mean()), float(right.mean()), temperature, _error(*after), loss(0.0),
        loss(float(best.x)),
    )  # fmt: skip


def with_temperature(found: Predictions, temperature: float) -> Array:
    """Returns the probabilities if the logits are divided by a number."""
    single = found.task == CLASSIFICATION
    return _probabilities(_logits(found.outputs["probabilities"].astype(np.float64), single) / temperature, single)


def _logits(probabilities: Array, single: bool) -> Array:
    least = np.finfo(np.float32).tiny
    if single:
        return np.log(np.maximum(probabilities, least))
    inside = np.clip(probabilities, 1e-7, 1 - 1e-7)
    logits: Array = np.log(inside) - np.log1p(-inside)
    return logits


def _log_probabilities(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def _probabilities(logits: Array, single: bool) -> Array:
    found: Array = np.exp(_log_probabilities(logits)) if single else 1 / (1 + np.exp(-logits))
    return found


def _log_loss(logits: Array, labels: Array, single: bool) -> float:
    if single:
        return float(-_log_probabilities(logits)[np.arange(len(labels)), labels].mean())
    return float((np.logaddexp(0, logits) - logits * labels.astype(np.float64)).mean())


def _decisions(probabilities: Array, labels: Array, single: bool) -> tuple[Array, Array]:
    """Returns the probability of each decision, and whether it is right; of multi-label, whether the label applies."""
    if single:
        return probabilities.max(axis=1), (probabilities.argmax(axis=1) == labels).astype(np.float64)
    return probabilities.ravel(), labels.astype(np.float64).ravel()


def _numbers(said: Array) -> Array:
    numbers: Array = np.clip(np.ceil(said * BINS).astype(np.int64) - 1, 0, BINS - 1)
    return numbers


def _error(said: Array, right: Array) -> float:
    return float(np.abs(np.bincount(_numbers(said), right - said, BINS)).sum() / len(said))


def _bins(said: Array, right: Array) -> list[Bin]:
    numbers = _numbers(said)
    parts = [(said[numbers == n], right[numbers == n]) for n in range(BINS)]
    return [Bin(len(s), float(s.mean()), float(r.mean())) for s, r in parts if len(s)]
