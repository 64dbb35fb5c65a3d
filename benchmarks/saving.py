"""Measures what a kill costs with the default `save_every`, and what saving costs.

    python benchmarks/saving.py kills [--kills 20] [--only digits] [--engine jax] [--data_dir DIR]
    python benchmarks/saving.py cost [--only digits,mlp] [--engine jax] [--seconds 60] [--repeats 3] [--data_dir DIR]

`kills` starts a run again and again, and kills it with SIGKILL at random moments. Lost are the steps, and the seconds,
from the newest state that the run resumes from to the kill.

`cost` trains with save_every=auto and 100 % (only at the end) in turn, in one process, and prints the ratio of their
steps per second: medians, without the first chunk, which compiles. Best models are kept in both. Beside it is the share
of the time that Modelyard itself counts as the cost of saving. The recipes of CIFAR-10 train on random images of that
size, unless --data_dir has CIFAR-10. A run that lasts longer than --seconds ends then.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import modelyard
from modelyard.run.checkpoint import list_saved, write_checkpoint

if __name__ == "__main__" and "--engine" in sys.argv:  # before the hooks below need Keras
    os.environ.setdefault("KERAS_BACKEND", sys.argv[sys.argv.index("--engine") + 1])
STEPS = "MODELYARD_BENCHMARK_STEPS"
RANDOM_CIFAR10 = {"dataset": "synthetic", "synthetic_examples": 50_000, "synthetic_shape": "32,32,3"}
WIDE = {"model": "mlp", "hidden_units": [4096, 3072], "dataset": "synthetic", "synthetic_examples": 2560}
CASES: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "dataset": "digits", "train_steps": 10_000_000},
    "mlp": {**WIDE, "synthetic_shape": "32,32,3", "train_steps": 1_000_000},
    "cifar10-94": {"recipe": "cifar10-94"},
    "cifar10-resnet20": {"recipe": "cifar10-resnet20"},
}


@modelyard.register_hook("note_steps")
class NoteSteps(modelyard.Hook):
    """Notes every step that is reached, and when."""

    order = 1000

    def on_begin(self, loop: Any) -> None:
        """Opens the file, and notes where training begins."""
        self._file = open(os.environ[STEPS], "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - until the kill
        self.on_steps(loop, {})

    def on_steps(self, loop: Any, metrics: Any) -> None:
        """Notes the step."""
        self._file.write(f"{loop.step} {time.monotonic()}\n")


@modelyard.register_hook("clock")
class Clock(modelyard.Hook):
    """Measures steps per second, and ends a run that lasts long enough."""

    order = 1000
    seconds = 60.0
    last: Clock
    speed = share = 0.0
    writes = 0
    _first: tuple[float, float, float] | None = None

    def on_begin(self, loop: Any) -> None:
        """Begins here, if all is compiled; else with the end of the first chunk."""
        Clock.last = self
        if not loop.engine.compiles_at(loop.step):
            self._first, Counter.writes = (time.monotonic(), loop.step, loop.save_pace.cost), 0

    def on_steps(self, loop: Any, metrics: Any) -> None:
        """Measures from the end of the first chunk to the end of this one."""
        now = (time.monotonic(), loop.step, loop.save_pace.cost)
        if self._first is None:
            self._first = now
            Counter.writes = 0
            return
        seconds, steps, cost = (here - there for here, there in zip(now, self._first, strict=True))
        self.speed, self.share, self.writes = steps / seconds, cost / seconds, Counter.writes
        if seconds > self.seconds:
            loop.stop("that is enough to measure")


class Counter:
    """Counts what is saved."""

    writes = 0

    @staticmethod
    def write(*arguments: Any) -> Any:
        """Writes a checkpoint or a best model."""
        Counter.writes += 1
        return write_checkpoint(*arguments)


def main() -> None:
    """Runs the part that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("kills", "cost"))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", help="cases, separated by commas", default="digits")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data_dir")
    given = parser.parse_args()
    if given.part == "kills":
        for name in given.only.split(","):
            kills(name, options_of(name, given.engine, given.data_dir), given.kills)
        return
    Clock.seconds = given.seconds
    from modelyard.loop import hooks, metric_hooks

    for module in (hooks, metric_hooks):
        vars(module)["write_checkpoint"] = Counter.write
    for name in given.only.split(","):
        cost(name, {**options_of(name, given.engine, given.data_dir), "hooks": "+clock"}, given.repeats)


