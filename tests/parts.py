"""Models for the tests: small, with the layers that are hard to keep exact."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

import modelyard


@modelyard.register_model("tiny_norm")
def tiny_norm(data: modelyard.DataInfo, options: Any) -> keras.Model:
    """A convolution, batch norm and a dense layer."""
    inputs, x = modelyard.image_input(data)
    x = keras.layers.Conv2D(8, 3, use_bias=False, name="conv")(x)
    x = keras.layers.ReLU(name="relu")(keras.layers.BatchNormalization(momentum=0.9, name="norm")(x))
    x = keras.layers.Flatten(name="flatten")(x)
    return keras.Model(inputs, keras.layers.Dense(data.num_classes, name="logits")(x), name="tiny_norm")


@modelyard.register_model("tiny_dropout")
def tiny_dropout(data: modelyard.DataInfo, options: Any) -> keras.Model:
    """The same with dropout, so that noise must be exact too."""
    inputs, x = modelyard.image_input(data)
    x = keras.layers.Conv2D(8, 3, use_bias=False, name="conv")(x)
    x = keras.layers.ReLU(name="relu")(keras.layers.BatchNormalization(momentum=0.9, name="norm")(x))
    x = keras.layers.Dropout(0.3, name="dropout")(keras.layers.Flatten(name="flatten")(x))
    return keras.Model(inputs, keras.layers.Dense(data.num_classes, name="logits")(x), name="tiny_dropout")


@modelyard.register_model("wide")
def wide(data: modelyard.DataInfo, options: Any) -> keras.Model:
    """Batch norm, and a layer that is large enough to be divided over devices."""
    inputs, x = modelyard.image_input(data)
    x = keras.layers.Dense(1040, use_bias=False, name="dense")(keras.layers.Flatten(name="flatten")(x))
    x = keras.layers.ReLU(name="relu")(keras.layers.BatchNormalization(momentum=0.9, name="norm")(x))
    return keras.Model(inputs, keras.layers.Dense(data.num_classes, name="logits")(x), name="wide")


@modelyard.register_model("watcher")
class Watcher(modelyard.Classifier):
    """Measures the pixels and labels it sees, so that a test can tell which examples a step had."""

    def network(self) -> keras.Model:
        """One dense layer."""
        inputs, x = modelyard.any_input(self.data)
        x = keras.layers.Flatten(name="flatten")(x)
        return keras.Model(inputs, keras.layers.Dense(self.data.num_classes, name="logits")(x), name="watcher")

    def metrics(self, outputs: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Sums that tell examples apart, after augmentation."""
        pixels = ops.cast(batch["image"], outputs.dtype)
        place = ops.arange(pixels.shape[2], dtype=pixels.dtype)[None, None, :, None] + 1
        return {
            **super().metrics(outputs, batch),
            "pixels": ops.sum(pixels, axis=(1, 2, 3)),
            "leaning": ops.sum(pixels * place, axis=(1, 2, 3)),
            "squares": ops.square(ops.sum(pixels * place, axis=(1, 2, 3))),
        }


@modelyard.register_model("squares")
class Squares(modelyard.Task):
    """A regression on the label, with a metric that is no mean of examples."""

    def network(self) -> keras.Model:
        """One dense unit."""
        inputs, x = modelyard.any_input(self.data)
        x = keras.layers.Flatten(name="flatten")(x)
        return keras.Model(inputs, keras.layers.Dense(1, name="value")(x), name="squares")

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Any:
        """Squared error."""
        return ops.square(outputs[:, 0] - ops.cast(batch["label"], outputs.dtype))

    def metrics(self, outputs: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Squared error, to be rooted."""
        return {"rmse": self.loss(outputs, batch)}

    def summarize(self, means: dict[str, Any]) -> dict[str, float]:
        """The root of the mean."""
        return {"rmse": float(means["rmse"]) ** 0.5}
