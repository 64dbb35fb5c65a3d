"""The formats of an export: SavedModel, Keras, ONNX, TensorFlow Lite. Each has a function that writes it and one that
loads it again, to check it.

All are made from one function, from a batch of raw inputs to named predictions.
"""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from modelyard.compat.keras import all_layers
from modelyard.config.backend import quiet_engine
from modelyard.data.dataset import ID, IMAGE, LABEL, Feature
from modelyard.data.inputs import is_picture
from modelyard.data.preprocess import changes_batches
from modelyard.engine.batch_functions import network_outputs, outputs_of_views
from modelyard.errors import UserError, unknown
from modelyard.models.task_types import Classifier
from modelyard.serving.exporting.check import Predictor
from modelyard.serving.exporting.decoding import image_decoder
from modelyard.serving.model_inputs import has_own_code
from modelyard.serving.run_model import OpenRun
from modelyard.serving.servable import (
    BYTES_WITH_ID,
    DEFAULT,
    EXAMPLES,
    IMAGE_BYTES,
    IMAGE_WITH_ID,
    SIGNATURES,
    signatures_of,
    task_type_of,
)

if TYPE_CHECKING:
    from modelyard.engine.tensorflow import TensorFlowEngine

CLASS = "class"
KERAS_FILE, ONNX_FILE, TFLITE_FILE = "model.keras", "model.onnx", "model.tflite"
_LABEL_FILE = "labels.txt"
_PARALLEL_DECODES = 16
"""Images of a batch that are decoded in parallel."""
_ONNX_OPSET = 17
Tensor = Any


# -- the model ----------------------------------------------------------------------------------------------------


class Exportable:
    """The model of a run, built with TensorFlow on the CPU.

    Args:
        run: the run and its checkpoint.

    """

    def __init__(self, run: OpenRun) -> None:
        self.run = run
        engine, self.dataset = run.engine()
        self.engine: TensorFlowEngine = engine  # type: ignore[assignment]
        self.recorded = run.recorded_data()

    @cached_property
    def inputs(self) -> dict[str, Feature]:
        """Its inputs by name: features of the dataset, after the run's own preprocessing of examples."""
        features = {name: each for name, each in self.dataset.features.items() if name not in (ID, LABEL)}
        if self.dataset.stored is not self.dataset and not has_own_code(
            self.run.config, self.engine.task, batches=True
        ):
            # Single examples are preprocessed from more than the network takes.
            return {tensor.name: features[tensor.name] for tensor in self.engine.model.inputs}
        return features

    @property
    def image(self) -> Feature:
        """The images it takes: those of the dataset, after the run's own preprocessing of examples."""
        return self.dataset.features[IMAGE]

    @property
    def takes_files(self) -> bool:
        """Whether image files can be decoded to such images inside the graph."""
        return self.dataset.stored is self.dataset and IMAGE in self.inputs and is_picture(self.image)

    @property
    def task_type(self) -> str:
        """classification, multi_label, regression or other."""
        return task_type_of(self.engine.task)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, or of the predicted values."""
        return self.recorded.data.classes

    @cached_property
    def function(self) -> Any:
        """The compiled function from a batch, a tensor per input, to named predictions."""
        return _traced(lambda *tensors: self.predict(dict(zip(self.inputs, tensors, strict=True))), *self.specs)

    @property
    def specs(self) -> list[Any]:
        """Shape, type and name of each input, as TensorFlow has it."""
        return [tf.TensorSpec([None, *each.shape], each.dtype, name=name) for name, each in self.inputs.items()]

    def predict(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns named predictions for a batch of raw inputs, as tensors."""
        found = self.engine.functions.predictions(batch)
        if type(self.engine.task).predictions is Classifier.predictions:
            # keras.ops.argmax inspects the bits of floats, which neither ONNX nor TensorFlow Lite can.
            found = {**found, CLASS: tf.argmax(found["probabilities"], axis=-1)}
        return {name: _cast(name, value) for name, value in found.items()}

    @cached_property
    def own_signatures(self) -> dict[str, OwnSignature]:
        """The signatures that the user's task defines, by name."""
        task, network = self.engine.task, self.engine.model
        found = task.signatures(network)
        if not isinstance(found, dict):
            raise UserError(f"{type(task).__name__}.signatures must return a dictionary; it returned {type(found)}.")
        known = {id(variable) for variable in network.variables}
        reads_all = has_own_code(self.run.config, task)
        signatures = {}
        for name, model in found.items():
            where = f"the signature {name!r} of {type(task).__name__}"
            if not isinstance(model, keras.Model) or not getattr(model, "inputs", None):
                raise UserError(f"{where} must be a keras.Model with inputs; it is {type(model).__name__}.")
            if name in SIGNATURES or not re.fullmatch(r"[A-Za-z]\w*", str(name)):
                reason = "is that of a standard one" if name in SIGNATURES else "must be a word of letters and digits"
                raise UserError(f"{where}: the name {reason}. Choose another name.")
            if any(id(variable) not in known for variable in model.variables):
                raise UserError(f"{where} has weights that the network has not, so they are not trained.")
            taken = [tensor.name for tensor in model.inputs]
            wrong = next((each for each in taken if each not in self.inputs and not reads_all), None)
            if wrong is not None:
                raise UserError(f"{where}: {unknown('input', wrong, self.inputs)}")
            names = tuple(each for each in self.inputs if reads_all or each in taken)
            signatures[name] = OwnSignature(self, model, names)
        return signatures

    @cached_property
    def outputs(self) -> list[str]:
        """Names of the predictions."""
        return sorted(self.function.get_concrete_function().structured_outputs)


