"""The run folder: its name, its lock, its config."""

import errno
import os
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from modelyard.config import Config, load_config
from modelyard.errors import ConfigError, RunError
from modelyard.run.directory import (
    RunDirectory,
    differences,
    find_runs,
    is_running,
    new_run_path,
    open_run_folder,
    read_json,
    run_options,
    write_config,
)

NOW = datetime(2026, 11, 16, 9, 30)


def made(folder: Path, **options: Any) -> RunDirectory:
    directory = RunDirectory(folder)
    directory.create()
    write_config(directory, config(**options))
    return directory


def config(**options: Any) -> Config:
    return load_config(**{"model": "mlp", **options})


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"model": "resnet20", "dataset": "cifar10"}, "2026-11-16-09_30_00-resnet20-cifar10"),
        ({"dataset": "some/where/mine.npz"}, "2026-11-16-09_30_00-mlp-mine"),
        ({"run_name": "try-1"}, "2026-11-16-09_30_00-try-1"),
    ],
)
def test_a_new_run_is_named_by_time_model_and_dataset(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    assert new_run_path(config(runs_dir=str(tmp_path), **options), NOW) == tmp_path / name


def test_two_runs_in_the_same_second_have_two_folders(tmp_path: Path) -> None:
    mine = config(runs_dir=str(tmp_path))
    paths = []
    for _ in range(3):
        paths.append(new_run_path(mine, NOW))
    assert [path.name.removeprefix(paths[0].name) for path in paths] == ["", "-2", "-3"]


def test_model_dir_names_the_folder_itself(tmp_path: Path) -> None:
    assert new_run_path(config(model_dir=str(tmp_path / "here")), NOW) == tmp_path / "here"


@pytest.mark.parametrize("name", ["../up", "a/b", "a b", ".hidden", "-x", "a\nb"])
def test_a_run_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="run_name"):
        new_run_path(config(run_name=name), NOW)


# -- the lock -------------------------------------------------------------------------------------------------------


def test_one_writer(tmp_path: Path) -> None:
    with made(tmp_path):
        assert is_running(RunDirectory(tmp_path))
        with pytest.raises(RunError, match=rf"{tmp_path} is in use by process \d+ on "):
            RunDirectory(tmp_path).lock()
    assert not is_running(RunDirectory(tmp_path))
    with RunDirectory(tmp_path):
        pass


