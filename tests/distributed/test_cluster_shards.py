"""Several processes on JAX that hold a part of what is learned each, or see a part of every batch each."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster_processes import PARTS, cluster, largest_difference, rows
from conftest import engine_name, last_json, on_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(engine_name() != "jax", reason="JAX only: shard_parameters"),
]
Command = Callable[..., subprocess.CompletedProcess[str]]
COMMON = [*PARTS, *on_engine(), "--threads", "1"]
OPTIONS = [
    "--model", "wide", "--dataset", "digits", "--precision", "float64", "--train_batch_size", "32",
    "--train_steps", "20", "--eval_every", "10 steps", "--augment", "pad_and_crop(padding=1)",
    "--gradient_accumulation", "2", "--clip_norm", "1",
]  # fmt: skip


def together(folder: Path, run: Path, *words: str) -> None:
    """Two processes, until both have ended well."""
    with cluster(folder, worker=2) as both:
        both.start_all(*words, *(() if words[0] == "resume" else ("--model_dir", str(run))))
        assert set(both.wait().values()) == {0}, both.said()


def check_close(run: Path, other: Path) -> None:
    assert largest_difference(run, other) < 1e-9
    for mine, theirs in zip(rows(run, "validation"), rows(other, "validation"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-9)
        assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-12)


def test_parameters_divided_over_processes_learn_the_same_and_are_saved_whole(tmp_path: Path, command: Command) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    command("train-and-evaluate", *COMMON, *OPTIONS, "--model_dir", str(alone))
    together(tmp_path / "out", shared, "train-and-evaluate", *COMMON, *OPTIONS, "--shard_parameters")
    check_close(shared, alone)

    # What both hold together is one checkpoint: for both, for one process, and for the other engine.
    moved = shutil.copytree(shared, tmp_path / "moved")
    evaluated = ["evaluate", str(moved), *PARTS, "--split", "test", "--no_shard_parameters", "--json", "--engine"]
    on_jax, on_tensorflow = (last_json(command(*evaluated, name))["metrics"] for name in ("jax", "tensorflow"))
    assert on_jax["loss"] == pytest.approx(on_tensorflow["loss"], abs=1e-5)
    assert on_jax["accuracy"] == pytest.approx(on_tensorflow["accuracy"], abs=1e-12)
    further = [*COMMON, "--train_steps", "40"]
    command("resume", str(alone), *further)
    command("resume", str(moved), *further, "--no_shard_parameters")
    together(tmp_path / "out-again", shared, "resume", str(shared), *further)
    check_close(moved, alone)
    check_close(shared, alone)


@pytest.mark.parametrize("streaming", [False, True])
def test_batch_norm_of_each_device_is_the_same_in_two_processes_and_in_one(
    tmp_path: Path, command: Command, streaming: bool
) -> None:
    words = ["train-and-evaluate", *COMMON, *OPTIONS, "--no_sync_batch_norm"]
    words += ["--resident", "never"] if streaming else []
    one, two = tmp_path / "one", tmp_path / "two"
    command(*words, "--cpu_devices", "2", "--model_dir", str(one))
    together(tmp_path / "out", two, *words)
    check_close(two, one)
