"""Large requests: processes of their own read them, so they hold up no other request, and cost bounded memory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import pickle
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient

from modelyard.data.image_spec import ImageSpec
from modelyard.serving.http import json_tensors, worker
from modelyard.serving.http.app import Service
from modelyard.serving.http.limits import SMALL_BODY, SMALL_PIXELS, WORKERS, Limits
from serving_parts import Brightness, facts, service
from waiting import PATIENCE, wait_until

BASE = "/v1/models/mine"
PADDING = " " * (SMALL_BODY + 1)
FOREVER = 600.0


def bright(value: int = 255) -> list[Any]:
    return np.full((4, 4, 3), value, np.uint8).tolist()


def file_of(shape: tuple[int, ...], form: str = "PNG", **save: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full(shape, 255, np.uint8)).save(out, form, **save)
    return out.getvalue()


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


@pytest.fixture(scope="module")
def made() -> Service:
    return service(limits=Limits(timeout=FOREVER, max_body=4 << 20, max_bodies=32 << 20, max_pixels=20_000_000))


@pytest.fixture(scope="module")
def client(made: Service) -> Iterator[TestClient]:
    with TestClient(made.app()) as client:
        yield client
    assert [each._process for each in made._workers._workers] == [None] * WORKERS, "no process is left"


@pytest.fixture
def only_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may do nothing that takes long: no large body is read, and no large image decoded."""
    read, decode = json_tensors.RequestReader.read, ImageSpec.decode

    def read_small(self: Any, kind: str, body: bytes, content_type: str = "") -> Any:
        assert len(body) <= SMALL_BODY
        return read(self, kind, body, content_type)

    def decode_small(self: Any, data: bytes, name: str) -> Any:
        with Image.open(io.BytesIO(data)) as image:
            assert image.width * image.height <= SMALL_PIXELS
            assert image.format != "TIFF"
        return decode(self, data, name)

    monkeypatch.setattr(json_tensors.RequestReader, "read", read_small)
    monkeypatch.setattr(ImageSpec, "decode", decode_small)


JSON = {"content-type": "application/json"}
ASKED = [
    ("predict", json.dumps({"instances": [bright(), bright(0)]}), JSON),
    ("predict", json.dumps({"inputs": {"image": [bright(), bright(0)]}}), JSON),
    (
        "predict",
        json.dumps({"signature_name": "image_with_id", "inputs": {"image": [bright()], "id": ["\ud800"]}}),
        JSON,
    ),
    ("classify", json.dumps({"examples": [{"image": b64(file_of((9, 9, 3)))}]}), JSON),
    ("predict", json.dumps({"instances": [bright()[:3]]}), JSON),
    ("predict", json.dumps({"instances": [b64(b"GIF89a, really")]}), JSON),
    ("predict", "[" * 100_000, JSON),
    ("predict", '{"instances": [NaN]}', JSON),
]


@pytest.mark.parametrize("number", range(len(ASKED)))
def test_a_large_body_is_answered_as_a_small_one(client: TestClient, only_in_workers: None, number: int) -> None:
    verb, body, headers = ASKED[number]
    small = client.post(f"{BASE}:{verb}", content=body, headers=headers)
    large = client.post(f"{BASE}:{verb}", content=body + PADDING, headers=headers)
    assert (large.status_code, large.json()) == (small.status_code, small.json())


@pytest.mark.parametrize(
    ("shape", "form"), [((3000, 3000, 3), "PNG"), ((3000, 3000), "GIF"), ((2000, 2000, 3), "WEBP"), ((9, 9, 3), "TIFF")]
)
def test_a_large_image_in_a_small_file_is_decoded_elsewhere(
    client: TestClient, made: Service, only_in_workers: None, shape: tuple[int, ...], form: str
) -> None:
    file = file_of(shape, form)
    assert len(file) <= SMALL_BODY
    assert client.post(f"{BASE}:upload", content=file).json()["predictions"][0]["class"] == 2
    assert client.post(f"{BASE}:upload", files={"file": file}).json()["predictions"][0]["class"] == 2


def test_a_large_upload_is_read_elsewhere(client: TestClient, only_in_workers: None) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "PNG")
    assert len(out.getvalue()) > SMALL_BODY
    form = client.post(f"{BASE}:upload", files={"file": out.getvalue()}).json()
    assert form == client.post(f"{BASE}:upload", content=out.getvalue()).json()
    assert len(form["predictions"]) == 1


