"""Networks of keras.applications and SavedModels as backbones, with a new head.

Images are converted to the range and size that each expects.
"""

from __future__ import annotations

import functools
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from numpy.typing import NDArray

from modelyard import storage
from modelyard.compat.keras import weight_paths
from modelyard.data.dataset import IMAGE
from modelyard.errors import CheckpointError, DataError, UserError
from modelyard.models.catalog import BACKBONES, Backbone, BackboneOptions, SavedModelOptions, WidenedOptions
from modelyard.models.data_info import DataInfo
from modelyard.models.task import Tensor
from modelyard.run.weights.match import NamedWeights, NameMap, format_shape, match_names
from modelyard.run.weights.read import check_finite, load_weights

log = logging.getLogger("modelyard")
IMAGENET = "imagenet"
_HEAD = "logits"
_DEFAULT_SIGNATURE = "serving_default"
_CAFFE_MEAN = (123.68, 116.779, 103.939)
_TORCH = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


# -- keras.applications ------------------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="modelyard")
class Pixels(layers.Layer):
    """Converts images to three channels in the pixel range of a backbone.

    Args:
        kind: see `Backbone.pixels`.
        scale: the factor to the range 0 to 255.
    """

    def __init__(self, kind: str, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "trainable": False})
        self.kind, self.scale = kind, scale

    def call(self, inputs: Any) -> Any:
        """Returns the images, in the precision of the network."""
        x = ops.cast(inputs, self.variable_dtype) * self.scale
        if x.shape[-1] == 1:
            x = ops.repeat(x, 3, axis=-1)
        if self.kind == "centred":
            x = x / 127.5 - 1
        elif self.kind == "caffe":
            x = (x - np.array(_CAFFE_MEAN, np.float32))[..., ::-1]
        elif self.kind in ("torch", "torch_bytes"):
            mean, spread = (np.array(values, np.float32) * 255 for values in _TORCH)
            x = (x - mean) / spread * (255 if self.kind == "torch_bytes" else 1)
        return ops.cast(x, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns a shape of three channels."""
        return (*input_shape[:-1], 3)

    def get_config(self) -> dict[str, Any]:
        """Returns the config for Keras's format."""
        return {**super().get_config(), "kind": self.kind, "scale": self.scale}


@dataclass(frozen=True)
class BackboneNetwork:
    """A network of keras.applications without its top, global average pooling, and a dense layer.

    Args:
        name: its name in Modelyard.
        backbone: its row of the table.
    """

    name: str
    backbone: Backbone

    def __call__(self, data: DataInfo, options: BackboneOptions) -> keras.Model:
        """Returns the network for images of the dataset's size, or scaled to ``input_size``."""
        inputs = keras.Input(data.image_shape, dtype=data.features[IMAGE].dtype, name=IMAGE)
        self._check_shape(data.image_shape, options)
        x = Pixels(self.backbone.pixels, _scale(data), name="pixels")(inputs)
        if options.input_size is not None:
            x = layers.Resizing(options.input_size, options.input_size, name="resize")(x)
        body = self._body(options, input_tensor=x)
        for layer in body.layers:
            if isinstance(layer, layers.BatchNormalization) and options.batch_norm_momentum is not None:
                layer.momentum = options.batch_norm_momentum
        x = body.output
        if options.dropout_rate:
            x = layers.Dropout(options.dropout_rate, name="dropout")(x)
        return keras.Model(inputs, layers.Dense(data.num_classes, name=_HEAD)(x), name=self.name)

    def first_weights(self, model: keras.Model, options: BackboneOptions) -> dict[str, NDArray[Any]]:
        """Returns the weights of ``pretrained``; the head keeps its initial values."""
        if options.pretrained is None:
            return {}
        log.info("starting from the weights of %s: %s", self.name, options.pretrained)
        body = model.layers[: [layer.name for layer in model.layers].index(_HEAD)]
        mine = [v for layer in body for v in _weights(layer)]
        published = self._published(options)
        if [tuple(v.shape) for v in mine] != [array.shape for array in published]:
            raise CheckpointError(f"pretrained {options.pretrained} does not belong to {self.name}{_width(options)}.")
        first = {v.path.removeprefix(f"{model.name}/"): a for v, a in zip(mine, published, strict=True)}
        check_finite(first, f"pretrained {options.pretrained}", "Fetch the file again, or use another.")
        return first

    def _published(self, options: BackboneOptions) -> list[NDArray[Any]]:
        """Returns the weights without the top, in the order of the layers."""
        wanted = str(options.pretrained)
        if wanted == IMAGENET:
            try:
                source = self._body(options, weights=IMAGENET, input_shape=(self.backbone.size, self.backbone.size, 3))
            except Exception as error:
                raise UserError(
                    f"the published weights of {self.name}{_width(options)} cannot be fetched: {error}. If this "
                    "machine has no network, copy the file here and give its path: --pretrained FILE.weights.h5"
                ) from error
            return _arrays(source)
        path = storage.local_copy(wanted, storage.cache_folder())
        if not path.is_file():
            raise UserError(f"pretrained must be {IMAGENET} or the path of a file; there is no file {wanted}.")
        if not path.name.endswith((".weights.h5", ".h5")):
            raise UserError(
                f"pretrained {path.name}: unsupported file type. Supported: .weights.h5 and .h5 files of Keras. "
                "For weights of a whole network in other formats use --checkpoint_path."
            )
        stored = load_weights(path)  # refuses files that are not plain arrays
        if stored.paths and not path.name.endswith(".weights.h5"):  # of Keras 3, which goes by the name
            with tempfile.TemporaryDirectory() as folder:
                named = Path(folder, f"{path.stem}.weights.h5")
                named.symlink_to(path.absolute())
                return self._read(named, stored, options)
        return self._read(path, stored, options)

    def _read(self, path: Path, stored: NamedWeights, options: BackboneOptions) -> list[NDArray[Any]]:
        side = self.backbone.size
        body = self._body(options, input_shape=(side, side, 3))
        for top in (False, True):
            whole = {"include_top": True, "pooling": None}
            source = self._body(options, input_shape=(side, side, 3), **whole) if top else body
            try:
                with warnings.catch_warnings(action="ignore"):  # the error below reports missing weights
                    source.load_weights(path)
            except (ValueError, KeyError, OSError) as error:
                problem = error
                continue
            return _arrays(source)[: len(_arrays(body))]
        why = _mismatch(stored, body) or " ".join(str(problem).split())
        hint = "Perhaps it has another --alpha, or is" if isinstance(options, WidenedOptions) else "Perhaps it is"
        raise CheckpointError(
            f"pretrained {path} does not belong to {self.name}{_width(options)}: {why.rstrip('.')}. "
            f"{hint} of another network (--model)."
        ) from problem

    def _body(self, options: BackboneOptions, **given: Any) -> keras.Model:
        build = getattr(keras.applications, self.backbone.keras_name)
        settings: dict[str, Any] = {"weights": None, "include_top": False, "pooling": "avg", **given}
        if isinstance(options, WidenedOptions):
            settings["alpha"] = options.alpha
        body: keras.Model = build(**settings)
        return body

    def _check_shape(self, shape: tuple[int, ...], options: BackboneOptions) -> None:
        smallest = self.backbone.smallest
        if len(shape) != 3 or shape[-1] not in (1, 3):
            message = f"{self.name} takes images of 1 or 3 channels, channels last"
            raise DataError(f"{message}; the examples have shape {format_shape(shape)}.")
        size = options.input_size or min(shape[:2])
        if size < smallest:
            raise DataError(
                f"{self.name} takes images of at least {smallest}×{smallest}; those of this dataset have "
                f"{shape[0]}×{shape[1]}. Scale them: --input_size {max(smallest, 32)} (it was made for "
                f"{self.backbone.size})."
            )


def _width(options: BackboneOptions) -> str:
    return f" with alpha {options.alpha}" if isinstance(options, WidenedOptions) else ""


def _scale(data: DataInfo) -> float:
    """Returns 255 for float images from 0 to 1, else 1."""
    images = data.images
    if images is None or images.dtype == np.uint8 or images.max(initial=0) > 1:
        return 1.0
    return 255.0


def _arrays(model: keras.Model) -> list[NDArray[Any]]:
    return [ops.convert_to_numpy(v.value) for layer in model.layers for v in _weights(layer)]


def _weights(layer: Any) -> list[Any]:
    """Returns the weights of a layer, except of normalization of pixels: `Pixels` replaces it."""
    return [] if isinstance(layer, layers.Normalization) else list(layer.weights)


def _mismatch(weights: NamedWeights, model: keras.Model) -> str | None:
    """Describes how the weights of a file differ from a network's, with an example; None if all fit."""
    mine = {v.path: v for v in model.variables}
    expected = {name: tuple(v.shape) for name, v in mine.items()}
    names = _match(weights, model)
    wrong = [name for name in expected if name in names and weights[names[name]].shape != expected[name]]
    if wrong:
        name = wrong[0]
        there, here = format_shape(weights[names[name]].shape), format_shape(expected[name])
        rest = f"{len(wrong)} of {len(expected)} weights have another shape"
        return f"{name} is {there} in the file and {here} in the network; {rest}"
    missing = [name for name in expected if name not in names]
    if missing:
        name, count = missing[0], len(missing)
        there = next((f", which begins with {n} ({format_shape(a.shape)})" for n, a in weights.items()), "")
        return (
            f"{count} of {len(expected)} weights are not in the file{there}: {name} ({format_shape(expected[name])}), …"
        )
    return None


def _match(weights: NamedWeights, model: keras.Model) -> NameMap:
    """Maps the network's weights to the file's: by name, or by their path in the file if the names differ."""
    mine = {v.path: v for v in model.variables}
    expected = {name: tuple(v.shape) for name, v in mine.items()}
    named = max(match_names({n: n for n in weights}, expected), match_names(weights.numbered, expected), key=len)
    if 2 * len(named) >= len(expected) or not weights.paths:
        return named
    there = {path: name for name, path in weights.paths.items()}
    return {name: there[path] for path, name in weight_paths(model, mine).items() if path in there}


def __getattr__(name: str) -> BackboneNetwork:
    """Makes the attribute that `catalog.py` declares for each backbone."""
    if name not in BACKBONES:
        raise AttributeError(name)
    return BackboneNetwork(name, BACKBONES[name])


# -- SavedModels -------------------------------------------------------------------------------------------------------


def saved_model(data: DataInfo, options: SavedModelOptions) -> keras.Model:
    """The features of a SavedModel, followed by dense layers."""
    if keras.backend.backend() != "tensorflow":
        raise UserError("the model saved_model needs --engine tensorflow.")
    shape = data.image_shape
    if len(shape) != 3:
        raise UserError(f"the model saved_model takes images; the examples have shape {format_shape(shape)}.")
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
        # float32 in every precision of the run: the SavedModel has its own types.
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
            shown = _shown((None, *features.shape[1:]))
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
    if signature is None and _DEFAULT_SIGNATURE not in known and callable(loaded):
        return _of_call(loaded, path)
    name = signature or _DEFAULT_SIGNATURE
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
        _ = loaded  # it owns the variables, so the function keeps a reference
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
        shown = _shown(tuple(wanted.shape)) if wanted.shape.rank is not None else "any shape"
        raise UserError(
            f"the SavedModel {path} takes {wanted.dtype.name} of shape {shown}; it must take floats "
            "of batch×height×width×channels, in batches of any size. Choose another --signature."
        )
    return wanted


def _shown(shape: tuple[int | None, ...]) -> str:
    return "×".join("?" if side is None else str(side) for side in shape) or "a number"
