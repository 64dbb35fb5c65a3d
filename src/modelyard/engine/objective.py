"""What a training step makes smaller, and what it measures on the way; the same on every engine."""

from __future__ import annotations

from dataclasses import dataclass

from keras import ops

from modelyard.config.schema import Config
from modelyard.models.task import Batch, Task, Tensor


@dataclass(frozen=True)
class Objective:
    """The loss of a part of a global batch; the parts' sum is the loss of the whole.

    Args:
        task: gives loss and metrics of each example.
        config: batch size and regularisation.
        parts: into how many parts a global batch is cut.
    """

    task: Task
    config: Config
    parts: int

    def __call__(
        self, outputs: Tensor, batch: Batch, losses: list[Tensor], kernels: list[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What to differentiate, and the part's shares of the means of loss and metrics.

        Args:
            outputs: what the network gives, in full precision.
            batch: the examples of this part.
            losses: what layers add to the loss, of the part and not of each example.
            kernels: what l2_regularization keeps small.
        """
        size = self.config.train_batch_size
        loss = ops.sum(self.task.loss(outputs, batch)) / size
        total = loss
        for extra in losses:
            total = total + ops.cast(extra, loss.dtype) / self.parts
        if self.config.l2_regularization and kernels:
            squares = sum(ops.cast(ops.sum(ops.square(kernel)), loss.dtype) for kernel in kernels)
            total = total + squares * (0.5 * self.config.l2_regularization / self.parts)
        shares = {"loss": loss}
        for name, value in self.task.metrics(outputs, batch).items():
            if len(value.shape) == 1:
                shares[name] = ops.sum(ops.cast(value, loss.dtype)) / size
        return total, shares
