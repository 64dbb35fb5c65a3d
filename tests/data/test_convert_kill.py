"""A killed conversion is resumed: real processes, killed by SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import environment
from waiting import PATIENCE, wait_until

SCRIPT = """
import pathlib, sys
from modelyard.data.records.convert import convert_examples
from modelyard.data.raw_examples import FileExamples

def convert(source, to, processes, shards):
    names = sorted(path.name for path in source.iterdir())
    items = FileExamples(source, names, [n % 2 for n in range(len(names))])
    return convert_examples({"train": items}, ["a", "b"], to, encoding="jpeg", shards=shards, processes=processes)

if __name__ == "__main__":
    print(convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])).kept_shards)
"""

EVERYWHERE = """
import os, pathlib, signal, sys
from script import convert

source, to = map(pathlib.Path, sys.argv[1:])
count, deadly_at = 0, None

def counted(function):
    def call(*args, **kwargs):
        global count
        count += 1
        if count == deadly_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

os.fsync = counted(os.fsync)
pathlib.Path.replace = counted(pathlib.Path.replace)
pathlib.Path.unlink = counted(pathlib.Path.unlink)
convert(source, to / "undisturbed", 1, 2)
operations = count
for at in range(1, operations + 1):
    child = os.fork()
    if child == 0:
        count, deadly_at = 0, at
        convert(source, to / str(at), 1, 2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), (at, status)
    convert(source, to / str(at), 1, 2)
print(operations)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    draws = np.random.default_rng(0)
    for number in range(60):
        pixels = draws.integers(0, 256, (220, 220, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png", compress_level=1)
    return folder


def start(script: str, *words: object, folder: Path) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "everywhere.py").write_text(EVERYWHERE)
    command = [sys.executable, str(folder / script), *map(str, words)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> int:
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return int(out)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def marks(folder: Path, names: list[str]) -> list[tuple[int, int]]:
    return [((folder / name).stat().st_ino, (folder / name).stat().st_mtime_ns) for name in names]


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc")
def test_killed_with_all_processes_at_work_it_ends_with_the_same_bytes(source: Path, tmp_path: Path) -> None:
    to, shards = tmp_path / "killed", 12
    process = start("script.py", source, to, 2, shards, folder=tmp_path)
    wait_until(lambda: list(to.glob(".train-*.json")), "a shard", process)
    workers = children(process.pid)
    process.kill()
    process.wait()
    assert len(workers) >= 2
    try:
        wait_until(lambda: not any(map(alive, workers)))  # nobody goes on writing behind our back
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)
        process.communicate()
    done = [path.name.removeprefix(".").removesuffix(".json") for path in to.glob(".train-*.json")]
    assert 0 < len(done) < shards
    assert not (to / "dataset.json").exists()
    before = marks(to, done)
    assert finish(start("script.py", source, to, 2, shards, folder=tmp_path)) == len(done)
    assert marks(to, done) == before
    assert finish(start("script.py", source, tmp_path / "undisturbed", 1, shards, folder=tmp_path)) == 0
    assert contents(to) == contents(tmp_path / "undisturbed")


def test_killed_inside_any_operation_on_files_it_ends_with_the_same_bytes(source: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for path in sorted(source.iterdir())[:4]:
        os.link(path, few / path.name)
    operations = finish(start("everywhere.py", few, tmp_path / "made", folder=tmp_path))
    assert operations > 20
    for at in range(1, operations + 1):
        assert contents(tmp_path / "made" / str(at)) == contents(tmp_path / "made" / "undisturbed"), at
