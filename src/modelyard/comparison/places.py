"""Where the cells of a matrix or a search run: on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelyard.comparison.executor import Executor, OwnProcesses, Slot, make_slots
from modelyard.comparison.workers import Workers
from modelyard.errors import Problem, unknown
from modelyard.launcher.mps import shared_gpus
from modelyard.launcher.processes import NO_GPU, VISIBLE_GPUS
from modelyard.system.machine import available_cores

LOCAL, RAY = "local", "ray"
MAX_JOBS = 256
PLACES = (LOCAL, RAY)


@dataclass(frozen=True)
class Place:
    """Where cells run.

    Args:
        on: local or ray.
        jobs: how many run at a time; None for one, or for as many as a cluster has room for.
        ray_address: the address of a Ray cluster; None for RAY_ADDRESS, or one of this machine.
    """

    on: str = LOCAL
    jobs: int | None = None
    ray_address: str | None = None

    def problems(self, source: str) -> Iterator[Problem]:
        """Yields what is wrong with it."""
        if self.jobs is not None and (type(self.jobs) is not int or not 1 <= self.jobs <= MAX_JOBS):
            yield Problem(source, "jobs", f"must be 1 to {MAX_JOBS}, got {self.jobs!r}.")
        if self.on not in PLACES:
            yield Problem(source, "on", unknown("place", self.on, PLACES))
        elif self.on == LOCAL and self.ray_address is not None:
            yield Problem(source, "ray_address", "has no effect without on=ray.")

    def open(
        self, program: Sequence[str] | None, folder: Path, threads: int = 0
    ) -> contextlib.AbstractContextManager[tuple[Executor, list[Slot]]]:
        """Opens it: what runs the cells, and the room for them; as many run at a time.

        Args:
            program: the program of the user that runs the commands of the cells; None for Modelyard.
            folder: the folder of the matrix.
            threads: the option threads; 0 to divide the cores.

        Raises:
            UserError: if a cluster can't be reached.
        """
        if self.on == RAY:
            return _on_ray(program, folder, self.jobs, self.ray_address, threads)
        return _here(program, folder, self.jobs or 1)


@contextlib.contextmanager
def _on_ray(
    program: Sequence[str] | None, folder: Path, jobs: int | None, address: str | None, threads: int
) -> Iterator[tuple[Executor, list[Slot]]]:
    from modelyard.comparison.ray_tasks import RayTasks, connected, room

    with connected(address) as ray:
        slots = room(ray, jobs, threads)
        with contextlib.closing(RayTasks(ray, program, folder, len(slots))) as executor:
            yield executor, slots


@contextlib.contextmanager
def _here(program: Sequence[str] | None, folder: Path, jobs: int) -> Iterator[tuple[Executor, list[Slot]]]:
    slots = make_slots(jobs, os.environ, available_cores())
    gpus = [slot.environ.get(VISIBLE_GPUS, NO_GPU) for slot in slots]
    shared = list(dict.fromkeys(gpus)) if len(set(gpus)) < len(gpus) else []
    # A program of the user has code whose effects on the process are not known.
    own = [sys.executable, "-m", "modelyard"]
    with shared_gpus([gpu for gpu in shared if gpu != NO_GPU], os.environ) as variables:
        slots = [
            Slot(slot.environ | variables.get(gpu, {}), slot.threads) for slot, gpu in zip(slots, gpus, strict=True)
        ]
        with contextlib.closing(Workers(own, folder, slots) if program is None else OwnProcesses(program)) as executor:
            yield executor, slots
