"""Optimizers by name, and one for each group of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from modelyard.config.optimizer_groups import read_group
from modelyard.config.schema import Config
from modelyard.models.catalog import AdamOptions, AdamWOptions, MuonOptions, RmspropOptions, SgdOptions
from modelyard.models.grouped import GroupedOptimizer, Groups
from modelyard.models.muon import KernelMuon

LearningRate = Callable[[], Any]
NO_DECAY = ["bias", "gamma", "beta"]
"""Biases and normalisation are not decayed."""


def build_optimizer(config: Config, learning_rate: LearningRate, model: str = "") -> keras.optimizers.Optimizer:
    """The optimizer of ``config``, with those of its groups.

    Args:
        config: the resolved config.
        learning_rate: is asked at each step.
        model: the name of the model, which the names of its weights may begin with.
    """
    main = _without_decay_of_biases(config.entry("optimizer").load()(config.options_of("optimizer"), learning_rate))
    if not config.optimizer_groups:
        return main
    members = []
    for number, call in enumerate(config.optimizer_groups, 1):
        group = read_group(call)
        factor = group.factor if group.learning_rate is None else group.learning_rate / config.learning_rate
        with keras.name_scope(f"group{number}"):  # so that checkpoints tell two of a kind apart
            own = group.entry.load()(group.options, _times(learning_rate, factor))
        members.append((group, _without_decay_of_biases(own)))
    return GroupedOptimizer(Groups(main, members, model))


def _without_decay_of_biases(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    if getattr(optimizer, "weight_decay", None):
        optimizer.exclude_from_weight_decay(var_names=NO_DECAY)
    return optimizer


def _times(learning_rate: LearningRate, factor: float) -> LearningRate:
    return lambda: learning_rate() * factor


def sgd(options: SgdOptions, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Gradient descent with momentum."""
    return keras.optimizers.SGD(
        learning_rate,
        momentum=options.momentum,
        nesterov=options.nesterov,
        weight_decay=options.weight_decay or None,
        name="sgd",
    )


def adam(options: AdamOptions, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Adam."""
    return keras.optimizers.Adam(
        learning_rate, options.adam_beta1, options.adam_beta2, options.adam_epsilon, name="adam"
    )


def adamw(options: AdamWOptions, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Adam with decoupled weight decay."""
    return keras.optimizers.AdamW(
        learning_rate,
        weight_decay=options.weight_decay or None,
        beta_1=options.adam_beta1,
        beta_2=options.adam_beta2,
        epsilon=options.adam_epsilon,
        name="adamw",
    )


def rmsprop(options: RmspropOptions, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """RMSprop."""
    return keras.optimizers.RMSprop(
        learning_rate,
        rho=options.rmsprop_rho,
        momentum=options.momentum,
        weight_decay=options.weight_decay or None,
        name="rmsprop",
    )


def muon(options: MuonOptions, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Muon for kernels, AdamW for the rest."""
    return KernelMuon(
        learning_rate,
        adam_beta_1=options.adam_beta1,
        adam_beta_2=options.adam_beta2,
        epsilon=options.adam_epsilon,
        adam_weight_decay=options.weight_decay,
        weight_decay=options.weight_decay or None,
        momentum=options.momentum,
        ns_steps=options.muon_steps,
        nesterov=options.nesterov,
        rms_rate=0.2 if options.muon_scale == "rms" else None,
        normalize=options.muon_normalize,
        exclude_layers=["logits"],
        name="muon",
    )
