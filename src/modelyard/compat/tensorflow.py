"""TensorFlow's private APIs. Written for TensorFlow 2.18 to 2.21."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from modelyard.compat.shared_library import replaced


def configure_coordination(workers: int, register_seconds: float, heartbeat_seconds: float) -> None:
    """Configures TensorFlow's coordination service as `MultiWorkerMirroredStrategy` would, with other timeouts."""
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(register_seconds * 1000),
        heartbeat_timeout_in_ms=int(heartbeat_seconds * 1000),
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=workers)],
    )


def abort_collectives(reason: str) -> None:
    """Aborts the operations that wait for a lost process."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)


def local_value(variable: Any) -> Any:
    """Returns the copy of a Keras variable on the traced replica, which can be assigned without communication."""
    value = variable.value
    return value._get() if isinstance(value, tf.distribute.DistributedValues) else value


def place_next_variable(strategy: Any, server: int) -> None:
    """Makes `ParameterServerStrategy` put its next variable on ``server``. By default it is round robin."""
    strategy.extended._variable_count = server


def schedule_python(coordinator: Any, call: Callable[[], Any]) -> Any:
    """Runs a Python function on any free worker, which `ClusterCoordinator.schedule` does not support.

    The function returns its result directly. Fetching a result of `schedule` just when the worker dies raises an error,
    although the step is run again.
    """
    return coordinator._cluster.schedule(call, (), {})


# -- the interface of its servers -------------------------------------------------------------------------------------

_FAMILY = struct.Struct("=H")
_ADDRESS_AT = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Where the address is in Linux's sockaddr_in and sockaddr_in6."""
_ALL = {4: (bytes(4),), 16: (bytes(16), ipaddress.IPv6Address("::ffff:0.0.0.0").packed)}
"""All interfaces, as addresses of IPv4 and IPv6."""


@contextlib.contextmanager
def servers_bound_to(address: str) -> Iterator[None]:
    """Makes the servers that TensorFlow starts while the block runs listen on one interface.

    TensorFlow binds all interfaces, whatever its cluster spec says: "0.0.0.0:" is a constant in grpc_server_lib.cc. So
    its libraries call our `bind` in place of the system's. It changes the address before the socket has one.

    Args:
        address: the IP address to listen on.
    """
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)
    system = kind(("bind", ctypes.CDLL(None, use_errno=True)))
    raised: list[BaseException] = []

    def bind(descriptor: int, where: int, length: int) -> int:
        try:
            wanted = narrowed(ctypes.string_at(where, length), address)
            return int(system(descriptor, wanted, length))
        except BaseException as error:  # a signal, or a mistake here: the socket must not stay without an address
            raised.append(error)
            ctypes.set_errno(errno.EADDRNOTAVAIL)
            return -1

    # TensorFlow may hold the GIL meanwhile, but it binds in the thread that starts the server.
    with replaced("bind", kind(bind), Path(tf.__file__).parent):
        try:
            yield
        finally:
            if raised:
                raise raised[0]


def narrowed(where: bytes, address: str) -> bytes:
    """Returns a socket address of C with ``address`` in place of all interfaces; other addresses are unchanged."""
    place = _ADDRESS_AT.get(_FAMILY.unpack_from(where)[0]) if len(where) >= _FAMILY.size else None
    if place is None or len(where) < place.stop or where[place] not in _ALL[place.stop - place.start]:
        return where
    ip = ipaddress.ip_address(address)
    if len(where[place]) == 4:
        packed = ip.packed if ip.version == 4 else ipaddress.IPv4Address("127.0.0.1").packed
    else:
        packed = ip.packed if ip.version == 6 else ipaddress.IPv6Address(f"::ffff:{ip}").packed
    return where[: place.start] + packed + where[place.stop :]
