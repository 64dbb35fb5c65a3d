"""Compares a server under load from a second process with the same model called in this process.

    python benchmarks/serve.py [--model resnet20] [--batch 32] [--seconds 4] [--rounds 3]

Prints images per second in process and through HTTP, and their ratio; p50 and p99 of the latency at a quarter and half
of that load against the bound; and the result of 1,000 requests while a new version takes over.

Latency is measured at the client: from the start of the request to the last byte of the response.

The client takes CPU time from the model, which clients on other machines would not. So there are two ratios: to the
model alone, and to the model beside a process that uses as much of a core as the client did. CPU milliseconds per
image of the server, the client and the model in process show where the time goes. Other load affects them less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

NAME = "loaded"
DELAY_MS = 5.0


# -- the client, a separate process --------------------------------------------------------------------------------


class Connection:
    """HTTP/1.1 by hand: a client library would cost more than the server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, request: bytes) -> tuple[int, bytes]:
        """Returns status and body."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        return int(head.split(" ")[1]), await reader.readexactly(length)


def requests_of(shape: list[int], images: int, kind: str, count: int = 16) -> list[bytes]:
    """Makes requests with random images."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        pixels = rng.integers(0, 256, (images, *shape), np.uint8)
        if kind == "json":
            body = json.dumps({"instances": pixels.tolist()}, separators=(",", ":")).encode()
        else:
            import base64
            import io

            from PIL import Image

            rows = []
            for one in pixels:
                file = io.BytesIO()
                Image.fromarray(one.squeeze()).save(file, "JPEG")
                rows.append({"b64": base64.b64encode(file.getvalue()).decode()})
            body = json.dumps({"instances": rows}).encode()
        head = f"POST /v1/models/{NAME}:predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        made.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return made


async def closed_loop(port: int, made: list[bytes], connections: int, seconds: float) -> dict[str, Any]:
    """Sends the next request of each connection when the last is answered."""
    latencies: list[float] = []
    failed, cpu = 0, time.process_time()
    end = time.perf_counter() + seconds

    async def one(number: int) -> None:
        nonlocal failed
        connection = Connection(port)
        while time.perf_counter() < end:
            began = time.perf_counter()
            status, _ = await connection.post(made[number % len(made)])
            latencies.append(time.perf_counter() - began)
            failed += status != 200

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(connections)))
    found = summary(latencies, failed, time.perf_counter() - began)
    return {**found, "cpu": time.process_time() - cpu}


async def open_loop(port: int, made: list[bytes], rate: float, seconds: float) -> dict[str, Any]:
    """Sends ``rate`` requests per second at random times, without waiting for responses."""
    latencies: list[float] = []
    failed = 0
    free: list[Connection] = []

    async def one(request: bytes) -> None:
        nonlocal failed
        connection = free.pop() if free else Connection(port)
        began = time.perf_counter()  # the client itself is late if it has no core of its own
        try:
            status, _ = await connection.post(request)
        except (OSError, asyncio.IncompleteReadError):
            failed += 1
            return
        latencies.append(time.perf_counter() - began)
        failed += status != 200
        free.append(connection)

    sent, tasks = 0, set[asyncio.Task[None]]()
    chance = random.Random(0)
    began = due = time.perf_counter()
    while due < began + seconds:
        due += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(one(made[sent % len(made)]))
        sent += 1
        tasks.add(task)
        task.add_done_callback(tasks.discard)  # a soak sends millions
    await asyncio.gather(*tasks)
    return summary(latencies, failed, time.perf_counter() - began)


async def during_swap(port: int, made: list[bytes], total: int, folder: str) -> dict[str, Any]:
    """Sends ``total`` requests from 8 connections while version 2 takes over."""
    done, failed, new = 0, 0, Path(folder, ".partial-2")
    latencies: list[float] = []
    versions: set[int] = set()

    async def one(number: int) -> None:
        nonlocal done, failed
        connection = Connection(port)
        while done < total or len(versions) < 2:
            done += 1
            began = time.perf_counter()
            try:
                status, body = await connection.post(made[number % len(made)])
                failed += status != 200
                versions.add(len(json.loads(body)["predictions"][0]["probabilities"]))  # versions differ in classes
            except (OSError, asyncio.IncompleteReadError, KeyError, ValueError):
                failed += 1
                connection = Connection(port)
            latencies.append(time.perf_counter() - began)
            if done > total // 10 and new.exists():
                new.rename(Path(folder, "2"))
            await asyncio.sleep(0.03)

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(8)))
    return {**summary(latencies, failed, time.perf_counter() - began), "versions": len(versions)}


