"""Files that may be on an object store: ``s3://`` and ``gs://`` through fsspec, local paths as they are.

A remote file is read through a local cache. fsspec is imported when the first remote path is used. Retries are those of
the libraries beneath it, and so are the environment variables for credentials and endpoints.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import importlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from modelyard.errors import StorageError

Progress = Callable[[int, int], None]
"""Called with the bytes that are here and the bytes there are."""

CACHE_VARIABLE = "MODELYARD_CACHE"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_MAGIC = re.compile(r"[*?\[]")
_PARTIAL = ".partial-"
_LEFTOVER = re.compile(r"\.partial-[a-z0-9_]{8}")  # as `tempfile` names them
DAY = 86400
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_TRIES = 3
for _name in set(_PACKAGES.values()):  # they would print the traceback of what becomes a sentence here
    logging.getLogger(_name).addHandler(logging.NullHandler())


def is_remote(path: str | Path) -> bool:
    """Whether ``path`` is a URL such as ``s3://bucket/file`` and not a local path."""
    return isinstance(path, str) and _SCHEME.match(path) is not None


def cache_folder(cache_dir: str | None = None) -> Path:
    """Where copies of remote files are kept: ``cache_dir``, else $MODELYARD_CACHE, else ~/.cache/modelyard."""
    return Path(cache_dir or os.environ.get(CACHE_VARIABLE) or "~/.cache/modelyard").expanduser().absolute()


def join(url: str, *parts: str) -> str:
    """``url`` with ``parts`` below it."""
    return "/".join([url.rstrip("/"), *(part.strip("/") for part in parts)])


def parent(url: str) -> str:
    """The folder ``url`` is in. A bucket has none."""
    above = url.rstrip("/").rpartition("/")[0]
    return above if _SCHEME.match(above + "/") is not None and not above.endswith(("/", ":")) else url.rstrip("/")


def local_copy(url: str | Path, cache: Path, progress: Progress | None = None) -> Path:
    """A local path with the content of ``url``, downloaded to ``cache`` if this version of it is not there yet.

    A local path is returned as it is. The copy is whole or not there, whoever else downloads the same file.

    Args:
        url: a remote file, or a local path.
        cache: the folder for copies.
        progress: called while the file comes.

    Example:
        >>> local_copy("s3://bucket/train.npz", cache_folder())
    """
    if isinstance(url, Path) or not is_remote(url):
        return Path(url)
    for _ in range(_TRIES):
        version, length = _version(url)
        place = cache / "files" / _digest(url) / _digest(version)
        path = place / _file_name(url)
        remove_stale(place)
        if path.is_file() and path.stat().st_size == length:
            return path
        with _local(place, "write to the cache"):
            place.mkdir(parents=True, exist_ok=True)
        download(url, path, progress)
        if _version(url)[0] == version and path.stat().st_size == length:
            return path
        with contextlib.suppress(OSError):  # it changed while it came: these may be the bytes of another version
            path.unlink()
    raise StorageError(f"{url} changes while it is being read. Wait until it is written, then try again.")


def download(url: str, local: Path, progress: Progress | None = None) -> None:
    """Brings ``url`` to the local path ``local``, which is whole or not there."""
    with _local(local, "write"):
        handle, name = tempfile.mkstemp(prefix=_PARTIAL, dir=local.parent)
        os.close(handle)
    partial = Path(name)
    try:
        with _remote(url, "read") as (system, path):
            try:
                system.get_file(path, name, **_callback(progress))
            except FileNotFoundError as error:
                if local.parent.is_dir():
                    raise
                raise StorageError(f"can't write {local}: its folder is gone.") from error
        with _local(local, "write"):
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            partial.chmod(0o644)
            partial.replace(local)
    finally:
        partial.unlink(missing_ok=True)


def upload(local: Path, url: str) -> None:
    """Writes the local file to ``url``. Object stores show an object when all of it is there."""
    with _remote(url, "write") as (system, path):
        system.put_file(str(local), path)


def read_bytes(url: str | Path) -> bytes:
    """The content of a remote or local file."""
    if isinstance(url, Path) or not is_remote(url):
        with _local(Path(url), "read"):
            return Path(url).read_bytes()
    with _remote(url, "read") as (system, path):
        return bytes(system.cat_file(path))


def read_if_there(url: str) -> bytes | None:
    """The content of a remote file; None where there is none."""
    try:
        return read_bytes(url)
    except StorageError as error:
        if not is_missing(error):
            raise
        return None


def write_bytes(url: str, data: bytes) -> None:
    """Replaces the content of the remote file ``url``."""
    with _remote(url, "write") as (system, path):
        system.pipe_file(path, data)


def write_new(url: str, data: bytes) -> None:
    """Writes the remote file ``url`` if it does not exist. If several processes try, read it to find out which did."""
    with _remote(url, "write") as (system, path), contextlib.suppress(FileExistsError):
        try:
            system.pipe_file(path, data, mode="create")
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            system.pipe_file(path, data)  # this store has no conditional writes


def exists(url: str | Path) -> bool:
    """Whether there is a file or folder."""
    if isinstance(url, Path) or not is_remote(url):
        return Path(url).exists()
    try:
        with _remote(url, "look at") as (system, path):
            system.info(path)
    except StorageError as error:
        if not is_missing(error):
            raise
        return False
    return True


def is_missing(error: StorageError) -> bool:
    """Whether the error is that nothing is there, at the remote place: a missing local file is another matter."""
    return isinstance(error, _MissingError)


