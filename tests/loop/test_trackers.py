"""A run at a tracking server: every step once, however often the run is killed or the server is away."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import COMMAND, environment, on_engine
from modelyard.errors import UserError
from modelyard.loop.catalog import MLflowOptions, WandbOptions
from modelyard.loop.mlflow_tracker import MLflow
from modelyard.loop.tracking import FINISHED, Memo, Point, Sender, check_address
from modelyard.loop.wandb_tracker import Wandb, steps_in_files
from modelyard.run.directory import RunDirectory
from modelyard.run.metrics import MetricsFile, read_metrics
from waiting import PATIENCE, wait_until

HERE = Path(__file__).parent
STEPS = 50
HELD_AT = (10, 26, 38)
"""Where the run is killed: before its first checkpoint but that of step 0, and at steps after a checkpoint."""
OPTIONS = (
    "--model mlp --hidden_units 4 --dataset digits --train_batch_size 32 --log_every 2 --eval_every 10 --test_at_end "
    f"--train_steps {STEPS} --save_every 12 --threads 1"
).split()


class FakeServer:
    """Keeps what it gets, and can be down."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.calls: list[str] = []
        self.down = False
        self.loses_answers = False
        self.opened = 0
        self.status = ""

    def answer(self) -> None:
        if self.down:
            raise ConnectionError("the server at http://me:secret@host is down\nand more lines")

    def open(self) -> dict[str, int]:
        self.opened += 1
        self.answer()
        last: dict[str, int] = {}
        for point in self.points:
            last[point.key] = max(point.step, last.get(point.key, -1))
        return last

    def send(self, points: Sequence[Point]) -> None:
        self.answer()
        self.points += points
        if self.loses_answers:
            self.loses_answers = False
            raise TimeoutError("no answer")

    def close(self, status: str) -> None:
        self.answer()
        self.status = status

    def steps(self) -> list[int]:
        return [point.step for point in self.points if point.name == "loss"]


def row(step: int) -> dict[str, Any]:
    return {"step": step, "split": "train", "loss": float(step), "seconds": float(step)}


def sender(server: FakeServer, file: Path | None = None, limit: int = 1000) -> Sender:
    made = Sender("tracker", server, file, limit=limit, every=0.0, pause=0.01)
    made.start()
    return made


def test_a_server_that_is_down_gets_every_step_once_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    one = sender(server)
    one.put(row(1))
    wait_until(lambda: server.steps() == [1])
    server.down = True
    for step in range(2, 6):
        one.put(row(step))
    wait_until(lambda: server.opened > 3)
    server.down = False
    wait_until(lambda: server.steps() == [1, 2, 3, 4, 5])
    server.loses_answers = True  # it has the values, but the sender does not know
    one.put(row(6))
    one.put(row(7))
    assert one.finish(FINISHED, PATIENCE)
    assert server.steps() == [1, 2, 3, 4, 5, 6, 7]
    assert server.status == FINISHED
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2, "one for each outage"
    assert "training continues" in warnings[0]
    assert "secret" not in caplog.text


def test_rows_that_do_not_fit_in_memory_come_from_the_file(tmp_path: Path) -> None:
    server, path = FakeServer(), tmp_path / "metrics.jsonl"
    server.down = True
    one, file = sender(server, path, limit=10), MetricsFile(path)
    for step in range(1, 501):
        file.write(row(step))
        one.put(row(step))
        assert one.waiting() <= 10 + 10
    server.down = False
    assert one.finish(FINISHED, PATIENCE)
    assert server.steps() == list(range(1, 501))


def test_without_a_file_the_newest_rows_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    server.down = True
    one = sender(server, limit=10)
    wait_until(lambda: server.opened)
    for step in range(1, 101):
        one.put(row(step))
    server.down = False
    assert one.finish(FINISHED, PATIENCE)
    assert server.steps() == list(range(91, 101))
    assert "90 rows were lost" in caplog.text


