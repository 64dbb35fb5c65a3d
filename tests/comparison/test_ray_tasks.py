"""Cells on a Ray cluster: nodes that are lost, that do not see the folder, and clusters that do not answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import modelyard
from conftest import COMMAND, environment, on_engine
from modelyard import __version__
from modelyard.comparison.places import Place
from modelyard.errors import ConfigError, UserError
from waiting import PATIENCE, wait_until

HOST = "127.0.0.2"
"""On loopback, but no address that Ray replaces by that of the machine."""
OPTIONS = ("--train_steps", "300", "--save_every", "50 steps", "--eval_every", "300 steps", "--threads", "1")


def test_it_says_how_to_install_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'modelyard\[ray\]'"):
        modelyard.matrix(models="mlp", datasets="digits", output="m", on="ray")


def test_places_and_addresses_are_checked_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match=r"no place .rays.") as caught:
        modelyard.matrix(models="mlp", datasets="digits", output="m", on="rays", jobs=0)
    assert "jobs" in str(caught.value)
    with pytest.raises(ConfigError, match="has no effect"):
        modelyard.matrix(models="mlp", datasets="digits", output="m", ray_address="here:1")
    assert not Path("m").exists()


@pytest.fixture
def ray() -> Any:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    return pytest.importorskip("ray", reason="ray is not installed")


def test_a_cluster_that_does_not_answer_is_an_error_at_once(ray: Any) -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    with (
        pytest.raises(UserError, match=f"can't connect to the Ray cluster {HOST}:{port}: .*refused"),
        Place("ray", ray_address=f"{HOST}:{port}").open(None, Path("m")),
    ):
        pass
    with pytest.raises(UserError, match="not the address"), Place("ray", ray_address="head").open(None, Path("m")):
        pass


def test_a_node_that_does_not_see_the_folder_says_so(ray: Any, tmp_path: Path) -> None:
    from modelyard.comparison.ray_tasks import run_on_node

    (tmp_path / "m").mkdir()
    words = ("-c", "import pathlib; pathlib.Path('started').touch()")

    def run(mark: str, cwd: Path = tmp_path, version: str = __version__) -> tuple[int, str]:
        return run_on_node("a", words, {}, str(cwd), str(tmp_path / "m"), str(tmp_path), mark, version)

    status, message = run("abc")
    assert status == 1
    assert f"does not see {tmp_path / 'm'}" in message
    assert "all nodes share" in message
    (tmp_path / "m/.seen-by-nodes").write_text("another")
    assert "another folder" in run("abc")[1]
    (tmp_path / "m/.seen-by-nodes").write_text("abc")
    assert str(tmp_path / "missing") in run("abc", cwd=tmp_path / "missing")[1]
    assert "Modelyard" in run("abc", version="0.0.0")[1]
    assert not Path("started").exists()
    assert run("abc") == (0, "")
    assert Path("started").exists()


@pytest.fixture
def cluster(ray: Any) -> Iterator[Any]:
    """A head that runs no cells, and two nodes with room for one each."""
    from ray.cluster_utils import Cluster

    common = {"node_ip_address": HOST, "include_dashboard": False, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **common})
    made.nodes = [made.add_node(num_cpus=1, **common) for _ in range(2)]
    yield made
    made.shutdown()


def started_at(cell: Path) -> list[int]:
    return [start["step"] for start in json.loads((cell / "manifest.json").read_text())["starts"]]


@pytest.mark.slow
def test_a_cell_whose_node_is_lost_goes_on_elsewhere_with_the_same_numbers(cluster: Any, tmp_path: Path) -> None:
    words = ["matrix", "--models", "mlp", "--datasets", "digits", "--seeds", "2", *OPTIONS, *on_engine()]
    process = subprocess.Popen(
        [*COMMAND, *words, "--output", "m", "--json", "--on", "ray", "--ray_address", cluster.address],
        env=environment(MODELYARD_FAULTS="slow@save=1s"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    cells = [Path(f"m/cells/mlp-digits-seed{seed}") for seed in range(2)]
    wait_until(lambda: all(any(cell.glob("checkpoints/step-*50")) for cell in cells), "checkpoints", process)
    raylet = psutil.Process(cluster.nodes[0].all_processes["raylet"][0].process.pid)
    for one in [raylet, *raylet.children(recursive=True)]:
        one.kill()
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "lost its node" in errors
    assert {cell["state"] for cell in json.loads(output)["cells"]} == {"done"}  # and nothing of Ray is printed there
    assert sorted(len(started_at(cell)) for cell in cells) == [1, 2]
    assert all(step > 0 for cell in cells for step in started_at(cell)[1:])
    assert not Path("m/.seen-by-nodes").exists()

    subprocess.run(
        [*COMMAND, *words, "--output", "alone"], env=environment(), capture_output=True, check=True, timeout=PATIENCE
    )
    for cell in cells:
        weights = Path("checkpoints/step-00000300/weights.safetensors")
        assert (cell / weights).read_bytes() == (Path("alone/cells") / cell.name / weights).read_bytes()