def remove(url: str) -> None:
    """Removes a remote file, if it is there."""
    with _remote(url, "remove") as (system, path), contextlib.suppress(FileNotFoundError):
        system.rm_file(path)


def list_files(url_or_glob: str) -> list[str]:
    """The files that a pattern names, or all files in a folder and below; sorted.

    Example:
        >>> list_files("gs://bucket/imagenet/train-*-of-01024")
    """
    magic = _MAGIC.search(url_or_glob)
    if not is_remote(url_or_glob):
        if magic:
            return sorted(path for path in glob.glob(url_or_glob, recursive=True) if Path(path).is_file())  # noqa: PTH207
        top = Path(url_or_glob)
        return sorted(str(path) for path in ([top] if top.is_file() else top.rglob("*")) if path.is_file())
    if not magic:
        return [join(url_or_glob, name) if name else url_or_glob for name in names_below(url_or_glob)]
    above = url_or_glob[: magic.start()].rpartition("/")[0]
    with _remote(url_or_glob, "list") as (system, path):
        found = system.glob(path, detail=True)
        start = len(system._strip_protocol(above).rstrip("/"))
    files = (name for name, info in found.items() if info.get("type") == "file" and not name.endswith("/"))
    return sorted(join(above, name[start:]) for name in files)


def names_below(url: str) -> list[str]:
    """The files in a remote folder and below, as paths from it; sorted. The file itself is ``""``."""
    with _remote(url, "list") as (system, path):
        path = path.rstrip("/")
        found = system.find(path)
    # Consoles make empty objects named "photos/" to show a folder; they are no files.
    files = (str(name) for name in found if not str(name).endswith("/"))
    inside = (name for name in files if name == path or name.startswith(f"{path}/"))
    return sorted(name[len(path) :].lstrip("/") for name in inside)


def remove_stale(folder: Path, older_than_seconds: float = DAY) -> None:
    """Removes unfinished files in ``folder`` that killed processes left there.

    Young ones stay: another process may be writing them right now.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _LEFTOVER.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False) and is_older(Path(entry.path), older_than_seconds):
                        Path(entry.path).unlink()


def is_older(path: Path, seconds: float) -> bool:
    """Whether the local file or folder was not changed for so long."""
    return time.time() - path.stat().st_mtime > seconds


# -- beneath --------------------------------------------------------------------------------------------------------


class _MissingError(StorageError):
    """There is no such remote file."""


@contextlib.contextmanager
def _remote(url: str, doing: str) -> Iterator[tuple[Any, str]]:
    """The file system of ``url`` and the path in it; whatever its libraries raise becomes a sentence.

    Their errors have no class in common, so all are caught: nothing but calls to them stands in such a block.
    """
    try:
        yield _system(url)
    except StorageError:
        raise
    except Exception as error:
        kind = _MissingError if isinstance(error, FileNotFoundError) else StorageError
        raise kind(f"can't {doing} {url}: {_reason(url, error)}") from error


def _system(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0].lower()
    try:
        core = importlib.import_module("fsspec.core")
        # Listings must be of now: another machine writes there too.
        system, path = core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        package = _PACKAGES.get(scheme, "fsspec")
        raise StorageError(f"{url} needs the package {package}: pip install 'modelyard[cloud]'") from error
    except ValueError as error:
        raise StorageError(f"{url}: there is no storage of kind {scheme}://. Use s3://, gs:// or a path.") from error
    return system, str(path)


def _reason(url: str, error: Exception) -> str:
    kind, text = type(error).__name__, " ".join(str(error).split()).rstrip(".")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the local disk is full."
    if isinstance(error, FileNotFoundError):
        return f"{text}." if "specified bucket" in text.lower() else "it does not exist."
    if "Credential" in kind or "TokenRetrieval" in kind or "RefreshError" in kind:
        where = "gcloud auth application-default login" if url.startswith("g") else "AWS_ACCESS_KEY_ID or ~/.aws"
        return f"there are no credentials for it ({text}). See {where}."
    if isinstance(error, PermissionError):
        return f"permission denied ({text}). Check the credentials and their rights."
    if "Connect" in kind or "Timeout" in kind or isinstance(error, TimeoutError | ConnectionError):
        return f"the storage can't be reached ({text}). Check the network and the endpoint."
    return f"{text or kind}."


@contextlib.contextmanager
def _local(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"can't {doing} {path}: {error.strerror or error}.") from error


def _version(url: str) -> tuple[str, int]:
    """What changes when the content of ``url`` does, and its length."""
    with _remote(url, "read") as (system, path):
        info = system.info(path)
    if info.get("type") == "directory":
        raise StorageError(f"{url} is a folder; a file is needed.")
    marks = [info.get(key) for key in ("ETag", "etag", "generation", "LastModified", "updated", "mtime", "created")]
    return repr([info.get("size"), *(str(mark) for mark in marks if mark is not None)]), int(info.get("size") or 0)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _file_name(url: str) -> str:
    """The last part of a URL, fit to be a file here: readers look at how it ends."""
    name = url.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.+=,@-]", "_", name).lstrip(".") or "file"


def _callback(progress: Progress | None) -> dict[str, Any]:
    if progress is None:
        return {}
    show = progress
    callbacks = importlib.import_module("fsspec.callbacks")
    report = callbacks.Callback(hooks={"progress": lambda size, value, **_: show(int(value or 0), int(size or 0))})
    return {"callback": report}
