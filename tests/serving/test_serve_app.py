"""The paths of the server: a client written from TensorFlow Serving's documentation works, strangers are refused."""

from __future__ import annotations

import base64
import gzip
import io
import json
import struct
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient

from modelyard.data.image_spec import ImageSpec
from modelyard.serving.http.app import PAGE, PAGE_POLICY
from modelyard.serving.http.batching import BatchingOptions
from modelyard.serving.http.limits import Limits
from serving_parts import CLASSES, Brightness, facts, service
from waiting import PATIENCE, wait_until

BASE = "/v1/models/mine"
PREDICT, CLASSIFY, REGRESS, UPLOAD = (f"{BASE}:{verb}" for verb in ("predict", "classify", "regress", "upload"))


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    limits = Limits(max_body=200_000, max_bodies=1_600_000, max_pixels=10_000, max_instances=16, timeout=5)
    with TestClient(service(limits=limits).app(), raise_server_exceptions=False) as made:
        yield made


def bright(value: int = 255) -> list[Any]:
    return np.full((4, 4, 3), value, np.uint8).tolist()


def png(pixels: Any, **save: Any) -> bytes:
    out = io.BytesIO()
    (pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)).save(
        out, save.pop("format", "PNG"), **save
    )
    return out.getvalue()


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


WHITE = png(np.full((30, 40, 3), 255, np.uint8))


# -- as documented for TensorFlow Serving ------------------------------------------------------------------------------


def test_predict_in_rows(client: TestClient) -> None:
    answer = client.post(PREDICT, json={"signature_name": "serving_default", "instances": [bright(), bright(0)]})
    assert answer.status_code == 200
    rows = answer.json()["predictions"]
    assert [row["class"] for row in rows] == [2, 0]
    assert [row["label"] for row in rows] == ["<b>bright</b>", "dark"]
    assert all(abs(sum(row["probabilities"]) - 1) < 1e-5 for row in rows)
    named = client.post(PREDICT, json={"instances": [{"image": bright()}, {"image": bright(0)}]})
    assert named.json() == answer.json()
    assert list(answer.json()) == ["predictions"]


def test_predict_in_columns(client: TestClient) -> None:
    answer = client.post(PREDICT, json={"inputs": {"image": [bright(), bright(0)]}}).json()
    assert answer["outputs"]["class"] == [2, 0]
    assert np.shape(answer["outputs"]["probabilities"]) == (2, 3)
    assert client.post(PREDICT, json={"inputs": [bright(), bright(0)]}).json() == answer


def test_image_files_are_given_as_base64(client: TestClient) -> None:
    answer = client.post(PREDICT, json={"instances": [b64(WHITE), bright(0), {"image": b64(WHITE)}]})
    assert [row["class"] for row in answer.json()["predictions"]] == [2, 0, 2]


def test_classify_gives_pairs_of_label_and_score(client: TestClient) -> None:
    flat = np.full(48, 255, np.uint8).tolist()
    examples = [{"image": b64(WHITE)}, {"image": flat}, {"image": bright(0)}]
    answer = client.post(CLASSIFY, json={"examples": examples}).json()
    assert answer["result"] == answer["results"]  # one is the text of the documentation, one its example
    assert [pairs[0][0] for pairs in answer["results"]] == ["<b>bright</b>", "<b>bright</b>", "dark"]
    assert all(isinstance(label, str) and 0 <= score <= 1 for pairs in answer["results"] for label, score in pairs)
    shared = client.post(CLASSIFY, json={"context": {"image": b64(WHITE)}, "examples": [{}]}).json()
    assert shared["results"] == answer["results"][:1]


