"""The record of a run: manifest.json for programs, and the journal training_log.md for people."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from modelyard.config.schema import Config
from modelyard.config.trust import imported_module
from modelyard.errors import RunError
from modelyard.run.directory import LARGEST_JSON, RunDirectory
from modelyard.run.integrity import CHECKSUM, json_checksum, parse_json
from modelyard.system.files import explain, write_text
from modelyard.system.machine import git_commit, hardware, versions
from modelyard.system.untrusted import read_regular

JOURNAL_TITLE = (
    "# Training log\n\nEvery run adds its settings, its hypothesis and its results. Add your own notes anywhere.\n"
)
NOTE_KINDS = ("Hypothesis", "Conclusion", "Note")
"""Notes of users about a run, in the journal."""
_FIELDS: dict[str, type] = {
    "run_id": str, "evaluates": bool, "seeds": dict, "dataset": dict, "model": dict, "data": dict, "metrics": dict,
    "starts": list,
}  # fmt: skip
_DATASET_FIELDS: dict[str, type] = {"fingerprint": str, "sizes": dict}
_START_FIELDS: dict[str, type] = {
    "time": str, "step": int, "command": list, "versions": dict, "hardware": dict, "engine": dict, "git_commit": str,
    "plugins": dict,
}  # fmt: skip
_ALWAYS_LISTED = ("model", "dataset", "train_batch_size", "train_epochs", "train_steps", "learning_rate", "optimizer")


def write_manifest(
    directory: RunDirectory,
    config: Config,
    dataset: dict[str, Any],
    engine: dict[str, Any],
    step: int,
    before: dict[str, Any],
) -> dict[str, Any]:
    """Adds a start of the run at ``step`` to the manifest, whose content was ``before``, and returns the manifest."""
    start = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "step": step,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions(),
        "hardware": hardware(),
        "engine": engine,
        "git_commit": git_commit(Path.cwd()),
        "plugins": plugin_digests(config),
    }
    manifest = before | {
        "seeds": {"random_seed": config.random_seed, "split_seed": config.split_seed},
        "dataset": dataset,
        "starts": [*before.get("starts", []), start],
    }
    # In the last start: an earlier Modelyard that resumes the run adds a start without a checksum.
    start[CHECKSUM] = json_checksum(manifest)
    write_text(directory.manifest, json.dumps(manifest, indent=1) + "\n")
    return manifest


def read_manifest(directory: RunDirectory) -> dict[str, Any]:
    """Returns the manifest; empty if the run has none yet.

    Raises:
        RunError: if it is damaged, or can't be read.
    """
    file = directory.manifest
    try:
        with explain(file, "read"):
            manifest = parse_json(read_regular(file, LARGEST_JSON, RunError)) if file.exists() else {}
        problem = _problem_of(manifest)
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        shown = directory.address_of(file)
        raise RunError(
            f"{shown} is damaged: {problem}. Restore it from a copy, or delete it: a resume writes a new one, but then "
            "nothing checks that the data is the same."
        )
    return manifest


def _problem_of(manifest: dict[str, Any]) -> str | None:
    """Returns the first problem in the content of a manifest, or None."""
    wrong = [key for key, kind in _FIELDS.items() if not isinstance(manifest.get(key), kind | None)]
    if wrong:
        return f"its {wrong[0]} is of another type than it should be"
    starts = manifest.get("starts") or []
    if not all(isinstance(start, dict) for start in starts):
        return "one of its starts is not an object"
    parts = [(manifest.get("dataset") or {}, _DATASET_FIELDS), *((start, _START_FIELDS) for start in starts)]
    wrong = [key for part, kinds in parts for key, kind in kinds.items() if not isinstance(part.get(key), kind | None)]
    if wrong or not all(isinstance(size, int) for size in (parts[0][0].get("sizes") or {}).values()):
        return f"its {(wrong or ['sizes'])[0]} is of another type than it should be"
    last = starts[-1] if starts else {}
    given = last.get(CHECKSUM)
    if given is None:  # written by an earlier Modelyard, if nothing is misspelled
        unknown = (manifest.keys() - _FIELDS.keys()) | (last.keys() - _START_FIELDS.keys())
        return f"it has an unknown field {min(unknown)!r}" if unknown else None
    start = {key: value for key, value in last.items() if key != CHECKSUM}
    if given != json_checksum(manifest | {"starts": [*starts[:-1], start]}):
        return "its content does not have the checksum that it was written with"
    return None


def started_by(manifest: dict[str, Any]) -> str | None:
    """Returns the user's own script that started the run, if one did."""
    starts = manifest.get("starts") or [{}]
    command = str((starts[-1].get("command") or [""])[0])
    return command if command.endswith(".py") and command != "__main__.py" else None


