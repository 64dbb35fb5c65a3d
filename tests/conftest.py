"""Shared by all tests.

Keras has one backend for a process, so the suite runs once for each engine: ``pytest`` on TensorFlow, ``pytest --engine
jax`` on JAX. The engine is set up once per process, with several CPU devices and two threads.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from modelyard.data.dataset import Dataset
    from modelyard.engine.base import Engine, State

Make = Callable[..., "Engine"]
TESTS = Path(__file__).parent
COMMAND = [sys.executable, "-m", "modelyard"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own, where no project.yaml is picked up by accident."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _own_settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test, and every process that it starts, has a list of trusted plugins of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A command that is called in this process shows its log on a stream that is closed after the test."""
    log = logging.getLogger("modelyard")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    log.setLevel(logging.DEBUG)
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT has its usual effect here and in new processes, also if the suite ignores it, as ``make test &`` does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_addoption(parser: pytest.Parser) -> None:
    given = os.environ.get("MODELYARD_TEST_ENGINE", "tensorflow")
    parser.addoption("--engine", choices=["tensorflow", "jax"], default=given, help="the engine to test")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["MODELYARD_TEST_ENGINE"] = config.getoption("--engine")
    # Within the repository, and kept: what JAX has compiled once, the next test finds.
    os.environ.setdefault("MODELYARD_CACHE", str(config.rootpath / ".pytest_cache" / "modelyard"))
    settings = tempfile.TemporaryDirectory(prefix="modelyard-settings-")  # for fixtures of whole modules
    config.add_cleanup(settings.cleanup)
    os.environ["XDG_CONFIG_HOME"] = settings.name
    os.environ["KERAS_BACKEND"] = engine_name()  # some modules of tests import Keras when they are collected
    importlib.import_module("modelyard")  # before them: it sets what TensorFlow reads when it is imported


_FIRST = (
    "test_docs.py",
    "test_kill.py",
    "test_portable.py",
    "test_cluster.py",
    "test_data_commands.py",
    "test_trackers.py",
)
"""Files with tests of half a minute and more: begun last, one would keep a core busy while the others have nothing."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _FIRST)
    others = {"tensorflow": "jax_only", "jax": "tensorflow_only"}[engine_name()]
    for item in items:
        mark = item.get_closest_marker(others)
        if mark is not None:
            item.add_marker(pytest.mark.skip(reason=f"{others}: {mark.args[0]}"))


def engine_name() -> str:
    """The engine that is tested."""
    return os.environ["MODELYARD_TEST_ENGINE"]


def on_engine() -> list[str]:
    """The words that choose it on the command line."""
    return ["--engine", engine_name()]


def engine_class() -> Any:
    """The class of the engine that is tested."""
    from modelyard.registry import ENGINES

    return ENGINES.get(engine_name()).load()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as the engine compiles it."""
    if engine_name() == "jax":
        import jax

        made: Callable[..., Any] = jax.jit(function)
        return made
    import tensorflow as tf

    return tf.function(function, autograph=False)


@pytest.fixture(scope="session", autouse=True)
def _devices_before_the_first_test() -> None:
    """Sets the number of JAX's devices before any test starts JAX, whichever comes first."""
    if engine_name() == "jax":
        _set_up_jax()


@pytest.fixture(scope="session")
def two_devices() -> None:
    """The engine in this process, with at least two CPU devices to choose from."""
    from modelyard.config.backend import select_engine

    select_engine(engine_name())
    _set_up_jax() if engine_name() == "jax" else _set_up_tensorflow()
    import parts  # noqa: F401 - registers the models of the tests


@lru_cache(maxsize=1)  # from the first time on nothing changes
def _set_up_tensorflow() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(2)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    tf.config.list_logical_devices()  # starts it


@lru_cache(maxsize=1)
def _set_up_jax() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture
def make(two_devices: None) -> Make:
    """Builds an engine for a small model on the digits, with these options."""
    import modelyard
    from modelyard.config.durations import RunLength
    from modelyard.data.open_dataset import load_dataset
    from modelyard.loop.run import build as build_engine

    def build(dataset: Dataset | str = "digits", **options: Any) -> Engine:
        name = dataset if isinstance(dataset, str) else "digits"
        config = modelyard.load_config(
            **{"model": "tiny_norm", "dataset": name, "train_steps": 40, "train_batch_size": 32, **options}
        )
        data = load_dataset(config) if isinstance(dataset, str) else dataset
        engine: Engine = engine_class()(config)
        run = RunLength(data.size("train"), config.train_batch_size, config.train_steps or 0)
        build_engine(engine, config, data, run)
        return engine

    return build


def distance(one: State, other: State) -> float:
    """The largest difference between two states in any number."""
    pairs = [(one.weights[name], other.weights[name]) for name in one.weights]
    pairs += [(one.optimizer[name], other.optimizer[name]) for name in one.optimizer]
    return max(float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0)) for a, b in pairs)


def same_bits(one: State, other: State) -> bool:
    """Whether two states are the same to the last bit."""
    return all(
        a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)
        for a, b in ((one.weights, other.weights), (one.optimizer, other.optimizer))
    )


def environment(**extra: str) -> dict[str, str]:
    """For a process of its own: quiet, and free to choose its engine."""
    inherited = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    return {**inherited, "TF_CPP_MIN_LOG_LEVEL": "3", "COLUMNS": "200", **extra}


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ``modelyard`` with the given words as a process, and waits for it."""

    def run(*words: str, code: int | None = 0, **extra: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *words], capture_output=True, text=True, timeout=300, env=environment(**extra), check=False
        )
        if code is not None:
            assert done.returncode == code, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The object in the last line of standard output."""
    value: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return value
