"""Writes run folders without training, and a small program to run instead of a cell."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelyard.config import load_config
from modelyard.run.checkpoint import Checkpoint, write_checkpoint
from modelyard.run.directory import RunDirectory, config_text
from modelyard.run.examples import write_example_values

STAND_IN = """
import json, os, pathlib, signal, sys, time
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
run = pathlib.Path(words["--model_dir"])
def count(name):
    with open(here / f"{run.name}.{name}", "a") as file:
        file.write(json.dumps({"threads": words["--threads"], "pid": os.getpid(),
                               "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}) + "\\n")
here = pathlib.Path(os.environ["HERE"])
count("starts")
what = (here / run.name).read_text() if (here / run.name).exists() else ""
if what == "error":
    print("error: 2 mistakes in the config:\\n  here: it is wrong.", file=sys.stderr)
    sys.exit(2)
if what == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if what == "traceback":
    raise KeyError("unexpected")
if what == "hang":
    def leave(number, frame):
        count("saved")
        sys.exit(143)
    signal.signal(signal.SIGTERM, leave)
    count("hangs")
    time.sleep(300)
run.mkdir(parents=True, exist_ok=True)
(run / "config.yaml").write_bytes(pathlib.Path(words["--config_file"]).read_bytes())
(run / "manifest.json").write_text('{"dataset": {"sizes": {"train": 5}, "fingerprint": "f"}}')
(run / "metrics.jsonl").write_text('{"step": 5, "split": "validation", "accuracy": 0.5, "loss": 1.0}\\n')
state = run / "checkpoints" / "step-00000005"
state.mkdir(parents=True, exist_ok=True)
(state / "state.json").write_text('{"format_version": 1, "step": 5, "sha256": {}, "memory": {"total_steps": 5}}')
if what == "late":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    count("hangs")
    time.sleep(300)
"""


def stand_in(folder: Path) -> list[str]:
    """Returns the command of the program. A file in $HERE named like a cell says how that cell behaves."""
    path = folder / "stand_in.py"
    path.write_text(STAND_IN)
    return [sys.executable, "-S", str(path)]


def write_run(
    folder: Path,
    *,
    scores: dict[str, dict[str, float]],
    finished: bool = True,
    fingerprint: str | None = None,
    flops: int = 1000,
    examples: dict[str, dict[str, Any]] | None = None,
    data: dict[str, Any] | None = None,
    earlier: Sequence[dict[str, Any]] = (),
    best: int | None = None,
    **options: Any,
) -> None:
    """Writes a run of 10 steps.

    ``examples`` are values of each example, by split and name; ``data`` is added to what the manifest says of the data;
    ``earlier`` are rows of earlier evaluations, and ``best`` is the step of the best model.
    """
    config = load_config(**{"model": "mlp", "dataset": "digits", "train_steps": 10, **options})
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config_text(config))
    sizes = {"train": 50, "validation": 5, "test": 5}
    described = {"fingerprint": fingerprint or config.dataset, "sizes": sizes, **(data or {})}
    size = {"parameters": 1234, "flops": flops}
    starts = [{"time": f"2026-01-01T00:00:{config.random_seed:02d}"}]
    (folder / "manifest.json").write_text(json.dumps({"dataset": described, "model": size, "starts": starts}))
    rows: list[dict[str, Any]] = [
        {"step": 10, "split": "train", "loss": 1.0, "seconds": 2.5, "average_examples_per_second": 4000.0},
        *earlier,
    ]
    for split, values in scores.items():
        rows.append({"step": 10, "split": split, "seconds": 9.0 if split == "test" else 3.0, **values})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if best is not None:
        record = {"metric": "accuracy", "mode": "max", "value": 0.5, "step": best}
        write_checkpoint(folder / "best", Checkpoint(best, {}, {}, {"best": record}))
    for split, arrays in (examples or {}).items():
        write_example_values(RunDirectory(folder), split, best or 10, arrays)
    state = folder / "checkpoints" / "step-00000010"
    state.mkdir(parents=True)
    memory = {"total_steps": 10 if finished else 20}
    (state / "state.json").write_text(json.dumps({"format_version": 1, "step": 10, "sha256": {}, "memory": memory}))
