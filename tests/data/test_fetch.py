"""Official files from a real server on this machine: whole and right, or not there."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.server
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelyard.config import load_config
from modelyard.data.open_dataset import load_dataset
from modelyard.data.sources.fetch import SOURCES, Source, fetch
from modelyard.errors import DataError, RunError
from modelyard.storage import DAY

CONTENT = np.random.default_rng(0).bytes(1_000_000)
ARCHIVE = "cifar-10-python.tar.gz"
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files`` and keeps what it was asked; ``cut_at`` ends each answer after so many bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {f"/{ARCHIVE}": CONTENT}
        self.ranges: list[str | None] = []
        self.served = 0
        self.cut_at: int | None = None
        self.knows_ranges = True
        self.says_length = True
        self.redirect: str | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def sources(self, **changes: Any) -> dict[str, tuple[Source, ...]]:
        return {"cifar10": (replace(Source(f"{self.address}/{ARCHIVE}", len(CONTENT), MD5), **changes),)}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.ranges.append(self.headers.get("Range"))
        if self.server.redirect:
            self.send_response(302)
            self.send_header("Location", self.server.redirect)
            self.end_headers()
            return
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if self.server.knows_ranges and self.headers.get("Range"):
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if self.server.says_length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:][: self.server.cut_at]
        self.server.served += len(body)
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_download_is_whole_and_tells_how_far_it_is(server: Server, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    paths = fetch("cifar10", tmp_path, progress=lambda *now: told.append(now), sources=server.sources())
    assert paths == [tmp_path / "cifar10" / ARCHIVE]
    assert paths[0].read_bytes() == CONTENT
    assert names(tmp_path / "cifar10") == [ARCHIVE]
    assert told[0] == (ARCHIVE, 0, len(CONTENT))
    assert told[-1] == (ARCHIVE, len(CONTENT), len(CONTENT))
    assert [now[1] for now in told] == sorted(now[1] for now in told)


def test_what_a_killed_copy_left_is_removed_when_it_is_old(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for name, age in ((".partial-left0000", 2 * DAY), (".partial-writing0", 60)):
        (folder / name).write_bytes(b"1")
        os.utime(folder / name, (time.time() - age,) * 2)
    fetch("cifar10", tmp_path, sources=server.sources())
    assert names(folder) == [".partial-writing0", ARCHIVE]


def test_a_broken_download_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.cut_at = 600_000
    with pytest.raises(DataError, match=r"broke off after 600,000 of 1,000,000 bytes.*Run it again"):
        fetch("cifar10", tmp_path, sources=server.sources())
    part = tmp_path / "cifar10" / f"{ARCHIVE}.part"
    assert part.read_bytes() == CONTENT[:600_000]
    assert names(tmp_path / "cifar10") == [part.name]
    server.cut_at = None
    (path,) = fetch("cifar10", tmp_path, sources=server.sources())
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == [ARCHIVE]
    assert server.ranges == [None, "bytes=600000-"]
    assert server.served == len(CONTENT)


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / f"{ARCHIVE}.part").write_bytes(CONTENT[:600_000])
    server.knows_ranges = False
    (path,) = fetch("cifar10", tmp_path, sources=server.sources())
    assert server.ranges == ["bytes=600000-"]
    assert path.read_bytes() == CONTENT


def test_a_server_that_does_not_say_the_length_is_no_less_checked(server: Server, tmp_path: Path) -> None:
    server.says_length, server.cut_at = False, 10
    with pytest.raises(DataError, match="broke off after 10 of"):
        fetch("cifar10", tmp_path, sources=server.sources())
    server.cut_at = None
    assert fetch("cifar10", tmp_path, sources=server.sources())[0].read_bytes() == CONTENT
    server.files[f"/{ARCHIVE}"] = CONTENT + b"more than that"
    (path,) = fetch("cifar10", tmp_path / "endless", sources=server.sources())
    assert path.read_bytes() == CONTENT  # no more is taken than belongs to the file


@pytest.mark.parametrize("left", [CONTENT, CONTENT[::-1], CONTENT + b"x"])
def test_a_part_as_long_as_the_file_is_taken_only_if_it_is_the_file(
    server: Server, tmp_path: Path, left: bytes
) -> None:
    """A process may have been killed just before the file got its name."""
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / f"{ARCHIVE}.part").write_bytes(left)
    (path,) = fetch("cifar10", tmp_path, sources=server.sources())
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == [ARCHIVE]
    assert server.ranges == ([] if left == CONTENT else [None])


def test_a_wrong_checksum_is_named_and_the_bad_file_removed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / ARCHIVE).write_bytes(b"what was there")
    (tmp_path / "cifar10" / "notes.txt").write_text("mine")
    bad = CONTENT[:500_000] + b"!" + CONTENT[500_001:]
    server.files[f"/{ARCHIVE}"] = bad
    with pytest.raises(DataError) as caught:
        fetch("cifar10", tmp_path, sources=server.sources())
    assert f"{ARCHIVE} is not the official file" in str(caught.value)
    assert f"its MD5 is {hashlib.md5(bad).hexdigest()}, expected {MD5}" in str(caught.value)
    assert names(tmp_path / "cifar10") == [ARCHIVE, "notes.txt"]
    assert (tmp_path / "cifar10" / ARCHIVE).read_bytes() == b"what was there"


def test_a_damaged_file_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / ARCHIVE).write_bytes(CONTENT[:-1] + b"!")
    (path,) = fetch("cifar10", tmp_path, sources=server.sources())
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("place", ["cifar10", "."])
def test_a_file_that_is_there_is_not_downloaded_again(server: Server, tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / ARCHIVE).write_bytes(CONTENT)
    assert fetch("cifar10", tmp_path, sources=server.sources()) == [tmp_path / place / ARCHIVE]
    assert server.ranges == []


def test_a_page_instead_of_the_file_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.files[f"/{ARCHIVE}"] = b"<html>please log in</html>"
    with pytest.raises(DataError, match=r"offers 26 bytes, not 1,000,000"):
        fetch("cifar10", tmp_path, sources=server.sources())
    assert names(tmp_path / "cifar10") == []


def test_what_can_not_be_reached_is_said_with_its_address(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/gone.tar.gz can't be downloaded: the server answered 404.*local copy"):
        fetch("cifar10", tmp_path, sources=server.sources(url=f"{server.address}/gone.tar.gz"))
    with pytest.raises(DataError, match=r"can't be downloaded: .*refused"):
        fetch("cifar10", tmp_path, sources=server.sources(url="http://127.0.0.1:1/x.tar.gz"))
    assert names(tmp_path / "cifar10") == []


def test_a_server_that_falls_silent_is_given_up(server: Server, tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/{ARCHIVE}"
        with pytest.raises(DataError, match="timed out"):
            fetch("cifar10", tmp_path, sources=server.sources(url=address), timeout=0.1)


def test_only_the_web_is_fetched_from(server: Server, tmp_path: Path) -> None:
    secret = tmp_path / ARCHIVE
    secret.write_bytes(CONTENT)
    with pytest.raises(DataError, match="only http and https"):
        fetch("cifar10", tmp_path / "data", sources=server.sources(url=secret.as_uri()))
    for address, why in ((secret.as_uri(), "302"), ("ftp://127.0.0.1:1/x.tar.gz", "unknown url type: ftp")):
        server.redirect = address
        with pytest.raises(DataError, match=f"can't be downloaded.*{why}"):
            fetch("cifar10", tmp_path / "data", sources=server.sources())
    assert names(tmp_path / "data" / "cifar10") == []


def test_a_full_disk_is_said_in_a_sentence(server: Server, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / f"{ARCHIVE}.part").symlink_to("/dev/full")
    with pytest.raises(RunError, match="the disk is full"):
        fetch("cifar10", tmp_path, sources=server.sources())


def test_a_folder_that_can_not_be_written_is_said_in_a_sentence(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"can't .*file/cifar10"):
        fetch("cifar10", tmp_path / "file", sources=server.sources())
    if os.geteuid() != 0:
        (tmp_path / "cifar10").mkdir(mode=0o500)
        with pytest.raises(RunError, match=r"Permission denied. Name a folder you may write to"):
            fetch("cifar10", tmp_path, sources=server.sources())


def test_two_downloads_of_one_file_do_not_mix(server: Server, tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    with open(tmp_path / "cifar10" / f"{ARCHIVE}.part", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is downloading"):
            fetch("cifar10", tmp_path, sources=server.sources())
    assert server.ranges == []


# -- from a local copy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["copy/renamed.tgz", "folder", "all"])
def test_a_local_copy_is_checked_and_copied(server: Server, tmp_path: Path, given: str) -> None:
    for place in ("copy/renamed.tgz", f"folder/{ARCHIVE}", f"all/cifar10/{ARCHIVE}"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_bytes(CONTENT)
    (path,) = fetch("cifar10", tmp_path / "data", tmp_path / given, sources=server.sources())
    assert path == tmp_path / "data" / "cifar10" / ARCHIVE
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == [ARCHIVE]
    assert path.stat().st_mode & 0o777 == 0o644
    assert server.ranges == []


@pytest.mark.parametrize("bad", [CONTENT[:-1] + b"!", CONTENT[:-1], CONTENT + b"x"])
def test_a_local_copy_that_is_not_the_file_is_refused(server: Server, tmp_path: Path, bad: bytes) -> None:
    copy = tmp_path / "copy.tar.gz"
    copy.write_bytes(bad)
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / ARCHIVE).write_bytes(b"what was there")
    with pytest.raises(DataError, match=r"copy.tar.gz is not the official"):
        fetch("cifar10", tmp_path, copy, sources=server.sources())
    assert copy.read_bytes() == bad
    assert names(tmp_path / "cifar10") == [ARCHIVE]
    assert (tmp_path / "cifar10" / ARCHIVE).read_bytes() == b"what was there"


def idx(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return gzip.compress(header + values.tobytes())


def test_all_files_of_a_local_copy_or_none(server: Server, tmp_path: Path) -> None:
    """MNIST is four files; what was fetched is what the dataset reads."""
    labels = np.arange(20, dtype=np.uint8) % 10
    files = {s.file: idx(np.zeros((20, 28, 28), np.uint8) if "images" in s.file else labels) for s in SOURCES["mnist"]}
    sources = {
        "mnist": tuple(Source(f"{server.address}/{f}", len(c), hashlib.md5(c).hexdigest()) for f, c in files.items())
    }
    folder = tmp_path / "copy"
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    last = folder / "t10k-labels-idx1-ubyte.gz"
    with pytest.raises(DataError, match=r"mnist needs train-labels-idx1-ubyte.gz, t10k-images.* too"):
        fetch("mnist", tmp_path / "data", folder / "train-images-idx3-ubyte.gz", sources=sources)
    last.rename(tmp_path / "aside")
    with pytest.raises(DataError, match=r"mnist needs t10k-labels-idx1-ubyte.gz too"):
        fetch("mnist", tmp_path / "data", folder, sources=sources)
    assert not (tmp_path / "data").exists()
    (tmp_path / "aside").rename(last)
    assert len(fetch("mnist", tmp_path / "data", folder, sources=sources)) == 4
    made = load_dataset(load_config(model="mlp", dataset="mnist", data_dir=str(tmp_path / "data")))
    assert made.size("test") == 20
    server.files = {f"/{file}": content for file, content in files.items()}
    assert len(fetch("mnist", tmp_path / "web", sources=sources)) == 4
    assert names(tmp_path / "web" / "mnist") == names(tmp_path / "data" / "mnist")


def test_a_local_copy_that_is_not_there_is_said(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        fetch("cifar10", tmp_path, tmp_path / "nowhere", sources=server.sources())


def test_an_unknown_name_is_answered_with_near_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Did you mean 'cifar10'"):
        fetch("cifar1", tmp_path)


def test_every_official_file_is_one_that_the_dataset_looks_for(tmp_path: Path) -> None:
    for name, sources in SOURCES.items():
        with pytest.raises(DataError, match=f"`modelyard data fetch {name}` downloads it") as caught:
            load_dataset(load_config(model="mlp", dataset=name, data_dir=str(tmp_path)))
        assert sources[0].file in str(caught.value)
        assert all(len(source.md5) == 32 and source.url.startswith("http") for source in sources)