def test_a_killed_process_leaves_no_lock_behind(tmp_path: Path) -> None:
    made(tmp_path)
    program = (
        "import sys\nfrom pathlib import Path\nfrom modelyard.run.directory import RunDirectory\n"
        "directory = RunDirectory(Path(sys.argv[1]))\ndirectory.lock()\nprint('locked', flush=True)\nsys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(RunError, match=f"process {holder.pid}"):
            RunDirectory(tmp_path).lock()
    finally:
        holder.kill()
        holder.communicate()
    with RunDirectory(tmp_path):
        pass


def test_a_full_disk_is_explained_and_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", full)
        with pytest.raises(RunError, match="the disk is full"):
            RunDirectory(tmp_path).lock()
    with RunDirectory(tmp_path):
        pass


def test_the_new_writer_removes_what_a_killed_one_left_unfinished(tmp_path: Path) -> None:
    directory = made(tmp_path)
    for folder in (directory.path, directory.checkpoints):
        (folder / ".partial-abc").mkdir()
    with directory:
        assert not list(tmp_path.rglob(".partial-*"))


# -- the config -----------------------------------------------------------------------------------------------------


def test_the_options_of_a_run_are_those_of_its_config(tmp_path: Path) -> None:
    directory = made(tmp_path, hidden_units=[7], train_steps=5)
    options = run_options(directory)
    assert (options["hidden_units"], options["train_steps"], options["train_epochs"]) == ([7], 5, None)
    assert "config_version" not in options


def test_the_same_config_has_no_differences(tmp_path: Path) -> None:
    options = {"augment": "flip_left_right", "warmup": "0.1 epochs", "hidden_units": [7, 5], "learning_rate": 1e-5}
    directory = made(tmp_path, **options)
    assert differences(run_options(directory), config(**options, model_dir="elsewhere")) == []


def test_differences_say_what_may_change_and_what_may_not(tmp_path: Path) -> None:
    directory = made(tmp_path, train_epochs=3)
    other = config(train_epochs=5, learning_rate=0.5, optimizer="sgd", runs_dir="x")
    changed = differences(run_options(directory), other)
    free = {key: may for key, _, _, may in changed}
    assert free["train_epochs"]
    assert free["runs_dir"]
    assert not free["learning_rate"]
    assert not free["optimizer"]
    assert ("learning_rate", 0.001, 0.5, False) in changed


def test_an_option_that_is_newer_than_the_run_is_no_difference(tmp_path: Path) -> None:
    directory = made(tmp_path)
    options = run_options(directory)
    del options["sync_batch_norm"]
    assert differences(options, config()) == []
    assert differences(options, config(sync_batch_norm=False)) == [("sync_batch_norm", True, False, False)]


def test_a_run_is_opened_with_its_own_folder_of_best_models(tmp_path: Path) -> None:
    made(tmp_path / "one")
    made(tmp_path / "two", best_model_dir=str(tmp_path / "bests"))
    assert open_run_folder(tmp_path / "one").best == tmp_path / "one" / "best"
    assert open_run_folder(str(tmp_path / "two")).best == tmp_path / "bests"


def test_what_is_no_run_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no config\.yaml"):
        open_run_folder(tmp_path)
    with pytest.raises(RunError, match="does not exist"):
        open_run_folder(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text("config_version: [")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        open_run_folder(tmp_path)


def test_runs_are_found_by_name(tmp_path: Path) -> None:
    for name in ("b", "a"):
        made(tmp_path / name)
    (tmp_path / "no-run").mkdir()
    (tmp_path / "training_log.md").write_text("")
    assert [run.name for run in find_runs(tmp_path)] == ["a", "b"]
    assert find_runs(tmp_path / "nowhere") == []
    assert find_runs(tmp_path)[0].journal == tmp_path / "training_log.md"


@pytest.mark.parametrize("text", ["", "{", "[]", "5"])
def test_a_json_file_that_is_torn_is_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert read_json(tmp_path / "x.json") == {}
    assert read_json(tmp_path / "nothing.json") == {}


@pytest.mark.parametrize("left", ["saved_model.pb", "modelyard.json"])
def test_an_export_that_is_half_copied_is_not_called_a_strange_run(tmp_path: Path, left: str) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / left).write_bytes(b"")
    with pytest.raises(RunError, match=r"is not a run folder.*It looks like an export.*variables"):
        open_run_folder(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events/train/events.out.tfevents.1", "runlogs/chief.log", ".lock"])
@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_a_run_does_not_write_through_links(name: str, kind: str) -> None:
    """A stranger's run could append to the user's files, cut them, or wait for ever."""
    directory = RunDirectory(Path("run"))
    directory.create()
    (directory.path / name).parent.mkdir(parents=True, exist_ok=True)
    mine = Path("mine").absolute()
    if kind == "pipe":
        os.mkfifo(directory.path / name)
    else:
        (directory.path / name).symlink_to(mine)
    if kind == "link":
        mine.write_text("mine")
    with pytest.raises(RunError, match=rf"{name} is (a link to .*mine|no regular file), and a run writes"):
        directory.lock()
    assert not mine.exists() if kind != "link" else mine.read_text() == "mine"


def test_folders_of_a_run_that_are_links_are_refused_and_its_checkpoints_may_be_elsewhere() -> None:
    directory = RunDirectory(Path("run"))
    directory.create()
    for name in ("large-disk", "events-of-mine"):
        Path(name).mkdir()
    shutil.rmtree(directory.checkpoints, ignore_errors=True)
    directory.checkpoints.symlink_to(Path("large-disk").absolute())
    with directory:
        pass
    shutil.rmtree(directory.events, ignore_errors=True)
    directory.events.symlink_to(Path("events-of-mine").absolute())
    with pytest.raises(RunError, match=r"events is a link to .*events-of-mine"):
        directory.lock()


def test_a_run_is_found_by_its_name_beside_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made(Path("runs/first"))
    made(Path("others/second"))
    Path("first").mkdir()
    assert open_run_folder("first").path == Path("runs/first")
    assert open_run_folder("second", runs_dir="others").path == Path("others/second")
    made(Path("first"), random_seed=1)
    assert open_run_folder("first").path == Path("first")  # a path comes first
    Path("third").mkdir()
    with pytest.raises(RunError, match=r"third is not a run folder: it has no config\.yaml"):
        open_run_folder("third")
