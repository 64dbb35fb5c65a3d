"""Real clusters on loopback for the tests: processes started by hand, as a user with TF_CONFIG would."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from conftest import COMMAND, TESTS, environment
from waiting import PATIENCE

PARTS = ["--plugins", str(TESTS / "parts.py")]


def free_ports(count: int) -> list[int]:
    """Ports that the system picks, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def addresses(**roles: int) -> dict[str, list[str]]:
    """A cluster on loopback with so many processes of each role."""
    ports = iter(free_ports(sum(roles.values())))
    return {role: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for role, count in roles.items()}


class ClusterOfProcesses:
    """Processes with a TF_CONFIG each.

    Args:
        cluster: addresses by role.
        folder: where their output goes.
    """

    def __init__(self, cluster: dict[str, list[str]], folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, index: int, *words: str, **extra: Any) -> None:
        """Starts one."""
        task = {"cluster": self.cluster, "task": {"type": role, "index": index}, **extra}
        name = f"{role}-{index}"
        with open(self.output(name), "ab") as output:
            self.processes[name] = subprocess.Popen(
                [*COMMAND, *words], stdout=output, stderr=output, env=environment(TF_CONFIG=json.dumps(task))
            )

    def start_all(self, *words: str) -> ClusterOfProcesses:
        """Starts all with the same words."""
        for role, hosts in self.cluster.items():
            for index in range(len(hosts)):
                self.start(role, index, *words)
        return self

    def output(self, name: str) -> Path:
        """What a process printed."""
        return self.folder / f"{name}.out"

    def wait(self, timeout: float = PATIENCE) -> dict[str, int]:
        """Exit statuses, when all have ended."""
        deadline = time.monotonic() + timeout
        return {name: p.wait(max(deadline - time.monotonic(), 0.1)) for name, p in self.processes.items()}

    def end(self) -> None:
        """Leaves nobody behind."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def said(self) -> str:
        """Everything that was printed, for the message of a failed test."""
        return "\n".join(f"== {name}\n{self.output(name).read_text()[-3000:]}" for name in self.processes)


@contextmanager
def cluster(folder: Path, **roles: int) -> Iterator[ClusterOfProcesses]:
    """A cluster that is gone when the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = ClusterOfProcesses(addresses(**roles), folder)
    try:
        yield processes
    finally:
        processes.end()


def saved_steps(run: Path) -> list[int]:
    """Steps of the checkpoints that are there."""
    return sorted(int(path.name[5:]) for path in run.glob("checkpoints/step-*"))


def learned(run: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Weights and optimizer slots of the newest checkpoint."""
    newest = max(run.glob("checkpoints/step-*"))
    return {**load_file(newest / "weights.safetensors"), **load_file(newest / "optimizer.safetensors")}


def largest_difference(one: Path, other: Path) -> float:
    """Between what two runs have learned."""
    mine, theirs = learned(one), learned(other)
    assert mine.keys() == theirs.keys()
    return max(float(np.abs(mine[k].astype("f8") - theirs[k].astype("f8")).max(initial=0)) for k in mine)


def rows(run: Path, split: str) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl of one split."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == split]
