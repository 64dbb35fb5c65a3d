"""Chooses the engine before Keras is imported, since Keras fixes its backend then.

``auto`` takes JAX if it would find an accelerator, else TensorFlow, else the one that is installed. Accelerators are
found by the installed plugins of JAX and by device files: neither JAX nor CUDA is started.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import pkgutil
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TextIO

from modelyard.cluster.description import PARAMETER_SERVERS
from modelyard.cluster.environment import find_cluster
from modelyard.errors import ConfigError, UserError
from modelyard.registry import ENGINES
from modelyard.system.machine import gpus

INSTALL = {
    "tensorflow": "pip install 'modelyard[cpu]' (or 'modelyard[gpu]' for NVIDIA GPUs)",
    "jax": "pip install 'modelyard[jax]' (or 'modelyard[jax-gpu]' for NVIDIA GPUs)",
}
SHOWN = {"tensorflow": "TensorFlow", "jax": "JAX"}
DEV = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/gpus")
log = logging.getLogger("modelyard")


def choose_engine(name: str) -> tuple[str, str]:
    """The engine for the option ``engine``, and the reason for the choice.

    Raises:
        UserError: if it is not installed, or none is.
    """
    if name != "auto":
        ENGINES.get(name)
        if not is_installed(name):
            # A run from another machine names its engine, and can be resumed with either.
            others = [other for other in INSTALL if is_installed(other)]
            hint = f". Or use the installed one: --engine {others[0]}" if others else ""
            raise UserError(f"the engine {name!r} is not installed. Install it: {INSTALL[name]}{hint}")
        return name, "option engine"
    if not any(map(is_installed, INSTALL)):
        raise UserError(f"no engine is installed. Install one: {' or '.join(INSTALL.values())}")
    chosen, reason = _automatic_engine()
    backend = keras_backend()
    if backend != chosen and backend in INSTALL:
        chosen, reason = backend, "Keras was imported with it"
    return chosen, f"auto: {reason}"


def _automatic_engine() -> tuple[str, str]:
    if not is_installed("jax"):
        return "tensorflow", "JAX is not installed"
    if not is_installed("tensorflow"):
        return "jax", "TensorFlow is not installed"
    if _has_parameter_servers():
        return "tensorflow", "only TensorFlow has parameter servers"
    found = accelerators()
    if found:
        return "jax", f"JAX sees {count_devices(found)}"
    unused = nvidia_gpus()
    if unused and not _has_cuda_plugin():
        return "tensorflow", f"JAX needs modelyard[jax-gpu] for {count_devices(unused)}"
    return "tensorflow", "no accelerator seen"


def _has_parameter_servers() -> bool:
    try:
        return find_cluster().mode == PARAMETER_SERVERS
    except ConfigError:  # raised again when the cluster is used
        return False


def is_installed(name: str) -> bool:
    """Whether a package is installed. It is not imported."""
    return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None


# -- accelerators ------------------------------------------------------------------------------------------------------


def accelerators() -> list[str]:
    """The names of the accelerators that JAX would use."""
    first = (os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME") or "").split(",")[0].strip().lower()
    found = []
    if first in ("", "cuda", "gpu") and _has_cuda_plugin():
        found += nvidia_gpus()
    if first in ("", "tpu") and is_installed("libtpu"):
        found += _tpus()
    return found


def count_devices(names: list[str]) -> str:
    """Lists devices: ``2 × NVIDIA H200, NVIDIA T4``."""
    return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in Counter(names).items())


def _has_cuda_plugin() -> bool:
    return any("cuda" in plugin for plugin in jax_plugins())


def jax_plugins() -> set[str]:
    """The installed plugins of JAX, found as JAX finds them: modules of a namespace package, and entry points."""
    namespace = importlib.util.find_spec("jax_plugins")
    folders = list(namespace.submodule_search_locations or ()) if namespace is not None else []
    modules = {module.name for module in pkgutil.iter_modules(folders)}
    return modules | {point.name for point in importlib.metadata.entry_points(group="jax_plugins")}


def nvidia_gpus() -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES makes visible to this process."""
    installed = _installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed
    chosen = []
    for word in (word.strip() for word in visible.split(",")):
        if word.startswith(("GPU-", "MIG-")):  # UUIDs, which are not known here
            chosen += installed[:1]
        elif word.isdecimal() and int(word) < len(installed):
            chosen.append(installed[int(word)])
        else:  # CUDA, too, stops at the first invalid entry
            break
    return chosen


