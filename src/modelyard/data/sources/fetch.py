"""Brings the official files of a dataset into ``data_dir``: from the network or from a local copy, checksum first.

Nothing is unpacked: `official.py` reads the archives in place. A file takes its name only when all of it has come and
its MD5 is right; what has come of a broken download waits as NAME.part.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from modelyard.errors import DataError, unknown
from modelyard.storage import remove_stale
from modelyard.system.console import bar
from modelyard.system.files import PARTIAL, explain, sync_folder

Progress = Callable[[str, int, int], None]
"""Called with the name of a file, how many of its bytes are there, and how many there will be."""

TIMEOUT = 30.0  # seconds without a byte
_PIECE = 1 << 18


@dataclass(frozen=True)
class Source:
    """An official file: where it is, how long, and its MD5."""

    url: str
    size: int
    md5: str

    @property
    def file(self) -> str:
        """The name of the file."""
        return urlsplit(self.url).path.rsplit("/", 1)[-1]


_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"  # the original host is often down
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

SOURCES: Mapping[str, tuple[Source, ...]] = {
    "mnist": (
        Source(f"{_MNIST}train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Source(f"{_MNIST}train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        Source(f"{_MNIST}t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        Source(f"{_MNIST}t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "fashion_mnist": (
        Source(f"{_FASHION}train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Source(f"{_FASHION}train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        Source(f"{_FASHION}t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        Source(f"{_FASHION}t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "cifar10": (Source(f"{_CIFAR}cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a"),),
    "cifar100": (Source(f"{_CIFAR}cifar-100-python.tar.gz", 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85"),),
}


def fetch(
    name: str,
    data_dir: str | Path = "data",
    archive: str | Path | None = None,
    *,
    progress: Progress | None = None,
    sources: Mapping[str, tuple[Source, ...]] = SOURCES,
    timeout: float = TIMEOUT,
) -> list[Path]:
    """Brings the official files of the dataset ``name`` to where it is looked for, and returns their paths.

    A file that is there and whole is left alone. A download that broke off goes on where it was.

    Args:
        name: ``mnist``, ``fashion_mnist``, ``cifar10`` or ``cifar100``.
        data_dir: the folder of all datasets; the files go to ``data_dir/name``.
        archive: a local copy to take instead of the network: the official file, or a folder that holds it.
        progress: called with the state of a file; by default a progress bar is shown.
        sources: the official files of each dataset.
        timeout: seconds to wait for the next byte.

    Raises:
        DataError: if a file can't be had, or is not the official one.
        RunError: if it can't be written.
    """
    if name not in sources:
        raise DataError(f"{unknown('dataset to fetch', name, sources)} Other datasets are files of your own.")
    data_dir = Path(data_dir).expanduser()
    folder = data_dir / name
    remove_stale(folder)
    found = {source: _present(source, folder, data_dir) for source in sources[name]}
    wanted = [source for source, path in found.items() if path is None]
    copies = _local_copies(name, wanted, Path(archive).expanduser()) if archive is not None else {}
    if wanted:
        with explain(folder, "create"):
            folder.mkdir(parents=True, exist_ok=True)
    with bar(f"fetching {name}", None) as update:
        report = progress or (lambda file, done, total: update(done, total, f"fetching {file}"))
        for source in wanted:
            target = folder / source.file
            if source in copies:
                _copy(copies[source], target, source, report)
            else:
                _download(source, target, report, timeout)
            found[source] = target
    return [path for path in found.values() if path is not None]


def _present(source: Source, *folders: Path) -> Path | None:
    """The file itself, if it is in one of the places where a dataset looks for it."""
    for folder in folders:
        path = folder / source.file
        with explain(path, "read"):
            if path.is_file() and path.stat().st_size == source.size and _md5(path) == source.md5:
                return path
    return None


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _wrong(what: str, source: Source, found: str, then: str) -> DataError:
    return DataError(f"{what} is not the official file: its MD5 is {found}, expected {source.md5}. {then}")


def _finish(part: Path, target: Path) -> None:
    """Gives a whole and synced file its name."""
    part.replace(target)
    sync_folder(target.parent)


# -- from a local copy ----------------------------------------------------------------------------------------------


def _local_copies(name: str, wanted: list[Source], archive: Path) -> dict[Source, Path]:
    """Where in ``archive`` each wanted file is; all of them must be there before any is copied."""
    if archive.is_dir():
        places = {s: [p for p in (archive / s.file, archive / name / s.file) if p.is_file()] for s in wanted}
    elif archive.is_file():
        # A single file may have any name; of several official files it must be one by name.
        places = {s: [archive] if len(wanted) == 1 or archive.name == s.file else [] for s in wanted}
    else:
        raise DataError(f"{archive} does not exist. Name the official file, or a folder that holds it.")
    missing = [source.file for source, paths in places.items() if not paths]
    if missing:
        raise DataError(f"{name} needs {', '.join(missing)} too. Name a folder that holds all of its official files.")
    return {source: paths[0] for source, paths in places.items()}


def _copy(origin: Path, target: Path, source: Source, report: Progress) -> None:
    with explain(target, "write"), _temporary(target) as (writing, path):
        digest = hashlib.md5(usedforsecurity=False)
        done = 0
        for piece in _pieces(origin):
            writing.write(piece)
            digest.update(piece)
            done += len(piece)
            report(source.file, done, source.size)
            if done > source.size:
                raise DataError(f"{origin} is not the official {source.file}: that has {source.size:,} bytes.")
        if digest.hexdigest() != source.md5:
            raise _wrong(str(origin), source, digest.hexdigest(), "It was not copied.")
        _sync(writing)
        path.chmod(0o644)
        _finish(path, target)


def _pieces(path: Path) -> Iterator[bytes]:
    with explain(path, "read"), open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A new file beside ``target``, gone at the end unless it was renamed."""
    handle, name = tempfile.mkstemp(prefix=PARTIAL, dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


# -- from the network -----------------------------------------------------------------------------------------------


def _download(source: Source, target: Path, report: Progress, timeout: float) -> None:
    part = target.with_name(f"{target.name}.part")
    # Errors of the network are caught where they arise: what is left are those of the file.
    with explain(part, "write"), open(part, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is downloading {target}. Wait for it.") from error
        if file.tell() != source.size or _md5(part) != source.md5:
            try:
                _continue(source, file, report, timeout)
            finally:
                if os.fstat(file.fileno()).st_size == 0:
                    part.unlink()
        _sync(file)
        found = _md5(part)
        if found != source.md5:
            part.unlink()
            raise _wrong(source.url, source, found, "What came was removed; try again, or give a local copy.")
        _finish(part, target)


def _continue(source: Source, file: IO[bytes], report: Progress, timeout: float) -> None:
    """Appends to ``file`` what is missing of ``source``, or starts over where it can't go on."""
    start = file.tell() if file.tell() < source.size else 0
    with _response(source, start, timeout) as response:
        if start and not _goes_on(response, start, source.size):
            start = 0
        _check_length(source, response, start)
        if file.tell() != start:
            file.truncate(start)
        done = start
        report(source.file, done, source.size)
        while done < source.size:
            piece, trouble = _piece(response, source.size - done)
            file.write(piece)
            file.flush()
            done += len(piece)
            report(source.file, done, source.size)
            if trouble or not piece:
                raise DataError(
                    f"the download of {source.url} broke off after {done:,} of {source.size:,} bytes"
                    f"{f' ({trouble})' if trouble else ''}. Run it again: it goes on from there."
                )


def _response(source: Source, start: int, timeout: float) -> Any:
    if urlsplit(source.url).scheme not in ("http", "https"):
        raise DataError(f"{source.url}: only http and https addresses are fetched.")
    request = urllib.request.Request(source.url, headers={"User-Agent": "modelyard"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        return _opener().open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        raise _unreachable(source, f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(source, str(getattr(error, "reason", None) or error)) from error


def _opener() -> urllib.request.OpenerDirector:
    """`build_opener` would follow redirections to ftp too."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _unreachable(source: Source, why: str) -> DataError:
    return DataError(
        f"{source.url} can't be downloaded: {why}. Try again later, "
        f"or get {source.file} elsewhere and name it as a local copy."
    )


def _goes_on(response: Any, start: int, size: int) -> bool:
    return (response.status, response.headers.get("Content-Range")) == (206, f"bytes {start}-{size - 1}/{size}")


def _check_length(source: Source, response: Any, start: int) -> None:
    """A page of an error or of a login has another length; nothing of it is kept."""
    length = response.headers.get("Content-Length")
    if response.status == 206 and not start:
        raise _unreachable(source, "the server sent another part of the file than it was asked for")
    if length is not None and length != str(source.size - start):
        raise _unreachable(source, f"the server offers {length} bytes where {source.size - start:,} belong")


def _piece(response: Any, most: int) -> tuple[bytes, str]:
    """The next bytes, and what went wrong."""
    try:
        return response.read1(min(_PIECE, most)), ""
    except http.client.IncompleteRead as error:
        return error.partial[:most], "the connection was cut"
    except (OSError, http.client.HTTPException) as error:
        return b"", str(error) or type(error).__name__
