"""TensorFlow's private APIs. Written for TensorFlow 2.18 to 2.21."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context


def configure_coordination(workers: int, register_seconds: float, heartbeat_seconds: float) -> None:
    """Sets up TensorFlow's own watch over the processes as `MultiWorkerMirroredStrategy` would, with other limits."""
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(register_seconds * 1000),
        heartbeat_timeout_in_ms=int(heartbeat_seconds * 1000),
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=workers)],
    )


def abort_collectives(reason: str) -> None:
    """Ends the operations that wait for a process that is gone."""
    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)


def local_value(variable: Any) -> Any:
    """Returns the copy of a Keras variable on the replica that is traced, to assign it without a message to others."""
    value = variable.value
    return value._get() if isinstance(value, tf.distribute.DistributedValues) else value


def place_next_variable(strategy: Any, server: int) -> None:
    """Makes `ParameterServerStrategy` put its next variable on ``server``. By itself it takes turns."""
    strategy.extended._variable_count = server


def schedule_python(coordinator: Any, call: Callable[[], Any]) -> Any:
    """Runs a Python function on whichever worker is free, which `ClusterCoordinator.schedule` does not allow.

    The function returns its result with it. Whoever fetches a result of `schedule` just when the worker dies gets an
    error, although the step is run again.
    """
    return coordinator._cluster.schedule(call, (), {})
