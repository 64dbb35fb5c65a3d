"""Limits of a request, and reading its body within them. Limits of connections are in `modelyard.compat.uvicorn`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

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
        timeout: seconds in which a client must send the body, and then again in which the prediction must start.
    """

    max_body: int = 16 << 20
    max_bodies: int = 8 * (16 << 20)
    max_pixels: int = 32_000_000
    max_instances: int = 256
    timeout: float = 30.0

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


async def uploaded_files(request: Request, body: bytes, most: int) -> list[tuple[str, bytes]]:
    """Returns names and bytes of the uploaded image files: the files of a form, or the body itself.

    Raises:
        RequestError: if there is no file, or the form is malformed.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        if content_type.lower().startswith("application/json"):
            raise RequestError(415, ":upload takes image files. Send JSON to :predict.")
        files = [("the image", body)] if body else []
    else:
        try:
            form = await MultiPartParser(request.headers, _once(body), max_files=most, max_fields=most).parse()
            parts = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
            files = [((part.filename or "the image")[:100], await part.read()) for part in parts]
            await form.close()
        except (MultiPartException, KeyError, ValueError, AssertionError) as error:
            reason = getattr(error, "message", "") or str(error) or type(error).__name__
            raise RequestError(400, f"the form can't be parsed: {reason}.") from None
    if not files:
        raise RequestError(
            400, "the request has no file. Send a form (curl -F file=@photo.jpg), or the image itself as the body."
        )
    return files


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
    yield b""
