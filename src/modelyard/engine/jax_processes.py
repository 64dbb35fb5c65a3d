"""JAX's own connections between the processes of a run.

JAX runs a service in the coordinator. It ends a process that cannot reach the service at once, with a C++ trace and no
reason. So followers connect through a relay of their own, which never hangs up: they learn of a lost process from the
process group, which knows which one it is, and exit with its message.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import socket
import sys
import threading

import jax
from jax.experimental import multihost_utils

from modelyard.cluster.description import ProcessGroup
from modelyard.compat.jax import drop_distributed_state
from modelyard.config.backend import without_lines
from modelyard.config.schema import Config
from modelyard.errors import PeerLostError, UserError
from modelyard.system.network import connect, is_loopback, join_address, listen, split_address

_JOINING_SECONDS = 60
"""The time that JAX may take to connect the processes, after ours have joined."""
_GRACE_SECONDS = 5.0
"""The time before this process exits: a computation that waits for a process that hangs never ends by itself."""
_PIECE = 1 << 16
_GREETING = re.compile(rb"^\[Gloo\] Rank .*\n", re.M)


def join_processes(config: Config, group: ProcessGroup) -> None:
    """Joins the other processes, before JAX starts in this one.

    Raises:
        UserError: if JAX has started already.
        PeerLostError: if they cannot connect.
    """
    address = group.spec["worker"][0]
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM
    group.grace_seconds = _GRACE_SECONDS
    relay = Relay(address) if group.rank else None
    try:
        jax.distributed.initialize(
            relay.address if relay is not None else address,
            group.size,
            group.rank,
            initialization_timeout=_JOINING_SECONDS,
            heartbeat_timeout_seconds=int(
                config.peer_timeout_secs * 3 + ProcessGroup.grace_seconds * 2
            ),  # ours is first
            shutdown_timeout_seconds=_JOINING_SECONDS,
            coordinator_bind_address=join_address(_interface(address), split_address(address)[1])
            if group.rank == 0
            else None,
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        if "must be called before" in str(error) or "only be called once" in str(error):
            raise UserError(
                f"JAX already runs in this process and cannot join a cluster any more: {error} Start a new process."
            ) from error
        raise _explained(group, error) from error
    if relay is not None:
        relay.holds = True
    atexit.register(_leave, group)  # runs before JAX's own handler, which was registered earlier


def meet(group: ProcessGroup) -> None:
    """Connects the devices of all processes now, without the message that JAX prints at the first step.

    Raises:
        PeerLostError: if a process is gone.
    """
    try:
        with without_lines(sys.stdout, 1, _GREETING):
            multihost_utils.sync_global_devices("modelyard")
    except jax.errors.JaxRuntimeError as error:
        raise _explained(group, error) from error


def _explained(group: ProcessGroup, error: Exception) -> Exception:
    reason = group.explain(error)
    return reason if reason is not error else PeerLostError(f"JAX could not connect the processes: {error}")


def _interface(address: str) -> str:
    """Returns the interface to listen on: all of them, since a name may resolve to a proxy's address."""
    host, _ = split_address(address)
    return host if is_loopback(host) else "::"


def _leave(group: ProcessGroup) -> None:
    """Leaves JAX's service at exit, without its barrier: our processes have already left in order.

    After a loss the process exits at once: computations may wait for the process that is gone.
    """
    if group.failure is not None and group.lost:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(group.failure.status)
    drop_distributed_state()


class Relay:
    """Passes bytes between JAX in this process and the service in the coordinator; silent when the service is gone.

    Args:
        target: host:port of the service.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = listen("127.0.0.1:0")
        self.address = join_address(*self._listener.getsockname())
        self.holds = False
        """Whether to hide the end of the service from JAX; before the processes have joined, JAX may retry."""
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
                arguments = (source, sink, from_service)
                threading.Thread(target=self._pass_on, args=arguments, name="relay", daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, from_service: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                sink.sendall(piece)
        if not (from_service and self.holds):
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
