"""Worker processes on this machine that run cell after cell.

Imports, the started engine, compiled programs and data in memory are shared by the cells of a worker. What a process
can set only once, such as the engine and its threads, is the same for all of them. A worker goes on only after a cell
that has succeeded: any other end of a cell is also that of its process (`cli/worker.py`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from modelyard.comparison.executor import CellJob, OwnProcesses, RunningCell, Slot
from modelyard.config.resolve import SAVED_MODEL
from modelyard.launcher.processes import Process, ProcessSpec, Tail
from modelyard.system.activity import Activity
from modelyard.system.files import explain

_OF_PROCESS = (
    "engine", "num_gpus", "gpu_id", "cpu_devices", "precision", "xla", "autotune", "deterministic", "cache_dir",
)  # fmt: skip
"""Options that a process can set only once."""
_EXITED = b"exited\n"
_EXIT_SECONDS = 10.0
_GROWTH = 2.0
log = logging.getLogger("modelyard")


class Workers:
    """Runs cells in worker processes, and those with code of the user in processes of their own.

    Args:
        program: the program that runs the command of a cell in its own process.
        folder: the folder that they work for, by which they are found in a list of processes.
        slots: the parts of the machine; each has at most one worker.
    """

    def __init__(self, program: list[str], folder: Path, slots: Sequence[Slot]) -> None:
        self._own, self._folder = OwnProcesses(program), folder
        self._slots = Counter(_variables(slot) for slot in slots)
        self._workers: list[_Worker] = []
        # Each has its part of the machine; one that has grown gives back what it does not need.
        self._most = psutil.virtual_memory().total / len(slots) / 2

    def start(self, job: CellJob, ended: Callable[[RunningCell], None]) -> RunningCell:
        """Starts a cell: in a worker that has the same settings and is free, else in a new one."""
        if job.config.plugins or job.config.model == SAVED_MODEL:
            return self._own.start(job, ended)
        settings = _settings(job)
        self._drop([worker for worker in self._workers if worker.has_exited or self._has_grown(worker)])
        for worker in self._workers:
            cell = worker.take(job, ended) if worker.settings == settings else None
            if cell is not None:
                return cell
        # An idle worker with other settings must not keep the GPU of this slot.
        variables = _variables(job.slot)
        beside = [worker for worker in self._workers if worker.variables == variables]
        idle = [worker for worker in beside if worker.is_idle]
        self._drop(idle[: max(0, len(beside) + 1 - self._slots[variables])])
        worker = _Worker(job, self._folder, settings)
        self._workers.append(worker)
        return worker.begin(job, ended)

    def close(self) -> None:
        """Ends the workers."""
        self._drop(self._workers[:])

    def _has_grown(self, worker: _Worker) -> bool:
        if not worker.is_idle or worker.memory <= max(_GROWTH * worker.first_memory, self._most):
            return False
        log.debug("a worker of %d MiB is replaced", worker.memory >> 20)
        return True

    def _drop(self, workers: list[_Worker]) -> None:
        for worker in workers:
            worker.end()
        deadline = time.monotonic() + _EXIT_SECONDS
        for worker in workers:
            worker.wait(deadline)
            self._workers.remove(worker)


def _settings(job: CellJob) -> tuple[Any, ...]:
    options = (getattr(job.config, name) for name in _OF_PROCESS)
    return (job.threads, _variables(job.slot), *options)


def _variables(slot: Slot) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(slot.environ.items()))


class _Worker:
    """A worker process.

    Args:
        job: its first cell. What it prints while it starts goes to the log of that.
        folder: the folder that it works for.
        settings: what its cells have in common.
    """

    def __init__(self, job: CellJob, folder: Path, settings: tuple[Any, ...]) -> None:
        self.settings, self.variables = settings, _variables(job.slot)
        self.memory = self.first_memory = 0
        """Its resident memory after its last and its first cell; 0 before."""
        self.has_exited = False
        self._cell: _WorkerCell | None = None
        self._lock = threading.Lock()
        jobs, self._jobs = os.pipe()
        answers, self._answers = os.pipe()
        words = (sys.executable, "-m", "modelyard.cli.worker", str(jobs), str(self._answers), str(folder))
        try:
            spec = ProcessSpec(job.name, words, job.slot.environ)
            self.process = Process(spec, job.logs, self._note_exit, pass_fds=[jobs, self._answers])
        except BaseException:
            for pipe in (self._jobs, answers, self._answers):
                os.close(pipe)
            raise
        finally:
            os.close(jobs)
        self._reader = threading.Thread(target=self._read, args=(answers,), daemon=True, name="answers of a worker")
        self._reader.start()

    @property
    def is_idle(self) -> bool:
        """Whether it runs no cell."""
        return self._cell is None

    def begin(self, job: CellJob, ended: Callable[[RunningCell], None]) -> _WorkerCell:
        """Runs its first cell."""
        cell = self.take(job, ended)
        # If it has exited already, the cell ends in the same way.
        return cell if cell is not None else _WorkerCell(job, self, ended).end()

    def take(self, job: CellJob, ended: Callable[[RunningCell], None]) -> _WorkerCell | None:
        """Runs a cell; returns None if it runs another one or has exited."""
        with self._lock:
            if self._cell is not None or self.has_exited:
                return None
            cell = self._cell = _WorkerCell(job, self, ended)
        self.process.activity = Activity()
        text = json.dumps({"words": job.words, "log": str(cell.log)}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # its exit is noted
            os.write(self._jobs, text.encode())
        return cell

    def end(self) -> None:
        """Has it exit, once it is idle."""
        if self._jobs >= 0:
            os.close(self._jobs)
            self._jobs = -1

    def wait(self, deadline: float) -> None:
        """Waits for its exit, and kills it at the deadline."""
        self._reader.join(max(0.0, deadline - time.monotonic()))
        self.process.signal(signal.SIGKILL)
        self.process.reap()
        self.process.read_log()
        self._reader.join()

    def _note_exit(self, process: Process) -> None:
        os.write(self._answers, _EXITED)  # behind what it has answered
        os.close(self._answers)

    def _read(self, answers: int) -> None:
        with open(answers, "rb") as lines:
            for line in lines:
                with self._lock:
                    cell, self._cell = self._cell, None
                    self.has_exited = line == _EXITED
                    if not self.has_exited:
                        self.memory = json.loads(line)["memory"]
                        self.first_memory = self.first_memory or self.memory
                if cell is not None:
                    cell.end(None if self.has_exited else 0)
                if self.has_exited:
                    break


class _WorkerCell:
    """A cell that a worker runs.

    Args:
        job: the cell.
        worker: the worker.
        ended: called when it has ended.
    """

    why_lost = ""
    """This machine is not lost."""

    def __init__(self, job: CellJob, worker: _Worker, ended: Callable[[RunningCell], None]) -> None:
        self.name, self.log = job.name, (job.logs / f"{job.name}.log").absolute()
        with explain(self.log, "write"):
            self.log.touch()
            self._tail = Tail(self.log)
        self._worker, self._ended = worker, ended
        self._status: int | None = None
        self._has_ended = False
        self._activity: Activity | None = None

    @property
    def activity(self) -> Activity:
        """The last activity that it reported."""
        return self._activity or self._worker.process.activity

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its log that were read."""
        return list(self._tail.last)

    def end(self, status: int | None = None) -> _WorkerCell:
        """Notes its end; ``status`` is None if it is that of its process."""
        self._status, self._activity, self._has_ended = status, self._worker.process.activity, True
        self._ended(self)
        return self

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the worker while it runs this cell."""
        if not self._has_ended:
            self._worker.process.signal(number)

    def read_log(self) -> list[str]:
        """Returns the new lines of its log, and reads what it has reported."""
        if not self._has_ended:
            self._worker.process.read_log()
        return self._tail.read(final=self._has_ended)

    def reap(self) -> int:
        """Returns its exit status, or minus a signal."""
        if self._status is None:
            self._status = self._worker.process.reap()
        return self._status
