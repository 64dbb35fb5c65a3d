"""Launches a cluster of processes on this machine, and stops the processes of a run."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from modelyard import faults, storage
from modelyard.cluster.description import EVALUATOR, PARAMETER_SERVERS, WORKER, Cluster, Member
from modelyard.cluster.environment import TF_CONFIG
from modelyard.cluster.secret import SECRET, new_secret
from modelyard.errors import Interrupted, RunError, UserError
from modelyard.launcher.failures import USER_ERROR
from modelyard.launcher.job import check_command, role_counts, with_model_dir
from modelyard.launcher.processes import (
    NO_GPU,
    VISIBLE_GPUS,
    ProcessSpec,
    available_gpus,
    bindable_cores,
    divide_cores,
    divide_gpus,
    reserved_ports,
)
from modelyard.launcher.supervise import LaunchError, Stopped, Supervisor
from modelyard.run.checkpoint import list_checkpoints
from modelyard.run.directory import RunDirectory
from modelyard.system.console import console, live_table
from modelyard.system.process import Holder, holders, log_to

LAUNCHER = "launch"
"""The name of the launcher's own log and pid file."""
_POLL_SECONDS = 0.1
log = logging.getLogger("modelyard")


def launch(
    command: Sequence[str],
    *,
    workers: int | None = None,
    ps: int = 0,
    evaluator: bool = False,
    model_dir: str | None = None,
    max_restarts: int = 3,
    pin: bool = True,
    cache_dir: str | None = None,
    program: Sequence[str] | None = None,
) -> None:
    """Runs a command as a cluster of processes on this machine, and restarts them until the work is done.

    Args:
        command: the words of a command: train, train-and-evaluate or resume, with its options.
        workers: the number of processes that train (default: 1).
        ps: the number of parameter servers; with them, a chief coordinates the workers.
        evaluator: whether a separate process evaluates.
        model_dir: the run folder that all share; may be in the command instead.
        max_restarts: how many restarts in a row are allowed without progress.
        pin: whether each training process is bound to its part of the cores.
        cache_dir: the local copy of a run folder on an object store; None for the default.
        program: the program that runs the command; by default Modelyard itself.

    Raises:
        LaunchError: if a process fails and is not restarted.
        Interrupted: after SIGTERM or SIGINT, when all have saved and exited.

    Example:
        >>> modelyard.launch(["train", "--dataset", "digits"], workers=2, model_dir="run")
    """
    counts = check_layout(workers, ps, evaluator, max_restarts)
    words, folder = with_model_dir(check_command(command), model_dir)
    if folder is None:
        raise UserError("model_dir is missing. Give the run folder that all processes share.")
    directory = RunDirectory(local_folder(folder, cache_dir))
    if directory.path.exists() and not directory.path.is_dir():
        raise UserError(f"{folder} is a file; model_dir must be a folder.")
    program = [sys.executable, "-m", "modelyard"] if program is None else list(program)
    gpus, cores = available_gpus(os.environ), bindable_cores() if pin else []
    ports = ExitStack()

    def make_specs() -> list[ProcessSpec]:
        ports.close()  # those of the last start
        free = iter(ports.enter_context(reserved_ports(sum(map(len, counts.values())))))
        addresses = {role: tuple(next(free) for _ in hosts) for role, hosts in counts.items()}
        return process_specs((*program, *words), addresses, gpus, cores)

    def newest_step() -> int:
        return max(list_checkpoints(directory.checkpoints), default=0)

    with faults.injected(directory.logs, LAUNCHER), log_to(directory.logs, LAUNCHER), ports:
        cluster = Cluster(addresses=counts)
        log.info("launching %s in %s: %s", cluster.listed(), folder, shlex.join(words))
        trainers = len(cluster.trainers)
        if gpus and len(gpus) < trainers:
            log.warning("%d GPUs can't be shared by %d training processes: they train on the CPU", len(gpus), trainers)
        try:
            with _result_output() as output, live_table() as live:
                Supervisor(make_specs, directory.logs, newest_step, max_restarts, output=output, live=live).run()
        except Stopped as stopped:
            raise Interrupted(stopped.signal, newest_step(), folder) from None
        except LaunchError as error:
            began = directory.exists() or directory.unexpected_files() or list_checkpoints(directory.checkpoints)
            if error.status == USER_ERROR and not began:  # the error has the end of the log
                shutil.rmtree(directory.path, ignore_errors=True)
            raise


@contextmanager
def _result_output() -> Iterator[IO[bytes] | None]:
    """Yields a file for the result of the run, which is printed after the live table; None where there is no table."""
    if not console().is_terminal or not sys.stdout.isatty():
        yield None
        return
    with tempfile.TemporaryFile() as kept:
        try:
            yield kept
        finally:
            kept.seek(0)
            with suppress(OSError):  # the terminal may have been closed
                sys.stdout.write(kept.read().decode("utf-8", "replace"))
                sys.stdout.flush()


