"""uvicorn's private APIs. Tested with uvicorn 0.54; versions from 0.30 on are allowed but not tested.

uvicorn itself never times out a client that sends its headers byte by byte or does not read its responses. With
httptools it accepts gigabytes of headers, and goes on reading while requests wait for the response to another one.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl

if TYPE_CHECKING:
    _Base = Any
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as _Base

_USES_HTTPTOOLS = hasattr(_Base, "on_body")
_CHECKS_PER_TIMEOUT = 4
_REQUEST_TIMEOUTS = 4
"""A whole request (send, decode, compute, read the response) may take this many times the timeout."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections. `modelyard.serving.http.limits` chooses them.

    Args:
        timeout: seconds within which a client must send the headers of a request. Within four times as long, the
            request must be answered and the client must read the response.
        connections: open connections. For one more, the one that has been idle longest is closed.
        pipelined: requests of a connection that wait for the response to another one. It is closed after them.
        unread: bytes of responses that nobody has read, of all connections. Above, the oldest are dropped.
        header_bytes: bytes of the headers of a request.
    """

    timeout: float
    connections: int
    pipelined: int
    unread: int
    header_bytes: int


def protocol_with_limits(limits: ConnectionLimits) -> type[Any]:
    """Returns uvicorn's HTTP protocol class with limits on connections."""
    seconds = limits.timeout

    class Protocol(_Base):
        """One connection."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.flow = _Flow(transport, self._may_read)
            self._idle_since = self.loop.time()
            self._headers_since: float | None = self._idle_since
            self._busy: tuple[Any, float] = (None, 0.0)
            self._unread_since: float | None = None
            self._timer = self.loop.call_later(seconds / _CHECKS_PER_TIMEOUT, self._check_timeouts)
            self._header_bytes = 0
            self._is_over = False
            if len(self.connections) > limits.connections:
                self._make_room()

        def _make_room(self) -> None:
            """Closes the connection that has been idle longest; this one, if all others have a request."""
            idle = [each for each in self.connections if each is not self and each._is_idle()]
            if idle:
                oldest = min(idle, key=lambda each: each._idle_since)
                self.connections.discard(oldest)
                oldest.transport.abort()
            else:
                self._reject(503, f"{limits.connections} connections are open. Try again in a moment.")

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._is_over:
                return
            if self._headers_since is None and self._is_idle():
                self._headers_since = self.loop.time()
            self._header_bytes += len(data)
            super().data_received(data)
            if not self._is_idle():
                self._headers_since = None
            if _USES_HTTPTOOLS and self._header_bytes > limits.header_bytes and not self.transport.is_closing():
                if self._is_idle():
                    self._reject(431, f"the request headers are longer than {limits.header_bytes:,} bytes.")
                else:  # trailers: HTTP allows headers after the body, too
                    self.transport.abort()

        # httptools parses all that was received at once, which may be thousands of requests. h11 stops after each.

        def on_message_begin(self) -> None:
            if not self._is_over:
                super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            if not self._is_over:
                super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._is_over:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if not self._is_over and len(self.pipeline) >= limits.pipelined:
                self._is_over = True
                self.cycle.keep_alive = False  # the last one that is answered
                self.flow.pause_reading()
            if not self._is_over:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._header_bytes = 0
            if not self._is_over:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._header_bytes = 0
            if not self._is_over:
                super().on_message_complete()

        def on_response_complete(self) -> None:
            self._idle_since = self.loop.time()
            super().on_response_complete()

        def pause_writing(self) -> None:
            """Called when the client has not read enough: no more of its requests are read."""
            super().pause_writing()
            self.flow.pause_reading()
            if self._unread_since is None:
                self._unread_since = self.loop.time()
            self._drop_unread()

        def resume_writing(self) -> None:
            """Called when the client has read."""
            self._unread_since = None
            super().resume_writing()
            self.flow.resume_reading()

        def _may_read(self) -> bool:
            """Returns whether the next request may be read: none waits, and the client reads its responses."""
            return not (self._is_over or self.flow.write_paused or getattr(self, "pipeline", None))

        def _drop_unread(self) -> None:
            """Drops the responses that have been unread longest while there are too many bytes of them."""
            unread = [each for each in self.connections if each._unread_since is not None]
            total = sum(each.transport.get_write_buffer_size() for each in unread)
            for each in sorted(unread, key=lambda each: each._unread_since):
                if total <= limits.unread:
                    break
                total -= each.transport.get_write_buffer_size()
                each.transport.abort()

        def _is_idle(self) -> bool:
            """Returns whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def _check_timeouts(self) -> None:
            now = self.loop.time()
            self._timer = self.loop.call_later(seconds / _CHECKS_PER_TIMEOUT, self._check_timeouts)
            if self._is_unread_too_long(now):
                self.transport.abort()
            elif self.transport.is_closing():
                return
            elif self._is_idle():
                if self._headers_since is not None and now - self._headers_since > seconds:
                    self._reject(408, f"the request headers were not sent within {seconds:g} seconds.")
            elif self.cycle is not self._busy[0]:
                self._busy = (self.cycle, now)
            elif now - self._busy[1] > _REQUEST_TIMEOUTS * seconds:
                self.transport.abort()

        def _is_unread_too_long(self, now: float) -> bool:
            """Returns whether the client is too slow to read. uvicorn counts the response as done by then."""
            if not self.transport.get_write_buffer_size():
                self._unread_since = None
            elif self._unread_since is None:
                self._unread_since = now
            return self._unread_since is not None and now - self._unread_since > _REQUEST_TIMEOUTS * seconds

        def _reject(self, status: int, message: str) -> None:
            body = json.dumps({"error": message})
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json"
            if status == 503:
                head += "\r\nRetry-After: 1"
            head += f"\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write((head + body).encode("ascii"))
            self.transport.close()

    return Protocol


class _Flow(FlowControl):
    """uvicorn's flow control, which reads on only if the connection may."""

    def __init__(self, transport: asyncio.Transport, may_read: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._may_read = may_read

    def resume_reading(self) -> None:
        """Reads on, if the connection may."""
        if self._may_read():
            super().resume_reading()


class Server(uvicorn.Server):
    """uvicorn's server with a callback that is called once it accepts connections.

    Args:
        config: uvicorn's.
        on_started: the callback.
    """

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], Any]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        await super().startup(sockets)
        self._on_started()


@contextmanager
def signals_not_raised_again() -> Iterator[None]:
    """Ignores the SIGINT or SIGTERM that uvicorn raises again after it has shut down: that is a normal exit here."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
