"""Responses that describe the model: TensorFlow Serving's status and metadata, /about, and OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from modelyard import __version__
from modelyard.data.dataset import IMAGE
from modelyard.serving.http.limits import Limits
from modelyard.serving.http.model_versions import LoadedVersion, VersionStatus
from modelyard.serving.servable import BYTES, DEFAULT, IMAGE_BYTES, Servable

_TYPES = {"float32": "DT_FLOAT", "float64": "DT_DOUBLE", "float16": "DT_HALF", "bool": "DT_BOOL", "string": "DT_STRING"}
_ERROR = {"$ref": "#/components/schemas/Error"}


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
    servable = version.servable
    image = servable.info.image
    signature = {
        "inputs": {IMAGE: _tensor(IMAGE, image.shape, image.dtype)},
        "outputs": {output: _tensor(output, *spec) for output, spec in servable.outputs.items()},
        "method_name": "tensorflow/serving/predict",
    }
    file_signature = {**signature, "inputs": {IMAGE_BYTES: _tensor(IMAGE_BYTES, (), "string", BYTES)}}
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(version.number)},
        "metadata": {"signature_def": {"signature_def": {DEFAULT: signature, BYTES: file_signature}}},
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
        "image": {"shape": list(info.image.shape), "dtype": info.image.dtype},
        "test": dict(info.test),
    }


def _tensor(name: str, shape: tuple[int, ...], dtype: str, signature: str = DEFAULT) -> dict[str, Any]:
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
    paths: dict[str, Any] = {
        base: {"get": _get("status of all versions", "Status")},
        f"{base}/versions/{{version}}": {"get": _get("status of one version", "Status", versioned=True)},
        f"{base}/metadata": {"get": _get("names, types and shapes of inputs and outputs", "Metadata")},
        f"{base}/versions/{{version}}/metadata": {
            "get": _get("the metadata of one version", "Metadata", versioned=True)
        },
        "/about": {"get": _get("model, dataset, step, classes, test score", "About")},
        "/healthz": {"get": _get("liveness of the process", "Health")},
        "/readyz": {"get": _get("readiness: whether requests are answered", "Health")},
        "/openapi.json": {"get": _get("this document", "Metadata")},
        "/metrics": {"get": _text("counters for Prometheus", "text/plain")},
        "/": {"get": _text("a web page to try the model", "text/html")},
    }
    verbs = {
        "predict": (
            "predictions for images: numbers, or files as base64",
            "PredictRequest",
            "PredictResponse",
        ),
        "classify": ("classes with probabilities, most probable first", "ExamplesRequest", "ClassifyResponse"),
        "regress": ("predicted numbers, for regression models", "ExamplesRequest", "RegressResponse"),
    }
    for verb, (summary, request, response) in verbs.items():
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{request}"}}}
        paths[f"{base}:{verb}"] = {"post": _post(summary, body, response)}
        paths[f"{base}/versions/{{version}}:{verb}"] = {"post": _post(summary, body, response, versioned=True)}
    one = {"type": "string", "format": "binary"}
    files: dict[str, Any] = {
        "multipart/form-data": {"schema": {"type": "object", "properties": {"file": {"type": "array", "items": one}}}},
        "image/*": {"schema": one},
    }
    paths[f"{base}:upload"] = {"post": _post("image files: a form, or one as the body", files, "PredictResponse")}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"{name}, served by Modelyard", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(servable, limits)},
    }


def _schemas(servable: Servable, limits: Limits) -> dict[str, Any]:
    image = _nested(servable.info.image.shape, {"type": "number"})
    file = _object({"b64": {"type": "string", "contentEncoding": "base64"}}, "b64")
    value = {"oneOf": [image, file]}
    rows = {"type": "array", "minItems": 1, "maxItems": limits.max_instances}
    outputs = {
        name: _nested(shape, {"type": "string" if dtype == "string" else "number"})
        for name, (shape, dtype) in servable.outputs.items()
    }
    row = _object(outputs, *outputs) if len(outputs) > 1 else next(iter(outputs.values()), {})
    columns = {name: {"type": "array", "items": schema} for name, schema in outputs.items()}
    column = _object(columns, *columns) if len(columns) > 1 else next(iter(columns.values()), {})
    named = _object({"image": value}, "image")
    signature = {"signature_name": {"type": "string"}}
    pair = {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]}
    classes = {"type": "array", "items": {"type": "array", "items": pair}}
    numbers = {"type": "array", "items": {}}
    anything = {"type": "object"}
    return {
        "Error": _object({"error": {"type": "string"}}, "error"),
        "PredictRequest": {
            "oneOf": [
                _object({**signature, "instances": {**rows, "items": {"oneOf": [image, file, named]}}}, "instances"),
                _object(
                    {
                        **signature,
                        "inputs": {"oneOf": [{**rows, "items": value}, _object({"image": {**rows, "items": value}})]},
                    },
                    "inputs",
                ),
            ]
        },
        "PredictResponse": {
            "oneOf": [
                _object({"predictions": {"type": "array", "items": row}}, "predictions"),
                _object({"outputs": column}, "outputs"),
            ]
        },
        "ExamplesRequest": _object(
            {**signature, "examples": {**rows, "items": named}, "context": anything}, "examples"
        ),
        "ClassifyResponse": _object({"results": classes, "result": classes}, "results"),
        "RegressResponse": _object({"results": numbers, "result": numbers}, "results"),
        "Status": _object({"model_version_status": {"type": "array", "items": anything}}, "model_version_status"),
        **dict.fromkeys(("Metadata", "About", "Health"), anything),
    }


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _nested(shape: tuple[int, ...], inner: dict[str, Any]) -> dict[str, Any]:
    for size in reversed(shape):
        inner = {"type": "array", "items": inner, "minItems": size, "maxItems": size}
    return inner


def _responses(schema: str) -> dict[str, Any]:
    good = {"description": "success", "content": {"application/json": {"schema": _reference(schema)}}}
    bad = {"description": "what is wrong and what is expected", "content": {"application/json": {"schema": _ERROR}}}
    return {"200": good, "4XX": bad, "503": bad}


def _reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _parameters(versioned: bool) -> dict[str, Any]:
    one = {"name": "version", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}}
    return {"parameters": [one]} if versioned else {}


def _get(summary: str, schema: str, versioned: bool = False) -> dict[str, Any]:
    return {"summary": summary, **_parameters(versioned), "responses": _responses(schema)}


def _post(summary: str, body: dict[str, Any], schema: str, versioned: bool = False) -> dict[str, Any]:
    content = {"required": True, "content": body}
    return {"summary": summary, **_parameters(versioned), "requestBody": content, "responses": _responses(schema)}


def _text(summary: str, media_type: str) -> dict[str, Any]:
    content = {media_type: {"schema": {"type": "string"}}}
    return {"summary": summary, "responses": {"200": {"description": "the text", "content": content}}}
