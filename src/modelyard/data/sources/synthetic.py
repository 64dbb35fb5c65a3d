"""A dataset of any size and shape, made on the spot: a pattern per class, with noise over it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from modelyard.data.catalog import SyntheticOptions
from modelyard.data.dataset import TEST, TRAIN, VALIDATION, ArrayDataset, DataContext, Dataset
from modelyard.data.order import raw_draws

_PATTERNS, _NOISE = 0x7061747465726E, 0x6E6F697365


def synthetic(options: SyntheticOptions, context: DataContext) -> Dataset:
    """Images whose class can be learned; the same options and split_seed give the same images everywhere."""
    shape, classes = options.synthetic_shape, options.synthetic_classes
    patterns = _uniform(context.split_seed, _PATTERNS, 0, classes * int(np.prod(shape))).reshape(classes, *shape)
    sizes = {TRAIN: options.synthetic_examples}
    sizes[VALIDATION] = sizes[TEST] = max(options.synthetic_examples // 5, 1)
    splits = {}
    for number, (split, size) in enumerate(sizes.items()):
        labels = (np.arange(size) % classes).astype(np.int32)
        noise = _uniform(context.split_seed, _NOISE, number, size * int(np.prod(shape))).reshape(size, *shape)
        weight = options.synthetic_noise / (1 + options.synthetic_noise)
        images = (1 - weight) * patterns[labels] + weight * noise
        splits[split] = {"image": np.rint(images * 255).astype(np.uint8), "label": labels}
    return ArrayDataset(splits, [str(i) for i in range(classes)])


def _uniform(seed: int, domain: int, number: int, count: int) -> NDArray[np.float32]:
    words = raw_draws(seed, domain, number, (count + 1) // 2).view(np.uint32)[:count]
    return (words >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
