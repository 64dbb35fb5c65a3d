"""JSON to images and predictions to JSON, in the row and column formats of TensorFlow Serving."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from modelyard.data.dataset import IMAGE
from modelyard.data.image_spec import ImageSpec
from modelyard.errors import DataError
from modelyard.serving.http.limits import Limits, RequestError
from modelyard.serving.servable import BYTES, IMAGE_BYTES, Outputs

B64 = "b64"
_REQUEST_PIXELS = 4
"""All files of a request may have this many times the pixels of one: small files can decode to large images."""


# -- requests -----------------------------------------------------------------------------------------------------


def parse_json(body: bytes) -> dict[str, Any]:
    """Parses the JSON object of a request.

    Raises:
        RequestError: if it is not valid JSON, or not an object.
    """
    try:
        value = json.loads(body, parse_constant=_reject_constant)
    except RecursionError:
        raise RequestError(400, "JSON Parse Error: it is nested too deeply.") from None
    except ValueError as error:  # also for bytes that are not text, and numbers of thousands of digits
        raise RequestError(400, f"JSON Parse Error: {error}") from None
    if not isinstance(value, dict):
        raise RequestError(400, f"the request must be a JSON object; it is {_type_in_words(value)}.")
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a valid pixel.")


def predict_rows(request: dict[str, Any], limits: Limits) -> tuple[list[Any], bool]:
    """Returns the instances of a predict request, and whether they are in the column format.

    Raises:
        RequestError: if there are none, or they are named wrongly.
    """
    if ("instances" in request) == ("inputs" in request):
        raise RequestError(400, "a predict request has either 'instances' (rows) or 'inputs' (columns).")
    columns, name = "inputs" in request, _input_name(request)
    key = "inputs" if columns else "instances"
    rows = request[key]
    if columns and _has_names(rows):
        rows = _only_input(rows, key, name)
    if not isinstance(rows, list):
        raise RequestError(400, f"'{key}' must be a list; it is {_type_in_words(rows)}.")
    limits.check_count(len(rows))
    if not columns:
        rows = [_only_input(row, "an instance", name) if _has_names(row) else row for row in rows]
    return _check_files(rows) if name == IMAGE_BYTES else rows, columns


def example_rows(request: dict[str, Any], image: ImageSpec, limits: Limits) -> list[Any]:
    """Returns the images of a classify or regress request, whose lists may be flat.

    Raises:
        RequestError: if there are none, or they are named wrongly.
    """
    examples, context, name = request.get("examples"), request.get("context", {}), _input_name(request)
    if not isinstance(examples, list) or not isinstance(context, dict):
        raise RequestError(400, "the request needs 'examples', a list of objects; 'context', if given, is an object.")
    limits.check_count(len(examples))
    rows = []
    for number, example in enumerate(examples):
        if not isinstance(example, dict):
            message = f"example {number} must be an object such as {{'image': …}}; it is {_type_in_words(example)}."
            raise RequestError(400, message)
        value = _only_input({**context, **example}, f"example {number}", name)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
            value = value[0]
        elif _is_flat(value, image):
            value = _to_array([value], ImageSpec((len(value),), image.dtype)).reshape(image.shape).tolist()
        rows.append(value)
    return _check_files(rows) if name == IMAGE_BYTES else rows


def _input_name(request: dict[str, Any]) -> str:
    return IMAGE_BYTES if request.get("signature_name") == BYTES else IMAGE


def _has_names(value: Any) -> bool:
    """Returns whether ``value`` is an object of named inputs, not an image file."""
    return isinstance(value, dict) and set(value) != {B64}


def _check_files(rows: list[Any]) -> list[Any]:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            message = (
                f"image {number}: signature {BYTES!r} takes files, as {{'b64': '…'}}; it is {_type_in_words(row)}."
            )
            raise RequestError(400, message)
    return rows


def _is_flat(value: Any, image: ImageSpec) -> bool:
    """Returns whether ``value`` is a flat list of pixels: TensorFlow Serving's examples have no shape."""
    if not isinstance(value, list) or len(image.shape) < 2 or len(value) != math.prod(image.shape):
        return False
    return not any(isinstance(each, list) for each in value)


def _only_input(named: dict[str, Any], where: str, name: str) -> Any:
    if set(named) != {name}:
        found = ", ".join(repr(str(key)[:40]) for key in list(named)[:5]) or "nothing"
        raise RequestError(400, f"{where} must name the one input {name!r}; found {found}.")
    return named[name]


