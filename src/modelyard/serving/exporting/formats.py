"""The model as a Keras, ONNX or TensorFlow Lite file: raw images in, named predictions out."""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from modelyard.compat.keras import all_layers
from modelyard.data.dataset import IMAGE
from modelyard.engine.batch_functions import averaged
from modelyard.errors import UserError
from modelyard.serving.exporting.exportable import Exportable

KERAS_FILE, ONNX_FILE, TFLITE_FILE = "model.keras", "model.onnx", "model.tflite"
_ONNX_OPSET = 17
_SIGNATURE = "serving_default"
Predictor = Callable[[Any], dict[str, NDArray[Any]]]


# -- Keras --------------------------------------------------------------------------------------------------------


def write_keras(model: Exportable, folder: Path) -> None:
    """Writes the model as a Keras file that loads without Modelyard.

    Raises:
        UserError: if a Keras file can't hold the model.
    """
    if model.has_own_preprocessing:
        raise UserError(
            "this run preprocesses batches with its own code, which a Keras file can't hold. "
            "Export a SavedModel: --format saved_model."
        )
    _check_layers(model.engine.model)
    network = _without_modelyard(model.engine.model)
    image = keras.Input(model.image.shape, dtype=model.image.dtype, name=IMAGE)
    views, task = model.run.config.test_time_augmentation, model.engine.task
    try:
        preprocessed = task.preprocess({IMAGE: image}, False)
        outputs = averaged(lambda batch: network(batch[IMAGE]), preprocessed, views)
        predictions = task.predictions(outputs, preprocessed)
        keras.Model(image, dict(predictions), name=network.name).save(folder / KERAS_FILE)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"Keras can't save this model: {reason} Export a SavedModel instead.") from error


def load_keras(folder: Path) -> dict[str, Predictor]:
    """Loads the Keras file as a function from a batch of images to predictions."""
    loaded = keras.models.load_model(folder / KERAS_FILE)

    def predict(batch: Any) -> dict[str, NDArray[Any]]:
        return {name: keras.ops.convert_to_numpy(value) for name, value in loaded(batch, training=False).items()}

    return {"keras": predict}


def _check_layers(network: Any) -> None:
    """Raises for layers of the user that are not registered: a Keras file has their class names only."""
    for layer in all_layers(network):
        cls = type(layer)
        if cls.__module__.split(".")[0] in ("keras", "modelyard"):
            continue
        if keras.saving.get_registered_object(keras.saving.get_registered_name(cls)) is None:
            raise UserError(
                f"a Keras file holds the class names of layers, not their code, and {cls.__name__}, of the layer "
                f"{layer.name!r}, is not registered. Put @keras.saving.register_keras_serializable() above the class, "
                "and import it where the file is loaded; or export a SavedModel, which needs neither."
            )


def _without_modelyard(network: Any) -> Any:
    """Returns the network with Modelyard's layers replaced by the Keras operations that they compute.

    Other layers are kept, with their variables.
    """

    def call(layer: Any, *arguments: Any, **named: Any) -> Any:
        activation = getattr(layer, "activation", None)
        if not (_is_ours(layer) or (isinstance(layer, keras.layers.Activation) and _is_ours(activation))):
            for name in ("kernel_initializer", "bias_initializer"):  # initializers have no effect any more
                if _is_ours(getattr(layer, name, None)):
                    setattr(layer, name, keras.initializers.GlorotUniform())
            return layer(*arguments, **named)
        named.pop("training", None)
        try:
            return layer.call(*arguments, **named)
        except (ValueError, TypeError) as error:  # a SavedModel inside, which is operations of TensorFlow
            raise UserError(
                f"Keras can't save this model: its layer {layer.name!r} is not made of Keras operations. "
                "Export a SavedModel instead: --format saved_model."
            ) from error

    return keras.models.clone_model(network, clone_function=lambda layer: layer, call_function=call)


def _is_ours(part: Any) -> bool:
    home = getattr(part, "__module__", None) or type(part).__module__
    return str(home).split(".")[0] == "modelyard"


