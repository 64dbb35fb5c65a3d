"""How processes of a run talk: small JSON messages over TCP, some with bytes after them. Never pickle."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from modelyard.errors import ClusterError

MAGIC = b"modelyard cluster 1\n"
_SIZES = struct.Struct(">IQ")
_MOST_JSON, MOST_BYTES = 4 << 20, 1 << 40
_OWN_PORT_SECONDS = 20.0
"""The process that was here before a restart may take a moment to leave its port."""


class NotOursError(Exception):
    """Whoever is at the other end does not speak this language."""


@dataclass(frozen=True)
class Message:
    """What was said."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


class Wire:
    """A connection between two processes. Any thread may send; one thread receives.

    Args:
        connection: a connected socket.
        most: how many bytes after the JSON are taken from the other end.
    """

    def __init__(self, connection: socket.socket, most: int = 0) -> None:
        self._socket, self._most = connection, most
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_timeout(self, seconds: float) -> None:
        """How long the other end may be silent, or take no bytes, before `TimeoutError`."""
        self._socket.settimeout(seconds)

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Says something."""
        text = json.dumps({"kind": kind, **fields}).encode()
        with self._sending:
            self._socket.sendall(_SIZES.pack(len(text), len(payload)) + text)
            if payload:
                self._socket.sendall(payload)

    def greet(self) -> None:
        """The first bytes of either side."""
        with self._sending:
            self._socket.sendall(MAGIC)

    def expect_greeting(self) -> None:
        """Takes the first bytes of the other side.

        Raises:
            NotOursError: if it is something else that listens there.
        """
        if self._exactly(len(MAGIC)) != MAGIC:
            raise NotOursError

    def receive(self) -> Message:
        """What the other end says next.

        Raises:
            EOFError: if it hung up.
            NotOursError: if it makes no sense.
        """
        length, more = _SIZES.unpack(self._exactly(_SIZES.size))
        if length > _MOST_JSON or more > self._most:
            raise NotOursError
        try:
            said = json.loads(self._exactly(length))
            kind = said.pop("kind")
        except (ValueError, AttributeError, KeyError, RecursionError) as error:
            raise NotOursError from error
        if not isinstance(kind, str):
            raise NotOursError
        return Message(kind, said, self._exactly(more))

    def close(self) -> None:
        """Hangs up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        parts, left = [], count
        while left:
            part = self._socket.recv(min(left, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def split(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host may stand in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(address: str) -> socket.socket:
    """Listens at ``address``, which must be one of this machine's.

    Raises:
        ClusterError: if the port is in use.
    """
    listener = _bound(address)
    listener.listen(128)
    return listener


def check_free(address: str) -> None:
    """Makes sure that a server can be started at ``address``.

    Raises:
        ClusterError: if the port is in use.
    """
    _bound(address).close()


def free_port(host: str) -> int:
    """A port of this machine that the system picks. It can't be held: TensorFlow's server shares a port with nobody."""
    with _socket(host) as probe:
        probe.bind((_interface(host), 0))
        return int(probe.getsockname()[1])


def connect(address: str, timeout: float) -> socket.socket:
    """A connection to ``address``.

    Raises:
        OSError: if nobody listens there.
    """
    connection = socket.create_connection(split(address), timeout)
    if connection.getsockname() == connection.getpeername():  # Linux lets a socket find itself on a free port
        connection.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    return connection


def _bound(address: str) -> socket.socket:
    host, port = split(address)
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
    """Whether somebody listens. gRPC shares its port with others, so that binding alone would not tell."""
    try:
        connect(address, 1.0).close()
    except OSError:
        return False
    return True


def _socket(host: str) -> socket.socket:
    made = socket.socket(_family(host), socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError:
        return socket.AF_INET


def _interface(host: str) -> str:
    """Loopback stays on this machine; otherwise all interfaces, for a name may stand for an address in front of it."""
    return host if host == "localhost" or host.startswith("127.") or host == "::1" else ""
