"""The same weights in every format that `checkpoint_path` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from safetensors.numpy import save_file

Weights = Mapping[str, np.ndarray]


def by_layer(weights: Weights) -> dict[str, dict[str, np.ndarray]]:
    """Layers in order, each with its weights by their own names."""
    layers: dict[str, dict[str, np.ndarray]] = {}
    for name, value in weights.items():
        layer, _, leaf = name.rpartition("/")
        layers.setdefault(layer, {})[leaf] = value
    return layers


def safetensors(folder: Path, weights: Weights, model: Any) -> Path:
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, folder / "w.safetensors")
    return folder / "w.safetensors"


def keras_file(folder: Path, weights: Weights, model: Any) -> Path:
    model.save(folder / "w.keras")
    return folder / "w.keras"


def weights_h5(folder: Path, weights: Weights, model: Any) -> Path:
    model.save_weights(folder / "w.weights.h5")
    return folder / "w.weights.h5"


def weights_h5_without_names(folder: Path, weights: Weights, model: Any) -> Path:
    """As the first versions of Keras 3 wrote them."""
    path = weights_h5(folder, weights, model)
    with h5py.File(path, "a") as file:
        file.visititems(lambda _, item: item.attrs.pop("name", None) and None)
    return path


def whole_model_h5(folder: Path, weights: Weights, model: Any) -> Path:
    model.save(folder / "w.h5")
    return folder / "w.h5"


def applications_h5(folder: Path, weights: Weights, model: Any) -> Path:
    """As keras.applications has them: the old layout, with the names of TensorFlow 1."""
    with h5py.File(folder / "w_tf_kernels.h5", "w") as file:
        layers = by_layer(weights)
        file.attrs["layer_names"] = np.array(["input_1", *layers], "S")
        file.create_group("input_1").attrs["weight_names"] = np.array([], "S1")
        for layer, members in layers.items():
            group = file.create_group(layer)
            group.attrs["weight_names"] = np.array([f"{layer}/{leaf}:0" for leaf in members], "S")
            for leaf, value in members.items():
                group[f"{layer}/{leaf}:0"] = value
    return folder / "w_tf_kernels.h5"


def saver(folder: Path, weights: Weights, model: Any) -> Path:
    """A name-based checkpoint of TensorFlow 1, with slots and the step beside the weights."""
    import tensorflow as tf

    variables = {name: tf.Variable(value) for name, value in weights.items()}
    slots = {f"{name}/Momentum": tf.Variable(np.ones_like(value)) for name, value in weights.items()}
    others = {"global_step": tf.Variable(1000, dtype=tf.int64), **slots}
    path = tf.compat.v1.train.Saver({**variables, **others}).save(None, str(folder / "model.ckpt"), global_step=1000)
    return Path(path)


def objects(folder: Path, weights: Weights, model: Any) -> Path:
    """An object-based checkpoint as tf.keras wrote it: layers by their order."""
    import tensorflow as tf

    def tracked(**members: Any) -> Any:
        return tf.train.Checkpoint(**members)

    layers = [
        tracked(**{leaf: tf.Variable(value) for leaf, value in members.items()})
        for members in by_layer(weights).values()
    ]
    inner = tracked(**{f"layer_with_weights-{number}": layer for number, layer in enumerate(layers)})
    root = tracked(model=inner, optimizer=tracked(iter=tf.Variable(3)))
    return Path(root.save(str(folder / "ckpt")))


def keras_objects(folder: Path, weights: Weights, model: Any) -> Path:
    """An object-based checkpoint of a Keras 3 model; only where Keras runs on TensorFlow."""
    import tensorflow as tf

    return Path(tf.train.Checkpoint(model=model).save(str(folder / "ckpt")))


FORMATS: dict[str, Callable[[Path, Weights, Any], Path]] = {
    function.__name__: function
    for function in (
        safetensors,
        keras_file,
        weights_h5,
        weights_h5_without_names,
        whole_model_h5,
        applications_h5,
        saver,
        objects,
    )
}
