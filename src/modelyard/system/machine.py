"""Facts about this machine: versions, CPU, memory, GPUs, git commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

PACKAGES = (
    "modelyard", "keras", "tensorflow", "tensorflow-cpu", "jax", "jaxlib", "numpy", "safetensors", "tensorboard",
    "simplejpeg", "opencv-python-headless", "pillow",
)  # fmt: skip

_lock = threading.Lock()


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that matter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Returns the processor, the cores that this process may use, memory and GPUs."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
    }


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Returns the bytes that this process can still use, of the machine or of its container."""
    free = int(psutil.virtual_memory().available + psutil.swap_memory().free)
    return max(min([free, *_free_in_containers()]), 0)


def _free_in_containers() -> Iterator[int]:
    """Yields the free memory of each control group that this process is in and that has a limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        # Version 2 has no controllers here; version 1 has a tree for each.
        root = Path("/sys/fs/cgroup") / controllers
        limit, used, cached = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        folder = root / own.lstrip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            try:
                facts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
                limits = [int((group / name).read_text(encoding="ascii")) for name in (limit, used)]
            except (OSError, ValueError):
                continue  # no limit
            yield limits[0] - limits[1] + int(facts.get(cached, 0))


def gpus() -> list[str]:
    """Returns the NVIDIA GPUs that the driver lists. That takes a second and is done once."""
    with _lock:
        return list(_gpus())


@lru_cache(maxsize=1)
def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return _output(query).splitlines()


def pid_space() -> str:
    """Returns the pid namespace of this process: containers may share a host name."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path
    except OSError:
        return ""


def git_commit(folder: Path) -> str | None:
    """Returns the commit of the repository around ``folder``, with ``+changes`` if files differ from it."""
    if shutil.which("git") is None:
        return None
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"]).strip()
    if not commit:
        return None
    dirty = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]).strip()
    return f"{commit}+changes" if dirty else commit


def cpu_flags() -> set[str]:
    """Returns the instruction sets of the processor."""
    return set(_cpu_info("flags").split())


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(key: str) -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
