"""Trains and serves for an hour, and shows whether memory, file descriptors, threads or disk grow.

    python benchmarks/soak.py [--minutes 60] [--steps 100000] [--evaluations 500] [--model simple_cnn]

A training run and a server run side by side. The server gets single JPEG images at random times, at half the rate
that it can answer beside the run. Each row of the result has the values once warm (after a tenth of the time) and at
the end, the largest value, and the growth per hour of the second half, fitted by least squares.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from serve import client, server

WARM = 0.1
TRAINING, SERVER = "training", "server"


class Watch:
    """Samples what processes hold, every few seconds, until it is closed.

    Args:
        folder: the run folder, whose size is sampled too.
        seconds: between two samples.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.samples: dict[str, list[dict[str, float]]] = {TRAINING: [], SERVER: []}
        self._processes: dict[str, psutil.Process] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def add(self, name: str, pid: int) -> None:
        """Begins to sample a process."""
        self._processes[name] = psutil.Process(pid)

    def close(self) -> None:
        """Ends the samples."""
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._over.wait(self.seconds):
            for name, process in list(self._processes.items()):
                try:
                    sample = self._sample(process)
                except (psutil.Error, OSError):  # it has ended
                    continue
                if not sample["memory, MB"]:  # it has ended and was not waited for
                    continue
                if name == TRAINING:
                    sample["disk, MB"] = size_mb(self.folder)
                self.samples[name].append(sample)

    def _sample(self, process: psutil.Process) -> dict[str, float]:
        with process.oneshot():
            return {
                "hours": time.monotonic() / 3600,
                "memory, MB": process.memory_info().rss / 2**20,
                "file descriptors": process.num_fds(),
                "threads": process.num_threads(),
            }


def size_mb(folder: Path) -> float:
    """Returns the size of all files in a folder that is being written."""
    total = 0
    for parent, _, names in os.walk(folder):  # unlike a glob, it goes on if a folder vanishes meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(parent, name).stat().st_size
    return total / 2**20


def summarize(name: str, samples: list[dict[str, float]]) -> None:
    """Prints one row for each thing that is sampled."""
    warm, half = samples[int(len(samples) * WARM) :], samples[len(samples) // 2 :]
    for what in (key for key in samples[-1] if key != "hours"):
        hours, values = (np.array([sample[key] for sample in half]) for key in ("hours", what))
        growth = float(np.polyfit(hours - hours[0], values, 1)[0]) if len(half) > 2 else math.nan
        most = max(sample[what] for sample in warm)
        print(
            f"{name}: {what}: {warm[0][what]:,.1f} once warm, {samples[-1][what]:,.1f} at the end, at most "
            f"{most:,.1f}; {growth:+,.1f} per hour in the second half ({len(samples)} samples)",
            flush=True,
        )


def train(run: Path, steps: int, *words: str) -> list[str]:
    """Returns the command of a run on the embedded digits."""
    command = [sys.executable, "-m", "modelyard", "train-and-evaluate", "--dataset", "digits", "--model_dir", str(run)]
    return [*command, "--train_steps", str(steps), *words]


def main() -> None:
    """Runs the soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--evaluations", type=int, default=500)
    parser.add_argument("--model", default="simple_cnn")
    given = parser.parse_args()
    seconds = 60 * given.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = train(folder / "served", 200, "--model", "simple_cnn")
        subprocess.run(small, check=True, capture_output=True)
        shape = [8, 8, 1]  # of the embedded digits
        watch = Watch(folder / "run", seconds=max(seconds / 1000, 1))
        every = f"{max(given.steps // given.evaluations, 1)} steps"
        words = ["--model", given.model, "--eval_every", every, "--save_every", every]
        with open(folder / "log", "wb") as log, server("--model_dir", str(folder / "served")) as (port, pid):
            begin = [str(port), json.dumps(shape), "1", "jpeg"]
            began = time.monotonic()
            training = subprocess.Popen(train(folder / "run", given.steps, *words), stdout=log, stderr=log)
            watch.add(TRAINING, training.pid)
            watch.add(SERVER, pid)
            while training.poll() is None and not (folder / "run" / "metrics.jsonl").exists():
                time.sleep(0.1)
            most = client(["closed", *begin, "32", "20"])["rate"]
            try:
                found: dict[str, Any] = client(["open", *begin, str(most / 2), str(seconds)])
                print(
                    f"server: {found['requests']:,} requests in {(time.monotonic() - began) / 60:.0f} minutes, at half "
                    f"of {most:,.0f}/s; {found['failed']} failed; p50 {found['p50']:.1f} ms, p99 {found['p99']:.1f} ms"
                )
                status = training.wait()
                print(
                    f"training: {given.steps:,} steps in {(time.monotonic() - began) / 60:.0f} minutes, status {status}"
                )
            finally:
                training.kill()
                training.wait()
        watch.close()
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        evaluations = sum(row.get("split") == "validation" for row in rows)
        print(f"training: {evaluations} evaluations, metrics up to step {max(row['step'] for row in rows):,}")
        for which, samples in watch.samples.items():
            summarize(which, samples)
        sys.exit(status)


if __name__ == "__main__":
    main()
