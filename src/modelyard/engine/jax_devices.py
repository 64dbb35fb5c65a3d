"""Devices, threads and processes of JAX: set before it starts, fixed for the process."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

import jax
import numpy as np

from modelyard.cluster.crew import Crew
from modelyard.config.schema import Config
from modelyard.engine.jax_cache import use_cache
from modelyard.engine.jax_processes import join_processes, meet
from modelyard.errors import UserError
from modelyard.system.machine import available_cores

log = logging.getLogger("modelyard")


def set_up_devices(config: Config, crew: Crew) -> list[Any]:
    """The devices of all processes that train together, those of this one among them.

    Raises:
        UserError: if those that are asked for are not there.
    """
    threads = str(config.threads or available_cores())
    os.environ.update(PJRT_NPROC=threads, NPROC=threads)  # what the CPU client sizes its pool of threads by
    if config.deterministic:
        _add_xla_flag("--xla_gpu_deterministic_ops=true")
    if config.num_gpus == 0:
        _before_start("jax_platforms", "cpu")
    platforms = (jax.config.jax_platforms or "").split(",")
    if platforms != [""] and "cpu" not in platforms:  # models are built on the host
        _before_start("jax_platforms", ",".join([*platforms, "cpu"]))
    if config.cpu_devices > max(jax.config.jax_num_cpu_devices, 1):
        _before_start("jax_num_cpu_devices", config.cpu_devices)
    if config.gpu_id is not None:
        _before_start("jax_cuda_visible_devices", str(config.gpu_id))
    elif config.num_gpus == "auto" and crew.size == 1:
        _before_start("jax_cuda_visible_devices", "0")  # JAX takes most of the memory of every GPU that it sees
    elif isinstance(config.num_gpus, int) and config.num_gpus > 0:
        # JAX takes most of the memory of every GPU that it sees, and those of all processes are taken as it lists them.
        _before_start("jax_cuda_visible_devices", ",".join(map(str, range(config.num_gpus))))
    use_cache(config)
    if crew.size > 1:
        join_processes(config, crew)
    local = _local_devices(config, several=crew.size > 1)
    wanted = [name for name in platforms if name not in ("", "cpu")]
    if wanted and "cpu" not in platforms and config.num_gpus != 0 and all(d.platform == "cpu" for d in local):
        raise UserError(
            f"JAX_PLATFORMS={','.join(wanted)} asks for an accelerator, and JAX sees none. Unset it to train on the "
            "CPU, or install one of JAX's builds for it (pip install 'modelyard[jax-gpu]'); `modelyard doctor` checks "
            "the machine."
        )
    if crew.size == 1:
        return local
    meet(crew)
    return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))


def wake_devices(config: Config, crew: Crew) -> None:
    """Lets accelerators begin, which takes two seconds, while Keras is imported and the model is built."""
    waiting = [d for d in set_up_devices(config, crew) if d.platform != "cpu"]

    def begin() -> None:
        with contextlib.suppress(Exception):  # whoever needs them is told then
            jax.block_until_ready([jax.device_put(np.zeros(1, np.float32), d) for d in waiting])

    if waiting:
        threading.Thread(target=begin, name="modelyard-devices", daemon=True).start()


def _before_start(option: str, value: Any) -> None:
    """Sets what JAX reads when it starts; where it runs already, the devices that are there are looked at."""
    try:
        jax.config.update(option, value)
    except RuntimeError:
        log.debug("JAX runs already; %s stays as it is", option)


def _add_xla_flag(flag: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _local_devices(config: Config, several: bool) -> list[Any]:
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        raise UserError(f"JAX can't start: {str(error).strip()} `modelyard doctor` checks the machine.") from error
    accelerators = [d for d in devices if d.platform != "cpu"]
    wanted = config.num_gpus
    if config.gpu_id is not None or wanted not in ("auto", 0):
        count = 1 if config.gpu_id is not None else len(accelerators) if wanted == "all" else int(wanted)
        if len(accelerators) < max(count, 1):
            asked = f"gpu_id {config.gpu_id}" if config.gpu_id is not None else f"num_gpus {wanted}"
            raise UserError(
                f"{asked} asks for an accelerator, and JAX sees {len(accelerators) or 'none'} "
                f"(its devices: {', '.join(map(str, devices))}). Install one of JAX's builds for it "
                "(pip install 'modelyard[jax-gpu]'), or leave the option out; `modelyard doctor` checks the machine."
            )
        return accelerators[:count]
    if wanted == "auto" and accelerators and (config.cpu_devices == 1 or several):
        return accelerators if several else accelerators[:1]
    cpus: list[Any] = jax.local_devices(backend="cpu")
    if len(cpus) < config.cpu_devices:
        raise UserError(
            f"JAX already runs with {len(cpus)} CPU device(s) in this process, cpu_devices asks for "
            f"{config.cpu_devices}. Start a new process."
        )
    return cpus[: config.cpu_devices]
