"""The model as a SavedModel, for TensorFlow Serving and TensorFlow.

Signatures: ``serving_default`` takes image tensors, ``bytes`` image files, ``examples`` serialized tf.Examples;
``image_with_id`` and ``bytes_with_id`` take an ``id`` with each image, and return it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from modelyard.data.dataset import ID, IMAGE
from modelyard.errors import UserError
from modelyard.serving.description import BYTES, DEFAULT, IMAGE_BYTES
from modelyard.serving.exporting.decoding import image_decoder
from modelyard.serving.exporting.exportable import CLASS, Exportable

Tensor = Any
LABELS = "labels.txt"
EXAMPLES = "examples"
_WITH_ID = {DEFAULT: "image_with_id", BYTES: "bytes_with_id"}
LABEL_TEXT = "label"
_PARALLEL_DECODES = 16
"""Images of a batch that are decoded in parallel."""


def write_saved_model(model: Exportable, folder: Path) -> None:
    """Writes the SavedModel into ``folder``.

    Raises:
        UserError: if TensorFlow can't save the model.
    """
    with tempfile.TemporaryDirectory() as temporary:
        module = _SignatureModule(model, Path(temporary))
        try:
            tf.saved_model.save(module, str(folder), signatures=module.signatures())
        except (AssertionError, ValueError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"TensorFlow can't save this model: {reason}") from error


def load_saved_model(folder: Path) -> dict[str, Callable[[Any], dict[str, NDArray[Any]]]]:
    """Loads the SavedModel as functions from a batch to predictions, by signature."""
    loaded = tf.saved_model.load(str(folder))

    def predictor(name: str, key: str) -> Callable[[Any], dict[str, NDArray[Any]]]:
        signature = loaded.signatures[name]

        def predict(batch: Any) -> dict[str, NDArray[Any]]:
            _ = loaded  # it owns the variables
            found = signature(**{key: tf.constant(batch)})
            return {output: found[output].numpy() for output in found}

        return predict

    keys = {DEFAULT: IMAGE, BYTES: IMAGE_BYTES, EXAMPLES: EXAMPLES}
    return {name: predictor(name, key) for name, key in keys.items() if name in loaded.signatures}


def encode_example(file: bytes, identity: bytes) -> bytes:
    """Returns a serialized tf.Example as the signature ``examples`` takes it."""
    features = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        for name, value in (("image/encoded", file), (ID, identity))
    }
    data: bytes = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
    return data


class _SignatureModule(tf.Module):
    """The functions of the signatures, with their variables and the table of class names.

    Args:
        model: the model to export.
        folder: an empty folder for the file of class names, which is copied when the module is saved.
    """

    def __init__(self, model: Exportable, folder: Path) -> None:
        super().__init__()
        self._model = model
        decode = image_decoder(model.recorded.image)
        # A traced function, which the signatures share.
        self._decode = _traced(decode, tf.TensorSpec([], tf.string))
        self.kept_variables = list(model.function.get_concrete_function().graph.variables)
        self.labels: Any = None
        if model.classes:
            path = folder / LABELS
            # One line per class: the table counts lines.
            lines = (" ".join(name.splitlines()) for name in model.classes)
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            numbered = tf.lookup.TextFileInitializer(
                str(path), tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE
            )
            self.labels = tf.lookup.StaticHashTable(numbered, "")

    def signatures(self) -> dict[str, Any]:
        """Returns traced functions by signature name."""
        image = self._model.image
        functions: dict[str, tuple[Callable[..., Any], Any]] = {
            DEFAULT: (self._predict_images, tf.TensorSpec([None, *image.shape], image.dtype, IMAGE))
        }
        if self._model.takes_files:
            functions[BYTES] = (self._predict_files, tf.TensorSpec([None], tf.string, IMAGE_BYTES))
            functions[EXAMPLES] = (self._predict_examples, tf.TensorSpec([None], tf.string, EXAMPLES))
        traced = {name: _traced(function, spec) for name, (function, spec) in functions.items()}
        for name, other in _WITH_ID.items():
            if name in functions:
                function, spec = functions[name]
                traced[other] = _traced(_with_id(function), spec, tf.TensorSpec([None], tf.string, ID))
        return traced

    def _predict_images(self, image: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self._model.predict(image))
        if self._model.task_type == "classification" and CLASS in found and self.labels is not None:
            found[LABEL_TEXT] = self.labels.lookup(found[CLASS])
        return found

    def _predict_files(self, image_bytes: Tensor) -> dict[str, Tensor]:
        return self._predict_images(_map_images(self._decode, image_bytes, self._model))

    def _predict_examples(self, examples: Tensor) -> dict[str, Tensor]:
        text = tf.io.FixedLenFeature([], tf.string, "")
        parsed = tf.io.parse_example(examples, {"image/encoded": text, "image/format": text, ID: text})
        image, raw = self._model.image, tf.equal(parsed["image/format"], "raw")  # as `modelyard convert` writes arrays

        def decode(pair: Tensor) -> Tensor:
            return tf.cond(
                pair[1],
                lambda: tf.reshape(tf.io.decode_raw(pair[0], image.dtype), image.shape),
                lambda: self._decode(pair[0]),
            )

        images = _map_images(decode, (parsed["image/encoded"], raw), self._model)
        return {**self._predict_images(images), ID: parsed[ID]}


def _traced(function: Callable[..., Any], *specs: Any) -> Any:
    return tf.function(function, input_signature=list(specs), autograph=False)


def _with_id(function: Callable[..., Any]) -> Callable[..., Any]:
    def predict(batch: Tensor, identity: Tensor) -> dict[str, Tensor]:
        return {**function(batch), ID: tf.identity(identity)}

    return predict


def _map_images(decode: Callable[[Tensor], Tensor], batch: Any, model: Exportable) -> Tensor:
    spec = tf.TensorSpec(model.image.shape, np.dtype(model.image.dtype))
    return tf.map_fn(decode, batch, fn_output_signature=spec, parallel_iterations=_PARALLEL_DECODES)
