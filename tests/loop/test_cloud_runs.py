"""Runs on an object store: killed processes and empty machines, with the bits of an undisturbed run at the end."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import COMMAND, TESTS, environment, last_json
from modelyard import storage
from modelyard.run.remote_lock import RemoteLock
from modelyard.run.weights.read import load_weights
from object_store import BUCKET, object_store
from waiting import PATIENCE, wait_until

STEPS = 80
OPTIONS = (
    "train-and-evaluate --model tiny_dropout --dataset digits --deterministic --threads 1 --train_batch_size 32 "
    f"--train_steps {STEPS} --eval_every 16 --log_every 10 --save_every 5 --keep_best 2 --test_at_end"
).split()
RUN = f"s3://{BUCKET}/runs/one"
WEIGHTS = ("weights.safetensors", "optimizer.safetensors")


@pytest.fixture(scope="module", autouse=True)
def _store() -> Iterator[None]:
    with object_store():
        yield


def start(*words: str, cache: Path) -> subprocess.Popen[str]:
    extra = environment(MODELYARD_CACHE=str(cache), PYTHONPATH=str(TESTS))
    return subprocess.Popen([*COMMAND, *words], env=extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, errors = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def run_to_end(*words: str, cache: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = finish(start(*words, cache=cache))
    assert done.returncode == status, done.stderr
    return done


def train(where: str, cache: Path, *more: str) -> subprocess.Popen[str]:
    return start(*OPTIONS, "--plugins", "parts", "--model_dir", where, *more, cache=cache)


def committed(url: str, kind: str = "checkpoints") -> list[int]:
    """The steps whose state.json is there."""
    names = storage.names_below(f"{url}/{kind}")
    return [int(name[5:13]) for name in names if name.endswith("/state.json")]


def rows(text: bytes) -> list[dict[str, Any]]:
    kept = ("step", "epoch", "split", "loss", "accuracy", "learning_rate")
    return [{key: row[key] for key in kept if key in row} for row in map(json.loads, text.splitlines())]


def assert_same_result(url: str, folder: Path) -> None:
    last = f"checkpoints/step-{STEPS:08d}"
    for name in WEIGHTS:
        assert storage.read_bytes(f"{url}/{last}/{name}") == (folder / last / name).read_bytes()
    assert rows(storage.read_bytes(f"{url}/metrics.jsonl")) == rows((folder / "metrics.jsonl").read_bytes())
    bests = sorted(path.name for path in (folder / "best").iterdir())
    assert committed(url, "best") == [int(name[5:]) for name in bests]
    for name in bests:
        here = (folder / "best" / name / "weights.safetensors").read_bytes()
        assert storage.read_bytes(f"{url}/best/{name}/weights.safetensors") == here


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.Popen[str]]:
    """The undisturbed run, on the disk, while the other is being killed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, train(str(folder / "run"), folder / "cache")


@pytest.fixture(scope="module")
def undisturbed(beside: tuple[Path, subprocess.Popen[str]]) -> Path:
    folder, process = beside
    assert finish(process).returncode == 0
    assert not (folder / "cache").exists()  # a local run needs none
    return folder / "run"


