"""Which accelerators JAX would find, learned without starting it: its plugins that are installed, and the devices."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import shutil
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path

DEV = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/gpus")


def accelerators() -> list[str]:
    """The names of the accelerators that JAX would use here; CUDA is not started for it."""
    first = (os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME") or "").split(",")[0].strip().lower()
    found = []
    if first in ("", "cuda", "gpu") and any("cuda" in plugin for plugin in jax_plugins()):
        found += nvidia_gpus()
    if first in ("", "tpu") and is_installed("libtpu"):
        found += tpus()
    return found


def is_installed(name: str) -> bool:
    """Whether a package is there; it is not imported."""
    return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None


def counted(names: list[str]) -> str:
    """``2 × NVIDIA H200``, for several of a kind."""
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in Counter(names).items())


def jax_plugins() -> set[str]:
    """The platforms that were installed for JAX, as it looks for them: modules of a namespace, and entry points."""
    space = importlib.util.find_spec("jax_plugins")
    places = list(space.submodule_search_locations or ()) if space is not None else []
    modules = {module.name for module in pkgutil.iter_modules(places)}
    return modules | {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}


def nvidia_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process."""
    installed = _installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed
    chosen = []
    for word in (word.strip() for word in visible.split(",")):
        if word.startswith(("GPU-", "MIG-")):  # by identity, which is not known here
            chosen.append(installed[0] if installed else "")
        elif word.isdecimal() and int(word) < len(installed):
            chosen.append(installed[int(word)])
        else:  # CUDA, too, stops at the first that is not there
            break
    return [name for name in chosen if name]


@lru_cache(maxsize=1)
def _installed_gpus() -> list[str]:
    """From files, which is at once; where there are none (containers, WSL), the driver's own tool is asked."""
    names = []
    for file in sorted(DRIVER.glob("*/information")):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    devices = [path for path in DEV.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    if names and len(names) == len(devices):  # a container may have some of the machine's GPUs only
        return names
    return _asked_driver() or (["an NVIDIA GPU"] * len(devices))


def _asked_driver() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def tpus() -> list[str]:
    """TPU chips: device files of their own, or of VFIO for newer ones."""
    files = [path for path in DEV.glob("accel*") if path.name.removeprefix("accel").isdecimal()]
    files = files or [path for path in (DEV / "vfio").glob("*") if path.name.isdecimal()]
    return ["TPU"] * len(files)
