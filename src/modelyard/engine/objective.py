"""What is computed on a batch, the same on every engine: preprocessing, loss, metrics, predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras import ops

from modelyard.config.schema import Config
from modelyard.engine.evaluation import averaged
from modelyard.engine.network import Network
from modelyard.models.cut_floats import warn_of_cut_floats
from modelyard.models.task import Batch, Task, Tensor


@dataclass(frozen=True)
class Objective:
    """Computes the loss of a part of a global batch; the sum over the parts is the loss of the whole.

    Args:
        task: computes loss and metrics of each example.
        config: batch size and regularisation.
        parts: the number of parts of a global batch.
    """

    task: Task
    config: Config
    parts: int

    def __call__(
        self, outputs: Tensor, batch: Batch, losses: list[Tensor], kernels: list[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the value to differentiate, and the part's shares of the means of loss and metrics.

        Args:
            outputs: the outputs of the network, in full precision.
            batch: the examples of this part.
            losses: the losses that layers add, of the part and not of each example.
            kernels: the weights that l2_regularization applies to.
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


class BatchFunctions:
    """The functions of a task on a batch of tensors. Engines compile them.

    Args:
        config: the resolved config.
        network: the task with its model.
        augment: the augmentation of training batches.
        prepare: the user's own preprocessing of batches.
    """

    def __init__(
        self, config: Config, network: Network, augment: Callable[..., Batch], prepare: Callable[[Batch, bool], Batch]
    ) -> None:
        self._config, self._network, self._task = config, network, network.task
        self._augment, self._prepare = augment, prepare
        self.views_one_by_one = False
        """Whether the views of test-time augmentation go through the network one after the other."""

    def preprocess(
        self,
        batch: Batch,
        training: bool,
        low: Any = None,
        high: Any = None,
        rows: Any = None,
        epochs: Any = None,
        seeds: Any = None,
    ) -> Batch:
        """Returns a batch as the network sees it: augmented for training, then preprocessed by the user, then the task.

        Args:
            batch: named tensors.
            training: whether this is a training step.
            low, high: for training, the two 32-bit halves of each example's position in the stream.
            rows: for training, the number of each example in its split.
            epochs: for training, the epoch that each example's position belongs to.
            seeds: the seeds of the augmentation, if they are not to be compiled into the program.
        """
        if training:
            batch = self._augment(batch, low, high, rows, epochs, seeds)
        batch = self._task.preprocess(self._prepare(batch, training), training)
        warn_of_cut_floats(self._task, self._network.model, batch)
        return self._task.weigh(batch) if training else batch

    def statistics(self, forward: Callable[[Batch], Any], batch: Batch) -> dict[str, Tensor]:
        """Returns loss and metrics of each example of a raw batch, for evaluation.

        Args:
            forward: from a batch to the network's outputs.
            batch: named tensors.
        """
        outputs, seen = self._outputs(forward, batch)
        return {"loss": self._task.loss(outputs, seen), **self._task.metrics(outputs, seen)}

    def predictions(self, forward: Callable[[Batch], Any], batch: Batch) -> dict[str, Any]:
        """Returns the task's predictions for a raw batch."""
        return self._task.predictions(*self._outputs(forward, batch))

    def _outputs(self, forward: Callable[[Batch], Any], batch: Batch) -> tuple[Any, Batch]:
        seen = self.preprocess(batch, False)
        names = self._config.test_time_augmentation
        return averaged(forward, seen, names, one_by_one=self.views_one_by_one), seen
