"""Optimizers, and groups of weights with optimizers of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

import keras
from keras import ops

from modelyard.config.schema import Config
from modelyard.config.weight_groups import OptimizerGroup, read_group
from modelyard.errors import UserError, nearest
from modelyard.models.catalog import (
    AdadeltaOptions,
    AdagradOptions,
    AdamOptions,
    AdamWOptions,
    FtrlOptions,
    MomentumOptions,
    MuonOptions,
    RmspropOptions,
    SgdOptions,
)
from modelyard.models.muon import KernelMuon

LearningRate = Callable[[], Any]
Member = tuple[OptimizerGroup, keras.optimizers.Optimizer]
NO_DECAY = ["bias", "gamma", "beta"]
"""Biases and normalization are not decayed, except in a group that names them: match='*/beta'."""


def build_optimizer(config: Config, learning_rate: LearningRate, model: str = "") -> keras.optimizers.Optimizer:
    """Returns the optimizer of ``config``, with those of its groups.

    Args:
        config: the resolved config.
        learning_rate: called at each step.
        model: the name of the model, a prefix of the names of its weights.
    """
    main = _without_decay_of_biases(config.entry("optimizer").load()(config.options_of("optimizer"), learning_rate))
    if not config.optimizer_groups:
        return main
    members = []
    for number, call in enumerate(config.optimizer_groups, 1):
        entry, group = read_group(call)
        factor = group.factor if group.learning_rate is None else group.learning_rate / config.learning_rate
        with keras.name_scope(f"group{number}"):  # so that checkpoints distinguish two optimizers of one class
            own = entry.load()(group, ScaledRate(learning_rate, factor))
        named = {pattern.rpartition("/")[2] for pattern in group.match}
        members.append((group, _without_decay_of_biases(own, named)))
    return GroupedOptimizer(Groups(main, members, model))


def first_slot_values(optimizer: Any) -> dict[int, float]:
    """Returns the initial values that are not 0 of an optimizer's slots, by the `id` of the variable."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    members = [inner.groups.main, *(one for _, one in inner.groups.members)] if hasattr(inner, "groups") else [inner]
    return {
        id(variable): float(member.initial_accumulator_value)
        for member in members
        if getattr(member, "initial_accumulator_value", 0)
        for variable in member.variables
        if variable.path.endswith("_accumulator")
    }


def _without_decay_of_biases(
    optimizer: keras.optimizers.Optimizer, named: Collection[str] = ()
) -> keras.optimizers.Optimizer:
    if getattr(optimizer, "weight_decay", None):
        optimizer.exclude_from_weight_decay(var_names=[name for name in NO_DECAY if name not in named])
    return optimizer


