"""Measures the time from the shell to the first new step, when resuming at an early and at a very late step.

    python benchmarks/resume.py

Both should be equal: there is no iterator to skip forward.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from modelyard.run.checkpoint import Checkpoint, read_checkpoint, write_checkpoint

NEAR, FAR = 100, 10_000_000
OPTIONS = {
    "model": "mlp",
    "dataset": "synthetic",
    "synthetic_examples": "20000",
    "synthetic_shape": "8,8,1",
    "train_batch_size": "64",
}


def main() -> None:
    """Prints the seconds at both steps and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for step in (NEAR, FAR):
            run = Path(folder) / str(step)
            train(run, NEAR)
            if step != NEAR:
                saved = read_checkpoint(run / "checkpoints" / f"step-{NEAR:08d}")
                moved = Checkpoint(step, saved.weights, saved.optimizer, saved.loop_state)
                write_checkpoint(run / "checkpoints", moved)
            runs[step] = run
        seconds: dict[int, list[float]] = {NEAR: [], FAR: []}
        for turn in range(1, 6):
            for step, run in runs.items():
                seconds[step].append(train(run, step + turn))
    near, far = (statistics.median(seconds[step]) for step in (NEAR, FAR))
    print(f"step {NEAR:>10,}: {near:.2f} s   step {FAR:>10,}: {far:.2f} s   ratio {far / near:.3f}")


def train(run: Path, steps: int) -> float:
    """Trains up to ``steps`` and returns the seconds of the whole command."""
    began = time.perf_counter()
    options = {**OPTIONS, "train_steps": str(steps), "model_dir": str(run)}
    words = ["train", *(f"--{name}={value}" for name, value in options.items())]
    subprocess.run([sys.executable, "-m", "modelyard", *words], check=True, capture_output=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
