"""Two processes write one run folder on an object store: one trains, the other evaluates. Each has its part."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelyard import storage
from modelyard.config.yaml_file import CONFIG_VERSION, RUN_CONFIG_KEY
from modelyard.errors import RunError
from modelyard.run.checkpoint import Checkpoint, folder_name, list_best, list_checkpoints, prune, write_checkpoint
from modelyard.run.directory import RunDirectory, open_run_folder, remote_run_folder
from modelyard.run.mirror import Mirror, working_folder
from modelyard.run.remote_lock import STALE_SECONDS, RemoteLock
from modelyard.system.files import remove_folder

pytest.importorskip("fsspec")
URL = "memory://bucket/runs/one"
KEEP = 2
VALUES = {10: 0.5, 20: 0.9, 30: 0.7, 40: 0.8}
"""What the evaluator measures at each step."""


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it happens."""


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the disk here does not matter
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "looking"))


def chief(cache: Path) -> RunDirectory:
    """The run folder of a process that trains, and leaves the evaluation to another."""
    directory = remote_run_folder(URL, cache)
    directory.create()
    return directory


def evaluator(cache: Path) -> RunDirectory:
    folder = working_folder(URL, cache, "evaluator")
    directory = RunDirectory(folder, mirror=Mirror(URL, folder, cache, evaluator=True))
    directory.create()
    return directory


def model(step: int, **loop_state: Any) -> Checkpoint:
    array = np.full((4,), step, np.float32)
    return Checkpoint(step, {"w": array}, {"m": array + 1}, loop_state)


def save(directory: RunDirectory, step: int) -> None:
    directory.config.write_text(f"{RUN_CONFIG_KEY}: {CONFIG_VERSION}\nmodel: mlp\n")
    with open(directory.metrics, "a") as file:
        file.write(json.dumps({"step": step, "split": "train"}) + "\n")
    write_checkpoint(directory.checkpoints, model(step))
    prune(directory.checkpoints, KEEP)
    directory.push(KEEP)


def evaluate_new(directory: RunDirectory) -> None:
    """As the evaluator does: a checkpoint that has no row is evaluated, kept if it is the best, and gets a row."""
    directory.refresh(now=True)
    own = directory.of_evaluator()
    for old in list_best(own.best)[1:]:  # a killed one had written the next
        remove_folder(old)
    for step, path in list_checkpoints(directory.checkpoints).items():
        if step in [row["step"] for row in directory.evaluations_of("validation")]:
            continue
        directory.download_weights(path)
        before = list_best(own.best)
        if not before or VALUES[step] > VALUES[int(before[0].name[5:])]:
            best = {"metric": "accuracy", "mode": "max", "value": VALUES[step], "step": step}
            write_checkpoint(own.best, model(step, best=best))
            for old in before:
                remove_folder(old)
            directory.push()
        with open(own.metrics, "a") as file:
            file.write(json.dumps({"step": step, "split": "validation"}) + "\n")
        directory.push()


def evaluated() -> list[int]:
    return [json.loads(line)["step"] for line in storage.read_bytes(f"{URL}/evaluator/metrics.jsonl").splitlines()]


def committed() -> list[str]:
    return [name.removesuffix("/state.json") for name in storage.names_below(URL) if name.endswith("/state.json")]


def test_neither_removes_what_the_other_writes(tmp_path: Path) -> None:
    other = evaluator(tmp_path)  # beside the chief, with the same cache
    assert other.take_evaluation()  # it may come first
    with chief(tmp_path) as training:
        for step in (10, 20):
            save(training, step)
            evaluate_new(other)
    with chief(tmp_path) as training:  # it starts again, and clears what is not its run
        assert [path.name for path in list_best(training.best)] == [folder_name(20)]
        for step in (30, 40):
            save(training, step)
            evaluate_new(other)
    other.unlock()
    assert evaluated() == [10, 20, 30, 40]
    assert committed() == [f"best/{folder_name(20)}", *(f"checkpoints/{folder_name(step)}" for step in (30, 40))]
    assert not [name for name in storage.names_below(URL) if name.startswith(".lock")]
    seen = open_run_folder(URL)
    assert len(seen.evaluations_of("validation")) == 4


def test_one_process_evaluates_a_remote_run_at_a_time(tmp_path: Path) -> None:
    first, second = evaluator(tmp_path / "a"), evaluator(tmp_path / "b")
    with chief(tmp_path / "c") as training:
        save(training, 10)
        assert first.take_evaluation()
        assert not second.take_evaluation()
        assert not training.take_evaluation()
        assert first.who_evaluates() == training.who_evaluates() == f"process {os.getpid()} on {os.uname().nodename}"
        first.unlock()
        assert training.take_evaluation()
        assert not second.take_evaluation()
    assert second.take_evaluation()
    second.unlock()


