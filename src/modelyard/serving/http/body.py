"""Reading what a client sends: no more than is allowed, no longer than is allowed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from modelyard.serving.http.refusal import RefusedError

_DRAIN_SECONDS = 2.0


@dataclass(frozen=True)
class Limits:
    """What a request may take.

    Args:
        max_body: bytes of a request.
        max_bodies: bytes of all requests that are being read or answered.
        max_pixels: of an image file.
        max_instances: images of a request.
        timeout: seconds in which a request must be sent, and then again in which its answer must begin to be computed.
    """

    max_body: int = 16 << 20
    max_bodies: int = 8 * (16 << 20)
    max_pixels: int = 32_000_000
    max_instances: int = 256
    timeout: float = 30.0


class Bodies:
    """Reads bodies, and knows how many bytes of them are held."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request; it counts while the block runs.

        Raises:
            RefusedError: if it is too long, too slow, or too much is being read already.
        """
        parts: list[bytes] = []
        try:
            await self._fill(parts, request)
            parts[:] = [b"".join(parts)]  # the pieces are not held beside the whole
            yield parts[0]
        finally:
            self.held -= sum(map(len, parts))

    async def _fill(self, parts: list[bytes], request: Request) -> None:
        others, mine = self.held, 0
        stream = request.stream()
        try:
            self._check_length(request)
            async with asyncio.timeout(self.limits.timeout):
                async for chunk in stream:
                    mine += len(chunk)
                    if mine > self.limits.max_body:
                        raise self._too_long()
                    if others and self.held + len(chunk) > self.limits.max_bodies:
                        message = "too many requests are being read. Try again in a moment."
                        raise RefusedError(429, message, retry=1, close=True)
                    self.held += len(chunk)
                    parts.append(chunk)
        except TimeoutError:
            message = f"the request was not sent within {self.limits.timeout:g} seconds ({mine:,} bytes came)."
            raise RefusedError(408, message, close=True) from None
        except ClientDisconnect:
            raise RefusedError(400, "the connection was closed before the request was complete.", close=True) from None
        except RefusedError:
            await _drain(stream, self.limits.max_body)
            raise

    def _check_length(self, request: Request) -> None:
        packed = request.headers.get("content-encoding", "identity").lower()
        if packed != "identity":
            raise RefusedError(415, f"the request is packed ({packed[:40]}). Send it as it is.", close=True)
        said = request.headers.get("content-length", "0")
        if said.isdecimal() and int(said[:20]) > self.limits.max_body:
            raise self._too_long()

    def _too_long(self) -> RefusedError:
        most = self.limits.max_body
        return RefusedError(
            413, f"the request is longer than {most:,} bytes, which is the most (--max_body_mb).", close=True
        )


async def _drain(stream: AsyncGenerator[bytes, None], most: int) -> None:
    """Reads on for a moment, so that a client that is still sending gets to read why it is refused."""
    with contextlib.suppress(TimeoutError, ClientDisconnect, RuntimeError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for chunk in stream:
                most -= len(chunk)
                if most < 0:
                    return


async def files_of(request: Request, body: bytes, most: int) -> list[tuple[str, bytes]]:
    """The image files of a request, with their names: the parts of a form, or the body as it is.

    Raises:
        RefusedError: if there is none, or the form is damaged.
    """
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        if kind.lower().startswith("application/json"):
            raise RefusedError(415, "this path takes image files; JSON goes to :predict.")
        files = [("the image", body)] if body else []
    else:
        try:
            form = await MultiPartParser(request.headers, _once(body), max_files=most, max_fields=most).parse()
            parts = [part for _, part in form.multi_items() if isinstance(part, UploadFile)]
            files = [((part.filename or "the image")[:100], await part.read()) for part in parts]
            await form.close()
        except (MultiPartException, KeyError, ValueError, AssertionError) as error:
            reason = getattr(error, "message", "") or str(error) or type(error).__name__
            raise RefusedError(400, f"the form can't be read: {reason}.") from None
    if not files:
        raise RefusedError(
            400, "there is no file. Send a form with a file (curl -F file=@photo.jpg), or the image itself as the body."
        )
    return files


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
    yield b""
