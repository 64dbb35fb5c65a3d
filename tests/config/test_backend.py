"""The engine that `auto` takes, and why: what is installed and what is there are looked at, nothing is started."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import COMMAND, environment
from modelyard.config import backend
from modelyard.errors import UserError
from waiting import PATIENCE

PS = {"cluster": {"chief": ["a:1"], "worker": ["b:2"], "ps": ["d:4"]}, "task": {"type": "worker", "index": 0}}
Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with these GPUs, TPU chips and packages, and no Keras imported yet."""
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "CUDA_VISIBLE_DEVICES", "TF_CONFIG", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "keras", raising=False)

    def build(
        gpus: tuple[str, ...] = (),
        tpus: int = 0,
        vfio: int = 0,
        packages: tuple[str, ...] = ("jax", "tensorflow"),
        plugins: tuple[str, ...] = ("xla_cuda12",),
        driver: tuple[str, ...] | None = None,
        tool: tuple[str, ...] = (),
    ) -> None:
        files = [f"nvidia{n}" for n in range(len(gpus))] + ["nvidiactl", "nvidia-uvm", "vfio/vfio"]
        files += [f"accel{n}" for n in range(tpus)] + [f"vfio/{n}" for n in range(vfio)]
        for name in files:
            (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "dev" / name).touch()
        for number, name in enumerate(gpus if driver is None else driver):
            folder = tmp_path / "proc" / f"0000:{number:02d}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 17\n")
        monkeypatch.setattr(backend, "DEV", tmp_path / "dev")
        monkeypatch.setattr(backend, "DRIVER", tmp_path / "proc")
        monkeypatch.setattr(backend, "gpus", lambda: list(tool))
        monkeypatch.setattr(backend, "jax_plugins", lambda: set(plugins))
        monkeypatch.setattr(backend, "is_installed", lambda name: name in packages)
        backend._installed_gpus.cache_clear()

    return build


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    yield
    backend._installed_gpus.cache_clear()


def test_auto_takes_jax_where_it_sees_a_gpu(machine: Machine) -> None:
    machine(gpus=("NVIDIA H200",))
    assert backend.choose_engine("auto") == ("jax", "auto: JAX sees NVIDIA H200")


def test_several_accelerators_are_counted(machine: Machine) -> None:
    machine(gpus=("NVIDIA H200", "NVIDIA H200", "NVIDIA T4"))
    assert backend.choose_engine("auto") == ("jax", "auto: JAX sees 2 × NVIDIA H200, NVIDIA T4")


@pytest.mark.parametrize("files", [{"tpus": 4}, {"vfio": 4}], ids=["accel", "vfio"])
def test_auto_takes_jax_where_it_sees_tpus(machine: Machine, files: dict[str, int]) -> None:
    machine(packages=("jax", "tensorflow", "libtpu"), plugins=(), **files)
    assert backend.choose_engine("auto") == ("jax", "auto: JAX sees 4 × TPU")


def test_auto_takes_tensorflow_where_no_accelerator_is_seen(machine: Machine) -> None:
    machine(packages=("jax", "tensorflow", "libtpu"))
    assert backend.choose_engine("auto") == ("tensorflow", "auto: no accelerator seen")


def test_a_gpu_that_jax_was_not_installed_for_is_none_and_auto_says_what_is_missing(machine: Machine) -> None:
    machine(gpus=("NVIDIA H200",), plugins=())
    chosen, reason = backend.choose_engine("auto")
    assert chosen == "tensorflow"
    assert "modelyard[jax-gpu]" in reason
    assert "NVIDIA H200" in reason


@pytest.mark.parametrize("platforms", ["cpu", "cpu,cuda", "CPU"])
@pytest.mark.parametrize("variable", ["JAX_PLATFORMS", "JAX_PLATFORM_NAME"])
def test_jax_that_is_told_to_stay_on_the_cpu_sees_no_accelerator(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, variable: str, platforms: str
) -> None:
    machine(gpus=("NVIDIA H200",), tpus=1, packages=("jax", "tensorflow", "libtpu"))
    monkeypatch.setenv(variable, platforms)
    assert backend.choose_engine("auto") == ("tensorflow", "auto: no accelerator seen")


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("-1", 0), ("0", 1), ("1,0", 2), ("7", 0), ("0,-1,1", 1), ("GPU-8932f937", 1), ("nonsense", 0)],
)
def test_gpus_that_are_hidden_from_the_process_do_not_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    machine(gpus=("NVIDIA H200", "NVIDIA H200"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(backend.accelerators()) == count
    assert backend.choose_engine("auto")[0] == ("jax" if count else "tensorflow")


def test_the_driver_is_asked_where_its_files_do_not_say_which_gpus_a_container_has(machine: Machine) -> None:
    machine(gpus=("one",), driver=("one", "two"), tool=("NVIDIA L4",))
    assert backend.accelerators() == ["NVIDIA L4"]


def test_a_gpu_without_a_name_is_a_gpu(machine: Machine) -> None:
    machine(gpus=("one",), driver=())
    assert backend.accelerators() == ["an NVIDIA GPU"]


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        (("jax",), ("jax", "auto: TensorFlow is not installed")),
        (("tensorflow",), ("tensorflow", "auto: JAX is not installed")),
    ],
)
def test_auto_takes_what_is_installed(machine: Machine, packages: tuple[str, ...], expected: tuple[str, str]) -> None:
    machine(packages=packages)
    assert backend.choose_engine("auto") == expected