def test_regress_gives_a_number_for_each_example_and_a_single_output_has_no_name() -> None:
    with TestClient(service(Brightness(facts("regression"))).app()) as client:
        request = {
            "signature_name": "tensorflow/serving/regress",
            "examples": [{"image": bright()}, {"image": bright(0)}],
        }
        assert client.post(REGRESS, json=request).json()["results"] == [1.0, 0.0]
        assert client.post(PREDICT, json={"instances": [bright()]}).json() == {"predictions": [1.0]}
        assert client.post(PREDICT, json={"inputs": [bright()]}).json() == {"outputs": [1.0]}
        refused = client.post(CLASSIFY, json=request)
        assert refused.status_code == 400
        assert "regression" in refused.json()["error"]


def test_multi_label_models_have_a_score_per_label() -> None:
    with TestClient(service(Brightness(facts("multi_label"))).app()) as client:
        found = client.post(CLASSIFY, json={"examples": [{"image": bright()}]}).json()["results"]
        assert [label for label, _ in found[0]] == ["<b>bright</b>", "grey", "dark"]
        assert client.post(PREDICT, json={"instances": [bright()]}).json()["predictions"][0]["labels"] == [0, 0, 1]


def test_status_and_versions(client: TestClient) -> None:
    status = {"version": "3", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    assert client.get(BASE).json() == {"model_version_status": [status]}
    assert client.get(f"{BASE}/versions/3").json() == {"model_version_status": [status]}
    assert client.post(f"{BASE}/versions/3:predict", json={"instances": [bright()]}).status_code == 200
    for path in (f"{BASE}/versions/4", f"{BASE}/versions/4/metadata", f"{BASE}/labels/stable", "/v1/models/other"):
        assert client.get(path).status_code == 404
    missing = client.post("/v1/models/other:predict", json={"instances": [1.0]})
    assert missing.status_code == 404
    assert missing.json()["error"].startswith("Servable not found for request: Latest(other)")


def test_metadata_names_inputs_and_outputs(client: TestClient) -> None:
    answer = client.get(f"{BASE}/metadata").json()
    assert answer["model_spec"] == {"name": "mine", "signature_name": "", "version": "3"}
    signature = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["image"]["dtype"] == "DT_UINT8"
    assert [dim["size"] for dim in signature["inputs"]["image"]["tensor_shape"]["dim"]] == ["-1", "4", "4", "3"]
    types = {name: output["dtype"] for name, output in signature["outputs"].items()}
    assert types == {"class": "DT_INT64", "probabilities": "DT_FLOAT", "label": "DT_STRING"}
    assert client.get(f"{BASE}/versions/3/metadata").json() == answer


# -- what is beside it ----------------------------------------------------------------------------------------------


def test_images_are_uploaded_as_a_form_or_as_they_are(client: TestClient) -> None:
    form = client.post(UPLOAD, files=[("file", ("a.png", WHITE)), ("file", ("b.png", png(np.zeros((9, 9), np.uint8))))])
    assert [row["label"] for row in form.json()["predictions"]] == ["<b>bright</b>", "dark"]
    plain = client.post(UPLOAD, content=WHITE, headers={"content-type": "image/png"})
    assert plain.json()["predictions"] == form.json()["predictions"][:1]
    assert plain.headers["modelyard-version"] == "3"


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P", "1", "I;16", "LA"])
def test_an_image_of_any_colour_mode_is_converted_as_in_training(mode: str, two_devices: None) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (7, 9, 3), np.uint8)
    if mode == "I;16":
        file = png(Image.fromarray(pixels[..., 0].astype(np.uint16) * 257))
    else:
        file = png(Image.fromarray(pixels).convert(mode), format="TIFF" if mode == "CMYK" else "PNG")
    wanted = np.empty((4, 4, 3), np.uint8)
    ImageSpec((4, 4, 3), "uint8").write(file, wanted, lambda: "it")
    servable = Brightness()
    with TestClient(service(servable).app()) as client:
        assert client.post(UPLOAD, files={"file": file}).status_code == 200
    np.testing.assert_array_equal(servable.batches[-1][0], wanted)


