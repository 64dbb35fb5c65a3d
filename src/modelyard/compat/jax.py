"""JAX's private APIs. Written for JAX 0.8 to 0.11."""

from __future__ import annotations

import ctypes

from jax._src.distributed import global_state


def drop_distributed_state() -> None:
    """Drops JAX's client and service, so that it does not wait for other processes at exit."""
    for part in (global_state.client, global_state.service):
        if part is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))  # the destructors wait, too
    global_state.client = global_state.service = None
