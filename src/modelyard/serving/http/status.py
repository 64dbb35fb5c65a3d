"""Status and metadata of a model as TensorFlow Serving gives them."""

from __future__ import annotations

from typing import Any

from modelyard.data.dataset import IMAGE
from modelyard.serving.description import BYTES, DEFAULT, IMAGE_BYTES
from modelyard.serving.http.versions import Status, Version
from modelyard.serving.servable import Servable

_TYPES = {"float32": "DT_FLOAT", "float64": "DT_DOUBLE", "float16": "DT_HALF", "bool": "DT_BOOL", "string": "DT_STRING"}


def status_of(statuses: dict[int, Status]) -> dict[str, Any]:
    """A GetModelStatusResponse, the newest version first."""
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


def metadata_of(name: str, version: Version) -> dict[str, Any]:
    """A GetModelMetadataResponse: names, types and shapes of what goes in and comes out."""
    servable = version.servable
    image = servable.facts.image
    signature = {
        "inputs": {IMAGE: _tensor(IMAGE, image.shape, image.dtype)},
        "outputs": {output: _tensor(output, *found) for output, found in servable.outputs.items()},
        "method_name": "tensorflow/serving/predict",
    }
    of_files = {**signature, "inputs": {IMAGE_BYTES: _tensor(IMAGE_BYTES, (), "string", BYTES)}}
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(version.number)},
        "metadata": {"signature_def": {"signature_def": {DEFAULT: signature, BYTES: of_files}}},
    }


def about(name: str, version: Version) -> dict[str, Any]:
    """What people want to know of the model, for the page."""
    servable: Servable = version.servable
    facts = servable.facts
    return {
        "name": name,
        "version": str(version.number),
        "model": facts.model,
        "dataset": facts.dataset,
        "step": facts.step,
        "kind": facts.kind,
        "classes": list(facts.classes),
        "image": {"shape": list(facts.image.shape), "dtype": facts.image.dtype},
        "test": dict(facts.test),
    }


def _tensor(name: str, shape: tuple[int, ...], dtype: str, signature: str = DEFAULT) -> dict[str, Any]:
    sizes = [{"size": str(size), "name": ""} for size in (-1, *shape)]
    return {
        "dtype": _TYPES.get(dtype, f"DT_{dtype.upper()}"),
        "tensor_shape": {"dim": sizes, "unknown_rank": False},
        "name": f"{signature}_{name}:0",
    }
