"""Processes of a cluster killed at random moments: the run ends by itself, with the bits of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cluster_processes import PARTS, learned, rows, saved_steps
from conftest import COMMAND, engine_name, environment, on_engine
from waiting import PATIENCE, wait_until

STEPS = 160 if engine_name() == "jax" else 320  # several times as long in two processes on two cores
WORKERS = ("worker-0", "worker-1")
PINNING = ["--no_pin"] if engine_name() == "jax" else []
"""Threads of JAX that wait for others look whether they are there yet, and a single core has no time for both."""
TRAIN = [
    "train-and-evaluate", *PARTS, *on_engine(), "--model", "tiny_dropout", "--dataset", "digits", "--deterministic",
    "--threads", "1",
    "--train_batch_size", "32", "--train_steps", str(STEPS), "--eval_every", "60 steps", "--save_every", "10 steps",
    "--log_every", "50 steps", "--augment", "pad_and_crop(padding=1)", "--peer_timeout_secs", "10",
]  # fmt: skip


@contextmanager
def launched(run: Path, faults: str = "") -> Iterator[subprocess.Popen[str]]:
    """A launcher with two workers; killed if the test fails, and with it its processes."""
    words = ["launch", "--workers", "2", *PINNING, "--model_dir", str(run), "--", *TRAIN]
    with subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(MODELYARD_FAULTS=faults),
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def finish(process: subprocess.Popen[str]) -> str:
    """What it said, when it has ended well."""
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said[-4000:]
    return said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    with launched(run) as process:
        finish(process)
    return run


def pids(run: Path, names: tuple[str, ...]) -> list[int]:
    """Process ids of those that are at work, if all are."""
    files = [run / "runlogs" / f"{name}.pid" for name in names]
    try:
        return [int(file.read_text().split()[0]) for file in files]
    except (OSError, IndexError, ValueError):
        return []


def kill_at_random(run: Path, process: subprocess.Popen[str], names: tuple[str, ...], chance: random.Random) -> None:
    """Kills when training has got to a random step beyond the newest checkpoint; then waits for a new start."""
    newest = max(saved_steps(run), default=0)
    goal = newest + chance.randrange(1, 11) * 10
    wait_until(
        lambda: max(saved_steps(run), default=0) >= min(goal, STEPS - 40) or process.poll() is not None, what="step"
    )
    assert process.poll() is None, process.communicate()[1][-4000:]
    kill(run, names)


def kill(run: Path, names: tuple[str, ...]) -> None:
    """Kills processes and waits until all are at work again."""
    victims = wait_until(lambda: pids(run, names), what="processes")
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: (again := pids(run, WORKERS)) and not set(again) & set(victims), what="a new start")


def check_same(run: Path, undisturbed: Path) -> None:
    mine, theirs = learned(run), learned(undisturbed)
    assert mine.keys() == theirs.keys()
    for name in theirs:
        assert np.array_equal(mine[name], theirs[name]), name
    for split in ("train", "validation"):
        keep = ("step", "loss", "accuracy")
        assert [{k: row[k] for k in keep} for row in rows(run, split)] == [
            {k: row[k] for k in keep} for row in rows(undisturbed, split)
        ]


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_coordinator_change_nothing(tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "run"
    with launched(run, faults="kill@step=65:worker-1, kill@step=115:worker-0") as process:
        said = finish(process)
    assert said.count("FAULT INJECTED: kill@step") >= 2
    check_same(run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_kills_at_random_moments_change_nothing(tmp_path: Path, undisturbed: Path, number: int) -> None:
    chance = random.Random()
    run = tmp_path / "run"
    victims = (WORKERS[1:], WORKERS[:1], WORKERS)[number % 3]
    with launched(run) as process:
        if number % 2:
            kill_at_random(run, process, victims, chance)
        else:  # any moment: while they start, meet, build, train
            wait_until(lambda: pids(run, WORKERS), what="processes")
            moment = time.monotonic() + chance.uniform(0, 15)
            wait_until(lambda: time.monotonic() > moment or max(saved_steps(run), default=0) > STEPS // 2)
            kill(run, victims)
        finish(process)
    check_same(run, undisturbed)


@pytest.mark.slow
def test_a_worker_that_hangs_is_reported_and_the_run_recovers(tmp_path: Path, undisturbed: Path) -> None:
    """A stopped process is like one that the network has cut off: its connections stay open, and it says nothing."""
    run = tmp_path / "run"
    with launched(run, faults="hang@step=65:worker-1") as process:
        said = finish(process)
    assert "has been silent for 10 s" in said
    check_same(run, undisturbed)
