"""Parameter servers through `modelyard launch`: workers that race, die and come back; a server that is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster_processes import PARTS, rows, saved_steps
from conftest import COMMAND, environment
from waiting import PATIENCE, wait_until


def launched(run: Path, *words: str) -> subprocess.Popen[str]:
    options = ["--workers", "2", "--ps", "2", "--model_dir", str(run)]
    command = [
        "train-and-evaluate",
        *PARTS,
        "--dataset",
        "digits",
        "--threads",
        "1",
        "--peer_timeout_secs",
        "20",
        *words,
    ]
    return subprocess.Popen(
        [*COMMAND, "launch", *options, "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """The chief's result, and what was said."""
    try:
        out, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, said[-4000:]
    return json.loads(out.strip().splitlines()[-1]), said


def kill(run: Path, name: str) -> None:
    file = run / "runlogs" / f"{name}.pid"
    pid = int(wait_until(lambda: file.exists() and file.read_text(), what=name).split()[0])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: file.exists() and file.read_text().split()[:1] not in ([], [str(pid)]), what="a new start")


@pytest.mark.slow
def test_two_workers_and_two_servers_learn_digits_while_a_worker_is_killed(tmp_path: Path) -> None:
    """The number of steps is exact, and so is the number of training rows, one a step."""
    run = tmp_path / "run"
    words = ["--model", "mlp", "--train_steps", "900", "--log_every", "1 steps", "--save_every", "100 steps"]
    process = launched(run, *words, "--eval_every", "300 steps", "--json")
    wait_until(lambda: max(saved_steps(run), default=0) >= 200 or process.poll() is not None, what="step 200")
    kill(run, "worker-1")
    result, said = finish(process)
    assert result["step"] == max(saved_steps(run)) == 900
    assert [row["step"] for row in rows(run, "train")] == list(range(1, 901))
    assert result["metrics"]["accuracy"] >= 0.95
    assert re.search(r"worker-1 .*killed by SIGKILL", said)
    assert said.count("compiled and ran the first step") == 1, "the chief has not started again"


@pytest.mark.slow
def test_a_lost_server_costs_what_was_done_since_the_last_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--model", "mlp", "--train_steps", "400", "--log_every", "1 steps", "--save_every", "50 steps"]
    process = launched(run, *words, "--eval_every", "400 steps", "--json")
    wait_until(lambda: max(saved_steps(run), default=0) >= 100 or process.poll() is not None, what="step 100")
    kill(run, "ps-0")
    result, said = finish(process)
    assert result["step"] == 400
    assert [row["step"] for row in rows(run, "train")] == list(range(1, 401)), "no step is missing or there twice"
    assert re.search(r"ps-0 .*killed by SIGKILL", said)
    assert re.search(r"resuming at step (1|2|3)\d\d of 400", said)