# -- ONNX ---------------------------------------------------------------------------------------------------------


def write_onnx(model: Exportable, folder: Path) -> None:
    """Writes the model as an ONNX file, with tf2onnx.

    Raises:
        UserError: if the model has an operation that ONNX lacks.
    """
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)  # its errors are raised below
    try:
        tf2onnx.convert.from_function(
            model.function,
            input_signature=model.function.input_signature,
            opset=_ONNX_OPSET,
            custom_op_handlers={"Erfc": (_convert_erfc, [])},
            output_path=str(folder / ONNX_FILE),
        )
    except Exception as error:  # tf2onnx has no exception class of its own
        raise UserError(f"tf2onnx can't convert this model: {error}") from error


def _convert_erfc(graph: Any, node: Any, name: str, arguments: Any) -> Any:
    """Converts Erfc, a part of GELU that ONNX lacks, to 1 - Erf."""
    del arguments
    erf = graph.make_node("Erf", node.input[:1], name=f"{name}_erf", dtypes=[graph.get_dtype(node.output[0])])
    one = graph.make_const(f"{name}_one", np.array(1, np.float32))
    shape, dtype = graph.get_shape(node.output[0]), graph.get_dtype(node.output[0])
    outputs = list(node.output)
    graph.remove_node(name)
    return graph.make_node(
        "Sub", [one.output[0], erf.output[0]], name=name, outputs=outputs, shapes=[shape], dtypes=[dtype]
    )


def load_onnx(folder: Path) -> dict[str, Predictor]:
    """Loads the ONNX file in ONNX Runtime as a function from a batch of images to predictions."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(folder / ONNX_FILE), providers=["CPUExecutionProvider"])
    except Exception as error:  # its exception classes are private
        hint = ""
        if "Bitcast" in str(error):  # keras.ops.argmax inspects the bits of floats, to tell -0.0 from 0.0
            hint = (
                ". ONNX has no Bitcast, a part of keras.ops.argmax of floats. If `predictions` of your task uses it, "
                "use keras.ops.top_k(x, 1)[1][..., 0] instead."
            )
        raise UserError(f"ONNX Runtime can't load the file that tf2onnx wrote: {error}{hint}") from error
    names = [output.name for output in session.get_outputs()]

    def predict(batch: Any) -> dict[str, NDArray[Any]]:
        return dict(zip(names, session.run(names, {IMAGE: batch}), strict=True))

    return {"onnx": predict}


# -- TensorFlow Lite ----------------------------------------------------------------------------------------------


def write_tflite(model: Exportable, folder: Path) -> None:
    """Writes the model as a TensorFlow Lite file, in float32.

    Raises:
        UserError: if the model has an operation that TensorFlow Lite lacks.
    """
    module = tf.Module()
    module.kept_variables = list(model.function.get_concrete_function().graph.variables)
    with tempfile.TemporaryDirectory() as temporary:
        # A SavedModel in between keeps the names of inputs and outputs.
        tf.saved_model.save(module, temporary, signatures={_SIGNATURE: model.function})
        converter = tf.lite.TFLiteConverter.from_saved_model(temporary, signature_keys=[_SIGNATURE])
        try:
            data = converter.convert()
        except Exception as error:  # of many classes, some of them private
            lacking = re.search(r"(?:TF Select|Custom) ops: (.*)", str(error))
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"unsupported operation {lacking[1]}" if lacking else lines[0]
            raise UserError(f"TensorFlow Lite can't convert this model: {reason}.") from error
    (folder / TFLITE_FILE).write_bytes(data)


def load_tflite(folder: Path) -> dict[str, Predictor]:
    """Loads the TensorFlow Lite file as a function from a batch of images to predictions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the interpreter will move to another package
        interpreter = tf.lite.Interpreter(str(folder / TFLITE_FILE))
    runner = interpreter.get_signature_runner(_SIGNATURE)

    def predict(batch: Any) -> dict[str, NDArray[Any]]:
        _ = interpreter  # it owns the memory
        return dict(runner(**{IMAGE: batch}))

    return {"tflite": predict}
