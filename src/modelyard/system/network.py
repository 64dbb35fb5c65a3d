"""Addresses, ports and sockets."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Iterable, Iterator

import psutil

from modelyard.errors import ClusterError

log = logging.getLogger("modelyard")
_OWN_PORT_SECONDS = 20.0
"""A process that used the port before a restart may take a moment to release it."""


def split_address(address: str) -> tuple[str, int]:
    """Splits ``host:port``; an IPv6 host is in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Joins host and port to ``host:port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str) -> socket.socket:
    """Listens at ``address``, which must belong to this machine.

    Raises:
        ClusterError: if the port is in use.
    """
    listener = _bound(address)
    listener.listen(128)
    return listener


def check_free(address: str) -> None:
    """Checks that a server can be started at ``address``.

    Raises:
        ClusterError: if the port is in use.
    """
    _bound(address).close()


def free_port(host: str) -> int:
    """Returns a free port. It can't be reserved, because TensorFlow's server does not share its port."""
    with _socket(host) as probe:
        probe.bind((_interface(host), 0))
        return int(probe.getsockname()[1])


def connect(address: str, timeout: float) -> socket.socket:
    """Connects to ``address``.

    Raises:
        OSError: if nobody listens there.
    """
    connection = socket.create_connection(split_address(address), timeout)
    try:
        if connection.getsockname() == connection.getpeername():  # Linux lets a socket connect to itself on a free port
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    except OSError:
        connection.close()
        raise
    return connection


def _bound(address: str) -> socket.socket:
    host, port = split_address(address)
    deadline = time.monotonic() + _OWN_PORT_SECONDS
    while True:
        try:
            if _answers(address):
                raise OSError(errno.EADDRINUSE, "in use")
            made = _socket(host)
            try:
                made.bind((_interface(host), port))
                return made
            except BaseException:
                made.close()
                raise
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ClusterError(
                    f"this process can't listen at its address {address}: {error.strerror or error}. "
                    "Is it one of this machine's, and is the port above 1023?"
                ) from error
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"port {port} of this process's address {address} is in use by another program. Stop it, or give "
                    "the process another port in the cluster."
                ) from error
            time.sleep(0.2)


def _answers(address: str) -> bool:
    """Returns whether somebody listens. gRPC shares its port with others, so binding alone does not show it."""
    try:
        connect(address, 1.0).close()
    except OSError:
        return False
    return True


def _socket(host: str) -> socket.socket:
    made = socket.socket(_family(host), socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if made.family == socket.AF_INET6:  # all interfaces include those of IPv4, for peers without IPv6
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return made


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError:
        return socket.AF_INET


def _interface(host: str) -> str:
    """Returns the interface to bind: loopback, or else all, because a name may resolve to a gateway's address."""
    return host if is_loopback(host) else ""


# -- loopback ---------------------------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    """Returns whether ``host`` is this machine's loopback interface. Of names, only localhost is."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def are_local(addresses: Iterable[str]) -> bool:
    """Returns whether all of these host:port are on the loopback interface; there must be one."""
    hosts = [split_address(address)[0] for address in addresses]
    return bool(hosts) and all(map(is_loopback, hosts))


def loopback_ip(host: str) -> str:
    """Returns the IP address of a host that `is_loopback`."""
    if host[:1].isalpha():
        return "::1" if _family(host) == socket.AF_INET6 else "127.0.0.1"
    return host


@contextlib.contextmanager
def expects_loopback(program: str, addresses: Iterable[str]) -> Iterator[None]:
    """Logs a warning if ``program`` opens a port on another interface, although all of ``addresses`` are local."""
    if not are_local(addresses):
        yield
        return
    before = _open_ports()
    yield
    opened = sorted(_open_ports() - before)
    if opened:
        log.warning(
            "%s listens on all interfaces at port %s, although all addresses of the cluster are on loopback. It has no "
            "password: whoever reaches the port can read and write your files. Close it with a firewall.",
            program,
            ", ".join(map(str, opened)),
        )


def _open_ports() -> set[int]:
    """Returns the ports at which this process listens on other interfaces than loopback."""
    process = psutil.Process()
    with contextlib.suppress(OSError, psutil.Error):  # not shown in some containers
        sockets = (getattr(process, "net_connections", None) or process.connections)("tcp")
        return {s.laddr.port for s in sockets if s.status == psutil.CONN_LISTEN and not is_loopback(s.laddr.ip)}
    return set()