def images_from_rows(rows: list[Any], image: ImageSpec, limits: Limits) -> NDArray[Any]:
    """Returns a batch of images as the model takes them.

    Args:
        rows: nested lists of numbers, or objects with an image file as base64.
        image: the images that the model takes.
        limits: the limits of a request.

    Raises:
        RequestError: for the first row that is wrong.
    """
    if not any(isinstance(row, dict) for row in rows):
        return _to_array(rows, image)
    decoder = FileDecoder(image, limits)
    out = np.empty((len(rows), *image.shape), image.dtype)
    for number, row in enumerate(rows):
        if isinstance(row, dict):
            out[number] = decoder.decode(_from_base64(row, number), f"instance {number}")
        else:
            out[number] = _to_array([row], image, first=number)[0]
    return out


class FileDecoder:
    """Decodes the image files of one request, up to its limit of pixels."""

    def __init__(self, image: ImageSpec, limits: Limits) -> None:
        self._image, self._limits, self._pixels = image, limits, 0

    def decode(self, data: bytes, name: str) -> NDArray[Any]:
        """Returns the pixels of one file, as in training.

        Raises:
            RequestError: if it is not an image, or too large.
        """
        from modelyard.data.images import upright_size

        try:
            height, width = upright_size(data, name)
            self._pixels += height * width
            most = self._limits.max_pixels
            if height * width > most:
                raise RequestError(413, f"{name} has {width}×{height} pixels; the maximum is {most:,} (--max_pixels).")
            if self._pixels > _REQUEST_PIXELS * most:
                raise RequestError(413, f"the images of this request have more than {_REQUEST_PIXELS * most:,} pixels.")
            return self._image.decode(data, name)
        except DataError as error:
            raise RequestError(400, str(error)) from None


def _from_base64(row: dict[str, Any], number: int) -> bytes:
    value = row.get(B64)
    if set(row) != {B64} or not isinstance(value, str):
        raise RequestError(400, f"instance {number} is an object; an image file is given as {{'b64': 'BASE64'}}.")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(400, f"instance {number} is not base64: {error}.") from None


def _to_array(rows: list[Any], image: ImageSpec, first: int = 0) -> NDArray[Any]:
    """Converts nested lists to an array. Every list and number is checked, by functions that loop in C."""
    shape = "×".join(map(str, image.shape))
    level: list[Any] = rows
    per_row = 1
    for size in image.shape:
        if set(map(type, level)) != {list} or set(map(len, level)) != {size}:
            wrong = next(i for i, each in enumerate(level) if not isinstance(each, list) or len(each) != size)
            raise RequestError(
                400,
                f"instance {first + wrong // per_row} must be a list of shape {shape}, or {{'b64': …}} with an image "
                f"file; it has {_type_in_words(level[wrong])} where a list of {size} is expected.",
            )
        per_row *= size
        level = list(chain.from_iterable(level))
    if not set(map(type, level)) <= {int, float}:
        wrong = next(i for i, each in enumerate(level) if type(each) not in (int, float))
        message = f"instance {first + wrong // per_row} must hold numbers; it has {_type_in_words(level[wrong])}."
        raise RequestError(400, message)
    return _to_dtype(level, image).reshape(len(rows), *image.shape)


def _to_dtype(values: list[Any], image: ImageSpec) -> NDArray[Any]:
    dtype = np.dtype(image.dtype)
    if dtype == np.uint8:
        try:
            return np.frombuffer(bytes(values), np.uint8)  # the fastest way, and it checks the range
        except (TypeError, ValueError, OverflowError):
            pass
    try:
        given = np.array(values, np.float64)
    except OverflowError:
        raise RequestError(400, "a number is larger than any pixel.") from None
    if not np.isfinite(given).all():
        raise RequestError(400, "a number is larger than any pixel.")
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            typed = given.astype(dtype)
        if not np.isfinite(typed).all():
            raise RequestError(400, f"a number is too large for {dtype.name}.")
        return typed
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if (given != np.trunc(given)).any() or (given < low).any() or (given > high).any():
        raise RequestError(400, f"this model takes {dtype.name} images: whole numbers from {low} to {high}.")
    return given.astype(dtype)


