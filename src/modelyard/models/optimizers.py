"""Optimizers by name: Keras's, and Muon for convolutions too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from modelyard.config.schema import Config
from modelyard.models.catalog import AdamOptions, AdamWOptions, MuonOptions, RmspropOptions, SgdOptions

LearningRate = Callable[[], Any]
NO_DECAY = ["bias", "gamma", "beta"]
"""Biases and normalisation are not decayed."""


def build_optimizer(config: Config, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """The optimizer of ``config``. ``learning_rate`` is asked at each step."""
    optimizer = config.entry("optimizer").load()(config.options_of("optimizer"), learning_rate)
    if getattr(optimizer, "weight_decay", None):
        optimizer.exclude_from_weight_decay(var_names=NO_DECAY)
    return optimizer


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
        nesterov=options.nesterov,
        exclude_layers=["logits"],
        name="muon",
    )


@keras.saving.register_keras_serializable(package="modelyard")
class KernelMuon(keras.optimizers.Muon):
    """Muon that also takes the kernels of convolutions: orthogonalised as matrices of (all inputs) × (outputs).

    Keras's own leaves every variable that is not two-dimensional to AdamW.
    """

    def _should_use_adamw(self, variable: Any) -> bool:
        if len(variable.shape) <= 2:
            return bool(super()._should_use_adamw(variable))
        return not str(getattr(variable, "path", variable.name)).split(":")[0].endswith("kernel")

    def _muon_update_step(self, gradient: Any, variable: Any, lr: Any, m: Any) -> None:
        super()._muon_update_step(gradient, variable, ops.cast(lr, variable.dtype), m)

    def lr_adjust(self, x: Any) -> Any:
        """The scale of an update, by the larger side of its matrix form."""
        if self.rms_rate is None:
            return x
        outputs = x.shape[-1]
        inputs = math.prod(x.shape[:-1])
        return x * (math.sqrt(max(inputs, outputs)) * self.rms_rate)

    def zeropower_via_newtonschulz5(self, x: Any, steps: int) -> Any:
        """The orthogonalisation, on the matrix form of ``x``."""
        shape = x.shape
        if len(shape) <= 2:
            return super().zeropower_via_newtonschulz5(x, steps)
        flat = super().zeropower_via_newtonschulz5(ops.reshape(x, (-1, shape[-1])), steps)
        return ops.reshape(flat, shape)
