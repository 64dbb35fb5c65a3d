"""Runs one process of a cluster: the coordinator trains and writes, the others follow."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelyard import faults
from modelyard.cluster.description import EVALUATOR, PS, SYNCHRONOUS, WORKER, Cluster
from modelyard.cluster.secret import find_secret
from modelyard.config import Config
from modelyard.config.backend import import_engine, select_engine
from modelyard.config.yaml_file import inline
from modelyard.data.dataset import TRAIN, Dataset
from modelyard.data.open_dataset import load_dataset
from modelyard.distributed.agreement import check_folder, form_group, mark_folder
from modelyard.distributed.connection import Message
from modelyard.distributed.coordinator import Coordinator
from modelyard.distributed.follower import Follower
from modelyard.errors import ClusterError, Interrupted
from modelyard.loop.run import Result, SingleProcess, build, conclude, is_finished, load_engine, run_length
from modelyard.loop.run import run as run_stages
from modelyard.run.directory import RunDirectory, run_folder
from modelyard.system.activity import report
from modelyard.system.machine import available_cores
from modelyard.system.process import handle_signals, log_to

if TYPE_CHECKING:
    from modelyard.engine.base import Engine

log = logging.getLogger("modelyard")


def run(config: Config, evaluates: bool, cluster: Cluster) -> Result:
    """Runs one process of a cluster.

    Args:
        config: the resolved config.
        evaluates: whether the run is evaluated.
        cluster: all processes of the run.
    """
    secret = b"" if cluster.is_outside else find_secret(cluster, config.insecure_cluster)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # we explain what a lost peer leads to
    if cluster.is_local:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # by default it listens on other interfaces
    select_engine(config.engine)  # importing it may block this process, which later would look like a lost peer
    if not cluster.is_coordinator:
        return _run_follower(config, cluster, evaluates, secret)
    with form_group(config, cluster, evaluates, secret) as group:
        assert isinstance(group, Coordinator)
        return run_stages(config, evaluates, Processes(group))


# -- the coordinator ------------------------------------------------------------------------------------------------


class Processes(SingleProcess):
    """The other processes of a run, as the coordinator sees them.

    Args:
        group: the connections to them.
    """

    def __init__(self, group: Coordinator) -> None:
        self.group, self.cluster = group, group.cluster

    def join(self, directory: RunDirectory, config: Config, dataset: Dataset) -> None:
        """Waits for the others, sends them what they need to know, and checks that they have the same data.

        All of that happens before the engine starts: TensorFlow can't be interrupted while it waits for its peers.

        Raises:
            ClusterError: if a process does not join, was started differently, or has other data.
        """
        group = self.group
        report("joining")
        # The evaluator of a finished run needs no coordinator, and may be done already.
        over = is_finished(directory, config, lambda: run_length(config, dataset))
        # The number of threads decides the last bits: all processes of a deterministic run have the same.
        threads = config.threads or (available_cores() if config.deterministic else 0)
        group.wait_for_all((EVALUATOR,) if over else (), mark=mark_folder(directory), threads=threads)
        if self.cluster.mode == SYNCHRONOUS:
            mine = dataset.fingerprint()
            others = [str(member) for member, facts in group.wait_until_ready().items() if facts.get("data") != mine]
            if others:
                raise ClusterError(
                    f"the data of {', '.join(others)} differs from that of {self.cluster.coordinator}. "
                    "Every process needs the same dataset in its data_dir, or on a shared file system."
                )
            group.broadcast("begin")

    def create_engine(self, config: Config) -> Engine:
        """Makes the engine, together with those of the other processes."""
        if self.cluster.mode != SYNCHRONOUS:
            load_engine("tensorflow", config)
            from modelyard.engine.parameter_server import ParameterServerEngine

            return ParameterServerEngine(config, self.group)
        from modelyard.distributed.engine import CoordinatedEngine

        engine = load_engine(import_engine(config.engine), config)(config, self.group)
        self.check_devices(engine)
        return CoordinatedEngine(engine, self.group)

    def check_devices(self, engine: Engine) -> None:
        """Checks that all processes have the same number and type of devices, which TensorFlow assumes.

        Raises:
            ClusterError: if a process differs.
        """
        mine = _device_types(engine)
        others = {str(member): facts.get("devices") for member, facts in self.group.wait_until_ready().items()}
        different = [f"{name} has {inline(devices)}" for name, devices in others.items() if devices != mine]
        if different:
            raise ClusterError(
                f"{', '.join(different)}, where {self.cluster.coordinator} has {inline(mine)}: all processes that "
                "train need the same number and type of devices. Set num_gpus, or CUDA_VISIBLE_DEVICES of each process."
            )

    def signal(self) -> int | None:
        """Returns the signal that another process got, if any."""
        return self.group.signal


def _device_types(engine: Engine) -> list[str]:
    return [re.sub(r"\W*\d+$", "", name.rpartition("device:")[2]) for name in engine.devices]


# -- the others -----------------------------------------------------------------------------------------------------


def _run_follower(config: Config, cluster: Cluster, evaluates: bool, secret: bytes) -> Result:
    """Takes part in the run until the coordinator ends it."""
    directory = run_folder(config)  # the coordinator makes it; this process writes only its log there
    name = cluster.me.file_name
    with faults.injected(directory.logs, name), log_to(directory.logs, name):
        if cluster.is_outside:
            return _evaluate(config, cluster, None)
        with form_group(config, cluster, evaluates, secret) as group:
            assert isinstance(group, Follower)
            return _follow(config, group, directory)


def _follow(config: Config, group: Follower, directory: RunDirectory) -> Result:
    """Does the part of the run that the coordinator gives to this process."""
    cluster = group.cluster
    if cluster.me.role == EVALUATOR:
        return _evaluate(config, cluster, group)
    report("joining")
    facts = group.join() or {}
    check_folder(directory, facts.get("mark"), str(cluster.coordinator))
    if config.threads == 0 and isinstance(facts.get("threads"), int):  # pinned for a deterministic run
        config = config.model_copy(update={"threads": facts["threads"]})
    part = _train if cluster.mode == SYNCHRONOUS else _run_tensorflow_server
    result, last = part(config, group, directory)
    number = last.fields.get("signal")
    if number is not None:
        raise Interrupted(number, result.step, directory.address)
    return result


def _train(config: Config, group: Follower, directory: RunDirectory) -> tuple[Result, Message]:
    """Trains and evaluates its part of every batch."""
    from modelyard.distributed.engine import follow

    report("loading data")
    dataset = load_dataset(config)
    length = run_length(config, dataset)
    group.report_ready(data=dataset.fingerprint())
    group.next_command()  # begin
    engine = load_engine(import_engine(config.engine), config)(config, group)
    group.report_ready(devices=_device_types(engine))
    build(engine, config, dataset, length)
    try:
        with signals_to_coordinator(group):
            step, last = follow(engine, group)
    finally:
        engine.close()
    return Result(directory.address, step, TRAIN, {}, step, role=WORKER), last


def _run_tensorflow_server(config: Config, group: Follower, directory: RunDirectory) -> tuple[Result, Message]:
    """Computes steps, or holds variables, for a chief that uses parameter servers."""
    from modelyard.engine.parameter_server import serve_tensorflow

    report("serving variables" if group.cluster.me.role == PS else "training for the chief")
    gpu = None if config.num_gpus == 0 else config.gpu_id or 0
    serve_tensorflow(group.cluster, group.spec, config.threads, gpu)
    with signals_to_coordinator(group):
        *_, last = group.commands()
    return Result(directory.address, 0, TRAIN, {}, 0, role=group.cluster.me.role), last


def _evaluate(config: Config, cluster: Cluster, group: Follower | None) -> Result:
    """Evaluates every new checkpoint, and the remaining ones if training has ended.

    Args:
        config: the resolved config.
        cluster: all processes of the run.
        group: the connection to the coordinator; None if the cluster does not list this evaluator.
    """
    from modelyard.distributed.evaluator import CheckpointEvaluator

    evaluator = CheckpointEvaluator(config, cluster, group)
    with evaluator.joined():
        return conclude(evaluator.directory, evaluator.run(), cluster)


@contextlib.contextmanager
def signals_to_coordinator(group: Follower) -> Iterator[None]:
    """Reports SIGTERM and Ctrl-C to the coordinator, which has all exit at the same step. A second Ctrl-C raises.

    To be entered when TensorFlow runs: it takes SIGTERM for itself when it joins a cluster.
    """
    seen = False

    def note(number: int, frame: Any) -> None:
        nonlocal seen
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen = True
        name = signal.Signals(number).name
        log.info("%s: reported to %s, which saves and has all exit …", name, group.cluster.coordinator)
        threading.Thread(target=group.report_signal, args=(number,), daemon=True).start()

    with handle_signals(note):
        yield
