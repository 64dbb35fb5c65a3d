"""Class-activation maps: which places of an image speak for a class (Grad-CAM, Selvaraju et al. 2017).

The last layer with a 4-D output whose places are still an image is found by a forward pass. Its channels are weighted
by the mean gradient of the class, and their sum is kept where it is positive. To differentiate by the output of a layer
inside of any network, zeros are added to it: the gradient is that of the zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import NDArray

from modelyard.compat.keras import layer_call_replaced
from modelyard.engine.batch_functions import network_outputs

Arrays = Mapping[str, NDArray[Any]]


def class_activation_maps(
    model: keras.Model, batch: Arrays, classes: NDArray[Any]
) -> tuple[str, NDArray[np.float32]] | None:
    """Returns the name of the layer, and a map from 0 to 1 per example, [examples, height, width].

    Args:
        model: the network. Its output has a number per class.
        batch: examples as the network receives them.
        classes: the class of each example that the map is of.

    Returns:
        None if no layer has places.
    """
    layer, shape = _last_layer_with_places(model, batch)
    if layer is None:
        return None
    chosen = np.asarray(classes, np.int32)
    zeros = np.zeros(shape, np.float32)

    def score(added: Any, inputs: Any) -> tuple[Any, Any]:
        seen: list[Any] = []

        def adding(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(self: Any, *arguments: Any, **settings: Any) -> Any:
                output = call(self, *arguments, **settings)
                if self is layer and not seen:
                    seen.append(output)
                    output = output + ops.cast(added, output.dtype)
                return output

            return wrapped

        with layer_call_replaced(adding):
            outputs = ops.cast(network_outputs(model, inputs, training=False), "float32")
        own = ops.take_along_axis(outputs, ops.convert_to_tensor(chosen[:, None]), axis=-1)
        return ops.sum(own), ops.cast(seen[0], "float32")

    gradients, activations = _gradient(score, zeros, batch)
    if keras.config.image_data_format() == "channels_first":
        gradients, activations = (np.moveaxis(array, 1, -1) for array in (gradients, activations))
    weights = gradients.mean(axis=(1, 2), keepdims=True)
    maps = np.maximum((activations * weights).sum(axis=-1), 0)
    largest = maps.max(axis=(1, 2), keepdims=True)
    return layer.name, (maps / np.where(largest > 0, largest, 1)).astype(np.float32)


def _last_layer_with_places(model: keras.Model, batch: Arrays) -> tuple[Any, tuple[int, ...]]:
    """Returns the last layer whose output has more than one place, and the shape of that output."""
    found: list[tuple[Any, tuple[int, ...]]] = []

    def watching(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *arguments: Any, **settings: Any) -> Any:
            output = call(self, *arguments, **settings)
            shape = tuple(getattr(output, "shape", ()))
            if len(shape) == 4 and None not in shape[1:] and _places(shape) > 1 and self is not model:
                found.append((self, (len(next(iter(batch.values()))), *shape[1:])))
            return output

        return wrapped

    def forward(inputs: Any) -> Any:
        with layer_call_replaced(watching):
            return network_outputs(model, inputs, training=False)

    _trace(forward, batch)
    return found[-1] if found else (None, ())


def _places(shape: tuple[int, ...]) -> int:
    first = keras.config.image_data_format() == "channels_first"
    return int(np.prod(shape[2:] if first else shape[1:3]))


def _trace(function: Callable[[Any], Any], batch: Arrays) -> None:
    """Calls a function with the shapes of a batch; nothing is computed."""
    if keras.backend.backend() == "jax":
        import jax

        jax.eval_shape(function, dict(batch))
        return
    import tensorflow as tf

    specs = {name: tf.TensorSpec(array.shape, array.dtype) for name, array in batch.items()}
    tf.function(function, autograph=False).get_concrete_function(specs)


def _gradient(
    function: Callable[[Any, Any], tuple[Any, Any]], at: NDArray[Any], batch: Arrays
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Returns the gradient of the first value of a function by its first argument, and the second value."""
    if keras.backend.backend() == "jax":
        import jax

        gradient, more = jax.jit(jax.grad(function, has_aux=True))(at, dict(batch))
        return np.asarray(gradient), np.asarray(more)
    import tensorflow as tf

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def differentiate(added: Any, inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(added)
            value, more = function(added, inputs)
        return tape.gradient(value, added), more

    gradient, more = differentiate(tf.constant(at), {name: tf.constant(array) for name, array in batch.items()})
    return gradient.numpy(), more.numpy()
