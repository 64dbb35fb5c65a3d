"""Kill it in the middle of an epoch while images are read ahead and cropped while decoding: the bits do not notice."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from test_kill import newest_step, wait_for

from conftest import COMMAND, environment, on_engine
from photos import photo_folder
from waiting import PATIENCE

STEPS = 120
OPTIONS = (
    "train-and-evaluate --model mlp --image_size 16 --deterministic --threads 1 --train_batch_size 8 "
    f"--train_steps {STEPS} --eval_every 60 --log_every 20 --save_every 4 --resident never --hooks -tensorboard"
).split()
AUGMENT = ("--augment", "random_resized_crop, flip_left_right")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_folder(tmp_path_factory.mktemp("photos") / "photos", 60)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_to_end(photos, folder, "--input_threads", "2")
    return folder


def start(photos: Path, folder: Path, *reading: str) -> subprocess.Popen[str]:
    words = [*COMMAND, *OPTIONS, *on_engine(), *AUGMENT, "--dataset", str(photos), "--model_dir", str(folder)]
    return subprocess.Popen(
        [*words, *reading], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_to_end(photos: Path, folder: Path, *reading: str) -> str:
    process = start(photos, folder, *reading)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return errors


def final_state(folder: Path) -> dict[str, bytes]:
    last = folder / "checkpoints" / f"step-{STEPS:08d}"
    return {name: (last / name).read_bytes() for name in ("weights.safetensors", "optimizer.safetensors")}


def test_a_run_that_reads_ahead_and_is_killed_ends_with_the_same_weights(
    tmp_path: Path, photos: Path, undisturbed: Path
) -> None:
    folder = tmp_path / "run"
    process = start(photos, folder, "--input_workers", "2")
    wait_for(
        lambda: newest_step(folder) >= 40, process
    )  # an epoch has 6.75 steps: only step 108 would be at an end of one
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL, "it was alive"
    assert 40 <= newest_step(folder) < STEPS
    errors = run_to_end(photos, folder, "--input_workers", "3")
    assert "read ahead by 3 processes, cropped while they are decoded" in errors
    assert final_state(folder) == final_state(undisturbed)
