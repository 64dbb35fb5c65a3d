"""Downloads the official files of a dataset to ``data_dir``, or copies them there.

Nothing is unpacked: `builtin.py` reads the archives. A file gets its name when it is complete and its MD5 is right. An
interrupted download is kept as NAME.part and resumed.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn
from urllib.parse import urlsplit

from modelyard.errors import DataError, unknown
from modelyard.storage import is_remote, remove_stale
from modelyard.system.console import bar
from modelyard.system.files import explain, sync_folder, whole_file

Progress = Callable[[str, int, int], None]
"""Called with the name of a file, the bytes that are there, and the bytes of the whole file."""

TIMEOUT = 30.0  # seconds without a byte
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Source:
    """An official file: URL, size in bytes, and MD5."""

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
    """Downloads the official files of the dataset ``name`` and returns their paths.

    Complete files are kept. An interrupted download is resumed.

    Args:
        name: ``mnist``, ``fashion_mnist``, ``cifar10`` or ``cifar100``.
        data_dir: the folder of all datasets; the files go to ``data_dir/name``.
        archive: a local copy to use instead of the network: the official file, or a folder that holds it.
        progress: called with the progress of each file; by default a progress bar is shown.
        sources: the official files of each dataset.
        timeout: seconds to wait for the next byte.

    Raises:
        DataError: if a file can't be downloaded, or is not the official one.
        RunError: if it can't be written.
    """
    if name not in sources:
        raise DataError(f"{unknown('dataset to fetch', name, sources)} Other datasets are files of your own.")
    for path in (data_dir, archive):
        if is_remote(str(path)):
            raise DataError(f"{path} is a URL: the official files are fetched from and to this machine only.")
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
    """Returns the file, if it is in one of the folders."""
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


# -- from a local copy ----------------------------------------------------------------------------------------------


def _local_copies(name: str, wanted: list[Source], archive: Path) -> dict[Source, Path]:
    """Returns the path of each wanted file in ``archive``. A missing file is an error before any is copied."""
    if archive.is_dir():
        found = {s: [p for p in (archive / s.file, archive / name / s.file) if p.is_file()] for s in wanted}
    elif archive.is_file():
        # A single file may have any name; one of several is found by its name.
        found = {s: [archive] if len(wanted) == 1 or archive.name == s.file else [] for s in wanted}
    else:
        raise DataError(f"{archive} does not exist. Name the official file, or a folder that holds it.")
    missing = [source.file for source, paths in found.items() if not paths]
    if missing:
        raise DataError(f"{name} needs {', '.join(missing)} too. Name a folder that holds all of its official files.")
    return {source: paths[0] for source, paths in found.items()}


def _copy(origin: Path, target: Path, source: Source, report: Progress) -> None:
    with explain(target, "write"), whole_file(target) as file:
        digest = hashlib.md5(usedforsecurity=False)
        done = 0
        for chunk in _chunks(origin):
            file.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            report(source.file, done, source.size)
            if done > source.size:
                raise DataError(f"{origin} is not the official {source.file}: that has {source.size:,} bytes.")
        if digest.hexdigest() != source.md5:
            raise _wrong(str(origin), source, digest.hexdigest(), "It was not copied.")


def _chunks(path: Path) -> Iterator[bytes]:
    with explain(path, "read"), open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


# -- from the network -----------------------------------------------------------------------------------------------


def _download(source: Source, target: Path, report: Progress, timeout: float) -> None:
    part = target.with_name(f"{target.name}.part")
    # Network errors are caught below: other errors are those of the file.
    with explain(part, "write"), open(part, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is downloading {target}. Wait for it.") from error
        if file.tell() != source.size or _md5(part) != source.md5:
            try:
                _resume(source, file, report, timeout)
            finally:
                if os.fstat(file.fileno()).st_size == 0:
                    part.unlink()
        file.flush()
        os.fsync(file.fileno())
        found = _md5(part)
        if found != source.md5:
            part.unlink()
            raise _wrong(source.url, source, found, "The download was removed; try again, or give a local copy.")
        part.replace(target)
        sync_folder(target.parent)


def _resume(source: Source, file: IO[bytes], report: Progress, timeout: float) -> None:
    """Appends the rest of ``source`` to ``file``. If the server can't resume, downloads all of it."""
    start = file.tell() if file.tell() < source.size else 0
    with _response(source, start, timeout) as response:
        resumed = (206, f"bytes {start}-{source.size - 1}/{source.size}")
        if start and (response.status, response.headers.get("Content-Range")) != resumed:
            start = 0
        _check_length(source, response, start)
        if file.tell() != start:
            file.truncate(start)
        done = start
        report(source.file, done, source.size)
        while done < source.size:
            chunk, problem = _read_chunk(response, source.size - done)
            file.write(chunk)
            file.flush()
            done += len(chunk)
            report(source.file, done, source.size)
            if problem or not chunk:
                raise DataError(
                    f"the download of {source.url} broke off after {done:,} of {source.size:,} bytes"
                    f"{f' ({problem})' if problem else ''}. Run it again to resume the download."
                )


def _response(source: Source, start: int, timeout: float) -> Any:
    if urlsplit(source.url).scheme not in ("http", "https"):
        raise DataError(f"{source.url}: only http and https addresses are fetched.")
    request = urllib.request.Request(source.url, headers={"User-Agent": "modelyard"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        return urllib.request.build_opener(_NoFtp).open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        raise _unreachable(source, f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(source, str(getattr(error, "reason", None) or error)) from error


class _NoFtp(urllib.request.FTPHandler):
    """Refuses redirections to FTP."""

    def ftp_open(self, req: urllib.request.Request) -> NoReturn:
        raise urllib.error.URLError("unknown url type: ftp")


def _unreachable(source: Source, why: str) -> DataError:
    return DataError(
        f"{source.url} can't be downloaded: {why}. Try again later, "
        f"or get {source.file} elsewhere and name it as a local copy."
    )


def _check_length(source: Source, response: Any, start: int) -> None:
    """Refuses other pages, such as a login: they have another length."""
    length = response.headers.get("Content-Length")
    if response.status == 206 and not start:
        raise _unreachable(source, "the server sent another part of the file than was requested")
    if length is not None and length != str(source.size - start):
        raise _unreachable(source, f"the server offers {length} bytes, not {source.size - start:,}")


def _read_chunk(response: Any, most: int) -> tuple[bytes, str]:
    """Returns the next bytes, and a problem if there is one."""
    try:
        return response.read1(min(_CHUNK, most)), ""
    except http.client.IncompleteRead as error:
        return error.partial[:most], "the connection was cut"
    except (OSError, http.client.HTTPException) as error:
        return b"", str(error) or type(error).__name__
