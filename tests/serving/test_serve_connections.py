"""Connections over real sockets: who does not read an answer does not keep it in the server's memory."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import uvicorn
from numpy.typing import NDArray

from modelyard.compat.uvicorn import ConnectionLimits, protocol_with_limits
from modelyard.data.image_spec import ImageSpec
from modelyard.serving.http.batching import BatchingOptions
from modelyard.serving.servable import Outputs
from serving_parts import Brightness, facts, service

PATIENCE = 0.25
BODY = json.dumps({"instances": [[0]] * 64}).encode()
REQUEST = f"POST /v1/models/mine:predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY


class Talkative(Brightness):
    """Answers with megabytes, more than the system takes for a client that does not read."""

    def predict(self, images: NDArray[Any]) -> Outputs:
        return {"values": np.full((len(images), 12_000), 1 / 3)}


@pytest.fixture
def server() -> Iterator[uvicorn.Server]:
    app = service(Talkative(facts("regression", ImageSpec((1,), "uint8"))), batching=BatchingOptions(64, 0.0, 64)).app()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            app, http=protocol_with_timeouts(PATIENCE), ws="none", lifespan="on", log_config=None, timeout_keep_alive=10
        )
        made = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: made.run(sockets=[listener]), daemon=True)
        thread.start()
        eventually(lambda: made.started)
        yield made
        made.should_exit = made.force_exit = True
        thread.join(20)


def eventually(met: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def asking(server: uvicorn.Server) -> socket.socket:
    connection = socket.create_connection(server.servers[0].sockets[0].getsockname(), timeout=20)
    connection.sendall(REQUEST)
    return connection


def test_an_answer_that_nobody_reads_is_dropped(server: uvicorn.Server) -> None:
    with asking(server), asking(server):
        eventually(lambda: len(server.server_state.connections) == 2)
        eventually(lambda: not server.server_state.connections)


def test_an_answer_that_is_read_late_is_whole(server: uvicorn.Server) -> None:
    with asking(server) as connection:
        eventually(lambda: server.server_state.total_requests == 1)
        time.sleep(PATIENCE)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert len(json.load(answer)["predictions"]) == 64
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200", "it is kept for the next request"