@dataclass(frozen=True)
class OwnSignature:
    """A signature that the user's task defines.

    Args:
        exportable: the model that is exported.
        model: from a batch as the network receives it to named outputs.
        names: the raw inputs that it needs.
    """

    exportable: Exportable
    model: Any
    names: tuple[str, ...]

    def predict(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Returns named outputs for a batch of raw inputs, in the order of the names."""
        batch = dict(zip(self.names, tensors, strict=True))
        seen = self.exportable.engine.functions.preprocess(batch, False)
        outputs = network_outputs(self.model, seen)
        named = outputs if isinstance(outputs, dict) else {"outputs": outputs}
        return {name: _cast(name, value) for name, value in named.items()}

    def expected(self, inputs: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Returns the inputs that it takes, and its outputs for them, computed without a graph."""
        batch = {name: inputs[name] for name in self.names}
        found = self.predict(*(tf.constant(values) for values in batch.values()))
        return batch, {name: value.numpy() for name, value in found.items()}


def _cast(name: str, value: Tensor) -> Tensor:
    """Casts a prediction to a type that every format has."""
    value = tf.convert_to_tensor(value)
    if name == CLASS:
        return tf.cast(value, tf.int64)
    return tf.cast(value, tf.float32) if value.dtype.is_floating else value


# -- SavedModel ---------------------------------------------------------------------------------------------------


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


def load_saved_model(folder: Path) -> dict[str, Predictor]:
    """Loads the SavedModel as functions from a batch to predictions, by signature."""
    loaded = tf.saved_model.load(str(folder))

    def predictor(name: str) -> Predictor:
        signature = loaded.signatures[name]

        def predict(batch: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
            _ = loaded  # it owns the variables
            with quiet_engine():
                found = signature(**{key: tf.constant(values) for key, values in batch.items()})
            return {output: found[output].numpy() for output in found}

        return predict

    return {name: predictor(name) for name in loaded.signatures if name not in (IMAGE_WITH_ID, BYTES_WITH_ID)}


class _SignatureModule(tf.Module):
    """The functions of the signatures, with their variables and the table of class names.

    Args:
        model: the model to export.
        folder: an empty folder for the file of class names, which is copied when the module is saved.
    """

    def __init__(self, model: Exportable, folder: Path) -> None:
        super().__init__()
        self._model = model
        # It is traced once, and the signatures share it.
        if model.takes_files:
            self._decode = _traced(image_decoder(model.recorded.image), tf.TensorSpec([], tf.string))
        self.kept_variables = list(model.function.get_concrete_function().graph.variables)
        self.labels: Any = None
        if model.classes:
            path = folder / _LABEL_FILE
            # One line per class: the table counts lines.
            lines = (" ".join(name.splitlines()) for name in model.classes)
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            numbered = tf.lookup.TextFileInitializer(
                str(path), tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE
            )
            self.labels = tf.lookup.StaticHashTable(numbered, "")

    def signatures(self) -> dict[str, Any]:
        """Returns traced functions by signature name."""
        specs = {spec.name: spec for spec in self._model.specs}
        specs |= {name: tf.TensorSpec([None], tf.string, name) for name in (IMAGE_BYTES, EXAMPLES, ID)}
        signatures = signatures_of(self._model.inputs, self._model.takes_files)
        functions: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
            name: (partial(self._predict_named, names), names) for name, names in signatures.items()
        }
        functions |= {name: (own.predict, own.names) for name, own in self._model.own_signatures.items()}
        return {
            name: _traced(function, *(specs[each] for each in names)) for name, (function, names) in functions.items()
        }

    def _predict_named(self, names: tuple[str, ...], *tensors: Tensor) -> dict[str, Tensor]:
        """Predicts the tensors of one signature."""
        given = dict(zip(names, tensors, strict=True))
        if EXAMPLES in given:
            return self._predict_examples(given[EXAMPLES])
        identity = given.pop(ID, None)
        if IMAGE_BYTES in given:
            given[IMAGE] = self._map_images(self._decode, given.pop(IMAGE_BYTES))
        found = self._predict(given)
        return found if identity is None else {**found, ID: tf.identity(identity)}

    def _predict(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self._model.predict(batch))
        if self._model.task_type == "classification" and CLASS in found and self.labels is not None:
            found["label"] = self.labels.lookup(found[CLASS])
        return found

    def _map_images(self, decode: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
        spec = tf.TensorSpec(self._model.image.shape, np.dtype(self._model.image.dtype))
        return tf.map_fn(decode, batch, fn_output_signature=spec, parallel_iterations=_PARALLEL_DECODES)

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

        images = self._map_images(decode, (parsed["image/encoded"], raw))
        return {**self._predict({IMAGE: images}), ID: parsed[ID]}


def _traced(function: Callable[..., Any], *specs: Any) -> Any:
    return tf.function(function, input_signature=list(specs), autograph=False)


# -- Keras --------------------------------------------------------------------------------------------------------


def write_keras(model: Exportable, folder: Path) -> None:
    """Writes the model as a Keras file that loads without Modelyard.

    Raises:
        UserError: if a Keras file can't hold the model.
    """
    if changes_batches(model.run.config.preprocess):
        raise UserError(
            "this run preprocesses batches with its own code, which a Keras file can't hold. "
            "Export a SavedModel: --format saved_model."
        )
    _check_layers(model.engine.model)
    network = _without_modelyard(model.engine.model)
    inputs = {name: keras.Input(each.shape, dtype=each.dtype, name=name) for name, each in model.inputs.items()}
    config, task = model.run.config, model.engine.task
    try:
        preprocessed = task.preprocess(dict(inputs), False)
        outputs = outputs_of_views(lambda batch: network_outputs(network, batch), preprocessed, config, task)
        predictions = task.predictions(outputs, preprocessed)
        taken = inputs if len(inputs) > 1 else next(iter(inputs.values()))
        keras.Model(taken, dict(predictions), name=network.name).save(folder / KERAS_FILE)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"Keras can't save this model: {reason} Export a SavedModel instead.") from error


def load_keras(folder: Path) -> dict[str, Predictor]:
    """Loads the Keras file as a function from a batch to predictions."""
    loaded = keras.models.load_model(folder / KERAS_FILE)

    def predict(batch: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        found = loaded(dict(batch) if len(batch) > 1 else next(iter(batch.values())), training=False)
        return {name: keras.ops.convert_to_numpy(value) for name, value in found.items()}

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
    """Loads the ONNX file in ONNX Runtime as a function from a batch to predictions."""
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

    def predict(batch: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        return dict(zip(names, session.run(names, dict(batch)), strict=True))

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
        tf.saved_model.save(module, temporary, signatures={DEFAULT: model.function})
        converter = tf.lite.TFLiteConverter.from_saved_model(temporary, signature_keys=[DEFAULT])
        try:
            data = converter.convert()
        except Exception as error:  # of many classes, some of them private
            lacking = re.search(r"(?:TF Select|Custom) ops: (.*)", str(error))
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"unsupported operation {lacking[1]}" if lacking else lines[0]
            raise UserError(f"TensorFlow Lite can't convert this model: {reason}.") from error
    (folder / TFLITE_FILE).write_bytes(data)


def load_tflite(folder: Path) -> dict[str, Predictor]:
    """Loads the TensorFlow Lite file as a function from a batch to predictions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the interpreter will move to another package
        interpreter = tf.lite.Interpreter(str(folder / TFLITE_FILE))
    runner = interpreter.get_signature_runner(DEFAULT)

    def predict(batch: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        _ = interpreter  # it owns the memory
        with quiet_engine():
            return dict(runner(**batch))

    return {"tflite": predict}
