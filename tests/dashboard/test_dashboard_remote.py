"""Runs on an object store are read through copies of their small files, and not changed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from written_runs import CHANGE, id_of, opened, rows_of, write_run

from modelyard import storage
from waiting import wait_until

URL = "memory://dashboard/runs"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("fsspec")
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("modelyard.dashboard.remote._SECONDS", 0.0)
    run = write_run(tmp_path / "one", step=5)
    (run / "checkpoints" / "step-00000005" / "weights.safetensors").write_bytes(b"large")
    (run / "checkpoints" / "step-00000003").mkdir()
    (run / "checkpoints" / "step-00000003" / "state.json").write_text("{}")
    storage.upload_folder(run, f"{URL}/one")
    storage.write_bytes(f"{URL}/training_log.md", b"\n**Note of one**, 2026-01-01 00:00:00:\n\n> from afar\n")
    yield URL
    for name in storage.names_below(URL):
        storage.remove(storage.join(URL, name))


def test_remote_runs_are_shown_and_not_changed(store: str, tmp_path: Path) -> None:
    with opened(store) as client:
        row = wait_until(lambda: rows_of(client).get("one"))
        assert (row["state"], row["remote"], row["metrics"]["validation accuracy"]) == ("interrupted", True, 0.5)
        assert client.get("/api/runs").json()["problem"] == ""
        details = client.get(f"/api/runs/{row['id']}").json()
        assert details["path"] == f"{URL}/one"
        assert details["notes"][0]["text"] == "from afar"
        for action in ("stop", "resume", "delete", "note"):
            body = {"kind": "Note", "text": "x"}
            answer = client.post(f"/api/runs/{id_of(client, 'one')}/{action}", json=body, headers=CHANGE)
            assert answer.status_code == 409
            assert f"{URL}/one is on an object store" in answer.json()["error"]
        copied = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
        assert "weights.safetensors" not in copied
        assert not list((tmp_path / "cache").rglob("step-00000003"))

        metrics = storage.read_bytes(f"{URL}/one/metrics.jsonl")
        storage.write_bytes(f"{URL}/one/metrics.jsonl", metrics + b'{"step": 20, "split": "train", "loss": 0.1}\n')
        wait_until(lambda: rows_of(client)["one"]["step"] == 20)
        holder = {"host": "elsewhere", "pid": 7, "pid_space": "x", "time": time.time(), "mark": "m"}
        storage.write_bytes(f"{URL}/one/.lock", json.dumps(holder).encode())
        wait_until(lambda: rows_of(client)["one"]["state"] == "running")
        storage.remove(f"{URL}/one/.lock")
        wait_until(lambda: rows_of(client)["one"]["state"] == "interrupted")
        storage.remove(f"{URL}/one/config.yaml")
        wait_until(lambda: "one" not in rows_of(client))
    wait_until(lambda: not list((tmp_path / "cache" / "views").iterdir()), "the copies are removed")
