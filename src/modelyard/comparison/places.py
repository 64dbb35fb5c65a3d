"""Where the cells of a matrix or a search run: on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from modelyard.comparison.executor import Executor, OwnProcesses, Slot, make_slots
from modelyard.comparison.workers import Workers
from modelyard.launcher.mps import shared_gpus
from modelyard.launcher.processes import NO_GPU, VISIBLE_GPUS
from modelyard.system.machine import available_cores


@contextlib.contextmanager
def open_place(program: Sequence[str] | None, folder: Path, jobs: int) -> Iterator[tuple[Executor, list[Slot]]]:
    """Yields what runs the cells, and the room for them: as many run at a time.

    Args:
        program: the program of the user that runs the commands of the cells; None for Modelyard.
        folder: the folder of the matrix.
        jobs: how many cells run at a time.
    """
    slots = make_slots(jobs, os.environ, available_cores())
    gpus = [slot.environ.get(VISIBLE_GPUS, NO_GPU) for slot in slots]
    shared = list(dict.fromkeys(gpus)) if len(set(gpus)) < len(gpus) else []
    # A program of the user has code whose effects on the process are not known.
    own = [sys.executable, "-m", "modelyard"]
    with shared_gpus([gpu for gpu in shared if gpu != NO_GPU], os.environ) as variables:
        slots = [
            Slot(slot.environ | variables.get(gpu, {}), slot.threads) for slot, gpu in zip(slots, gpus, strict=True)
        ]
        with contextlib.closing(Workers(own, folder, jobs) if program is None else OwnProcesses(program)) as executor:
            yield executor, slots
