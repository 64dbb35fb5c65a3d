"""Compares the engines on a CPU, in steps per second of the command with its default hooks.

    python benchmarks/engines.py [--quick] [--engines tensorflow,jax]

Engines take turns. Each case is a separate run. Its speed is the average that its run folder reports, without
compilation. The last line shows which engine `auto` should use on a machine like this one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """A training run to measure."""

    name: str
    batch: int
    steps: int
    options: tuple[str, ...]


CASES = (
    Case(
        "small CNN (8, 16), digits, batch 32",
        32,
        3000,
        ("--dataset", "digits", "--filters", "8,16", "--dense_units", "32", "--threads", "1"),
    ),
    Case(
        "resnet20, 32×32×3, batch 128",
        128,
        24,
        ("--model", "resnet20", "--dataset", "synthetic", "--optimizer", "sgd", "--learning_rate", "0.1"),
    ),
)


def main() -> None:
    """Prints one row per case and engine, and the faster engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, one round: to see that it works")
    parser.add_argument("--engines", default="tensorflow,jax")
    arguments = parser.parse_args()
    engines = arguments.engines.split(",")
    rounds, share = (1, 8) if arguments.quick else (3, 1)
    ratios: dict[str, list[float]] = {engine: [] for engine in engines}
    print(f"{'case':<40} {'engine':<12} {'steps/s':>9} {'ratio':>7}   rounds", flush=True)
    for case in CASES:
        found: dict[str, list[float]] = {engine: [] for engine in engines}
        for _ in range(rounds):
            for engine in engines:
                found[engine].append(speed(case, engine, max(case.steps // share, 3)))
        middle = {engine: statistics.median(values) for engine, values in found.items()}
        for engine in engines:
            ratio = middle[engine] / middle[engines[0]]
            ratios[engine].append(ratio)
            each = ", ".join(f"{value:.2f}" for value in found[engine])
            print(f"{case.name:<40} {engine:<12} {middle[engine]:9.2f} {ratio:7.3f}   {each}", flush=True)
    means = {engine: statistics.geometric_mean(values) for engine, values in ratios.items()}
    best = max(means, key=lambda engine: means[engine])
    listed = ", ".join(f"{engine} {mean:.2f}" for engine, mean in means.items())
    print(f"geometric means of the ratios: {listed}. On this CPU auto should take {best}.")


def speed(case: Case, engine: str, steps: int) -> float:
    """Returns the steps per second of one run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["train", "--engine", engine, "--num_gpus", "0", *case.options, "--train_batch_size", str(case.batch)]
        words += ["--train_steps", str(steps), "--model_dir", str(run)]
        done = subprocess.run([sys.executable, "-m", "modelyard", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{case.name} on {engine} failed:\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["split"] == "train"][-1]
    return float(last["average_examples_per_second"]) / case.batch


if __name__ == "__main__":
    main()
