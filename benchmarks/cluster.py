"""Compares two workers with one core each to one worker with one core, in examples per second.

    python benchmarks/cluster.py [--quick]

Every case is the ordinary command on loopback (`modelyard launch` for two workers), with processes bound to a core.
Cases take turns. Throughput is what the run folder reports, without the first chunk, which compiles. Four cases show
where the time goes:

- one worker with the whole batch of 128: the baseline;
- one worker with half the batch: a smaller batch may compute less per second;
- two independent workers at the same time: they share the memory and the caches of the machine;
- two workers that train together: they also wait for each other and sum their gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BATCH = 128
OPTIONS = [
    "--model", "resnet20", "--dataset", "synthetic", "--synthetic_examples", "2000", "--optimizer", "sgd",
    "--learning_rate", "0.1", "--log_every", "1000 steps", "--threads", "1",
]  # fmt: skip
MODELYARD = [sys.executable, "-m", "modelyard"]
GOAL = 1.7


def main() -> None:
    """Runs the cases in turns and prints ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, one round: to see that it works")
    quick = parser.parse_args().quick
    steps, rounds = (6, 1) if quick else (24, 3)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this benchmark needs two cores.")
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for name, speed in one_round(cores[:2], steps):
            found.setdefault(name, []).append(speed)
            print(f"round {number + 1}  {name:<44} {speed:8.1f} examples/s", flush=True)
    speeds = {name: statistics.median(values) for name, values in found.items()}
    report(speeds)


def one_round(cores: list[int], steps: int) -> list[tuple[str, float]]:
    """Runs every case once."""
    half = BATCH // 2
    speeds = []
    for synchronised in (False, True):
        norm = [] if synchronised else ["--no_sync_batch_norm"]
        speeds.append((two_workers(synchronised), together(cores, steps, norm)))
    speeds.append(("one worker", apart(cores[:1], steps, BATCH)[0]))
    speeds.append(("one worker, half the batch", apart(cores[:1], steps, half)[0]))
    speeds.append(("two independent workers, half the batch each", sum(apart(cores, steps, half))))
    return speeds


def two_workers(synchronised: bool) -> str:
    """Returns the name of a case."""
    return f"two workers, batch-norm synchronisation {'on' if synchronised else 'off'}"


def together(cores: list[int], steps: int, norm: list[str]) -> float:
    """Runs two workers with `modelyard launch`, which binds each to a core."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["launch", "--workers", "2", "--model_dir", str(run), "--", "train", *OPTIONS, *norm]
        words += ["--train_batch_size", str(BATCH), "--train_steps", str(steps)]
        bound = ["taskset", "--cpu-list", ",".join(map(str, cores))]
        subprocess.run([*bound, *MODELYARD, *words], check=True, capture_output=True)
        return throughput(run)


def apart(cores: list[int], steps: int, batch: int) -> list[float]:
    """Runs independent workers at the same time, one per core."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder, f"run{core}") for core in cores]
        words = ["train", *OPTIONS, "--train_batch_size", str(batch), "--train_steps", str(steps)]
        started = [
            subprocess.Popen(
                ["taskset", "--cpu-list", str(core), *MODELYARD, *words, "--model_dir", str(run)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for core, run in zip(cores, runs, strict=True)
        ]
        if any(process.wait() for process in started):
            raise SystemExit("a run failed.")
        return [throughput(run) for run in runs]


def throughput(run: Path) -> float:
    """Returns the average over the run, from its last training row."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([row for row in rows if row["split"] == "train"][-1]["average_examples_per_second"])


def report(speeds: dict[str, float]) -> None:
    """Prints ratios to one worker, and their factors."""
    one, half = speeds["one worker"], speeds["one worker, half the batch"]
    independent = speeds["two independent workers, half the batch each"]
    print()
    for synchronised in (False, True):
        ratio = speeds[two_workers(synchronised)] / one
        goal = f"  (goal {GOAL})" if not synchronised else ""
        print(f"{two_workers(synchronised)}: {ratio:.2f} × one worker{goal}")
        print(
            f"  2 × {half / one:.2f} (half the batch) × {independent / (2 * half):.2f} (sharing the machine)"
            f" × {speeds[two_workers(synchronised)] / independent:.2f} (waiting and summing)"
        )


if __name__ == "__main__":
    main()
