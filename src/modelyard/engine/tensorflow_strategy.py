"""Threads, devices and strategies of TensorFlow, fixed for the process; and sums over replicas."""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import tensorflow as tf

from modelyard.cluster.description import ProcessGroup
from modelyard.compat.tensorflow import abort_collectives, configure_coordination, servers_bound_to
from modelyard.config.backend import choose_engine
from modelyard.config.schema import Config
from modelyard.errors import UserError
from modelyard.system.machine import available_cores
from modelyard.system.network import are_local, expects_loopback, loopback_ip, split_address

_SERVERS_SECONDS = 60
"""The time that TensorFlow's servers may take to connect, after all processes have joined."""


def set_up_devices(config: Config) -> list[str]:
    """Sets threads and devices of the process; both are fixed once TensorFlow has started. Returns the devices."""
    _set_threads(config)
    gpus = _choose_gpus(config, several=False)
    if gpus:
        return [device.name for device in tf.config.list_logical_devices("GPU")][:gpus]
    cpu = tf.config.list_physical_devices("CPU")[0]
    with contextlib.suppress(RuntimeError):  # already running: the devices cannot change
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * config.cpu_devices)
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    if len(names) < config.cpu_devices:
        raise UserError(
            f"TensorFlow already runs with {len(names)} CPU device(s) in this process, cpu_devices asks for "
            f"{config.cpu_devices}. Start a new process."
        )
    return names[: config.cpu_devices]


@lru_cache
def one_machine(devices: tuple[str, ...]) -> Any:
    """Returns the strategy for a set of devices. It is cached: TensorFlow numbers the collectives of a second one from
    the start, and would confuse them with those of the first.
    """
    if len(devices) == 1:
        return tf.distribute.OneDeviceStrategy(devices[0])
    return tf.distribute.MirroredStrategy(list(devices))


def several_machines(config: Config, group: ProcessGroup) -> tuple[Any, list[str]]:
    """Returns the strategy for several processes, and the devices of this one: all its GPUs, or its CPU."""
    _set_threads(config)
    _choose_gpus(config, several=True)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(group.spec), task_type="worker", task_id=group.rank, rpc_layer="grpc"
    )
    group.on_peer_lost(abort_collectives)
    # TensorFlow's own health check is slower than ours, which knows which process is gone.
    configure_coordination(group.size, _SERVERS_SECONDS, config.peer_timeout_secs * 3)
    # It holds the GIL while it waits for the other servers, so our own health check cannot run meanwhile.
    faulthandler.dump_traceback_later(_SERVERS_SECONDS, exit=True)
    try:
        with server_at(group.spec["worker"][group.rank], group.spec):
            strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except RuntimeError as error:
        raise UserError(
            f"TensorFlow already runs in this process and cannot join a cluster any more: {error} Start a new process."
        ) from error
    except tf.errors.OpError as error:
        raise group.explain(error) from error
    finally:
        faulthandler.cancel_dump_traceback_later()
    return strategy, list(strategy.extended.worker_devices)


@contextlib.contextmanager
def server_at(address: str, spec: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Keeps TensorFlow's server, which the block starts, on loopback if all addresses of the cluster are there.

    Args:
        address: host:port of the server.
        spec: TensorFlow's cluster spec.
    """
    addresses = [address for role in spec.values() for address in role]
    host, _ = split_address(address)
    bound = servers_bound_to(loopback_ip(host)) if are_local(addresses) else contextlib.nullcontext()
    with expects_loopback("TensorFlow", addresses), bound:
        yield


def _set_threads(config: Config) -> None:
    threads = config.threads or available_cores()
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        running = tf.config.threading.get_intra_op_parallelism_threads()
        if config.threads and running != threads:
            raise UserError(
                f"TensorFlow already runs with {running} threads in this process; it cannot change to {threads}. "
                "Start a new process."
            ) from None


def _choose_gpus(config: Config, several: bool) -> int:
    """Makes the GPUs that the config asks for visible to TensorFlow. Returns their number."""
    if not config.autotune:
        os.environ["TF_CUDNN_USE_AUTOTUNE"] = "0"  # read at the first convolution
    gpus = tf.config.list_physical_devices("GPU")
    wanted = _wanted_gpus(config, len(gpus), several)
    if wanted:
        with contextlib.suppress(RuntimeError):  # already running: a second run takes the devices of the first
            tf.config.set_visible_devices([gpus[i] for i in wanted], "GPU")
            for i in wanted:
                tf.config.experimental.set_memory_growth(gpus[i], True)
    elif gpus:
        tf.config.set_visible_devices([], "GPU")
    return len(wanted)


def _wanted_gpus(config: Config, available: int, several: bool) -> list[int]:
    """Returns the indices of the GPUs to use; a process among several uses all that it sees."""
    if config.gpu_id is not None:
        if config.gpu_id >= available:
            raise UserError(
                f"gpu_id {config.gpu_id} does not exist: TensorFlow{_why(config)} sees {available} GPU(s)"
                + (f", 0 to {available - 1}." if available else "; `modelyard doctor` checks the machine.")
            )
        return [config.gpu_id]
    if config.num_gpus == "auto" and several:
        return list(range(available))
    if config.num_gpus == "auto":
        return [0] if available and config.cpu_devices == 1 else []
    count = available if config.num_gpus == "all" else int(config.num_gpus)
    if count > available or (config.num_gpus == "all" and not available):
        raise UserError(
            f"num_gpus asks for {config.num_gpus} GPU(s), TensorFlow{_why(config)} sees {available}. "
            "TensorFlow for GPUs is in pip install 'modelyard[gpu]'; `modelyard doctor` checks the machine."
        )
    return list(range(count))


def _why(config: Config) -> str:
    """Explains why the engine is TensorFlow, if the config does not name one."""
    return f" (engine {choose_engine(config.engine)[1]})" if config.engine == "auto" else ""


def all_reduce(context: Any, tensors: list[Any]) -> list[Any]:
    """Returns the sums over all replicas, with one message for all tensors of a type."""
    reduced: dict[int, Any] = {}
    for dtype in sorted({t.dtype.name for t in tensors}):
        indices = [index for index, t in enumerate(tensors) if t.dtype.name == dtype]
        flat = tf.concat([tf.reshape(tensors[index], [-1]) for index in indices], axis=0)
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, flat)
        sizes = [tensors[index].shape.num_elements() for index in indices]
        for index, part in zip(indices, tf.split(total, sizes), strict=True):
            reduced[index] = tf.reshape(part, tensors[index].shape)
    return [reduced[index] for index in range(len(tensors))]
