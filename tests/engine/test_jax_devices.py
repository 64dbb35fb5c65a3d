"""The relay between JAX in a follower and its service in the coordinator."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from conftest import engine_name
from modelyard.system.network import connect, join_address, listen
from waiting import PATIENCE

pytestmark = pytest.mark.skipif(engine_name() != "jax", reason="JAX only: its service")


@pytest.fixture
def service() -> Iterator[socket.socket]:
    with listen("127.0.0.1:0") as listener:
        listener.settimeout(PATIENCE)
        yield listener


def connected(service: socket.socket, holds: bool) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection through a relay."""
    from modelyard.engine.jax_devices import Relay

    relay = Relay(join_address(*service.getsockname()))
    mine = connect(relay.address, 10)
    theirs, _ = service.accept()
    relay.holds = holds
    return mine, theirs


def test_a_relay_passes_bytes_on_in_both_directions(service: socket.socket) -> None:
    mine, theirs = connected(service, holds=True)
    for source, sink in ((mine, theirs), (theirs, mine)):
        said = bytes(range(256)) * 4096
        source.sendall(said)
        heard = b""
        while len(heard) < len(said):
            heard += sink.recv(1 << 20)
        assert heard == said


def test_the_end_of_the_service_is_kept_from_jax_once_it_has_joined(service: socket.socket) -> None:
    mine, theirs = connected(service, holds=True)
    theirs.sendall(b"last words")
    theirs.close()
    assert mine.recv(100) == b"last words"
    mine.settimeout(0.5)
    with pytest.raises(TimeoutError):
        mine.recv(1)
    mine.sendall(b"still there?")  # as heartbeats would


def test_while_joining_the_end_of_the_service_is_seen_so_that_jax_tries_again(service: socket.socket) -> None:
    mine, theirs = connected(service, holds=False)
    theirs.close()
    assert mine.recv(1) == b""


def test_the_service_sees_that_jax_has_hung_up(service: socket.socket) -> None:
    mine, theirs = connected(service, holds=True)
    mine.close()
    theirs.settimeout(PATIENCE)
    assert theirs.recv(1) == b""
