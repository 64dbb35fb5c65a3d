"""NVIDIA's MPS for processes that share a GPU. A small program stands in for its daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from modelyard.comparison.places import Place
from modelyard.launcher.mps import shared_gpus
from waiting import PATIENCE, wait_until

DAEMON = f"""#!{sys.executable} -S
import os, pathlib, signal, subprocess, sys, time
pipes = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "default-pipes"))
control = pipes / "control"
if sys.argv[1:] == ["-f"]:
    if os.environ.get("FAILS"):
        (pathlib.Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]) / "control.log").write_text("no such device\\n")
        sys.exit(1)
    server = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    with open(os.environ["SEEN"], "w") as file:
        file.write(f"{{os.getpid()}} {{server.pid}} {{pipes}} {{os.environ['CUDA_VISIBLE_DEVICES']}}")
    control.write_text(str(os.getpid()))
    signal.pause()
if not control.exists():
    print("Cannot find MPS control daemon process")
    sys.exit(1)
if sys.stdin.read().strip() == "quit":
    os.kill(int(control.read_text()), signal.SIGTERM)
else:
    print("100.0")
"""


@pytest.fixture(autouse=True)
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the daemon writes down its process, that of its server, and its variables."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-cuda-mps-control").write_text(DAEMON)
    (folder / "nvidia-cuda-mps-control").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "seen"


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_cells_that_share_gpus_get_a_daemon_that_ends_with_them(seen: Path) -> None:
    with Place(jobs=3).open(None, Path("m")) as (_, slots):
        daemon, server, pipes, gpus = seen.read_text().split()
        assert gpus == "2,5"
        # Clients number the GPUs that the daemon sees.
        assert [slot.environ["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["0", "1", "0"]
        assert {slot.environ["CUDA_MPS_PIPE_DIRECTORY"] for slot in slots} == {pipes}
        assert Path(pipes).parent.stat().st_mode & 0o077 == 0
        assert not is_gone(int(daemon))
    wait_until(lambda: is_gone(int(daemon)) and is_gone(int(server)))
    assert not Path(pipes).parent.exists()


@pytest.mark.parametrize("jobs", [1, 2])
def test_cells_with_gpus_of_their_own_need_none(seen: Path, jobs: int) -> None:
    with Place(jobs=jobs).open(None, Path("m")) as (_, slots):
        assert not any("CUDA_MPS_PIPE_DIRECTORY" in slot.environ for slot in slots)
    assert not seen.exists()


def test_a_daemon_of_the_user_is_left_alone(seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("default-pipes").mkdir()
    Path("default-pipes/control").write_text(str(os.getpid()))
    with shared_gpus(["2", "5"], os.environ) as variables:
        assert variables == {}
    with shared_gpus(["2", "5"], {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": "elsewhere"}) as variables:
        assert variables == {}
    assert not seen.exists()


def test_a_daemon_that_does_not_start_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAILS", "1")
    caplog.set_level("INFO", "modelyard")
    with Place(jobs=3).open(None, Path("m")) as (_, slots):
        assert [slot.environ["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["2", "5", "2"]
        assert not any("CUDA_MPS_PIPE_DIRECTORY" in slot.environ for slot in slots)
    assert [record.message for record in caplog.records] == [
        "NVIDIA's MPS did not start, so runs that share a GPU compute in turns: no such device"
    ]


def test_the_daemon_does_not_outlive_a_process_that_is_killed(seen: Path) -> None:
    code = (
        "import os, sys\nfrom modelyard.launcher.mps import shared_gpus\nwith shared_gpus(['2'], os.environ) as found:"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}\n print(found, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "CUDA_MPS_PIPE_DIRECTORY" in process.stdout.readline()
    daemon, server, pipes, _ = seen.read_text().split()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    wait_until(lambda: is_gone(int(daemon)) and is_gone(int(server)))
    wait_until(lambda: not Path(pipes).parent.exists())
