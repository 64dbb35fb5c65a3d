"""The paths of a server: those of TensorFlow Serving's REST API, image upload, health, metrics, OpenAPI, a page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from modelyard.serving.description import BYTES, DEFAULT
from modelyard.serving.http import json_tensors as tensors
from modelyard.serving.http.batching import QueueFullError, TooLateError
from modelyard.serving.http.body import Bodies, Limits, files_of
from modelyard.serving.http.metrics import TYPE, Metrics
from modelyard.serving.http.openapi import openapi
from modelyard.serving.http.page import HEADERS, PAGE
from modelyard.serving.http.plain_lists import plain_images
from modelyard.serving.http.refusal import RefusedError
from modelyard.serving.http.status import about, metadata_of, status_of
from modelyard.serving.http.versions import AVAILABLE, Version, Versions
from modelyard.serving.servable import Outputs

log = logging.getLogger("modelyard")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""What a model may be called: a part of a path that leads nowhere else."""
_PATH = re.compile(
    r"(?P<name>[^/:]+)(/versions/(?P<version>[0-9]{1,19})|/labels/(?P<label>[^/:]+))?(?P<metadata>/metadata)?(:(?P<verb>[a-z]+))?"
)
_VERBS = ("predict", "classify", "regress", "upload")
_SIGNATURES = (
    "",
    DEFAULT,
    BYTES,
    "tensorflow/serving/predict",
    "tensorflow/serving/classify",
    "tensorflow/serving/regress",
)
_THREADS = 4


