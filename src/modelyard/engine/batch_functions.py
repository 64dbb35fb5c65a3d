"""Functions of a batch, the same on every engine: preprocessing, loss, metrics, predictions.

Test-time augmentation averages outputs over views of each image. ``flip`` is the image and its mirror image. ``shift``
is the image, which counts half, and two that are moved by one pixel, up and left, and down and right, the border
reflected. Both together: every shifted view and its mirror image.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
from keras import ops

from modelyard.config.schema import Config
from modelyard.data.dataset import IMAGE, LABEL
from modelyard.engine.evaluation import FEATURE, PREDICTION
from modelyard.engine.network import Network
from modelyard.errors import DataError, UserError
from modelyard.models.metric import MetricSet
from modelyard.models.task import Batch, Task, Tensor

log = logging.getLogger("modelyard")


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
        self._config, self._model, self._task = config, network.model, network.task
        self._augment, self._prepare = augment, prepare
        self.l2_regularization: Any = config.l2_regularization
        """The factor of the L2 penalty; while a program is compiled, its input."""
        self.metrics = MetricSet(())
        """The metrics of evaluations that are computed from predictions; it is never updated here."""
        self.keeps_predictions = False
        """Whether an evaluation returns all predictions, not only those that metrics read."""
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
        """Returns a batch as the network receives it: augmented, preprocessed by the user, then by the task.

        Args:
            batch: named tensors.
            training: whether this is a training step. Only then is the batch augmented and weighted.
            low, high: the two 32-bit halves of each example's position in the stream.
            rows: the index of each example in its split.
            epochs: the epoch of each example's position.
            seeds: the seeds of the augmentation, if they are inputs of the program.
        """
        if training:
            batch = self._augment(batch, low, high, rows, epochs, seeds)
        batch = self._task.preprocess(self._prepare(batch, training), training)
        warn_of_truncated_floats(self._task, self._model, batch)
        return self._task.weigh(batch) if training else batch

    def objective(
        self, outputs: Tensor, batch: Batch, losses: list[Tensor], kernels: list[Tensor], parts: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the value to differentiate, and contributions to the means of loss and metrics.

        Each is that of a part of the global batch; the sum over the parts is that of the whole.

        Args:
            outputs: the outputs of the network, in full precision.
            batch: the examples of this part.
            losses: the losses that layers add, for the part and not per example.
            kernels: the weights that l2_regularization applies to.
            parts: the number of parts of a global batch.
        """
        size = self._config.train_batch_size
        loss = ops.sum(self._loss(outputs, batch)) / size
        total = loss
        for extra in losses:
            total = total + ops.cast(extra, loss.dtype) / parts
        if self._config.l2_regularization and kernels:
            squares = sum(ops.cast(ops.sum(ops.square(kernel)), loss.dtype) for kernel in kernels)
            total = total + squares * (0.5 * self.l2_regularization / parts)
        means = {"loss": loss}
        for name, value in self._task.metrics(outputs, batch).items():
            if len(value.shape) == 1:
                means[name] = ops.sum(ops.cast(value, loss.dtype)) / size
        return total, means

    def outputs(self, batch: Batch, training: bool) -> Any:
        """Returns the outputs of the network for a preprocessed batch, in full precision."""
        outputs = network_outputs(self._model, batch, training)
        return keras.tree.map_structure(lambda x: ops.cast(x, keras.config.floatx()), outputs)

    def evaluation(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns loss and metrics per example of a raw batch, to be summed; and values of each example.

        Those are what is kept of an example, and the inputs of `metrics`: predictions and features.
        """
        outputs, seen = self._evaluated(batch)
        statistics = {"loss": self._loss(outputs, seen), **self._task.metrics(outputs, seen)}
        kept = self._task.example_values(statistics)
        if LABEL in seen and len(seen[LABEL].shape) == 1:
            kept = {**kept, LABEL: seen[LABEL]}
        if self.metrics.metrics or self.keeps_predictions:
            predictions, wanted = self._task.predictions(outputs, seen), self.metrics.predictions
            if wanted is not None and not self.keeps_predictions:
                predictions = {name: predictions[name] for name in wanted if name in predictions}
            kept = {**kept, **{PREDICTION + name: value for name, value in predictions.items()}}
            kept |= {FEATURE + name: seen[name] for name in self.metrics.features if name in seen}
        return statistics, kept

    def _loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Returns the loss of each example.

        Raises:
            UserError: if the loss of the task has another shape.
        """
        loss = self._task.loss(outputs, batch)
        count = next(iter(batch.values())).shape[0]  # None if it is not known yet
        if len(loss.shape) != 1 or (None not in (count, loss.shape[0]) and loss.shape[0] != count):
            raise UserError(
                f"the loss of {type(self._task).__name__} must return one value per example, a tensor of shape "
                f"[batch]; it returned one of shape {tuple(loss.shape)}. Modelyard averages over the examples."
            )
        return loss

    def predictions(self, batch: Batch) -> dict[str, Any]:
        """Returns the task's predictions for a raw batch."""
        return self._task.predictions(*self._evaluated(batch))

    def _evaluated(self, batch: Batch) -> tuple[Any, Batch]:
        seen = self.preprocess(batch, False)
        forward = partial(self.outputs, training=False)
        return outputs_of_views(forward, seen, self._config, self._task, self.views_one_by_one), seen


def network_outputs(model: keras.Model, batch: Batch, training: bool = False) -> Any:
    """Returns the outputs of a network, which takes the features of a batch that its inputs are named like."""
    inputs = {tensor.name: batch[tensor.name] for tensor in model.inputs}
    return model(inputs if len(inputs) > 1 else next(iter(inputs.values())), training=training)


def warn_of_truncated_floats(task: Task, model: Any, batch: Batch) -> None:
    """Warns, once per task, if Keras casts floats from `preprocess` to integers, since the network takes integers."""
    for tensor in model.inputs:
        given = batch.get(tensor.name)
        truncated = given is not None and "int" in str(tensor.dtype) and "float" in str(ops.dtype(given))
        if truncated and "_warned_of_truncated_floats" not in vars(task):
            vars(task)["_warned_of_truncated_floats"] = True
            log.warning(
                "%s.preprocess returns %s as floats, but the network's input is %s: fractions are truncated. "
                "Make the input keras.Input(…, dtype='float32', name=%r), or scale in the network.",
                *(type(task).__name__, tensor.name, tensor.dtype, tensor.name),
            )


# -- test-time augmentation -----------------------------------------------------------------------------------------


def views_of(images: Any, names: Sequence[str]) -> list[tuple[Any, float]]:
    """Returns views of a batch of images, with the weight of each.

    Raises:
        DataError: if the examples are not images.
    """
    if len(images.shape) != 4 or min(images.shape[1:3]) < 2:
        raise DataError(
            f"test_time_augmentation needs images of height × width × channels; these have shape {images.shape[1:]}."
        )
    views = [(images, 1.0)]
    if "shift" in names:
        views = [(images, 0.5), *((moved, 0.25) for moved in _shifted(images))]
    if "flip" in names:
        views = [(view, weight / 2) for image, weight in views for view in (image, image[:, :, ::-1, :])]
    return views


def outputs_of_views(
    forward: Callable[[Batch], Any], batch: Batch, config: Config, task: Task, one_by_one: bool = False
) -> Any:
    """Returns the outputs for a batch, with the test-time augmentation of a config."""
    names, below = config.test_time_augmentation, config.test_time_augmentation_below
    if names and below is not None:
        return averaged_if_unsure(forward, batch, names, task, below)
    return averaged(forward, batch, names, one_by_one=one_by_one)


def averaged(forward: Callable[[Batch], Any], batch: Batch, names: Sequence[str], *, one_by_one: bool = False) -> Any:
    """Returns the outputs of ``forward`` for a batch, averaged over views of its images.

    Args:
        forward: from a batch to outputs (or a nest of them) whose first axis is the batch; called once.
        batch: named tensors, among them the images.
        names: the views: "flip", "shift", both or none.
        one_by_one: send the views through the network in a loop, each as a batch, not all in one batch.

    Raises:
        DataError: if the outputs have places in the image, such as those of a segmentation.
    """
    if not names:
        return forward(batch)
    images, weights = zip(*views_of(batch[IMAGE], names), strict=True)
    return _mean(_outputs_of(forward, batch, images, one_by_one), weights)


def _mean(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """Returns the weighted sum of the outputs for several views."""
    return keras.tree.map_structure(
        lambda *parts: sum(part * weight for part, weight in zip(parts, weights, strict=True)), *outputs
    )


def _outputs_of(
    forward: Callable[[Batch], Any], batch: Batch, images: Sequence[Any], one_by_one: bool = False
) -> list[Any]:
    """Returns the outputs for each view of the images of a batch."""
    if one_by_one:
        outputs = ops.map(lambda image: forward({**batch, IMAGE: image}), ops.stack(images))
    else:
        together = {name: ops.concatenate([value] * len(images)) for name, value in batch.items() if name != IMAGE}
        outputs = forward({**together, IMAGE: ops.concatenate(images)})

    def parts(output: Any) -> Any:
        shape = output.shape[1:] if one_by_one else output.shape
        if len(shape) > 3:
            raise DataError(
                f"test_time_augmentation averages outputs over views of an image; the outputs of this model have shape "
                f"{tuple(shape[1:])}: a value for each place, which is another place in each view. Leave it out."
            )
        return output if one_by_one else ops.split(output, len(images))

    flat = [parts(output) for output in keras.tree.flatten(outputs)]
    return [keras.tree.pack_sequence_as(outputs, [part[view] for part in flat]) for view in range(len(images))]


def averaged_if_unsure(
    forward: Callable[[Batch], Any], batch: Batch, names: Sequence[str], task: Task, below: float
) -> Any:
    """Returns the outputs for a batch; averaged over views for images whose most probable class is less probable.

    What becomes of an image does not depend on the others of its batch.

    Args:
        forward: as for `averaged`.
        batch: named tensors, among them the images.
        names: the views.
        task: the task, which makes probabilities of outputs.
        below: the probability.

    Raises:
        UserError: if the task has no probabilities of classes.
    """
    first = forward(batch)
    predictions = task.predictions(first, batch)
    if not {"class", "probabilities"} <= set(predictions):
        raise UserError(
            "test_time_augmentation_below needs a task with one class for each image. Leave it out: then "
            "test_time_augmentation averages over views of every image."
        )
    unsure = ops.max(predictions["probabilities"], axis=-1) < below
    size, views = batch[IMAGE].shape[0], len(views_of(batch[IMAGE], names))
    if size is None or size < views:
        return _chosen(unsure, averaged(forward, batch, names), first)
    # The unsure images come first. As many are computed at a time as have, with all other views, the size of a batch.
    count, part = ops.sum(ops.cast(unsure, "int32")), size // (views - 1)
    order = ops.argsort(ops.where(unsure, 0, 1))

    def compute(number: Any, outputs: Any) -> tuple[Any, Any]:
        rows = ops.take(order, ops.minimum(number * part + ops.arange(part, dtype="int32"), size - 1))
        some = {name: ops.take(value, rows, axis=0) for name, value in batch.items()}
        whole = keras.tree.map_structure(lambda output: ops.take(output, rows, axis=0), first)
        images, weights = zip(*views_of(some[IMAGE], names), strict=True)
        mean = _mean([whole, *_outputs_of(forward, some, images[1:])], weights)
        mean = _chosen(ops.take(unsure, rows), mean, whole)  # the last part has some of the others
        places = ops.expand_dims(rows, -1)
        return number + 1, keras.tree.map_structure(
            lambda output, part: ops.scatter_update(output, places, part), outputs, mean
        )

    start = ops.convert_to_tensor(0, "int32")
    return ops.while_loop(lambda number, _: number * part < count, compute, (start, first))[1]


def _chosen(which: Any, these: Any, others: Any) -> Any:
    """Returns, for each example, ``these`` or ``others``."""

    def choose(one: Any, other: Any) -> Any:
        return ops.where(ops.reshape(which, (-1, *[1] * (len(one.shape) - 1))), one, other)

    return keras.tree.map_structure(choose, these, others)


def _shifted(images: Any) -> list[Any]:
    # Slices are joined, since backends don't have a reflecting pad for every type.
    down = ops.concatenate([images[:, 1:2], images[:, :-1]], axis=1)
    up = ops.concatenate([images[:, 1:], images[:, -2:-1]], axis=1)
    return [
        ops.concatenate([down[:, :, 1:2], down[:, :, :-1]], axis=2),
        ops.concatenate([up[:, :, 1:], up[:, :, -2:-1]], axis=2),
    ]
