"""JAX's own ties between the processes of a run, kept from ending a process before ours has told why.

JAX has a service in the lead that all processes keep in touch with. Whoever can't reach it any more is ended by JAX at
once, with a trace of C++. So followers reach it through a relay of their own, which never hangs up: they learn of a
loss from the crew, which knows who is gone, and leave with its words.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import re
import socket
import sys
import threading

import jax
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from modelyard.cluster.crew import GRACE_SECONDS, Connected, Crew
from modelyard.cluster.wire import connect, join, listen, split
from modelyard.config.backend import without_lines
from modelyard.config.schema import Config
from modelyard.errors import PeerLostError, UserError

_JOINING_SECONDS = 60
"""How long JAX's processes may take to find each other, after ours have met."""
_GRACE_SECONDS = 5.0
"""Nothing ends a computation that waits for a process that hangs; one that died ends it at once."""
_PIECE = 1 << 16
_GREETING = re.compile(rb"^\[Gloo\] Rank .*\n", re.M)


def join_processes(config: Config, crew: Crew) -> None:
    """Joins the other processes, before JAX starts in this one.

    Raises:
        UserError: if JAX has started already.
        PeerLostError: if they don't find each other.
    """
    address = crew.spec["worker"][0]
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    crew.grace = _GRACE_SECONDS
    relay = Relay(address) if crew.rank else None
    try:
        jax.distributed.initialize(
            relay.address if relay is not None else address,
            crew.size,
            crew.rank,
            initialization_timeout=_JOINING_SECONDS,
            heartbeat_timeout_seconds=int(config.peer_timeout_secs * 3 + GRACE_SECONDS * 2),  # ours is to be first
            shutdown_timeout_seconds=_JOINING_SECONDS,
            coordinator_bind_address=join(_interface(address), split(address)[1]) if crew.rank == 0 else None,
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        if "must be called before" in str(error) or "only be called once" in str(error):
            raise UserError(
                f"JAX already runs in this process and can't join a cluster any more: {error} Start a new process."
            ) from error
        raise _explained(crew, error) from error
    if relay is not None:
        relay.holds = True
    atexit.register(_leave, crew)  # before what JAX does then, which was registered when it was imported


def meet(crew: Crew) -> None:
    """Connects the devices of all processes. They would do so at the first step, and say so on standard output.

    Raises:
        PeerLostError: if one is gone.
    """
    try:
        with without_lines(sys.stdout, 1, _GREETING):
            multihost_utils.sync_global_devices("modelyard")
    except jax.errors.JaxRuntimeError as error:
        raise _explained(crew, error) from error


def _explained(crew: Crew, error: Exception) -> Exception:
    reason = crew.explain(error)
    return reason if reason is not error else PeerLostError(f"JAX's processes did not find each other: {error}")


def _interface(address: str) -> str:
    """Where the service listens: on all interfaces, for a name may stand for an address in front of it."""
    host, _ = split(address)
    return host if host.startswith("127.") or host == "::1" else "::"


def _leave(crew: Crew) -> None:
    """At the end of the process: JAX would wait for all others to be there for a farewell.

    Ours have said goodbye already. After a loss nothing of JAX is waited for at all, not even for computations: they
    may be waiting for the one that is gone.
    """
    if isinstance(crew, Connected) and crew.failure is not None and crew.lost:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(crew.failure.status)
    for tie in (global_state.client, global_state.service):
        if tie is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(tie))  # their destructors wait, too
    global_state.client = global_state.service = None


class Relay:
    """Passes bytes on between JAX in this process and the service in the lead. When that is gone, it keeps silent.

    Args:
        target: host:port of the service.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = listen("127.0.0.1:0")
        self.address = join(*self._listener.getsockname())
        self.holds = False
        """Whether the end of the service is kept from JAX; before that, it may try again."""
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def _accept(self) -> None:
        while True:
            inner, _ = self._listener.accept()
            try:
                outer = connect(self._target, _JOINING_SECONDS)
            except OSError:
                if not self.holds:
                    inner.close()
                continue
            outer.settimeout(None)
            for source, sink, from_service in ((inner, outer, False), (outer, inner, True)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                words = (source, sink, from_service)
                threading.Thread(target=self._pass_on, args=words, name="relay", daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, from_service: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                sink.sendall(piece)
        if not (from_service and self.holds):
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
