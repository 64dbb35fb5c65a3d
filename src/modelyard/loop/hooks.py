"""The hook contract: what may happen beside training, and when.

A hook of your own:

    @modelyard.register_hook("cheer")
    class Cheer(modelyard.Hook):
        def evaluated(self, loop, split, row):
            if row["accuracy"] > 0.9:
                print("over 90 % at step", loop.step)

and on the command line ``--plugins my_hooks.py --hooks +cheer``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modelyard.config.calls import Call
from modelyard.config.schema import edit_hooks
from modelyard.engine.base import StepMetrics
from modelyard.errors import UserError
from modelyard.registry import HOOKS
from modelyard.registry import Options as BaseOptions

if TYPE_CHECKING:
    from modelyard.loop.trainer import Trainer


class Hook:
    """Override what you need. The loop calls, in this order: `trained` after every stretch of steps, `reported` when
    training metrics are due, `evaluated` after an evaluation, and `settled` when all of that has happened at this step.

    Args:
        options: the typed options of the hook.
    """

    Options: type[BaseOptions] = BaseOptions
    name = ""
    """The name it is registered under."""
    order = 0
    """Hooks are called from the lowest to the highest."""

    def __init__(self, options: BaseOptions) -> None:
        self.options = options

    def begin(self, loop: Trainer) -> None:
        """Before the first step of this process; ``loop.step`` is where it goes on."""

    def next_step(self, loop: Trainer) -> int | None:
        """The next step after which this hook must be called, if it matters to it."""
        return None

    def trained(self, loop: Trainer, metrics: StepMetrics) -> None:
        """After a stretch of steps, with the metrics of each."""

    def reported(self, loop: Trainer, row: dict[str, Any]) -> None:
        """When training metrics are due. A hook may add to the row for those after it."""

    def evaluated(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """After an evaluation."""

    def settled(self, loop: Trainer) -> None:
        """When everything of this step has happened."""

    def interrupted(self, loop: Trainer) -> None:
        """Before the loop leaves because of SIGTERM or Ctrl-C."""

    def end(self, loop: Trainer) -> None:
        """After the last step, also when training failed or was interrupted."""

    def memory(self) -> dict[str, Any]:
        """What must survive a restart, as plain JSON values; saved with every checkpoint."""
        return {}

    def remember(self, memory: dict[str, Any]) -> None:
        """Takes back what `memory` gave."""


def build_hooks(calls: Sequence[Call]) -> list[Hook]:
    """The hooks of a config, the usual ones included, in the order they are called."""
    hooks: list[Hook] = []
    for call in edit_hooks(tuple(calls)):
        hook = HOOKS.get(call.name).load()(call.options(HOOKS))
        if not isinstance(hook, Hook):
            raise UserError(f"the hook {call.name!r} must be a subclass of modelyard.Hook.")
        if any(other.name == call.name for other in hooks):
            raise UserError(f"the hook {call.name!r} is named twice.")
        hook.name = call.name
        hooks.append(hook)
    return sorted(hooks, key=lambda hook: hook.order)
