"""Processes that read large requests: parsing JSON holds Python's lock, and an image may take seconds to decode.

A worker is killed if a request takes too long, and its memory is limited. It handles one request at a time, so a few
workers bound what large requests cost. They are started when they are needed first.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np

from modelyard.serving.http.json_tensors import ReadRequest, RequestReader
from modelyard.serving.http.limits import WORKERS, RequestError

_KILL_AGAIN_SECONDS = 0.1
_LENGTHS = struct.Struct(">QQ")
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from modelyard.serving.http.worker import main; main()"
)


class Workers:
    """The workers of a server.

    Args:
        timeout: seconds that a request waits for a worker, and then may take.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()  # the last one used is running already
        self._workers = [_Worker() for _ in range(WORKERS)]
        for worker in self._workers:
            self._free.put_nowait(worker)
        self._threads = ThreadPoolExecutor(WORKERS, "worker")  # they wait for the processes
        self._ending: set[asyncio.Future[None]] = set()

    async def read(self, reader: RequestReader, kind: str, body: bytes, content_type: str) -> ReadRequest:
        """Returns the content of a request; see `RequestReader.read`.

        Raises:
            RequestError: if it is wrong, above a limit, or takes too long.
            TimeoutError: if all workers are busy.
        """
        async with asyncio.timeout(self._timeout):
            worker = await self._free.get()
        read = asyncio.get_running_loop().run_in_executor(self._threads, worker.read, reader, kind, body, content_type)
        try:
            done, _ = await asyncio.wait({read}, timeout=self._timeout)
            if not done:
                raise RequestError(413, f"the request takes more than {self._timeout:g} seconds to decode.")
            return read.result()
        finally:
            if read.done():
                self._free.put_nowait(worker)
            else:
                ending = asyncio.ensure_future(self._end(worker, read))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
                await asyncio.shield(ending)  # a request that is cancelled again still gives its worker back

    async def _end(self, worker: _Worker, read: asyncio.Future[ReadRequest]) -> None:
        while not read.done():  # it may be about to start the process
            worker.kill()
            await asyncio.wait({read}, timeout=_KILL_AGAIN_SECONDS)
        worker.kill()
        read.exception()  # it is known
        self._free.put_nowait(worker)

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """One process, as the server sees it. It is started for the first request, and after a kill for the next."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, reader: RequestReader, kind: str, body: bytes, content_type: str) -> ReadRequest:
        """Returns the content of a request.

        Raises:
            RequestError: if it is wrong, or the process died of it.
        """
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = _start(reader.limits.worker_memory)
        try:
            _send(process.stdin, pickle.dumps((reader, kind, content_type)), body)
            head, data = _receive(process.stdout)
        except (OSError, EOFError, ValueError):  # ValueError: killed, and its pipes are closed
            self.kill()
            raise RequestError(413, "the request can't be decoded within the memory that the server allows.") from None
        answer: dict[str, Any] = json.loads(head)  # no pickle: the process has read what a stranger sent
        if "error" in answer:
            raise RequestError(answer["status"], answer["error"])
        if "traceback" in answer:
            raise RuntimeError(f"in the process that reads large requests:\n{answer['traceback']}")
        inputs, start = {}, 0
        for name, dtype, shape in answer["inputs"]:
            count = math.prod(shape)
            inputs[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
            start += inputs[name].nbytes
        return ReadRequest(inputs, answer["columns"], answer["ids"])

    def kill(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr] # there are pipes


def _start(memory: int) -> subprocess.Popen[bytes]:
    one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path), str(memory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **one_thread},
    )  # fmt: skip


def _send(pipe: IO[bytes] | None, head: bytes, data: bytes | memoryview) -> None:
    assert pipe is not None
    pipe.write(_LENGTHS.pack(len(head), len(data)))
    pipe.write(head)
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> tuple[bytes, bytes]:
    """Raises EOFError at the end."""
    assert pipe is not None
    lengths = _LENGTHS.unpack(_exactly(pipe, _LENGTHS.size))
    return _exactly(pipe, lengths[0]), _exactly(pipe, lengths[1])


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    data: bytes = pipe.read(count)
    if len(data) < count:
        raise EOFError
    return data


# -- in the process -------------------------------------------------------------------------------------------------


def main() -> None:
    """Reads requests from standard input until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of the group: the server answers what it has, then closes the pipe
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):  # not on every system
        resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    gc.disable()  # JSON has no cycles
    gc.freeze()
    while True:
        try:
            head, body = _receive(sys.stdin.buffer)
        except EOFError:
            return
        data, answer = _answer(head, body)
        del body
        _send(out, json.dumps(answer).encode(), data)
        del data
        gc.collect()


def _answer(head: bytes, body: bytes) -> tuple[bytes | memoryview, dict[str, Any]]:
    reader, kind, content_type = pickle.loads(head)  # from the server
    try:
        read = reader.read(kind, body, content_type)
    except RequestError as error:
        return b"", {"status": error.status, "error": error.message}
    except MemoryError:
        return b"", {"status": 413, "error": "the request needs more memory than the server allows."}
    except Exception:  # a mistake of ours, which the server logs
        return b"", {"traceback": traceback.format_exc()}
    arrays = {name: np.ascontiguousarray(values) for name, values in read.inputs.items()}
    inputs = [(name, values.dtype.str, values.shape) for name, values in arrays.items()]
    flat = [values.reshape(-1).view(np.uint8) for values in arrays.values()]
    data = flat[0] if len(flat) == 1 else np.concatenate(flat)  # one array is not copied
    return data.data, {"inputs": inputs, "columns": read.columns, "ids": read.ids}
