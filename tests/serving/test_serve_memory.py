"""Thousands of requests of strangers to a real server: each is answered or refused, and memory stays flat."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import socket
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from test_serve_process import run_folder, serving  # noqa: F401 - a fixture

from waiting import PATIENCE

ROUNDS = int(os.environ.get("MODELYARD_FUZZ_ROUNDS", "6"))
PER_ROUND = 500


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def image(random_: random.Random, side: int) -> bytes:
    out = io.BytesIO()
    kind = random_.choice(["JPEG", "PNG", "WEBP", "BMP"])
    Image.fromarray(np.full((side, side, 3), random_.randrange(256), np.uint8)).save(out, kind)
    return out.getvalue()


def request(random_: random.Random, good: list[Any]) -> tuple[str, bytes, str]:
    """Verb, body and type of a request that is more or less wrong."""
    file = image(random_, random_.choice([1, 8, 50, 300]))
    cut = file[: random_.randrange(len(file))]
    at = random_.randrange(len(file))
    damaged = file[:at] + random_.randbytes(3) + file[at + 3 :]
    as_json = [
        {"instances": [good] * random_.randrange(1, 40)},
        {"instances": [good[:3]]},
        {"instances": [{"b64": base64.b64encode(random_.choice([file, cut, damaged])).decode()}]},
        {"inputs": {"image": [random_.choice([1, None, "x", [], {}, 1e308])]}},
        {"examples": [{"image": random_.choice([good, 1, [1] * 64, {"b64": "?"}])}]},
        {"instances": [good] * 300},
        random_.choice([1, None, [], "x", {}]),
    ]
    verb = random_.choice(["predict", "classify", "regress", "upload", "upload"])
    if verb == "upload":
        return verb, random_.choice([file, cut, damaged, b"", random_.randbytes(2000)]), "image/png"
    odd = [b"[" * 200_000, b'{"instances":' + b"[[]," * 100_000, random_.randbytes(3000), b" " * 1_200_000]
    body = random_.choice(odd) if random_.random() < 0.1 else json.dumps(random_.choice(as_json)).encode()
    return verb, body, "application/json"


@pytest.mark.slow
def test_memory_stays_flat_under_requests_of_strangers(run_folder: Path) -> None:  # noqa: F811
    random_ = random.Random(0)
    good = np.zeros((8, 8, 1), int).tolist()
    words = ["--max_body_mb", "1", "--max_pixels", "80000", "--timeout_secs", "1", "--name", "digits"]
    with serving("--model_dir", str(run_folder), *words) as (base, process):
        host, port = base.removeprefix("http://").strip("/").split(":")
        memory, statuses = [], dict[int, int]()
        slow: list[socket.socket] = []
        with httpx.Client(base_url=base, timeout=PATIENCE) as client:
            for _ in range(ROUNDS):
                for number in range(PER_ROUND):
                    verb, body, kind = request(random_, good)
                    answer = client.post(f"/v1/models/digits:{verb}", content=body, headers={"content-type": kind})
                    assert answer.status_code < 500, (verb, body[:200], answer.text)
                    assert answer.status_code == 200 or answer.json()["error"]
                    statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                    if number % 50 == 0:  # clients that begin and don't go on
                        slow.append(socket.create_connection((host, int(port))))
                        slow[-1].sendall(
                            b"POST /v1/models/digits:predict HTTP/1.1\r\nContent-Le"[: random_.randrange(1, 50)]
                        )
                memory.append(resident_mb(process.pid))
            assert client.get("/readyz").status_code == 200
        for each in slow:
            each.settimeout(5)
            said = each.recv(1000)
            assert said.startswith(b"HTTP/1.1 408"), said
            each.close()
        print("statuses", statuses, "MB after each round", [round(m) for m in memory], "slow clients", len(slow))
        assert {200, 400, 413} <= set(statuses)
        assert memory[-1] < memory[len(memory) // 2] * 1.1 + 10


@pytest.mark.slow
def test_memory_stays_flat_when_nobody_reads_the_responses(run_folder: Path) -> None:  # noqa: F811
    """Requests that are sent at once, without an end, of both kinds."""
    body = b'{"instances":[]}'
    get = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = (
        b"POST /v1/models/digits:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    with serving("--model_dir", str(run_folder), "--name", "digits") as (base, process):
        host, port = base.removeprefix("http://").strip("/").split(":")
        before = resident_mb(process.pid)
        open_: list[socket.socket] = []
        for number in range(200):
            open_.append(socket.create_connection((host, int(port))))
            open_[-1].setblocking(False)
            with contextlib.suppress(OSError):  # it reads no more, or hangs up
                for _ in range(100):
                    open_[-1].send((get, post)[number % 2] * 1000)
        with httpx.Client(base_url=base, timeout=PATIENCE) as client:
            assert client.get("/healthz").status_code == 200
        assert resident_mb(process.pid) < before + 200, "it was gigabytes"
        for each in open_:
            each.close()
