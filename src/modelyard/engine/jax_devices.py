"""Devices, threads and processes of JAX, set up before it starts.

With several processes, JAX runs a service in the coordinator. It ends a process that cannot reach the service at once,
with a C++ trace and no reason. So followers connect through a relay of their own, which never hangs up: they learn of a
lost process from the process group, which knows which one it is, and exit with its message.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import socket
import sys
import threading
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from modelyard.cluster.description import ProcessGroup
from modelyard.compat.jax import bind_collectives, drop_distributed_state
from modelyard.config.backend import without_lines
from modelyard.config.schema import Config
from modelyard.engine.jax_cache import use_cache
from modelyard.errors import PeerLostError, UserError
from modelyard.system.machine import available_cores
from modelyard.system.network import are_local, connect, is_loopback, join_address, listen, loopback_ip, split_address

log = logging.getLogger("modelyard")
_JOINING_SECONDS = 60
"""The time that JAX may take to connect the processes, after ours have joined."""
_GRACE_SECONDS = 5.0
"""The time before this process exits: a computation that waits for a process that hangs never ends by itself."""
_PIECE = 1 << 16
_GREETING = re.compile(rb"^\[Gloo\] Rank .*\n", re.M)


def set_up_devices(config: Config, group: ProcessGroup) -> list[Any]:
    """Returns the devices of all processes that train together, this one included.

    Raises:
        UserError: if the devices that the config asks for do not exist.
    """
    threads = str(config.threads or available_cores())
    os.environ.update(PJRT_NPROC=threads, NPROC=threads)  # the CPU client sizes its thread pool by these
    if config.deterministic:
        _add_xla_flag("--xla_gpu_deterministic_ops=true")
    if config.num_gpus == 0:
        _before_start("jax_platforms", "cpu")
    platforms = (jax.config.jax_platforms or "").split(",")
    if platforms != [""] and "cpu" not in platforms:  # models are built on the host
        _before_start("jax_platforms", ",".join([*platforms, "cpu"]))
    if config.cpu_devices > max(jax.config.jax_num_cpu_devices, 1):
        _before_start("jax_num_cpu_devices", config.cpu_devices)
    # JAX takes most of the memory of every GPU that it sees, so it sees only those that are used.
    if config.gpu_id is not None:
        _before_start("jax_cuda_visible_devices", str(config.gpu_id))
    elif config.num_gpus == "auto" and group.size == 1:
        _before_start("jax_cuda_visible_devices", "0")
    elif isinstance(config.num_gpus, int) and config.num_gpus > 0:
        _before_start("jax_cuda_visible_devices", ",".join(map(str, range(config.num_gpus))))
    use_cache(config)
    if group.size > 1:
        join_processes(config, group)
    local = _local_devices(config, several=group.size > 1)
    wanted = [name for name in platforms if name not in ("", "cpu")]
    if wanted and "cpu" not in platforms and config.num_gpus != 0 and all(d.platform == "cpu" for d in local):
        raise UserError(
            f"JAX_PLATFORMS={','.join(wanted)} asks for an accelerator, but JAX sees none. Unset it to train on the "
            "CPU, or install one of JAX's builds for it (pip install 'modelyard[jax-gpu]'); `modelyard doctor` checks "
            "the machine."
        )
    if group.size == 1:
        return local
    sync_devices(group)
    return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))


def start_devices(config: Config) -> None:
    """Starts the accelerators, which takes two seconds, while Keras is imported and the model is built."""
    waiting = [d for d in set_up_devices(config, ProcessGroup()) if d.platform != "cpu"]

    def begin() -> None:
        with contextlib.suppress(Exception):  # the engine raises the error when it needs them
            jax.block_until_ready([jax.device_put(np.zeros(1, np.float32), d) for d in waiting])

    if waiting:
        threading.Thread(target=begin, name="modelyard-devices", daemon=True).start()


def _before_start(option: str, value: Any) -> None:
    """Sets an option that JAX reads when it starts; if it already runs, its devices are checked later."""
    try:
        jax.config.update(option, value)
    except RuntimeError:
        log.debug("JAX already runs; %s does not change", option)


def _add_xla_flag(flag: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def _local_devices(config: Config, several: bool) -> list[Any]:
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        raise UserError(f"JAX cannot start: {str(error).strip()} `modelyard doctor` checks the machine.") from error
    accelerators = [d for d in devices if d.platform != "cpu"]
    wanted = config.num_gpus
    if config.gpu_id is not None or wanted not in ("auto", 0):
        count = 1 if config.gpu_id is not None else len(accelerators) if wanted == "all" else int(wanted)
        if len(accelerators) < max(count, 1):
            asked = f"gpu_id {config.gpu_id}" if config.gpu_id is not None else f"num_gpus {wanted}"
            raise UserError(
                f"{asked} asks for an accelerator, but JAX sees {len(accelerators) or 'none'} "
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


# -- several processes -------------------------------------------------------------------------------------------------


def join_processes(config: Config, group: ProcessGroup) -> None:
    """Joins the other processes, before JAX starts in this one.

    Raises:
        UserError: if JAX has started already.
        PeerLostError: if they cannot connect.
    """
    address = group.spec["worker"][0]
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM
    group.grace_seconds = _GRACE_SECONDS
    relay = Relay(address) if group.rank else None
    host, port = split_address(address)
    # All interfaces, since a name may resolve to a proxy's address.
    bound = join_address(host if is_loopback(host) else "::", port) if relay is None else None
    if are_local(group.spec["worker"]):
        bind_collectives(loopback_ip(host))
    try:
        jax.distributed.initialize(
            address if relay is None else relay.address,
            group.size,
            group.rank,
            initialization_timeout=_JOINING_SECONDS,
            # Our own heartbeat notices a lost process first.
            heartbeat_timeout_seconds=int(config.peer_timeout_secs * 3 + ProcessGroup.grace_seconds * 2),
            shutdown_timeout_seconds=_JOINING_SECONDS,
            coordinator_bind_address=bound,
            cluster_detection_method="deactivate",
        )
    except RuntimeError as error:
        if "must be called before" in str(error) or "only be called once" in str(error):
            raise UserError(
                f"JAX already runs in this process and cannot join a cluster any more: {error} Start a new process."
            ) from error
        raise _explained(group, error) from error
    if relay is not None:
        relay.holds = True
    atexit.register(_leave, group)  # runs before JAX's own handler, which was registered earlier


def sync_devices(group: ProcessGroup) -> None:
    """Connects the devices of all processes now, without the message that JAX prints at the first step.

    Raises:
        PeerLostError: if a process is gone.
    """
    try:
        with without_lines(sys.stdout, 1, _GREETING):
            multihost_utils.sync_global_devices("modelyard")
    except jax.errors.JaxRuntimeError as error:
        raise _explained(group, error) from error


def _explained(group: ProcessGroup, error: Exception) -> Exception:
    reason = group.explain(error)
    return reason if reason is not error else PeerLostError(f"JAX could not connect the processes: {error}")


def _leave(group: ProcessGroup) -> None:
    """Leaves JAX's service at exit, without its barrier: our processes have already left in order.

    After a loss the process exits at once: computations may wait for the process that is gone.
    """
    if group.failure is not None and group.lost:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(group.failure.exit_status)
    drop_distributed_state()


class Relay:
    """Passes bytes between JAX in this process and the service in the coordinator; silent when the service is gone.

    Args:
        target: host:port of the service.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = listen("127.0.0.1:0")
        self.address = join_address(*self._listener.getsockname())
        self.holds = False
        """Whether to hide the end of the service from JAX; before the processes have joined, JAX may retry."""
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def _accept(self) -> None:
        while True:
            inner, _ = self._listener.accept()
            try:
                outer = connect(self._target, _JOINING_SECONDS)
            except OSError:
                if not self.holds:
                    inner.close()
                continue
            outer.settimeout(None)
            for source, sink, from_service in ((inner, outer, False), (outer, inner, True)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                arguments = (source, sink, from_service)
                threading.Thread(target=self._pass_on, args=arguments, name="relay", daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, from_service: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                sink.sendall(piece)
        if not (from_service and self.holds):
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
