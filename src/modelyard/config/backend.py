"""Chooses the engine before Keras is imported, since Keras fixes its backend then.

``auto`` takes JAX where it would find an accelerator, else TensorFlow, else whichever is installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import TextIO

from modelyard.cluster.description import PARAMETER_SERVERS, find_cluster
from modelyard.config.accelerators import accelerators, counted, is_installed, jax_plugins, nvidia_gpus
from modelyard.errors import ConfigError, UserError
from modelyard.registry import ENGINES

INSTALL = {
    "tensorflow": "pip install 'modelyard[cpu]' (or 'modelyard[gpu]' for NVIDIA GPUs)",
    "jax": "pip install 'modelyard[jax]' (or 'modelyard[jax-gpu]' for NVIDIA GPUs)",
}


def choose_engine(name: str) -> tuple[str, str]:
    """The engine for the option ``engine``, and the reason for the choice.

    Raises:
        UserError: if it is not installed, or none is.
    """
    if name != "auto":
        ENGINES.get(name)
        if not is_installed(name):
            there = [f"--engine {other}" for other in INSTALL if is_installed(other)]
            # A run that comes from another machine names its engine, and goes on with any.
            hint = f". Or take the one that is: {there[0]}" if there else ""
            raise UserError(f"the engine {name!r} is not installed. Install it: {INSTALL[name]}{hint}")
        return name, "asked for"
    if not any(map(is_installed, INSTALL)):
        raise UserError(f"no engine is installed. Install one: {' or '.join(INSTALL.values())}")
    chosen, reason = _automatic()
    fixed = keras_backend()
    if fixed != chosen and fixed in INSTALL:
        chosen, reason = fixed, "Keras was imported with it"
    return chosen, f"auto: {reason}"


def _automatic() -> tuple[str, str]:
    if not is_installed("jax"):
        return "tensorflow", "JAX is not installed"
    if not is_installed("tensorflow"):
        return "jax", "TensorFlow is not installed"
    if _has_parameter_servers():
        return "tensorflow", "parameter servers are TensorFlow's"
    seen = accelerators()
    if seen:
        return "jax", f"JAX sees {counted(seen)}"
    unused = nvidia_gpus()
    if unused and not any("cuda" in plugin for plugin in jax_plugins()):
        return "tensorflow", f"JAX is installed without modelyard[jax-gpu], which it needs for {counted(unused)}"
    return "tensorflow", "no accelerator seen"


def keras_backend() -> str | None:
    """What Keras was imported with; None if it was not imported yet."""
    if "keras" not in sys.modules:
        return None
    import keras

    backend: str = keras.backend.backend()
    return backend


def _has_parameter_servers() -> bool:
    try:
        return find_cluster().mode == PARAMETER_SERVERS
    except ConfigError:  # told where the cluster is needed
        return False


def select_engine(name: str) -> str:
    """Chooses the engine and imports it and Keras."""
    chosen = import_engine(name)
    if "keras" not in sys.modules:
        with _without_scikit_learn():
            importlib.import_module("keras")
    return chosen


def import_engine(name: str) -> str:
    """Chooses the engine, imports it, and sets the environment that it and Keras read when they are imported."""
    chosen, _ = choose_engine(name)
    fixed = keras_backend()
    if fixed not in (None, chosen):
        raise UserError(
            f"Keras was imported with the backend {fixed!r} before Modelyard could choose {chosen!r}, and a process "
            f"has one. After a run on {fixed}, start a new process; in a script that imports Keras itself, set "
            f"KERAS_BACKEND={chosen}, or import modelyard and load the config first."
        )
    os.environ["KERAS_BACKEND"] = chosen
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # JAX's libraries read it, too
    if chosen not in sys.modules:
        try:
            with without_lines(sys.stderr, 2, _GREETING):  # said before the log level is read
                importlib.import_module(chosen)
        except ImportError as error:
            raise UserError(
                f"the engine {chosen!r} can't be imported: {error}. Install it: {INSTALL[chosen]}"
            ) from error
    return chosen


@contextlib.contextmanager
def _without_scikit_learn() -> Iterator[None]:
    """Keras imports scikit-learn, and that SciPy, for wrappers that nobody here uses: a third of its import's time."""
    if "sklearn" in sys.modules:
        yield
        return
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["sklearn"]


_GREETING = re.compile(rb"^(I\d{4} .*|WARNING: All log messages before absl.*|To enable the following instr.*)\n", re.M)


@contextlib.contextmanager
def without_lines(stream: TextIO, number: int, pattern: re.Pattern[bytes]) -> Iterator[None]:
    """Keeps from a stream what libraries say there past Python. Anything else is passed on when the block ends.

    Args:
        stream: Python's.
        number: its file descriptor.
        pattern: what to leave out.
    """
    if stream is not None:
        stream.flush()
    with tempfile.TemporaryFile() as caught:
        kept = os.dup(number)
        os.dup2(caught.fileno(), number)
        try:
            yield
        finally:
            os.dup2(kept, number)
            os.close(kept)
            caught.seek(0)
            os.write(number, pattern.sub(b"", caught.read()))


def prefer_engine() -> None:
    """For a script that imports Keras's parts before a config is loaded: the engine that ``auto`` would choose."""
    if "keras" not in sys.modules and "KERAS_BACKEND" not in os.environ:
        select_engine("auto")
