"""Both ends of a connection prove that they know the secret of the run, before anything else is read or said.

    follower                                  coordinator
    greeting: protocol, 32 random bytes  ──►
                                         ◄──  greeting: protocol, 32 random bytes
    proof: HMAC of its role and both     ──►
                                         ◄──  proof: HMAC of its role and both; or that the secrets differ

A proof is good for one connection, since each side has chosen a part of what it covers, and for one side, since it
covers the role. What is sent later is neither encrypted nor signed. Without a secret, everybody knows the empty one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from modelyard.cluster.secret import SECRET
from modelyard.distributed.connection import ProtocolError

log = logging.getLogger("modelyard")
MAGIC = b"modelyard cluster 2\n"
_RANDOM = 32
GREETING_BYTES = len(MAGIC) + _RANDOM
PROOF_BYTES = 32
FOLLOWER, COORDINATOR = b"follower", b"coordinator"
DIFFERS = b"the secret is not the same\n".ljust(PROOF_BYTES, b"\n")
"""In place of a proof, so that the process with the wrong secret can say so."""
_SECONDS = 10.0
"""How long a connection may take to identify itself."""
_MAX_UNKNOWN = 256
"""Connections that have not identified themselves; beyond that, the oldest is closed."""


class WrongSecretError(ProtocolError):
    """The coordinator does not have the secret of this process."""


def greeting() -> bytes:
    """Returns the first bytes of a new connection."""
    return MAGIC + secrets.token_bytes(_RANDOM)


def proof(secret: bytes, role: bytes, followers: bytes, coordinators: bytes) -> bytes:
    """Returns what only an end that knows the secret can send, after both greetings."""
    key = hashlib.sha256(b"modelyard cluster" + secret).digest()  # some builds of OpenSSL refuse short ones
    return hmac.digest(key, b"\n".join((role, followers, coordinators)), "sha256")


def identify(connection: socket.socket, secret: bytes, seconds: float) -> None:
    """Proves to the coordinator that this process knows the secret, and has it prove the same.

    Raises:
        WrongSecretError: if the coordinator has another secret.
        ProtocolError: if another program listens there.
        EOFError: if it closes the connection.
        TimeoutError: if it has not answered in time.
    """
    deadline = time.monotonic() + seconds
    mine = greeting()
    connection.sendall(mine)
    theirs = _read(connection, GREETING_BYTES, deadline)
    if not theirs.startswith(MAGIC):
        raise ProtocolError
    connection.sendall(proof(secret, FOLLOWER, mine, theirs))
    answer = _read(connection, PROOF_BYTES, deadline)
    if answer == DIFFERS:
        raise WrongSecretError
    if not hmac.compare_digest(answer, proof(secret, COORDINATOR, mine, theirs)):
        raise ProtocolError


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    read = b""
    while len(read) < count:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(count - len(read))
        if not part:
            raise EOFError
        read += part
        if not (read.startswith(MAGIC[: len(read)]) or count == PROOF_BYTES):
            raise ProtocolError
    return read


class _Unknown:
    """A connection that has not identified itself."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.socket, self.host = connection, host
        self.until = time.monotonic() + _SECONDS
        self.read = b""
        self.greetings: tuple[bytes, ...] = ()
        """Theirs and ours, when both are complete."""


class Door:
    """Accepts connections, and lets in those that know the secret. One thread serves all that have not proved it yet.

    Args:
        listener: a listening socket; closed at the end.
        secret: the secret; empty for none.
        admit: called with the socket of a process that knows the secret. It must not block.
    """

    def __init__(self, listener: socket.socket, secret: bytes, admit: Callable[[socket.socket], None]) -> None:
        self._listener, self._secret, self._admit = listener, secret, admit
        self._unknown: dict[_Unknown, None] = {}  # the oldest first
        self._reported: set[str] = set()
        self._closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes the port."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        self._thread.join()

    def _serve(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(1.0):
                if key.data is None:
                    self._accept()
                elif key.data in self._unknown:  # not closed meanwhile
                    self._continue(key.data)
            while (oldest := next(iter(self._unknown), None)) and oldest.until < time.monotonic():
                self._close(oldest, f"has not said who it is for {_SECONDS:g} s")
        for unknown in list(self._unknown):
            self._close(unknown)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # closed, or the system is short of something for the moment, such as file descriptors
            self._close_oldest()
            self._closed.wait(0.1)
            return
        if len(self._unknown) >= _MAX_UNKNOWN:
            self._close_oldest()
        unknown = _Unknown(connection, address[0])
        self._unknown[unknown] = None
        try:
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, unknown)
        except OSError:
            self._close(unknown)

    def _close_oldest(self) -> None:
        if oldest := next(iter(self._unknown), None):
            self._close(oldest, "has not said who it is, and is one of many")

    def _continue(self, unknown: _Unknown) -> None:
        """Reads what a connection has sent; when that is complete, answers."""
        wanted = PROOF_BYTES if unknown.greetings else GREETING_BYTES
        try:
            part = unknown.socket.recv(wanted - len(unknown.read))
            unknown.read += part
            if not part:
                self._close(unknown, "has closed the connection" if unknown.read or unknown.greetings else "")
            elif not unknown.greetings and not unknown.read.startswith(MAGIC[: len(unknown.read)]):
                self._close(unknown, "does not speak the protocol of this version of Modelyard")
            elif len(unknown.read) == wanted:
                self._check(unknown) if unknown.greetings else self._greet(unknown)
        except BlockingIOError:
            return
        except OSError:
            self._close(unknown)

    def _greet(self, unknown: _Unknown) -> None:
        mine = greeting()
        self._send(unknown, mine)
        unknown.greetings = (unknown.read, mine)
        unknown.read = b""

    def _check(self, unknown: _Unknown) -> None:
        if not hmac.compare_digest(unknown.read, proof(self._secret, FOLLOWER, *unknown.greetings)):
            self._send(unknown, DIFFERS)
            self._report(
                "secret",
                f"a process at {unknown.host} was not let in: its secret is not that of this process. Give all "
                f"processes of the run the same {SECRET}, or none. Others are not reported.",
            )
            self._close(unknown)
            return
        self._send(unknown, proof(self._secret, COORDINATOR, *unknown.greetings))
        self._forget(unknown)
        unknown.socket.setblocking(True)
        self._admit(unknown.socket)

    def _send(self, unknown: _Unknown, data: bytes) -> None:
        if unknown.socket.send(data) != len(data):  # a new connection has room for it
            raise OSError

    def _forget(self, unknown: _Unknown) -> None:
        self._selector.unregister(unknown.socket)
        del self._unknown[unknown]

    def _close(self, unknown: _Unknown, why: str = "") -> None:
        self._unknown.pop(unknown, None)  # it may be let in already
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(unknown.socket)
        unknown.socket.close()
        if why:
            self._report(
                "unknown",
                f"a program at {unknown.host} connected to the port of this run and was not let in: it {why}. Allow "
                "only the machines of the cluster to reach this port. Others are not reported.",
            )

    def _report(self, kind: str, message: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("%s", message)