@lru_cache(maxsize=1)
def _installed_gpus() -> list[str]:
    """Reads the driver's files, which is fast. If they are missing (containers, WSL), runs nvidia-smi."""
    names = []
    for file in sorted(DRIVER.glob("*/information")):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    devices = [path for path in DEV.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    if names and len(names) == len(devices):  # a container may have only some GPUs of the machine
        return names
    return [gpu.partition(",")[0].strip() for gpu in gpus()] or ["an NVIDIA GPU"] * len(devices)


def _tpus() -> list[str]:
    """Counts the chips: they have device files of their own, newer ones those of VFIO."""
    files = [path for path in DEV.glob("accel*") if path.name.removeprefix("accel").isdecimal()]
    files = files or [path for path in (DEV / "vfio").glob("*") if path.name.isdecimal()]
    return ["TPU"] * len(files)


# -- importing ---------------------------------------------------------------------------------------------------------


def keras_backend() -> str | None:
    """The backend that Keras was imported with. None if Keras is not imported yet."""
    if "keras" not in sys.modules:
        return None
    import keras

    backend: str = keras.backend.backend()
    return backend


def select_engine(name: str) -> str:
    """Chooses the engine and imports it and Keras."""
    chosen = import_engine(name)
    if "keras" not in sys.modules:
        # Keras imports scikit-learn, and that SciPy, for unused wrappers: a third of its import time.
        hidden = {} if "sklearn" in sys.modules else {"sklearn": None}
        sys.modules.update(hidden)  # type: ignore[arg-type]
        try:
            importlib.import_module("keras")
        finally:
            for module in hidden:
                del sys.modules[module]
    return chosen


def import_engine(name: str) -> str:
    """Chooses the engine, sets the environment that it and Keras read when they are imported, and imports it."""
    chosen, _ = choose_engine(name)
    backend = keras_backend()
    if backend not in (None, chosen):
        other = f" To stay with {backend}, give engine={backend!r}." if backend in ENGINES.names() else ""
        raise UserError(
            f"Keras was imported with the backend {backend!r} before Modelyard could choose {chosen!r}, and a process "
            f"has one. After a run on {backend}, start a new process; in a script that imports Keras itself, set "
            f"KERAS_BACKEND={chosen}, or import modelyard and load the config first.{other}"
        )
    os.environ["KERAS_BACKEND"] = chosen
    if chosen not in sys.modules:
        log.info("loading %s …", SHOWN[chosen])
        try:
            import_quietly(chosen)
        except ImportError as error:
            raise UserError(
                f"the engine {chosen!r} cannot be imported: {error}. Install it: {INSTALL[chosen]}"
            ) from error
    return chosen


_ABOUT_ITSELF = re.compile(
    rb"^(I\d{4} .*|WARNING: All log messages before absl.*|To enable the following instr.*"
    rb"|[IWE]\d{4} .*\] oneDNN .*|INFO: Created TensorFlow Lite .*)\n",
    re.M,
)
"""Lines of TensorFlow and JAX, some of which are printed before the log level is read."""


def import_quietly(name: str) -> ModuleType:
    """Imports TensorFlow or JAX without the lines that they print about themselves."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # JAX's libraries read it, too
    if name in sys.modules:
        return sys.modules[name]
    with quiet_engine():
        return importlib.import_module(name)


def quiet_engine() -> contextlib.AbstractContextManager[None]:
    """Drops the lines that TensorFlow and JAX print about themselves."""
    return without_lines(sys.stderr, 2, _ABOUT_ITSELF)


@contextlib.contextmanager
def without_lines(stream: TextIO, descriptor: int, pattern: re.Pattern[bytes]) -> Iterator[None]:
    """Drops matching lines that C++ libraries write to a stream. The rest is written when the block ends.

    Args:
        stream: Python's stream.
        descriptor: its file descriptor.
        pattern: the lines to drop.
    """
    if stream is not None:
        stream.flush()
    with tempfile.TemporaryFile() as captured:
        original = os.dup(descriptor)
        os.dup2(captured.fileno(), descriptor)
        try:
            yield
        finally:
            os.dup2(original, descriptor)
            os.close(original)
            captured.seek(0)
            os.write(descriptor, pattern.sub(b"", captured.read()))


def prefer_engine() -> None:
    """Selects the engine of ``auto`` for a script that uses models or hooks before it loads a config."""
    if "keras" not in sys.modules and "KERAS_BACKEND" not in os.environ:
        select_engine("auto")
