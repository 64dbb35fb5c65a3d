"""Messages between the processes of a run: small JSON objects over TCP, some with bytes after them. Never pickle."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from modelyard import faults

_SIZES = struct.Struct(">IQ")
_MAX_JSON, MAX_BYTES = 4 << 20, 1 << 40
_PIECE = 1 << 20


class ProtocolError(Exception):
    """The other end does not speak this protocol."""


@dataclass(frozen=True)
class Message:
    """One message."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    payload: bytes = b""


class Connection:
    """A connection between two processes. Any thread may send, and none waits for it; one thread receives.

    A thread of its own sends the messages, so that a peer that reads nothing blocks nobody else. While there is nothing
    to send, the thread sends a heartbeat from time to time.

    Args:
        connection: a connected socket.
        most: the largest payload that is accepted from the other end, in bytes.
    """

    def __init__(self, connection: socket.socket, most: int = 0) -> None:
        self._socket, self._most = connection, most
        self._deadline: float | None = None
        self._outbox: queue.SimpleQueue[tuple[bytes, ...] | None] = queue.SimpleQueue()
        self._beat_seconds: float | None = None
        self._is_stuck = False
        self._sender = threading.Thread(target=self._send_all, name="sender", daemon=True)
        self._starting = threading.Lock()
        with contextlib.suppress(OSError):  # closed already: `receive` raises
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set_timeout(self, seconds: float, in_all: bool = False) -> None:
        """Sets how long the other end may be silent, or read nothing, before `TimeoutError`.

        Args:
            seconds: the limit.
            in_all: the limit is for everything that arrives until the next timeout is set, not for each message.
        """
        self._deadline = time.monotonic() + seconds if in_all else None
        with contextlib.suppress(OSError):  # closed already: `receive` raises
            self._socket.settimeout(seconds)

    def keep_alive(self, seconds: float) -> None:
        """Sends a heartbeat every ``seconds`` from now on."""
        self._beat_seconds = seconds
        self.send("alive")

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Sends a message. If it does not arrive, `receive` raises."""
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
                faults.reach(faults.MESSAGE)
                for part in parts:
                    view = memoryview(part)
                    while view:  # not sendall, whose timeout is for the whole, however long
                        view = view[self._socket.send(view[:_PIECE]) :]
        except OSError as error:
            self._is_stuck = isinstance(error, TimeoutError)
            self._shut_down()  # not closed: what has arrived, such as the reason, can still be read

    def _next(self) -> tuple[bytes, ...] | None:
        try:
            return self._outbox.get(timeout=self._beat_seconds)
        except queue.Empty:
            text = json.dumps({"kind": "alive"}).encode()
            return (_SIZES.pack(len(text), 0) + text,)

    def receive(self) -> Message:
        """Returns the next message.

        Raises:
            EOFError: if the other end has closed the connection.
            TimeoutError: if it is silent, or reads nothing of what is sent.
            ProtocolError: if the message is malformed.
        """
        length, more = _SIZES.unpack(self._read(_SIZES.size))
        if length > _MAX_JSON or more > self._most:
            raise ProtocolError
        try:
            content = json.loads(self._read(length))
        except (ValueError, RecursionError) as error:
            raise ProtocolError from error
        kind = content.pop("kind", None) if isinstance(content, dict) else None
        if not isinstance(kind, str):
            raise ProtocolError
        return Message(kind, content, self._read(more))

    def finish(self, seconds: float) -> None:
        """Closes the connection when everything is sent, or after ``seconds``."""
        self._outbox.put(None)
        if self._sender.ident is not None:
            self._sender.join(seconds)
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._outbox.put(None)
        self._shut_down()
        self._socket.close()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, count: int) -> bytes:
        parts, left = [], count
        while left:
            try:
                if self._deadline is not None:
                    self._socket.settimeout(max(self._deadline - time.monotonic(), 1e-3))
                part = self._socket.recv(min(left, _PIECE))
            except OSError:
                if not self._is_stuck:
                    raise
                part = b""
            if not part:
                raise TimeoutError if self._is_stuck else EOFError
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
