"""A matrix of real runs: killed and resumed, one cell at a time or two, with cells that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import COMMAND, environment, on_engine
from waiting import PATIENCE, wait_until

STEPS = 400
PLAN = f"""
axes:
  model: [mlp, simple_cnn, mnist_cnn]
  dataset: [digits, one.npz, two.npz, broken.npz]
  random_seed: [0, 1]
exclude:
  - {{dataset: broken.npz, model: [simple_cnn, mnist_cnn]}}
options: {{train_steps: {STEPS}, train_batch_size: 32, save_every: 20 steps, eval_every: 100 steps, log_every: 50 steps,
          threads: 1, deterministic: true, hidden_units: [32]}}
"""


def write_images(path: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    centres = random.integers(40, 210, (4, 8, 8, 1))
    labels = np.arange(360) % 4
    images = np.clip(centres[labels] + random.normal(0, 90, (360, 8, 8, 1)), 0, 255).astype(np.uint8)
    np.savez(path, x_train=images[:240], y_train=labels[:240], x_test=images[240:], y_test=labels[240:])


def rows(cell: Path) -> list[dict[str, Any]]:
    kept = ("step", "split", "loss", "accuracy")
    found = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in kept} for row in found]


def starts(cell: Path) -> list[int]:
    return [start["step"] for start in json.loads((cell / "manifest.json").read_text())["starts"]]


def newest_step(cell: Path) -> int:
    return max((int(path.name[5:]) for path in (cell / "checkpoints").glob("step-*")), default=-1)


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, "matrix", *words], env=environment(), stderr=subprocess.PIPE, text=True)


def at_work(folder: Path) -> list[int]:
    """The processes that have a cell of the folder in their command, and the workers of the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        is_worker = b"modelyard.cli.worker" in words and words.endswith(f"{folder}\0".encode())
        if is_worker or f"{folder}/cells/".encode() in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
def test_two_models_are_trained_tested_and_compared(command: Any) -> None:
    words = ["matrix", "--models", "mlp,simple_cnn", "--datasets", "digits", "--output", "m", "--jobs", "2"]
    words += ["--train_steps", "20", "--hidden_units", "16", "--train_batch_size", "32", *on_engine()]
    done = command(*words)
    assert "mlp-digits: done" in done.stderr
    cells = Path("m/cells")
    manifest = json.loads((cells / "mlp-digits/manifest.json").read_text())
    assert manifest["model"]["flops"] == 2 * (64 * 16 + 16 * 10)
    assert manifest["model"]["parameters"] >= 64 * 16 + 16 + 16 * 10 + 10
    assert rows(cells / "simple_cnn-digits")[-1]["split"] == "test"
    assert [p.name for p in sorted(Path("m").glob("leaderboard.*"))] == [
        "leaderboard.csv", "leaderboard.html", "leaderboard.md",
    ]  # fmt: skip
    before = (cells / "mlp-digits/manifest.json").read_bytes()
    again = command("matrix", "--output", "m", "--json")  # nothing is left to do
    result = json.loads(again.stdout.splitlines()[-1])
    assert {cell["seconds"] for cell in result["cells"]} == {0}
    scores = [entrant["scores"]["digits"] for entrant in result["leaderboard"]["entrants"]]
    tested = manifest["dataset"]["sizes"]["test"]
    assert [score["examples"] for score in scores] == [tested] * 2  # paired over them
    assert all(f"test accuracy {score['mean']:.4g}" in done.stderr for score in scores)  # the progress
    assert 0.05 < result["leaderboard"]["baselines"]["digits"] < 0.2
    assert (cells / "mlp-digits/manifest.json").read_bytes() == before


@pytest.mark.slow
def test_a_matrix_that_is_killed_twice_has_the_numbers_of_one_that_is_not(tmp_path: Path) -> None:
    write_images("one.npz", 1)
    write_images("two.npz", 2)
    Path("broken.npz").write_bytes(b"PK\x03\x04 and nothing more")
    Path("plan.yaml").write_text(PLAN)
    folder, plain = tmp_path / "killed", tmp_path / "plain"
    done_before: dict[str, bytes] = {}
    for kill in range(2):
        process = start("plan.yaml", "--output", str(folder), "--jobs", "2", *on_engine())
        cells = folder / "cells"
        enough = 3 + 5 * kill

        def under_way(cells: Path = cells, enough: int = enough) -> bool:
            steps = [newest_step(cell) for cell in cells.glob("*/")]
            return sum(step == STEPS for step in steps) >= enough and any(0 < step < STEPS - 40 for step in steps)

        wait_until(under_way, "the cells", process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        wait_until(lambda: not at_work(folder))  # no cell runs without it
        for name, manifest in done_before.items():
            assert (cells / name / "manifest.json").read_bytes() == manifest
        for cell in cells.glob("*/"):
            if (cell / "metrics.jsonl").exists() and any(row["split"] == "test" for row in rows(cell)):
                done_before[cell.name] = (cell / "manifest.json").read_bytes()
    assert len(done_before) >= 6

    ended = start("plan.yaml", "--output", str(folder), "--jobs", "2", *on_engine())
    _, errors = ended.communicate(timeout=PATIENCE)
    assert ended.returncode == 1, errors
    assert "mlp-broken-seed0: failed" in errors
    assert str(folder / "runlogs" / "mlp-broken-seed0.log") in errors
    assert "mlp-broken-seed1" in (folder / "leaderboard.md").read_text().replace("\\", "").split("Not counted")[1]

    whole = start("plan.yaml", "--output", str(plain), "--jobs", "1", *on_engine())
    assert whole.communicate(timeout=PATIENCE)[0] is None
    assert whole.returncode == 1
    names = sorted(path.name for path in (plain / "cells").glob("*/"))
    assert len(names) == 18
    resumed = 0
    for name in names:
        cell = folder / "cells" / name
        assert rows(cell) == rows(plain / "cells" / name), name
        found = [(row["split"], row["step"]) for row in rows(cell)]
        assert len(set(found)) == len(found), name
        assert starts(cell)[0] == 0
        assert starts(cell) == sorted(starts(cell))
        resumed += any(step > 0 for step in starts(cell))
        if name in done_before:
            assert (cell / "manifest.json").read_bytes() == done_before[name]
    assert 1 <= resumed <= 4
    assert sum(len(starts(folder / "cells" / name)) for name in names) <= 18 + 4

    write_images("broken.npz", 3)
    before = {name: (folder / "cells" / name / "manifest.json").read_bytes() for name in names}
    fixed = start("--output", str(folder), "--jobs", "2")
    _, errors = fixed.communicate(timeout=PATIENCE)
    assert fixed.returncode == 0, errors
    assert {name: (folder / "cells" / name / "manifest.json").read_bytes() for name in names} == before
    assert rows(folder / "cells" / "mlp-broken-seed1")[-1]["split"] == "test"
    assert "Not counted" not in (folder / "leaderboard.md").read_text()