def sgd(options: SgdOptions, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Gradient descent with momentum."""
    return Sgd(
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


def momentum(options: MomentumOptions, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Gradient descent with momentum, by the name that TensorFlow's estimators have for it."""
    return sgd(options, learning_rate)


def adagrad(options: AdagradOptions, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Adagrad."""
    return keras.optimizers.Adagrad(
        learning_rate,
        initial_accumulator_value=options.adagrad_initial_accumulator_value,
        epsilon=options.adagrad_epsilon,
        weight_decay=options.weight_decay or None,
        name="adagrad",
    )


def adadelta(options: AdadeltaOptions, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Adadelta."""
    return keras.optimizers.Adadelta(
        learning_rate,
        rho=options.adadelta_rho,
        epsilon=options.adadelta_epsilon,
        weight_decay=options.weight_decay or None,
        name="adadelta",
    )


def ftrl(options: FtrlOptions, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """FTRL."""
    return keras.optimizers.Ftrl(
        learning_rate,
        learning_rate_power=options.ftrl_learning_rate_power,
        initial_accumulator_value=options.ftrl_initial_accumulator_value,
        l1_regularization_strength=options.ftrl_l1,
        l2_regularization_strength=options.ftrl_l2,
        l2_shrinkage_regularization_strength=options.ftrl_l2_shrinkage,
        beta=options.ftrl_beta,
        name="ftrl",
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


class Sgd(keras.optimizers.SGD):
    """Keras's SGD, whose momentum may also be a tensor: an input of a compiled program."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one weight. Keras compares the momentum with 0, which a tensor of a program does not support."""
        if isinstance(self.momentum, float):
            super().update_step(gradient, variable, learning_rate)
            return
        rate, momentum = (ops.cast(value, variable.dtype) for value in (learning_rate, self.momentum))
        step, m = ops.cast(gradient, variable.dtype) * rate, self.momentums[self._get_variable_index(variable)]
        self.assign(m, m * momentum - step)
        self.assign_add(variable, m * momentum - step if self.nesterov else m)


# -- groups of weights -------------------------------------------------------------------------------------------------


class ScaledRate:
    """The learning rate of a group of weights: the main one times a factor."""

    def __init__(self, learning_rate: LearningRate, factor: float) -> None:
        self._learning_rate, self.factor = learning_rate, factor

    def __call__(self) -> Any:
        """Returns the learning rate."""
        rate = self._learning_rate()
        return rate * ops.cast(self.factor, rate.dtype)


class Groups:
    """Maps a weight to its optimizer: that of the first group that matches its name, else the main one.

    Args:
        main: the optimizer of all weights that are in no group.
        members: the groups with their optimizers.
        model: the name of the model, a prefix of the names of its weights.
    """

    def __init__(self, main: keras.optimizers.Optimizer, members: Sequence[Member], model: str = "") -> None:
        self.main, self.members, self.model = main, list(members), model

    def name(self, variable: Any) -> str:
        """Returns the name of a weight, as in checkpoints."""
        return str(variable.path).removeprefix(f"{self.model}/")

    def __call__(self, variable: Any) -> keras.optimizers.Optimizer:
        """Returns the optimizer of a weight."""
        name = self.name(variable)
        for group, optimizer in self.members:
            if any(fnmatchcase(name, pattern) for pattern in group.match):
                return optimizer
        return self.main

    def check(self, variables: Sequence[Any]) -> None:
        """Checks that every pattern matches and every group has a weight.

        Raises:
            UserError: with the pattern and near names.
        """
        names = [self.name(variable) for variable in variables]
        chosen = [self(variable) for variable in variables]
        for group, optimizer in self.members:
            for pattern in group.match:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise UserError(_no_match(pattern, names))
            if all(optimizer is not other for other in chosen):
                raise UserError(
                    f"optimizer_groups: all that match={'|'.join(group.match)!r} names is in groups before it. "
                    "Put this group first, or remove it."
                )


class GroupedOptimizer(keras.optimizers.MultiOptimizer):
    """Keras's `MultiOptimizer`, which checks its groups when it is built."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, name="groups")
        self.groups = groups

    def build(self, var_list: Any) -> None:
        """Assigns the weights to the groups.

        Raises:
            UserError: if a group has no weights.
        """
        self._optimizer_map.check(var_list)
        super().build(var_list)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Applies each gradient with the optimizer of its weight. Other weights do not change."""
        given = self._trainable_variables if trainable_variables is None else trainable_variables
        if len(given) == len(self._trainable_variables):
            super().apply(grads, given)
            return
        for optimizer in self._inner_optimizers:
            mine = [(g, v) for g, v in zip(grads, given, strict=True) if self._optimizer_map(v) is optimizer]
            if mine:
                optimizer.apply(*map(list, zip(*mine, strict=True)))
            else:
                optimizer.iterations.assign_add(1)  # counts all steps, also those without gradients for this optimizer
        self._iterations.assign_add(1)


def _no_match(pattern: str, names: Sequence[str]) -> str:
    near = nearest(pattern.replace("*", ""), names) or list(names)[:5]
    return f"optimizer_groups: match={pattern!r} matches no weight that is trained. Near: {', '.join(near)}."
