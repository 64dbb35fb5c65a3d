"""Writes run folders without training, and opens the dashboard over them."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from modelyard.config.yaml_file import dump
from modelyard.dashboard.app import TOKEN_HEADER, Access, Dashboard
from modelyard.run.integrity import with_checksum
from modelyard.serving.http.hosts import Hosts
from waiting import wait_until

TOKEN = "the-token-of-the-tests"
CHANGE = {TOKEN_HEADER: TOKEN}
BASE = "http://127.0.0.1:8600"


def write_run(
    path: Path, *, step: int = 10, total: int = 10, rows: int = 10, accuracy: float = 0.5, **options: Any
) -> Path:
    """Writes a run that was saved at ``step`` of ``total``."""
    path.mkdir(parents=True)
    chosen = {"config_version": 1, "model": "mlp", "dataset": "digits", "learning_rate": 0.001, **options}
    (path / "config.yaml").write_text(with_checksum(dump(chosen)))
    start = {
        "time": "2026-01-01T00:00:00+00:00",
        "step": 0,
        "command": ["modelyard", "train"],
        "hardware": {"cores": 2},
    }
    manifest = {
        "dataset": {"sizes": {"train": 50}, "classes": ["cat", "dog"]},
        "model": {"parameters": 7},
        "starts": [start],
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    add_rows(path, range(1, rows + 1))
    final = {"step": rows, "epoch": 1.0, "split": "validation", "accuracy": accuracy, "loss": 0.7, "seconds": 3.0}
    add_lines(path, json.dumps(final))
    state = path / "checkpoints" / f"step-{step:08}"
    state.mkdir(parents=True)
    (state / "state.json").write_text(json.dumps({"format_version": 1, "step": step, "memory": {"total_steps": total}}))
    (path / "runlogs").mkdir()
    (path / "runlogs" / "chief.log").write_text("2026-01-01 00:00:00,000 INFO    step 1  train  loss 1.0000\n")
    (path / ".lock").touch()
    return path


def add_rows(path: Path, steps: range) -> None:
    """Adds rows of training: the loss is 1 / step."""
    lines = (
        json.dumps({"step": step, "epoch": step / 10, "split": "train", "loss": 1 / step, "seconds": step / 100})
        for step in steps
    )
    add_lines(path, *lines)


def add_lines(path: Path, *lines: str) -> None:
    """Adds lines to metrics.jsonl."""
    with open(path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def log_error(path: Path, text: str) -> None:
    """Ends the log of a run with an error."""
    with open(path / "runlogs" / "chief.log", "a", encoding="utf-8") as file:
        file.write(f"2026-01-01 00:00:01,000 ERROR   {text}\n")


@contextlib.contextmanager
def running(path: Path) -> Iterator[None]:
    """Holds the lock of a run, as its process does."""
    with open(path / ".lock", "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def opened(*folders: Path | str, program: list[str] | None = None, token: bool = True) -> Iterator[TestClient]:
    """A browser at the dashboard, with the cookie if it knew the token, when all runs have been read once."""
    hosts = Hosts("127.0.0.1", "127.0.0.1", command="dashboard")
    app = Dashboard([str(folder) for folder in folders], Access(TOKEN, 8600), hosts, program).app()
    with TestClient(app, base_url=BASE, raise_server_exceptions=True) as client:
        client.get("/", params={"token": TOKEN})
        wait_until(lambda: client.get("/api/runs").json()["complete"])
        if not token:
            client.cookies.clear()
        yield client


def rows_of(client: TestClient) -> dict[str, dict[str, Any]]:
    """The rows of all runs, by name, with all their options."""
    found = client.get("/api/runs").json()
    for row in found["runs"]:
        row["options"] = {key: v for key, v in {**found["base"], **row["options"]}.items() if key not in row["without"]}
    return {row["name"]: row for row in found["runs"]}


def id_of(client: TestClient, name: str) -> str:
    """The id of a run."""
    found: str = rows_of(client)[name]["id"]
    return found
