"""A whole cluster on this machine."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from modelyard import storage
from modelyard.cluster.description import CHIEF, EVALUATOR, PARAMETER_SERVERS, PS, WORKER, Cluster, Member
from modelyard.cluster.tf_config import TF_CONFIG
from modelyard.errors import Interrupted, UserError
from modelyard.launcher.command import checked, with_model_dir
from modelyard.launcher.ports import HeldPorts
from modelyard.launcher.processes import Spec
from modelyard.launcher.shares import NO_GPU, VISIBLE, deal_cores, deal_gpus, found_cores, found_gpus
from modelyard.launcher.supervise import MISTAKE, LaunchError, Patience, Stopped, Supervisor
from modelyard.launcher.view import is_live, shown
from modelyard.run.checkpoint import list_checkpoints
from modelyard.run.directory import RunDirectory
from modelyard.system.log import log_to

LAUNCHER = "launch"
"""The name of the launcher's own log and pid file."""
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
    patience: Patience | None = None,
) -> None:
    """Runs a command as a cluster of processes on this machine, and keeps it going until its work is done.

    Args:
        command: the words of an ordinary command: train, train-and-evaluate or resume, with its options.
        workers: how many processes train (default: 1).
        ps: how many parameter servers; with some, a chief coordinates the workers.
        evaluator: whether a process of its own evaluates.
        model_dir: the run folder that all share; may be in the command instead.
        max_restarts: how often in a row to start again without progress.
        pin: bind each training process to its share of the cores.
        cache_dir: where a run folder on an object store is worked on; None is the usual place.
        program: what understands the command; by default Modelyard itself.
        patience: how long to wait for what.

    Raises:
        LaunchError: if a process fails for good.
        Interrupted: after SIGTERM or SIGINT, when all have saved and ended.

    Example:
        >>> modelyard.launch(["train", "--dataset", "digits"], workers=2, model_dir="run")
    """
    addresses = check_layout(workers, ps, evaluator, max_restarts)
    words, folder = with_model_dir(checked(command), model_dir)
    if folder is None:
        raise UserError("where to? Name the run folder that all processes share: model_dir.")
    directory = RunDirectory(local_folder(folder, cache_dir))
    if directory.path.exists() and not directory.path.is_dir():
        raise UserError(f"{folder} is a file; the run folder must be a folder.")
    program = [sys.executable, "-m", "modelyard"] if program is None else list(program)
    with log_to(directory.logs, LAUNCHER):
        log.info("launching %s in %s: %s", Cluster(addresses=addresses).listed(), folder, shlex.join(words))
        try:
            _run((*program, *words), addresses, directory, max_restarts, pin, patience)
        except Stopped as stop:
            raise Interrupted(stop.signal, newest_step(directory), folder) from None
        except LaunchError as error:
            if error.status == MISTAKE:
                _tidy(directory)
            raise


def _run(
    words: tuple[str, ...],
    counts: dict[str, tuple[str, ...]],
    directory: RunDirectory,
    max_restarts: int,
    pin: bool,
    patience: Patience | None,
) -> None:
    gpus, cores = found_gpus(os.environ), found_cores() if pin else []
    ports: list[HeldPorts] = []

    def plan() -> list[Spec]:
        while ports:
            ports.pop().close()
        ports.append(HeldPorts(sum(map(len, counts.values()))))
        free = iter(ports[0].addresses)
        addresses = {role: tuple(next(free) for _ in places) for role, places in counts.items()}
        return specs_of(words, addresses, gpus, cores)

    names = [member.file_name for member in Cluster(addresses=counts).members]
    trainers = len(Cluster(addresses=counts).trainers)
    if gpus and len(gpus) < trainers:
        log.warning("%d GPUs can't be shared by %d training processes: they train on the CPU", len(gpus), trainers)
    try:
        with _lead_output() as output, shown(max(map(len, names))) as view:
            steps = partial(newest_step, directory)
            Supervisor(plan, directory.logs, steps, max_restarts, view, patience, output).run()
    finally:
        for held in ports:
            held.close()


@contextmanager
def _lead_output() -> Iterator[IO[bytes] | None]:
    """Where the lead's standard output goes: on a terminal the table would be drawn over it, so it comes after that."""
    if not is_live() or not sys.stdout.isatty():
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
    """How many of each role, as empty addresses; refuses what can't be."""
    if workers is None and ps > 0:
        raise UserError("parameter servers need workers, which train: say how many with --workers.")
    workers = 1 if workers is None else workers
    for name, value, least in (("workers", workers, 1), ("ps", ps, 0), ("max_restarts", max_restarts, 0)):
        if value < least:
            raise UserError(f"--{name} must be {least} or more, not {value}.")
    counts = {CHIEF: 1 if ps else 0, WORKER: workers, PS: ps, EVALUATOR: int(evaluator)}
    return {role: ("",) * count for role, count in counts.items() if count}


def specs_of(
    words: tuple[str, ...], addresses: dict[str, tuple[str, ...]], gpus: list[str], cores: list[int]
) -> list[Spec]:
    """The processes of a cluster, the lead first, each with its role, GPUs and cores.

    Args:
        words: the command.
        addresses: host:port of each process, by role.
        gpus: to be dealt out to those that train; one that is left over is for the evaluator.
        cores: to be dealt out to those that train; none: nobody is bound.
    """
    cluster = Cluster(addresses=addresses)
    trainers = cluster.trainers
    dealt, left = deal_gpus(gpus, len(trainers))
    shares = deal_cores(cores, len(trainers)) if cores else [[]] * len(trainers)
    gpus_of: dict[Member, list[str]] = dict(zip(trainers, dealt, strict=True))
    gpus_of[Member(EVALUATOR, 0)] = left[:1]
    cores_of = dict(zip(trainers, shares, strict=True))
    specs = []
    for member in cluster.members:
        task = {"type": member.role, "index": member.index}
        environ = {TF_CONFIG: json.dumps({"cluster": addresses, "task": task})}
        if gpus or member not in trainers:
            environ[VISIBLE] = ",".join(gpus_of.get(member, ())) or NO_GPU
        specs.append(
            Spec(
                member.file_name,
                words,
                environ,
                tuple(cores_of.get(member, ())),
                leads=member == cluster.coordinator,
                shows_result=member.role == EVALUATOR if cluster.has_evaluator else member == cluster.coordinator,
                is_awaited=member == cluster.coordinator or member.role == EVALUATOR,
                restarts_alone=member.role == EVALUATOR
                or (member.role == WORKER and cluster.mode == PARAMETER_SERVERS),
            )
        )
    return specs


def local_folder(model_dir: str, cache_dir: str | None) -> Path:
    """The run folder on this machine: where one on an object store is worked on, for that."""
    if not storage.is_remote(model_dir):
        return Path(model_dir).expanduser()
    from modelyard.run.mirror import working_folder

    return working_folder(model_dir, storage.cache_folder(cache_dir))


def newest_step(directory: RunDirectory) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    return max(list_checkpoints(directory.checkpoints), default=0)


def _tidy(directory: RunDirectory) -> None:
    """A folder in which nothing began is not left behind: the error has the end of the log."""
    if not directory.exists() and not directory.strangers() and not list_checkpoints(directory.checkpoints):
        shutil.rmtree(directory.path, ignore_errors=True)