@pytest.mark.parametrize("who", ["the dead process", "another"])
def test_a_run_evaluates_when_it_replaces_a_dead_process_that_renewed_its_second_lock_later(
    tmp_path: Path, who: str
) -> None:
    def hold(name: str, seconds: float, **holder: Any) -> None:
        dead = {"host": "elsewhere", "pid_space": "", "pid": 7, "time": time.time() - seconds, "mark": name}
        storage.write_bytes(f"{URL}/{name}", json.dumps(dead | holder).encode())

    hold(".lock", STALE_SECONDS + 1)
    hold(".lock-evaluation", STALE_SECONDS - 50, **({} if who == "the dead process" else {"pid": 8}))
    with chief(tmp_path) as training:
        assert training.take_evaluation() == (who == "the dead process")


def test_an_evaluator_killed_at_any_change_continues_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in itertools.count(1):
        for name in storage.names_below(URL):
            storage.remove(f"{URL}/{name}")
        with chief(tmp_path / f"c{number}") as training:
            for step in (10, 20):
                save(training, step)
            with monkeypatch.context() as patch:
                changes = kill_at(number, patch)
                try:
                    work(tmp_path / f"e{number}")
                except Killed:
                    pass
                else:
                    assert changes() < number > 10
                    return
            storage.remove(f"{URL}/.lock-evaluation")  # of a process that is known to be dead
            other = work(tmp_path / f"f{number}")
            for step in (30, 40):
                save(training, step)
            evaluate_new(other)
            other.unlock()
        assert evaluated() == [10, 20, 30, 40]
        assert [name for name in committed() if name.startswith("best/")] == [f"best/{folder_name(20)}"]
        folders = {name.rpartition("/")[0] for name in storage.names_below(URL) if "/step-" in name}
        assert folders == set(committed())  # nothing that was cut off stays


def work(cache: Path) -> RunDirectory:
    directory = evaluator(cache)
    assert directory.take_evaluation()
    evaluate_new(directory)
    return directory


def kill_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """From its N-th change of the store on, the process is dead. Returns how many changes there were."""
    count, seen = itertools.count(1), [0]

    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            seen[0] = next(count)
            if seen[0] >= number:
                raise Killed
            return function(*arguments, **named)

        return call

    for name in ("write_bytes", "replace_version", "remove_version", "upload", "remove"):
        monkeypatch.setattr(storage, name, deadly(getattr(storage, name)))
    return lambda: seen[0]


@pytest.mark.parametrize("part", ["checkpoint", "small file"])
def test_a_process_that_sleeps_during_an_upload_uploads_nothing_more_after_a_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """It sleeps between two requests, for so long that its lock is taken over, and then goes on."""
    sleeper = chief(tmp_path / "a")
    sleeper.lock()
    save(sleeper, 10)
    next_lock = RemoteLock(f"{URL}/.lock", URL)
    before: dict[str, bytes] = {}
    name = "upload" if part == "checkpoint" else "write_bytes"
    real = getattr(storage, name)

    def sleeps_after(*arguments: Any, **named: Any) -> Any:
        done = real(*arguments, **named)
        if not before and "/.lock" not in str(arguments):
            with monkeypatch.context() as patch:
                patch.setattr("modelyard.run.remote_lock.STALE_SECONDS", -1)
                next_lock.acquire()
            before.update({name: storage.read_bytes(f"{URL}/{name}") for name in storage.names_below(URL)})
            # A minute and more passes.
            monkeypatch.setattr("modelyard.run.remote_lock._RENEW_SECONDS", 0)
        return done

    monkeypatch.setattr(storage, name, sleeps_after)
    with pytest.raises(RunError, match="lost its lock"):
        save(sleeper, 20)
    with pytest.raises(RunError, match="lost its lock"):
        sleeper.unlock()
    assert before == {name: storage.read_bytes(f"{URL}/{name}") for name in storage.names_below(URL)}
    next_lock.release()


def test_a_late_upload_does_not_replace_the_model_of_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request itself is late: it was on its way when the process fell asleep."""
    sleeper = chief(tmp_path / "a")
    sleeper.lock()
    save(sleeper, 10)
    real = storage.upload

    def late(local: Path, url: str, new: bool = False) -> bool:
        monkeypatch.setattr(storage, "upload", real)
        storage.remove(f"{URL}/.lock")
        with chief(tmp_path / "b") as following:
            write_checkpoint(following.checkpoints, Checkpoint(20, {"w": np.ones(4)}, {"m": np.ones(4)}, {}))
            following.push(KEEP)
            return real(local, url, new)

    monkeypatch.setattr(storage, "upload", late)
    with pytest.raises(RunError, match="lost its lock"):
        save(sleeper, 20)
    with chief(tmp_path / "c") as third:
        assert list(list_checkpoints(third.checkpoints)) == [20]  # undamaged
        assert not list((third.checkpoints).glob("damaged*"))
