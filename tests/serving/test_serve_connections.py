"""Connections over real sockets: no client keeps responses, requests or connections in the server's memory."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import uvicorn
from numpy.typing import NDArray

from modelyard.compat.uvicorn import ConnectionLimits, protocol_with_limits
from modelyard.data.image_spec import ImageSpec
from modelyard.serving.http.app import Service
from modelyard.serving.http.batching import BatchingOptions
from modelyard.serving.servable import Outputs
from serving_parts import Brightness, facts, service
from waiting import PATIENCE, wait_until

UNREAD_SECONDS = 0.25
FOREVER = 600
BODY = json.dumps({"instances": [[0]] * 64}).encode()
REQUEST = f"POST /v1/models/mine:predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY
DOCUMENT = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


class Talkative(Brightness):
    """Answers with megabytes, more than the system takes for a client that does not read."""

    def predict(self, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        return {"values": np.full((len(inputs["image"]), 12_000), 1 / 3)}


def talkative() -> Service:
    return service(Talkative(facts("regression", ImageSpec((1,), "uint8"))), batching=BatchingOptions(64, 0.0, 1024))


@contextlib.contextmanager
def listening(made: Service, timeout: float = FOREVER, **limits: int) -> Iterator[uvicorn.Server]:
    chosen = {"connections": 100, "pipelined": 8, "unread": 1 << 30, "header_bytes": 1 << 16, **limits}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        protocol = protocol_with_limits(ConnectionLimits(timeout, **chosen))
        config = uvicorn.Config(
            made.app(), http=protocol, ws="none", lifespan="on", log_config=None, timeout_keep_alive=FOREVER
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        yield server
        server.should_exit = server.force_exit = True
        thread.join(PATIENCE)


@pytest.fixture
def server() -> Iterator[uvicorn.Server]:
    with listening(talkative(), UNREAD_SECONDS) as made:
        yield made


def connect(server: uvicorn.Server, *pieces: bytes) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(PATIENCE)
    # Some systems would take a whole response that nobody reads, and the server would have nothing to keep.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
    connection.connect(server.servers[0].sockets[0].getsockname())
    for piece in pieces:
        connection.sendall(piece)
    return connection


def asking(server: uvicorn.Server) -> socket.socket:
    return connect(server, REQUEST)


def said(connection: socket.socket) -> bytes:
    """All that the server says until it hangs up."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed a connection on which it has nothing more to say."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_an_answer_that_nobody_reads_is_dropped(server: uvicorn.Server) -> None:
    with asking(server), asking(server):
        wait_until(lambda: len(server.server_state.connections) == 2)
        wait_until(lambda: not server.server_state.connections)


def test_an_answer_that_is_read_late_is_whole() -> None:
    with listening(talkative()) as server, asking(server) as connection:
        wait_until(lambda: server.server_state.total_requests == 1)
        time.sleep(UNREAD_SECONDS)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert len(json.load(answer)["predictions"]) == 64
        connection.sendall(HEALTH)
        assert connection.recv(12) == b"HTTP/1.1 200", "it is kept for the next request"


# -- many requests at once --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [DOCUMENT, REQUEST], ids=["GET", "POST"])
def test_requests_whose_responses_nobody_reads_are_not_read(request_: bytes) -> None:
    with listening(talkative()) as server, connect(server) as connection:
        connection.setblocking(False)
        sent, quiet = 0, 0
        while quiet < 100:  # until the system takes no more for a server that does not read
            try:
                sent += connection.send(request_ * 500)
                quiet = 0
            except BlockingIOError:
                quiet += 1
                time.sleep(0.01)
            except OSError:  # it hung up: there were too many
                break
        assert sent > 100 * len(request_)
        state = server.server_state
        assert all(len(each.pipeline) <= 8 for each in state.connections)  # type: ignore[union-attr]
        assert state.total_requests <= 9, "one, and those that may wait for it"


def test_a_few_requests_at_once_are_answered_in_order_and_then_the_connection_is_closed() -> None:
    last = HEALTH.replace(b"Host", b"Connection: close\r\nHost")
    with listening(service()) as server:
        with connect(server, HEALTH + DOCUMENT + last) as connection:
            answers = said(connection)
        first, second = answers.index(b"live"), answers.index(b'"openapi"')
        assert first < second < answers.rindex(b"live")
        with connect(server, HEALTH * 50) as connection:
            answers = said(connection)
        assert answers.count(b"HTTP/1.1 200 OK") == 9, "one, and 8 that wait for it"
        assert answers.count(b"connection: close") == 1


