"""What the processes of a cluster do that do not lead."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard import storage
from modelyard.cluster.crew import Crew
from modelyard.cluster.follower import Follower
from modelyard.cluster.lead import Lead
from modelyard.cluster.roles import EVALUATOR, SYNCHRONOUS, WORKER, Cluster
from modelyard.cluster.wire import Message
from modelyard.config import Config
from modelyard.config.yaml_file import inline
from modelyard.data.dataset import TRAIN, Dataset
from modelyard.errors import ClusterError, Interrupted
from modelyard.loop.crew import check_folder, form_crew, mark_folder
from modelyard.loop.result import Result, conclude
from modelyard.loop.stages import build, create_engine, is_finished, open_dataset, run_lengths
from modelyard.run.directory import RunDirectory, remote_run_folder
from modelyard.system.log import log_to
from modelyard.system.machine import available_cores
from modelyard.system.signals import signals_go_to

if TYPE_CHECKING:
    from modelyard.engine.base import Engine

log = logging.getLogger("modelyard")


# -- how the lead and the others meet -------------------------------------------------------------------------------


def gather(crew: Crew, directory: RunDirectory, config: Config, dataset: Dataset) -> None:
    """The lead waits for the others, tells them what they need to know, and makes sure that they have the same data.

    All of that before the engine starts: TensorFlow waits for its peers in a way that can't be broken off.

    Raises:
        ClusterError: if someone does not come, or was started otherwise, or has other data.
    """
    if not isinstance(crew, Lead):
        return
    # What is left of a run that is over, an evaluator does by itself, and it may be done with that already.
    over = is_finished(directory, config, lambda: run_lengths(config, dataset))
    # Threads decide the last bits: those that a deterministic run is pinned to are everyone's from its first step on.
    threads = config.threads or (available_cores() if config.deterministic else 0)
    crew.meet((EVALUATOR,) if over else (), mark=mark_folder(directory), threads=threads)
    if crew.cluster.mode == SYNCHRONOUS:
        mine = dataset.fingerprint()
        others = [str(member) for member, facts in crew.gather_ready().items() if facts.get("data") != mine]
        if others:
            raise ClusterError(
                f"the data of {', '.join(others)} is not the data of {crew.cluster.lead}: the same dataset must be at "
                "every process's data_dir, or on a file system that all share."
            )
        crew.tell("begin")


def compare_devices(crew: Crew, engine: Engine) -> None:
    """Makes sure that all who train together have as many devices of the same kind: TensorFlow takes that for granted.

    Raises:
        ClusterError: with who differs.
    """
    if not isinstance(crew, Lead) or crew.cluster.mode != SYNCHRONOUS:
        return
    mine = _kinds(engine)
    others = {str(member): facts.get("devices") for member, facts in crew.gather_ready().items()}
    different = [f"{name} has {inline(devices)}" for name, devices in others.items() if devices != mine]
    if different:
        raise ClusterError(
            f"{', '.join(different)}, where {crew.cluster.lead} has {inline(mine)}: all processes that train need as "
            "many devices of the same kind. num_gpus, or CUDA_VISIBLE_DEVICES of a process, says which it takes."
        )


def _kinds(engine: Engine) -> list[str]:
    return [re.sub(r"\W*\d+$", "", name.rpartition("device:")[2]) for name in engine.devices]


def take_part(config: Config, cluster: Cluster, evaluates: bool) -> Result:
    """This process's part in the run, until the lead says that it is over."""
    directory = _run_folder(config)
    with log_to(directory.logs, cluster.me.file_name), form_crew(config, cluster, evaluates) as crew:
        assert isinstance(crew, Follower)
        if cluster.me.role == EVALUATOR:
            return _evaluate(config, crew, directory)
        told = crew.join() or {}
        check_folder(directory, told.get("mark"), str(cluster.lead))
        if config.threads == 0 and isinstance(told.get("threads"), int):  # pinned for a deterministic run
            config = config.model_copy(update={"threads": told["threads"]})
        part = _train if cluster.mode == SYNCHRONOUS else _serve
        result, last = part(config, crew, directory)
        number = last.fields.get("signal")
        if number is not None:
            raise Interrupted(number, result.step, directory.address)
        return result


def _run_folder(config: Config) -> RunDirectory:
    """The run folder, which the lead makes; this process writes nothing but its log there."""
    assert config.model_dir is not None
    if storage.is_remote(config.model_dir):
        return remote_run_folder(config.model_dir, storage.cache_folder(config.cache_dir))
    best = Path(config.best_model_dir).expanduser().absolute() if config.best_model_dir else None
    return RunDirectory(Path(config.model_dir).expanduser(), best)


@contextlib.contextmanager
def signals_to_lead(crew: Follower) -> Iterator[None]:
    """SIGTERM and Ctrl-C are the lead's to act on: it has all leave at the same step. A second Ctrl-C breaks off.

    To be entered when TensorFlow is up: it takes SIGTERM for itself when it joins a cluster.
    """
    seen = False

    def note(number: int, frame: Any) -> None:
        nonlocal seen
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen = True
        log.info("%s: telling %s, which saves and has all leave …", signal.Signals(number).name, crew.cluster.lead)
        threading.Thread(target=crew.report_signal, args=(number,), daemon=True).start()

    with signals_go_to(note):
        yield


# -- the parts ------------------------------------------------------------------------------------------------------


def _train(config: Config, crew: Follower, directory: RunDirectory) -> tuple[Result, Message]:
    """Trains and evaluates its share of every batch."""
    dataset = open_dataset(config)
    run = run_lengths(config, dataset)
    crew.ready(data=dataset.fingerprint())
    crew.order()  # to begin
    engine = create_engine(config, crew)
    crew.ready(devices=_kinds(engine))
    build(engine, config, dataset, run)
    try:
        with signals_to_lead(crew):
            step, last = engine.follow(crew)
    finally:
        engine.close()
    return Result(directory.address, step, TRAIN, {}, step, role=WORKER), last


def _serve(config: Config, crew: Follower, directory: RunDirectory) -> tuple[Result, Message]:
    """Computes steps, or keeps variables, for the chief that coordinates."""
    from modelyard.engine.tensorflow_server import serve_tensorflow

    gpu = None if config.num_gpus == 0 else config.gpu_id or 0
    serve_tensorflow(crew.cluster, crew.spec, config.threads, gpu)
    with signals_to_lead(crew):
        *_, last = crew.orders()
    return Result(directory.address, 0, TRAIN, {}, 0, role=crew.cluster.me.role), last


def _evaluate(config: Config, crew: Follower, directory: RunDirectory) -> Result:
    """Evaluates every new checkpoint; what is left too, if training has ended meanwhile."""
    from modelyard.loop.evaluator import evaluate_checkpoints

    data = cache(lambda: open_dataset(config))
    told = crew.join(unless=lambda: is_finished(directory, config, lambda: run_lengths(config, data())))
    if told is not None:
        check_folder(directory, told.get("mark"), str(crew.cluster.lead))
    examiner = evaluate_checkpoints(config, data(), crew, directory, over=told is None)
    return conclude(directory, examiner, crew.cluster)
