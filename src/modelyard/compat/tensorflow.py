"""TensorFlow's private APIs. Written for TensorFlow 2.18 to 2.21."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context


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