def test_a_resumed_run_sends_what_the_server_lacks(tmp_path: Path) -> None:
    server, path = FakeServer(), tmp_path / "metrics.jsonl"
    server.points = [Point("train", "loss", step, 0.0, 0.0) for step in range(1, 21)]
    file = MetricsFile(path)
    for step in range(1, 31):  # 21 to 30 were lost with the process that was killed
        file.write(row(step))
    one = sender(server, path)
    for step in range(15, 41):  # the checkpoint was older than what was sent
        one.put(row(step))
    assert one.finish(FINISHED, PATIENCE)
    assert server.steps() == list(range(1, 41))


def test_the_end_of_a_run_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    server = FakeServer()
    stuck = threading.Event()
    server.send = lambda points: stuck.wait() and None  # type: ignore[method-assign]
    one = sender(server)
    one.put(row(1))
    assert not one.finish(FINISHED, 0.05)
    assert "not everything was sent" in caplog.text
    stuck.set()


@pytest.mark.parametrize("address", ["http://", "http://host:port", "https:///path"])
def test_an_address_without_a_host_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="not a valid URL"):
        check_address(address, "tracking_uri", "NAME and PASSWORD")


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(UserError, match="Set NAME and PASSWORD instead") as error:
        check_address("http://me:secret@host:5000", "tracking_uri", "NAME and PASSWORD")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(("kind", "options"), [(MLflow, MLflowOptions()), (Wandb, WandbOptions())])
def test_a_missing_package_is_told_with_the_command(
    monkeypatch: pytest.MonkeyPatch, kind: type[MLflow] | type[Wandb], options: Any
) -> None:
    monkeypatch.setattr("modelyard.loop.tracking.is_installed", lambda name: False)
    hook = kind(options)
    with pytest.raises(UserError, match=rf"pip install 'modelyard\[{kind.package}\]'"):
        hook.check_run(None, None)  # type: ignore[arg-type]


