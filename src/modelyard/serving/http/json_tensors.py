"""Bodies of requests to arrays, and predictions to JSON, in the row and column formats of TensorFlow Serving."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import AsyncGenerator, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from modelyard.data.dataset import ID, IMAGE
from modelyard.data.image_spec import ImageSpec
from modelyard.data.inputs import Inputs, describe, is_one_image
from modelyard.data.records.example import find_features
from modelyard.errors import DataError
from modelyard.serving.http.limits import Limits, RequestError
from modelyard.serving.servable import BYTES, DEFAULT, EXAMPLES, IMAGE_BYTES, SIGNATURES, ModelInfo, Outputs

B64 = "b64"
_PIECE = 5000
"""Values of a response that are written at once."""
PREDICT, CLASSIFY, UPLOAD = "predict", "classify", "upload"
_OF_TENSORFLOW_SERVING = ("", *(f"tensorflow/serving/{verb}" for verb in ("predict", "classify", "regress")))
"""Other names of the default signature."""
_ENCODED, _FORMAT, _RAW = "image/encoded", "image/format", "raw"
"""Features of a `tf.Example`, and the format of pixels, as `modelyard convert` writes them."""
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


# -- requests -----------------------------------------------------------------------------------------------------


class LargeImagesError(Exception):
    """The image files of a request need more than `RequestReader.most_pixels` says."""


@dataclass
class ReadRequest:
    """The content of a request.

    Args:
        inputs: an array per input of the model, by name.
        columns: whether the response is in the column format.
        ids: what is returned with each prediction: text, or bytes as base64; None if the request has none.
    """

    inputs: dict[str, NDArray[Any]]
    columns: bool = False
    ids: list[Any] | None = None


@dataclass(frozen=True)
class RequestReader:
    """Reads the bodies of requests to one model. It can be pickled.

    Args:
        info: the model.
        limits: the limits of a request.
        most_pixels: pixels of the files of a request. `LargeImagesError` is raised for more.
    """

    info: ModelInfo
    limits: Limits
    most_pixels: int | None = None

    def read(self, kind: str, body: bytes, content_type: str = "") -> ReadRequest:
        """Returns the content of a request of a kind: `PREDICT`, `CLASSIFY` (or regress), or `UPLOAD`.

        Raises:
            RequestError: if it is wrong, or above a limit.
            LargeImagesError: if it costs more than is to be spent here.
        """
        if kind == UPLOAD:
            return self._files(body, content_type)
        return self._predict(body) if kind == PREDICT else self._classify(body)

    def _predict(self, body: bytes) -> ReadRequest:
        if is_one_image(self.info.inputs):
            quick = parse_uint8_images(body, self.info.image, self.limits.max_instances)
            if quick is not None:
                return ReadRequest({IMAGE: quick})
        request = parse_json(body)
        signature = self._signature(request)
        names = self.info.signatures[signature]
        rows, ids, columns = predict_rows(request, signature, names, self.info.inputs, self.limits)
        decoder = FileDecoder(self.info, self.limits, self.most_pixels)
        if signature == EXAMPLES:
            images, ids = _from_examples(rows[EXAMPLES], self.info.image, decoder)
            return ReadRequest({IMAGE: images}, columns, ids)
        return ReadRequest(self._arrays(rows, decoder), columns, ids)

    def _arrays(self, rows: dict[str, list[Any]], decoder: FileDecoder) -> dict[str, NDArray[Any]]:
        """Returns an array per input from its values in each instance."""
        arrays, inputs = {}, self.info.inputs
        for given, values in rows.items():
            name = IMAGE if given == IMAGE_BYTES else given
            try:
                arrays[name] = images_from_rows(values, inputs[name], decoder if name == IMAGE else None)
            except RequestError as error:
                if not is_one_image(inputs):
                    error.message = f"the input {describe({name: inputs[name]})}: {error.message}"
                raise
        return arrays

    def _classify(self, body: bytes) -> ReadRequest:
        request = parse_json(body)
        signature = self._signature(request)
        if signature not in (DEFAULT, BYTES):
            raise RequestError(400, f"signature {signature!r} is for :predict. Use {DEFAULT!r} or {BYTES!r} here.")
        rows = example_rows(request, signature, self.info.signatures[signature], self.info.inputs, self.limits)
        return ReadRequest(self._arrays(rows, FileDecoder(self.info, self.limits, self.most_pixels)))

    def _files(self, body: bytes, content_type: str) -> ReadRequest:
        if not is_one_image(self.info.inputs):
            takes = describe(self.info.inputs)
            raise RequestError(400, f":upload takes image files only, and the model takes {takes}. Use :predict.")
        files = uploaded_files(body, content_type, self.limits.max_instances)
        self.limits.check_count(len(files))
        decoder = FileDecoder(self.info, self.limits, self.most_pixels)
        return ReadRequest({IMAGE: np.stack([decoder.decode(data, name) for name, data in files])})

    def _signature(self, request: dict[str, Any]) -> str:
        name, known = request.get("signature_name", ""), self.info.signatures
        if name in _OF_TENSORFLOW_SERVING:
            return DEFAULT
        if isinstance(name, str) and name in known:
            return name
        reason = ": it takes image files, and this model takes numbers" if name in SIGNATURES else ""
        if reason and not is_one_image(self.info.inputs):
            reason = f": the model takes {describe(self.info.inputs)}"
        available = ", ".join(map(repr, known))
        message = f"Serving signature name: {str(name)[:100]!r} not found in signature def{reason}."
        raise RequestError(400, f"{message} Available: {available}.")


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
    raise ValueError(f"{name} is not valid JSON.")


def predict_rows(
    request: dict[str, Any], signature: str, names: tuple[str, ...], inputs: Inputs, limits: Limits
) -> tuple[dict[str, list[Any]], list[Any] | None, bool]:
    """Returns the instances of a predict request by input, their ids, and whether they are in the column format.

    Args:
        request: the request.
        signature: the name of its signature.
        names: the inputs of the signature.
        inputs: those of the model.
        limits: the limits of a request.

    Raises:
        RequestError: if there are none, or they are named wrongly.
    """
    if ("instances" in request) == ("inputs" in request):
        raise RequestError(400, "a predict request has either 'instances' (rows) or 'inputs' (columns).")
    columns = "inputs" in request
    key = "inputs" if columns else "instances"
    given = request[key]
    if columns and (_has_names(given) or len(names) > 1):
        found = _inputs(given, f"'{key}'", names, inputs)
        parts = [each if isinstance(each, list) else [each] for each in found]
        for name, part in zip(names, parts, strict=True):
            if len(part) != len(parts[0]):
                raise RequestError(400, f"{len(parts[0])} values of {names[0]!r}, but {len(part)} of {name!r}.")
    elif not isinstance(given, list):
        raise RequestError(400, f"'{key}' must be a list; it is {_type_in_words(given)}.")
    elif columns:
        parts = [given]
    else:
        limits.check_count(len(given))
        rows = [
            _inputs(row, f"instance {number}", names, inputs) if _has_names(row) or len(names) > 1 else (row,)
            for number, row in enumerate(given)
        ]
        parts = [list(column) for column in zip(*rows, strict=True)]
    limits.check_count(len(parts[0]))
    named = dict(zip(names, parts, strict=True))
    ids = named.pop(ID, None)
    if ids is not None:
        ids = [_checked_id(each, number) for number, each in enumerate(ids)]
    return _check_files(named, signature), ids, columns


def example_rows(
    request: dict[str, Any], signature: str, names: tuple[str, ...], inputs: Inputs, limits: Limits
) -> dict[str, list[Any]]:
    """Returns the examples of a classify or regress request by input; their lists may be flat.

    Raises:
        RequestError: if there are none, or they are named wrongly.
    """
    examples, context = request.get("examples"), request.get("context", {})
    if not isinstance(examples, list) or not isinstance(context, dict):
        raise RequestError(400, "the request needs 'examples', a list of objects; 'context', if given, is an object.")
    limits.check_count(len(examples))
    rows: dict[str, list[Any]] = {name: [] for name in names}
    for number, example in enumerate(examples):
        if not isinstance(example, dict):
            message = f"example {number} must be an object such as {{'image': …}}; it is {_type_in_words(example)}."
            raise RequestError(400, message)
        found = _inputs({**context, **example}, f"example {number}", names, inputs)
        for name, value in zip(names, found, strict=True):
            rows[name].append(_unflattened(value, inputs[IMAGE if name == IMAGE_BYTES else name]))
    return _check_files(rows, signature)


def _unflattened(value: Any, spec: ImageSpec) -> Any:
    """Returns a value whose list may be flat in the shape of the input. A single value may be in a list, too."""
    if isinstance(value, list) and len(value) == 1 and (isinstance(value[0], dict) or not spec.shape):
        return value[0]
    if _is_flat(value, spec):
        return _to_array([value], ImageSpec((len(value),), spec.dtype)).reshape(spec.shape).tolist()
    return value


def _has_names(value: Any) -> bool:
    """Returns whether ``value`` is an object of named inputs, not an image file."""
    return isinstance(value, dict) and set(value) != {B64}


def _check_files(rows: dict[str, list[Any]], signature: str) -> dict[str, list[Any]]:
    """Checks that the rows of a signature that takes files, or Examples, are such."""
    for name in (IMAGE_BYTES, EXAMPLES):
        kind = "tf.Examples" if name == EXAMPLES else "files"
        for number, row in enumerate(rows.get(name, ())):
            if not isinstance(row, dict):
                found = _type_in_words(row)
                message = f"image {number}: signature {signature!r} takes {kind}, as {{'b64': '…'}}; it is {found}."
                raise RequestError(400, message)
    return rows


def _checked_id(value: Any, number: int) -> Any:
    """Returns an id as it was given: text, or bytes as base64."""
    if isinstance(value, dict):
        _from_base64(value, number)
    elif not isinstance(value, str):
        message = f"the {ID!r} of instance {number} must be a string, or {{'b64': …}}; it is {_type_in_words(value)}."
        raise RequestError(400, message)
    return value


def _is_flat(value: Any, image: ImageSpec) -> bool:
    """Returns whether ``value`` is a flat list of pixels: TensorFlow Serving's examples have no shape."""
    if not isinstance(value, list) or len(image.shape) < 2 or len(value) != math.prod(image.shape):
        return False
    return not any(isinstance(each, list) for each in value)


