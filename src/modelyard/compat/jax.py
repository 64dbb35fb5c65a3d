"""JAX's private APIs. Written for JAX 0.8 to 0.11."""

from __future__ import annotations

import ctypes
from functools import partial

from jax._src import xla_bridge
from jax._src.distributed import global_state


def bind_collectives(address: str) -> None:
    """Makes Gloo, which computes sums over processes on CPUs, listen on one interface.

    By default it is that of the machine's host name, and JAX has no option for it. To be called before JAX starts.
    """
    library = xla_bridge._jax
    library.make_gloo_tcp_collectives = partial(library.make_gloo_tcp_collectives, hostname=address)


def drop_distributed_state() -> None:
    """Drops JAX's client and service, so that it does not wait for other processes at exit."""
    for part in (global_state.client, global_state.service):
        if part is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))  # the destructors wait, too
    global_state.client = global_state.service = None
