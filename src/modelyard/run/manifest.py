"""manifest.json: what a run was made with, so that it can be made again."""

from __future__ import annotations

import hashlib
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from modelyard.config.plugins import plugin_module
from modelyard.config.schema import Config
from modelyard.errors import RunError
from modelyard.run.directory import RunDirectory, read_json
from modelyard.system.files import write_text
from modelyard.system.machine import git_commit, hardware, versions


def write_manifest(
    directory: RunDirectory,
    config: Config,
    dataset: dict[str, Any],
    engine: dict[str, Any],
    step: int,
    before: dict[str, Any],
) -> dict[str, Any]:
    """Adds this start of the run to the manifest and returns the whole.

    Args:
        directory: the run folder.
        config: the resolved config.
        dataset: fingerprint, sizes and classes.
        engine: what the engine says of itself.
        step: the step this start goes on from.
        before: what the manifest holds already.
    """
    manifest = dict(before)
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
    manifest.update(
        seeds={"random_seed": config.random_seed, "split_seed": config.split_seed},
        dataset=dataset,
        starts=[*manifest.get("starts", []), start],
    )
    write_text(directory.manifest, json.dumps(manifest, indent=1) + "\n")
    return manifest


def read_manifest(directory: RunDirectory) -> dict[str, Any]:
    """The manifest; empty where the run has none yet.

    Raises:
        RunError: if it is damaged.
    """
    if not directory.manifest.exists():
        return {}
    manifest = read_json(directory.manifest)
    if not manifest:
        raise RunError(f"{directory.manifest} is damaged. Restore it from a copy, or start a new run.")
    return manifest


def started_by(manifest: dict[str, Any]) -> str | None:
    """The user's own script that started the run, if one did."""
    starts = manifest.get("starts") or [{}]
    command = str((starts[-1].get("command") or [""])[0])
    return command if command.endswith(".py") and command != "__main__.py" else None


def plugin_digests(config: Config) -> dict[str, str | None]:
    """SHA-256 of the user's own code, by the name it was given under."""
    return {name: _plugin_digest(name) for name in config.plugins}


def _plugin_digest(name: str) -> str | None:
    module = sys.modules.get(plugin_module(name))
    path = getattr(module, "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None
