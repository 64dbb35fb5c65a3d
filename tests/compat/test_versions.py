"""The private attributes that `modelyard.compat` uses exist in the installed libraries."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from modelyard.compat.shared_library import replaced


def require(library: str, owner: Any, *names: str) -> None:
    """Fails with the versions that a module of `modelyard.compat` was written for if an attribute is gone."""
    module = importlib.import_module(f"modelyard.compat.{library}")
    written_for = (module.__doc__ or "").split("\n\n")[0]
    installed = importlib.import_module(library).__version__
    gone = [name for name in names if not hasattr(owner, name)]
    shown = getattr(owner, "__name__", type(owner).__name__)
    assert not gone, (
        f"{library} {installed} has no {shown}.{', '.join(gone)}, which modelyard/compat/{library}.py uses. "
        f"Adapt that module. It says: {written_for}"
    )


def test_keras(two_devices: None) -> None:
    import keras
    from keras.src.backend.common import dtypes
    from keras.src.saving import saving_lib

    require("keras", dtypes, "BIT64_TO_BIT32_DTYPE")
    require("keras", saving_lib, "_save_state", "H5IOStore")
    require("keras", keras.layers.Layer, "_flatten_layers", "save_own_variables")
    require("keras", keras.layers.ReLU(), "_inbound_nodes")


@pytest.mark.tensorflow_only("Keras's TensorFlow backend")
def test_keras_on_tensorflow(two_devices: None) -> None:
    import keras
    from keras.src.backend.tensorflow import nn

    require("keras", keras.optimizers.SGD(), "_all_reduce_sum_gradients")
    require("keras", nn, "_compute_moments_sync")


@pytest.mark.jax_only("Keras's JAX backend")
def test_keras_on_jax(two_devices: None) -> None:
    from keras.src.backend.jax import nn
    from keras.src.backend.jax import random as drawing

    require("keras", nn, "moments")
    require("keras", drawing, "normal", "uniform", "truncated_normal", "jax_draw_seed")


@pytest.mark.jax_only("JAX")
def test_jax(two_devices: None) -> None:
    import jax
    from jax._src import xla_bridge
    from jax._src.distributed import global_state

    require("jax", global_state, "client", "service")
    require("jax", xla_bridge._jax, "make_gloo_tcp_collectives")
    signature = xla_bridge._jax.make_gloo_tcp_collectives.__doc__
    assert "hostname" in signature, f"JAX {jax.__version__}: compat/jax.bind_collectives"
    assert "make_gloo_tcp_collectives" in inspect.getsource(xla_bridge.make_cpu_client)


@pytest.mark.tensorflow_only("TensorFlow")
def test_tensorflow(two_devices: None) -> None:
    import tensorflow as tf
    from tensorflow.python.distribute import parameter_server_strategy_v2, values
    from tensorflow.python.distribute.coordinator import cluster_coordinator
    from tensorflow.python.eager import context

    require("tensorflow", context.context(), "configure_coordination_service", "abort_collective_ops")
    require("tensorflow", values.DistributedValues, "_get")
    require("tensorflow", cluster_coordinator.Cluster, "schedule")
    assert issubclass(values.DistributedVariable, tf.distribute.DistributedValues)
    # Attributes of instances, which exist in a cluster only: they are named in the classes' code.
    extended = inspect.getsource(parameter_server_strategy_v2.ParameterServerStrategyV2Extended)
    assert "self._variable_count" in extended, f"TensorFlow {tf.__version__}: compat/tensorflow.place_next_variable"
    coordinator = inspect.getsource(cluster_coordinator.ClusterCoordinator)
    assert "self._cluster" in coordinator, f"TensorFlow {tf.__version__}: compat/tensorflow.schedule_python"


@pytest.mark.tensorflow_only("TensorFlow")
@pytest.mark.skipif(sys.platform != "linux", reason="a warning says what is open elsewhere")
def test_the_libraries_of_tensorflow_bind_through_a_table(two_devices: None) -> None:
    import tensorflow as tf

    def bind(descriptor: int, where: int, length: int) -> int:
        return -1

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)
    with replaced("bind", kind(bind), Path(tf.__file__).parent) as entries:
        assert entries > 0, f"TensorFlow {tf.__version__}: compat/tensorflow.servers_bound_to"


def test_uvicorn() -> None:
    import uvicorn
    from starlette.applications import Starlette
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle as H11Cycle
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle as HttpToolsCycle
    from uvicorn.server import ServerState

    async def protocols() -> list[Any]:
        config = uvicorn.Config(Starlette(), lifespan="off", ws="none", log_config=None)
        config.load()
        return [cls(config, ServerState(), {}, asyncio.get_running_loop()) for cls in (H11Protocol, HttpToolsProtocol)]

    for protocol in asyncio.run(protocols()):
        require("uvicorn", protocol, "cycle", "transport", "loop", "connection_made", "connection_lost")
    require("uvicorn", HttpToolsProtocol, "data_received", "on_body", "on_message_complete")
    require("uvicorn", uvicorn.Server, "startup", "run")
    for cycle in (H11Cycle, HttpToolsCycle):
        assert "self.response_complete" in inspect.getsource(cycle), f"uvicorn {uvicorn.__version__}: {cycle}"
