"""`modelyard serve`: serves a run or an export over HTTP until it is stopped.

A request passes compat/uvicorn (connection limits), http/app (paths), http/model_versions (which model), http/limits
(body), http/json_tensors (JSON to images), http/batching (queue and thread), servable and run_model (the model), and
for image files data/images. This module starts them all.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from modelyard.errors import ConfigError, Problem, RunError, UserError

log = logging.getLogger("modelyard")

_LARGEST_OPTION = 1e9
_OTHER_FILES = 256
"""Files that a process opens besides its connections."""
_BACKLOG = 128
"""Clients that connect while the model is loaded wait for their responses."""
_INSTALL = "serving needs starlette, uvicorn, python-multipart and prometheus_client: pip install 'modelyard[serve]'"


def serve(
    model_dir: str | os.PathLike[str] | None = None,
    export: str | Path | None = None,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8501,
    allowed_host: str | Sequence[str] | None = None,
    checkpoint: str | int | None = None,
    max_batch: int = 32,
    max_delay_ms: float = 5.0,
    max_queue: int = 1024,
    max_body_mb: float = 16.0,
    max_pixels: int = 32_000_000,
    max_instances: int = 256,
    max_connections: int = 512,
    timeout_secs: float = 30.0,
    poll_secs: float = 1.0,
    ready: Callable[[str], None] | None = None,
    source: str = "Python",
    **options: Any,
) -> None:
    """Serves a model over HTTP until SIGTERM or Ctrl-C. Requests that have arrived by then are answered.

    Args:
        model_dir: a run folder, or the result of a run; or
        export: a folder of versions, as `modelyard export` writes it. A new version replaces the old one.
        name: the name of the model in the paths; by default the name of the folder.
        host: the address to listen on; by default only this machine can connect.
        port: 0 lets the system choose.
        allowed_host: names besides those of this machine by which clients may call the server, such as a proxy's.
        checkpoint: of a run: best, latest or a step; by default best if there is one.
        max_batch: images per batch.
        max_delay_ms: how long a request waits for others to share a batch.
        max_queue: images in the queue; further requests are answered with 429.
        max_body_mb: megabytes per request.
        max_pixels: pixels per image file.
        max_instances: images per request.
        max_connections: open connections. For one more, the one that has been idle longest is closed.
        timeout_secs: seconds to send a request, and again for its prediction to start.
        poll_secs: seconds between two checks for a new version.
        ready: called with a message once the server accepts requests.
        source: where the options come from, for error messages.
        **options: options that change how a run is computed, such as engine.

    Example:
        ``modelyard.serve("runs/first", name="digits", port=8501)``

    Raises:
        UserError: if there is nothing to serve, or the address is in use.
    """
    model_dir = None if model_dir is None else os.fspath(model_dir)
    _check_options(
        source, model_dir, export, {"checkpoint": checkpoint, **options},
        {"max_batch": max_batch, "max_queue": max_queue, "max_pixels": max_pixels, "max_instances": max_instances,
         "max_body_mb": max_body_mb, "max_connections": max_connections, "timeout_secs": timeout_secs,
         "poll_secs": poll_secs},
        {"max_delay_ms": max_delay_ms, "port": port},
    )  # fmt: skip
    try:
        import uvicorn

        from modelyard.compat.uvicorn import ConnectionLimits, Server, protocol_with_limits, signals_not_raised_again
        from modelyard.serving.http.app import MODEL_NAME, Metrics, Service
        from modelyard.serving.http.hosts import Hosts
        from modelyard.serving.http.limits import Limits
    except ImportError as error:
        raise UserError(f"{_INSTALL} ({error})") from error
    from modelyard.serving.http.batching import BatchingOptions
    from modelyard.serving.http.model_versions import ExportSource, ModelVersions, RunSource, VersionSource

    model_name = name if name is not None else Path(str(export or model_dir)).resolve().name
    if not MODEL_NAME.fullmatch(model_name):
        message = (
            f"{model_name!r} is part of a path: use letters, digits and . - _ only, and at most 100 of them. "
            "Give another --name."
        )
        raise ConfigError([Problem(source, "name", message)])
    allowed = host_names(allowed_host or (), source)
    version_source: VersionSource
    if export is not None:
        version_source = ExportSource(export)
    else:
        version_source = RunSource(str(model_dir), None if checkpoint is None else str(checkpoint), options, source)
    with listen(host, port) as listener:
        metrics = Metrics()
        batching = BatchingOptions(max_batch, max_delay_ms / 1000, max_queue)
        versions = ModelVersions(version_source, batching, metrics.batch_done, poll_secs)
        versions.load_newest()
        max_body = int(max_body_mb * (1 << 20))
        limits = Limits(max_body, 8 * max_body, max_pixels, max_instances, timeout_secs, max_connections)
        hosts = Hosts(host, listener.getsockname()[0], allowed)
        if hosts.accepts_all_names:
            log.warning("other machines can connect, by any name of this one: --allowed_host limits the names")
        connections = ConnectionLimits(
            timeout_secs,
            _possible_connections(max_connections),
            limits.max_pipelined,
            limits.max_unread,
            limits.max_headers,
        )
        config = uvicorn.Config(
            Service(model_name, versions, limits, metrics, hosts).app(),
            http=protocol_with_limits(connections),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # it warns of every request that is no HTTP
            access_log=False,
            server_header=False,
            timeout_keep_alive=60,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=int(timeout_secs) + 5,
        )
        shown_host = f"[{host}]" if ":" in host else host
        line = f"serving {model_name} at http://{shown_host}:{listener.getsockname()[1]}/"
        with signals_not_raised_again(), _short_switch_interval():
            Server(config, lambda: (ready or log.info)(line)).run(sockets=[listener])
    log.info("stopped: all requests were answered")


def _check_options(
    source: str,
    model_dir: str | Path | None,
    export: str | Path | None,
    run_options: dict[str, Any],
    positive: dict[str, float],
    non_negative: dict[str, float],
) -> None:
    problems = []
    if (model_dir is None) == (export is None):
        problems.append(Problem(source, "model_dir", "give either a run (--model_dir) or an export (--export)."))
    if export is not None:
        for key, value in run_options.items():
            if value is not None:
                problems.append(Problem(source, key, "has no effect on an export; it is for runs (--model_dir)."))
    numbers = {**positive, **non_negative}
    # No timeout or size of the operating system is that large.
    most = f"must be a finite number of at most {_LARGEST_OPTION:,.0f}."
    problems += [Problem(source, k, most) for k, v in numbers.items() if v > _LARGEST_OPTION]
    problems += [Problem(source, k, f"must be above 0; it is {v:g}.") for k, v in positive.items() if not v > 0]
    problems += [Problem(source, k, f"can't be below 0; it is {v:g}.") for k, v in non_negative.items() if not v >= 0]
    if non_negative["port"] > 65535:
        problems.append(Problem(source, "port", f"is at most 65535; it is {non_negative['port']}."))
    if problems:
        raise ConfigError(problems)


def host_names(given: str | Sequence[str], source: str) -> list[str]:
    """Returns the names in --allowed_host, which may be separated by commas."""
    from modelyard.serving.http.hosts import is_valid

    texts = [given] if isinstance(given, str) else given
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    wrong = [name for name in names if not is_valid(name)]
    message = "is a name such as models.example.com, without scheme and port; or * for all"
    if wrong:
        raise ConfigError(Problem(source, "allowed_host", f"{message}; got {name!r}.") for name in wrong)
    return names


def _possible_connections(wanted: int) -> int:
    """Returns how many connections may be open, and lets the process open as many files."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if most == resource.RLIM_INFINITY or most >= needed:
        return wanted
    with suppress(OSError, ValueError):
        most_possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_possible, hard))
        most = most_possible
    return max(min(wanted, most - _OTHER_FILES), 1)


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """Listens before the model is loaded: a port in use is an error at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RunError(f"{host} is not an address of this machine: {error.strerror or error}.") from error
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a server that has just been stopped
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)  # two servers may bind, but only one listens
        except OSError as error:
            raise RunError(
                f"can't listen on {host}:{port}: {error.strerror or error}. Give another --port (0: any that is free), "
                "or --host."
            ) from error
        yield listener


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Lets the model's thread get Python's lock sooner: it waits several times per batch, by default up to 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
