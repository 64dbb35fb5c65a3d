"""Addresses, ports and sockets."""

from __future__ import annotations

import errno
import socket
import time

from modelyard.errors import ClusterError

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


def is_loopback(host: str) -> bool:
    """Returns whether ``host`` is this machine's loopback interface."""
    return host == "localhost" or host.startswith("127.") or host == "::1"
