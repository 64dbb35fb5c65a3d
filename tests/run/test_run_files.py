"""Every write is complete or absent."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelyard.errors import RunError
from modelyard.system.files import PARTIAL, explain, remove_folder, remove_partial, whole_folder, write_text


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def fill(target: Path, text: str) -> None:
    with whole_folder(target) as partial:
        (partial / "one").write_text(text)
        (partial / "two").write_text(text)


def fill_in_part(target: Path) -> None:
    with whole_folder(target) as partial:
        (partial / "one").write_text("new")
        raise KeyError


def test_a_folder_is_not_there_until_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with whole_folder(target) as partial:
        (partial / "one").write_text("1")
        assert not target.exists()
        assert partial.name.startswith(PARTIAL)
    assert content(tmp_path) == {"deep/target/one": "1"}
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        fill_in_part(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_an_old_folder_is_replaced_whole(tmp_path: Path) -> None:
    fill(tmp_path / "target", "old")
    (tmp_path / "target" / "three").write_text("only in the old one")
    fill(tmp_path / "target", "new")
    assert content(tmp_path) == {"target/one": "new", "target/two": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_an_old_folder_stays_when_the_new_one_fails(tmp_path: Path) -> None:
    fill(tmp_path / "target", "old")
    with pytest.raises(KeyError):
        fill_in_part(tmp_path / "target")
    assert content(tmp_path) == {"target/one": "old", "target/two": "old"}


@pytest.mark.parametrize("failing", [1, 2])
def test_an_old_folder_stays_when_a_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    fill(tmp_path / "target", "old")
    replace, renames = Path.replace, []

    def fails_once(self: Path, other: Path) -> Path:
        renames.append(other)
        if len(renames) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, other)

    monkeypatch.setattr(Path, "replace", fails_once)
    with pytest.raises(RunError, match=r"the disk is full: .* Existing files are unchanged"):
        fill(tmp_path / "target", "new")
    assert content(tmp_path / "target") == {"one": "old", "two": "old"}
    remove_partial(tmp_path)
    assert content(tmp_path) == {"target/one": "old", "target/two": "old"}


def kill_at(tmp_path: Path, line: str) -> None:
    """Writes target in a process that is killed, with SIGKILL, when it comes to ``line`` of the program."""
    program = f"""
import os, pathlib, shutil, signal, sys
from modelyard.system import files

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

rename = pathlib.Path.replace
renames = []

def replace(self, other):
    renames.append(other)
    if {line!r} == f"rename {{len(renames)}}":
        die()
    return rename(self, other)

pathlib.Path.replace = replace
if {line!r} == "clean up":
    shutil.rmtree = die
with files.whole_folder(pathlib.Path({str(tmp_path / "target")!r})) as partial:
    for name in ("one", "two"):
        (partial / name).write_text("new")
        if {line!r} == "in the middle":
            die()
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("line", "kept"), [("in the middle", "old"), ("rename 1", "old"), ("rename 2", "old"), ("clean up", "new")]
)
def test_a_kill_at_any_point_leaves_the_old_folder_or_the_new_one(tmp_path: Path, line: str, kept: str) -> None:
    fill(tmp_path / "target", "old")
    kill_at(tmp_path, line)
    assert (tmp_path / "target").exists() == (line != "rename 2")
    remove_partial(tmp_path)
    assert content(tmp_path) == {"target/one": kept, "target/two": kept}
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_folder_moved_aside_is_restored_only_if_no_new_one_exists(tmp_path: Path) -> None:
    aside = tmp_path / f"{PARTIAL}old-abc"
    (aside / "target").mkdir(parents=True)
    (aside / "target" / "one").write_text("old")
    fill(tmp_path / "target", "new")
    remove_partial(tmp_path)
    assert content(tmp_path) == {"target/one": "new", "target/two": "new"}


def test_cleaning_up_leaves_everything_else(tmp_path: Path) -> None:
    (tmp_path / f"{PARTIAL}file").write_text("torn")
    (tmp_path / f"{PARTIAL}folder").mkdir()
    (tmp_path / "mine").write_text("kept")
    remove_partial(tmp_path)
    remove_partial(tmp_path / "nowhere")
    assert content(tmp_path) == {"mine": "kept"}


def test_a_folder_is_removed_whole(tmp_path: Path) -> None:
    fill(tmp_path / "target", "x")
    remove_folder(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "text"
    write_text(path, "öld")
    write_text(path, "nëw")
    assert path.read_text(encoding="utf-8") == "nëw"
    assert [p.name for p in tmp_path.iterdir()] == ["text"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_text_that_could_not_be_written_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    write_text(path, "old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="the disk is full"):
        write_text(path, "new")
    assert content(tmp_path) == {"text": "old"}


def test_a_reader_never_sees_half_a_text(tmp_path: Path) -> None:
    """A process writes two texts in turn until it is killed; whoever reads meanwhile sees one of them, whole."""
    path = tmp_path / "text"
    program = (
        "import pathlib\nfrom modelyard.system.files import write_text\n"
        f"path, texts = pathlib.Path({str(path)!r}), ['a' * 500_000, 'b' * 500_000]\n"
        "while True:\n    for text in texts:\n        write_text(path, text)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program])
    seen: set[str] = set()
    try:
        deadline = time.monotonic() + 20
        while (not path.exists() or len(seen) < 2) and time.monotonic() < deadline:
            if path.exists():
                seen.add(path.read_text())
    finally:
        writer.kill()
        writer.wait()
    seen.add(path.read_text())
    assert seen <= {"a" * 500_000, "b" * 500_000}
    remove_partial(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "Name a folder you may write to"), (errno.EIO, "can't write")],
)
def test_errors_of_the_file_system_are_explained(number: int, words: str) -> None:
    with pytest.raises(RunError, match=words), explain(Path("here"), "write"):
        raise OSError(number, os.strerror(number))
