"""Counts FLOPs of a model for one example: multiplications and additions of convolutions and matrix products.

They are counted from the shapes of the layers, without running the model. The count is twice the MACs that papers often
give. Biases, normalization, activations and pooling are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from modelyard.compat.keras import layer_call_replaced, sublayers

Shape = tuple[int, ...]


def flops(model: keras.Model) -> int:
    """Returns the floating-point operations of one example's forward pass.

    A layer that is called several times counts several times. A custom layer may define ``flops(input_shape)``, where
    the shape has a batch of one; otherwise its sublayers are counted.

    Args:
        model: a model whose input shape is known.

    Raises:
        ValueError: if its shapes are not known.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> flops(model)
        64
    """
    shape = getattr(model, "input_shape", None) or dict(getattr(model, "_build_shapes_dict", None) or {})
    return _of_call(model, shape, getattr(model, "output_shape", None))


def _of_call(operation: Any, inputs: Any, outputs: Any) -> int:
    """Returns the FLOPs of one call of a layer or operation, from the shapes of its inputs and outputs."""
    own = getattr(operation, "flops", None)
    if callable(own):
        return int(own(_one(_first(inputs))))
    for types, rule in _RULES:
        if isinstance(operation, types):
            return rule(operation, inputs, outputs)
    inner = getattr(operation, "_functional", None) or operation  # a Sequential has the graph inside
    if getattr(inner, "_nodes_by_depth", None):
        nodes = [node for level in inner._nodes_by_depth.values() for node in level if not node.is_input]
        return sum(_of_call(node.operation, _shapes(node.input_tensors), _shapes(node.outputs)) for node in nodes)
    if type(operation).__name__ == "Matmul":
        return int(2 * math.prod(_one(_first(outputs))) * _first(inputs)[-1])
    if isinstance(operation, keras.Layer) and sublayers(operation):
        return _traced(operation, inputs)
    return 0


def _traced(layer: Any, inputs: Any) -> int:
    """Returns the FLOPs of a layer with sublayers and no graph, by tracing its call with shapes."""
    found = depth = 0

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth, found
            counts = depth == 0 and self is not layer and _is_whole(self)
            depth += counts
            try:
                result = original(self, *args, **kwargs)
            finally:
                depth -= counts
            if counts:
                found += _of_call(self, _shapes(list(args) or list(kwargs.values())), _shapes(result))
            return result

        return call

    with layer_call_replaced(counting):
        _first(inputs)  # raises if no shape is known
        tensors = keras.tree.map_shape_structure(lambda s: keras.KerasTensor(_one(s), layer.input_dtype), inputs)
        keras.Operation.compute_output_spec(layer, tensors)  # the layer's own method may skip the call
    return found


def _is_whole(layer: Any) -> bool:
    """Returns whether a layer is counted as a unit, not by its sublayers."""
    if callable(getattr(layer, "flops", None)) or any(isinstance(layer, types) for types, _ in _RULES):
        return True
    return bool(getattr(layer, "_nodes_by_depth", None) or getattr(layer, "_functional", None))


# -- shapes -------------------------------------------------------------------------------------------------------


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(size is None or isinstance(size, int) for size in value)


def _shapes(tensors: Any) -> Any:
    """Returns the shapes of tensors; a single one is not in a list."""
    found = [tuple(tensor.shape) for tensor in keras.tree.flatten(tensors) if hasattr(tensor, "shape")]
    return found[0] if len(found) == 1 else found


def _first(shapes: Any) -> Any:
    while not _is_shape(shapes):
        if not shapes:
            raise ValueError("the input shape of the model is not known.")
        shapes = next(iter(shapes.values() if isinstance(shapes, dict) else shapes))
    return shapes


def _one(shape: Any) -> Shape:
    """Returns the shape for one example.

    Raises:
        ValueError: if a size other than that of the batch is not known.
    """
    if any(size is None for size in shape[1:]):
        raise ValueError(f"the shape {shape} is not known completely, so FLOPs cannot be counted.")
    return (1, *shape[1:])


# -- rules --------------------------------------------------------------------------------------------------------


def _positions(layer: Any, shape: Any) -> int:
    """Returns the number of positions in an image, for either data format."""
    shape = _one(shape)
    return math.prod(shape[2:] if layer.data_format == "channels_first" else shape[1:-1])


def _conv(layer: Any, inputs: Any, outputs: Any) -> int:
    return int(2 * math.prod(layer.kernel.shape) * _positions(layer, _first(outputs)))  # the shape includes groups


def _conv_transpose(layer: Any, inputs: Any, outputs: Any) -> int:
    return int(2 * math.prod(layer.kernel.shape) * _positions(layer, _first(inputs)))


def _separable(layer: Any, inputs: Any, outputs: Any) -> int:
    weights = math.prod(layer.depthwise_kernel.shape) + math.prod(layer.pointwise_kernel.shape)
    return int(2 * weights * _positions(layer, _first(outputs)))


def _dense(layer: Any, inputs: Any, outputs: Any) -> int:
    return int(2 * math.prod(_one(_first(inputs))) * layer.units)


def _einsum_dense(layer: Any, inputs: Any, outputs: Any) -> int:
    given, weights = layer.equation.replace(" ", "").split("->")[0].split(",")
    more = [size for letter, size in zip(weights, layer.kernel.shape, strict=True) if letter not in given]
    return int(2 * math.prod(_one(_first(inputs))) * math.prod(more))


def _attention(layer: Any, inputs: Any, outputs: Any) -> int:
    """Projections of query, key, value and result, and the two products between them."""
    shapes = [_one(shape) for shape in ([inputs] if _is_shape(inputs) else inputs)]
    query, value = shapes[0], shapes[1] if len(shapes) > 1 else shapes[0]
    key = shapes[2] if len(shapes) > 2 else value
    heads, size, value_size = layer._num_heads, layer._key_dim, layer._value_dim
    queries, keys = math.prod(query[1:-1]), math.prod(value[1:-1])
    projections = queries * query[-1] * heads * size + keys * key[-1] * heads * size
    projections += keys * value[-1] * heads * value_size + queries * heads * value_size * _one(_first(outputs))[-1]
    return int(2 * (projections + queries * keys * heads * (size + value_size)))


_RULES: list[tuple[Any, Callable[[Any, Any, Any], int]]] = [
    ((layers.DepthwiseConv1D, layers.DepthwiseConv2D), _conv),
    ((layers.SeparableConv1D, layers.SeparableConv2D), _separable),
    ((layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose), _conv_transpose),
    ((layers.Conv1D, layers.Conv2D, layers.Conv3D), _conv),
    ((layers.Dense,), _dense),
    ((layers.EinsumDense,), _einsum_dense),
    ((layers.MultiHeadAttention,), _attention),
]
