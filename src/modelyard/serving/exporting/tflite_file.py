"""The model as a TensorFlow Lite file, in float32."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from modelyard.data.dataset import IMAGE
from modelyard.errors import UserError
from modelyard.serving.exporting.exportable import Exportable

TFLITE_FILE = "model.tflite"
_SIGNATURE = "serving_default"


def write_tflite(model: Exportable, folder: Path) -> None:
    """Writes the file into ``folder``.

    Raises:
        UserError: if there is an operation that TensorFlow Lite does not have.
    """
    held = tf.Module()
    held.kept_variables = list(model.function.get_concrete_function().graph.variables)
    with tempfile.TemporaryDirectory() as place:
        # By way of a SavedModel the names of inputs and outputs are kept.
        tf.saved_model.save(held, place, signatures={_SIGNATURE: model.function})
        converter = tf.lite.TFLiteConverter.from_saved_model(place, signature_keys=[_SIGNATURE])
        try:
            data = converter.convert()
        except Exception as error:  # of many classes, some of them private
            lacking = re.search(r"(?:TF Select|Custom) ops: (.*)", str(error))
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"it has no operation {lacking[1]}" if lacking else lines[0]
            raise UserError(f"TensorFlow Lite can't hold this model: {reason}.") from error
    (folder / TFLITE_FILE).write_bytes(data)


def tflite_predictors(folder: Path, model: Exportable) -> dict[str, Callable[[Any], dict[str, NDArray[Any]]]]:
    """The file in TensorFlow's interpreter, as a function from a batch of images to predictions."""
    del model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there will be another package for it some day
        interpreter = tf.lite.Interpreter(str(folder / TFLITE_FILE))
    runner = interpreter.get_signature_runner(_SIGNATURE)

    def predict(batch: Any) -> dict[str, NDArray[Any]]:
        _ = interpreter  # which owns the memory
        return dict(runner(**{IMAGE: batch}))

    return {"tflite": predict}
