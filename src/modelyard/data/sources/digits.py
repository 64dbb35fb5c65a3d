"""The embedded dataset: handwritten digits that come with scikit-learn."""

from __future__ import annotations

import numpy as np

from modelyard.data.dataset import TEST, TRAIN, ArrayDataset, DataContext, Dataset
from modelyard.data.splits import stratified, with_validation
from modelyard.registry import Options

_TEST_FRACTION, _TEST_SEED = 0.2, 0


def digits(options: Options, context: DataContext) -> Dataset:
    """1,797 images of 8×8 grey values, with a test split that no seed changes."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = np.rint(loaded.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = loaded.target.astype(np.int32)
    ids = np.arange(len(labels), dtype=np.int64)
    train, test = stratified(labels, _TEST_FRACTION, _TEST_SEED)
    splits = {
        name: {"image": images[rows], "label": labels[rows], "id": ids[rows]}
        for name, rows in ((TRAIN, train), (TEST, test))
    }
    return ArrayDataset(with_validation(dict(splits), context.validation_fraction, context.split_seed))
