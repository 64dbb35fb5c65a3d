"""Several classes an example, or none: for each class, whether it applies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

from modelyard.data.dataset import LABEL
from modelyard.errors import DataError
from modelyard.models.task import Batch, DataInfo, Task, Tensor, check_outputs
from modelyard.registry import Options as BaseOptions

_HITS, _FALSE, _MISSED = "true_positives", "false_positives", "false_negatives"


class MultiLabel(Task):
    """For each class yes or no: sigmoid cross-entropy on logits, exact match, binary accuracy, macro F1.

    `network` has ``data.num_classes`` outputs, logits. A class applies where its probability is above 0.5.
    """

    def __init__(self, options: BaseOptions, data: DataInfo) -> None:
        label = data.features.get(LABEL)
        if label is None or len(label.shape) != 1:
            found = (
                "none"
                if label is None
                else f"{label.dtype} of shape {label.shape}"
                if label.shape
                else "single numbers"
            )
            raise DataError(f"multi_label needs labels of 0 and 1, a row an example; there are {found}.")
        super().__init__(options, replace(data, outputs=label.shape[0]))

    def checked_network(self) -> keras.Model:
        """The network, if it has one output for each class."""
        model = super().checked_network()
        check_outputs(model, self.data.num_classes, "classes")
        return model

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Sigmoid cross-entropy, averaged over the classes."""
        # log(1 + e^x) - x·y: finite for every logit, and its slope at 0 is right.
        return ops.mean(ops.softplus(outputs) - outputs * self._labels(outputs, batch), axis=-1)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Whether all classes are right, the share that is, and what `summarize` needs."""
        labels = self._labels(outputs, batch)
        found = ops.cast(outputs > 0, outputs.dtype)
        right = ops.cast(ops.equal(found, labels), outputs.dtype)
        return {
            "exact_match": ops.min(right, axis=-1),
            "binary_accuracy": ops.mean(right, axis=-1),
            _HITS: found * labels,
            _FALSE: found * (1 - labels),
            _MISSED: (1 - found) * labels,
        }

    def summarize(self, means: dict[str, Any]) -> dict[str, float]:
        """Macro F1 is the mean of the classes' F1; 0 for a class that neither is there nor was found."""
        hits, false, missed = (np.asarray(means[name]) for name in (_HITS, _FALSE, _MISSED))
        whole = 2 * hits + false + missed
        f1 = np.divide(2 * hits, whole, out=np.zeros_like(whole), where=whole > 0)
        others = {name: value for name, value in means.items() if name not in (_HITS, _FALSE, _MISSED)}
        return {**super().summarize(others), "macro_f1": float(f1.mean())}

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Probabilities, and for each class whether it applies."""
        return {"probabilities": ops.sigmoid(outputs), "labels": ops.cast(outputs > 0, "uint8")}

    def _labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        return ops.cast(batch[LABEL], outputs.dtype)