def test_pixels_in_unit_scale_are_made_of_files() -> None:
    servable = Brightness(facts(image=ImageSpec((4, 4, 1), "float32", unit_scale=True)))
    with TestClient(service(servable).app()) as client:
        assert client.post(PREDICT, json={"instances": [b64(WHITE)]}).status_code == 200
    assert servable.batches[-1].max() == 1.0


def test_files_go_to_the_signature_that_an_export_has_for_them(client: TestClient) -> None:
    plain = client.post(PREDICT, json={"instances": [b64(WHITE), b64(WHITE)]}).json()
    asked = {"signature_name": "bytes"}
    rows = client.post(PREDICT, json={**asked, "instances": [{"image_bytes": b64(WHITE)}, b64(WHITE)]})
    columns = client.post(PREDICT, json={**asked, "inputs": {"image_bytes": [b64(WHITE), b64(WHITE)]}}).json()
    assert rows.json() == plain
    assert [columns["outputs"]["class"][n] for n in (0, 1)] == [row["class"] for row in plain["predictions"]]
    for wrong, said in (({"image": b64(WHITE)}, "the one input 'image_bytes'"), (bright(), "takes files")):
        refused = client.post(PREDICT, json={**asked, "instances": [wrong]})
        assert (refused.status_code, said in refused.json()["error"]) == (400, True)
    signatures = client.get(f"{BASE}/metadata").json()["metadata"]["signature_def"]["signature_def"]
    assert signatures["bytes"]["inputs"]["image_bytes"]["dtype"] == "DT_STRING"
    assert signatures["bytes"]["outputs"] == signatures["serving_default"]["outputs"]


