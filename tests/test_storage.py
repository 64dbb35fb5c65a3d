"""Files at URLs: a real S3 server on loopback, read and written through s3fs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from google_store import google_store
from modelyard import storage
from modelyard.errors import DataError, RunError, StorageError
from object_store import BUCKET, object_store
from waiting import PATIENCE


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    with object_store() as environment:
        yield environment


@pytest.fixture
def url(store: dict[str, str], request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def cached(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("s3://b/x", True),
        ("gs://b/x", True),
        ("memory://x", True),
        ("/data/x", False),
        ("a:b//c", False),
        ("x", False),
        (Path("s3://b/x"), False),
    ],
)
def test_urls_and_paths_are_distinguished(path: str | Path, remote: bool) -> None:
    assert storage.is_remote(path) is remote


def test_urls_are_put_together_and_taken_apart() -> None:
    assert storage.join("s3://b/runs/", "x", "/y/z") == "s3://b/runs/x/y/z"
    assert storage.parent("s3://b/runs/x/") == "s3://b/runs"
    assert storage.parent("s3://b/runs") == "s3://b"
    assert storage.parent("s3://b") == "s3://b"


def test_the_cache_is_where_option_environment_or_home_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MODELYARD_CACHE", raising=False)
    assert storage.cache_folder() == tmp_path / "home/.cache/modelyard"
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "there"))
    assert storage.cache_folder() == tmp_path / "there"
    assert storage.cache_folder(str(tmp_path / "here")) == tmp_path / "here"


def test_a_local_path_is_its_own_copy(cache: Path) -> None:
    assert storage.local_copy("some/file.npz", cache) == Path("some/file.npz")
    assert not cache.exists()


def test_a_remote_file_is_downloaded_once(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write_bytes(f"{url}/train.npz", b"0123456789")
    seen: list[tuple[int, int]] = []
    path = storage.local_copy(f"{url}/train.npz", cache, lambda done, size: seen.append((done, size)))
    assert path.read_bytes() == b"0123456789"
    assert path.name == "train.npz"
    assert seen[-1] == (10, 10)
    monkeypatch.setattr(storage, "download", pytest.fail)
    assert storage.local_copy(f"{url}/train.npz", cache) == path


def test_a_changed_remote_file_is_downloaded_again(url: str, cache: Path) -> None:
    storage.write_bytes(f"{url}/a", b"first")
    before = storage.local_copy(f"{url}/a", cache)
    storage.write_bytes(f"{url}/a", b"other")  # as long as before
    assert storage.local_copy(f"{url}/a", cache).read_bytes() == b"other"
    assert before.read_bytes() == b"first"  # someone may be reading it


def test_files_of_one_name_in_two_places_are_not_mixed_up(url: str, cache: Path) -> None:
    storage.write_bytes(f"{url}/one/a", b"1")
    storage.write_bytes(f"{url}/two/a", b"2")
    assert [storage.local_copy(f"{url}/{place}/a", cache).read_bytes() for place in ("one", "two")] == [b"1", b"2"]


def test_a_download_that_breaks_off_leaves_nothing(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write_bytes(f"{url}/a", b"x" * 1000)
    system, _ = storage._file_system(url)

    def cut(remote: str, local: str, **_: object) -> None:
        Path(local).write_bytes(b"x" * 500)
        raise ConnectionResetError("connection reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(system, "get_file", cut)
        with pytest.raises(
            StorageError, match=r"can't read s3://.*/a: the storage can't be reached \(connection reset"
        ):
            storage.local_copy(f"{url}/a", cache)
    assert cached(cache) == []
    assert storage.local_copy(f"{url}/a", cache).read_bytes() == b"x" * 1000


def test_a_killed_download_is_not_taken_for_the_file(url: str, cache: Path, store: dict[str, str]) -> None:
    storage.write_bytes(f"{url}/a", b"x" * 1000)
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom modelyard import storage\n"
        "system, _ = storage._file_system(sys.argv[1])\n"
        "def cut(remote, local, **_):\n"
        "    Path(local).write_bytes(b'x' * 500)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "system.get_file = cut\n"
        "storage.local_copy(sys.argv[1], Path(sys.argv[2]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, f"{url}/a", str(cache)], timeout=PATIENCE, check=False)
    assert done.returncode == -9
    (left,) = cached(cache)
    path = storage.local_copy(f"{url}/a", cache)
    assert path.read_bytes() == b"x" * 1000
    assert set(cached(cache)) == {left, path}  # another process might be writing it
    long_ago(left)
    storage.local_copy(f"{url}/a", cache)
    assert cached(cache) == [path]


def long_ago(path: Path, seconds: float = storage.DAY + 1) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_only_old_unfinished_files_of_ours_are_removed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"1")
    for name in (".partial-abcd_123", ".partial-0ung0000", ".partial-of-theirs", "mine.partial-abcd_123", ".partial-"):
        (tmp_path / name).write_bytes(b"1")
    (tmp_path / ".partial-linked00").symlink_to(tmp_path / "target")
    (tmp_path / ".partial-folder00").mkdir()  # what is inside may be young
    for path in tmp_path.iterdir():
        if "0ung" not in path.name:
            long_ago(path)
    before = {path.name for path in tmp_path.iterdir()}
    storage.remove_stale(tmp_path)
    storage.remove_stale(tmp_path / "nowhere")
    assert before - {path.name for path in tmp_path.iterdir()} == {".partial-abcd_123"}


def test_a_file_that_changes_while_it_comes_is_read_again(
    url: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write_bytes(f"{url}/a", b"first")
    real = storage.download
    changes = iter([b"later", None])

    def download(source: str, local: Path, progress: storage.Progress | None = None) -> None:
        if new := next(changes):
            storage.write_bytes(source, new)
        real(source, local, progress)

    monkeypatch.setattr(storage, "download", download)
    assert storage.local_copy(f"{url}/a", cache).read_bytes() == b"later"
    assert [path.read_bytes() for path in cached(cache)] == [b"later"]
    assert list(changes) == []  # it was read twice


def test_many_at_once_get_the_same_whole_file(url: str, cache: Path) -> None:
    data = bytes(range(256)) * 4000
    storage.write_bytes(f"{url}/a", data)
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: storage.local_copy(f"{url}/a", cache), range(16)))
    assert set(paths) == set(cached(cache))
    assert paths[0].read_bytes() == data


def test_remote_and_local_files_are_listed_alike(url: str, tmp_path: Path) -> None:
    names = ["b/train-1", "b/train-2", "b/test-1", "a", "bb/train-3"]
    for name in names:
        storage.write_bytes(f"{url}/{name}", b"1")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    for top in (url, str(tmp_path)):
        assert storage.list_files(top) == [f"{top}/{name}" for name in sorted(names)]
        assert storage.list_files(f"{top}/b") == [f"{top}/b/{name}" for name in ("test-1", "train-1", "train-2")]
        assert storage.list_files(f"{top}/b/train-*") == [f"{top}/b/train-1", f"{top}/b/train-2"]
        assert storage.list_files(f"{top}/*/train-?") == [f"{top}/{n}" for n in names if "train" in n]
        assert storage.list_files(f"{top}/a") == [f"{top}/a"]
        assert storage.list_files(f"{top}/nothing") == []


def test_files_are_written_read_and_removed(url: str, tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"hello")
    storage.upload(tmp_path / "here", f"{url}/there")
    assert storage.exists(f"{url}/there")
    assert storage.exists(url)
    assert storage.read_bytes(f"{url}/there") == storage.read_bytes(str(tmp_path / "here")) == b"hello"
    storage.download(f"{url}/there", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"hello"
    storage.remove(f"{url}/there")
    storage.remove(f"{url}/there")
    assert not storage.exists(f"{url}/there")
    assert storage.read_if_there(f"{url}/there") is None


def test_what_others_wrote_meanwhile_is_seen(url: str, store: dict[str, str]) -> None:
    storage.write_bytes(f"{url}/a", b"1")
    assert storage.list_files(f"{url}/*") == storage.list_files(url) == [f"{url}/a"]
    code = "import sys\nfrom modelyard import storage\nstorage.write_bytes(sys.argv[1], b'1')\n"
    subprocess.run([sys.executable, "-c", code, f"{url}/b"], timeout=PATIENCE, check=True)
    assert storage.list_files(f"{url}/*") == storage.list_files(url) == [f"{url}/a", f"{url}/b"]


def test_fsspecs_memory_is_storage_too(cache: Path) -> None:
    pytest.importorskip("fsspec")
    storage.write_bytes("memory://top/a/b", b"1")
    assert storage.list_files("memory://top") == ["memory://top/a/b"]
    assert storage.local_copy("memory://top/a/b", cache).read_bytes() == b"1"


@pytest.mark.parametrize("scheme", ["s3", "gs", "memory"])
def test_only_the_version_that_was_read_is_replaced_or_removed(scheme: str, url: str) -> None:
    with google_store() if scheme == "gs" else contextlib.nullcontext():
        file = {"s3": f"{url}/one", "gs": "gs://yard/a b/one", "memory": "memory://versions/one"}[scheme]
        assert storage.read_version(file) is None
        assert storage.replace_version(file, b"1", None)
        assert not storage.replace_version(file, b"other", None)
        first = storage.read_version(file)
        assert first is not None
        assert first[0] == b"1"
        assert storage.replace_version(file, b"2", first[1])
        assert not storage.replace_version(file, b"other", first[1])
        assert not storage.remove_version(file, first[1])
        second = storage.read_version(file)
        assert second is not None
        assert second[0] == b"2"
        assert storage.remove_version(file, second[1])
        assert storage.read_version(file) is None
        assert not storage.replace_version(file, b"other", second[1])
        assert not storage.remove_version(file, second[1])
        assert not storage.exists(file)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_version_in_a_bucket_that_does_not_exist_is_an_error(scheme: str) -> None:
    with (
        google_store() if scheme == "gs" else contextlib.nullcontext(),
        pytest.raises(StorageError, match="can't write"),
    ):
        storage.replace_version(f"{scheme}://nobucket/x", b"1", None)


def test_a_missing_file_and_a_missing_bucket_are_named(url: str, cache: Path) -> None:
    with pytest.raises(DataError, match=rf"^can't read {url}/none: it does not exist\.$"):
        storage.local_copy(f"{url}/none", cache)
    for call in (storage.list_files, lambda place: storage.write_bytes(place, b"1")):
        with pytest.raises(RunError, match=r"s3://nobucket/x: The specified bucket does not exist\.$"):
            call("s3://nobucket/x")
    storage.write_bytes(f"{url}/folder/a", b"1")
    with pytest.raises(StorageError, match="is a folder, but must be a file"):
        storage.local_copy(f"{url}/folder", cache)


def test_what_is_missing_here_is_not_missing_there(url: str, tmp_path: Path) -> None:
    storage.write_bytes(f"{url}/a", b"1")
    with pytest.raises(StorageError) as caught:
        storage.download(f"{url}/none", tmp_path / "a")
    assert storage.is_missing(caught.value)
    with pytest.raises(StorageError, match="can't write") as caught:
        storage.download(f"{url}/a", tmp_path / "nowhere" / "a")
    assert not storage.is_missing(caught.value)


@contextlib.contextmanager
def fresh_connection(**variables: str | None) -> Iterator[None]:
    import s3fs

    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.delenv(name) if value is None else patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield
    s3fs.S3FileSystem.clear_instance_cache()


def test_missing_credentials_are_reported(url: str) -> None:
    nowhere = "/nowhere/credentials"
    with (
        fresh_connection(
            AWS_ACCESS_KEY_ID=None,
            AWS_SECRET_ACCESS_KEY=None,
            AWS_SHARED_CREDENTIALS_FILE=nowhere,
            AWS_CONFIG_FILE=nowhere,
        ),
        pytest.raises(StorageError, match=f"can't read {url}: there are no credentials for it .*AWS_ACCESS_KEY_ID"),
    ):
        storage.read_bytes(url)


def test_denied_access_is_reported(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system, _ = storage._file_system(url)

    def refuse(*_: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(system, "cat_file", refuse)
    with pytest.raises(StorageError, match=rf"can't read {url}: permission denied \(Access Denied\)"):
        storage.read_bytes(url)


def test_storage_that_does_not_answer_is_reported(url: str) -> None:
    once = {"AWS_MAX_ATTEMPTS": "1", "AWS_RETRY_MODE": "standard"}
    with (
        fresh_connection(AWS_ENDPOINT_URL="http://127.0.0.1:9", **once),
        pytest.raises(StorageError, match=rf"can't read {url}: the storage can't be reached .*Check the network"),
    ):
        storage.read_bytes(url)


def test_an_unsupported_scheme_is_an_error() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(StorageError, match=r"s4://b/x: s4:// is not supported"):
        storage.exists("s4://b/x")


@pytest.mark.parametrize(("package", "scheme"), [("fsspec", "s3"), ("s3fs", "s3"), ("gcsfs", "gs")])
def test_without_the_packages_it_says_what_to_install(package: str, scheme: str) -> None:
    code = (
        f"import sys\nsys.modules[{package!r}] = None\nfrom modelyard import storage\n"
        f"try:\n    storage.exists('{scheme}://bucket/x')\nexcept storage.StorageError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "pip install 'modelyard[cloud]'" in done.stdout
    assert f"{scheme}://bucket/x needs the package" in done.stdout


def test_fsspec_is_not_imported_for_local_paths(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom modelyard import storage\nfrom modelyard.run import directory\n"
        "storage.list_files('.'), storage.exists('x')\nprint([m for m in sys.modules if m.startswith('fsspec')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.strip() == "[]"