def test_one_process_at_a_time_opens_a_sqlite_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def client(uri: str | None) -> Any:
        handle = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # as another process would find it
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        opened.append(uri)
        raise RuntimeError("enough")

    monkeypatch.setattr("modelyard.loop.mlflow_tracker._client", client)
    monkeypatch.setattr("modelyard.loop.mlflow_tracker.is_installed", lambda name: True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    stores = [f"sqlite:///{tmp_path}/mlflow.db", None]
    for uri in stores:
        with pytest.raises(UserError, match="can't be used: enough"):
            MLflow(MLflowOptions(tracking_uri=uri)).check()
    assert opened == stores


# -- real runs, killed three times ------------------------------------------------------------------------------------


def start(folder: Path, hook: str, hold_at: int = -1, **extra: str) -> subprocess.Popen[str]:
    words = ["train-and-evaluate", *OPTIONS, *on_engine(), "--plugins", str(HERE / "holding.py")]
    words += ["--model_dir", str(folder), "--hooks", f"+{hook},+hold"]
    held = str(folder.parent / f"held-{hold_at}")
    extra = environment(HOLD_AT=str(hold_at), HELD=held, **extra)
    return subprocess.Popen([*COMMAND, *words], env=extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def kill_three_times(folder: Path, hook: str, has_sent: Callable[[int], bool], **extra: str) -> str:
    """Kills a run at steps that the tracker has, but no checkpoint; then lets it end. Returns what it logged."""
    for at in HELD_AT:
        process = start(folder, hook, at, **extra)
        wait_until((folder.parent / f"held-{at}").exists, f"step {at}", process)
        wait_until(lambda: has_sent(at), f"the values of step {at}", process)  # noqa: B023
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = start(folder, hook, **extra)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return errors


def once(folder: Path, split: str) -> Counter[int]:
    """The steps of a split in metrics.jsonl, each once."""
    return Counter(row["step"] for row in read_metrics(folder / "metrics.jsonl") if row["split"] == split)


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """The address of an MLflow server with an SQLite database."""
    own = Path(sys.executable).with_name("mlflow")
    program = str(own) if own.exists() else shutil.which("mlflow")
    if program is None or importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("flask") is None:
        pytest.skip("needs a server of MLflow: pip install mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination",
        str(tmp_path / "files"),
    ]
    words = [program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", *store]
    log = open(tmp_path / "server.log", "wb")  # noqa: SIM115 - the process writes to it
    server = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return bool(urllib.request.urlopen(f"{address}/health", timeout=5).status == 200)
        except OSError:
            return False

    try:
        wait_until(answers, "the server", server)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        log.close()


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_is_one_run_in_mlflow(tmp_path: Path, mlflow_server: str) -> None:
    from mlflow import MlflowClient

    client, folder = MlflowClient(tracking_uri=mlflow_server), tmp_path / "run"

    def runs() -> list[Any]:
        experiment = client.get_experiment_by_name("digits")
        return list(client.search_runs([experiment.experiment_id])) if experiment else []

    def steps(metric: str) -> Counter[int]:
        return Counter(point.step for run in runs() for point in client.get_metric_history(run.info.run_id, metric))

    hook = f'mlflow(experiment=digits, tracking_uri="{mlflow_server}")'
    kill_three_times(folder, hook, lambda at: at in steps("train/loss"))
    (run,) = runs()
    for split in ("train", "validation", "test"):
        for metric in ("loss", "accuracy"):
            assert steps(f"{split}/{metric}") == once(folder, split) != Counter()
            assert set(once(folder, split).values()) == {1}
    assert run.info.status == "FINISHED"
    assert run.data.params["model"] == "mlp"
    assert run.data.tags["modelyard.run_folder"] == str(folder)
    assert len(run.data.tags["modelyard.dataset_fingerprint"]) == 64
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["config.yaml"]

    # The id may be lost with the folder's memory, and the options that may change may change.
    (folder / "trackers" / "mlflow.json").unlink()
    words = [*COMMAND, "resume", str(folder), "--train_steps", str(STEPS + 4)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = runs()
    assert steps("train/loss") == once(folder, "train")
    assert run.data.params["train_steps"] == str(STEPS)
    assert run.data.tags["modelyard.changed.train_steps"] == str(STEPS + 4)


def test_a_run_that_is_killed_three_times_is_one_run_in_offline_files_of_wandb(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("needs W&B: pip install wandb")
    folder = tmp_path / "run"

    def history() -> list[dict[str, Any]]:
        """The rows in all files, as W&B's own program shows them."""
        rows = []
        for file in sorted((folder / "trackers" / "wandb").glob("offline-run-*/*.wandb")):
            words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
            shown = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False).stdout
            records = [json.loads(line) for line in shown.splitlines() if line.startswith("{")]
            rows += [record["history"]["item"] for record in records if record.get("type") == "history"]
        return rows

    def has_sent(at: int) -> bool:  # the last step is held back: it may get more values
        memo = Memo(RunDirectory(folder), "wandb")
        if at == HELD_AT[1]:  # handed over to W&B, but perhaps not written by it
            return memo.sent.get("train/loss") == at - 2
        return memo.run is not None and steps_in_files(folder / "trackers", memo.run).get("train/loss") == at - 2

    kill_three_times(folder, "wandb(mode=offline)", has_sent)
    rows = history()
    found = [row["_step"] for row in rows]
    assert found == sorted(set(found)), "each step once, and ascending over the files"
    for split in ("train", "validation"):
        assert Counter(row["_step"] for row in rows if f"{split}/loss" in row) == once(folder, split) != Counter()
    files = list((folder / "trackers" / "wandb").glob("offline-run-*"))
    assert len(files) == len(HELD_AT) + 2, "one for each start, and one for the files of the result"
    assert len({file.name.rpartition("-")[2] for file in files}) == 1, "all of one run"
    assert [file.read_bytes() for file in folder.rglob("files/modelyard/config.yaml")] == [
        (folder / "config.yaml").read_bytes()
    ]