def test_health_metrics_and_openapi(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "live"}
    assert client.get("/readyz").json()["version"] == "3"
    assert client.post(PREDICT, json={"instances": [bright()]}).status_code == 200
    text = client.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        'modelyard_requests_total{status="200",verb="predict"}',
        "modelyard_batch_images_bucket",
        "modelyard_version 3.0",
    ):
        assert line in text.text
    document = client.get("/openapi.json").json()
    for path, verbs in document["paths"].items():
        for verb in verbs:
            answer = client.request(verb, path.replace("{version}", "3"))
            assert answer.status_code == 200 if verb == "get" else answer.status_code == 400, (path, answer.text)
    references = set(_references(document))
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= set(
        document["components"]["schemas"]
    )


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def test_the_page_runs_its_own_script_alone(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.headers["content-security-policy"] == PAGE_POLICY
    assert "unsafe" not in PAGE_POLICY
    assert PAGE_POLICY.startswith("default-src 'none'; script-src 'sha256-")
    text = PAGE.decode()
    assert "http://" not in text.replace('"http://www.w3.org', "")
    assert "https://" not in text
    for dangerous in (
        "innerHTML",
        "outerHTML",
        "document.write",
        "insertAdjacentHTML",
        "eval(",
        ' style="',
        " onclick",
    ):
        assert dangerous not in text
    told = client.get("/about").json()
    assert told["classes"] == list(CLASSES)
    assert told["model"] == "brightness"


# -- strangers ------------------------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    return b'{"instances": ' + b"[" * depth + b"]" * depth + b"}"


def bomb(side: int) -> bytes:
    """A PNG that claims to be large."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


JPEG = png(np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8), format="JPEG")
WRONG: dict[str, tuple[str, Any, int, str]] = {
    "no JSON": (PREDICT, b"{", 400, "JSON Parse Error"),
    "no text": (PREDICT, b"\xff\xfe\xfa", 400, "JSON Parse Error"),
    "empty": (PREDICT, b"", 400, "JSON Parse Error"),
    "no object": (PREDICT, [1], 400, "must be a JSON object; it is a list of 1"),
    "nothing": (PREDICT, {}, 400, "either 'instances'"),
    "both": (PREDICT, {"instances": [], "inputs": []}, 400, "either 'instances'"),
    "no images": (PREDICT, {"instances": []}, 400, "no images"),
    "a number": (PREDICT, {"instances": 3}, 400, "must be a list; it is a number"),
    "numbers": (PREDICT, {"instances": [1, 2]}, 400, "must be a list of shape 4×4×3"),
    "other shape": (PREDICT, {"instances": [bright(), bright()[:3]]}, 400, "instance 1 must be a list of shape 4×4×3"),
    "ragged": (PREDICT, {"instances": [[*bright()[:3], [[1, 2, 3]] * 3]]}, 400, "a list of 3 where a list of 4"),
    "too deep": (PREDICT, {"instances": [[[[[1]] * 3] * 4] * 4]}, 400, "must hold numbers; it has a list of 1"),
    "text": (PREDICT, {"instances": [[[["1"] * 3] * 4] * 4]}, 400, "must hold numbers; it has a string"),
    "null": (PREDICT, {"instances": [[[[None] * 3] * 4] * 4]}, 400, "must hold numbers; it has null"),
    "true": (PREDICT, {"instances": [[[[True] * 3] * 4] * 4]}, 400, "must hold numbers; it has true"),
    "too large": (PREDICT, {"instances": [[*bright(0)[:3], [[256] * 3] * 4]]}, 400, "from 0 to 255"),
    "negative": (PREDICT, {"instances": [[[[-1] * 3] * 4] * 4]}, 400, "from 0 to 255"),
    "a fraction": (PREDICT, {"instances": [[[[0.5] * 3] * 4] * 4]}, 400, "whole numbers"),
    "huge": (PREDICT, {"instances": [[[[10**400] * 3] * 4] * 4]}, 400, "too large for uint8"),
    "NaN": (PREDICT, b'{"instances": [NaN]}', 400, "NaN is not valid JSON"),
    "infinite": (PREDICT, json.dumps({"instances": [bright(7)]}).replace("7", "1e999").encode(), 400, "too large"),
    "many digits": (PREDICT, b'{"instances": [' + b"9" * 5000 + b"]}", 400, "JSON Parse Error"),
    "nested": (PREDICT, nested(90_000), 400, "nested too deeply"),
    "other input": (PREDICT, {"instances": [{"picture": 1}]}, 400, "the one input 'image'; found 'picture'"),
    "half a character": (PREDICT, b'{"instances": [{"\\ud800": 1}]}', 400, "the one input"),
    "other signature": (PREDICT, {"signature_name": "x", "instances": [bright()]}, 400, "'bytes_with_id'"),
    "a signature that is a list": (PREDICT, {"signature_name": [], "instances": [bright()]}, 400, "signature"),
    "no base64": (PREDICT, {"instances": [{"b64": "!"}]}, 400, "is not base64"),
    "base64 of a number": (PREDICT, {"instances": [{"b64": 1}]}, 400, "{'b64': 'BASE64'}"),
    "inputs of one file": (PREDICT, {"inputs": {"b64": ""}}, 400, "must be a list; it is an object"),
    "no image": (PREDICT, {"instances": [b64(b"GIF89a, really")]}, 400, "instance 0 can't be decoded"),
    "half a JPEG": (PREDICT, {"instances": [b64(JPEG[: len(JPEG) // 2])]}, 400, "instance 0 can't be decoded"),
    "a bomb": (PREDICT, {"instances": [b64(bomb(3_000))]}, 413, "the maximum is 10,000"),
    "a larger bomb": (PREDICT, {"instances": [b64(bomb(2**31 - 1))]}, 400, "can't be decoded"),
    "many pixels": (PREDICT, {"instances": [b64(png(np.zeros((90, 90), np.uint8)))] * 5}, 413, "40,000 pixels"),
    "many images": (PREDICT, {"instances": [bright()] * 17}, 413, "17 images; the maximum is 16"),
    "a long body": (PREDICT, b" " * 200_001, 413, "200,000 bytes"),
    "no examples": (CLASSIFY, {"instances": [bright()]}, 400, "'examples'"),
    "examples of numbers": (CLASSIFY, {"examples": [1]}, 400, "example 0 must be an object"),
    "a flat list that is too short": (CLASSIFY, {"examples": [{"image": [1] * 47}]}, 400, "shape 4×4×3"),
    "not a regression": (REGRESS, {"examples": [{"image": bright()}]}, 400, "classification"),
    "JSON as a file": (UPLOAD, {"instances": [bright()]}, 415, ":predict"),
    "a path that goes up": ("/v1/models/..%2f..%2fetc%2fpasswd:predict", {}, 404, "Malformed request"),
    "a verb nobody knows": (f"{BASE}:explain", {}, 404, ":predict"),
    "a version that is no number": (f"{BASE}/versions/-1:predict", {}, 404, ""),
    "a path nobody knows": ("/v2/models", {}, 404, "/openapi.json"),
    "the wrong method": (BASE, {}, 405, "Use GET"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(client: TestClient, name: str) -> None:
    path, body, status, words = WRONG[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]


def test_forms_that_are_damaged_or_empty_are_refused(client: TestClient) -> None:
    for content, kind in (
        (b"", "image/png"),
        (b"nonsense", "multipart/form-data"),
        (b"nonsense", "multipart/form-data; boundary=x"),
        (
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\ntext\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
        ),
        (b"--x\r\nContent-Disposition: form-data\r\n\r\ntext\r\n--x--\r\n", "multipart/form-data; boundary=x"),
        (b"nothing of an image", "application/octet-stream"),
    ):
        answer = client.post(UPLOAD, content=content, headers={"content-type": kind})
        assert answer.status_code == 400, (content, answer.text)
        assert answer.json()["error"]


def test_a_body_that_does_not_say_its_length_is_cut_off_too(client: TestClient) -> None:
    answer = client.post(PREDICT, content=(b" " * 10_000 for _ in range(30)))
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"


def test_whole_numbers_may_be_written_as_floats(client: TestClient) -> None:
    answer = client.post(PREDICT, json={"instances": [np.full((4, 4, 3), 255.0).tolist()]})
    assert answer.json()["predictions"][0]["class"] == 2


def test_numbers_that_a_model_has_no_answer_for_are_refused() -> None:
    servable = Brightness(facts(image=ImageSpec((2,), "float32")))
    with TestClient(service(servable).app()) as client:
        assert client.post(PREDICT, json={"instances": [[1.5, 2.5]]}).status_code == 200
        servable.shift = float("nan")
        answer = client.post(PREDICT, json={"instances": [[1, 2]]})
        assert answer.status_code == 400
        assert "the prediction for instance 0 is not finite" in answer.json()["error"]
        assert client.post(PREDICT, json={"instances": [[1e39, 0]]}).status_code == 400
        assert "Give numbers" in client.post(PREDICT, json={"instances": [b64(WHITE)]}).json()["error"]


def test_a_full_queue_and_a_request_that_waits_too_long_may_come_again() -> None:
    servable = Brightness()
    made = service(servable, Limits(timeout=0.2), BatchingOptions(1, 0.0, 1))
    with TestClient(made.app()) as client:
        import concurrent.futures
        import time

        servable.go.clear()
        servable.asked.clear()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            asked = {"json": {"instances": [bright()]}}
            first = pool.submit(client.post, PREDICT, **asked)
            assert servable.asked.wait(PATIENCE)
            batcher = made.versions.current.batcher  # type: ignore[union-attr]
            second = pool.submit(client.post, PREDICT, **asked)
            wait_until(lambda: batcher.waiting)
            third = client.post(PREDICT, **asked)
            assert (third.status_code, third.headers["retry-after"]) == (429, "1")
            time.sleep(0.3)
            servable.go.set()
            assert first.result().status_code == 200
            assert (second.result().status_code, second.result().headers["retry-after"]) == (503, "1")


def test_an_internal_error_is_answered_and_the_server_stays() -> None:
    servable = Brightness()
    with TestClient(service(servable).app(), raise_server_exceptions=False) as client:
        good, servable.predict = servable.predict, lambda images: 1 / 0  # type: ignore[method-assign,assignment,misc]
        answer = client.post(PREDICT, json={"instances": [bright()]})
        assert answer.status_code == 500
        assert answer.json() == {"error": "internal error; see the server's log."}
        servable.predict = good  # type: ignore[method-assign]
        assert client.post(PREDICT, json={"instances": [bright()]}).status_code == 200


# -- fuzzing --------------------------------------------------------------------------------------------------------

PATHS = [
    PREDICT,
    CLASSIFY,
    REGRESS,
    UPLOAD,
    BASE,
    f"{BASE}/metadata",
    f"{BASE}/versions/3:predict",
    "/about",
    "/",
    "/metrics",
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just(b64(JPEG))
    | st.just(bright()),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["image", "b64", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(["instances", "inputs", "examples", "signature_name", "context", "other"])
FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def check(answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]


@FUZZ
@given(path=st.sampled_from(PATHS), request=st.dictionaries(KEYS, VALUES, max_size=3) | VALUES)
def test_fuzzed_json_is_answered_or_refused(client: TestClient, path: str, request: Any) -> None:
    check(client.post(path, content=json.dumps(request).encode(), headers={"content-type": "application/json"}))


@FUZZ
@given(
    path=st.sampled_from(PATHS),
    body=st.binary(max_size=300),
    kind=st.sampled_from(
        ["application/json", "image/png", "multipart/form-data; boundary=x", "multipart/form-data", "x"]
    ),
)
def test_fuzzed_bytes_are_answered_or_refused(client: TestClient, path: str, body: bytes, kind: str) -> None:
    check(client.post(path, content=body, headers={"content-type": kind}))


@FUZZ
@given(
    file=st.sampled_from(
        [WHITE, JPEG, png(np.zeros((5, 5), np.uint8), format="GIF"), png(np.zeros((5, 5), np.uint8), format="TIFF")]
    ),
    place=st.floats(0, 1),
    change=st.binary(min_size=1, max_size=4),
    cut=st.booleans(),
)
def test_fuzzed_images_are_answered_or_refused(
    client: TestClient, file: bytes, place: float, change: bytes, cut: bool
) -> None:
    at = int(place * (len(file) - 1))
    check(client.post(UPLOAD, content=file[:at] if cut else file[:at] + change + file[at + len(change) :]))


@FUZZ
@given(
    path=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD"]),
)
def test_fuzzed_paths_are_answered_or_refused(client: TestClient, path: str, method: str) -> None:
    from urllib.parse import quote

    answer = client.request(method, f"/v1/models/{quote(path)}")
    assert answer.status_code < 500


def test_a_compressed_request_is_refused_in_words(client: TestClient) -> None:
    packed = gzip.compress(json.dumps({"instances": [bright()]}).encode())
    answer = client.post(PREDICT, content=packed, headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]) == (
        415,
        "Content-Encoding gzip is not supported. Send the body uncompressed.",
    )


def test_a_method_that_is_not_allowed_is_reported_with_the_one_that_is(client: TestClient) -> None:
    answer = client.get(PREDICT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_a_request_that_waits_holds_its_numbers_once() -> None:
    servable = Brightness(facts("regression", ImageSpec((20_000,), "float32")))
    body = json.dumps({"instances": [[n / 7 for n in range(20_000)]] * 16}).encode()
    with TestClient(service(servable).app()) as client:
        tracemalloc.start()
        try:
            servable.go.clear()
            servable.asked.clear()
            asking = threading.Thread(target=lambda: client.post(PREDICT, content=body))
            before = tracemalloc.get_traced_memory()[0]
            asking.start()
            assert servable.asked.wait(PATIENCE)
            held = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
            servable.go.set()
        asking.join(PATIENCE)
    arrays = 2 * 16 * 20_000 * 4  # of the request, and of its batch
    assert held < len(body) + arrays + 2_000_000, "lists of Python's numbers would be 10 MB more"
