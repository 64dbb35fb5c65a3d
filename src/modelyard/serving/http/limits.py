"""All limits of the server, and reading a request's body within them.

`modelyard.compat.uvicorn` enforces the limits of connections.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

SMALL_BODY = 256 << 10
"""Bytes of a request that is read in the server itself: JSON of this size holds Python's lock for some milliseconds."""
SMALL_PIXELS = 2_000_000
"""Pixels of the image files of such a request, together. Others are read by a `Worker`."""
WORKERS = 2
"""Processes that read large requests, one at a time each."""
_FILES_PIXELS = 4
"""All files of a request may have this many times the pixels of one: small files can decode to large images."""
_DRAIN_SECONDS = 2.0


class RequestError(Exception):
    """A request that is answered with an error.

    Args:
        status: the HTTP status code.
        message: for the author of the client: what is wrong, what is expected.
        retry: seconds after which the client may try again, where that helps.
        close: whether the connection must be closed, since a part of the request was not read.
    """

    def __init__(self, status: int, message: str, *, retry: int | None = None, close: bool = False) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.headers: dict[str, str] = {}
        if retry is not None:
            self.headers["Retry-After"] = str(retry)
        if close:
            self.headers["Connection"] = "close"


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Args:
        max_body: bytes of a request body.
        max_bodies: bytes of the bodies of all requests in progress.
        max_pixels: pixels of an image file.
        max_instances: images per request.
        timeout: seconds in which a client must send the headers, then the body, and then in which the images must be
            decoded and the prediction must start.
        max_connections: open connections. For one more, the one that has been idle longest is closed.
        max_pipelined: requests of a connection that wait for the response to another one.
        max_unread: bytes of responses that nobody has read, of all connections.
        max_headers: bytes of the headers of a request.
    """

    max_body: int = 16 << 20
    max_bodies: int = 8 * (16 << 20)
    max_pixels: int = 32_000_000
    max_instances: int = 256
    timeout: float = 30.0
    max_connections: int = 512
    max_pipelined: int = 32
    max_unread: int = 64 << 20
    max_headers: int = 64 << 10

    @property
    def max_files_pixels(self) -> int:
        """Pixels of all image files of a request."""
        return _FILES_PIXELS * self.max_pixels

    @property
    def worker_memory(self) -> int:
        """Bytes of memory of a process that reads large requests. Lists are up to 30 times as large as their JSON."""
        return (512 << 20) + 40 * self.max_body + 20 * self.max_pixels

    def check_count(self, count: int) -> None:
        """Raises `RequestError` for a request of ``count`` images if that is none or too many."""
        if not count:
            raise RequestError(400, "the request has no images.")
        if count > self.max_instances:
            raise RequestError(
                413, f"the request has {count:,} images; the maximum is {self.max_instances} (--max_instances)."
            )


class BodyReader:
    """Reads request bodies and counts the bytes that are in memory."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Gives the body of a request. Its bytes count as in memory until the block ends.

        Raises:
            RequestError: if the body is too long or too slow, or too many bytes are in memory already.
        """
        chunks: list[bytes] = []
        try:
            await self._read_chunks(chunks, request)
            chunks[:] = [b"".join(chunks)]  # the chunks are freed
            yield chunks[0]
        finally:
            self.held -= sum(map(len, chunks))

    async def _read_chunks(self, chunks: list[bytes], request: Request) -> None:
        held_by_others, received = self.held, 0
        stream = request.stream()
        try:
            self._check_headers(request)
            async with asyncio.timeout(self.limits.timeout):
                async for chunk in stream:
                    received += len(chunk)
                    if received > self.limits.max_body:
                        raise self._too_long()
                    if held_by_others and self.held + len(chunk) > self.limits.max_bodies:
                        message = "too many requests are being read. Try again in a moment."
                        raise RequestError(429, message, retry=1, close=True)
                    self.held += len(chunk)
                    chunks.append(chunk)
        except TimeoutError:
            message = f"the request was not sent within {self.limits.timeout:g} seconds ({received:,} bytes received)."
            raise RequestError(408, message, close=True) from None
        except ClientDisconnect:
            raise RequestError(400, "the connection was closed before the request was complete.", close=True) from None
        except RequestError:
            await _drain(stream, self.limits.max_body)
            raise

    def _check_headers(self, request: Request) -> None:
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            message = f"Content-Encoding {encoding[:40]} is not supported. Send the body uncompressed."
            raise RequestError(415, message, close=True)
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.limits.max_body:
            raise self._too_long()

    def _too_long(self) -> RequestError:
        most = self.limits.max_body
        return RequestError(413, f"the request body is longer than {most:,} bytes (--max_body_mb).", close=True)


async def _drain(stream: AsyncGenerator[bytes, None], most: int) -> None:
    """Reads a little more, so that a client that is still sending gets to read the error."""
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for chunk in stream:
                most -= len(chunk)
                if most < 0:
                    return
