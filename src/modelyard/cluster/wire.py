"""How processes of a run talk: small JSON messages over TCP, some with bytes after them. Never pickle."""

from __future__ import annotations

import contextlib
import errno
import json
import queue
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
_PIECE = 1 << 20
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
    """A connection between two processes. Any thread may send, and none waits for it; one thread receives.

    Messages go out in a thread of their own, so that an end that takes no bytes holds up nobody else. Where nothing is
    left to say, it says from time to time that this process is alive.

    Args:
        connection: a connected socket.
        most: how many bytes after the JSON are taken from the other end.
    """

    def __init__(self, connection: socket.socket, most: int = 0) -> None:
        self._socket, self._most = connection, most
        self._deadline: float | None = None
        self._outbox: queue.SimpleQueue[tuple[bytes, ...] | None] = queue.SimpleQueue()
        self._beat_seconds: float | None = None
        self._takes_nothing = False
        self._sender = threading.Thread(target=self._send_all, name="sender", daemon=True)
        self._starting = threading.Lock()
        with contextlib.suppress(OSError):  # it has hung up already, which receiving tells
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_timeout(self, seconds: float, in_all: bool = False) -> None:
        """How long the other end may be silent, or take no bytes, before `TimeoutError`.

        Args:
            seconds: how long.
            in_all: not each time, but for all that it says until the next timeout is set.
        """
        self._deadline = time.monotonic() + seconds if in_all else None
        with contextlib.suppress(OSError):  # it is closed, which receiving tells
            self._socket.settimeout(seconds)

    def keep_alive(self, seconds: float) -> None:
        """Says from now on every so many seconds that this process is alive."""
        self._beat_seconds = seconds
        self.send("alive")

    def greet(self) -> None:
        """The first bytes of either side."""
        self._put(MAGIC)

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Says something. If it does not arrive, receiving tells."""
        text = json.dumps({"kind": kind, **fields}).encode()
        self._put(_SIZES.pack(len(text), len(payload)) + text, payload)

    def _put(self, *parts: bytes) -> None:
        self._outbox.put(parts)
        with self._starting:
            if self._sender.ident is None:
                self._sender.start()

    def _send_all(self) -> None:
        try:
            while (parts := self._next()) is not None:
                for part in parts:
                    view = memoryview(part)
                    while view:  # not sendall, whose timeout is for the whole, however long
                        view = view[self._socket.send(view[:_PIECE]) :]
        except OSError as error:
            self._takes_nothing = isinstance(error, TimeoutError)
            self._hang_up()  # not closed: what has arrived, such as the reason, can still be read

    def _next(self) -> tuple[bytes, ...] | None:
        try:
            return self._outbox.get(timeout=self._beat_seconds)
        except queue.Empty:
            text = json.dumps({"kind": "alive"}).encode()
            return (_SIZES.pack(len(text), 0) + text,)

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
            TimeoutError: if it is silent, or takes nothing of what is sent.
            NotOursError: if it makes no sense.
        """
        length, more = _SIZES.unpack(self._exactly(_SIZES.size))
        if length > _MOST_JSON or more > self._most:
            raise NotOursError
        try:
            said = json.loads(self._exactly(length))
        except (ValueError, RecursionError) as error:
            raise NotOursError from error
        kind = said.pop("kind", None) if isinstance(said, dict) else None
        if not isinstance(kind, str):
            raise NotOursError
        return Message(kind, said, self._exactly(more))

    def finish(self, seconds: float) -> None:
        """Hangs up when everything is sent, or after so many seconds."""
        self._outbox.put(None)
        if self._sender.ident is not None:
            self._sender.join(seconds)
        self.close()

    def close(self) -> None:
        """Hangs up."""
        self._outbox.put(None)
        self._hang_up()
        self._socket.close()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _exactly(self, count: int) -> bytes:
        parts, left = [], count
        while left:
            try:
                if self._deadline is not None:
                    self._socket.settimeout(max(self._deadline - time.monotonic(), 1e-3))
                part = self._socket.recv(min(left, _PIECE))
            except OSError:
                if not self._takes_nothing:
                    raise
                part = b""
            if not part:
                raise TimeoutError if self._takes_nothing else EOFError
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def split(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """``host:port``, the other way round."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
    try:
        if connection.getsockname() == connection.getpeername():  # Linux lets a socket find itself on a free port
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    except OSError:
        connection.close()
        raise
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
    if made.family == socket.AF_INET6:  # all interfaces are those of IPv4 too, for not everyone may have the other
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return made


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError:
        return socket.AF_INET


def _interface(host: str) -> str:
    """Loopback stays on this machine; otherwise all interfaces, for a name may stand for an address in front of it."""
    return host if host == "localhost" or host.startswith("127.") or host == "::1" else ""
