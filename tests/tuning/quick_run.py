"""Stands in for a run in tests of a search: it trains nothing, and leaves what a run leaves. Its score is known."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from modelyard.config import resolve
from modelyard.config.durations import Duration
from modelyard.loop.run import length_of
from modelyard.run.checkpoint import Checkpoint, list_checkpoints, write_checkpoint
from modelyard.run.directory import RunDirectory, write_config

EXAMPLES = 1000


def main(words: list[str]) -> None:
    """Trains from the newest checkpoint to the end, or to --pause_at."""
    options = dict(zip(words[1::2], words[2::2], strict=False))
    directory = RunDirectory(Path(options["--model_dir"]))
    config = resolve({"config_file": options["--config_file"]}, pick_up_files=False)
    length = length_of(config, EXAMPLES)
    stop = Duration.parse(options["--pause_at"]).steps(length) if "--pause_at" in options else length.total_steps
    directory.create()
    write_config(directory, config)
    begun = max(list_checkpoints(directory.checkpoints), default=0)
    end = min(stop, length.total_steps)
    width = int(config.component_options["hidden_units"][0])
    manifest = json.loads(directory.manifest.read_text()) if directory.manifest.exists() else {"starts": []}
    manifest |= {"dataset": {"sizes": {"train": EXAMPLES}}, "model": {"parameters": 100 * width, "flops": None}}
    manifest["starts"].append({"step": begun})
    directory.manifest.write_text(json.dumps(manifest))
    assert config.eval_every is not None
    every = int(config.eval_every.value)
    with open(directory.metrics, "a") as file:
        for step in range(begun + every, end + 1, every):
            accuracy = (1 - config.learning_rate) * (1 - 1 / (1 + step)) + width / 1000
            row = {"step": step, "split": "validation", "accuracy": accuracy, "loss": 1 - accuracy, "seconds": 1.0}
            file.write(json.dumps(row) + "\n")
    paused = end < length.total_steps
    state = {"paused": paused, "total_steps": length.total_steps, "stopped": None}
    write_checkpoint(directory.checkpoints, Checkpoint(end, {"w": np.zeros(1, np.float32)}, {}, state))


if __name__ == "__main__":
    main(sys.argv[1:])