def summary(latencies: list[float], failed: int, seconds: float) -> dict[str, Any]:
    """Returns rates and percentiles, in milliseconds."""
    p50, p99 = np.percentile(latencies, [50, 99]) * 1000
    return {"requests": len(latencies), "failed": failed, "rate": len(latencies) / seconds, "p50": p50, "p99": p99}


def client(words: list[str]) -> dict[str, Any]:
    """Runs a function of this file in a second process."""
    done = subprocess.run([sys.executable, __file__, "client", *words], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def client_main(words: list[str]) -> None:
    """The second process."""
    what, port, shape, images, kind, *rest = words
    made = requests_of(json.loads(shape), int(images), kind)
    if what == "closed":
        found = asyncio.run(closed_loop(int(port), made, int(rest[0]), float(rest[1])))
    elif what == "open":
        found = asyncio.run(open_loop(int(port), made, float(rest[0]), float(rest[1])))
    else:
        found = asyncio.run(during_swap(int(port), made, int(rest[0]), rest[1]))
    print(json.dumps(found))


# -- the server -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(*words: str) -> Iterator[tuple[int, int]]:
    """A server process; yields its port and its process id."""
    command = [sys.executable, "-m", "modelyard", "serve", "--name", NAME, "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield int(line.rsplit(":", 1)[1].strip(" /\n")), process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "the server did not end well"
    finally:
        process.kill()


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process."""
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


@contextlib.contextmanager
def busy(share: float) -> Iterator[None]:
    """Starts a process that uses this fraction of a core."""
    turn = f"""
import time
while True:
    began, cpu = time.perf_counter(), time.process_time()
    while time.process_time() < cpu + {share} * 0.01: pass
    time.sleep(max(0, began + 0.01 - time.perf_counter()))
"""
    process = subprocess.Popen([sys.executable, "-c", turn])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def resident_mb(pid: int) -> float:
    """Returns the memory of a process."""
    return float(psutil.Process(pid).memory_info().rss / 2**20)


def write_version(folder: Path, classes: int, shape: list[int]) -> None:
    """Writes a SavedModel as `modelyard export` does."""
    import tensorflow as tf

    weights = tf.Variable(tf.random.normal((int(np.prod(shape)), classes)))
    module = tf.Module()
    module.weights = weights

    def call(image: Any) -> dict[str, Any]:
        logits = tf.reshape(tf.cast(image, tf.float32) / 255, (-1, int(np.prod(shape)))) @ weights
        return {"class": tf.argmax(logits, -1), "probabilities": tf.nn.softmax(logits)}

    signature = tf.function(call, input_signature=[tf.TensorSpec((None, *shape), tf.uint8, name="image")])
    tf.saved_model.save(module, str(folder), signatures={"serving_default": signature})
    names = [str(number) for number in range(classes)]
    kept = {"format": "saved_model", "model": "linear", "dataset": "random", "step": 1, "kind": "classification"}
    image = {"shape": shape, "dtype": "uint8"}
    (folder / "modelyard.json").write_text(json.dumps({**kept, "image": image, "classes": names}))


class InProcess:
    """The same model called in this process, one batch after the other."""

    def __init__(self, run: Path, engine: str, batch: int) -> None:
        from modelyard.serving.run_model import RunServable, open_run

        self.servable, self.batch = RunServable(open_run(run, engine=engine)), batch
        image = self.servable.info.image
        self.images = np.random.default_rng(0).integers(0, 256, (batch, *image.shape)).astype(image.dtype)
        self.rate(1)

    def rate(self, seconds: float) -> float:
        """Images per second."""
        count, began, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < began + seconds:
            self.servable.predict({"image": self.images})
            count += self.batch
        self.milliseconds = 1000 * (time.process_time() - cpu) / count
        """CPU milliseconds per image."""
        return count / (time.perf_counter() - began)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--shape", default="32,32,3")
    parser.add_argument("--engine", default="tensorflow")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=4, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["load", "swap"])
    given = parser.parse_args()
    shape = [int(n) for n in given.shape.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if given.only != "swap":
            loaded(Path(folder), given, shape)
        if given.only != "load":
            swapped(Path(folder), shape)


def loaded(folder: Path, given: argparse.Namespace, shape: list[int]) -> None:
    """Measures throughput and latency; model and server take turns, so that other load affects both equally."""
    train = ["train", "--model", given.model, "--dataset", "synthetic", "--synthetic_shape", given.shape]
    train += ["--train_steps", "1", "--engine", given.engine, "--model_dir", str(folder / "run")]
    subprocess.run([sys.executable, "-m", "modelyard", *train], check=True, capture_output=True)
    here = InProcess(folder / "run", given.engine, given.batch)
    print(f"{given.model} {given.shape} on {given.engine}, batch {given.batch}, {os.cpu_count()} cores")
    words = ["--model_dir", str(folder / "run"), "--engine", given.engine, "--max_batch", str(given.batch)]
    with server(*words, "--max_delay_ms", str(DELAY_MS)) as (port, pid):
        begin = [str(port), json.dumps(shape)]
        client(["closed", *begin, "1", "json", "64", "2"])
        before = resident_mb(pid)
        for images, kind, connections in ((1, "jpeg", 2 * given.batch), (1, "json", 2 * given.batch), (8, "json", 16)):
            turns = []
            for _ in range(given.rounds):
                alone, of_model = here.rate(given.seconds), here.milliseconds
                used = cpu_seconds(pid)
                found = client(["closed", *begin, str(images), kind, str(connections), str(given.seconds)])
                rate, count = found["rate"] * images, found["requests"] * images
                cpu = {"server": cpu_seconds(pid) - used, "client": found["cpu"], "model": of_model * count / 1000}
                with busy(found["cpu"] * found["rate"] / found["requests"]):
                    beside = here.rate(given.seconds)
                turns.append((rate / beside, rate / alone, rate, alone, beside, found, count, cpu))
            ratio, to_alone, rate, alone, beside, found, count, cpu = sorted(turns, key=lambda t: t[0])[len(turns) // 2]
            print(
                f"{images} images ({kind}) a request, {connections} connections: {rate:,.0f} images/s; in process "
                f"beside a busy process {beside:,.0f}, ratio {ratio:.2f} ({', '.join(f'{t[0]:.2f}' for t in turns)}); "
                f"alone {alone:,.0f}, ratio {to_alone:.2f} ({', '.join(f'{turn[1]:.2f}' for turn in turns)}); "
                f"p50 {found['p50']:.0f} ms, p99 {found['p99']:.0f} ms; CPU ms per image: "
                f"{', '.join(f'{name} {1000 * each / count:.2f}' for name, each in cpu.items())}; "
                f"{sum(turn[5]['failed'] for turn in turns)} failed",
                flush=True,
            )
        for share in (0.25, 0.5):
            alone = here.rate(given.seconds)
            found = client(["open", *begin, "1", "jpeg", str(alone * share), str(2 * given.seconds)])
            full = 1000 * given.batch / alone
            print(
                f"{share:.0%} of that load, single images at random times: p50 {found['p50']:.1f} ms, p99 "
                f"{found['p99']:.1f} ms; delay + a full batch {DELAY_MS + full:.1f}, + one under way "
                f"{DELAY_MS + 2 * full:.1f}; {found['failed']} of {found['requests']} failed",
                flush=True,
            )
        print(f"memory of the server: {before:.0f} MB before, {resident_mb(pid):.0f} MB after")


def swapped(folder: Path, shape: list[int]) -> None:
    """Sends requests while a new version takes over."""
    export = folder / "export"
    write_version(export / "1", 10, shape)
    write_version(export / ".partial-2", 11, shape)
    with server("--export", str(export)) as (port, _):
        found = client(["swap", str(port), json.dumps(shape), "1", "json", "1000", str(export)])
    print(
        f"swap: {found['requests']} requests, {found['failed']} failed, answered by {found['versions']} versions; "
        f"p50 {found['p50']:.1f} ms, p99 {found['p99']:.1f} ms"
    )


if __name__ == "__main__":
    client_main(sys.argv[2:]) if sys.argv[1:2] == ["client"] else main()
