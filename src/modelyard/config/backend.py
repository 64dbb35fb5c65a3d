"""Chooses the engine before Keras is imported, since Keras fixes its backend then."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from modelyard.errors import UserError
from modelyard.registry import ENGINES

INSTALL = {
    "tensorflow": "pip install 'modelyard[cpu]' (or 'modelyard[gpu]' for NVIDIA GPUs)",
    "jax": "pip install 'modelyard[jax]' (or 'modelyard[jax-gpu]' for NVIDIA GPUs)",
}


def choose_engine(name: str) -> tuple[str, str]:
    """The engine for the option ``engine``, and the reason for the choice."""
    if name != "auto":
        ENGINES.get(name)
        if importlib.util.find_spec(name) is None:
            raise UserError(f"the engine {name!r} is not installed. Install it: {INSTALL[name]}")
        return name, "asked for"
    for candidate in ENGINES.names():
        if importlib.util.find_spec(candidate) is not None:
            return candidate, "installed"
    raise UserError(f"no engine is installed. Install one: {' or '.join(INSTALL.values())}")


def select_engine(name: str) -> str:
    """Chooses the engine and sets the environment that it and Keras read when they are imported."""
    chosen, _ = choose_engine(name)
    if "keras" in sys.modules:
        import keras

        if keras.backend.backend() != chosen:
            raise UserError(
                f"Keras was imported with the backend {keras.backend.backend()!r} before Modelyard could choose "
                f"{chosen!r}. Set KERAS_BACKEND={chosen}, or import modelyard and load the config first."
            )
    os.environ["KERAS_BACKEND"] = chosen
    if chosen == "tensorflow":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        # Without AVX-512, TensorFlow leaves oneDNN's faster convolutions off unless told otherwise.
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
        if "tensorflow" not in sys.modules:
            with _without_greetings():
                importlib.import_module("tensorflow")
    return chosen


_GREETING = re.compile(rb"^(I\d{4} .*|WARNING: All log messages before absl.*|To enable the following instr.*)\n", re.M)


@contextlib.contextmanager
def _without_greetings() -> Iterator[None]:
    """TensorFlow greets on standard error before it reads its log level. Anything else it says is passed on."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as caught:
        stderr = os.dup(2)
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            os.write(2, _GREETING.sub(b"", caught.read()))


def prefer_engine() -> None:
    """For a script that imports Keras's parts before a config is loaded: the engine that ``auto`` would choose."""
    if "keras" not in sys.modules and "KERAS_BACKEND" not in os.environ:
        select_engine("auto")
