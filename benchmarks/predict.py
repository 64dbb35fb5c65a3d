"""Compares `modelyard predict` with the bare compiled model, and checks that its memory stays flat.

    python benchmarks/predict.py [--examples 20000] [--engine tensorflow] [--tiny]

One process per model: a short training run, then three rounds of two measurements. All examples of an array go through
the compiled model alone, and through `predict` into a table (without the start of the engine). The ratio is that of
the medians. Memory is that of the process, after a tenth of the examples as image files and after all of them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

GOAL = 0.9


def measure(model: str, engine: str, examples: int, side: int, folder: Path) -> None:
    """Prints the ratio for one model."""
    import numpy as np

    import modelyard
    from modelyard.data.dataset import TEST
    from modelyard.serving.prediction import predict as prediction
    from modelyard.serving.run_model import OpenRun, open_run

    options: dict[str, Any] = {"synthetic_shape": f"{side},{side},3", "synthetic_examples": 100}
    modelyard.train(
        model=model, dataset="synthetic", engine=engine, train_steps=2, model_dir=str(folder / "run"), **options
    )
    images = np.random.default_rng(0).integers(0, 256, (examples, side, side, 3)).astype(np.uint8)
    np.savez(folder / "images.npz", x=images)
    bare, whole = [], []
    times: list[float] = []
    original = OpenRun.engine

    def timed(self: OpenRun, *given: Any, **named: Any) -> Any:
        made, rows = original(self, *given, **named)
        for _ in made.predict(TEST, first=max(rows.size(TEST) - made.config.eval_batch_size, 0)):
            pass  # compile before the clock starts
        times.append(time.perf_counter())
        return made, rows

    OpenRun.engine = timed  # type: ignore[method-assign]
    for number in range(3):
        run = open_run(folder / "run")
        size = run.config.eval_batch_size
        made, _ = original(run)
        made.predict_batch({"image": images[:size]})
        began = time.perf_counter()
        last: Any = None
        for start in range(0, examples - size + 1, size):
            last = made.predict_batch({"image": images[start : start + size]})
        np.asarray(last["class"])
        bare.append((examples // size * size) / (time.perf_counter() - began))
        made.close()
        prediction.predict(folder / "run", folder / "images.npz", output=folder / f"{number}.csv")
        whole.append(examples / (time.perf_counter() - times[-1]))
    OpenRun.engine = original  # type: ignore[method-assign]
    ratio = statistics.median(whole) / statistics.median(bare)
    verdict = "ok" if ratio >= GOAL else "MISSED"
    print(
        f"{model:<12} {engine:<11} {statistics.median(whole):9.0f} {statistics.median(bare):9.0f} {ratio:6.3f}  "
        f"{GOAL} {verdict}",
        flush=True,
    )


def memory(engine: str, examples: int, side: int, folder: Path) -> None:
    """Prints the memory of a process after some image files, and after ten times as many."""
    import numpy as np
    from PIL import Image

    import modelyard

    options: dict[str, Any] = {"synthetic_shape": f"{side},{side},3", "synthetic_examples": 100}
    modelyard.train(
        model="simple_cnn", dataset="synthetic", engine=engine, train_steps=2, model_dir=str(folder / "run"), **options
    )
    generator = np.random.default_rng(0)
    for number in range(examples):
        target = folder / ("few" if number % 10 == 0 else "more") / f"{number:06d}.png"
        target.parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (side, side, 3)).astype(np.uint8)).save(target, compress_level=0)
    taken = []
    for number, sources in enumerate((["few"], ["few", "more"])):
        found = modelyard.predict(folder / "run", *(folder / name for name in sources), output=folder / f"{number}.csv")
        taken.append(psutil.Process().memory_info().rss)
        print(f"{found.examples:>8,} files: {taken[-1] / 1e6:.0f} MB", flush=True)
    print(f"memory after all of them, of that after a tenth: {taken[1] / taken[0]:.3f}", flush=True)


def main() -> None:
    """Starts one process per measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--engine", choices=["tensorflow", "jax"], default="tensorflow")
    parser.add_argument("--tiny", action="store_true", help="few examples: to see that it works")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    examples = 640 if arguments.tiny else arguments.examples
    if arguments.part is None:
        print(f"{'examples/s':<24} {'predict':>9} {'bare':>9} {'ratio':>6}  goal", flush=True)
        for part in ("simple_cnn", "resnet20", "memory"):
            words = [sys.argv[0], "--part", part, "--engine", arguments.engine, "--examples", str(examples)]
            subprocess.run([sys.executable, *words], check=True, stderr=subprocess.DEVNULL)
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.part == "memory":
            memory(arguments.engine, examples, 32, Path(folder))
        else:
            measure(arguments.part, arguments.engine, examples, 32, Path(folder))


if __name__ == "__main__":
    main()
