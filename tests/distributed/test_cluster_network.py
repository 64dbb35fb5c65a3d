"""Two machines, made of network namespaces, and the cable between them pulled out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_processes import PARTS, free_ports, largest_difference, saved_steps
from conftest import COMMAND, environment
from waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]
HOSTS = ("10.213.7.1", "10.213.7.2")
TIMEOUT = 6


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them."""
    names = tuple(f"processes{os.getpid()}{letter}" for letter in "ab")
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, host in zip(names, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start(machines: tuple[str, str], run: Path, out: Path, *words: str) -> list[subprocess.Popen[bytes]]:
    """A worker on each machine."""
    ports = free_ports(2)
    cluster = {"worker": [f"{host}:{port}" for host, port in zip(HOSTS, ports, strict=True)]}
    started = []
    for index, machine in enumerate(machines):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}, "model_dir": str(run)}
        command = ["ip", "netns", "exec", machine, *COMMAND, "train", *PARTS, "--model", "tiny_norm", "--threads", "1"]
        command += ["--deterministic", "--save_every", "40 steps", "--peer_timeout_secs", str(TIMEOUT), *words]
        with open(out / f"worker-{index}.out", "ab") as output:
            env = environment(TF_CONFIG=json.dumps(task), MODELYARD_CLUSTER_SECRET="of two machines" * 2)
            started.append(subprocess.Popen(command, stdout=output, stderr=output, env=env))
    return started


def test_a_pulled_cable_is_reported_and_the_run_continues(machines: tuple[str, str], tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    both = start(machines, run, tmp_path, "--train_steps", "100000")
    try:
        wait_until(lambda: max(saved_steps(run), default=0) >= 80, what="step 80")
        ip("-n", machines[1], "link", "set", "cable", "down")
        pulled = time.monotonic()
        # Silence is noticed after the timeout; what waits in TensorFlow is given 15 s more to leave. Without the
        # timeout, it would be noticed when the system gives up, after 15 minutes.
        assert [process.wait(PATIENCE) for process in both] == [75, 75]
        assert time.monotonic() - pulled > TIMEOUT / 2
    finally:
        for process in both:
            process.kill()
    for index in (0, 1):
        said = (tmp_path / f"worker-{index}.out").read_text()
        assert "has been silent" in said or "can't be reached" in said, said[-3000:]
    ip("-n", machines[1], "link", "set", "cable", "up")
    steps = max(saved_steps(run)) + 200
    for folder in (run, whole):
        both = start(machines, folder, tmp_path, "--train_steps", str(steps))
        assert [process.wait(PATIENCE) for process in both] == [0, 0], (tmp_path / "worker-0.out").read_text()[-3000:]
    assert largest_difference(run, whole) == 0
