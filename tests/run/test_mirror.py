"""A run folder on an object store, killed at any moment. In fsspec's memory; the protocol is tested with whole runs."""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelyard import storage
from modelyard.config import load_config
from modelyard.config.yaml_file import CONFIG_VERSION, RUN_CONFIG_KEY
from modelyard.errors import CheckpointError, ConfigError, Interrupted, RunError, StorageError, UserError
from modelyard.run.checkpoint import (
    Checkpoint,
    folder_name,
    list_checkpoints,
    load_latest,
    prune,
    read_checkpoint,
    write_checkpoint,
)
from modelyard.run.directory import (
    JOURNAL,
    RunDirectory,
    find_run_folder,
    find_runs,
    is_running,
    open_run_folder,
    recorded_options,
    remote_run_folder,
    restore_config,
    run_options,
    write_config,
)
from modelyard.run.integrity import CHECKSUM, json_checksum
from modelyard.run.manifest import log_result
from modelyard.system import files
from modelyard.system.files import remove_folder
from modelyard.system.process import hold_pid_file, holders

pytest.importorskip("fsspec")
URL = "memory://bucket/runs/one"
KEEP = 2


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it happens."""


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "looking"))


class Machine(RunDirectory):
    """The run folder of a process that trains and evaluates."""

    def lock(self) -> None:
        super().lock()
        assert self.take_evaluation()


def machine(path: Path) -> RunDirectory:
    """The run folder as a machine with this cache sees it."""
    found = remote_run_folder(URL, path)
    directory = Machine(found.path, mirror=found.mirror)
    directory.create()
    return directory


def checkpoint(step: int, **loop_state: Any) -> Checkpoint:
    array = np.full((4,), step, np.float32)
    return Checkpoint(step, {"w": array}, {"m": array + 1}, loop_state)


def save(directory: RunDirectory, step: int) -> None:
    """As the hooks do: rows, a best model now and then, a checkpoint, old ones removed."""
    directory.config.write_text(f"{RUN_CONFIG_KEY}: {CONFIG_VERSION}\nmodel: mlp\n")
    with open(directory.metrics, "a") as file:
        file.write(json.dumps({"step": step}) + "\n")
    if step % 20 == 0:
        won = {"metric": "m", "mode": "max", "value": step, "step": step}
        write_checkpoint(directory.best, checkpoint(step, best=won))
        for old in list(list_checkpoints(directory.best).values())[:-1]:
            remove_folder(old)
        directory.push()
    write_checkpoint(directory.checkpoints, checkpoint(step))
    prune(directory.checkpoints, KEEP)
    directory.push(KEEP)


def take_over() -> None:
    """The lock of a process that is known to be dead is deleted by hand."""
    for name in (".lock", ".lock-evaluation"):
        storage.remove(f"{URL}/{name}")


def committed() -> list[str]:
    names = storage.names_below(URL)
    return [name.removesuffix("/state.json") for name in names if name.endswith("/state.json")]


def test_another_machine_resumes_from_the_newest_checkpoint(tmp_path: Path) -> None:
    with machine(tmp_path / "a") as first:
        for step in (10, 20, 30):
            save(first, step)
    with machine(tmp_path / "b") as second:
        assert list(list_checkpoints(second.checkpoints)) == [30]  # older ones need not come
        assert list(list_checkpoints(second.best)) == [20]
        newest = load_latest(second.checkpoints)
        assert newest is not None
        assert newest.step == 30
        assert second.metrics.read_text().count("\n") == 3
        save(second, 40)
    assert committed() == ["best/step-00000040", "checkpoints/step-00000030", "checkpoints/step-00000040"]


@pytest.mark.parametrize("damaged", [False, True])
def test_another_machine_resumes_from_a_newer_best_model(tmp_path: Path, damaged: bool) -> None:
    with machine(tmp_path / "a") as first:
        save(first, 10)
        won = {"metric": "m", "mode": "max", "value": 20, "step": 20}
        write_checkpoint(first.best, checkpoint(20, best=won, resumable=True, run="r"))
        first.push()
    if damaged:
        storage.write_bytes(f"{URL}/best/step-00000020/weights.safetensors", b"torn")
    second = remote_run_folder(URL, tmp_path / "b")  # that it evaluates is decided later
    second.create()
    with second:
        newest = load_latest(second.checkpoints, second.best, "r")
        assert newest is not None
        assert newest.step == (10 if damaged else 20)
        assert list(list_checkpoints(second.checkpoints)) == [10]


def kill_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """From its N-th change of the store on, the process is dead. Returns how many changes there were."""
    count = itertools.count(1)
    seen = [0]

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


def test_after_a_kill_at_any_change_the_last_committed_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the disk here does not matter
    for number in itertools.count(1):
        for name in storage.names_below(URL):
            storage.remove(f"{URL}/{name}")
        done = 0
        with monkeypatch.context() as patch:
            changes = kill_at(number, patch)
            try:
                with machine(tmp_path / f"a{number}") as first:
                    for step in range(0, 40, 10):
                        save(first, step)
                        done = step
            except Killed:
                pass
            else:
                assert changes() < number > 30
                return
        take_over()
        with machine(tmp_path / f"b{number}") as second:
            newest = load_latest(second.checkpoints)
            if newest is None:
                assert done == 0
                continue
            assert newest.step >= done
            assert newest.weights["w"][0] == newest.step
            assert second.metrics.read_text().count("\n") * 10 > newest.step
            assert [read_checkpoint(path).weights["w"][0] for path in list_checkpoints(second.best).values()] != []
            save(second, newest.step + 10)
            assert 1 <= len([name for name in committed() if name.startswith("checkpoints")]) <= KEEP
        folders = {name.rpartition("/")[0] for name in storage.names_below(URL) if "/step-" in name}
        assert folders == set(committed())  # nothing that was cut off stays


def test_the_state_of_a_step_that_is_saved_again_is_replaced_in_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[str] = []
    with machine(tmp_path / "a") as directory:
        save(directory, 10)
        real = storage.write_bytes
        write_checkpoint(directory.checkpoints, checkpoint(10, evaluated=True))
        with monkeypatch.context() as patch:
            patch.setattr(storage, "write_bytes", lambda url, data: (changed.append(url), real(url, data)))
            patch.setattr(storage, "upload", pytest.fail)
            patch.setattr(storage, "remove", pytest.fail)
            directory.push(KEEP)
    assert f"{URL}/checkpoints/step-00000010/state.json" in changed
    state = json.loads(storage.read_bytes(f"{URL}/checkpoints/step-00000010/state.json"))
    assert state["memory"] == {"evaluated": True}


def test_what_the_remote_side_does_not_have_is_dropped_here(tmp_path: Path) -> None:
    with machine(tmp_path / "a") as first:
        save(first, 10)
        kept = (first.checkpoints / folder_name(10) / "weights.safetensors").stat().st_mtime_ns
        write_checkpoint(first.checkpoints, checkpoint(500))  # never uploaded: the machine lost its network
        (first.events / "train").mkdir(parents=True)
        (first.events / "train" / "events.out.tfevents.1").write_bytes(b"1")
        assert first.mirror is not None
        first.mirror.push = lambda *_, **__: None  # type: ignore[method-assign]
    with machine(tmp_path / "a") as again:
        assert list(list_checkpoints(again.checkpoints)) == [10]
        assert (again.checkpoints / folder_name(10) / "weights.safetensors").stat().st_mtime_ns == kept
        assert not again.events.exists()
    shutil.rmtree(tmp_path / "a")
    for name in storage.names_below(URL):
        storage.remove(f"{URL}/{name}")
    with machine(tmp_path / "b") as empty:
        assert not empty.exists()


def test_logs_of_living_processes_that_work_in_the_same_folder_stay(tmp_path: Path) -> None:
    with machine(tmp_path / "a") as first:
        save(first, 10)
        for name in ("launch", "worker-1"):
            (first.logs / f"{name}.log").write_text("an earlier start\n")
    folder = first.logs
    with hold_pid_file(folder / "launch.pid"):
        with open(folder / "launch.log", "a") as log:
            log.write("launching\n")
        (folder / "worker-1.log").write_text("of nobody who lives\n")
        with machine(tmp_path / "a") as again:
            assert [holder.name for holder in holders(folder)] == ["launch"]
            assert (folder / "launch.log").read_text() == "an earlier start\nlaunching\n"
            assert (folder / "worker-1.log").read_text() == "an earlier start\n"
            again.push()
    assert storage.read_bytes(f"{URL}/runlogs/launch.log") == b"an earlier start\nlaunching\n"


def test_a_copy_here_that_was_damaged_is_fetched_again(tmp_path: Path) -> None:
    with machine(tmp_path / "a") as first:
        save(first, 10)
    (first.checkpoints / folder_name(10) / "weights.safetensors").write_bytes(b"damaged")
    with machine(tmp_path / "a") as again:
        assert read_checkpoint(again.checkpoints / folder_name(10)).step == 10


@pytest.mark.parametrize("damage", ["flip", "missing", "state"])
def test_a_damaged_checkpoint_is_skipped_and_set_aside(tmp_path: Path, damage: str) -> None:
    with machine(tmp_path / "a") as first:
        for step in (10, 30):
            save(first, step)
    newest = f"{URL}/checkpoints/{folder_name(30)}"
    if damage == "missing":
        storage.remove(f"{newest}/optimizer.safetensors")
    else:
        storage.write_bytes(f"{newest}/{'state.json' if damage == 'state' else 'weights.safetensors'}", b"?")
    with machine(tmp_path / "b") as second:
        assert list(list_checkpoints(second.checkpoints)) == [10]
    assert committed() == ["checkpoints/step-00000010"]
    assert storage.exists(f"{newest}/damaged-state.json")
    storage.write_bytes(f"{URL}/checkpoints/{folder_name(10)}/weights.safetensors", b"?")
    for again in ("c", "c", "d"):  # at every start: a second one must not begin at step 0
        with pytest.raises(CheckpointError, match=f"all checkpoints in {URL}/checkpoints are damaged"):
            machine(tmp_path / again).lock()
        assert not storage.exists(f"{URL}/.lock")


def test_a_run_that_has_no_checkpoint_yet_starts(tmp_path: Path) -> None:
    with machine(tmp_path / "a") as first:
        save(first, 20)
    for name in storage.names_below(URL):
        if name.startswith("checkpoints/"):
            storage.remove(f"{URL}/{name}")
    # A best model is nothing to go on from.
    storage.write_bytes(f"{URL}/best/{folder_name(20)}/weights.safetensors", b"?")
    for again in ("b", "c"):
        with machine(tmp_path / again) as second:
            assert load_latest(second.checkpoints) is None


def test_a_checkpoint_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    with machine(tmp_path / "a") as first:
        save(first, 10)
    state = f"{URL}/checkpoints/{folder_name(10)}/state.json"
    newer = json.loads(storage.read_bytes(state)) | {"format_version": 99}
    storage.write_bytes(state, json.dumps(newer | {CHECKSUM: json_checksum(newer)}).encode())
    before = storage.names_below(URL)
    with pytest.raises(CheckpointError, match="Install a newer"):
        machine(tmp_path / "b").lock()
    assert storage.names_below(URL) == before


@pytest.mark.parametrize("file", ["state.json", "weights.safetensors"])
def test_a_local_disk_error_does_not_make_the_checkpoint_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    with machine(tmp_path / "a") as first:
        save(first, 10)
    before = storage.names_below(URL)
    with monkeypatch.context() as patch:
        broken(patch, file)
        for place in ("a", "b"):
            with pytest.raises(UserError, match=rf"{file}.*Input/output error"):
                machine(tmp_path / place).lock()
    assert storage.names_below(URL) == before
    with machine(tmp_path / "b") as second:
        assert list(list_checkpoints(second.checkpoints)) == [10]


def broken(patch: pytest.MonkeyPatch, file: str) -> None:
    """A local file of that name can't be read, once it is where it belongs."""
    real, real_handle = io.open, os.open

    def refuse(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if "r" in mode and str(path).endswith(f"{folder_name(10)}/{file}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, mode, *arguments, **named)

    def refuse_handle(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if not flags & (os.O_WRONLY | os.O_RDWR) and str(path).endswith(f"{folder_name(10)}/{file}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real_handle(path, flags, *arguments, **named)

    patch.setattr(io, "open", refuse)  # for pathlib
    patch.setattr(builtins, "open", refuse)
    patch.setattr(os, "open", refuse_handle)
    patch.setattr(files, "PAUSES", (0.0, 0.0, 0.0))


def test_a_local_folder_that_vanishes_does_not_make_the_checkpoint_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine(tmp_path / "a") as first:
        save(first, 10)
    before = storage.names_below(URL)
    system, _ = storage._file_system(URL)

    def lost(_: str, local: str, **__: Any) -> None:
        shutil.rmtree(Path(local).parent)  # the user empties the cache
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), local)

    with monkeypatch.context() as patch:
        patch.setattr(system, "get_file", lost)
        with pytest.raises(StorageError, match="its folder was removed"):
            machine(tmp_path / "b").lock()
    assert storage.names_below(URL) == before


def test_storage_that_fails_for_a_while_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("can't write there.")

    with machine(tmp_path / "a") as directory:
        save(directory, 10)
        with monkeypatch.context() as patch:
            patch.setattr(storage, "upload", fail)
            save(directory, 30)
            save(directory, 50)
        assert committed() == ["checkpoints/step-00000010"]
        assert "can't write there. The next checkpoint uploads what is missing." in caplog.text
        save(directory, 70)
        assert committed() == [f"checkpoints/{folder_name(step)}" for step in (50, 70)]
        write_checkpoint(directory.checkpoints, checkpoint(90))
        monkeypatch.setattr(storage, "upload", fail)
        with pytest.raises(StorageError, match="can't write there"):  # there is no next time
            directory.unlock()


def test_a_last_upload_that_fails_does_not_lock_the_process_out_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("can't write there.")

    directory = machine(tmp_path / "a")
    directory.lock()
    save(directory, 10)
    write_checkpoint(directory.checkpoints, checkpoint(30))
    with monkeypatch.context() as patch:
        for name in ("upload", "write_bytes", "replace_version", "remove", "remove_version"):
            patch.setattr(storage, name, fail)
        with pytest.raises(StorageError, match="can't write there"):
            directory.unlock()
    assert storage.exists(f"{URL}/.lock")  # nothing can be removed while nothing can be reached
    with machine(tmp_path / "a") as again:
        assert list(list_checkpoints(again.checkpoints)) == [10]
        write_checkpoint(again.checkpoints, checkpoint(30))
        monkeypatch.setattr(storage, "upload", fail)
        with pytest.raises(StorageError, match="can't write there"):
            again.unlock()
        assert not storage.exists(f"{URL}/.lock")


@pytest.mark.parametrize(
    ("under_way", "raised"),
    [(Interrupted(15, 10, URL), StorageError), (ValueError("of the user"), ValueError)],
    ids=["interrupted", "failed"],
)
def test_a_failed_last_upload_is_reported_but_hides_no_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    under_way: BaseException,
    raised: type[BaseException],
) -> None:
    def leave(directory: RunDirectory) -> None:
        with directory:
            save(directory, 10)
            write_checkpoint(directory.checkpoints, checkpoint(20))
            monkeypatch.setattr(storage, "upload", lambda *_, **__: storage.read_bytes("memory://nothing"))
            raise under_way

    with pytest.raises(raised) as caught:
        leave(machine(tmp_path / "a"))
    assert "memory://nothing" in (caplog.text if raised is ValueError else str(caught.value))


def test_names_that_would_lead_out_of_the_folder_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(tmp_path / "a") as first:
        save(first, 10)
    names = [
        *storage.names_below(URL),
        "events/../../../../out",
        "events//out",
        "checkpoints/../step-00000099/state.json",
    ]
    monkeypatch.setattr(storage, "names_below", lambda _: names)
    with machine(tmp_path / "b") as second:
        assert list(list_checkpoints(second.checkpoints)) == [10]
    assert not (tmp_path / "out").exists()


def test_the_journal_keeps_what_others_add(tmp_path: Path) -> None:
    journal = f"memory://bucket/runs/{JOURNAL}"
    with machine(tmp_path / "a") as directory:
        save(directory, 10)
        log_result(directory.journal, "one", {"step": 10})
        directory.push()
        storage.write_bytes(journal, storage.read_bytes(journal) + b"\nA note of mine.\n")
        log_result(directory.journal, "one", {"step": 20})
    text = storage.read_bytes(journal).decode()
    assert text.count("# Training log") == 1
    assert text.index("- step: 10") < text.index("A note of mine.") < text.index("- step: 20")
    assert text.count("**Results of one**") == 2


def test_opening_a_run_downloads_no_weights_and_takes_no_lock(tmp_path: Path) -> None:
    with machine(tmp_path / "a") as writer:
        save(writer, 20)
        before = storage.names_below(URL)
        for seen in (open_run_folder(URL), *find_runs("memory://bucket/runs")):
            assert seen.address == URL
            assert is_running(seen)
            assert list(list_checkpoints(seen.checkpoints)) == [20]
            path = seen.checkpoints / folder_name(20)
            assert [file.name for file in path.iterdir()] == ["state.json"]
            seen.download_weights(path)
            assert read_checkpoint(path).step == 20
        assert storage.names_below(URL) == before
    assert not is_running(open_run_folder(URL))
    with pytest.raises(RunError, match=r"memory://bucket/none is not a run folder"):
        open_run_folder("memory://bucket/none")


def test_views_of_killed_processes_are_removed_after_days(tmp_path: Path) -> None:
    with machine(tmp_path / "a") as writer:
        save(writer, 20)
    views = tmp_path / "looking" / "views"
    for name, days in (("killed", 8), ("living", 6)):
        (views / name / "one").mkdir(parents=True)
        os.utime(views / name, (time.time() - days * storage.DAY,) * 2)
    seen = open_run_folder(URL)
    assert {path.name for path in views.iterdir()} == {"living", seen.path.parent.name}


def test_one_machine_holds_a_remote_run_once(tmp_path: Path) -> None:
    with machine(tmp_path / "a"), pytest.raises(RunError, match=f"{URL} is in use by process"):
        machine(tmp_path / "a").lock()


def test_a_damaged_remote_config_is_restored_from_the_newest_checkpoint(tmp_path: Path) -> None:
    with machine(tmp_path / "a") as first:
        write_config(first, load_config(model="mlp", train_steps=60))
        write_checkpoint(first.checkpoints, checkpoint(10, config=recorded_options(load_config(model="mlp"))))
        first.push(KEEP)
        with pytest.raises(RunError, match="is in use"):
            restore_config(find_run_folder(URL))
    whole = storage.read_bytes(f"{URL}/config.yaml")
    storage.write_bytes(f"{URL}/config.yaml", whole[: whole.index(b"optimizer:")])
    with pytest.raises(ConfigError, match=f"modelyard resume {URL} --restore_config"):
        run_options(open_run_folder(URL))
    restore_config(find_run_folder(URL))
    assert run_options(open_run_folder(URL))["optimizer"] == "adam"
    assert whole.startswith(storage.read_bytes(f"{URL}/damaged-config.yaml"))
