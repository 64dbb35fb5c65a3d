"""`modelyard serve`: from a run or an export to a server that answers until it is told to stop."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelyard.errors import ConfigError, Problem, RunError, UserError

log = logging.getLogger("modelyard")

_MOST = 1e9
NEEDS = "serving needs starlette, uvicorn, python-multipart and prometheus_client: pip install 'modelyard[serve]'"


def serve(
    model_dir: str | Path | None = None,
    export: str | Path | None = None,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8501,
    checkpoint: str | int | None = None,
    max_batch: int = 32,
    max_delay_ms: float = 5.0,
    max_queue: int = 1024,
    max_body_mb: float = 16.0,
    max_pixels: int = 32_000_000,
    max_instances: int = 256,
    timeout_secs: float = 30.0,
    poll_secs: float = 1.0,
    ready: Callable[[str], None] | None = None,
    source: str = "Python",
    **options: Any,
) -> None:
    """Serves a model over HTTP, until SIGTERM or Ctrl-C; requests that came are answered.

    Args:
        model_dir: a run; or
        export: a folder of versions, as `modelyard export` writes it. A new version takes the place of the old one.
        name: of the model in the paths; by default that of the folder.
        host: the address to listen on; by default only this machine reaches it.
        port: 0 lets the system choose.
        checkpoint: of a run: best, latest or a step; by default best if there is one.
        max_batch: the most images the model is given at a time.
        max_delay_ms: how long a request waits for others.
        max_queue: images that may wait; what comes then is answered with 429.
        max_body_mb: megabytes of a request.
        max_pixels: of an image file.
        max_instances: images of a request.
        timeout_secs: for sending a request, and again for it to be reached in the queue.
        poll_secs: between two looks for a new version.
        ready: called with a line for people when requests are answered.
        source: where the options come from, for error messages.
        **options: how a run is computed, such as engine.

    Example:
        ``modelyard.serve("runs/first", name="digits", port=8501)``

    Raises:
        UserError: if there is nothing to serve, or the address is in use.
    """
    _check(
        source, model_dir, export, {"checkpoint": checkpoint, **options},
        {"max_batch": max_batch, "max_queue": max_queue, "max_pixels": max_pixels, "max_instances": max_instances,
         "max_body_mb": max_body_mb, "timeout_secs": timeout_secs, "poll_secs": poll_secs},
        {"max_delay_ms": max_delay_ms, "port": port},
    )  # fmt: skip
    try:
        import uvicorn

        from modelyard.serving.http.app import NAME, Service
        from modelyard.serving.http.connections import patient_for
        from modelyard.serving.http.metrics import Metrics
    except ImportError as error:
        raise UserError(f"{NEEDS} ({error})") from error
    from modelyard.serving.http.batching import Batching
    from modelyard.serving.http.body import Limits
    from modelyard.serving.http.sources import ExportSource, RunSource, Source
    from modelyard.serving.http.versions import Versions

    called = name if name is not None else Path(str(export or model_dir)).resolve().name
    if not NAME.fullmatch(called):
        message = (
            f"{called!r} must be made of letters, digits and . - _ since it is part of a path. Give another --name."
        )
        raise ConfigError([Problem(source, "name", message)])
    versions_of: Source
    if export is not None:
        versions_of = ExportSource(export)
    else:
        versions_of = RunSource(str(model_dir), None if checkpoint is None else str(checkpoint), options, source)
    with _listening(host, port) as listener:
        metrics = Metrics()
        batching = Batching(max_batch, max_delay_ms / 1000, max_queue)
        versions = Versions(versions_of, batching, metrics.batch_done, poll_secs)
        versions.open()
        body = int(max_body_mb * (1 << 20))
        limits = Limits(body, 8 * body, max_pixels, max_instances, timeout_secs)
        service = Service(called, versions, limits, metrics)
        config = uvicorn.Config(
            service.app(),
            http=patient_for(timeout_secs),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=int(timeout_secs) + 5,
        )
        shown = f"[{host}]" if ":" in host else host
        line = f"serving {called} at http://{shown}:{listener.getsockname()[1]}/"
        with _quiet_signals(), _quick_turns():
            _server(uvicorn.Server, config, lambda: (ready or log.info)(line)).run(sockets=[listener])
    log.info("stopped: every request that came was answered")


def _check(
    source: str,
    model_dir: str | Path | None,
    export: str | Path | None,
    of_run: dict[str, Any],
    above: dict[str, float],
    from_zero: dict[str, float],
) -> None:
    problems = []
    if (model_dir is None) == (export is None):
        problems.append(Problem(source, "model_dir", "give either a run (--model_dir) or an export (--export)."))
    if export is not None:
        for key, value in of_run.items():
            if value is not None:
                problems.append(Problem(source, key, "is for runs; an export is served as it is."))
    endless = [Problem(source, k, "must be a finite number.") for k, v in {**above, **from_zero}.items() if v > _MOST]
    problems += endless  # no wait of the system, and no size, is so large
    problems += [Problem(source, k, f"must be above 0; it is {v:g}.") for k, v in above.items() if not v > 0]
    problems += [Problem(source, k, f"can't be below 0; it is {v:g}.") for k, v in from_zero.items() if not v >= 0]
    if from_zero["port"] > 65535:
        problems.append(Problem(source, "port", f"is at most 65535; it is {from_zero['port']}."))
    if problems:
        raise ConfigError(problems)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """The address, taken before the model is loaded: someone else's server is found out at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RunError(f"{host} is no address of this machine: {error.strerror or error}.") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise RunError(
                f"can't listen on {host}:{port}: {error.strerror or error}. Give another --port (0: any that is free), "
                "or --host."
            ) from error
        yield listener


def _server(kind: Any, config: Any, started: Callable[[], Any]) -> Any:
    class Server(kind):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started()

    return Server(config)


@contextmanager
def _quick_turns() -> Iterator[None]:
    """The thread of the model waits for Python's lock several times a batch, by default up to 5 ms each."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises the signal again that it stopped for; a server that was told to stop has done its work well."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
