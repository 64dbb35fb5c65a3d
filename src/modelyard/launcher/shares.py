"""Deals out what a machine has: cores and GPUs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

from modelyard.system.machine import gpus

VISIBLE, NO_GPU = "CUDA_VISIBLE_DEVICES", "-1"


def deal_cores(cores: list[int], processes: int) -> list[list[int]]:
    """The cores of each process: neighbours, as evenly as can be; where there are too few, they take turns."""
    if len(cores) < processes:
        return [[cores[i % len(cores)]] for i in range(processes)]
    ends = [len(cores) * i // processes for i in range(processes + 1)]
    return [cores[begin:end] for begin, end in itertools.pairwise(ends)]


def deal_gpus(found: list[str], trainers: int) -> tuple[list[list[str]], list[str]]:
    """The GPUs of each training process, equally many for all, and those left over."""
    each = len(found) // trainers
    return [found[i * each : (i + 1) * each] for i in range(trainers)], found[each * trainers :]


def found_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    listed = environ.get(VISIBLE)
    if listed is None:
        return [str(number) for number in range(len(gpus()))]
    names: list[str] = []
    for name in (part.strip() for part in listed.split(",")):
        if not name or name.startswith("-"):  # CUDA looks at nothing after one that there can't be
            break
        names.append(name)
    return names


def found_cores() -> list[int]:
    """The cores that this process may run on; none where processes can't be bound to cores."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
