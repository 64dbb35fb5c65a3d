"""An optimizer that hands each weight to the optimizer of its group."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import keras

from modelyard.config.optimizer_groups import OptimizerGroup
from modelyard.errors import UserError, nearest

Member = tuple[OptimizerGroup, keras.optimizers.Optimizer]


class Groups:
    """Which optimizer has which weight: the first group that its name matches, else the main one.

    Args:
        main: for all weights that are in no group.
        members: the groups with their optimizers.
        model: the name of the model, which the names of its weights may begin with.
    """

    def __init__(self, main: keras.optimizers.Optimizer, members: Sequence[Member], model: str = "") -> None:
        self.main, self.members, self.model = main, list(members), model

    def name(self, variable: Any) -> str:
        """The name of a weight, as in checkpoints."""
        return str(variable.path).removeprefix(f"{self.model}/")

    def __call__(self, variable: Any) -> keras.optimizers.Optimizer:
        """The optimizer of a weight."""
        name = self.name(variable)
        for group, optimizer in self.members:
            if any(fnmatchcase(name, pattern) for pattern in group.patterns):
                return optimizer
        return self.main

    def check(self, variables: Sequence[Any]) -> None:
        """Every pattern must match, and every group must have some weight.

        Raises:
            UserError: naming the pattern, and names that are near.
        """
        names = [self.name(variable) for variable in variables]
        chosen = [self(variable) for variable in variables]
        for group, optimizer in self.members:
            for pattern in group.patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise UserError(_no_match(pattern, names))
            if all(optimizer is not other for other in chosen):
                raise UserError(
                    f"optimizer_groups: all that match={'|'.join(group.patterns)!r} names is in groups before it. "
                    "Put it first, or leave it out."
                )


class GroupedOptimizer(keras.optimizers.MultiOptimizer):
    """Keras's optimizer of several, which checks its groups when it is built."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, name="groups")

    def build(self, var_list: Any) -> None:
        """Deals the weights out.

        Raises:
            UserError: if a group has none.
        """
        self._optimizer_map.check(var_list)
        super().build(var_list)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Hands each gradient to the optimizer of its weight; weights that are not given stay as they are."""
        given = self._trainable_variables if trainable_variables is None else trainable_variables
        if len(given) == len(self._trainable_variables):
            super().apply(grads, given)
            return
        for optimizer in self._inner_optimizers:
            mine = [(g, v) for g, v in zip(grads, given, strict=True) if self._optimizer_map(v) is optimizer]
            if mine:
                optimizer.apply(*map(list, zip(*mine, strict=True)))
            else:
                optimizer.iterations.assign_add(1)  # it counts steps, not those that it had something to do in
        self._iterations.assign_add(1)


def _no_match(pattern: str, names: Sequence[str]) -> str:
    near = nearest(pattern.replace("*", ""), names) or list(names)[:5]
    return f"optimizer_groups: match={pattern!r} matches no weight that is learned. Near: {', '.join(near)}."