def check_layout(workers: int | None, ps: int, evaluator: bool, max_restarts: int) -> dict[str, tuple[str, ...]]:
    """Returns the number of processes of each role, as empty addresses.

    Raises:
        UserError: if they can't form a cluster.
    """
    if workers is None and ps > 0:
        raise UserError("parameter servers need workers that train. Give their number with --workers.")
    workers = 1 if workers is None else workers
    for name, value, least in (("workers", workers, 1), ("ps", ps, 0), ("max_restarts", max_restarts, 0)):
        if value < least:
            raise UserError(f"--{name} must be {least} or more, got {value}.")
    return {role: ("",) * count for role, count in role_counts(workers, ps, evaluator).items()}


def process_specs(
    words: tuple[str, ...], addresses: dict[str, tuple[str, ...]], gpus: list[str], cores: list[int]
) -> list[ProcessSpec]:
    """Returns the processes of a cluster, the coordinator first, each with its role, GPUs, cores and their secret.

    GPUs and cores are divided between the processes that train. The evaluator gets a GPU that is left over. If
    ``cores`` is empty, no process is bound to cores.
    """
    cluster = Cluster(addresses=addresses)
    trainers = cluster.trainers
    divided, left = divide_gpus(gpus, len(trainers))
    gpus_of: dict[Member, list[str]] = dict(zip(trainers, divided, strict=True))
    gpus_of[Member(EVALUATOR, 0)] = left[:1]
    secret = new_secret()
    cores_of = dict(zip(trainers, divide_cores(cores, len(trainers)), strict=True)) if cores else {}
    specs = []
    for member in cluster.members:
        task = {"type": member.role, "index": member.index}
        environ = {TF_CONFIG: json.dumps({"cluster": addresses, "task": task}), SECRET: secret}
        if gpus or member not in trainers:
            environ[VISIBLE_GPUS] = ",".join(gpus_of.get(member, ())) or NO_GPU
        specs.append(
            ProcessSpec(
                member.file_name,
                words,
                environ,
                tuple(cores_of.get(member, ())),
                is_coordinator=member == cluster.coordinator,
                shows_result=member.role == EVALUATOR if cluster.has_evaluator else member == cluster.coordinator,
                is_awaited=member == cluster.coordinator or member.role == EVALUATOR,
                restarts_alone=member.role == EVALUATOR
                or (member.role == WORKER and cluster.mode == PARAMETER_SERVERS),
            )
        )
    return specs


def local_folder(model_dir: str, cache_dir: str | None) -> Path:
    """Returns the run folder on this machine: for one on an object store, its local copy."""
    if not storage.is_remote(model_dir):
        return Path(model_dir).expanduser()
    from modelyard.run.mirror import working_folder

    return working_folder(model_dir, storage.cache_folder(cache_dir))


# -- stopping -------------------------------------------------------------------------------------------------------


def stop(
    model_dir: str,
    *,
    force: bool = False,
    timeout_secs: float = 60.0,
    cache_dir: str | None = None,
    waiting: Callable[[list[Holder]], None] | None = None,
) -> list[str]:
    """Stops the processes of a run, and waits until they have exited. They save first, unless ``force`` is set.

    Args:
        model_dir: the run folder.
        force: whether to kill them.
        timeout_secs: how long to wait.
        cache_dir: the local copy of a run folder on an object store; None for the default.
        waiting: called repeatedly with the processes that still run.

    Returns:
        The processes that were signalled; empty if nothing was running.

    Raises:
        RunError: if there is no such folder, or its processes are on another machine.
        LaunchError: if some still run after ``timeout_secs``.

    Example:
        >>> modelyard.stop("runs/my_run")
    """
    folder = _log_folder(model_dir, cache_dir)
    running = holders(folder)
    if not running:
        return []
    number = signal.SIGKILL if force else signal.SIGTERM
    launchers = [holder for holder in running if holder.name == LAUNCHER]
    others = [holder for holder in running if holder.name != LAUNCHER]
    # The launcher stops the others. To kill all, it comes first: it would restart the others.
    chosen = launchers if launchers and not force else launchers + others
    signalled = [holder for holder in chosen if holder.signal(number)]
    if not signalled and holders(folder):
        elsewhere = ", ".join(str(holder) for holder in running)
        raise RunError(f"{model_dir} is run by {elsewhere}, which can't be signalled from this machine. Stop it there.")
    names = [str(holder) for holder in signalled]
    log.info("%s sent to %s", number.name, ", ".join(names))
    deadline = time.monotonic() + timeout_secs
    while running := holders(folder):
        if waiting is not None:
            waiting(running)
        if time.monotonic() > deadline:
            left = ", ".join(str(holder) for holder in running)
            hint = "" if force else " Wait longer (--timeout_secs), or kill them (--force)."
            raise LaunchError(f"{left} did not exit within {timeout_secs:g} s.{hint}", status=1)
        time.sleep(_POLL_SECONDS)
    return names


def _log_folder(model_dir: str, cache_dir: str | None) -> Path:
    if storage.is_remote(model_dir):
        return RunDirectory(local_folder(model_dir, cache_dir)).logs
    for path in (Path(model_dir).expanduser(), Path("runs") / model_dir):
        if path.is_dir():
            return RunDirectory(path).logs
    raise RunError(f"{model_dir} does not exist. `modelyard runs` lists the runs.")
