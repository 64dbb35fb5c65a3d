"""Threads and devices of TensorFlow: set once, fixed for the process."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from modelyard.config.schema import Config
from modelyard.errors import UserError
from modelyard.run.machine import available_cores


def set_up_devices(config: Config) -> list[str]:
    """Threads and devices; both are fixed for the process once TensorFlow has started."""
    threads = config.threads or available_cores()
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        running = tf.config.threading.get_intra_op_parallelism_threads()
        if config.threads and running != threads:
            raise UserError(
                f"TensorFlow already runs with {running} threads in this process; it can't change to {threads}. "
                "Start a new process."
            ) from None
    gpus = tf.config.list_physical_devices("GPU")
    wanted = _wanted_gpus(config, len(gpus))
    if wanted:
        with contextlib.suppress(RuntimeError):  # already running: a second run takes the devices of the first
            tf.config.set_visible_devices([gpus[i] for i in wanted], "GPU")
            for i in wanted:
                tf.config.experimental.set_memory_growth(gpus[i], True)
        return [device.name for device in tf.config.list_logical_devices("GPU")][: len(wanted)]
    if gpus:
        tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    with contextlib.suppress(RuntimeError):  # already running, with as many devices as it began with
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * config.cpu_devices)
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    if len(names) < config.cpu_devices:
        raise UserError(
            f"TensorFlow already runs with {len(names)} CPU device(s) in this process, cpu_devices asks for "
            f"{config.cpu_devices}. Start a new process."
        )
    return names[: config.cpu_devices]


def _wanted_gpus(config: Config, available: int) -> list[int]:
    """Numbers of the GPUs to use."""
    if config.gpu_id is not None:
        if config.gpu_id >= available:
            raise UserError(
                f"gpu_id {config.gpu_id} is not there: TensorFlow sees {available} GPU(s)"
                + (f", 0 to {available - 1}." if available else "; `modelyard doctor` checks the machine.")
            )
        return [config.gpu_id]
    if config.num_gpus == "auto":
        return [0] if available and config.cpu_devices == 1 else []
    count = available if config.num_gpus == "all" else int(config.num_gpus)
    if count > available or (config.num_gpus == "all" and not available):
        raise UserError(
            f"num_gpus asks for {config.num_gpus} GPU(s), TensorFlow sees {available}. "
            "`modelyard doctor` checks the machine."
        )
    return list(range(count))
