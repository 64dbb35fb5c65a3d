"""The inputs of a model by name, and arrays that are checked against them.

Most models have the one input `image`. Others have several, or one of another name: a model that is built with
``keras.Model([image, vector], …)`` takes the features ``image`` and ``vector`` of an example.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import IMAGE, Feature
from modelyard.data.image_spec import ImageSpec
from modelyard.errors import DataError, unknown

Inputs = Mapping[str, ImageSpec]
"""What a model takes, by name. Inputs that are not images have a spec, too: of their shape and type."""
NamedArrays = dict[str, NDArray[Any]]


def is_one_image(inputs: Inputs) -> bool:
    """Returns whether a model takes the image alone, which then needs no name."""
    return set(inputs) == {IMAGE}


def is_picture(image: ImageSpec | Feature) -> bool:
    """Returns whether an input is a grey or colour image, which a file can be decoded to."""
    return len(image.shape) == 3 and image.shape[2] in (1, 3)


def spec_of(feature: Feature) -> ImageSpec:
    """Returns the spec of an input that is not the image."""
    return ImageSpec(feature.shape, feature.dtype)


def describe(inputs: Inputs) -> str:
    """Returns names, types and shapes, in words: "image (uint8, 8×8×1) and age (float32, a single value)"."""
    *first, last = [f"{name} ({_described(spec)})" for name, spec in inputs.items()]
    return f"{', '.join(first)} and {last}" if first else last


def _described(spec: ImageSpec) -> str:
    return f"{spec.dtype}, {'×'.join(map(str, spec.shape)) or 'a single value'}"


def check_names(given: Collection[str], inputs: Inputs, others: Collection[str] = (), where: str = "") -> None:
    """Raises DataError if an input is missing or a name is neither an input nor one of ``others``."""
    start = f"{where}: " if where else ""
    wrong = next((name for name in given if name not in inputs and name not in others), None)
    missing = [name for name in inputs if name not in given]
    if wrong is not None:
        raise DataError(f"{start}{unknown('input', wrong, [*inputs])} The model takes {describe(inputs)}.")
    if missing:
        words = f"the input {missing[0]!r} is missing" if len(missing) == 1 else f"inputs are missing: {missing}"
        found = ", ".join(given) or "nothing"
        raise DataError(f"{start}{words}. The model takes {describe(inputs)}; given: {found}.")


def checked_arrays(given: Mapping[str, Any], inputs: Inputs, others: Collection[str] = ()) -> NamedArrays:
    """Returns arrays of examples, in the shapes and types of the inputs. One example becomes an array of one.

    Args:
        given: arrays by name. The image keeps its type: it is converted as it is read.
        inputs: what the model takes.
        others: names that may be given, and are left out.

    Raises:
        DataError: for a missing or unknown name, another shape, another number of examples, or values that the type
            of the input cannot hold.
    """
    check_names(given, inputs, others)
    arrays = {name: checked_array(name, given[name], spec) for name, spec in inputs.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        counted = ", ".join(f"{count} of {name!r}" for name, count in lengths.items())
        raise DataError(f"the inputs differ in length: {counted}. Each needs one value per example.")
    return arrays


def checked_array(name: str, values: Any, spec: ImageSpec) -> NDArray[Any]:
    """Returns the examples of one input in its shape and type; see `checked_arrays`."""
    array = np.asarray(values)
    if name == IMAGE and len(spec.shape) == 3 and array.dtype.kind in "biuf":
        try:
            return spec.batch(array)
        except DataError as error:
            raise DataError(f"the input {name!r}: {error}") from error
    if array.shape == spec.shape:
        array = array[None]
    if array.ndim < 1 or array.shape[1:] != spec.shape or array.dtype.kind not in "biuf":
        shape = "×".join(map(str, array.shape)) or "single"
        raise DataError(
            f"the input {name!r} is {array.dtype} of shape {shape}; the model takes one or several examples of "
            f"{_described(spec)}."
        )
    wanted = np.dtype(spec.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        converted = array.astype(wanted)
    if wanted.kind == "f":
        if not np.isfinite(converted).all():
            row = int(np.argwhere(~np.isfinite(converted))[0][0])
            raise DataError(f"the input {name!r} of example {row} is not finite as {wanted.name}.")
    elif not np.array_equal(converted, array):
        low, high = (0, 1) if wanted.kind == "b" else (np.iinfo(wanted).min, np.iinfo(wanted).max)
        raise DataError(
            f"the input {name!r} has values from {array.min():g} to {array.max():g}; the model takes {wanted.name}: "
            f"whole numbers from {low} to {high}."
        )
    return converted
