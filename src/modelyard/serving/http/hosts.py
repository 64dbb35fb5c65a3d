"""The hosts that a request may name, so that web pages of other sites can't use the server.

A page can point a name of its own at 127.0.0.1 (DNS rebinding): the browser then takes this server for the page's own,
but it still sends the page's name as `Host`. Addresses are safe: they can't be pointed elsewhere.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from modelyard.serving.http.limits import RequestError

ANY = "*"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")


class Hosts:
    """The hosts that requests may name.

    On loopback these are addresses, `localhost` and ``listens_on``. Elsewhere it can't be known by which names others
    reach this machine, so all are accepted unless some are allowed.

    Args:
        listens_on: the name or address that the server was told to listen on.
        address: its address.
        allowed: more names, of proxies for example; `ANY` accepts all requests.
        command: the command that has the option for them, for messages.
    """

    def __init__(self, listens_on: str, address: str, allowed: Sequence[str] = (), command: str = "serve") -> None:
        self._option = f"{command} --allowed_host"
        self._allowed = {_lower(name) for name in allowed}
        self.accepts_all_names = not (_is_loopback(address) or self._allowed)
        self._known = {"localhost", _lower(listens_on), *self._allowed}

    def check(self, headers: Headers) -> None:
        """Checks the headers `Host` and `Origin`.

        Raises:
            RequestError: if the request was meant for another server, or comes from a page of another site.
        """
        if ANY in self._allowed:
            return
        given = headers.getlist("host")
        if len(given) > 1:
            raise RequestError(400, "the request has more than one Host header.", close=True)
        host = given[0] if given else ""  # HTTP/1.0 need not have one, and browsers always send it
        name = _name(host)
        if host and not (self.accepts_all_names or name in self._known or _is_address(name)):
            shown = name[:100]
            message = f"this server is not called {shown!r}. If it is, allow the name: {self._option} {shown}"
            raise RequestError(403, message, close=True)
        origin = headers.get("origin")
        if origin is not None and not self._is_own(origin, host):
            message = (
                f"a web page of {origin[:100]!r} may not use this server, which was asked for {host[:100]!r}. If that "
                f"is its own page behind a proxy, allow the name of the proxy: {self._option} NAME"
            )
            raise RequestError(403, message, close=True)

    def _is_own(self, origin: str, host: str) -> bool:
        """Returns whether a page's origin is this server."""
        try:
            netloc = urlsplit(origin).netloc
        except ValueError:
            return False
        return bool(netloc) and (_lower(netloc) == _lower(host) or _name(netloc) in self._allowed)


def is_valid(name: str) -> bool:
    """Returns whether a value of --allowed_host is a name, an address or `ANY`."""
    return name == ANY or bool(_NAME.fullmatch(name)) or _is_address(_lower(name))


def _name(host: str) -> str:
    """Returns a host without its port."""
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?", host)
    return _lower(found[1] if found else host)


def _lower(host: str) -> str:
    return host.lower().rstrip(".").removeprefix("[").removesuffix("]")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return _is_address(address) and ipaddress.ip_address(address).is_loopback
