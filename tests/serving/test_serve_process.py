"""`modelyard serve` as a process: it starts, answers, waits for nobody for ever, and ends well."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import modelyard
from conftest import COMMAND, environment, on_engine
from modelyard.errors import CheckpointError, ConfigError, RunError
from modelyard.serving.http.server import listen
from waiting import PATIENCE


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    words = ["train-and-evaluate", "--model", "mlp", "--dataset", "digits", "--train_epochs", "6", "--test_at_end"]
    done = subprocess.run(
        [*COMMAND, *words, *on_engine(), "--model_dir", str(folder)],
        env=environment(), cwd=folder.parent, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@contextlib.contextmanager
def serving(*words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *words],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), "".join(log)
        yield line.split(" at ")[1].strip(), process
    finally:
        process.kill()
        process.wait()


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE)


def raw(base: str, *pieces: bytes, wait: float = 10) -> bytes:
    """What a server says to bytes sent one after the other, until it hangs up."""
    host, port = base.removeprefix("http://").strip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        for piece in pieces:
            connection.sendall(piece)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


def test_a_run_is_served_to_a_client_of_tensorflow_serving(run_folder: Path) -> None:
    digits = load_digits()
    images = (digits.images[:40] * 255 / 16).astype(np.uint8)[..., None]
    file = io.BytesIO()
    Image.fromarray(images[0, ..., 0]).convert("RGB").save(file, "PNG")
    with serving("--model_dir", str(run_folder), "--name", "digits", "--timeout_secs", "2", *on_engine()) as (
        base,
        process,
    ):
        url = f"{base}v1/models/digits"
        assert base.startswith("http://127.0.0.1:")
        state = httpx.get(url).json()["model_version_status"][0]
        assert state["state"] == "AVAILABLE"
        told = httpx.get(f"{base}about").json()
        assert (told["model"], told["dataset"], told["version"]) == ("mlp", "digits", state["version"])
        assert 0.5 < told["test"]["accuracy"] <= 1
        answer = httpx.post(f"{url}:predict", json={"instances": images.tolist()}).json()["predictions"]
        right = [row["label"] == str(target) for row, target in zip(answer, digits.target, strict=False)]
        assert np.mean(right) > 0.6
        whole = {"examples": [{"image": {"b64": base64.b64encode(file.getvalue()).decode()}}]}
        assert httpx.post(f"{url}:classify", json=whole).json()["results"][0][0][0] == answer[0]["label"]
        assert (
            httpx.post(f"{url}:upload", files={"file": file.getvalue()}).json()["predictions"][0]["class"]
            == answer[0]["class"]
        )

        # Clients that are slow, or speak something else.
        head = b"POST /v1/models/digits:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        assert raw(base, head).startswith(b"HTTP/1.1 408")
        assert b"not sent within 2 seconds (1 bytes received)" in raw(base, head + b"\r\n", b"{")
        endless = [b"a" * 32_000] * 3
        assert raw(base, head + b"X: ", *endless).startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))  # httptools, h11
        assert raw(base, b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert httpx.get(f"{base}readyz").status_code == 200

        # Told to stop while a request is being sent: it is still answered.
        body = json.dumps({"instances": images[:1].tolist()}).encode()
        host, port = base.removeprefix("http://").strip("/").split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            head = "POST /v1/models/digits:predict HTTP/1.1\r\nHost: localhost\r\n"
            start = f"{head}Content-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(start + body[:50])
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            connection.sendall(body[50:])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_newer_checkpoint_is_taken_up_and_ctrl_c_ends_it_well(run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(run_folder, folder)
    newest = max((folder / "checkpoints").iterdir())
    newest.rename(tmp_path / newest.name)
    with serving("--model_dir", str(folder), "--checkpoint", "latest", *on_engine()) as (base, process):
        url = f"{base}v1/models/copy"
        first = httpx.get(f"{base}readyz").json()["version"]
        (tmp_path / newest.name).rename(newest)
        seen: set[str] = set()
        deadline = time.monotonic() + 60
        while len(seen) < 2 and time.monotonic() < deadline:
            answer = httpx.post(f"{url}:predict", json={"instances": [np.zeros((8, 8, 1), int).tolist()]})
            assert answer.status_code == 200
            seen.add(answer.headers["modelyard-version"])
        assert seen == {first, str(int(newest.name.removeprefix("step-")))}
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


def test_what_can_not_be_served_is_a_sentence(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="either a run"):
        modelyard.serve()
    with pytest.raises(RunError, match="does not exist"):
        modelyard.serve(tmp_path / "nothing")
    with pytest.raises(RunError, match="does not exist, or is not a folder"):
        modelyard.serve(export=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="part of a path"):
        modelyard.serve(run_folder, name="../secret")
    with pytest.raises(ConfigError, match="has no effect on an export"):
        modelyard.serve(export=tmp_path, engine="jax")
    with pytest.raises(ConfigError, match="must be above 0"):
        modelyard.serve(run_folder, max_batch=0)
    for key in ("max_delay_ms", "timeout_secs", "max_body_mb"):
        with pytest.raises(ConfigError, match=f"{key}: must be a finite number of at most 1,000,000,000"):
            modelyard.serve(run_folder, **{key: float("inf")})
    with pytest.raises(CheckpointError, match="no checkpoint '77'"):
        modelyard.serve(run_folder, checkpoint=77)


def test_of_two_servers_on_one_port_the_second_is_refused(run_folder: Path) -> None:
    with listen("127.0.0.1", 0) as first:
        with pytest.raises(RunError, match="Give another --port"):
            modelyard.serve(run_folder, port=first.getsockname()[1])
        with socket.create_connection(first.getsockname(), timeout=PATIENCE):
            pass  # clients that come while the model is loaded wait


def test_of_servers_that_start_at_the_same_moment_one_gets_the_port(run_folder: Path) -> None:
    """Several sockets may bind an address that can be used again; only one may listen."""
    for _ in range(20):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        together = threading.Barrier(4)
        outcomes: list[str] = []

        def start(port: int = port, together: threading.Barrier = together, outcomes: list[str] = outcomes) -> None:
            together.wait()
            try:
                with listen("127.0.0.1", port):
                    outcomes.append("listens")
                    together.wait()
            except RunError as error:
                outcomes.append(str(error))
                together.wait()

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count("listens") == 1, outcomes
        assert sum("Give another --port" in each for each in outcomes) == 3


@pytest.mark.slow
def test_the_second_server_command_ends_with_status_2(run_folder: Path) -> None:
    with serving("--model_dir", str(run_folder), *on_engine()) as (base, _):
        port = base.rsplit(":", 1)[1].strip("/")
        second = subprocess.run(
            [*COMMAND, "serve", "--model_dir", str(run_folder), "--port", port, *on_engine()],
            env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (second.returncode, "Traceback" in second.stderr) == (2, False)
        assert "Give another --port" in " ".join(second.stderr.split())


def test_a_run_without_a_checkpoint_is_not_served(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("step-*", "best"))
    for name in ("checkpoints", "best"):
        shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        modelyard.serve(tmp_path / "run")


def test_without_the_extra_it_says_what_to_install(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.startswith(("modelyard.serving.", "modelyard.compat.uvicorn"))]
    for name in loaded:
        package, _, module = name.rpartition(".")
        if module in ("app", "limits", "server", "uvicorn"):
            monkeypatch.setattr(
                sys.modules[package], module, sys.modules[name]
            )  # restored for the tests after this one
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    from modelyard.errors import UserError

    with pytest.raises(UserError, match=r"pip install 'modelyard\[serve\]'"):
        modelyard.serve(run_folder)


def test_a_server_that_is_not_started_yet_has_imported_no_framework() -> None:
    """Keras's backend is chosen by the run that is served, so nothing may import Keras before."""
    code = (
        "import sys, modelyard.compat.uvicorn, modelyard.serving.http.app, modelyard.serving.http.server\n"
        "print([name for name in ('keras', 'tensorflow', 'jax') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