def test_no_engine_at_all_says_how_to_install_one(machine: Machine) -> None:
    machine(packages=())
    with pytest.raises(UserError, match=r"modelyard\[cpu\].*modelyard\[jax\]"):
        backend.choose_engine("auto")


@pytest.mark.parametrize(("name", "extra"), [("jax", r"modelyard\[jax-gpu\]"), ("tensorflow", r"modelyard\[gpu\]")])
def test_an_engine_that_is_asked_for_and_not_installed_says_how_to_install_it(
    machine: Machine, name: str, extra: str
) -> None:
    machine(packages=())
    with pytest.raises(UserError, match=rf"the engine '{name}' is not installed.*{extra}"):
        backend.choose_engine(name)


def test_where_another_engine_is_installed_it_is_named(machine: Machine) -> None:
    machine(packages=("tensorflow",))
    with pytest.raises(UserError, match=r"'jax' is not installed.*Or use the installed one: --engine tensorflow$"):
        backend.choose_engine("jax")


def test_parameter_servers_stay_with_tensorflow(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(gpus=("NVIDIA H200",))
    monkeypatch.setenv("TF_CONFIG", json.dumps(PS))
    assert backend.choose_engine("auto") == ("tensorflow", "auto: only TensorFlow has parameter servers")
    monkeypatch.setenv("TF_CONFIG", json.dumps({**PS, "cluster": {"worker": ["b:2", "c:3"]}}))
    assert backend.choose_engine("auto")[0] == "jax"


def test_a_broken_tf_config_is_left_to_those_who_need_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setenv("TF_CONFIG", "{")
    assert backend.choose_engine("auto")[0] == "tensorflow"


def test_auto_goes_with_the_backend_that_keras_has_already(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    keras = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "jax"))
    monkeypatch.setitem(sys.modules, "keras", keras)
    assert backend.choose_engine("auto") == ("jax", "auto: Keras was imported with it")
    with pytest.raises(
        UserError, match=r"the backend 'jax'.*start a new process.*KERAS_BACKEND=tensorflow.*engine='jax'"
    ):
        backend.select_engine("tensorflow")


def test_the_environment_that_a_user_set_is_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(packages=("jax",))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace())
    monkeypatch.setattr(backend.importlib, "import_module", lambda name: None)  # the real Keras would want the real JAX
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    assert backend.select_engine("auto") == "jax"
    assert backend.os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert backend.os.environ["KERAS_BACKEND"] == "jax"


def test_looking_for_accelerators_imports_nothing_heavy() -> None:
    program = """
import sys
from modelyard.config.backend import choose_engine
choose_engine("auto"), choose_engine("jax"), choose_engine("tensorflow")
heavy = {"tensorflow", "jax", "jaxlib", "keras"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=environment(), timeout=PATIENCE)


BLOCKED = """
import sys
sys.modules["{name}"] = None  # what Python itself does to forbid an import
from modelyard.cli.app import main
main()
"""


@pytest.mark.parametrize("name", ["jax", "tensorflow"])
def test_a_run_without_its_engine_says_what_to_install_before_anything_is_made(tmp_path: Path, name: str) -> None:
    words = ["train", "--model", "mlp", "--dataset", "digits", "--engine", name, "--model_dir", "run"]
    code = BLOCKED.format(name=name)
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"the engine '{name}' is not installed. Install it: pip install 'modelyard[" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("jax", ["num_gpus 1 asks for an accelerator", "JAX sees none", "its devices: ", "modelyard[jax-gpu]"]),
        ("auto", ["num_gpus asks for 1 GPU(s), TensorFlow (engine auto: no accelerator seen) sees 0."]),
    ],
)
def test_an_accelerator_that_is_not_there_says_who_looked_and_what_to_do(
    tmp_path: Path, engine: str, said: list[str]
) -> None:
    if backend.nvidia_gpus():
        pytest.skip("this machine has a GPU")
    words = ["train", "--model", "mlp", "--dataset", "digits", "--num_gpus", "1", "--model_dir", "run"]
    done = subprocess.run(
        [*COMMAND, *words, "--engine", engine],
        capture_output=True, text=True, env=environment(), timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    shown = " ".join(done.stderr.split())
    for text in [*said, "`modelyard doctor` checks the machine"]:
        assert text in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "run").exists()


def test_the_choice_and_its_reason_are_in_the_log(caplog: pytest.LogCaptureFixture, two_devices: None) -> None:
    import modelyard

    caplog.set_level(logging.INFO, "modelyard")
    modelyard.train(model="mlp", dataset="digits", train_steps=1, model_dir="run")
    assert any(line.startswith("engine ") and "(auto: " in line for line in caplog.messages)


def test_engines_are_listed_in_errors() -> None:
    done = subprocess.run(
        [*COMMAND, "train", "--engine", "jaxx"], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 2
    assert "'jax'" in done.stderr


def test_every_import_of_tensorflow_has_the_same_kernels() -> None:
    program = """
import importlib.abc, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "tensorflow":
            print(os.environ.get("TF_ENABLE_ONEDNN_OPTS"))
            os._exit(0)

sys.meta_path.insert(0, Finder())
import modelyard.engine.base
"""
    inherited = {name: value for name, value in environment().items() if name != "TF_ENABLE_ONEDNN_OPTS"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout == "1\n"
