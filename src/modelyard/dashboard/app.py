"""The HTTP paths of the dashboard, and who may use them.

Whoever knows the token may: the address that is printed has it. The first request sets a cookie, with which pages are
seen. A request that changes something must be a POST with the token itself in a header, which no page of another site
knows, and no form can send. Runs are named by ids that the server made; no request holds a path.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from modelyard.errors import UserError
from modelyard.serving.http.hosts import Hosts
from modelyard.serving.http.limits import RequestError

log = logging.getLogger("modelyard")
TOKEN_HEADER = "X-Modelyard-Token"
_LARGEST_BODY = 64 << 10
_LARGEST_PAGE = 32 << 20
_MOST_RUNS, _MOST_METRICS, _MOST_POINTS = 40, 12, 1000
_READ_SECONDS = 1.0
"""Of one request for curves. What is not read by then comes with the next one."""
_LOG_BYTES = 100_000
_PAGE_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STRANGERS_PAGE = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)
"""The policy of a page out of a run folder: it may have been written by anyone, so nothing in it runs."""
_ACTIONS = {"runs": ("stop", "resume", "delete", "note"), "groups": ("stop",), "bin": ("restore",)}
"""The methods of `Actions` that requests may call, by what they are done to."""
_Handler = Callable[..., Response]


class Access:
    """The token, and the cookie that it is exchanged for.

    Args:
        token: the token in the address.
        port: browsers send cookies to all ports of a host, so each port has a name of its own.
    """

    def __init__(self, token: str, port: int) -> None:
        self._token = token.encode()
        self.cookie = f"modelyard-dashboard-{port}"
        self._session = hmac.new(self._token, b"session", hashlib.sha256).hexdigest().encode()

    def is_token(self, given: str | None) -> bool:
        """Returns whether a text is the token."""
        return given is not None and hmac.compare_digest(given.encode(), self._token)

    def may_view(self, request: Request) -> bool:
        """Returns whether a request has the cookie or the token."""
        if self.is_token(request.headers.get(TOKEN_HEADER)):
            return True
        given = request.cookies.get(self.cookie, "").encode("utf-8", "replace")
        return hmac.compare_digest(given, self._session)

    def check(self, request: Request) -> None:
        """Checks that a request may do what it asks for.

        Raises:
            RequestError: if it has no token, or only the cookie and wants to change something.
        """
        if not self.may_view(request):
            raise RequestError(401, "this needs the token. Open the address that `modelyard dashboard` printed.")
        if request.method not in ("GET", "HEAD") and not self.is_token(request.headers.get(TOKEN_HEADER)):
            raise RequestError(
                403, "changes need the token. Open the address that `modelyard dashboard` printed again."
            )

    def set_cookie(self, response: Response) -> None:
        """Gives the browser the cookie."""
        response.set_cookie(self.cookie, self._session.decode(), httponly=True, samesite="strict", path="/")


class JsonResponse(Response):
    """JSON that nobody keeps."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(content, status, {"Cache-Control": "no-store", **_HEADERS, **(headers or {})})

    def render(self, content: Any) -> bytes:
        """Returns the JSON text, in ASCII: a name may have half of a character."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class Dashboard:
    """The pages over some folders.

    Args:
        folders: absolute paths.
        access: who may use them.
        hosts: the hosts that requests may name.
        program: the program that resumes a run; by default Modelyard itself.
    """

    def __init__(
        self, folders: list[str], access: Access, hosts: Hosts | None = None, program: list[str] | None = None
    ) -> None:
        self._folders, self._access, self._hosts, self._program = folders, access, hosts, program
        self._stopped = threading.Event()
        self._ready = threading.Event()
        self._assets = {path.relative_to(_PAGE_FOLDER).as_posix(): path for path in _PAGE_FOLDER.rglob("*.*")}

    def app(self) -> Starlette:
        """Returns the application, for any ASGI server."""
        routes = [
            Route("/", self._endpoint(self._page, open_to_all=True)),
            Route("/page/{name:path}", self._endpoint(self._asset, open_to_all=True)),
            Route("/api/runs", self._endpoint(self._runs)),
            Route("/api/curves", self._endpoint(self._curves)),
            Route("/api/runs/{id}", self._endpoint(self._details)),
            Route("/api/runs/{id}/log", self._endpoint(self._log)),
            Route("/files/{id}/{name}", self._endpoint(self._strangers_page)),
            Route("/api/{kind}/{id}/{action}", self._endpoint(self._act), methods=["POST"]),
        ]
        return Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={HTTPException: self._no_route},
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        threading.Thread(target=self._watch, name="dashboard", daemon=True).start()
        try:
            yield
        finally:
            self._stopped.set()
            if self._ready.is_set():
                self._index.wake()

    def _watch(self) -> None:
        """Imports what reads runs, while the page is on its way to the browser, and reads them."""
        from modelyard.dashboard.actions import Actions
        from modelyard.dashboard.index import Index

        self._index = Index(self._folders)
        self._actions = Actions(self._index, self._program)
        self._ready.set()
        self._index.watch(self._stopped)

    def _endpoint(self, handler: _Handler, open_to_all: bool = False) -> Callable[[Request], Awaitable[Response]]:
        """Checks who asks, runs the handler in a thread, and turns its errors into responses."""

        async def endpoint(request: Request) -> Response:
            try:
                if self._hosts is not None:
                    self._hosts.check(request.headers)
                if not open_to_all:
                    self._access.check(request)
                    await run_in_threadpool(self._ready.wait)
                body = await _body(request) if request.method == "POST" else None
                arguments = (request,) if body is None else (request, body)
                return await run_in_threadpool(handler, *arguments)
            except RequestError as error:
                return JsonResponse({"error": error.message}, error.status, error.headers)
            except UserError as error:
                return JsonResponse({"error": str(error)}, 409)
            except Exception:
                log.exception("%s %r failed", request.method, request.url.path[:200])
                return JsonResponse({"error": "internal error; see the log of the dashboard."}, 500)

        return endpoint

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JsonResponse({"error": f"{error.detail}."}, error.status_code, dict(error.headers or {}))

    # -- pages ------------------------------------------------------------------------------------------------------

    def _page(self, request: Request) -> Response:
        knows = self._access.is_token(request.query_params.get("token"))
        may_view = knows or self._access.may_view(request)
        name = "index.html" if may_view else "token.html"
        headers = {**_HEADERS, "Cache-Control": "no-store"}
        response = Response((_PAGE_FOLDER / name).read_bytes(), 200 if may_view else 401, headers, "text/html")
        if knows:
            self._access.set_cookie(response)
        return response

    def _asset(self, request: Request) -> Response:
        path = self._assets.get(request.path_params["name"])
        if path is None:
            raise RequestError(404, "there is no such file.")
        kind = _TYPES.get(path.suffix, "application/octet-stream")
        return Response(path.read_bytes(), 200, {**_HEADERS, "Cache-Control": "no-cache"}, kind)

    def _strangers_page(self, request: Request) -> Response:
        """A page that Modelyard wrote beside runs: a leaderboard, a search, a report."""
        from modelyard.dashboard.remote import PAGES, REPORT
        from modelyard.dashboard.run_files import read_plain

        name, key = request.path_params["name"], request.path_params["id"]
        place = self._index.groups.get(key) if name in PAGES else self._index.runs.get(key) if name == REPORT else None
        data = read_plain(f"{place.path}/{name}", _LARGEST_PAGE) if place is not None else None
        if data is None:
            raise RequestError(404, "there is no such page, or it is too large.")
        headers = {**_HEADERS, "Content-Security-Policy": _STRANGERS_PAGE, "Cache-Control": "no-store"}
        return Response(data, 200, headers, "text/html")

    # -- what the pages read ----------------------------------------------------------------------------------------

    def _runs(self, request: Request) -> Response:
        return JsonResponse(self._index.changes(_number(request, "since", 0)))

    def _run(self, request: Request) -> Any:
        run = self._index.runs.get(request.path_params["id"])
        if run is None:
            raise RequestError(404, "there is no such run; it may have been moved or deleted.")
        return run

    def _details(self, request: Request) -> Response:
        from modelyard.dashboard.details import details

        return JsonResponse(details(self._index, self._run(request)))

    def _log(self, request: Request) -> Response:
        from modelyard.dashboard.run_files import CHIEF_LOG, read_end

        path, after = f"{self._run(request).path}/{CHIEF_LOG}", _number(request, "after", 0)
        if Path(path).parent.is_symlink():
            return JsonResponse({"text": "", "start": 0, "end": 0})
        data, start = read_end(path, _LOG_BYTES)
        end = start + len(data)
        if start < after <= end:  # else it is another log, or too much was added
            data, start = data[after - start :], after
        return JsonResponse({"text": data.decode("utf-8", "replace"), "start": start, "end": end})

    def _curves(self, request: Request) -> Response:
        query = request.query_params
        ids, metrics = query.getlist("run")[:_MOST_RUNS], query.getlist("metric")[:_MOST_METRICS]
        most = min(max(_number(request, "points", 500), 10), _MOST_POINTS)
        runs = [run for name in ids if (run := self._index.runs.get(name)) is not None]
        found: dict[str, Any] = {}
        for run in runs:
            curves: dict[str, Any] = {}
            read = size = 0
            for reader in self._index.readers(run):
                reader.advance(_READ_SECONDS / len(runs))
                read, size = read + reader.read, size + reader.size
                with reader.guard:
                    for metric in metrics:
                        split, _, name = metric.partition(" ")
                        curve = reader.splits[split].curve(name, most) if split in reader.splits else None
                        if curve is not None:
                            curves[metric] = curve
            found[run.id] = {"curves": curves, "read": read, "size": size}
        return JsonResponse(found)

    # -- what the pages change --------------------------------------------------------------------------------------

    def _act(self, request: Request, body: Mapping[str, Any]) -> Response:
        kind, key, action = (request.path_params[name] for name in ("kind", "id", "action"))
        known: dict[str, Any] = {"runs": self._index.runs, "groups": self._index.groups, "bin": self._index.bin}
        place = known[kind].get(key) if kind in known else None
        if place is None or action not in _ACTIONS[kind]:
            raise RequestError(404, "there is nothing to do that with; it may have been moved or deleted.")
        if action == "note":
            done = self._actions.note(place, str(body.get("kind", "")), str(body.get("text", "")))
        else:
            done = getattr(self._actions, action)(place)
        log.info("%s %s: %s", action, place.name, done)
        return JsonResponse({"done": done})


async def _body(request: Request) -> dict[str, Any]:
    """Returns the JSON object that a request sends."""
    data = b""
    try:
        async with asyncio.timeout(30):
            async for chunk in request.stream():
                data += chunk
                if len(data) > _LARGEST_BODY:
                    raise RequestError(413, f"the request is longer than {_LARGEST_BODY:,} bytes.", close=True)
    except (TimeoutError, ClientDisconnect):
        raise RequestError(400, "the request was not sent completely.", close=True) from None
    if not data:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(400, "the request must be a JSON object.")
    return value


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 18):
        raise RequestError(400, f"{name} must be a whole number.")
    return int(text)
