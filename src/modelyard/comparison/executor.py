"""Where the cells of a matrix run: the interface of executors, the parts of this machine, a process for each cell."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from modelyard.config import Config
from modelyard.launcher.processes import (
    NO_GPU,
    VISIBLE_GPUS,
    Process,
    ProcessSpec,
    available_gpus,
    divide_gpus,
)
from modelyard.system.activity import Activity

GPU_SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
"""Processes that share a GPU must not reserve all of its memory."""


# -- parts of this machine -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Room for one cell: environment variables, and the number of threads."""

    environ: dict[str, str]
    threads: int


def make_slots(jobs: int, environ: Mapping[str, str], cores: int) -> list[Slot]:
    """Divides cores and GPUs between ``jobs`` cells; if there are fewer GPUs than cells, they are shared."""
    gpus = available_gpus(environ)
    threads = max(1, cores // jobs)
    if not gpus:
        hidden = {VISIBLE_GPUS: NO_GPU} if VISIBLE_GPUS in environ else {}
        return [Slot(hidden, threads)] * jobs
    if len(gpus) >= jobs:
        parts, _ = divide_gpus(gpus, jobs)
        return [Slot({VISIBLE_GPUS: ",".join(mine)}, threads) for mine in parts]
    sharing = {name: value for name, value in GPU_SHARING.items() if name not in environ}
    return [Slot({VISIBLE_GPUS: gpus[number % len(gpus)], **sharing}, threads) for number in range(jobs)]


# -- the interface ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellJob:
    """A cell to run.

    Args:
        name: its name, which is also that of its log.
        words: its command, without the program.
        config: its config.
        threads: its number of threads.
        slot: the room for it.
        logs: the folder of its log.
    """

    name: str
    words: tuple[str, ...]
    config: Config
    threads: int
    slot: Slot
    logs: Path


class RunningCell(Protocol):
    """A cell that was started."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def activity(self) -> Activity:
        """The last activity that it reported."""

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its log that were read."""

    @property
    def why_lost(self) -> str:
        """Why the machine that it ran on was lost, if it was."""

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal: SIGTERM lets it save, SIGKILL ends it at once."""

    def read_log(self) -> list[str]:
        """Returns the new lines of its log."""

    def reap(self) -> int:
        """Returns its exit status, or minus a signal. Called once, after it has ended."""


class Executor(Protocol):
    """Runs cells somewhere."""

    def start(self, job: CellJob, ended: Callable[[RunningCell], None]) -> RunningCell:
        """Starts a cell. ``ended`` is called when it has ended, from any thread."""

    def close(self) -> None:
        """Ends what is kept between cells. Called when no cell runs."""


class OwnProcesses:
    """Runs each cell in a process of its own on this machine.

    Args:
        program: the program that runs the commands of the cells.
    """

    def __init__(self, program: Sequence[str]) -> None:
        self._program = tuple(program)

    def start(self, job: CellJob, ended: Callable[[RunningCell], None]) -> RunningCell:
        """Starts a process."""
        spec = ProcessSpec(job.name, (*self._program, *job.words), job.slot.environ)
        return Process(spec, job.logs, ended)

    def close(self) -> None:
        """Does nothing: nothing is kept."""