def test_an_image_of_too_many_pixels_is_not_decoded_at_all(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orientation of a PNG may come after its pixels: whoever asks for it decodes them."""
    from modelyard.data import images

    monkeypatch.setattr(images, "_orientation", lambda image: pytest.fail("it decodes"))
    refused = client.post(f"{BASE}:upload", content=file_of((5000, 5000)))
    assert refused.status_code == 413
    assert "25,000,000" in refused.json()["error"] or "5000×5000" in refused.json()["error"]


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM", "JPEG"])
def test_images_that_are_much_larger_than_their_files_are_refused(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(ImageSpec, "decode", lambda *_: pytest.fail("it decodes"))
    out = io.BytesIO()
    Image.new("1" if form == "TIFF" else "L", (5000, 5000)).save(out, form, **FLAT.get(form, {}))
    file = out.getvalue()[:200_000]  # the header is enough
    refused = client.post(f"{BASE}:upload", content=file)
    assert (refused.status_code, "20,000,000 (--max_pixels)" in refused.json()["error"]) == (413, True), refused.text


FLAT: dict[str, dict[str, Any]] = {"TIFF": {"compression": "group4"}}


def test_only_the_first_frame_of_an_animation_is_decoded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [Image.new("L", (30, 30), 255 - n % 2) for n in range(500)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    monkeypatch.setattr("PIL.GifImagePlugin.GifImageFile.seek", lambda *_: pytest.fail("it looks at more frames"))
    assert client.post(f"{BASE}:upload", content=out.getvalue()).json()["predictions"][0]["class"] == 2


def test_a_jpeg_of_many_scans_is_refused(client: TestClient) -> None:
    file = file_of((50, 50, 3), "JPEG", progressive=True)
    assert client.post(f"{BASE}:upload", content=file).status_code == 200
    scan = file.rindex(b"\xff\xda")
    refused = client.post(f"{BASE}:upload", content=file[:-2] + 600 * file[scan:-2] + b"\xff\xd9")
    assert (refused.status_code, "scans" in refused.json()["error"]) == (400, True)


def test_a_request_that_takes_too_long_ends_with_its_process() -> None:
    made = service(limits=Limits(timeout=FOREVER))
    made._workers._timeout = 0.001
    with TestClient(made.app()) as client:
        late = client.post(f"{BASE}:predict", content=ASKED[0][1] + PADDING)
        assert (late.status_code, late.json()["error"]) == (413, "the request takes more than 0.001 seconds to decode.")
        assert [each._process for each in made._workers._workers] == [None] * WORKERS
        assert client.get("/healthz").status_code == 200


def test_a_request_that_needs_too_much_memory_is_refused_and_the_next_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Enough to start, not enough for the lists: [] is 3 bytes in JSON and 64 in memory.
    monkeypatch.setattr(Limits, "worker_memory", property(lambda self: 300 << 20))
    limits = Limits(timeout=FOREVER)
    with TestClient(service(limits=limits).app()) as client:
        refused = client.post(f"{BASE}:predict", content=b'{"instances":[' + b"[]," * (5 << 20) + b"[]]}")
        assert refused.status_code == 413
        assert "memory" in refused.json()["error"]
        assert client.post(f"{BASE}:predict", content=ASKED[0][1] + PADDING).status_code == 200


class Mistaken(json_tensors.RequestReader):
    """Has a mistake."""

    def read(self, kind: str, body: bytes, content_type: str = "") -> Any:
        raise ZeroDivisionError


def test_a_mistake_in_a_worker_is_an_internal_error_of_the_server() -> None:
    reader = Mistaken(facts(), Limits())
    _, answer = worker._answer(pickle.dumps((reader, "predict", "")), b"")
    assert list(answer) == ["traceback"]
    assert "ZeroDivisionError" in answer["traceback"]


def test_a_worker_ends_with_the_server_that_started_it() -> None:
    """A killed server can't end it: it sees that nobody is there."""
    process = worker._start(1 << 30)
    assert process.stdin is not None
    process.stdin.close()
    wait_until(lambda: process.poll() is not None)
    assert process.returncode == 0


def test_a_worker_that_dies_is_replaced(client: TestClient, made: Service) -> None:
    def ask() -> int:
        return client.post(f"{BASE}:predict", content=ASKED[0][1] + PADDING).status_code

    assert ask() == 200
    for each in made._workers._workers:
        if each._process is not None:
            each._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                each._process.wait(PATIENCE)
    assert ask() == 200


def test_a_request_that_is_cancelled_twice_gives_its_worker_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(worker._Worker, "read", lambda *_: ends.wait(PATIENCE))

    async def cancel_twice() -> None:
        workers = worker.Workers(FOREVER)
        asked = asyncio.ensure_future(workers.read(json_tensors.RequestReader(facts(), Limits()), "predict", b"", ""))
        while workers._free.qsize() == WORKERS:
            await asyncio.sleep(0)
        for _ in range(2):
            asked.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        ends.set()
        while workers._free.qsize() < WORKERS:
            await asyncio.sleep(0.001)
        with pytest.raises(asyncio.CancelledError):
            await asked
        workers.close()

    asyncio.run(asyncio.wait_for(cancel_twice(), PATIENCE))


@given(st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
))  # fmt: skip
def test_a_response_in_pieces_is_the_response(value: Any) -> None:
    before, json_tensors._PIECE = json_tensors._PIECE, 3
    try:
        assert b"".join(json_tensors.json_pieces(value)) == json_tensors.to_json(value)
    finally:
        json_tensors._PIECE = before


def test_a_large_response_is_written_in_small_pieces() -> None:
    rows = {"predictions": np.arange(300_000.0).reshape(30, 10, 1000).tolist()}
    pieces = list(json_tensors.json_pieces(rows))
    assert max(map(len, pieces)) < 100_000
    assert json.loads(b"".join(pieces)) == rows


def test_files_for_a_model_of_numbers_are_refused() -> None:
    servable = Brightness(facts(takes_files=False))
    with TestClient(service(servable).app()) as client:
        for verb, asked in (
            ("predict", {"instances": [b64(file_of((9, 9)))]}),
            ("predict", {"signature_name": "bytes", "instances": [b64(file_of((9, 9)))]}),
        ):
            refused = client.post(f"{BASE}:{verb}", json=asked)
            assert (refused.status_code, "this model takes numbers" in refused.json()["error"].lower()) == (400, True)
