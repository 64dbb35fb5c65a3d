"""Responses that describe the model: TensorFlow Serving's status and metadata, /about, and OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from modelyard import __version__
from modelyard.data.dataset import ID, IMAGE
from modelyard.serving.http.limits import Limits
from modelyard.serving.http.model_versions import LoadedVersion, VersionStatus
from modelyard.serving.servable import DEFAULT, EXAMPLES, IMAGE_BYTES, Servable

_TYPES = {"float32": "DT_FLOAT", "float64": "DT_DOUBLE", "float16": "DT_HALF", "bool": "DT_BOOL", "string": "DT_STRING"}


# -- TensorFlow Serving, /about ----------------------------------------------------------------------------------------


def status_response(statuses: dict[int, VersionStatus]) -> dict[str, Any]:
    """Returns a GetModelStatusResponse, newest version first."""
    return {
        "model_version_status": [
            {
                "version": str(number),
                "state": status.state,
                "status": {"error_code": status.code, "error_message": status.message},
            }
            for number, status in sorted(statuses.items(), reverse=True)
        ]
    }


def metadata_response(name: str, version: LoadedVersion) -> dict[str, Any]:
    """Returns a GetModelMetadataResponse: names, types and shapes of inputs and outputs."""
    info, outputs = version.servable.info, version.servable.outputs
    inputs = {name: (spec.shape, spec.dtype) for name, spec in info.inputs.items()}
    signatures = {}
    for signature, names in info.signatures.items():
        returned = {**outputs, ID: ((), "string")} if ID in names or signature == EXAMPLES else outputs
        signatures[signature] = {
            "inputs": {each: _tensor(each, *inputs.get(each, ((), "string")), signature) for each in names},
            "outputs": {each: _tensor(each, *spec, DEFAULT) for each, spec in returned.items()},
            "method_name": "tensorflow/serving/predict",
        }
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(version.number)},
        "metadata": {"signature_def": {"signature_def": signatures}},
    }


def about_response(name: str, version: LoadedVersion) -> dict[str, Any]:
    """Returns the facts about the model that the page shows."""
    info = version.servable.info
    return {
        "name": name,
        "version": str(version.number),
        "model": info.model,
        "dataset": info.dataset,
        "step": info.step,
        "kind": info.task_type,
        "classes": list(info.classes),
        **({"image": info.image.feature.as_json()} if IMAGE in info.inputs else {}),
        "inputs": {name: spec.feature.as_json() for name, spec in info.inputs.items()},
        "test": dict(info.test),
    }


def _tensor(name: str, shape: tuple[int, ...], dtype: str, signature: str) -> dict[str, Any]:
    sizes = [{"size": str(size), "name": ""} for size in (-1, *shape)]
    return {
        "dtype": _TYPES.get(dtype, f"DT_{dtype.upper()}"),
        "tensor_shape": {"dim": sizes, "unknown_rank": False},
        "name": f"{signature}_{name}:0",
    }


# -- OpenAPI -----------------------------------------------------------------------------------------------------------


def openapi_document(name: str, servable: Servable, limits: Limits) -> dict[str, Any]:
    """Returns the OpenAPI document of the server.

    Args:
        name: the name of the model in the paths.
        servable: the model; its shapes are in the document.
        limits: the limits of a request.
    """
    base = f"/v1/models/{name}"
    one = f"{base}/versions/{{version}}"
    gets = {
        base: ("status of all versions", "Status"),
        one: ("status of one version", "Status"),
        f"{base}/metadata": ("names, types and shapes of inputs and outputs", "Metadata"),
        f"{one}/metadata": ("the metadata of one version", "Metadata"),
        "/about": ("model, dataset, step, classes, test score", "About"),
        "/healthz": ("liveness of the process", "Health"),
        "/readyz": ("readiness: whether requests are answered", "Health"),
        "/openapi.json": ("this document", "Metadata"),
    }
    texts = {
        "/metrics": ("counters for Prometheus", "text/plain"),
        "/": ("a web page to try the model", "text/html"),
    }
    verbs = {
        "predict": ("predictions: numbers, or image files as base64", "PredictRequest", "PredictResponse"),
        "classify": ("classes with probabilities, most probable first", "ExamplesRequest", "ClassifyResponse"),
        "regress": ("predicted numbers, for regression models", "ExamplesRequest", "RegressResponse"),
    }
    paths: dict[str, Any] = {path: {"get": _operation(path, *words)} for path, words in gets.items()}
    for path, (summary, media_type) in texts.items():
        success = {"description": "the text", "content": {media_type: {"schema": {"type": "string"}}}}
        paths[path] = {"get": {"summary": summary, "responses": {"200": success}}}
    for verb, (summary, request, response) in verbs.items():
        for path in (f"{base}:{verb}", f"{one}:{verb}"):
            paths[path] = {"post": _operation(path, summary, response, _json_content(request))}
    file = {"type": "string", "format": "binary"}
    form = {"type": "object", "properties": {"file": {"type": "array", "items": file}}}
    files = {"multipart/form-data": {"schema": form}, "image/*": {"schema": file}}
    upload = f"{base}:upload"
    paths[upload] = {"post": _operation(upload, "image files: a form, or one as the body", "PredictResponse", files)}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"{name}, served by Modelyard", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(servable, limits)},
    }


def _operation(path: str, summary: str, response: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the operation of a path, whose response has the schema called ``response``."""
    error = {"description": "what is wrong and what is expected", "content": _json_content("Error")}
    success = {"description": "success", "content": _json_content(response)}
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": success, "4XX": error, "503": error}}
    if "{version}" in path:
        number = {"type": "integer", "minimum": 0}
        operation["parameters"] = [{"name": "version", "in": "path", "required": True, "schema": number}]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _json_content(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _schemas(servable: Servable, limits: Limits) -> dict[str, Any]:
    file = _object({"b64": {"type": "string", "contentEncoding": "base64"}}, "b64")
    values = {name: _nested_list(spec.shape, {"type": "number"}) for name, spec in servable.info.inputs.items()}
    if IMAGE in values:
        values[IMAGE] = {"oneOf": [values[IMAGE], file]}
    identity = {"oneOf": [{"type": "string"}, file]}
    of_signature = {**values, IMAGE_BYTES: file, EXAMPLES: file, ID: identity}
    signatures = servable.info.signatures.values()
    named = _object({name: of_signature[name] for name in values}, *values)
    rows = {"type": "array", "minItems": 1, "maxItems": limits.max_instances}
    with_names = [_object({name: of_signature[name] for name in names}, *names) for names in signatures]
    columns_of = {
        name: {**rows, "items": of_signature[name]}
        for name in dict.fromkeys(name for each in signatures for name in each)
    }
    instances, inputs = {**rows, "items": {"anyOf": with_names}}, _object(columns_of)
    if len(values) == 1:  # an input that is alone needs no name
        (value,) = values.values()
        instances = {**rows, "items": {"anyOf": [value, *with_names]}}
        inputs = {"oneOf": [{**rows, "items": value}, inputs]}
    outputs = {
        name: _nested_list(shape, {"type": "string" if dtype == "string" else "number"})
        for name, (shape, dtype) in servable.outputs.items()
    }
    columns = {name: _array(schema) for name, schema in outputs.items()}
    # A single output has no name in responses.
    row, column = (
        _object(part, *part) if len(part) > 1 else next(iter(part.values()), {}) for part in (outputs, columns)
    )
    signature = {"signature_name": {"type": "string", "enum": list(servable.info.signatures)}}
    classes = _array(_array({"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]}))
    anything = {"type": "object"}
    examples = {**signature, "examples": {**rows, "items": named}, "context": anything}
    predict_request = [
        _object({**signature, "instances": instances}, "instances"),
        _object({**signature, "inputs": inputs}, "inputs"),
    ]
    predict_response = [_object({"predictions": _array(row)}, "predictions"), _object({"outputs": column}, "outputs")]
    return {
        "Error": _object({"error": {"type": "string"}}, "error"),
        "PredictRequest": {"oneOf": predict_request},
        "PredictResponse": {"oneOf": predict_response},
        "ExamplesRequest": _object(examples, "examples"),
        "ClassifyResponse": _object({"results": classes, "result": classes}, "results"),
        "RegressResponse": _object({"results": _array({}), "result": _array({})}, "results"),
        "Status": _object({"model_version_status": _array(anything)}, "model_version_status"),
        **dict.fromkeys(("Metadata", "About", "Health"), anything),
    }


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _nested_list(shape: tuple[int, ...], inner: dict[str, Any]) -> dict[str, Any]:
    for size in reversed(shape):
        inner = {**_array(inner), "minItems": size, "maxItems": size}
    return inner