def _inputs(named: Any, where: str, names: tuple[str, ...], inputs: Inputs) -> tuple[Any, ...]:
    """Returns the inputs of an object, which must have these names."""
    if not isinstance(named, dict) or set(named) != set(names):
        takes = "" if is_one_image(inputs) else f" The model takes {describe(inputs)}."
        wanted = f"the one input {names[0]!r}" if len(names) == 1 else f"the inputs {' and '.join(map(repr, names))}"
        if not isinstance(named, dict):
            found = _type_in_words(named)
            raise RequestError(400, f"{where} must be an object that names {wanted}; it is {found}.{takes}")
        found = ", ".join(repr(str(key)[:40]) for key in list(named)[:5]) or "nothing"
        raise RequestError(400, f"{where} must name {wanted}; found {found}.{takes}")
    return tuple(named[name] for name in names)


def images_from_rows(rows: list[Any], image: ImageSpec, decoder: FileDecoder | None) -> NDArray[Any]:
    """Returns a batch of one input as the model takes it.

    Args:
        rows: nested lists of numbers, or objects with an image file as base64.
        image: the input, such as the images.
        decoder: decodes the files; None for an input of numbers.

    Raises:
        RequestError: for the first row that is wrong.
    """
    if not any(isinstance(row, dict) for row in rows):
        return _to_array(rows, image, is_image=decoder is not None)
    out = np.empty((len(rows), *image.shape), image.dtype)
    for number, row in enumerate(rows):
        if isinstance(row, dict) and decoder is None:
            raise RequestError(400, f"instance {number} is an object; this input takes numbers.")
        if isinstance(row, dict) and decoder is not None:
            out[number] = decoder.decode(_from_base64(row, number), f"instance {number}")
        else:
            out[number] = _to_array([row], image, first=number)[0]
    return out


