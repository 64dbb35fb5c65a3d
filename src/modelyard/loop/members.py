"""What the processes of a cluster do that do not lead."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.cluster.crew import Crew
from modelyard.cluster.follower import Follower
from modelyard.cluster.lead import Lead
from modelyard.cluster.roles import EVALUATOR, SYNCHRONOUS, Cluster
from modelyard.cluster.wire import Message
from modelyard.config import Config
from modelyard.data.dataset import TRAIN, Dataset
from modelyard.errors import ClusterError, Interrupted
from modelyard.loop.crew import check_folder, form_crew, mark_folder
from modelyard.loop.result import Result
from modelyard.loop.stages import build, create_engine, open_dataset, run_lengths
from modelyard.run.directory import RunDirectory, remote_run_folder
from modelyard.run.log import log_to

log = logging.getLogger("modelyard")


# -- how the lead and the others meet -------------------------------------------------------------------------------


def gather(crew: Crew, directory: RunDirectory, config: Config) -> None:
    """The lead waits for the others, and tells them what they need to know."""
    if isinstance(crew, Lead):
        crew.meet(mark=mark_folder(directory), threads=config.threads)


def all_ready(crew: Crew, dataset: Dataset) -> None:
    """The lead waits until the others have built the same model on the same data.

    Raises:
        ClusterError: if their data is another.
    """
    if not isinstance(crew, Lead) or crew.cluster.mode != SYNCHRONOUS:
        return
    mine = dataset.fingerprint()
    others = [str(member) for member, facts in crew.gather_ready().items() if facts.get("data") != mine]
    if others:
        raise ClusterError(
            f"the data of {', '.join(others)} is not the data of the {crew.cluster.lead}: the same dataset must be at "
            "every process's data_dir, or on a file system that all share."
        )


def take_part(config: Config, cluster: Cluster, evaluates: bool) -> Result:
    """This process's part in the run, until the lead says that it is over."""
    directory = _run_folder(config)
    with log_to(directory.logs, cluster.me.file_name), form_crew(config, cluster, evaluates) as crew:
        assert isinstance(crew, Follower)
        told = crew.join()
        check_folder(directory, told.get("mark"), f"the {cluster.lead}")
        if config.threads == 0 and isinstance(told.get("threads"), int):  # pinned for a deterministic run
            config = config.model_copy(update={"threads": told["threads"]})
        with _signals(crew):
            part = _evaluate if cluster.me.role == EVALUATOR else _train if cluster.mode == SYNCHRONOUS else _serve
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
def _signals(crew: Follower) -> Iterator[None]:
    """SIGTERM and Ctrl-C are the lead's to act on: it has all leave at the same step. A second Ctrl-C breaks off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    def note(number: int, frame: Any) -> None:
        nonlocal seen
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen = True
        log.info("%s: telling the %s, which saves and has all leave …", signal.Signals(number).name, crew.cluster.lead)
        threading.Thread(target=crew.report_signal, args=(number,), daemon=True).start()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the parts ------------------------------------------------------------------------------------------------------


def _train(config: Config, crew: Follower, directory: RunDirectory) -> tuple[Result, Message]:
    """Trains and evaluates its share of every batch."""
    dataset = open_dataset(config)
    engine = create_engine(config, crew)
    run = run_lengths(config, dataset)
    build(engine, config, dataset, run)
    crew.ready(data=dataset.fingerprint())
    try:
        step, last = engine.follow(crew)
    finally:
        engine.close()
    return Result(directory.address, step, TRAIN, {}, step), last


def _serve(config: Config, crew: Follower, directory: RunDirectory) -> tuple[Result, Message]:
    """Computes steps, or keeps variables, for the chief that coordinates."""
    from modelyard.engine.parameter_server import serve_tensorflow

    serve_tensorflow(crew.cluster, crew.spec, config.threads)
    *_, last = crew.orders()
    return Result(directory.address, 0, TRAIN, {}, 0), last


def _evaluate(config: Config, crew: Follower, directory: RunDirectory) -> tuple[Result, Message]:
    """Evaluates every new checkpoint."""
    from modelyard.loop.evaluator import evaluate_checkpoints

    return evaluate_checkpoints(config, crew, directory)