@pytest.fixture(scope="module")
def killed(beside: object, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that was killed, ended by SIGTERM on a second machine, and went on to its end on a third."""
    first, second, third = (tmp_path_factory.mktemp(name) / "cache" for name in ("first", "second", "third"))
    process = train(RUN, first)
    wait_until(lambda: max(committed(RUN), default=0) >= 20, process=process)
    process.kill()
    assert finish(process).returncode == -signal.SIGKILL
    reached = max(committed(RUN))
    assert reached < STEPS
    # What a kill in the middle of an upload leaves: the files of a checkpoint, without the state that makes it one.
    for name in WEIGHTS:
        storage.write_bytes(f"{RUN}/checkpoints/step-00000079/{name}", b"half")
    process = start("resume", RUN, "--log_every", "10", cache=second)
    wait_until(lambda: max(committed(RUN)) >= reached + 10, process=process)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 143, done.stderr
    assert f"resuming at step {reached} " in done.stderr
    assert f"modelyard resume {RUN}" in done.stderr
    stopped_at = int(done.stderr.split("stopped at step ")[1].split(".")[0])
    assert max(committed(RUN)) == stopped_at < STEPS
    assert not storage.exists(f"{RUN}/checkpoints/step-00000079")
    done = finish(train(RUN, third))
    assert done.returncode == 0, done.stderr
    assert f"resuming at step {stopped_at} " in done.stderr
    return RUN


@pytest.mark.slow
def test_a_killed_run_goes_on_on_an_empty_machine_bit_for_bit(killed: str, undisturbed: Path) -> None:
    assert_same_result(killed, undisturbed)
    assert len(committed(killed)) == 3  # as many as keep_checkpoints says, those of other machines included
    names = storage.names_below(killed)
    assert not storage.exists(f"{killed}/.lock")
    assert {"config.yaml", "manifest.json", "metrics.jsonl", "runlogs/chief.log"} <= set(names)
    assert any(name.startswith("events/train/") for name in names)
    assert len(json.loads(storage.read_bytes(f"{killed}/manifest.json"))["starts"]) == 3


@pytest.mark.slow
def test_the_journal_beside_the_run_tells_all_of_it(killed: str) -> None:
    journal = storage.read_bytes(f"s3://{BUCKET}/runs/training_log.md").decode()
    assert journal.count("# Training log") == 1
    assert journal.count("\n## one\n") == 1
    assert journal.count("**one** resumed at step") == 2
    assert journal.count("**Results of one**") == 1


@pytest.mark.slow
def test_a_remote_run_is_evaluated_and_listed(killed: str, undisturbed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    there = last_json(run_to_end("evaluate", killed, "--split", "test", "--json", cache=cache))
    row = rows((undisturbed / "metrics.jsonl").read_bytes())[-1]
    assert (row["split"], row["step"]) == ("test", there["model_step"])
    assert there["metrics"] == pytest.approx({name: row[name] for name in ("loss", "accuracy")})
    assert there["best"]["path"].startswith(f"{killed}/best/step-")
    words = ("predict", killed, "--split", "test", "--output", str(tmp_path / "a.csv"), "--json")
    assert last_json(run_to_end(*words, cache=cache))["metrics"]["accuracy"] == pytest.approx(row["accuracy"])
    listed = run_to_end("runs", "--runs_dir", f"s3://{BUCKET}/runs", "--json", cache=cache).stdout
    assert [(run["run"], run["status"], run["step"]) for run in json.loads(listed)] == [("one", "finished", STEPS)]
    assert list((cache / "views").iterdir()) == []


@pytest.mark.slow
def test_weights_to_start_from_may_be_remote(killed: str, undisturbed: Path, tmp_path: Path) -> None:
    best = f"{killed}/best/step-{committed(killed, 'best')[0]:08d}"
    by_folder, by_file = (load_weights(path, str(tmp_path)) for path in (best, f"{best}/weights.safetensors"))
    here = load_weights(undisturbed / "best" / Path(best).name)
    for found in (by_folder, by_file):
        assert {name: value.tobytes() for name, value in found.items()} == {k: v.tobytes() for k, v in here.items()}
    winner, at_home = load_weights(killed, str(tmp_path)), load_weights(undisturbed)
    assert all((winner[name] == at_home[name]).all() for name in at_home)


@pytest.mark.slow
def test_a_new_run_gets_a_name_under_a_remote_runs_dir(killed: str, tmp_path: Path) -> None:
    words = [
        "train",
        "--plugins",
        "parts",
        "--model",
        "tiny_dropout",
        "--train_steps",
        "2",
        "--checkpoint_path",
        killed,
    ]
    done = run_to_end(*words, "--runs_dir", f"s3://{BUCKET}/named", "--json", cache=tmp_path / "cache")
    where = last_json(done)["model_dir"]
    assert where.startswith(f"s3://{BUCKET}/named/20")
    assert where.endswith("-tiny_dropout-digits")
    assert committed(where) == [0, 2]
    assert f"\ncheckpoint_path: {killed}\n" in storage.read_bytes(f"{where}/config.yaml").decode()
    assert not Path("s3:").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_of_two_commands_that_start_at_the_same_moment_one_runs_and_one_is_refused(number: int, tmp_path: Path) -> None:
    where = f"s3://{BUCKET}/runs/twice-{number}"
    long = ("--train_steps", "1000000")
    both = [train(where, tmp_path / name, *long) for name in ("a", "b")]
    try:
        wait_until(lambda: any(process.poll() is not None for process in both), "the end of one")
        refused, running = sorted(both, key=lambda process: process.poll() is None)
        done = finish(refused)
        assert done.returncode == 75  # the other may be dead, as a killed container is: submitted jobs try again
        assert f"{where} is in use by process" in done.stdout + done.stderr
        wait_until(lambda: committed(where) != [], "a checkpoint of the other", running)
        running.send_signal(signal.SIGTERM)
        assert finish(running).returncode == 143
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_stopped_run_that_wakes_up_after_a_take_over_changes_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, where = f"s3://{BUCKET}/sleeping", f"s3://{BUCKET}/sleeping/one"
    process = train(
        where, tmp_path / "cache", "--train_steps", "1000000", "--save_every", "60 min", "--eval_every", "1000000"
    )
    try:
        wait_until(lambda: storage.exists(f"{top}/training_log.md"), "the end of the first upload", process)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the stop", process)
        following = RemoteLock(f"{where}/.lock", where)
        with monkeypatch.context() as patch:
            patch.setattr("modelyard.run.remote_lock.STALE_SECONDS", -1)
            following.acquire()
        before = {name: storage.read_version(f"{top}/{name}") for name in storage.names_below(top)}
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)  # it saves, uploads, and removes its lock
        done = finish(process)
        assert done.returncode == 2
        assert "this process lost its lock" in done.stderr
        after = {name: storage.read_version(f"{top}/{name}") for name in storage.names_below(top)}
        own = "one/.lock-evaluation"  # nobody took that one over
        assert {name for name in before if before[name] != after.get(name)} <= {own}
        assert after.keys() <= before.keys()
        following.release()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--model_dir", "s3://nobucket/x"], "s3://nobucket/x: The specified bucket does not exist"),
        (["resume", f"s3://{BUCKET}/none"], f"s3://{BUCKET}/none is not a run folder"),
        (["evaluate", "s3://nobucket/x"], "s3://nobucket/x: The specified bucket does not exist"),
        (
            ["train", "--model_dir", f"s3://{BUCKET}/y", "--best_model_dir", "b"],
            "best_model_dir: 'b' is not supported with cloud storage",
        ),
        (["train", "--best_model_dir", f"s3://{BUCKET}/b"], "is not supported with cloud storage"),
        (["train", "--model_dir", f"s3://{BUCKET}/full"], "is not empty and not a run folder (it holds a.txt)"),
    ],
    ids=["no bucket", "no run", "no bucket to read", "best elsewhere", "best remote", "not empty"],
)
def test_mistakes_are_sentences(words: list[str], message: str, tmp_path: Path) -> None:
    storage.write_bytes(f"s3://{BUCKET}/full/a.txt", b"1")
    done = run_to_end(*words, cache=tmp_path / "cache", status=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_credentials_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    done = run_to_end("train", "--model_dir", f"s3://{BUCKET}/z", cache=tmp_path / "cache", status=2)
    assert "there are no credentials for it" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_that_fails_leaves_nothing_there(tmp_path: Path) -> None:
    words = ["train", "--dataset", "mnist", "--data_dir", "nowhere", "--model_dir", f"s3://{BUCKET}/false"]
    run_to_end(*words, cache=tmp_path / "cache", status=2)
    assert storage.names_below(f"s3://{BUCKET}/false") == []
