"""A search with rungs whose processes are killed at random moments goes on as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import COMMAND, environment
from modelyard.comparison.matrix_folder import MatrixFolder
from modelyard.run.checkpoint import list_checkpoints, list_saved
from modelyard.run.metrics import read_metrics
from waiting import PATIENCE, wait_until

OPTIONS = {
    "space": "learning_rate=log(1e-3, 1), optimizer=[sgd, adam]", "model": "mlp", "dataset": "digits",
    "hidden_units": "16", "train_steps": 400, "eval_every": 100, "save_every": "20 steps", "threads": 1,
    "deterministic": "true", "halving": 2, "first_rung": "1/4", "trials": 4, "seeds": 0, "sampler": "tpe",
}  # fmt: skip


def start(folder: Path, jobs: int = 1) -> subprocess.Popen[str]:
    words = [word for key, value in {**OPTIONS, "output": folder, "jobs": jobs}.items() for word in (f"--{key}", value)]
    command = [*COMMAND, "tune", *map(str, words)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps(folder: Path) -> dict[str, int]:
    """The newest checkpoint of each trial."""
    found = {}
    for run in (folder / "cells").glob("trial-*"):
        found[run.name] = max(list_saved(run / "checkpoints", run / "best"), default=0)
    return found


def processes(folder: Path) -> list[int]:
    """The processes in which trials run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
            if "modelyard.cli.worker" in words and str(folder) in words:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _wait_for(folder: Path, moment: int, search: subprocess.Popen[str]) -> None:
    wait_until(lambda: sum(steps(folder).values()) >= moment or search.poll() is not None)


def search_and_kill(folder: Path, moments: list[int], jobs: int, rng: random.Random) -> list[dict[str, int]]:
    """Runs a search, and kills it or one of its trials when so many steps are trained; returns what was saved then."""
    found = []
    search = start(folder, jobs)
    for moment in moments:
        _wait_for(folder, moment, search)
        trials = processes(folder)
        if search.poll() is not None:
            break
        if trials and rng.random() < 0.5:
            try:
                os.kill(rng.choice(trials), signal.SIGKILL)
            except ProcessLookupError:
                continue
            found.append(steps(folder))
            continue
        search.kill()
        search.communicate()
        found.append(steps(folder))
        search = start(folder, jobs)
    output = search.communicate(timeout=PATIENCE)[0]
    assert search.returncode == 0, output
    return found


def outcome(folder: Path) -> dict[str, Any]:
    """What a search ends with: the trials, how far each has come, its evaluations, and the SHA-256 of its state."""
    lines = (folder / "best.yaml").read_text().splitlines()
    found: dict[str, Any] = {"best": [line for line in lines if not line.startswith("data_dir")]}
    for name, values in MatrixFolder(folder).cell_axes().items():
        run = folder / "cells" / name
        newest = max(list_checkpoints(run / "checkpoints").items())
        sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(newest[1].glob("*.safetensors"))]
        seen = [
            (row["step"], row["split"], row["loss"], row["accuracy"]) for row in read_metrics(run / "metrics.jsonl")
        ]
        found[name] = (values, newest[0], seen, sums)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed") / "search"
    output = start(folder).communicate(timeout=PATIENCE)[0]
    found = outcome(folder)
    assert {one[1] for name, one in found.items() if name != "best"} >= {100, 400}, output
    return found


def test_a_killed_search_with_rungs_makes_the_same_decisions(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    rng = random.Random(5)
    total = sum(one[1] for name, one in undisturbed.items() if name != "best")
    folder = tmp_path / "search"
    killed = search_and_kill(folder, sorted(rng.randrange(20, total) for _ in range(3)), 1, rng)
    assert killed
    assert outcome(folder) == undisturbed


def test_a_parallel_search_that_is_killed_loses_no_trial_and_repeats_only_what_was_not_saved(tmp_path: Path) -> None:
    rng = random.Random(6)
    folder = tmp_path / "search"
    killed = search_and_kill(folder, [150, 450], 2, rng)
    assert killed
    names = set(MatrixFolder(folder).cell_axes())
    assert len(names) == 4
    for saved in killed:
        assert set(saved) <= names
    for name in names:
        run = folder / "cells" / name
        seen = [row["step"] for row in read_metrics(run / "metrics.jsonl") if row["split"] == "validation"]
        assert seen == sorted(set(seen)), "nothing is there twice"
        starts = [begun["step"] for begun in json.loads((run / "manifest.json").read_text())["starts"]]
        assert starts == sorted(starts)
        for saved in killed:  # a later start begins at what was saved, or later
            known = saved.get(name, 0)
            before = sum(begun < known for begun in starts)
            assert all(begun >= known for begun in starts[before:])
    assert (folder / "best.yaml").exists()
