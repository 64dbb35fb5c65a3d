"""The description of the paths for programs: OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from modelyard import __version__
from modelyard.serving.http.body import Limits
from modelyard.serving.servable import Servable

_ERROR = {"$ref": "#/components/schemas/Error"}


def openapi(name: str, servable: Servable, limits: Limits) -> dict[str, Any]:
    """The document for one model.

    Args:
        name: of the model in the paths.
        servable: gives the shapes.
        limits: what a request may take.
    """
    base = f"/v1/models/{name}"
    paths: dict[str, Any] = {
        base: {"get": _get("status of all versions", "Status")},
        f"{base}/versions/{{version}}": {"get": _get("status of one version", "Status", versioned=True)},
        f"{base}/metadata": {"get": _get("names, types and shapes of inputs and outputs", "Metadata")},
        f"{base}/versions/{{version}}/metadata": {"get": _get("the same of one version", "Metadata", versioned=True)},
        "/about": {"get": _get("model, dataset, step, classes, test score", "About")},
        "/healthz": {"get": _get("whether the process lives", "Health")},
        "/readyz": {"get": _get("whether requests are answered", "Health")},
        "/openapi.json": {"get": _get("this document", "Metadata")},
        "/metrics": {"get": _text("counters for Prometheus", "text/plain")},
        "/": {"get": _text("a page to try the model", "text/html")},
    }
    verbs = {
        "predict": ("images as numbers or as base64 of files", "PredictRequest", "PredictResponse"),
        "classify": ("classes with probabilities, the likeliest first", "ExamplesRequest", "ClassifyResponse"),
        "regress": ("numbers, of models of regression", "ExamplesRequest", "RegressResponse"),
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
    paths[f"{base}:upload"] = {"post": _post("image files as a form, or one as the body", files, "PredictResponse")}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"{name}, served by Modelyard", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(servable, limits)},
    }


def _schemas(servable: Servable, limits: Limits) -> dict[str, Any]:
    image = _nested(servable.facts.image.shape, {"type": "number"})
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


def _answers(schema: str) -> dict[str, Any]:
    good = {"description": "the answer", "content": {"application/json": {"schema": _reference(schema)}}}
    bad = {"description": "what is wrong and what would be right", "content": {"application/json": {"schema": _ERROR}}}
    return {"200": good, "4XX": bad, "503": bad}


def _reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _parameters(versioned: bool) -> dict[str, Any]:
    one = {"name": "version", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}}
    return {"parameters": [one]} if versioned else {}


def _get(summary: str, schema: str, versioned: bool = False) -> dict[str, Any]:
    return {"summary": summary, **_parameters(versioned), "responses": _answers(schema)}


def _post(summary: str, body: dict[str, Any], schema: str, versioned: bool = False) -> dict[str, Any]:
    content = {"required": True, "content": body}
    return {"summary": summary, **_parameters(versioned), "requestBody": content, "responses": _answers(schema)}


def _text(summary: str, kind: str) -> dict[str, Any]:
    content = {kind: {"schema": {"type": "string"}}}
    return {"summary": summary, "responses": {"200": {"description": "the text", "content": content}}}
