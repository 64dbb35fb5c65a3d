"""training_log.md: the journal beside the run folders. Entries are only ever added, so what you write in it stays."""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from modelyard.config.schema import Config
from modelyard.system.files import explain

JOURNAL = "training_log.md"
TITLE = "# Training log\n\nEvery run adds its settings, its hypothesis and its results. Add your own notes anywhere.\n"


def log_start(journal: Path, run: str, config: Config, step: int) -> None:
    """Adds the settings and the hypothesis of a run that begins or goes on."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    if step:
        _append(journal, f"\n**{run}** went on at step {step}, {now}.\n")
        return
    settings = [
        f"- {key}: {_shown(value)}" for key, value in config.flat().items() if _worth_saying(config, key, value)
    ]
    text = f"\n## {run}\n\n{now}\n\n" + "\n".join(settings) + "\n"
    _append(journal, text + f"\n**Hypothesis:** {config.hypothesis or '–'}\n")


def log_result(journal: Path, run: str, result: Mapping[str, Any]) -> None:
    """Adds the results of a run that ended."""
    listed = "\n".join(f"- {key}: {_shown(value)}" for key, value in result.items())
    _append(journal, f"\n**Results of {run}**, {datetime.now().strftime('%Y-%m-%d %H:%M:%S')}:\n\n{listed}\n")


def _worth_saying(config: Config, key: str, value: Any) -> bool:
    always = ("model", "dataset", "train_batch_size", "train_epochs", "train_steps", "learning_rate", "optimizer")
    return value is not None and key != "hypothesis" and (key in always or key in config.changed())


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("\n", " ")


def _append(journal: Path, text: str) -> None:
    with explain(journal, "write"), open(journal, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # runs side by side
        if file.tell() == 0 and journal.stat().st_size == 0:
            file.write(TITLE)
        file.write(text)
