"""JSON to images, predictions to JSON, in the two notations of TensorFlow Serving: rows and columns."""

from __future__ import annotations

import base64
import binascii
import json
import math
from itertools import chain
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import IMAGE, Feature
from modelyard.errors import DataError
from modelyard.serving.description import BYTES, IMAGE_BYTES
from modelyard.serving.http.body import Limits
from modelyard.serving.http.refusal import RefusedError
from modelyard.serving.servable import Outputs, Servable

B64 = "b64"
_REQUEST_PIXELS = 4
"""A request may hold several large images, but not as many as it has bytes for: small files unfold into large ones."""


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        RefusedError: if it is none.
    """
    try:
        value = json.loads(body, parse_constant=_constant)
    except RecursionError:
        raise RefusedError(400, "JSON Parse Error: it is nested too deeply.") from None
    except ValueError as error:  # also of bytes that are no text, and of numbers with thousands of digits
        raise RefusedError(400, f"JSON Parse Error: {error}") from None
    if not isinstance(value, dict):
        raise RefusedError(400, f"the request must be a JSON object; it is {_kind(value)}.")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no pixel.")


def rows_of(request: dict[str, Any], limits: Limits) -> tuple[list[Any], bool]:
    """The instances of a predict request, and whether they came as a column.

    Raises:
        RefusedError: if there are none.
    """
    if ("instances" in request) == ("inputs" in request):
        raise RefusedError(400, "a predict request has either 'instances' (rows) or 'inputs' (columns).")
    columns, name = "inputs" in request, _input_of(request)
    rows = request["inputs" if columns else "instances"]
    if columns and isinstance(rows, dict) and set(rows) != {B64}:
        rows = _only_image(rows, "inputs", name)
    if not isinstance(rows, list):
        raise RefusedError(400, f"'{'inputs' if columns else 'instances'}' must be a list; it is {_kind(rows)}.")
    check_count(len(rows), limits)
    if not columns:
        named = (isinstance(row, dict) and set(row) != {B64} for row in rows)
        rows = [
            _only_image(row, "an instance", name) if is_named else row
            for row, is_named in zip(rows, named, strict=True)
        ]
    return _as_files(rows) if name == IMAGE_BYTES else rows, columns


def examples_of(request: dict[str, Any], image: Feature, limits: Limits) -> list[Any]:
    """The images of a classify or regress request, whose lists may be flat.

    Raises:
        RefusedError: if there are none.
    """
    examples, context, name = request.get("examples"), request.get("context", {}), _input_of(request)
    if not isinstance(examples, list) or not isinstance(context, dict):
        raise RefusedError(400, "the request needs 'examples', a list of objects; 'context', if any, is an object.")
    check_count(len(examples), limits)
    rows = []
    for number, example in enumerate(examples):
        if not isinstance(example, dict):
            raise RefusedError(
                400, f"example {number} must be an object such as {{'image': …}}; it is {_kind(example)}."
            )
        value = _only_image({**context, **example}, f"example {number}", name)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0]
        elif _is_flat(value, image):
            value = _array([value], Feature((len(value),), image.dtype)).reshape(image.shape).tolist()
        rows.append(value)
    return _as_files(rows) if name == IMAGE_BYTES else rows


def _input_of(request: dict[str, Any]) -> str:
    """The name that the images of a request have: that of the signature."""
    return IMAGE_BYTES if request.get("signature_name") == BYTES else IMAGE


def _as_files(rows: list[Any]) -> list[Any]:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise RefusedError(
                400, f"image {number}: signature {BYTES!r} takes files, as {{'b64': '…'}}; it is {_kind(row)}."
            )
    return rows


def _is_flat(value: Any, image: Feature) -> bool:
    """Whether this is an image without its shape, as lists of examples have none in TensorFlow Serving."""
    if not isinstance(value, list) or len(image.shape) < 2 or len(value) != math.prod(image.shape):
        return False
    return not any(isinstance(each, list) for each in value)


def _only_image(named: dict[str, Any], where: str, name: str) -> Any:
    if set(named) != {name}:
        found = ", ".join(repr(str(name)[:40]) for name in list(named)[:5]) or "nothing"
        raise RefusedError(400, f"{where} must name the one input {name!r}; found {found}.")
    return named[name]


def images_of(rows: list[Any], servable: Servable, limits: Limits) -> NDArray[Any]:
    """The images as the model takes them.

    Args:
        rows: lists of numbers, or objects with an image file.
        servable: the model.
        limits: what a request may take.

    Raises:
        RefusedError: with the first that is wrong.
    """
    if not any(isinstance(row, dict) for row in rows):
        return _array(rows, servable.facts.image)
    image, files = servable.facts.image, Files(servable, limits)
    out = np.empty((len(rows), *image.shape), image.dtype)
    for number, row in enumerate(rows):
        if isinstance(row, dict):
            out[number] = files.pixels(_bytes_of(row, number), f"instance {number}")
        else:
            out[number] = _array([row], image, first=number)[0]
    return out


def check_count(count: int, limits: Limits) -> None:
    """Refuses a request without images, or with too many."""
    if not count:
        raise RefusedError(400, "the request has no images.")
    if count > limits.max_instances:
        raise RefusedError(
            413, f"the request has {count:,} images; the most is {limits.max_instances} (--max_instances)."
        )


class Files:
    """Decodes the image files of one request, up to its number of pixels."""

    def __init__(self, servable: Servable, limits: Limits) -> None:
        self._servable, self._limits, self._pixels = servable, limits, 0

    def pixels(self, data: bytes, name: str) -> NDArray[Any]:
        """One of them, as in training.

        Raises:
            RefusedError: if it is no image, or too large.
        """
        from modelyard.data.images import upright_size

        try:
            height, width = upright_size(data, name)
            self._pixels += height * width
            most = self._limits.max_pixels
            if height * width > most:
                raise RefusedError(413, f"{name} has {width}×{height} pixels; the most is {most:,} (--max_pixels).")
            if self._pixels > _REQUEST_PIXELS * most:
                raise RefusedError(413, f"the images of this request have more than {_REQUEST_PIXELS * most:,} pixels.")
            return self._servable.decode(data, name)
        except DataError as error:
            raise RefusedError(400, str(error)) from None


def _bytes_of(row: dict[str, Any], number: int) -> bytes:
    value = row.get(B64)
    if set(row) != {B64} or not isinstance(value, str):
        raise RefusedError(400, f"instance {number} is an object; an image file is given as {{'b64': 'BASE64'}}.")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError(400, f"instance {number} is not base64: {error}.") from None


def _array(rows: list[Any], image: Feature, first: int = 0) -> NDArray[Any]:
    """Nested lists as an array. Every list and number is looked at, by functions that are loops in C."""
    shape = "×".join(map(str, image.shape))
    level: list[Any] = rows
    inside = 1
    for size in image.shape:
        if set(map(type, level)) != {list} or set(map(len, level)) != {size}:
            place = next(i for i, each in enumerate(level) if not isinstance(each, list) or len(each) != size)
            number = first + place // inside
            raise RefusedError(
                400,
                f"instance {number} must be a list of shape {shape}, or {{'b64': …}} with an image file; "
                f"it has {_kind(level[place])} where a list of {size} is needed.",
            )
        inside *= size
        level = list(chain.from_iterable(level))
    if not set(map(type, level)) <= {int, float}:
        place = next(i for i, each in enumerate(level) if type(each) not in (int, float))
        raise RefusedError(400, f"instance {first + place // inside} must hold numbers; it has {_kind(level[place])}.")
    return _typed(level, image).reshape(len(rows), *image.shape)


def _typed(values: list[Any], image: Feature) -> NDArray[Any]:
    dtype = np.dtype(image.dtype)
    if dtype == np.uint8:
        try:
            return np.frombuffer(bytes(values), np.uint8)  # the quickest, and it checks
        except (TypeError, ValueError, OverflowError):
            pass
    try:
        given = np.array(values, np.float64)
    except OverflowError:
        raise RefusedError(400, "a number is larger than any pixel.") from None
    if not np.isfinite(given).all():
        raise RefusedError(400, "a number is larger than any pixel.")
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            typed = given.astype(dtype)
        if not np.isfinite(typed).all():
            raise RefusedError(400, f"a number is too large for {dtype.name}.")
        return typed
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if (given != np.trunc(given)).any() or (given < low).any() or (given > high).any():
        raise RefusedError(400, f"images of this model are {dtype.name}: whole numbers from {low} to {high}.")
    return given.astype(dtype)


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return {dict: "an object", str: "a string", int: "a number", float: "a number"}.get(type(value), "something else")


def check_finite(outputs: Outputs) -> None:
    """Refuses what the model has no number for: JSON knows none of these."""
    for values in outputs.values():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            number = int(np.argwhere(~np.isfinite(values))[0][0])
            raise RefusedError(
                400, f"the model has no finite answer for instance {number}. Are its values like those of the training?"
            )


def as_rows(outputs: Outputs) -> list[Any]:
    """A list of predictions: objects, or plain values of a single output."""
    check_finite(outputs)
    columns = {name: values.tolist() for name, values in outputs.items()}
    if len(columns) == 1:
        return next(iter(columns.values()))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def as_columns(outputs: Outputs) -> Any:
    """An object of outputs, or a single output as it is."""
    check_finite(outputs)
    columns = {name: values.tolist() for name, values in outputs.items()}
    return next(iter(columns.values())) if len(columns) == 1 else columns


def as_classes(outputs: Outputs, classes: tuple[str, ...]) -> list[list[list[Any]]]:
    """For each example its classes with their probabilities, the likeliest first."""
    check_finite(outputs)
    found = outputs["probabilities"]
    names = classes if len(classes) == found.shape[-1] else ("",) * found.shape[-1]
    order = np.argsort(-found, axis=-1, kind="stable")
    return [
        [[names[place], row[place]] for place in places]
        for places, row in zip(order.tolist(), found.tolist(), strict=True)
    ]
