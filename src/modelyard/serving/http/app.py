"""The HTTP paths of the server: TensorFlow Serving's REST API, image upload, health, metrics, OpenAPI, a page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from modelyard.data.dataset import ID
from modelyard.serving.http import json_tensors as tensors
from modelyard.serving.http.batching import DeadlineExceededError, QueueFullError
from modelyard.serving.http.hosts import Hosts
from modelyard.serving.http.limits import SMALL_BODY, SMALL_PIXELS, BodyReader, Limits, RequestError
from modelyard.serving.http.metadata import about_response, metadata_response, openapi_document, status_response
from modelyard.serving.http.model_versions import AVAILABLE, LoadedVersion, ModelVersions
from modelyard.serving.http.worker import Workers
from modelyard.serving.servable import ModelInfo, Outputs

log = logging.getLogger("modelyard")

MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""Valid model names: they are a part of a path."""
_PATH = re.compile(
    r"(?P<name>[^/:]+)(/versions/(?P<version>[0-9]{1,19})|/labels/(?P<label>[^/:]+))?(?P<metadata>/metadata)?(:(?P<verb>[a-z]+))?"
)
_DECODER_THREADS = 4
_LONG_PIECE = 4096
"""Bytes of a part of a response after which others go on."""
_Handler = Callable[[Request], Awaitable[Response]]


class JsonResponse(Response):
    """JSON that every parser accepts: ASCII, finite numbers."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the JSON text."""
        return tensors.to_json(content)


