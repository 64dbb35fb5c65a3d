"""A SavedModel, such as one from TensorFlow Hub, as a frozen feature extractor with a trained head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from keras import layers, ops

from modelyard.data.dataset import IMAGE
from modelyard.errors import UserError
from modelyard.models.catalog import SavedModelOptions
from modelyard.models.task import DataInfo, Tensor

_DEFAULT = "serving_default"


def saved_model(data: DataInfo, options: SavedModelOptions) -> keras.Model:
    """Returns the SavedModel's features, followed by dense layers."""
    if keras.backend.backend() != "tensorflow":
        raise UserError("the model saved_model needs the TensorFlow engine: --engine tensorflow.")
    shape = data.image_shape
    if len(shape) != 3:
        raise UserError(f"the model saved_model takes images; the examples have shape {_by(shape)}.")
    inputs = keras.Input(shape, dtype=data.features[IMAGE].dtype, name=IMAGE)
    x = SavedModelFeatures(options.saved_model_path, options.signature, name="features")(inputs)
    for number, units in enumerate(options.hidden_units, 1):
        x = layers.Dense(units, activation="relu", name=f"dense{number}")(x)
    if options.dropout_rate:
        x = layers.Dropout(options.dropout_rate, name="dropout")(x)
    return keras.Model(inputs, layers.Dense(data.num_classes, name="logits")(x), name="saved_model")


@keras.saving.register_keras_serializable(package="modelyard")
class SavedModelFeatures(layers.Layer):
    """Maps images to the features of a SavedModel. Bytes become floats from 0 to 1, as TensorFlow Hub models expect.

    The loaded variables are not weights of the layer: they are neither trained nor saved with the model.

    Args:
        path: the folder of the SavedModel.
        signature: the signature to call; None is ``serving_default``, or the model itself if it has none.
    """

    def __init__(self, path: str, signature: str | None = None, **kwargs: Any) -> None:
        # In 32 bits whatever the precision of the run: the SavedModel has its own types.
        super().__init__(**{**kwargs, "trainable": False, "dtype": "float32", "autocast": False})
        self._path, self._signature = path, signature
        self._features, self._wanted = _open(path, signature)

    def build(self, input_shape: Any) -> None:
        """Runs the SavedModel on a black image, to raise clear errors if it does not fit."""
        channels, wanted = input_shape[-1], self._wanted.shape[-1]
        if wanted not in (None, channels) and (channels, wanted) != (1, 3):
            raise UserError(f"the SavedModel {self._path} takes {wanted} channels; the images have {channels}.")
        features = self._run(ops.zeros((1, *input_shape[1:]), "float32"))
        if len(features.shape) != 2 or not features.dtype.is_floating:
            shown = _by((None, *features.shape[1:]))
            raise UserError(
                f"the SavedModel {self._path} returns {features.dtype.name} of shape {shown}, not features "
                "[batch, features]. Choose another --signature, or a SavedModel of feature vectors."
            )

    def call(self, inputs: Tensor) -> Tensor:
        """Returns the features, [batch, features]."""
        scale = 255.0 if keras.backend.standardize_dtype(inputs.dtype) == "uint8" else 1.0
        features = self._run(ops.cast(inputs, "float32") / scale)
        return ops.stop_gradient(ops.cast(features, self.compute_dtype))

    def _run(self, x: Tensor) -> Any:
        _, height, width, channels = self._wanted.shape
        if channels == 3 and x.shape[-1] == 1:
            x = ops.repeat(x, 3, axis=-1)
        size = (height or x.shape[1], width or x.shape[2])
        if size != tuple(x.shape[1:3]):
            x = ops.image.resize(x, size, interpolation="bilinear", antialias=True)
        return self._features(ops.cast(x, self._wanted.dtype.name))

    def get_config(self) -> dict[str, Any]:
        """Returns the config for Keras's format, which has the path of the SavedModel."""
        return {**super().get_config(), "path": self._path, "signature": self._signature}


def _open(path: str, signature: str | None) -> tuple[Callable[[Tensor], Tensor], Any]:
    """Returns the function from images to features, and its input spec."""
    import tensorflow as tf

    if not (Path(path) / "saved_model.pb").is_file():
        raise UserError(f"saved_model_path {path} is not a SavedModel: there is no file saved_model.pb in it.")
    try:
        loaded = tf.saved_model.load(path)
    except (tf.errors.OpError, OSError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        raise UserError(f"saved_model_path {path} cannot be loaded by TensorFlow {tf.__version__}: {error}") from error
    known = sorted(getattr(loaded, "signatures", {}))
    if signature is None and _DEFAULT not in known and callable(loaded):
        return _of_call(loaded, path)
    name = signature or _DEFAULT
    if name not in known:
        listed = ", ".join(known) or "none"
        raise UserError(f"the SavedModel {path} has no signature {name!r}. It has: {listed}. Choose one: --signature.")
    return _of_signature(loaded, name, path)


def _of_signature(loaded: Any, name: str, path: str) -> tuple[Callable[[Tensor], Tensor], Any]:
    function = loaded.signatures[name]
    taken = function.structured_input_signature[1]
    given = list(function.structured_outputs)
    if len(taken) != 1:
        raise UserError(
            f"the signature {name!r} of {path} takes {len(taken)} inputs ({', '.join(sorted(taken))}), not one."
        )
    ((key, wanted),) = taken.items()
    if len(given) > 1 and "default" not in given:
        raise UserError(
            f"the signature {name!r} of {path} returns {', '.join(sorted(given))}; it must return one output."
        )
    output = given[0] if len(given) == 1 else "default"

    def features(images: Tensor) -> Tensor:
        _ = loaded  # it owns the variables, and must live as long as the function
        return function(**{key: images})[output]

    return features, _checked(wanted, path)


def _of_call(loaded: Any, path: str) -> tuple[Callable[[Tensor], Tensor], Any]:
    """Returns a call of the model itself, with training=False if it has that argument."""
    import tensorflow as tf

    for function in getattr(loaded.__call__, "concrete_functions", []):
        arguments, named = function.structured_input_signature
        wanted = arguments[0] if arguments else None
        if isinstance(wanted, tf.TensorSpec) and wanted.shape.rank == 4:
            rest = {"training": False} if len(arguments) > 1 or "training" in named else {}
            return functools.partial(loaded, **rest), _checked(wanted, path)
    raise UserError(f"the SavedModel {path} cannot be called with images. Choose one of its signatures: --signature.")


def _checked(wanted: Any, path: str) -> Any:
    if wanted.shape.rank != 4 or wanted.shape[0] is not None or not wanted.dtype.is_floating:
        shown = _by(tuple(wanted.shape)) if wanted.shape.rank is not None else "any shape"
        raise UserError(
            f"the SavedModel {path} takes {wanted.dtype.name} of shape {shown}; it must take floats "
            "of batch×height×width×channels, in batches of any size. Choose another --signature."
        )
    return wanted


def _by(shape: tuple[Any, ...]) -> str:
    return "×".join("?" if side is None else str(side) for side in shape) or "a number"