def plugin_digests(config: Config) -> dict[str, str | None]:
    """Returns the SHA-256 of each plugin."""
    files = {name: getattr(imported_module(name), "__file__", None) for name in config.plugins}
    return {name: hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None for name, file in files.items()}


def log_start(journal: Path, run: str, config: Config, step: int) -> None:
    """Adds a run that starts to the journal, with settings and hypothesis, or that it is resumed."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    if step:
        _append(journal, f"\n**{run}** resumed at step {step}, {now}.\n")
        return
    listed = {*_ALWAYS_LISTED, *config.changed()} - {"hypothesis"}
    settings = {key: value for key, value in config.flat().items() if key in listed and value is not None}
    hypothesis = config.hypothesis or "–"
    _append(journal, f"\n## {run}\n\n{now}\n\n{_bullets(settings)}\n\n**Hypothesis:** {hypothesis}\n")


def log_result(journal: Path, run: str, result: Mapping[str, Any]) -> None:
    """Adds the results of a run to the journal."""
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    _append(journal, f"\n**Results of {run}**, {now}:\n\n{_bullets(result)}\n")


def log_note(journal: Path, run: str, kind: str, text: str) -> None:
    """Adds a note of the user to the journal. What was there stays: a later hypothesis follows an earlier one.

    Args:
        journal: the journal.
        run: the name of the run.
        kind: one of `NOTE_KINDS`.
        text: the note; its lines are quoted, so that none is taken for an entry of another run.
    """
    now = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
    quoted = "\n".join(f"> {line}".rstrip() for line in text.splitlines())
    _append(journal, f"\n**{kind} of {_one_line(run)}**, {now}:\n\n{quoted}\n")


_ENTRY = re.compile(r"\*\*(Hypothesis|Conclusion|Note|Results) of (.*)\*\*, (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d):")
_FIRST_HYPOTHESIS = "**Hypothesis:** "


def read_journal(text: str) -> dict[str, list[dict[str, str]]]:
    """Returns the entries of every run in a journal, in their order: their kind, time and text.

    The kind is one of `NOTE_KINDS`, ``Results``, or ``Text`` for what users wrote among the entries themselves.
    """
    found: dict[str, list[dict[str, str]]] = {}
    run, entry, settings = "", None, False
    for line in text.splitlines():
        head = _ENTRY.fullmatch(line)
        if line.startswith("## "):
            run, entry, settings = line[3:].strip(), None, True
        elif head is not None:
            entry, settings = {"kind": head[1], "time": head[3], "text": ""}, False
            found.setdefault(head[2], []).append(entry)
        elif line.startswith(_FIRST_HYPOTHESIS) and settings:
            said, settings = line.removeprefix(_FIRST_HYPOTHESIS), False
            entry = {"kind": "Hypothesis", "time": "", "text": "" if said == "–" else said}
            found.setdefault(run, []).append(entry)
        elif entry is not None and (line.startswith((">", "- ")) or (line and not entry["time"])):
            entry["text"] += ("\n" if entry["text"] else "") + line.removeprefix(">").removeprefix(" ")
        elif not line.strip():
            entry = entry if entry is not None and entry["time"] else None  # one without a time ends with its paragraph
        elif run and not settings and not line.startswith("**"):
            entry = None
            found.setdefault(run, []).append({"kind": "Text", "time": "", "text": line})
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _bullets(values: Mapping[str, Any]) -> str:
    shown = {key: f"{v:.6g}" if isinstance(v, float) else str(v).replace("\n", " ") for key, v in values.items()}
    return "\n".join(f"- {key}: {value}" for key, value in shown.items())


def _append(journal: Path, text: str) -> None:
    """Appends to the journal, which keeps what it has: users add notes."""
    with explain(journal, "write"), open(journal, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other runs may write to it
        if file.tell() == 0 and journal.stat().st_size == 0:
            file.write(JOURNAL_TITLE)
        file.write(text)
