"""Runs of models with several named inputs, for the tests: a plugin file, so that other processes can import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

import modelyard

RANDOM = np.random.default_rng(0)
COUNT = 120
FEATURES: dict[str, NDArray[Any]] = {
    "image": RANDOM.integers(0, 256, (COUNT, 6, 6, 1), np.uint8),
    "vec": RANDOM.normal(size=(COUNT, 3)).astype(np.float32),
    "mask": RANDOM.integers(0, 2, (COUNT, 2), np.uint8),
}
LABELS = (FEATURES["vec"][:, 0] > 0).astype(np.int32)
TABLE: dict[str, NDArray[Any]] = {
    "age": RANDOM.integers(0, 90, COUNT).astype(np.int32),
    "vec": FEATURES["vec"],
}


def rows(arrays: dict[str, NDArray[Any]], first: int, end: int) -> dict[str, NDArray[Any]]:
    """Some examples of named arrays."""
    return {name: values[first:end] for name, values in arrays.items()}


NEW, NEW_LABELS = rows(FEATURES, 100, COUNT), LABELS[100:]
INPUTS = {name: NEW[name] for name in ("image", "vec")}


PLUGIN = Path(__file__)


@modelyard.register_dataset("image_vec_mask")
def image_vec_mask(options: Any, context: Any) -> modelyard.ArrayDataset:
    """Images, vectors, masks and labels."""
    named = {**FEATURES, "label": LABELS}
    splits = {"train": (0, 64), "validation": (64, 100), "test": (100, COUNT)}
    return modelyard.ArrayDataset({name: rows(named, *ends) for name, ends in splits.items()}, classes=["low", "high"])


@modelyard.register_model("image_and_vec")
def image_and_vec(data: modelyard.DataInfo, options: Any) -> keras.Model:
    """An image and a vector; the mask of an example is no input."""
    image, x = modelyard.image_input(data)
    vec = keras.Input(data.features["vec"].shape, name="vec")
    x = keras.layers.Concatenate(name="join")([keras.layers.Flatten(name="flatten")(x), vec])
    return keras.Model([image, vec], keras.layers.Dense(data.num_classes, name="logits")(x))


@modelyard.register_model("masked")
class Masked(modelyard.Classifier):
    """Its predictions read the mask, which the network does not take."""

    def network(self) -> keras.Model:
        """As above."""
        return image_and_vec(self.data, self.options)

    def predictions(self, outputs: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """The masked logits."""
        return {**super().predictions(outputs, batch), "masked": outputs * ops.cast(batch["mask"], outputs.dtype)}


@modelyard.register_model("weighted")
class Weighted(modelyard.Classifier):
    """Its loss reads the mask; predictions do not."""

    def network(self) -> keras.Model:
        """As above."""
        return image_and_vec(self.data, self.options)

    def loss(self, outputs: Any, batch: dict[str, Any]) -> Any:
        """The masked loss."""
        return super().loss(outputs, batch) * ops.cast(batch["mask"][:, 0], outputs.dtype)


@modelyard.register_model("joined")
class Joined(modelyard.Classifier):
    """The first model with signatures of its own, one of which takes the vector alone."""

    def network(self) -> keras.Model:
        """As above, with a layer for the vector."""
        image, x = modelyard.image_input(self.data)
        vec = keras.Input(self.data.features["vec"].shape, name="vec")
        row = keras.layers.Dense(2, name="row")(vec)
        x = keras.layers.Concatenate(name="join")([keras.layers.Flatten(name="flatten")(x), row])
        return keras.Model([image, vec], keras.layers.Dense(self.data.num_classes, name="logits")(x))

    def signatures(self, model: keras.Model) -> dict[str, keras.Model]:
        """The input of the last layer, and the row of a vector."""
        join, row = model.get_layer("join").output, model.get_layer("row").output
        taken = next(tensor for tensor in model.inputs if tensor.name == "vec")
        return {"joined": keras.Model(model.inputs, {"values": join}), "row": keras.Model(taken, {"row": row})}


@modelyard.register_model("age_and_vec")
def age_and_vec(data: modelyard.DataInfo, options: Any) -> keras.Model:
    """A whole number and a vector, and no image."""
    age, vec = keras.Input((), dtype="int32", name="age"), keras.Input(data.features["vec"].shape, name="vec")
    years = keras.layers.Reshape((1,), name="row")(ops.cast(age, "float32") / 90)
    x = keras.layers.Concatenate(name="join")([years, vec])
    return keras.Model([age, vec], keras.layers.Dense(data.num_classes, name="logits")(x))
