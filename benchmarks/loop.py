"""Compares Modelyard's loop with Keras's `fit`, and with its own bare compiled steps.

    python benchmarks/loop.py [--quick]

Both sides train the same Keras model with the same optimizer on the same arrays, in this process, in turns, so that
other load affects both equally. `fit` uses the faster of `jit_compile="auto"`, its default, and False. Each case uses
the number of threads that is best for `fit`. Cases run in separate processes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modelyard
from modelyard.config import Config
from modelyard.config.backend import select_engine

select_engine("tensorflow")

import keras  # noqa: E402 - after the engine is chosen
import numpy as np  # noqa: E402

from modelyard.config.durations import RunLength  # noqa: E402
from modelyard.data.open_dataset import load_dataset  # noqa: E402
from modelyard.engine.tensorflow import TensorFlowEngine  # noqa: E402
from modelyard.loop.hooks import build_hooks  # noqa: E402
from modelyard.loop.run import build  # noqa: E402
from modelyard.loop.trainer import Trainer  # noqa: E402
from modelyard.models.choose_task import build_task  # noqa: E402
from modelyard.run.directory import RunDirectory  # noqa: E402


@dataclass(frozen=True)
class Case:
    """A case to measure, and the ratio it must reach."""

    name: str
    goal: float | None
    steps: int
    threads: int
    options: dict[str, Any]


CASES = (
    # 32 is the default batch size of `fit`.
    Case(
        "small CNN (8, 16), digits, batch 32",
        2.0,
        2000,
        1,  # faster than two for both: the operations are too small to share
        {"dataset": "digits", "filters": "8,16", "dense_units": 32, "train_batch_size": 32},
    ),
    # Convolutions take most of a step on a CPU, so a faster loop gains less.
    Case("simple_cnn (32, 64), digits, batch 32", None, 1500, 0, {"dataset": "digits", "train_batch_size": 32}),
    Case(
        "resnet20, 32×32×3, batch 128",
        1.0,
        24,
        0,
        {
            "model": "resnet20",
            "dataset": "synthetic",
            "synthetic_examples": 4000,
            "train_batch_size": 128,
            "optimizer": "sgd",
            "learning_rate": 0.1,
        },
    ),
)


def main() -> None:
    """Prints a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        bench_case(CASES[arguments.case], rounds=3 if arguments.quick else 5)
        return
    print(f"{'case':<42} {'steps/s':>9} {'against':>9} {'ratio':>7}   goal", flush=True)
    for number in range(len(CASES)):
        quick = ["--quick"] if arguments.quick else []
        subprocess.run([sys.executable, __file__, "--case", str(number), *quick], check=True)


def bench_case(case: Case, rounds: int) -> None:
    """Measures one case: bare steps, the whole loop and `fit`, in turns."""
    config = modelyard.load_config(train_steps=10**6, threads=case.threads, **case.options)
    dataset = load_dataset(config)
    engine = TensorFlowEngine(config)
    build(engine, config, dataset, RunLength(dataset.size("train"), config.train_batch_size, 10**6))
    engine.train(0, 2)
    shares: list[float] = []
    sides: dict[str, Callable[[], float]] = {
        "bare": lambda: timed(lambda: engine.train(2, case.steps), case.steps),
        "loop": lambda: loop_speed(config, engine, case.steps, shares),
        "fit": fit_side(config, dataset, case.steps, jit="auto"),
        "fit without XLA": fit_side(config, dataset, case.steps, jit=False),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            speeds[name].append(side())
    middle = {name: statistics.median(values) for name, values in speeds.items()}
    fit = max(middle["fit"], middle["fit without XLA"])
    show(f"{case.name}: fit", middle["loop"], fit, case.goal)
    pairs = [loop / bare for loop, bare in zip(speeds["loop"], speeds["bare"], strict=True)]
    ratio = statistics.median(pairs)
    show("  whole loop against bare steps", middle["loop"], middle["loop"] / ratio, 0.97)
    print(f"    of the pairs: {', '.join(f'{pair:.3f}' for pair in sorted(pairs))}", flush=True)
    # Within one run, so without noise between runs; excludes shorter calls and background writes.
    share = statistics.median(shares)
    show("  time in the engine, of the loop's", middle["loop"], middle["loop"] / share, None)


def show(name: str, speed: float, against: float, goal: float | None) -> None:
    """Prints one row."""
    ratio = speed / against
    verdict = "–" if goal is None else f"{goal:.2f} {'ok' if ratio >= goal else 'MISSED'}"
    print(f"{name:<42} {speed:9.2f} {against:9.2f} {ratio:7.3f}   {verdict}", flush=True)


def timed(work: Callable[[], object], steps: int) -> float:
    """Returns steps per second."""
    began = time.perf_counter()
    work()
    return steps / (time.perf_counter() - began)


def loop_speed(config: Config, engine: TensorFlowEngine, steps: int, shares: list[float]) -> float:
    """Measures the trainer with its default hooks and checkpoints; adds the fraction of time in the steps."""
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        directory.create()
        run = RunLength(engine.dataset.size("train"), config.train_batch_size, steps)
        hooks = build_hooks(config.hooks)
        trainer = Trainer(config, engine, directory, run, "benchmark", hooks, False, None)
        began: list[float] = []
        trainer.hooks.insert(0, _Clock(began))
        trainer.train()
        seconds = time.perf_counter() - began[0]
        shares.append(trainer.pace.seconds / seconds)
        return steps / seconds


class _Clock(modelyard.Hook):
    """Records when setup is done."""

    def __init__(self, began: list[float]) -> None:
        super().__init__(modelyard.Options())
        self._began = began

    def next_step(self, loop: Any) -> int | None:
        """Called before the first chunk."""
        if not self._began:
            self._began.append(time.perf_counter())
        return None


def fit_side(config: Config, dataset: Any, steps: int, jit: bool | str) -> Callable[[], float]:
    """Measures Keras's own loop on the same model."""
    task = build_task(config, dataset)
    model = task.network()
    optimizer = (
        keras.optimizers.SGD(config.learning_rate, momentum=0.9)
        if config.optimizer == "sgd"
        else keras.optimizers.Adam(config.learning_rate)
    )
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=jit,
    )
    arrays = dataset.arrays("train")
    batch = config.train_batch_size
    rows = np.resize(np.arange(dataset.size("train")), steps * batch)
    images, labels = arrays["image"][rows], arrays["label"][rows]
    model.fit(images[: 2 * batch], labels[: 2 * batch], batch_size=batch, verbose=0)
    return lambda: timed(lambda: model.fit(images, labels, batch_size=batch, verbose=0), steps)


if __name__ == "__main__":
    main()
