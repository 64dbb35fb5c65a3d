"""The model as a file of Keras: raw images in, named predictions out, loadable without Modelyard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from numpy.typing import NDArray

from modelyard.data.dataset import IMAGE
from modelyard.engine.evaluation import averaged
from modelyard.errors import UserError
from modelyard.serving.exporting.exportable import Exportable

KERAS_FILE = "model.keras"


def write_keras(model: Exportable, folder: Path) -> None:
    """Writes the file into ``folder``.

    Raises:
        UserError: if the model is more than Keras can write down.
    """
    if model.has_own_preprocessing:
        raise UserError(
            "this run preprocesses batches by code of its own, which a file of Keras can't hold. "
            "Export a SavedModel: --format saved_model."
        )
    _refuse_own_layers(model.engine.model)
    network = _plain(model.engine.model)
    image = keras.Input(model.image.shape, dtype=model.image.dtype, name=IMAGE)
    views, task = model.run.config.test_time_augmentation, model.engine.task
    try:
        seen = task.preprocess({IMAGE: image}, False)
        outputs = averaged(lambda batch: network(batch[IMAGE]), seen, views)
        found = task.predictions(outputs, seen)
        whole = keras.Model(image, dict(found), name=network.name)
        whole.save(folder / KERAS_FILE)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"Keras can't write this model down: {reason} Export a SavedModel instead.") from error


def keras_predictors(folder: Path, model: Exportable) -> dict[str, Callable[[Any], dict[str, NDArray[Any]]]]:
    """The file, loaded, as a function from a batch of images to predictions."""
    del model
    loaded = keras.models.load_model(folder / KERAS_FILE)

    def predict(batch: Any) -> dict[str, NDArray[Any]]:
        return {name: keras.ops.convert_to_numpy(value) for name, value in loaded(batch, training=False).items()}

    return {"keras": predict}


def _refuse_own_layers(network: Any) -> None:
    """Keras writes down a layer of the user's by the name of its class, and finds only registered ones again."""
    for layer in network._flatten_layers():  # those in layers, too
        kind = type(layer)
        if kind.__module__.split(".")[0] in ("keras", "modelyard"):
            continue
        if keras.saving.get_registered_object(keras.saving.get_registered_name(kind)) is None:
            raise UserError(
                f"a file of Keras has the names of layers' classes, not their code, and {kind.__name__}, of the layer "
                f"{layer.name!r}, is not registered. Put @keras.saving.register_keras_serializable() above the class, "
                "and import it where the file is loaded; or export a SavedModel, which needs neither."
            )


def _plain(network: Any) -> Any:
    """The same network without layers of Modelyard's: what they compute becomes operations of Keras.

    A layer that is left has the variables of the old one, as it is the same.
    """

    def call(layer: Any, *arguments: Any, **named: Any) -> Any:
        activation = getattr(layer, "activation", None)
        if not (_is_ours(layer) or (isinstance(layer, keras.layers.Activation) and _is_ours(activation))):
            _use_plain_initializers(layer)
            return layer(*arguments, **named)
        named.pop("training", None)
        try:
            return layer.call(*arguments, **named)
        except (ValueError, TypeError) as error:  # a SavedModel inside, which is operations of TensorFlow
            raise UserError(
                f"Keras can't write this model down: its layer {layer.name!r} is not made of operations of Keras. "
                "Export a SavedModel instead: --format saved_model."
            ) from error

    return keras.models.clone_model(network, clone_function=lambda layer: layer, call_function=call)


def _use_plain_initializers(layer: Any) -> None:
    """How weights began is of no use any more."""
    for name in ("kernel_initializer", "bias_initializer"):
        if _is_ours(getattr(layer, name, None)):
            setattr(layer, name, keras.initializers.GlorotUniform())


def _is_ours(part: Any) -> bool:
    home = getattr(part, "__module__", None) or type(part).__module__
    return str(home).split(".")[0] == "modelyard"