def _from_examples(
    rows: list[dict[str, Any]], image: ImageSpec, decoder: FileDecoder
) -> tuple[NDArray[Any], list[Any]]:
    """Returns images and ids of serialized `tf.Example`s, as the signature of an export does."""
    out, ids = np.empty((len(rows), *image.shape), image.dtype), list[Any]()
    for number, row in enumerate(rows):
        record, name = _from_base64(row, number), f"instance {number}"
        features = {}
        try:
            for key, found in find_features(record, (_ENCODED, _FORMAT, ID)).items():
                values = found.values(record)
                if found.kind != "bytes" or len(values) != 1:
                    raise ValueError(f"{key} must hold one bytes value")
                features[key] = bytes(values[0])
        except ValueError as error:
            raise RequestError(400, f"{name} is not a tf.Example that this model takes: {error}.") from None
        data, identity = features.get(_ENCODED, b""), features.get(ID, b"")
        if features.get(_FORMAT) != _RAW.encode():
            out[number] = decoder.decode(data, name)
        elif len(data) != out[number].nbytes:
            message = f"{name} has {len(data):,} bytes of raw pixels; this model takes {out[number].nbytes:,}."
            raise RequestError(400, message)
        else:
            out[number] = np.frombuffer(data, np.dtype(image.dtype).newbyteorder("<")).reshape(image.shape)
        try:
            ids.append(identity.decode())
        except UnicodeDecodeError:
            ids.append({B64: base64.b64encode(identity).decode("ascii")})
    return out, ids


