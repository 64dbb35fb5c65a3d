"""uvicorn's private APIs. Tested with uvicorn 0.54; versions from 0.30 on are allowed but not tested.

uvicorn itself never times out a client that sends its headers byte by byte or does not read its response, and its
httptools parser accepts gigabytes of headers.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    _Base = Any
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as _Base

_USES_HTTPTOOLS = hasattr(_Base, "on_body")
_CHECKS_PER_TIMEOUT = 4
_REQUEST_TIMEOUTS = 4
"""A whole request (send, decode, compute, read the response) may take this many times the timeout."""
_MAX_HEADER_BYTES = 64 << 10
"""The limit that h11, uvicorn's other parser, has by itself."""


def protocol_with_timeouts(seconds: float) -> type[Any]:
    """Returns uvicorn's HTTP protocol class with limits on the time and the size of headers, and on unread responses.

    Args:
        seconds: within which a client must send the headers of a request. Within four times as long, the request must
            be answered and the client must read the response.
    """

    class Protocol(_Base):
        """One connection."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._headers_since: float | None = self.loop.time()
            self._busy: tuple[Any, float] = (None, 0.0)
            self._unread_since: float | None = None
            self._timer = self.loop.call_later(seconds / _CHECKS_PER_TIMEOUT, self._check_timeouts)
            self._header_bytes = 0

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._headers_since is None and self._is_idle():
                self._headers_since = self.loop.time()
            self._header_bytes += len(data)
            super().data_received(data)
            if not self._is_idle():
                self._headers_since = None
            if _USES_HTTPTOOLS and self._header_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
                if self._is_idle():
                    self._reject(431, f"the request headers are longer than {_MAX_HEADER_BYTES:,} bytes.")
                else:  # trailers: HTTP allows headers after the body, too
                    self.transport.abort()

        def on_body(self, body: bytes) -> None:
            self._header_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._header_bytes = 0
            super().on_message_complete()

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
            head += f"\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write((head + body).encode("ascii"))
            self.transport.close()

    return Protocol


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
