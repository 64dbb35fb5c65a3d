"""Regression: one or several numbers an example.

The network works in units of the spread of the training labels around their mean; its last layer, ``rescale``, brings
that to the units of the labels. So targets of any size are learned with the usual learning rates, and whoever runs the
network elsewhere gets numbers as they are in the data.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

from modelyard.data.dataset import LABEL
from modelyard.errors import DataError
from modelyard.models.catalog import RegressorOptions
from modelyard.models.task import Batch, DataInfo, Standardize, Task, Tensor, check_outputs
from modelyard.registry import Options as BaseOptions

_SQUARED, _LABEL, _LABEL_SQUARED = "squared_error", "standard_label", "standard_label_squared"


@keras.saving.register_keras_serializable(package="modelyard")
class Rescale(Standardize):
    """The way back of `Standardize`: from mean 0 and spread 1 to the units of the labels."""

    def call(self, inputs: Tensor) -> Tensor:
        """inputs × spread + mean, in the precision of the weights."""
        return ops.cast(inputs, self.variable_dtype) * self.spread + self.mean

    def compute_output_spec(self, inputs: Any) -> Any:
        """The same shape, in full precision."""
        return keras.KerasTensor(inputs.shape, dtype=self.variable_dtype)


class Regressor(Task):
    """Numbers an example: squared, absolute or Huber's error; mae, rmse and r2.

    `network` has ``data.num_classes`` outputs, one for each number of a label, and no activation at the end.
    """

    Options: type[BaseOptions] = RegressorOptions

    def __init__(self, options: BaseOptions, data: DataInfo) -> None:
        label = data.features.get(LABEL)
        if label is None or len(label.shape) > 1:
            found = "none" if label is None else f"shape {label.shape}"
            raise DataError(f"regression needs labels of one or several numbers an example; there are {found}.")
        super().__init__(options, replace(data, outputs=label.shape[0] if label.shape else 1))
        self.mean, self.spread = (np.reshape(a, (-1,)) for a in (data.label_mean, data.label_spread))

    def checked_network(self) -> keras.Model:
        """The network with `Rescale` behind it, if it has one output for each number."""
        model = super().checked_network()
        check_outputs(model, self.data.num_classes, "numbers in a label")
        values = Rescale(self.mean, self.spread, dtype=keras.config.floatx(), name="rescale")(model.output)
        return keras.Model(model.input, values, name=model.name)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The error that the options name, in units of the labels' spread, averaged over the numbers of a label."""
        error = self._error(outputs, batch) / ops.cast(self.spread, outputs.dtype)
        kind = getattr(self.options, "regression_loss", "mse")
        size = ops.abs(error)
        if kind == "mse":
            size = ops.square(error)
        elif kind == "huber":
            delta = getattr(self.options, "huber_delta", 1.0)
            size = ops.where(size <= delta, 0.5 * ops.square(error), delta * (size - 0.5 * delta))
        return ops.mean(size, axis=-1)

    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The absolute error, in the units of the labels, and what `summarize` needs."""
        error = self._error(outputs, batch)
        mean, spread = (ops.cast(a, outputs.dtype) for a in (self.mean, self.spread))
        label = (self._labels(outputs, batch) - mean) / spread
        return {
            "mae": ops.mean(ops.abs(error), axis=-1),
            _SQUARED: ops.square(error),
            _LABEL: label,
            _LABEL_SQUARED: ops.square(label),
        }

    def summarize(self, means: dict[str, Any]) -> dict[str, float]:
        """Mae and rmse in the units of the labels, r2 averaged over the numbers of a label."""
        squared, label, label_squared = (np.asarray(means[k]) for k in (_SQUARED, _LABEL, _LABEL_SQUARED))
        variance = np.maximum(label_squared - label**2, 0.0) * self.spread.astype(np.float64) ** 2
        # As in scikit-learn: where all labels are the same, nothing can be explained.
        r2 = np.where(variance > 0, 1 - squared / np.where(variance > 0, variance, 1), squared == 0)
        others = {k: v for k, v in means.items() if k not in (_SQUARED, _LABEL, _LABEL_SQUARED)}
        return {**super().summarize(others), "rmse": float(np.sqrt(squared.mean())), "r2": float(r2.mean())}

    def predictions(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The numbers, shaped as labels are."""
        return {"values": outputs if self.data.features[LABEL].shape else outputs[:, 0]}

    def _labels(self, outputs: Tensor, batch: Batch) -> Tensor:
        return ops.reshape(ops.cast(batch[LABEL], outputs.dtype), (-1, self.data.num_classes))

    def _error(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs - self._labels(outputs, batch)
