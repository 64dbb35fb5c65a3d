"""What the pages do to runs: stop, resume, delete, restore, notes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient
from written_runs import CHANGE, add_rows, id_of, opened, rows_of, running, write_run

from modelyard.comparison.results import read_results
from modelyard.run.directory import BIN
from modelyard.run.manifest import JOURNAL_TITLE, log_note, read_journal
from modelyard.system.process import hold_pid_file, read_holder
from waiting import wait_until

STAND_IN = [sys.executable, str(Path(__file__).parent / "standing_in.py")]


def post(client: TestClient, path: str, **body: Any) -> Any:
    return client.post(f"/api/{path}", json=body, headers=CHANGE)


def act(client: TestClient, name: str, action: str, **body: Any) -> Any:
    return post(client, f"runs/{id_of(client, name)}/{action}", **body)


def wait_for_state(client: TestClient, name: str, state: str) -> dict[str, Any]:
    found: dict[str, Any] = wait_until(lambda: (row := rows_of(client).get(name)) and row["state"] == state and row)
    return found


@contextlib.contextmanager
def stand_in(run: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*STAND_IN, "train", str(run)]) as process:
        try:
            wait_until((run / "started").exists, process=process)
            yield process
        finally:
            process.kill()


# -- what changes is seen -------------------------------------------------------------------------------------------


def test_only_what_changed_is_sent_and_new_and_removed_runs_are_found(tmp_path: Path) -> None:
    top = tmp_path / "runs"
    one = write_run(top / "deep" / "er" / "one")
    write_run(top / "two")
    with opened(top) as client:
        first = client.get("/api/runs").json()
        assert sorted(row["name"] for row in first["runs"]) == ["deep/er/one", "two"]
        assert client.get("/api/runs", params={"since": first["version"]}).json()["runs"] == []
        add_rows(one, range(11, 13))

        def changed() -> Any:
            found = client.get("/api/runs", params={"since": first["version"]}).json()
            return found["runs"] and found

        found = wait_until(changed)
        assert [(row["name"], row["step"]) for row in found["runs"]] == [("deep/er/one", 12)]
        write_run(top / "three")
        wait_until(lambda: "three" in rows_of(client))
        gone = rows_of(client)["two"]["id"]
        (top / "two").rename(tmp_path / "elsewhere")
        wait_until(lambda: gone in client.get("/api/runs", params={"since": found["version"]}).json()["gone"])


def test_two_folders_that_overlap_show_each_run_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "one")
    write_run(tmp_path / "b" / "one")
    with opened(tmp_path / "a", tmp_path / "b", tmp_path / "a") as client:
        assert sorted(rows_of(client)) == ["a/one", "b/one"]
    with opened(tmp_path / "a" / "one") as client:
        assert list(rows_of(client)) == ["one"]


# -- stop and resume ------------------------------------------------------------------------------------------------


def test_a_run_that_is_stopped_gets_sigterm(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one", step=5)
    with opened(tmp_path / "runs") as client, stand_in(run) as process:
        wait_for_state(client, "one", "running")
        assert act(client, "one", "stop").json()["done"] in ("stopped", "it is saving, then it stops")
        assert process.wait(600) == 143
        wait_for_state(client, "one", "interrupted")
        assert act(client, "one", "stop").json() == {"done": "nothing was running"}


def test_a_resumed_run_outlives_the_dashboard(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one", step=5)
    pid_file = run / "runlogs" / "chief.pid"
    with opened(tmp_path / "runs", program=STAND_IN) as client:
        assert act(client, "one", "resume").status_code == 200
        wait_for_state(client, "one", "running")
        assert (run / "verb").read_text() == "resume"
        assert "running" in act(client, "one", "resume").json()["error"], "once is enough"
    holder = read_holder(pid_file)
    assert holder is not None, "the dashboard has ended, the run has not"
    assert os.getsid(holder.pid) == holder.pid, "Ctrl-C in the dashboard's terminal does not reach it"
    os.kill(holder.pid, signal.SIGTERM)
    wait_until(lambda: read_holder(pid_file) is None)


def test_why_a_run_could_not_be_resumed_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one", step=5)
    (run / "fails").touch()
    with opened(tmp_path / "runs", program=STAND_IN) as client:
        assert act(client, "one", "resume").status_code == 200
        row = wait_for_state(client, "one", "failed")
        assert row["reason"] == "the data is not the data this run started with."
        wait_until(lambda: not zombies(), "the end of the process is noticed")


def zombies() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one")
    with opened(tmp_path / "runs", program=["/bin/false"]) as client:
        answer = act(client, "one", "resume")
        assert answer.status_code == 409
        assert "--train_epochs" in answer.json()["error"]


# -- the bin --------------------------------------------------------------------------------------------------------


def test_a_deleted_run_is_in_the_bin_and_can_be_restored(tmp_path: Path) -> None:
    top = tmp_path / "runs"
    run = write_run(top / "one")
    files = sorted(path.relative_to(run) for path in run.rglob("*"))
    with opened(top) as client:
        assert act(client, "one", "delete").status_code == 200
        assert not run.exists()
        wait_until(lambda: "one" not in rows_of(client))
        assert read_results(str(top)) == ([], []), "a leaderboard does not count what is in the bin"
        (kept,) = wait_until(lambda: client.get("/api/runs").json()["bin"])
        assert kept["name"] == "one"
        run.mkdir()
        refused = post(client, f"bin/{kept['id']}/restore")
        assert refused.status_code == 409
        assert "exists" in refused.json()["error"]
        run.rmdir()
        assert post(client, f"bin/{kept['id']}/restore").status_code == 200
        assert sorted(path.relative_to(run) for path in run.rglob("*")) == files
        wait_until(lambda: "one" in rows_of(client) and not client.get("/api/runs").json()["bin"])


def test_two_runs_of_one_name_fit_into_the_bin(tmp_path: Path) -> None:
    top = tmp_path / "runs"
    with opened(top) as client:
        for _ in range(2):
            write_run(top / "a--b")
            wait_until(lambda: "a--b" in rows_of(client))
            assert act(client, "a--b", "delete").status_code == 200
            wait_until(lambda: "a--b" not in rows_of(client))
        assert len(list((top / BIN).iterdir())) == 2
        wait_until(lambda: [one["name"] for one in client.get("/api/runs").json()["bin"]] == ["a--b", "a--b"])


def test_what_runs_is_not_deleted(tmp_path: Path) -> None:
    top = tmp_path / "runs"
    alone, cell = write_run(top / "alone"), write_run(top / "matrix" / "cells" / "cell", step=5)
    launched = write_run(top / "launched", step=5)
    (top / "matrix" / "matrix.yaml").write_text("matrix_version: 1\ncells: {}\n")
    (top / "matrix" / "runlogs").mkdir()
    with opened(top) as client:
        with running(alone):
            assert "running" in act(client, "alone", "delete").json()["error"]
        with hold_pid_file(launched / "runlogs" / "launch.pid"):
            assert "running" in act(client, "launched", "delete").json()["error"], "between two starts"
        with hold_pid_file(top / "matrix" / "runlogs" / "matrix.pid"):
            refused = act(client, "matrix/cells/cell", "delete")
            assert "cell of matrix" in refused.json()["error"]
            assert "cell of matrix" in act(client, "matrix/cells/cell", "resume").json()["error"]
            wait_until(lambda: client.get("/api/runs").json()["groups"][0]["running"])
        assert all((path / "config.yaml").exists() for path in (alone, cell, launched))
        assert act(client, "matrix/cells/cell", "delete").status_code == 200


def test_a_bin_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "one")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / BIN).symlink_to(tmp_path / "elsewhere")
    with opened(tmp_path / "runs") as client:
        assert act(client, "one", "delete").status_code == 409
        assert run.exists()


def test_the_cells_of_a_matrix_have_its_failures_and_pages(tmp_path: Path) -> None:
    top = tmp_path / "runs"
    write_run(top / "matrix" / "cells" / "cell", step=5)
    (top / "matrix" / "matrix.yaml").write_text("matrix_version: 1\ncells: {}\n")
    (top / "matrix" / "failed.json").write_text('{"cell": "it was killed by SIGSEGV", "other": 7}')
    (top / "matrix" / "leaderboard.html").write_text("<h1>Leaderboard</h1>")
    with opened(top) as client:
        row = wait_for_state(client, "matrix/cells/cell", "failed")
        assert row["reason"] == "it was killed by SIGSEGV"
        (group,) = client.get("/api/runs").json()["groups"]
        assert (group["name"], group["pages"], row["group"]) == ("matrix", ["leaderboard.html"], group["id"])
        assert "<h1>" in client.get(f"/files/{group['id']}/leaderboard.html").text


# -- notes ----------------------------------------------------------------------------------------------------------


def test_notes_are_added_to_the_journal_and_read_from_it(tmp_path: Path) -> None:
    top = tmp_path / "runs"
    write_run(top / "one")
    write_run(top / "two")
    journal = top / "training_log.md"
    own = "\n## one\n\n2026-01-01 00:00:00\n\n- model: mlp\n\n**Hypothesis:** more is more\n\nMy own line.\n"
    results = "\n**Results of one**, 2026-01-01 00:01:00:\n\n- test accuracy: 0.9\n"
    journal.write_text(JOURNAL_TITLE + own + results)
    with opened(top) as client:
        assert (
            act(client, "one", "note", kind="Conclusion", text="It is.\n\n## two\n**Note of two**, x").status_code
            == 200
        )
        assert act(client, "one", "note", kind="Hypothesis", text="less is more").status_code == 200
        notes = client.get(f"/api/runs/{id_of(client, 'one')}").json()["notes"]
        assert [(note["kind"], note["text"]) for note in notes] == [
            ("Hypothesis", "more is more"),
            ("Text", "My own line."),
            ("Results", "- test accuracy: 0.9"),
            ("Conclusion", "It is.\n\n## two\n**Note of two**, x"),
            ("Hypothesis", "less is more"),
        ]
        assert client.get(f"/api/runs/{id_of(client, 'two')}").json()["notes"] == []
        assert journal.read_text().startswith(JOURNAL_TITLE + own + results), "what was there stays"
        for body in (
            {"kind": "Results", "text": "x"},
            {"kind": "Note", "text": "  "},
            {"kind": "Note", "text": "x" * 10_001},
        ):
            assert act(client, "one", "note", **body).status_code == 409


@pytest.mark.parametrize("name", ["one\n## two", "two**, 2026-01-01 00:00:00:", "> two", ""])
def test_a_run_with_an_odd_name_adds_nothing_to_others(tmp_path: Path, name: str) -> None:
    journal = tmp_path / "training_log.md"
    log_note(journal, name, "Note", "text")
    assert "two" not in read_journal(journal.read_text())