@dataclass
class FileDecoder:
    """Decodes the image files of one request, up to its limit of pixels.

    Args:
        info: the model.
        limits: the limits of a request.
        most: pixels of all files. `LargeImagesError` is raised for more.
    """

    info: ModelInfo
    limits: Limits
    most: int | None = None
    _pixels: int = field(default=0, init=False)

    def decode(self, data: bytes, name: str) -> NDArray[Any]:
        """Returns the pixels of one file, as in training.

        Raises:
            RequestError: if it is not an image, or too large.
            LargeImagesError: if it costs more than is to be spent here.
        """
        from modelyard.data.images import stored_size

        if not self.info.takes_files:
            message = f"{name} is an image file. This model takes numbers: its export has no preprocessing of examples."
            raise RequestError(400, message)
        try:
            height, width = stored_size(data, name)
            self._pixels += height * width
            most, of_all = self.limits.max_pixels, self.limits.max_files_pixels
            if height * width > most:
                raise RequestError(413, f"{name} has {width}×{height} pixels; the maximum is {most:,} (--max_pixels).")
            if self._pixels > of_all:
                raise RequestError(413, f"the images of this request have more than {of_all:,} pixels.")
            # A TIFF may be made of tiles much larger than the image.
            if self.most is not None and (self._pixels > self.most or data.startswith(_TIFF)):
                raise LargeImagesError
            return self.info.image.decode(data, name)
        except DataError as error:
            raise RequestError(400, str(error)) from None


