"""Kill it anywhere, lose nothing: real processes, killed at random moments, end with the bits of an undisturbed run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import COMMAND, TESTS, environment, on_engine
from waiting import PATIENCE, wait_until

STEPS = 240
OPTIONS = (
    "train-and-evaluate --model tiny_dropout --dataset digits --deterministic --threads 1 --train_batch_size 32 "
    f"--train_steps {STEPS} --eval_every 16 --log_every 10 --save_every 5 --keep_best 2 --test_at_end "
    "--augment pad_and_crop(padding=1) --hooks +early_stop(patience=1000) --fine_tune head(until=99),all(factor=0.5)"
).split()


def start(folder: Path, faults: str = "") -> subprocess.Popen[str]:
    words = [*COMMAND, *OPTIONS, *on_engine(), "--plugins", str(TESTS / "parts.py"), "--model_dir", str(folder)]
    extra = environment(MODELYARD_FAULTS=faults)
    return subprocess.Popen(words, env=extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_to_end(folder: Path) -> None:
    process = start(folder)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors


def final_state(folder: Path) -> dict[str, bytes]:
    last = folder / "checkpoints" / f"step-{STEPS:08d}"
    return {name: (last / name).read_bytes() for name in ("weights.safetensors", "optimizer.safetensors")}


def rows(folder: Path) -> list[dict[str, Any]]:
    kept = ("step", "epoch", "split", "loss", "accuracy", "learning_rate")
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in kept if key in row} for row in found]


def best_models(folder: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in (folder / "best").rglob("weights.safetensors")}


def newest_step(folder: Path) -> int:
    steps = [int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")]
    return max(steps, default=-1)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Waits until something is so, or the process has ended."""
    wait_until(lambda: condition() or process.poll() is not None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_to_end(folder)
    return folder


@pytest.mark.parametrize(
    ("seed", "kills"), [(1, 3), pytest.param(2, 20, marks=pytest.mark.slow)], ids=["3 times", "20 times"]
)
def test_killed_run_ends_with_the_same_weights(tmp_path: Path, undisturbed: Path, seed: int, kills: int) -> None:
    folder, dice = tmp_path / "run", random.Random(seed)
    died = 0
    for number in range(kills):
        if number % 2:
            # Most of the time no file is written, so a random moment seldom hits an operation on one.
            process = start(folder, f"kill@file={dice.randrange(1, 50)}:always")
            process.wait(timeout=PATIENCE)
        else:
            process = start(folder)
            here = newest_step(folder)
            ahead = here + dice.randrange(0, max(2 * (STEPS - here) // (kills - number), 6))
            wait_for(lambda: newest_step(folder) >= min(ahead, STEPS - 20), process)  # noqa: B023
            time.sleep(dice.random() * 0.05)
            process.kill()
            process.wait()
        died += process.returncode == -signal.SIGKILL
    assert died >= kills - 1, "most of the rounds must have killed a living process"
    run_to_end(folder)
    assert final_state(folder) == final_state(undisturbed)
    assert rows(folder) == rows(undisturbed)
    assert best_models(folder) == best_models(undisturbed)
    assert list(folder.rglob(".partial-*")) == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_sigterm_and_ctrl_c_save_and_say_how_to_go_on(
    tmp_path: Path, undisturbed: Path, number: signal.Signals, status: int
) -> None:
    folder = tmp_path / "run"
    process = start(folder)
    wait_for(lambda: newest_step(folder) >= 60, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, errors
    assert f"modelyard resume {folder}" in errors
    assert "Traceback" not in errors
    stopped_at = int(errors.split("stopped at step ")[1].split(".")[0])
    assert newest_step(folder) == stopped_at < STEPS
    done = subprocess.run([*COMMAND, "resume", str(folder)], env=environment(), check=False, timeout=PATIENCE)
    assert done.returncode == 0
    assert final_state(folder) == final_state(undisturbed)
    assert rows(folder) == rows(undisturbed)
