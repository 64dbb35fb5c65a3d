"""The model as an ONNX file, by tf2onnx."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import IMAGE
from modelyard.errors import UserError
from modelyard.serving.exporting.exportable import Exportable

ONNX_FILE = "model.onnx"
_OPSET = 17


def write_onnx(model: Exportable, folder: Path) -> None:
    """Writes the file into ``folder``.

    Raises:
        UserError: if there is an operation that ONNX does not have.
    """
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)  # what it can't convert is told by what follows
    try:
        tf2onnx.convert.from_function(
            model.function,
            input_signature=model.function.input_signature,
            opset=_OPSET,
            custom_op_handlers={"Erfc": (_erfc, [])},
            output_path=str(folder / ONNX_FILE),
        )
    except Exception as error:  # tf2onnx has no class of error
        raise UserError(f"tf2onnx can't convert this model: {error}") from error


def _erfc(graph: Any, node: Any, name: str, arguments: Any) -> Any:
    """The complement of the error function, which GELU is made of, is none of ONNX's operations: 1 - erf."""
    del arguments
    error = graph.make_node("Erf", node.input[:1], name=f"{name}_erf", dtypes=[graph.get_dtype(node.output[0])])
    one = graph.make_const(f"{name}_one", np.array(1, np.float32))
    shape, kind = graph.get_shape(node.output[0]), graph.get_dtype(node.output[0])
    outputs = list(node.output)
    graph.remove_node(name)
    return graph.make_node(
        "Sub", [one.output[0], error.output[0]], name=name, outputs=outputs, shapes=[shape], dtypes=[kind]
    )


def onnx_predictors(folder: Path, model: Exportable) -> dict[str, Callable[[Any], dict[str, NDArray[Any]]]]:
    """The file in ONNX Runtime, as a function from a batch of images to predictions."""
    del model
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(folder / ONNX_FILE), providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes are private
        raise UserError(f"ONNX Runtime can't load what tf2onnx made of this model: {error}{_hint(error)}") from error
    names = [output.name for output in session.get_outputs()]

    def predict(batch: Any) -> dict[str, NDArray[Any]]:
        return dict(zip(names, session.run(names, {IMAGE: batch}), strict=True))

    return {"onnx": predict}


def _hint(error: Exception) -> str:
    """keras.ops.argmax looks at the bits of floats, to tell -0.0 from 0.0; Modelyard's own `class` does not."""
    if "Bitcast" not in str(error):
        return ""
    return (
        ". ONNX has no Bitcast, which keras.ops.argmax of floats is made of. If `predictions` of your task has it, "
        "take keras.ops.top_k(x, 1)[1][..., 0]."
    )