def options_of(name: str, engine: str, data_dir: str | None) -> dict[str, Any]:
    """Returns the options of a run of this case."""
    options = {**CASES[name], "engine": engine}
    if "recipe" in options:
        options |= {"data_dir": data_dir} if data_dir else RANDOM_CIFAR10
    return options


def kills(name: str, options: dict[str, Any], count: int) -> None:
    """Kills one run ``count`` times; it resumes each time."""
    given = [word for key, value in options.items() for word in (f"--{key}", as_text(value))]
    words = ["train-and-evaluate", *given, "--plugins", str(Path(__file__).resolve()), "--hooks", "+note_steps"]
    dice, lost = random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        run, notes, output = (Path(folder) / name for name in ("run", "steps", "output"))
        command = [sys.executable, "-m", "modelyard", *words, "--model_dir", str(run)]
        for number in range(1, count + 1):
            notes.write_text("")
            with (
                open(output, "wb") as file,  # a pipe that nobody reads would stop the run when it is full
                subprocess.Popen(command, env={**os.environ, STEPS: str(notes)}, stdout=file, stderr=file) as process,
            ):
                while notes.read_text().count("\n") < 3 and process.poll() is None:
                    time.sleep(0.05)
                time.sleep(dice.uniform(0.0, 25.0))
                killed_at = time.monotonic()
                process.send_signal(signal.SIGKILL)
                if process.wait() != -signal.SIGKILL:
                    sys.exit(f"the run ended by itself: {output.read_text()}")
            lines = [line.split() for line in notes.read_text().splitlines(keepends=True) if line.endswith("\n")]
            reached = {int(step): float(at) for step, at in lines}
            saved = max(list_saved(run / "checkpoints", run / "best"))
            lost.append((max(reached) - saved, killed_at - reached.get(saved, min(reached.values())), max(reached)))
            print(f"{name}: kill {number:2} at step {max(reached):,}: lost {lost[-1][0]:,} steps, {lost[-1][1]:.2f} s")
    for index, unit in ((0, "steps"), (1, "s")):
        values = [each[index] for each in lost]
        print(f"{name}: lost {unit}: median {statistics.median(values):,.1f}, at most {max(values):,.1f}")


def as_text(value: Any) -> str:
    """Returns a value as it is written on the command line."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def cost(name: str, options: dict[str, Any], repeats: int) -> None:
    """Trains with both settings in turn."""
    found: dict[str, list[Clock]] = {"100 %": [], "auto": []}
    for turn in range(repeats):
        for save_every in sorted(found, reverse=bool(turn % 2)):
            with tempfile.TemporaryDirectory() as folder:
                modelyard.train_and_evaluate(**options, save_every=save_every, model_dir=f"{folder}/run")
            found[save_every].append(Clock.last)
    off, auto = ([clock.speed for clock in found[key]] for key in found)
    share = statistics.median(clock.share for clock in found["auto"])
    writes = statistics.median(clock.writes for clock in found["auto"])
    ratio = statistics.median(auto) / statistics.median(off)
    ratios = ", ".join(f"{one / other:.3f}" for one, other in zip(auto, off, strict=True))
    print(
        f"{name}: auto / 100 % = {ratio:.3f} steps per second (pairs: {ratios}); auto: {writes:g} saves, "
        f"counted cost {share:.2%}; {statistics.median(off):,.1f} steps/s without"
    )


if __name__ == "__main__":
    main()