def test_responses_that_have_been_unread_longest_are_dropped_when_there_are_too_many() -> None:
    with listening(talkative(), unread=16 << 20) as server, asking(server) as first:  # one is 15 MB
        wait_until(lambda: server.server_state.total_requests == 1)
        with asking(server) as second:
            wait_until(lambda: server.server_state.total_requests == 2)
            wait_until(lambda: len(server.server_state.connections) == 1)
            answer = http.client.HTTPResponse(second)
            answer.begin()
            assert len(json.load(answer)["predictions"]) == 64
        dropped = said(first)
        length = int(dropped.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert len(dropped) < length


# -- many connections -------------------------------------------------------------------------------------------------


def test_idle_connections_give_way_to_new_ones_and_busy_ones_stay() -> None:
    model = Brightness()
    with listening(service(model), connections=3) as server, contextlib.ExitStack() as open_:
        model.go.clear()
        model.asked.clear()
        body = json.dumps({"instances": [np.zeros((4, 4, 3), int).tolist()]}).encode()
        head = f"POST /v1/models/mine:predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        busy = open_.enter_context(connect(server, head.encode() + body))
        assert model.asked.wait(PATIENCE)
        idle = [open_.enter_context(connect(server, b"GET /hea")) for _ in range(10)]
        wait_until(lambda: sum(map(is_closed, idle)) == 8)
        with connect(server, HEALTH) as healthy:
            assert healthy.recv(12) == b"HTTP/1.1 200"
        assert len(server.server_state.connections) <= 3
        model.go.set()
        assert busy.recv(12) == b"HTTP/1.1 200"


def test_a_connection_is_refused_in_words_when_all_others_are_busy() -> None:
    model = Brightness()
    with listening(service(model), connections=1) as server, contextlib.ExitStack() as open_:
        model.go.clear()
        model.asked.clear()
        body = json.dumps({"instances": [np.zeros((4, 4, 3), int).tolist()]}).encode()
        head = f"POST /v1/models/mine:predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        open_.enter_context(connect(server, head.encode() + body))
        assert model.asked.wait(PATIENCE)
        refused = http.client.HTTPResponse(open_.enter_context(connect(server)))
        refused.begin()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert json.load(refused)["error"].startswith("1 connections are open")
        model.go.set()


# -- requests that two programs may read differently -------------------------------------------------------------------

CHUNKED = b"Transfer-Encoding: chunked\r\n"
AMBIGUOUS = {
    "two lengths": b"Content-Length: 4\r\nContent-Length: 40\r\n\r\nabcd",
    "a length and chunks": b"Content-Length: 4\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "chunks and a length": CHUNKED + b"Content-Length: 4\r\n\r\n0\r\n\r\n",
    "an unknown encoding": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "an encoding in disguise": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": b"Content-Length : 4\r\n\r\nabcd",
    "a length with a sign": b"Content-Length: +4\r\n\r\nabcd",
    "a negative length": b"Content-Length: -1\r\n\r\n",
    "a length beyond 64 bits": b"Content-Length: 99999999999999999999999\r\n\r\n",
    "a chunk of another number": CHUNKED + b"\r\n0x4\r\nabcd\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": CHUNKED + b"\r\n" + b"f" * 20 + b"\r\nabcd",
    "a chunk that is longer than it says": CHUNKED + b"\r\n2\r\nabcd\r\n0\r\n\r\n",
    "a folded header": b"X: a\r\n Content-Length: 4\r\n\r\nabcd",
    "a zero in a header": b"X: a\0b\r\n\r\n",
    "a line feed alone": b"X: a\nContent-Length: 4\r\n\r\nabcd",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_request_that_can_be_read_in_two_ways_ends_the_connection(name: str) -> None:
    """A second request hidden in it would be answered, and given to the next client of a proxy."""
    request = b"POST /v1/models/mine:predict HTTP/1.1\r\nHost: x\r\n" + AMBIGUOUS[name]
    with listening(service(), 2.0) as server, connect(server, request + HEALTH) as connection:
        answers = said(connection)
        assert b'"live"' not in answers
        assert b" 500 " not in answers


def test_chunks_without_an_end_are_cut_off() -> None:
    made = service()
    head = b"POST /v1/models/mine:predict HTTP/1.1\r\nHost: x\r\n" + CHUNKED + b"\r\n"
    with listening(made) as server, connect(server, head) as connection:
        with contextlib.suppress(OSError):
            for _ in range(40):  # MB
                connection.sendall(b"100000\r\n" + b" " * 0x100000 + b"\r\n")
        with contextlib.suppress(OSError):  # what it did not read resets the connection
            assert connection.recv(12) in (b"HTTP/1.1 413", b"")
        wait_until(lambda: not server.server_state.connections)
        assert made._bodies.held == 0
