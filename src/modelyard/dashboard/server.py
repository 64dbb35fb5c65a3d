"""`modelyard dashboard`: listens, prints the address with the token, and serves the pages until it is stopped."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from modelyard import storage
from modelyard.errors import ConfigError, Problem, RunError, UserError
from modelyard.serving.http.server import host_names, listen

log = logging.getLogger("modelyard")
_INSTALL = "the dashboard needs starlette and uvicorn: pip install 'modelyard[serve]'"
_TIMEOUT = 30.0
_CONNECTIONS = 128


def dashboard(
    *folders: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 8600,
    allowed_host: str | Sequence[str] | None = None,
    ready: Callable[[str], None] | None = None,
    program: Sequence[str] | None = None,
    source: str = "Python",
) -> None:
    """Serves pages over all runs below some folders until SIGTERM or Ctrl-C. Runs that were resumed there go on.

    Args:
        *folders: folders with runs, at any depth, or their URLs; by default ``runs``.
        host: the address to listen on; by default only this machine can connect.
        port: 0 lets the system choose.
        allowed_host: names besides those of this machine by which browsers may call the server, such as a proxy's.
        ready: called with the address, which has the token, once the server accepts requests.
        program: the program that resumes a run; by default Modelyard itself.
        source: where the options come from, for error messages.

    Raises:
        UserError: if a folder does not exist, or the address is in use.
    """
    paths = [_absolute(folder) for folder in folders or ("runs",)]
    if not 0 <= port <= 65535:
        raise ConfigError([Problem(source, "port", f"is 0 to 65535; it is {port}.")])
    try:
        import uvicorn

        from modelyard.compat.uvicorn import ConnectionLimits, Server, protocol_with_limits, signals_not_raised_again
        from modelyard.dashboard.app import Access, Dashboard
        from modelyard.serving.http.hosts import Hosts
    except ImportError as error:
        raise UserError(f"{_INSTALL} ({error})") from error

    allowed = host_names(allowed_host or (), source)
    with listen(host, port) as listener:
        address, number = listener.getsockname()[:2]
        hosts = Hosts(host, address, allowed, command="dashboard")
        if hosts.accepts_all_names:
            log.warning("other machines can connect. The token is sent to them and back without encryption")
        token = secrets.token_urlsafe(24)
        pages = Dashboard(paths, Access(token, number), hosts, None if program is None else list(program))
        config = uvicorn.Config(
            pages.app(),
            http=protocol_with_limits(ConnectionLimits(_TIMEOUT, _CONNECTIONS, 32, 64 << 20, 64 << 10)),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        shown = f"[{host}]" if ":" in host else host
        line = f"http://{shown}:{number}/?token={token}"
        with signals_not_raised_again():
            Server(config, lambda: (ready or log.info)(line)).run(sockets=[listener])


def _absolute(folder: str | os.PathLike[str]) -> str:
    if storage.is_remote(url := os.fspath(folder)):
        if not storage.exists(url):
            raise RunError(f"there is nothing at {url}. Give a folder with runs, such as s3://bucket/runs")
        return url
    path = Path(folder).expanduser()
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise RunError(f"{folder} {what}. Give folders with runs: modelyard dashboard runs")
    return str(path.resolve())