def _type_in_words(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return {dict: "an object", str: "a string", int: "a number", float: "a number"}.get(type(value), "something else")


# -- the most common request, without a Python object per number ------------------------------------------------------

_HEAD = re.compile(rb'\{(?:"signature_name": ?"serving_default", ?)?"instances": ?\[')
_TAIL = b"]}"
_DIGITS, _BRACKETS = b"0123456789", b"[] "


def parse_uint8_images(body: bytes, image: ImageSpec, most: int) -> NDArray[np.uint8] | None:
    """Parses a predict request of whole numbers from 0 to 255, in nested lists of the model's image shape.

    A JSON parser makes 3,072 numbers and 1,057 lists of an image of 32×32×3, which are checked and thrown away. Here,
    the brackets and commas of the body, without its digits, are compared with those of images of the right shape.

    Args:
        body: the body of the request.
        image: the images that the model takes.
        most: images per request.

    Returns:
        The same images as the JSON parser gives. None where anything is unusual or wrong: the parser reports it.
    """
    head = _HEAD.match(body)
    if image.dtype != "uint8" or not image.shape or head is None or not body.endswith(_TAIL):
        return None
    text = body[head.end() : -len(_TAIL)]
    blanks = text.count(b" ")
    if blanks and blanks != text.count(b", "):  # only the blanks that json.dumps writes: "1 2" is not 12
        return None
    brackets = text.translate(None, _DIGITS + b" ")
    one = _brackets(image.shape)
    count, rest = divmod(len(brackets) + 1, len(one) + 1)
    if rest or not 1 <= count <= most or brackets != b",".join([one] * count):
        return None
    if _has_number_beside_list(text):
        return None
    values = _parse_bytes(text.translate(None, _BRACKETS))
    return None if values is None else values.reshape(count, *image.shape)


def _has_number_beside_list(text: bytes) -> bool:
    """Returns whether a number is directly before or after a list: [1[2]] has the brackets of [[2]]."""
    letters = np.frombuffer(text, np.uint8)
    before = letters[np.flatnonzero(letters == ord("[")) - 1]  # before the first: the last letter, which is no digit
    after = letters.take(np.flatnonzero(letters == ord("]")) + 1, mode="wrap")
    return any(((each >= ord("0")) & (each <= ord("9"))).any() for each in (before, after))


def _parse_bytes(numbers: bytes) -> NDArray[np.uint8] | None:
    """Parses comma-separated numbers. None where one is missing, above 255, or has a leading zero."""
    text = np.frombuffer(numbers + b",", np.uint8)
    ends = np.flatnonzero(text == ord(","))
    lengths = np.diff(ends, prepend=-1) - 1
    if lengths.min() < 1 or lengths.max() > 3:
        return None
    digits = text - ord("0")
    two, three = lengths > 1, lengths > 2
    tens, hundreds = digits[ends - 2] * two, digits[ends - 3] * three  # where there are none, any digit times 0
    values: NDArray[np.uint16] = digits[ends - 1] + np.uint8(10) * tens + np.uint16(100) * hundreds
    if values.max() > 255 or (two & (values < 10)).any() or (three & (values < 100)).any():
        return None
    return values.astype(np.uint8)


@lru_cache(maxsize=8)
def _brackets(shape: tuple[int, ...]) -> bytes:
    """Returns the JSON of an image without its digits."""
    inside = b""
    for size in reversed(shape):
        inside = b"[" + b",".join([inside] * size) + b"]"
    return inside


# -- responses ----------------------------------------------------------------------------------------------------


def as_rows(outputs: Outputs) -> list[Any]:
    """Returns a list of predictions: objects, or plain values of a single output."""
    columns = _finite_lists(outputs)
    if len(columns) == 1:
        return next(iter(columns.values()))
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def as_columns(outputs: Outputs) -> Any:
    """Returns an object of outputs, or a single output as it is."""
    columns = _finite_lists(outputs)
    return next(iter(columns.values())) if len(columns) == 1 else columns


def as_classes(outputs: Outputs, classes: tuple[str, ...]) -> list[list[list[Any]]]:
    """Returns, for each example, pairs of class and probability, most probable first."""
    _check_finite(outputs)
    found = outputs["probabilities"]
    names = classes if len(classes) == found.shape[-1] else ("",) * found.shape[-1]
    order = np.argsort(-found, axis=-1, kind="stable")
    return [
        [[names[number], row[number]] for number in numbers]
        for numbers, row in zip(order.tolist(), found.tolist(), strict=True)
    ]


def _finite_lists(outputs: Outputs) -> dict[str, list[Any]]:
    _check_finite(outputs)
    return {name: values.tolist() for name, values in outputs.items()}


def _check_finite(outputs: Outputs) -> None:
    """Raises for NaN and infinity, which JSON does not have."""
    for values in outputs.values():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            number = int(np.argwhere(~np.isfinite(values))[0][0])
            message = f"the prediction for instance {number} is not finite. Are its values like the training data's?"
            raise RequestError(400, message)