class JsonResponse(Response):
    """JSON that every parser reads: ASCII, finite numbers."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The text."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


class Service:
    """One model and the paths it is reached by.

    Args:
        name: of the model in the paths.
        versions: what answers.
        limits: what a request may take.
        metrics: what is counted.
    """

    def __init__(self, name: str, versions: Versions, limits: Limits, metrics: Metrics) -> None:
        self.name, self.versions, self.limits, self.metrics = name, versions, limits, metrics
        self.stopping = False
        self._bodies = Bodies(limits)
        self._decoders = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "decode")

    def app(self) -> Starlette:
        """The application, to be run by any ASGI server."""
        plain = {
            "/": self._page,
            "/about": self._about,
            "/healthz": self._live,
            "/readyz": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }
        models = self._guarded(self._model, None)
        # Routes are tried one after the other.
        routes = [Route("/v1/models/{path:path}", models, methods=["GET", "POST"])]
        routes += [Route(path, self._guarded(call, path.strip("/") or "page")) for path, call in plain.items()]
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers={HTTPException: self._no_path})

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

    def _guarded(
        self, call: Callable[[Request], Awaitable[Response]], verb: str | None
    ) -> Callable[[Request], Awaitable[Response]]:
        """Counts, and turns refusals and surprises into answers."""

        async def endpoint(request: Request) -> Response:
            began = time.perf_counter()
            try:
                response = await call(request)
            except RefusedError as refused:
                response = JsonResponse({"error": refused.message}, refused.status, refused.headers)
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path[:200])
                response = JsonResponse({"error": "the server made a mistake; its log says more."}, 500)
            known = verb or request.scope.get("verb", "unknown")
            self.metrics.requests.labels(known, str(response.status_code)).inc()
            if verb is None:
                self.metrics.seconds.observe(time.perf_counter() - began)
            return response

        return endpoint

    async def _no_path(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        what = f"{request.method} {request.url.path[:200]}"
        if status == 405:
            message = f"{what} is not possible; {headers.get('Allow', 'GET')} is."
        else:
            message = f"Malformed request: {what}. /openapi.json lists the paths."
        self.metrics.requests.labels("unknown", str(status)).inc()
        return JsonResponse({"error": message}, status, headers)

    # -- the model --------------------------------------------------------------------------------------------------

    async def _model(self, request: Request) -> Response:
        found = _PATH.fullmatch(request.path_params["path"])
        verb = found and found["verb"]
        if found is None or (verb and found["metadata"]) or (verb and verb not in _VERBS):
            verbs = ", ".join(f":{each}" for each in _VERBS)
            path = request.url.path[:200]
            raise RefusedError(
                404, f"Malformed request: {request.method} {path}. After the name stands one of {verbs}."
            )
        request.scope["verb"] = verb or ("metadata" if found["metadata"] else "status")
        allowed = "POST" if verb else "GET"
        if request.method not in (allowed, "HEAD" if allowed == "GET" else allowed):
            refused = RefusedError(405, f"{request.method} {request.url.path[:200]} is not possible; {allowed} is.")
            refused.headers["Allow"] = allowed
            raise refused
        self._check_name(found)
        if not verb and not found["metadata"]:
            return JsonResponse(self._status(found["version"]))
        version = self._version(found["version"])
        if not verb:
            return JsonResponse(metadata_of(self.name, version))
        with version.held():
            answer = await {
                "predict": self._predict,
                "classify": self._classify,
                "regress": self._regress,
                "upload": self._upload,
            }[verb](request, version)
        return JsonResponse(answer, headers={"Modelyard-Version": str(version.number)})

    def _check_name(self, found: re.Match[str]) -> None:
        asked = f"{found['name'][:100]}"
        if found["name"] != self.name:
            raise RefusedError(404, f"Servable not found for request: Latest({asked}). Served here: {self.name}.")
        if found["label"]:
            raise RefusedError(404, f"Unrecognized servable version label: {found['label'][:100]}. Give /versions/N.")

    def _status(self, number: str | None) -> dict[str, Any]:
        statuses = self.versions.statuses
        if number is None:
            return status_of(statuses)
        if int(number) not in statuses:
            raise RefusedError(404, f"Could not find version {number} of model {self.name}.")
        return status_of({int(number): statuses[int(number)]})

    def _version(self, number: str | None) -> Version:
        current = self.versions.current
        if current is None or self.stopping:
            raise RefusedError(503, "the server is not ready.", retry=1, close=self.stopping)
        if number is not None and int(number) != current.number:
            raise RefusedError(
                404, f"Servable not found for request: Specific({self.name}, {number}). Served now: {current.number}."
            )
        return current

    async def _predict(self, request: Request, version: Version) -> dict[str, Any]:
        async with self._bodies.read(request) as body:
            images, columns = plain_images(body, version.servable.facts.image, self.limits.max_instances), False
            if images is None:
                rows, columns = tensors.rows_of(self._parsed(body), self.limits)
                images = await self._images(version, rows)
                del rows  # many times as large as what they hold, and the queue may be long
            outputs = await self._batched(version, images)
        return {"outputs": tensors.as_columns(outputs)} if columns else {"predictions": tensors.as_rows(outputs)}

    async def _classify(self, request: Request, version: Version) -> dict[str, Any]:
        facts = version.servable.facts
        if "probabilities" not in version.servable.outputs:
            raise RefusedError(400, f"this model gives no classes ({facts.kind}). Use :predict or :regress.")
        async with self._bodies.read(request) as body:
            images = await self._images(version, tensors.examples_of(self._parsed(body), facts.image, self.limits))
            found = tensors.as_classes(await self._batched(version, images), facts.classes)
        # The documentation says result where it describes the format and results in its example, as the server does.
        return {"results": found, "result": found}

    async def _regress(self, request: Request, version: Version) -> dict[str, Any]:
        facts = version.servable.facts
        if facts.kind != "regression":
            raise RefusedError(
                400, f"this model gives no numbers to regress ({facts.kind}). Use :predict or :classify."
            )
        async with self._bodies.read(request) as body:
            images = await self._images(version, tensors.examples_of(self._parsed(body), facts.image, self.limits))
            found = tensors.as_rows({"values": (await self._batched(version, images))["values"]})
        return {"results": found, "result": found}

    async def _upload(self, request: Request, version: Version) -> dict[str, Any]:
        async with self._bodies.read(request) as body:
            files = await files_of(request, body, self.limits.max_instances)
            tensors.check_count(len(files), self.limits)
            decoder = tensors.Files(version.servable, self.limits)
            images = await self._in_thread(lambda: np.stack([decoder.pixels(data, n) for n, data in files]))
            outputs = await self._batched(version, images)
        return {"predictions": tensors.as_rows(outputs)}

    def _parsed(self, body: bytes) -> dict[str, Any]:
        given = tensors.parse(body)
        signature = given.get("signature_name", "")
        if signature not in _SIGNATURES:
            asked = str(signature)[:100]
            raise RefusedError(
                400,
                f"Serving signature name: {asked!r} not found in signature def; {DEFAULT!r} and {BYTES!r} are there.",
            )
        return given

    async def _images(self, version: Version, rows: list[Any]) -> NDArray[Any]:
        if any(isinstance(row, dict) for row in rows):  # image files are decoded beside other requests
            return await self._in_thread(lambda: tensors.images_of(rows, version.servable, self.limits))
        return tensors.images_of(rows, version.servable, self.limits)

    async def _in_thread(self, work: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        try:
            async with asyncio.timeout(self.limits.timeout):
                return await asyncio.get_running_loop().run_in_executor(self._decoders, work)
        except TimeoutError:
            raise self._too_late() from None

    async def _batched(self, version: Version, images: NDArray[Any]) -> Outputs:
        try:
            return await version.batcher.submit(images, time.monotonic() + self.limits.timeout)
        except QueueFullError as error:
            raise RefusedError(429, f"the queue is full: {error}. Try again in a moment.", retry=1) from None
        except TooLateError:
            raise self._too_late() from None

    def _too_late(self) -> RefusedError:
        return RefusedError(503, f"not reached within {self.limits.timeout:g} seconds; the server is busy.", retry=1)

    # -- beside it --------------------------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        return Response(PAGE, headers=HEADERS)

    async def _about(self, request: Request) -> Response:
        return JsonResponse(about(self.name, self._version(None)), headers={"Cache-Control": "no-store"})

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
        return Response(self.metrics.text(), headers={"Content-Type": TYPE})

    async def _openapi(self, request: Request) -> Response:
        return JsonResponse(openapi(self.name, self._version(None).servable, self.limits))
