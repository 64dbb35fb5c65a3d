"""Ports of this machine that nobody else is given."""

from __future__ import annotations

import socket
from types import TracebackType

HOST = "127.0.0.1"


class HeldPorts:
    """Ports that the system picked, kept until `close`.

    They are bound but not listened on, with both ways of sharing an address: so a server that uses either, as
    TensorFlow's does, can listen there, and the system gives them to nobody.
    """

    def __init__(self, count: int) -> None:
        self._sockets: list[socket.socket] = []
        try:
            for _ in range(count):
                held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                self._sockets.append(held)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if hasattr(socket, "SO_REUSEPORT"):
                    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                held.bind((HOST, 0))
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[str]:
        """host:port of each."""
        return [f"{HOST}:{held.getsockname()[1]}" for held in self._sockets]

    def close(self) -> None:
        """Gives them back."""
        for held in self._sockets:
            held.close()
        self._sockets = []

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
