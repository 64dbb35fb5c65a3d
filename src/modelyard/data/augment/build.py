"""Augmentation on the device, inside the compiled step, per example, from draws that are arithmetic.

An augmentation is called with a batch (named arrays) and its draws, and returns the batch changed. One of your own:

    @modelyard.register_augmentation("darken")
    class Darken:
        def __init__(self, options): ...
        def __call__(self, batch, draws):
            return {**batch, "image": batch["image"] * draws.uniform()[:, :, None, None]}

It may have two things more: ``prepare(info)``, called once before training with an `ImageInfo`, which raises a
`DataError` if the images don't suit; and ``group``, the number of neighbours in the batch that it mixes, of which each
device's share must be a multiple.

Values: uint8 images are in 0 to 255 and kept there; all others are taken as they are and never clipped, and amounts
refer to a range of 1. What moves pixels keeps the type, what computes gives float32; after the last augmentation images
are rounded back to the type they came in, since Keras would cut off fractions and wrap around what is out of range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.config.calls import Call, build_component
from modelyard.data.dataset import IMAGE, LABEL, Dataset
from modelyard.data.draws import Draws, fold, seed_words
from modelyard.errors import DataError
from modelyard.registry import AUGMENTATIONS

Batch = dict[str, Any]
Augmentation = Callable[[Batch, Draws], Batch]


@dataclass(frozen=True)
class ImageInfo:
    """What an augmentation may know of the examples before it sees one.

    Args:
        name: the name the augmentation was called by, for errors.
        shape: height, width, channels.
        dtype: the type of the images in the dataset.
        classes: how many classes the labels name; 0 where examples have no label that is one whole number.
    """

    name: str
    shape: tuple[int, int, int]
    dtype: str
    classes: int

    @property
    def scale(self) -> float:
        """What an amount of 1 means: 255 for uint8, else 1."""
        return 255.0 if self.dtype == "uint8" else 1.0

    def clip(self, images: Any) -> Any:
        """Keeps images that came as uint8 within 0 to 255."""
        return ops.clip(images, 0.0, 255.0) if self.dtype == "uint8" else images

    def need_colour(self) -> None:
        """Raises a `DataError` unless images have three channels."""
        if self.shape[2] != 3:
            raise DataError(f"augmentation {self.name!r} needs colour images (3 channels); these have {self.shape[2]}.")


def build_augmentation(
    calls: Sequence[Call], dataset: Dataset, seed: int, share: int = 0, skip_first: bool = False
) -> Callable[..., Batch]:
    """All augmentations of a config, as one function of (batch, low, high, rows, epochs, seeds): see `Draws`.

    ``seeds`` are those of `augmentation_seeds`, where they are not to be a part of the program.

    Args:
        calls: the augmentations, in order.
        dataset: what they will be used on.
        seed: the run's seed.
        share: how many examples of the global batch are augmented together, on one device and in one piece.
        skip_first: the first augmentation is done already, while decoding; the others draw as if it were not.

    Raises:
        DataError: if the examples, or the share, do not suit an augmentation.
    """
    steps: list[Augmentation] = [build_component(call, AUGMENTATIONS) for call in calls]
    if not steps:
        return lambda batch, low, high, rows=None, epochs=None, seeds=None: batch
    for call, step in zip(calls, steps, strict=True):
        info = _image_info(call.name, dataset)
        if hasattr(step, "prepare"):
            step.prepare(info)
        _check_share(call.name, step, share)
    dtype = dataset.features[IMAGE].dtype

    def augment(batch: Batch, low: Any, high: Any, rows: Any = None, epochs: Any = None, seeds: Any = None) -> Batch:
        for number, step in enumerate(steps):
            if skip_first and number == 0:
                continue
            _check_share(calls[number].name, step, batch[IMAGE].shape[0])
            mine = fold(seed, number) if seeds is None else seeds[number]
            try:
                batch = step(batch, Draws(mine, low, high, rows=rows, epochs=epochs))
            except Exception as error:
                error.add_note(f"This happened in the augmentation {calls[number].name!r}.")
                raise
        return {**batch, IMAGE: _in_type(batch[IMAGE], dtype)}

    return augment


def augmentation_seeds(calls: Sequence[Call], seed: int) -> NDArray[np.uint32]:
    """The words that each augmentation draws from, uint32 of shape [augmentations, 2]."""
    words = [seed_words(fold(seed, number)) for number in range(len(calls))]
    return np.stack(words) if words else np.zeros((0, 2), np.uint32)


def neighbours(calls: Sequence[Call]) -> int:
    """How many neighbours in a batch must stay together: some augmentations mix them."""
    return math.lcm(*(getattr(AUGMENTATIONS.get(call.name).load(), "group", 1) for call in calls))


def _image_info(name: str, dataset: Dataset) -> ImageInfo:
    shape = dataset.features[IMAGE].shape if IMAGE in dataset.features else ()
    if len(shape) != 3:
        raise DataError(f"augmentation needs images of height × width × channels; these examples have shape {shape}.")
    label = dataset.features.get(LABEL)
    has_class = label is not None and label.shape == () and "int" in label.dtype
    return ImageInfo(
        name, (shape[0], shape[1], shape[2]), dataset.features[IMAGE].dtype, has_class * len(dataset.classes)
    )


def _check_share(name: str, step: Augmentation, share: int) -> None:
    group: int = getattr(step, "group", 1)
    if share % group:
        raise DataError(
            f"augmentation {name!r} mixes {group} neighbours in the batch, so each device's share of it must be a "
            f"multiple of {group}; it is {share}. Change train_batch_size or gradient_accumulation."
        )


def _in_type(images: Any, dtype: str) -> Any:
    if dtype == "uint8" and images.dtype != dtype:
        images = ops.clip(ops.round(images), 0, 255)
    return ops.cast(images, dtype)
