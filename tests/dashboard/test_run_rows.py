"""What is read of a run folder: rows of the table, curves, and whatever a stranger put there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from written_runs import add_lines, add_rows, log_error, opened, rows_of, running, write_run

from modelyard.config import load_config
from modelyard.config.yaml_file import read_set
from modelyard.dashboard.curves import MOST_POINTS, MetricsReader
from modelyard.dashboard.run_files import parse_options, plain, read_row, signature
from modelyard.run.directory import config_text


def row_of(path: Path) -> dict:
    row = read_row(str(path), signature(str(path)))
    assert row is not None
    return row


def test_a_row_has_options_metrics_and_progress(tmp_path: Path) -> None:
    row = row_of(write_run(tmp_path / "one", step=10, total=40, accuracy=0.75, hidden_units=[8, 4]))
    assert row["options"]["model"] == "mlp"
    assert row["options"]["hidden_units"] == "[8, 4]"
    assert row["metrics"] == {"train loss": 0.1, "validation accuracy": 0.75, "validation loss": 0.7}
    assert (row["step"], row["total"], row["parameters"], row["starts"]) == (10, 40, 7, 1)
    assert "problem" not in row


def test_validation_metrics_are_those_of_the_best_model(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one", accuracy=0.5)
    for step, value in ((4, 0.9), (6, 0.6)):
        folder = path / "best" / f"step-{step:08}"
        folder.mkdir(parents=True)
        best = {"metric": "accuracy", "mode": "max", "value": value, "step": step}
        memory = {"best": best, "metrics": {"accuracy": value, "loss": 0.2, "epoch": 3.0}}
        (folder / "state.json").write_text(json.dumps({"memory": memory}))
    row = row_of(path)
    assert row["metrics"]["validation accuracy"] == 0.9
    assert row["metrics"]["validation loss"] == 0.2
    assert "validation epoch" not in row["metrics"]
    assert row["best"]["step"] == 4


def test_states(tmp_path: Path) -> None:
    finished = write_run(tmp_path / "finished")
    part = {"step": 10, "total": 40}
    interrupted, killed, failed = (write_run(tmp_path / name, **part) for name in ("interrupted", "killed", "failed"))
    (killed / "runlogs" / "chief.pid").write_text("123\n")
    log_error(failed, "the loss became nan at step 11.")
    new = write_run(tmp_path / "new", step=0, total=0, rows=0)
    shutil.rmtree(new / "checkpoints")
    paused = write_run(tmp_path / "paused", **part)
    state = {"step": 10, "memory": {"total_steps": 40, "paused": True}}
    (paused / "checkpoints" / "step-00000010" / "state.json").write_text(json.dumps(state))
    assert row_of(paused)["state"] == "paused"
    assert row_of(finished)["state"] == "finished"
    assert row_of(interrupted)["state"] == "interrupted"
    assert row_of(killed)["state"] == "killed"
    assert (row_of(failed)["state"], row_of(failed)["reason"]) == ("failed", "the loss became nan at step 11.")
    assert row_of(new)["state"] == "not begun"
    with running(interrupted):
        assert row_of(interrupted)["state"] == "running"
    with open(failed / "runlogs" / "chief.log", "a") as file:
        file.write("2026-01-01 00:00:02,000 INFO    resuming\n")
    assert row_of(failed)["state"] == "interrupted", "it was resumed since"


def test_an_edited_config_is_shown_with_a_warning(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one")
    text = (path / "config.yaml").read_text().replace("mlp", "cnn")
    (path / "config.yaml").write_text(text)
    assert row_of(path)["options"]["model"] == "cnn"
    assert "config.yaml" in row_of(path)["problem"]


def test_options_are_read_as_by_the_yaml_reader(tmp_path: Path) -> None:
    hypothesis = "two\nlines: # with 'quotes'\n- and a dash\n\nyes " + "long " * 300
    odd = {"hypothesis": hypothesis, "run_name": "1e4", "augment": ["flip_left_right", "pad_and_crop"]}
    config = load_config(model="mlp", learning_rate=1e-7, clip_norm=1.5, dataset="digits", **odd)
    file = tmp_path / "config.yaml"
    file.write_text(config_text(config))
    expected = {key: plain(value.value) for key, value in read_set(file, None, []).items() if key != "config_version"}
    assert parse_options(file.read_text()) == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", b"config_version: 1\nmodel: [\n"),
        ("config.yaml", b"config_version: 1\n" + b"[" * 5000),
        ("config.yaml", b"config_version: 1\nseed: " + b"9" * 5000),
        ("config.yaml", b"config_version: 1\nmodel: .nan\n2026-01-01: 0x10\n\xff\xfe: \xff"),
        ("manifest.json", b"[1, 2]"),
        ("manifest.json", b'{"starts": [3, {"time": 7, "command": 9}], "dataset": [1], "model": "x"}'),
        ("manifest.json", b"[" * 100_000),
        (
            "metrics.jsonl",
            b'{"step": 1e400, "split": "train"}\n{"step": 9, "split": "train", "loss": 1' + b"0" * 400 + b"}\n",
        ),
        ("metrics.jsonl", b'{"step": true, "split": 7}\nnull\n[]\n{"split": "train", "step": -4}\n\xff\xff\n'),
        ("metrics.jsonl", b'{"step": 3, "split": "train", "loss": NaN, "text": "x", "nested": {"a": 1}}\n'),
        ("metrics.jsonl", b"x" * 3_000_000),
        ("checkpoints/step-00000010/state.json", b'{"memory": 7}'),
        ("checkpoints/step-00000010/state.json", b'{"step": "a", "memory": {"total_steps": "b", "stopped": []}}'),
        ("best/step-00000010/state.json", b'{"memory": {"best": {"value": "a"}, "metrics": 3}}'),
        (
            "best/step-00000010/state.json",
            b'{"memory": {"best": {"value": 1, "step": [], "mode": {}}, "metrics": {"a": "b"}}}',
        ),
        ("runlogs/chief.log", b"\xff" * 1000 + b"\nerror: \xff\n"),
        ("runlogs/chief.pid", b"\xff\n\n\n"),
    ],
)
def test_a_damaged_run_is_shown_with_what_can_be_read(tmp_path: Path, name: str, content: bytes) -> None:
    path = write_run(tmp_path / "runs" / "odd")
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(content)
    write_run(tmp_path / "runs" / "other")
    with opened(tmp_path / "runs") as client:
        rows = rows_of(client)
        assert "other" in rows
        for row in rows.values():
            assert client.get(f"/api/runs/{row['id']}").status_code == 200
            assert client.get(f"/api/runs/{row['id']}/log").status_code == 200
            wanted = {"run": row["id"], "metric": ["train loss", "train text", "x"]}
            assert client.get("/api/curves", params=wanted).status_code == 200


def test_links_pipes_and_folders_in_place_of_files_are_left_out(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "chief.log").write_text("SECRET")
    (secret / "metrics.jsonl").write_text('{"step": 1, "split": "train", "SECRET": 1}\n')
    top = tmp_path / "runs"
    one, two, three = (write_run(top / name) for name in ("one", "two", "three"))
    (one / "metrics.jsonl").unlink()
    (one / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    (one / "runlogs" / "chief.log").unlink()
    (one / "runlogs").rmdir()
    (one / "runlogs").symlink_to(secret)
    (two / "metrics.jsonl").unlink()
    os.mkfifo(two / "metrics.jsonl")
    (two / "manifest.json").unlink()
    (two / "manifest.json").mkdir()
    (three / "config.yaml").rename(secret / "config.yaml")
    (three / "config.yaml").symlink_to(secret / "config.yaml")
    (top / "loop").symlink_to(top)
    with opened(top) as client:
        rows = rows_of(client)
        assert sorted(rows) == ["one", "two"]
        for row in rows.values():
            answers = [client.get(f"/api/runs/{row['id']}{rest}").text for rest in ("", "/log")]
            answers.append(client.get("/api/curves", params={"run": row["id"], "metric": "train SECRET"}).text)
            assert "SECRET" not in "".join(answers).replace("train SECRET", "")
            assert '"curves":{}' in answers[-1]


# -- curves ---------------------------------------------------------------------------------------------------------


def test_metrics_are_read_on_from_where_reading_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "one", rows=100)
    reader = MetricsReader(str(path / "metrics.jsonl"))
    reader.advance(60)
    before = reader.read
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 101, "split": "train", "lo')
    reader.advance(60)
    assert reader.read == before, "half a line is not read"
    with open(path / "metrics.jsonl", "a") as file:
        file.write('ss": 0.25}\n')
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda handle, size, start: read.append(start) or pread(handle, size, start))
    reader.advance(60)
    assert min(read) >= before - 300, "only what is new is read, and a mark before it"
    curve = reader.splits["train"].curve("loss", 1000)
    assert curve is not None
    assert curve["step"][-1] == 101
    assert curve["mean"][-1] == 0.25
    assert curve["epoch"][-1] is None
    assert len(curve["mean"]) == 101


def test_a_file_that_was_cut_and_grew_again_is_read_anew(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one", rows=100)
    file = path / "metrics.jsonl"
    reader = MetricsReader(str(file))
    reader.advance(60)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:50]) + "".join(line.replace('"loss": ', '"loss": 7') for line in lines[50:]))
    add_rows(path, range(102, 120))
    reader.advance(60)
    curve = reader.splits["train"].curve("loss", 1000)
    assert curve is not None
    assert curve["mean"][60] > 6, "the rows after the cut are the new ones"
    assert curve["step"] == sorted(set(curve["step"]))
    file.unlink()
    reader.advance(60)
    assert reader.splits == {}


def test_many_rows_become_a_bounded_number_of_points_that_keep_the_extremes(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one", rows=1)
    count = 5 * MOST_POINTS + 3
    values = {1234: 1e6, 4321: -1e6}
    add_lines(path, *(json.dumps({"step": s, "split": "train", "x": values.get(s, 1.0)}) for s in range(2, count)))
    reader = MetricsReader(str(path / "metrics.jsonl"))
    reader.advance(60)
    assert len(reader.splits["train"].axes["step"]) < MOST_POINTS
    curve = reader.splits["train"].curve("x", 300)
    assert curve is not None
    assert len(curve["mean"]) <= 301
    assert max(v for v in curve["high"] if v is not None) == 1e6
    assert min(v for v in curve["low"] if v is not None) == -1e6
    assert curve["step"][-1] == count - 1, "the last row is there"
    assert curve["rows"] > 1
    assert len({len(curve[key]) for key in ("step", "epoch", "seconds", "mean", "low", "high")}) == 1


def test_a_line_without_an_end_is_skipped(tmp_path: Path) -> None:
    path = write_run(tmp_path / "one", rows=1)
    with open(path / "metrics.jsonl", "a") as file:
        file.write("x" * (5 << 20) + "\n")
    add_rows(path, range(2, 4))
    reader = MetricsReader(str(path / "metrics.jsonl"))
    reader.advance(60)
    curve = reader.splits["train"].curve("loss", 10)
    assert curve is not None
    assert curve["step"] == [1, 2, 3]
