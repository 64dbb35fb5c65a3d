"""Builds the augmentation of a run. It runs on the device, inside the compiled step, and its draws are arithmetic.

An augmentation is called with a batch (named arrays) and its draws, and returns the changed batch. One of your own:

    @modelyard.register_augmentation("darken")
    class Darken:
        def __init__(self, options): ...
        def __call__(self, batch, draws):
            return {**batch, "image": batch["image"] * draws.uniform()[:, :, None, None]}

It may have ``prepare(info)``, which is called once before training with an `ImageInfo` and raises a `DataError` if the
images are not supported; and ``group``, the number of neighbours in the batch that it mixes. The share of each device
is then a multiple of it.

If the dataset has maps or boxes (`aligned.py`), it must have ``moves_pixels``: False if it only changes values; True if
it moves pixels and changes the features in ``info.aligned`` in the same way.

uint8 images keep values from 0 to 255. Other images are never clipped, and amounts refer to a range of 1. Augmentations
that move pixels keep the type, those that compute return float32. After the last one, images are rounded to their
original type: Keras would truncate fractions and wrap around values out of range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.config.calls import Call, build_component
from modelyard.data.augment.aligned import Aligned, aligned_features, check_undeclared
from modelyard.data.dataset import IMAGE, LABEL, Dataset, label_kind
from modelyard.data.draws import Draws, fold, seed_words
from modelyard.errors import DataError
from modelyard.registry import AUGMENTATIONS

Batch = dict[str, Any]
Augmentation = Callable[[Batch, Draws], Batch]


@dataclass(frozen=True)
class ImageInfo:
    """Facts of the images that an augmentation is prepared for.

    Args:
        name: the name of the augmentation, for errors.
        shape: height, width, channels.
        dtype: the type of the images in the dataset.
        classes: the number of classes; 0 if labels are not class indices.
        aligned: the features that move with the image: maps and boxes.
    """

    name: str
    shape: tuple[int, int, int]
    dtype: str
    classes: int
    aligned: Aligned = field(default_factory=Aligned)

    @property
    def scale(self) -> float:
        """The range of values: 255 for uint8, else 1."""
        return 255.0 if self.dtype == "uint8" else 1.0

    def clip(self, images: Any) -> Any:
        """Clips images to 0 to 255, if the dataset has uint8 images."""
        return ops.clip(images, 0.0, 255.0) if self.dtype == "uint8" else images


def build_augmentation(
    calls: Sequence[Call], dataset: Dataset, seed: int, share: int = 0, skip_first: bool = False
) -> Callable[..., Batch]:
    """Returns all augmentations of a config as one function of (batch, low, high, rows, epochs, seeds): see `Draws`.

    ``seeds`` are those of `augmentation_seeds`; without them, the seed is a constant of the compiled program.

    Args:
        calls: the augmentations, in order.
        dataset: the dataset to augment.
        seed: the run's seed.
        share: the number of examples of the global batch that are augmented together, on one device and in one piece.
        skip_first: whether the first augmentation was done while decoding. The others draw the same numbers anyway.

    Raises:
        DataError: if an augmentation does not support the examples or the share.
    """
    steps: list[Augmentation] = [build_component(call, AUGMENTATIONS) for call in calls]
    if not steps:
        return lambda batch, low, high, rows=None, epochs=None, seeds=None: batch
    for call, step in zip(calls, steps, strict=True):
        info = _image_info(call.name, dataset)
        _check_moves(call.name, step, dataset, info.aligned)
        if hasattr(step, "prepare"):
            step.prepare(info)
        _check_share(call.name, step, share)
    dtype = dataset.features[IMAGE].dtype

    def augment(batch: Batch, low: Any, high: Any, rows: Any = None, epochs: Any = None, seeds: Any = None) -> Batch:
        for number, step in enumerate(steps[skip_first:], start=int(skip_first)):
            _check_share(calls[number].name, step, batch[IMAGE].shape[0])
            step_seed = fold(seed, number) if seeds is None else seeds[number]
            try:
                batch = step(batch, Draws(step_seed, low, high, rows=rows, epochs=epochs))
            except Exception as error:
                error.add_note(f"This happened in the augmentation {calls[number].name!r}.")
                raise
        images = batch[IMAGE]
        if dtype == "uint8" and images.dtype != dtype:
            images = ops.clip(ops.round(images), 0, 255)
        return {**batch, IMAGE: ops.cast(images, dtype)}

    return augment


def augmentation_seeds(calls: Sequence[Call], seed: int) -> NDArray[np.uint32]:
    """Returns the seed words of each augmentation, uint32 of shape [augmentations, 2]."""
    words = [seed_words(fold(seed, number)) for number in range(len(calls))]
    return np.stack(words) if words else np.zeros((0, 2), np.uint32)


def neighbours(calls: Sequence[Call]) -> int:
    """Returns how many neighbours in a batch must stay together, because augmentations mix them."""
    return math.lcm(*(getattr(AUGMENTATIONS.get(call.name).load(), "group", 1) for call in calls))


def _image_info(name: str, dataset: Dataset) -> ImageInfo:
    shape = dataset.features[IMAGE].shape if IMAGE in dataset.features else ()
    if len(shape) != 3:
        raise DataError(f"augmentation needs images of height × width × channels; these examples have shape {shape}.")
    classes = len(dataset.classes) if label_kind(dataset.features.get(LABEL)) == "class" else 0
    size = shape[0], shape[1], shape[2]
    return ImageInfo(name, size, dataset.features[IMAGE].dtype, classes, aligned_features(dataset))


def _check_moves(name: str, step: Augmentation, dataset: Dataset, aligned: Aligned) -> None:
    """Checks that an augmentation that moves pixels moves all that belongs to them."""
    moves = getattr(step, "moves_pixels", None)
    if moves is False:
        return
    if aligned and moves is None:
        raise DataError(
            f"augmentation {name!r} does not say whether it moves pixels, so {aligned.names} may not fit the image "
            "after it. In its class, set moves_pixels = False if it only changes values; or set moves_pixels = True "
            f"and move {aligned.names} in the same way. `prepare(info)` has the names in info.aligned."
        )
    check_undeclared(dataset, name)


def _check_share(name: str, step: Augmentation, share: int) -> None:
    group: int = getattr(step, "group", 1)
    if share % group:
        raise DataError(
            f"augmentation {name!r} mixes {group} neighbours in the batch, so each device's share of it must be a "
            f"multiple of {group}; it is {share}. Change train_batch_size or gradient_accumulation."
        )
