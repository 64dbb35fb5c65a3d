"""The server takes a value per named input, in the row and column formats of TensorFlow Serving."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from starlette.testclient import TestClient

from modelyard.data.image_spec import ImageSpec
from modelyard.serving.http.batching import BatchingOptions
from modelyard.serving.http.limits import Limits
from modelyard.serving.servable import ModelInfo, Outputs, Servable
from serving_parts import service

SPECS = {"image": ImageSpec((2, 2, 1), "uint8"), "vec": ImageSpec((3,), "float32"), "age": ImageSpec((), "int32")}
PATH = "/v1/models/mine"
IMAGE = [[[1], [2]], [[3], [4]]]
ROW = {"image": IMAGE, "vec": [0.5, 1, 2], "age": 7}


class Sums(Servable):
    """Returns the sum of each input of an example, and what it was given."""

    def __init__(self, specs: Mapping[str, ImageSpec] = SPECS, task: str = "regression") -> None:
        super().__init__(ModelInfo("sums", "made up", 3, task, (), specs))
        self.sizes: list[int] = []

    def predict(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        for name, spec in self.info.inputs.items():
            assert inputs[name].dtype == spec.dtype
            assert inputs[name].shape[1:] == spec.shape
        self.sizes.append(len(next(iter(inputs.values()))))
        sums = {name: values.reshape(len(values), -1).sum(axis=1).astype(np.float64) for name, values in inputs.items()}
        return {"values": sum(sums.values()), **sums}  # type: ignore[dict-item]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    limits = Limits(max_instances=4, timeout=60)
    with TestClient(service(Sums(), limits, BatchingOptions(4, 0.0, 64)).app(), base_url="http://localhost") as made:
        yield made


def post(client: TestClient, body: Any, verb: str = "predict") -> tuple[int, Any]:
    answer = client.post(f"{PATH}:{verb}", content=json.dumps(body))
    return answer.status_code, answer.json()


def png(pixels: Any) -> dict[str, str]:
    file = io.BytesIO()
    Image.fromarray(np.array(pixels, np.uint8)[..., 0]).save(file, "PNG")
    return {"b64": base64.b64encode(file.getvalue()).decode()}


SUMS = {"values": 20.5, "image": 10.0, "vec": 3.5, "age": 7.0}


def test_rows_and_columns_have_a_value_per_name(client: TestClient) -> None:
    other = {**ROW, "age": 8}
    expected = [SUMS, {**SUMS, "age": 8.0, "values": 21.5}]
    assert post(client, {"instances": [ROW, other]}) == (200, {"predictions": expected})
    columns = {"image": [IMAGE, IMAGE], "vec": [ROW["vec"]] * 2, "age": [7, 8]}
    status, found = post(client, {"inputs": columns})
    assert (status, found["outputs"]["values"], found["outputs"]["vec"]) == (200, [20.5, 21.5], [3.5, 3.5])
    assert post(client, {"instances": [{**ROW, "image": png(IMAGE)}]}) == (200, {"predictions": [SUMS]})


def test_messages_speak_of_files_and_images_only_for_an_image(client: TestClient) -> None:
    messages = [post(client, {"instances": [{**ROW, "vec": [1, 2]}]})[1]["error"]]
    messages += [post(client, {"instances": [{**ROW, "age": age}]})[1]["error"] for age in (0.5, 10**400)]
    assert messages == [
        "the input vec (float32, 3): instance 0 must be a list of shape 3; it has a list of 2 where a list of 3 is "
        "expected.",
        "the input age (int32, a single value): int32 values are whole numbers from -2147483648 to 2147483647.",
        "the input age (int32, a single value): a number is too large for int32.",
    ]
    assert "image file" in post(client, {"instances": [{**ROW, "image": [1]}]})[1]["error"]


def test_files_and_ids_come_with_the_other_inputs(client: TestClient) -> None:
    row = {"image_bytes": png(IMAGE), "vec": ROW["vec"], "age": 7, "id": "first"}
    body = {"signature_name": "bytes_with_id", "instances": [row]}
    assert post(client, body) == (200, {"predictions": [{**SUMS, "id": "first"}]})
    body = {"signature_name": "image_with_id", "inputs": {**{name: [each] for name, each in ROW.items()}, "id": ["a"]}}
    assert post(client, body)[1]["outputs"]["id"] == ["a"]


def test_examples_may_share_inputs_as_their_context(client: TestClient) -> None:
    body = {"context": {"vec": ROW["vec"]}, "examples": [{"image": [1, 2, 3, 4], "age": [7]}, {**ROW, "age": 0}]}
    assert post(client, body, "regress") == (200, {"results": [20.5, 13.5], "result": [20.5, 13.5]})


TAKES = "The model takes image (uint8, 2×2×1), vec (float32, 3) and age (int32, a single value)."
MISTAKES: dict[str, tuple[Any, int, str]] = {
    "missing": ({"instances": [{"image": IMAGE, "vec": [1, 2, 3]}]}, 400, TAKES),
    "unknown": ({"instances": [{**ROW, "vex": 1}]}, 400, "found 'image', 'vec', 'age', 'vex'. " + TAKES),
    "no names": ({"instances": [IMAGE]}, 400, "must be an object that names the inputs 'image' and 'vec' and 'age'"),
    "missing column": ({"inputs": {"image": [IMAGE], "age": [1]}}, 400, "found 'image', 'age'. " + TAKES),
    "lengths": ({"inputs": {"image": [IMAGE] * 2, "vec": [[1, 2, 3]], "age": [1, 2]}}, 400, "2 values of 'image', but"),
    "shape": ({"instances": [ROW, {**ROW, "vec": [1]}]}, 400, "the input vec (float32, 3): instance 1 must be a list"),
    "type": ({"instances": [{**ROW, "age": 1.5}]}, 400, "the input age (int32, a single value): "),
    "text": ({"instances": [{**ROW, "age": "x"}]}, 400, "instance 0 must hold numbers"),
    "list for one": ({"instances": [{**ROW, "age": [1]}]}, 400, "the input age (int32, a single value): instance 0"),
    "file for numbers": ({"instances": [{**ROW, "vec": {"b64": ""}}]}, 400, "is an object; this input takes numbers"),
    "too many": ({"instances": [ROW] * 5}, 413, "--max_instances"),
    "too many in columns": ({"inputs": {name: [each] * 5 for name, each in ROW.items()}}, 413, "--max_instances"),
    "tf.Examples": ({"signature_name": "examples", "instances": [{"b64": ""}]}, 400, "the model takes image"),
}


@pytest.mark.parametrize(("body", "status", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_names_the_input_its_type_and_shape(client: TestClient, body: Any, status: int, message: str) -> None:
    found, answer = post(client, body)
    assert (found, message in answer["error"]) == (status, True), answer


def test_an_upload_can_not_have_all_inputs(client: TestClient) -> None:
    answer = client.post(f"{PATH}:upload", content=b"an image")
    assert answer.status_code == 400
    assert "takes image files only, and the model takes image (uint8, 2×2×1), vec" in answer.json()["error"]


def test_metadata_and_openapi_tell_names_types_and_shapes(client: TestClient) -> None:
    signatures = client.get(f"{PATH}/metadata").json()["metadata"]["signature_def"]["signature_def"]
    assert set(signatures) == {"serving_default", "bytes", "image_with_id", "bytes_with_id"}
    inputs = signatures["serving_default"]["inputs"]
    assert {name: each["dtype"] for name, each in inputs.items()} == {
        "image": "DT_UINT8", "vec": "DT_FLOAT", "age": "DT_INT32"
    }  # fmt: skip
    assert [dim["size"] for dim in inputs["vec"]["tensor_shape"]["dim"]] == ["-1", "3"]
    assert set(signatures["bytes"]["inputs"]) == {"image_bytes", "vec", "age"}
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    rows = schemas["PredictRequest"]["oneOf"][0]["properties"]["instances"]["items"]["anyOf"]
    assert rows[0]["required"] == ["image", "vec", "age"]
    assert rows[0]["properties"]["vec"] == {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}
    assert rows[0]["properties"]["age"] == {"type": "number"}
    assert schemas["ExamplesRequest"]["properties"]["examples"]["items"]["required"] == ["image", "vec", "age"]
    about = client.get("/about").json()
    assert about["inputs"]["vec"] == {"shape": [3], "dtype": "float32"}


def test_a_large_request_is_read_by_another_process(client: TestClient) -> None:
    body = json.dumps({"instances": [ROW, ROW]}) + " " * 300_000
    answer = client.post(f"{PATH}:predict", content=body)
    assert answer.json() == {"predictions": [SUMS, SUMS]}


def test_a_model_without_an_image_is_served() -> None:
    specs = {"vec": SPECS["vec"], "age": SPECS["age"]}
    with TestClient(service(Sums(specs)).app(), base_url="http://localhost") as client:
        assert post(client, {"instances": [{"vec": [1, 2, 3], "age": 4}]})[1]["predictions"][0]["values"] == 10.0
        assert client.get("/about").json()["inputs"] == {"vec": specs["vec"].feature.as_json(),
                                                         "age": specs["age"].feature.as_json()}  # fmt: skip
        assert client.get("/openapi.json").status_code == client.get("/").status_code == 200
    with TestClient(service(Sums({"vec": SPECS["vec"]})).app(), base_url="http://localhost") as client:
        assert post(client, {"instances": [[1, 2, 3]]})[1]["predictions"][0]["values"] == 6.0
        assert post(client, {"inputs": {"vec": [[1, 2, 3]]}})[1]["outputs"]["values"] == [6.0]


def test_a_run_and_its_export_are_served(two_devices: None, tmp_path: Path) -> None:
    from named_inputs import INPUTS, PLUGIN

    import modelyard
    from conftest import engine_name
    from modelyard.serving.http.model_versions import ExportSource, RunSource

    options: dict[str, Any] = {"engine": engine_name(), "plugins": str(PLUGIN), "train_steps": 2}
    modelyard.train(model="image_and_vec", dataset="image_vec_mask", model_dir=tmp_path / "run", **options)
    modelyard.export(tmp_path / "run", output=tmp_path / "models")
    wanted = modelyard.load(tmp_path / "run").predict(INPUTS)["probabilities"]
    body = {"inputs": {name: values[:3].tolist() for name, values in INPUTS.items()}}
    for source in (RunSource(str(tmp_path / "run"), None, {}, "a test"), ExportSource(tmp_path / "models")):
        made = service(source=source, batching=BatchingOptions(2, 0.0, 64))
        with TestClient(made.app(), base_url="http://localhost") as client:
            status, found = post(client, body)
        assert status == 200, found
        assert np.array(found["outputs"]["probabilities"]) == pytest.approx(wanted[:3], abs=1e-4)
