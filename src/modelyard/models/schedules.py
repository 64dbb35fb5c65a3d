"""Learning-rate schedules: pure functions of the step, in units of the peak learning rate."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from modelyard.config.durations import RunLength
from modelyard.config.schema import Config
from modelyard.errors import UserError
from modelyard.models.catalog import (
    CosineOptions,
    ExponentialOptions,
    OneCycleOptions,
    PiecewiseOptions,
    PolynomialOptions,
    RangeTestOptions,
    TriangularOptions,
)
from modelyard.registry import Options

log = logging.getLogger("modelyard")

Schedule = Callable[[Any], Any]
"""From a step (a float tensor) to a learning rate."""


def build_schedule(config: Config, run: RunLength) -> Schedule:
    """Returns the learning rate of ``config`` as a function of the step, warm-up included."""
    warmup = config.warmup.steps(run) if config.warmup is not None else 0
    options = config.options_of("learning_rate_schedule")
    peak = getattr(options, "peak_at", None)
    for name, reached in (("warmup", warmup), ("peak_at", peak.steps(run) if peak is not None else 0)):
        if reached > run.total_steps:
            log.warning("%s is %d steps, but the run has %d: it is never reached", name, reached, run.total_steps)
    factor = config.entry("learning_rate_schedule").load()(options, run, warmup, config.learning_rate)

    def learning_rate(step: Any) -> Any:
        step = ops.cast(step, "float32")
        value = factor(step) * np.float32(config.learning_rate)
        return value * ops.minimum((step + 1) / warmup, 1.0) if warmup else value

    return learning_rate


def constant(options: Options, run: RunLength, warmup: int, peak: float) -> Schedule:
    """Returns the peak at every step."""
    return lambda step: ops.ones_like(step)


def piecewise(options: PiecewiseOptions, run: RunLength, warmup: int, peak: float) -> Schedule:
    """Multiplies by a factor at each boundary, or takes the next value from there on.

    Raises:
        UserError: if there are values, and boundaries are not in order.
    """
    boundaries = [boundary.steps(run) for boundary in options.decay_boundaries]
    if options.decay_values and boundaries != sorted(boundaries):
        raise UserError(f"decay_values needs decay_boundaries in order; they are the steps {boundaries}.")
    factors = options.decay_factors or [options.decay_factor] * len(boundaries)

    def value_at(step: Any) -> Any:
        value = ops.ones_like(step) * np.float32(options.decay_values[0] / peak)
        for boundary, rate in zip(boundaries, options.decay_values[1:], strict=True):
            value = ops.where(step >= boundary, np.float32(rate / peak), value)
        return value

    def factor(step: Any) -> Any:
        value = ops.ones_like(step)
        for boundary, at in zip(boundaries, factors, strict=True):
            value = value * ops.where(step >= boundary, np.float32(at), np.float32(1))
        return value

    if options.decay_values:
        return value_at

    return factor


def exponential(options: ExponentialOptions, run: RunLength, warmup: int, peak: float) -> Schedule:
    """Multiplies by the rate once per period."""
    period = float(options.decay_period.period(run))

    def factor(step: Any) -> Any:
        periods = step / period
        return ops.power(np.float32(options.decay_rate), ops.floor(periods) if options.staircase else periods)

    return factor


def polynomial(options: PolynomialOptions, run: RunLength, warmup: int, peak: float) -> Schedule:
    """Decays from the peak, reached after the warm-up, to the end value at the end."""
    end = options.end_learning_rate / peak
    return lambda step: end + (1 - end) * ops.power(1 - _progress(step, run, warmup), options.decay_power)


def cosine(options: CosineOptions, run: RunLength, warmup: int, peak: float) -> Schedule:
    """Decays by half a cosine from the peak, reached after the warm-up, to the end value at the end."""
    end = options.end_learning_rate / peak
    return lambda step: end + (1 - end) * 0.5 * (1 + ops.cos(math.pi * _progress(step, run, warmup)))


def triangular(options: TriangularOptions, run: RunLength, warmup: int, peak: float) -> Schedule:
    """Goes linearly from a fraction of the peak to the peak, then to the end value at the end."""
    top, start, end = options.peak_at.steps(run), options.start_factor, options.end_learning_rate / peak

    def factor(step: Any) -> Any:
        up = start + (1 - start) * step / top
        return ops.where(step < top, up, end + (1 - end) * (1 - _progress(step, run, top)))

    return factor


def one_cycle(options: OneCycleOptions, run: RunLength, warmup: int, peak: float) -> Schedule:
    """Goes from a fraction of the peak to the peak, then to the end value at the end, each in half a cosine."""
    top, start, end = options.peak_at.steps(run), options.start_factor, options.end_learning_rate / peak

    def factor(step: Any) -> Any:
        up = 0.5 * (1 - ops.cos(math.pi * ops.clip(step / top, 0.0, 1.0)))
        down = 0.5 * (1 + ops.cos(math.pi * _progress(step, run, top)))
        return ops.where(step < top, start + (1 - start) * up, end + (1 - end) * down)

    return factor


def range_test(options: RangeTestOptions, run: RunLength, warmup: int, peak: float) -> Schedule:
    """Grows from the lowest learning rate at the first step to the peak at the last, by the same factor each step."""
    decades = math.log(peak / options.lowest_learning_rate)
    return lambda step: ops.exp(decades * (step / max(run.total_steps - 1, 1) - 1))


def _progress(step: Any, run: RunLength, warmup: int) -> Any:
    return ops.clip((step - warmup) / max(run.total_steps - warmup, 1), 0.0, 1.0)
