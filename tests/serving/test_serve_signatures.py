"""The signatures of an export, over HTTP: answered as TensorFlow Serving does, with ids passing through."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

import modelyard
from modelyard.data.image_spec import ImageSpec
from modelyard.data.records.example import encode_example
from modelyard.serving.exported_model import ExportedServable
from modelyard.serving.servable import SIGNATURES
from serving_parts import Brightness, facts, service

PREDICT, METADATA = "/v1/models/mine:predict", "/v1/models/mine/metadata"
WHITE = np.full((4, 4, 3), 255, np.uint8)


def png(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(service().app()) as made:
        yield made


FILE, IMAGE = b64(png(WHITE)), WHITE.tolist()
EXAMPLE = b64(encode_example({"image/encoded": png(WHITE), "id": b"seven"}))
RAW = b64(encode_example({"image/encoded": WHITE.tobytes(), "image/format": b"raw", "id": b"\xff\xfe"}))


@pytest.mark.parametrize(
    ("signature", "instance", "identity"),
    [
        ("image_with_id", {"image": IMAGE, "id": "a"}, "a"),
        ("image_with_id", {"image": IMAGE, "id": ""}, ""),
        ("image_with_id", {"image": IMAGE, "id": "日本\x1b"}, "日本\x1b"),
        ("image_with_id", {"image": IMAGE, "id": b64(b"\xff")}, b64(b"\xff")),
        ("bytes_with_id", {"image_bytes": FILE, "id": "b"}, "b"),
        ("examples", EXAMPLE, "seven"),
        ("examples", {"examples": EXAMPLE}, "seven"),
        ("examples", RAW, b64(b"\xff\xfe")),
        ("examples", b64(encode_example({"image/encoded": png(WHITE)})), ""),
    ],
)
def test_ids_pass_through(client: TestClient, signature: str, instance: Any, identity: Any) -> None:
    answer = client.post(PREDICT, json={"signature_name": signature, "instances": [instance]})
    assert answer.status_code == 200, answer.text
    (row,) = answer.json()["predictions"]
    assert (row["id"], row["class"]) == (identity, 2)
    assert set(row) == {"id", "class", "label", "probabilities"}


def test_ids_pass_through_in_columns_too(client: TestClient) -> None:
    asked = {"signature_name": "image_with_id", "inputs": {"image": [IMAGE, IMAGE], "id": ["a", "b"]}}
    assert client.post(PREDICT, json=asked).json()["outputs"]["id"] == ["a", "b"]
    asked = {"signature_name": "examples", "inputs": [EXAMPLE, RAW]}
    assert client.post(PREDICT, json=asked).json()["outputs"]["id"] == ["seven", b64(b"\xff\xfe")]


def test_a_single_output_has_its_name_beside_an_id() -> None:
    with TestClient(service(Brightness(facts("regression"))).app()) as client:
        asked = {"signature_name": "image_with_id", "instances": [{"image": IMAGE, "id": "a"}]}
        assert client.post(PREDICT, json=asked).json() == {"predictions": [{"values": 1.0, "id": "a"}]}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"signature_name": "image_with_id", "instances": [{"image": IMAGE}]}, "the inputs 'image' and 'id'"),
        ({"signature_name": "image_with_id", "instances": [IMAGE]}, "must be an object that names"),
        ({"signature_name": "image_with_id", "instances": [{"image": IMAGE, "id": 7}]}, "must be a string"),
        ({"signature_name": "image_with_id", "instances": [{"image": IMAGE, "id": {"b64": "!"}}]}, "not base64"),
        ({"signature_name": "image_with_id", "inputs": {"image": [IMAGE], "id": []}}, "1 values of 'image', but 0"),
        ({"signature_name": "image_with_id", "inputs": [IMAGE]}, "must be an object that names"),
        ({"signature_name": "bytes_with_id", "instances": [{"image_bytes": IMAGE, "id": ""}]}, "takes files"),
        ({"signature_name": "bytes_with_id", "instances": [{"image": FILE, "id": ""}]}, "the inputs 'image_bytes'"),
        ({"signature_name": "examples", "instances": [IMAGE]}, "takes tf.Examples"),
        ({"signature_name": "examples", "instances": [b64(b"nonsense")]}, "not a tf.Example"),
        ({"signature_name": "examples", "instances": [b64(b"")]}, "can't be decoded"),
        ({"signature_name": "examples", "instances": [b64(encode_example({"image/encoded": 7}))]}, "bytes value"),
        (
            {
                "signature_name": "examples",
                "instances": [b64(encode_example({"image/encoded": b"1", "image/format": b"raw"}))],
            },
            "1 bytes of raw pixels; this model takes 48",
        ),
    ],
)
def test_what_a_signature_does_not_take_is_said(client: TestClient, asked: Any, said: str) -> None:
    answer = client.post(PREDICT, json=asked)
    assert (answer.status_code, said in answer.json()["error"]) == (400, True), answer.text


@pytest.mark.parametrize("verb", ["classify", "regress"])
def test_signatures_with_ids_are_for_predict(verb: str) -> None:
    with TestClient(
        service(Brightness(facts("regression" if verb == "regress" else "classification"))).app()
    ) as client:
        asked = {"signature_name": "image_with_id", "examples": [{"image": IMAGE, "id": "a"}]}
        answer = client.post(f"/v1/models/mine:{verb}", json=asked)
        assert (answer.status_code, "is for :predict" in answer.json()["error"]) == (400, True)


def test_a_model_of_numbers_has_no_signatures_for_files() -> None:
    servable = Brightness(facts(image=ImageSpec((2,), "float32")))
    with TestClient(service(servable).app()) as client:
        signatures = client.get(METADATA).json()["metadata"]["signature_def"]["signature_def"]
        assert set(signatures) == {"serving_default", "image_with_id"}
        for name in set(SIGNATURES) - set(signatures):
            answer = client.post(PREDICT, json={"signature_name": name, "instances": [FILE]})
            assert (answer.status_code, "this model takes numbers" in answer.json()["error"]) == (400, True)


@pytest.mark.tensorflow_only("exports are SavedModels")
def test_an_export_is_answered_as_its_own_signatures_answer(tmp_path: Path, two_devices: None) -> None:
    import tensorflow as tf

    modelyard.train(model="mlp", dataset="digits", train_steps=2, model_dir=str(tmp_path / "run"))
    folder = Path(modelyard.export(str(tmp_path / "run")).path)
    signatures = tf.saved_model.load(str(folder)).signatures
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 1), np.uint8)
    file = png(pixels[..., 0])
    example = encode_example({"image/encoded": file, "id": b"x"})
    given = {
        "serving_default": ({"image": pixels[None]}, {"image": pixels.tolist()}),
        "bytes": ({"image_bytes": [file]}, {"image_bytes": b64(file)}),
        "examples": ({"examples": [example]}, {"examples": b64(example)}),
        "image_with_id": ({"image": pixels[None], "id": ["x"]}, {"image": pixels.tolist(), "id": "x"}),
        "bytes_with_id": ({"image_bytes": [file], "id": ["x"]}, {"image_bytes": b64(file), "id": "x"}),
    }
    assert set(signatures) == set(given) == set(SIGNATURES)
    with TestClient(service(ExportedServable(folder)).app()) as client:
        described = client.get(METADATA).json()["metadata"]["signature_def"]["signature_def"]
        assert set(described) == set(given)
        for name, (tensors, instance) in given.items():
            wanted = signatures[name](**{key: tf.constant(value) for key, value in tensors.items()})
            answer = client.post(PREDICT, json={"signature_name": name, "instances": [instance]})
            (row,) = answer.json()["predictions"]
            assert set(row) == set(wanted) == set(described[name]["outputs"])
            assert set(tensors) == set(described[name]["inputs"])
            for output, value in wanted.items():
                if value.dtype == tf.string:
                    assert row[output] == value.numpy()[0].decode()
                else:
                    np.testing.assert_allclose(row[output], value.numpy()[0], rtol=1e-5, atol=1e-6)
        json.dumps(described)