class Service:
    """One model and its HTTP paths.

    Args:
        name: the name of the model in the paths.
        versions: the versions of the model.
        limits: the limits of a request.
        metrics: the counters.
        hosts: the hosts that requests may name; None for all.
    """

    def __init__(
        self, name: str, versions: ModelVersions, limits: Limits, metrics: Metrics, hosts: Hosts | None = None
    ) -> None:
        self.name, self.versions, self.limits, self.metrics = name, versions, limits, metrics
        self._hosts = hosts
        self.stopping = False
        self._verbs = {
            "predict": self._predict,
            "classify": self._classify,
            "regress": self._regress,
            "upload": self._upload,
        }
        self._bodies = BodyReader(limits)
        self._workers = Workers(limits.timeout)
        self._decoders = ThreadPoolExecutor(min(_DECODER_THREADS, os.cpu_count() or 1), "decode")

    def app(self) -> Starlette:
        """Returns the application, for any ASGI server."""
        plain: dict[str, _Handler] = {
            "/": self._page,
            "/about": self._about,
            "/healthz": self._live,
            "/readyz": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }
        # Starlette tries routes in order: the most frequent is first.
        routes = [Route("/v1/models/{path:path}", self._endpoint(self._model, None), methods=["GET", "POST"])]
        routes += [Route(path, self._endpoint(handler, path.strip("/") or "page")) for path, handler in plain.items()]
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: self._no_route})

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(self.versions.watch())
        try:
            yield
        finally:
            self.stopping = True
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self.versions.close()
            self._decoders.shutdown(wait=False, cancel_futures=True)
            self._workers.close()

    def _endpoint(self, handler: _Handler, verb: str | None) -> _Handler:
        """Adds metrics to a handler, and turns its exceptions into error responses."""

        async def endpoint(request: Request) -> Response:
            began = time.perf_counter()
            try:
                if self._hosts is not None:
                    self._hosts.check(request.headers)
                response = await handler(request)
            except RequestError as error:
                response = JsonResponse({"error": error.message}, error.status, error.headers)
            except Exception:
                log.exception("%s %r failed", request.method, request.url.path[:200])
                response = JsonResponse({"error": "internal error; see the server's log."}, 500)
            known = verb or request.scope.get("verb", "unknown")
            self.metrics.requests.labels(known, str(response.status_code)).inc()
            if verb is None:
                self.metrics.seconds.observe(time.perf_counter() - began)
            return response

        return endpoint

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            message = _not_allowed(request, headers.get("Allow", "GET"))
        else:
            message = f"Malformed request: {_shown(request)}. /openapi.json lists the paths."
        self.metrics.requests.labels("unknown", str(error.status_code)).inc()
        return JsonResponse({"error": message}, error.status_code, headers)

    # -- /v1/models: predictions, status and metadata -----------------------------------------------------------------

    async def _model(self, request: Request) -> Response:
        found = _PATH.fullmatch(request.path_params["path"])
        verb = found and found["verb"]
        if found is None or (verb and (found["metadata"] or verb not in self._verbs)):
            verbs = ", ".join(f":{each}" for each in self._verbs)
            raise RequestError(404, f"Malformed request: {_shown(request)}. Expected one of {verbs} after the name.")
        request.scope["verb"] = verb or ("metadata" if found["metadata"] else "status")
        allowed = "POST" if verb else "GET"
        if request.method != allowed and (request.method, allowed) != ("HEAD", "GET"):
            error = RequestError(405, _not_allowed(request, allowed))
            error.headers["Allow"] = allowed
            raise error
        self._check_name(found)
        if not verb and not found["metadata"]:
            return JsonResponse(self._status(found["version"]))
        version = self._version(found["version"])
        if not verb:
            return JsonResponse(metadata_response(self.name, version))
        with version.in_use():
            answer = await self._verbs[verb](request, version)
        body = []
        for piece in tensors.json_pieces(answer):
            body.append(piece)
            if len(piece) > _LONG_PIECE:
                await asyncio.sleep(0)  # others go on
        headers = {"Modelyard-Version": str(version.number), "Content-Type": "application/json"}
        return Response(b"".join(body), headers=headers)

    def _check_name(self, found: re.Match[str]) -> None:
        if found["name"] != self.name:
            asked = found["name"][:100]
            raise RequestError(404, f"Servable not found for request: Latest({asked}). Served here: {self.name}.")
        if found["label"]:
            raise RequestError(404, f"Unrecognized servable version label: {found['label'][:100]}. Use /versions/N.")

    def _status(self, number: str | None) -> dict[str, Any]:
        statuses = self.versions.statuses
        if number is None:
            return status_response(statuses)
        if int(number) not in statuses:
            raise RequestError(404, f"Could not find version {number} of model {self.name}.")
        return status_response({int(number): statuses[int(number)]})

    def _version(self, number: str | None) -> LoadedVersion:
        current = self.versions.current
        if current is None or self.stopping:
            raise RequestError(503, "the server is not ready.", retry=1, close=self.stopping)
        if number is not None and int(number) != current.number:
            raise RequestError(
                404, f"Servable not found for request: Specific({self.name}, {number}). Served now: {current.number}."
            )
        return current

    async def _predict(self, request: Request, version: LoadedVersion) -> dict[str, Any]:
        read, outputs = await self._outputs(request, version, tensors.PREDICT)
        return {"outputs": tensors.as_columns(outputs)} if read.columns else {"predictions": tensors.as_rows(outputs)}

    async def _classify(self, request: Request, version: LoadedVersion) -> dict[str, Any]:
        info = version.servable.info
        if "probabilities" not in version.servable.outputs:
            raise RequestError(400, f"this model predicts no classes ({info.task_type}). Use :predict or :regress.")
        _, outputs = await self._outputs(request, version, tensors.CLASSIFY)
        results = tensors.as_classes(outputs, info.classes)
        # TensorFlow Serving's documentation says `result`; its example, and its server, say `results`.
        return {"results": results, "result": results}

    async def _regress(self, request: Request, version: LoadedVersion) -> dict[str, Any]:
        info = version.servable.info
        if info.task_type != "regression":
            raise RequestError(400, f"this model is no regression (task {info.task_type}). Use :predict or :classify.")
        _, outputs = await self._outputs(request, version, tensors.CLASSIFY)
        results = tensors.as_rows({"values": outputs["values"]})
        return {"results": results, "result": results}

    async def _upload(self, request: Request, version: LoadedVersion) -> dict[str, Any]:
        _, outputs = await self._outputs(request, version, tensors.UPLOAD)
        return {"predictions": tensors.as_rows(outputs)}

    async def _outputs(
        self, request: Request, version: LoadedVersion, kind: str
    ) -> tuple[tensors.ReadRequest, Outputs]:
        """Reads a request and predicts its examples."""
        async with self._bodies.read(request) as body:
            read = await self._read(kind, body, request.headers.get("content-type", ""), version.servable.info)
            outputs = await self._run_model(version, read.inputs)
        if read.ids is not None:
            ids = np.empty(len(read.ids), object)
            ids[:] = read.ids
            outputs = {**outputs, ID: ids}
        return read, outputs

    async def _read(self, kind: str, body: bytes, content_type: str, info: ModelInfo) -> tensors.ReadRequest:
        """Reads small JSON at once, small image files in threads, and what is large in other processes."""
        reader = tensors.RequestReader(info, self.limits, SMALL_PIXELS)
        try:
            if len(body) <= SMALL_BODY:
                with contextlib.suppress(tensors.LargeImagesError):
                    # A backslash may be a part of the name, b64.
                    if kind != tensors.UPLOAD and b"b64" not in body and b"\\" not in body:
                        return reader.read(kind, body)
                    async with asyncio.timeout(self.limits.timeout):
                        work = partial(reader.read, kind, body, content_type)
                        return await asyncio.get_running_loop().run_in_executor(self._decoders, work)
            return await self._workers.read(replace(reader, most_pixels=None), kind, body, content_type)
        except TimeoutError:
            raise self._busy() from None

    async def _run_model(self, version: LoadedVersion, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
        try:
            return await version.batcher.submit(inputs, time.monotonic() + self.limits.timeout)
        except QueueFullError as error:
            raise RequestError(429, f"the queue is full: {error}. Try again in a moment.", retry=1) from None
        except DeadlineExceededError:
            raise self._busy() from None

    def _busy(self) -> RequestError:
        return RequestError(503, f"the server is busy: not started within {self.limits.timeout:g} seconds.", retry=1)

    # -- the other paths --------------------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        return Response(PAGE, headers=PAGE_HEADERS)

    async def _about(self, request: Request) -> Response:
        return JsonResponse(about_response(self.name, self._version(None)), headers={"Cache-Control": "no-store"})

    async def _live(self, request: Request) -> Response:
        return JsonResponse({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        version = self._version(None)
        return JsonResponse({"status": "ready", "version": str(version.number), "state": AVAILABLE})

    async def _metrics(self, request: Request) -> Response:
        current = self.versions.current
        if current is not None:
            self.metrics.waiting.set(current.batcher.waiting)
            self.metrics.version.set(current.number)
        return Response(self.metrics.text(), headers={"Content-Type": METRICS_TYPE})

    async def _openapi(self, request: Request) -> Response:
        return JsonResponse(openapi_document(self.name, self._version(None).servable, self.limits))


def _shown(request: Request) -> str:
    return f"{request.method} {request.url.path[:200]}"


def _not_allowed(request: Request, allowed: str) -> str:
    return f"{_shown(request)} is not allowed. Use {allowed}."


# -- Prometheus metrics -----------------------------------------------------------------------------------------------

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Prometheus counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("modelyard_requests", "requests by verb and status", ["verb", "status"])
        description = "seconds from the first byte to the response"
        self.seconds = histogram("modelyard_request_seconds", description, buckets=_SECONDS)
        self.images = counter("modelyard_images", "images that were predicted")
        self.filled = counter("modelyard_filled", "padding images in batches")
        self.batch = histogram("modelyard_batch_images", "images per batch", buckets=_SIZES)
        self.model = histogram("modelyard_model_seconds", "seconds of the model per batch", buckets=_SECONDS)
        self.waiting = gauge("modelyard_waiting_images", "images in the queue")
        self.version = gauge("modelyard_version", "the version that is served")

    def batch_done(self, count: int, size: int, seconds: float) -> None:
        """Records a batch of ``count`` images, padded to ``size``."""
        self.images.inc(count)
        self.filled.inc(size - count)
        self.batch.observe(count)
        self.model.observe(seconds)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


# -- the web page -----------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parent / "page.html").read_bytes()


def _digest(tag: bytes) -> str:
    """Returns the CSP source expression of the page's one inline element ``tag``."""
    (inside,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"


PAGE_POLICY = (
    f"default-src 'none'; script-src {_digest(b'script')}; style-src {_digest(b'style')}; img-src blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: nothing runs but the page's own script."""
PAGE_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
