"""Connections with an end: uvicorn lets a client send its headers byte by byte, and gigabytes of them by httptools."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Base = Any
else:
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as _Base

_BY_HTTPTOOLS = hasattr(_Base, "on_body")
_LOOKS = 4
"""How often in the time that is allowed a connection is looked at."""
_TURNS = 4
"""How many times that time a request may take in all: to be sent, decoded, computed, and its answer read."""
_MOST_HEADERS = 64 << 10
"""Bytes of the headers of a request; what h11, uvicorn's other reader, takes."""


def patient_for(seconds: float) -> type[Any]:
    """uvicorn's protocol, for clients that send the headers of a request within ``seconds`` and read its answer."""

    class Protocol(_Base):
        """One connection."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._began: float | None = self.loop.time()
            self._busy: tuple[Any, float] = (None, 0.0)
            self._unread: float | None = None
            self._looking = self.loop.call_later(seconds / _LOOKS, self._look)
            self._head_bytes = 0

        def connection_lost(self, exc: Exception | None) -> None:
            self._looking.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._began is None and self._between():
                self._began = self.loop.time()
            self._head_bytes += len(data)
            super().data_received(data)
            if not self._between():
                self._began = None
            if _BY_HTTPTOOLS and self._head_bytes > _MOST_HEADERS and not self.transport.is_closing():
                if self._between():
                    self._refuse(431, f"the headers of the request are longer than {_MOST_HEADERS:,} bytes.")
                else:  # after the body, where HTTP allows headers, too
                    self.transport.abort()

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._head_bytes = 0
            super().on_message_complete()

        def _between(self) -> bool:
            """Whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def _look(self) -> None:
            now = self.loop.time()
            self._looking = self.loop.call_later(seconds / _LOOKS, self._look)
            if self._is_left_unread(now):
                self.transport.abort()
            elif self.transport.is_closing():
                return
            elif self._between():
                if self._began is not None and now - self._began > seconds:
                    self._refuse(408, f"the headers of the request were not sent within {seconds:g} seconds.")
            elif self.cycle is not self._busy[0]:
                self._busy = (self.cycle, now)
            elif now - self._busy[1] > _TURNS * seconds:
                self.transport.abort()

        def _is_left_unread(self, now: float) -> bool:
            """Whether an answer waits for its client too long: to uvicorn it is done, and even closing would wait."""
            if not self.transport.get_write_buffer_size():
                self._unread = None
            elif self._unread is None:
                self._unread = now
            return self._unread is not None and now - self._unread > _TURNS * seconds

        def _refuse(self, status: int, message: str) -> None:
            reason = json.dumps({"error": message})
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json"
            head += f"\r\nContent-Length: {len(reason)}\r\nConnection: close\r\n\r\n"
            self.transport.write((head + reason).encode("ascii"))
            self.transport.close()

    return Protocol
