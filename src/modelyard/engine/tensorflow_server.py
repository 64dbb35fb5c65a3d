"""The TensorFlow server of a worker or a parameter server: it keeps and computes what the chief tells it to."""

from __future__ import annotations

import tensorflow as tf

from modelyard.cluster.roles import WORKER, Cluster
from modelyard.errors import ClusterError
from modelyard.system.machine import available_cores

_running: list[tf.distribute.Server] = []
"""Kept: Python would ask a server that nobody refers to any more to stop."""


def waiting_threads(spec: dict[str, list[str]]) -> int:
    """Threads for what waits on other processes.

    A step that runs over several processes holds a thread of each of them until it is through. With too few, all wait
    for each other and no step ends: with one, the first step hangs.
    """
    return 4 + 2 * len(spec[WORKER])


def serve_tensorflow(cluster: Cluster, spec: dict[str, list[str]], threads: int = 0, gpu: int | None = 0) -> None:
    """Starts this process's TensorFlow server, which serves until the process ends; returns at once.

    Args:
        cluster: the processes of the run; this one is a worker or a parameter server.
        spec: TensorFlow's cluster spec: addresses by role, with the port that the chief's own server has.
        threads: threads that compute; 0: as many as there are cores.
        gpu: the GPU that a worker computes on, if it is there; None for the CPU.

    Raises:
        ClusterError: if its address can't be listened on.
    """
    me = cluster.me
    threads = threads or available_cores()
    options = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=max(threads, waiting_threads(spec))
    )
    if me.role == WORKER and gpu is not None and gpu < len(tf.config.list_physical_devices("GPU")):
        options.gpu_options.visible_device_list = str(gpu)
        options.gpu_options.allow_growth = True
    else:
        options.device_count["GPU"] = 0
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(spec), job_name=me.role, task_index=me.index, protocol="grpc", config=options
        )
    except tf.errors.OpError as error:
        raise ClusterError(
            f"{me} can't listen on {spec[me.role][me.index]}: {error.message}. Is another process using that port?"
        ) from error
    _running.append(server)