def uploaded_files(body: bytes, content_type: str, most: int) -> list[tuple[str, bytes]]:
    """Returns names and bytes of the uploaded image files: the files of a form, or the body itself.

    Raises:
        RequestError: if there is no file, or the form is malformed.
    """
    if not content_type.lower().startswith("multipart/form-data"):
        if content_type.lower().startswith("application/json"):
            raise RequestError(415, ":upload takes image files. Send JSON to :predict.")
        files = [("the image", body)] if body else []
    else:
        try:
            files = _complete(_form_files(body, content_type, most))
        except (MultiPartException, KeyError, ValueError, AssertionError) as error:
            reason = getattr(error, "message", "") or str(error) or type(error).__name__
            raise RequestError(400, f"the form can't be parsed: {reason}.") from None
    if not files:
        raise RequestError(
            400, "the request has no file. Send a form (curl -F file=@photo.jpg), or the image itself as the body."
        )
    return files


async def _form_files(body: bytes, content_type: str, most: int) -> list[tuple[str, bytes]]:
    async def once() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    parser = MultiPartParser(Headers({"content-type": content_type}), once(), max_files=most, max_fields=most)
    for name in ("spool_max_size", "max_file_size"):  # its name before Starlette 0.42
        setattr(parser, name, len(body) + 1)  # nothing goes to the disk
    form = await parser.parse()
    parts = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
    return [((part.filename or "the image")[:100], await part.read()) for part in parts]


def _complete(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a coroutine that never waits, since all that it reads is in memory."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it is larger than the memory that it may use")


def _from_base64(row: dict[str, Any], number: int) -> bytes:
    value = row.get(B64)
    if set(row) != {B64} or not isinstance(value, str):
        raise RequestError(400, f"instance {number} is an object; an image file is given as {{'b64': 'BASE64'}}.")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(400, f"instance {number} is not base64: {error}.") from None


def _to_array(rows: list[Any], image: ImageSpec, first: int = 0, *, is_image: bool = True) -> NDArray[Any]:
    """Converts nested lists to an array. Every list and number is checked, by functions that loop in C."""
    shape = "×".join(map(str, image.shape))
    level: list[Any] = rows
    per_row = 1
    for size in image.shape:
        if set(map(type, level)) != {list} or set(map(len, level)) != {size}:
            wrong = next(i for i, each in enumerate(level) if not isinstance(each, list) or len(each) != size)
            file = ", or {'b64': …} with an image file" if is_image else ""
            raise RequestError(
                400,
                f"instance {first + wrong // per_row} must be a list of shape {shape}{file}; it has "
                f"{_type_in_words(level[wrong])} where a list of {size} is expected.",
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
        raise RequestError(400, f"a number is too large for {dtype.name}.") from None
    if not np.isfinite(given).all():
        raise RequestError(400, f"a number is too large for {dtype.name}.")
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            typed = given.astype(dtype)
        if not np.isfinite(typed).all():
            raise RequestError(400, f"a number is too large for {dtype.name}.")
        return typed
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if (given != np.trunc(given)).any() or (given < low).any() or (given > high).any():
        raise RequestError(400, f"{dtype.name} values are whole numbers from {low} to {high}.")
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


def to_json(value: Any) -> bytes:
    """Returns JSON that every parser accepts: ASCII, finite numbers."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def json_pieces(value: Any) -> Iterator[bytes]:
    """Yields JSON in pieces of a few thousand values."""
    if isinstance(value, dict):
        for number, (name, inner) in enumerate(value.items()):
            yield (b"," if number else b"{") + to_json(name) + b":"
            yield from json_pieces(inner)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and _size(value) > _PIECE:
        size = _size(value[0])
        yield b"["
        step = 1 if size > _PIECE else _PIECE // size
        for first in range(0, len(value), step):
            if first:
                yield b","
            if size > _PIECE:
                yield from json_pieces(value[first])
            else:
                yield to_json(value[first : first + step])[1:-1]
        yield b"]"
    else:
        yield to_json(value)


def _size(value: Any) -> int:
    """Returns about how many values there are: rows are equally large."""
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    return 1 + len(value) * _size(value[0]) if isinstance(value, list) and value else 1


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
