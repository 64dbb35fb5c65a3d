"""Files that may be on an object store: ``s3://`` and ``gs://`` through fsspec, local paths as they are.

A remote file is read through a local cache. fsspec is imported when the first remote path is used. s3fs and gcsfs retry
failed requests and read the environment variables for credentials and endpoints.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from modelyard import faults
from modelyard.errors import UNAVAILABLE, StorageError

Progress = Callable[[int, int], None]
"""Called with the number of bytes received and the total."""

CACHE_VARIABLE = "MODELYARD_CACHE"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_MAGIC = re.compile(r"[*?\[]")
_PARTIAL = ".partial-"
DAY = 86400
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}
_TRIES, _THREADS = 3, 8
_CONFLICT, _PRECONDITION_FAILED, _NOT_IMPLEMENTED = 409, 412, 501
for _name in set(_PACKAGES.values()):  # they print tracebacks of errors that are explained here
    logging.getLogger(_name).addHandler(logging.NullHandler())


def is_remote(path: str | Path) -> bool:
    """Returns whether ``path`` is a URL such as ``s3://bucket/file`` and not a local path."""
    return isinstance(path, str) and _SCHEME.match(path) is not None


def absolute(path: str) -> str:
    """Returns an absolute path; a URL stays as it is."""
    return path if is_remote(path) else str(Path(path).expanduser().absolute())


def is_same(one: str, other: str) -> bool:
    """Returns whether two paths or URLs name the same folder."""
    return absolute(one).rstrip("/") == absolute(other).rstrip("/")


def cache_folder(cache_dir: str | None = None) -> Path:
    """Returns the folder for copies of remote files: ``cache_dir``, else $MODELYARD_CACHE, else ~/.cache/modelyard."""
    return Path(cache_dir or os.environ.get(CACHE_VARIABLE) or "~/.cache/modelyard").expanduser().absolute()


def join(url: str, *parts: str) -> str:
    """Appends ``parts`` to ``url``."""
    return "/".join([url.rstrip("/"), *(part.strip("/") for part in parts)])


def inside(folder: str, name: str) -> str:
    """Returns the path or URL of a file in a folder."""
    return join(folder, name) if is_remote(folder) else str(Path(folder) / name)


def parent(url: str) -> str:
    """Returns the folder of ``url``; of a bucket, the bucket itself."""
    url = url.rstrip("/")
    above = url.rpartition("/")[0]
    return url if above.endswith("/") else above


def local_copy(url: str | Path, cache: Path, progress: Progress | None = None) -> Path:
    """Returns a local path with the content of ``url``, downloaded to ``cache`` unless this version is already there.

    A local path is returned unchanged. The copy is written atomically; several processes may download the same file.
    """
    if isinstance(url, Path) or not is_remote(url):
        return Path(url)
    for _ in range(_TRIES):
        version, length = _version(url)
        path = cache / "files" / _digest(url) / _digest(version) / _file_name(url)
        remove_stale(path.parent)
        if path.is_file() and path.stat().st_size == length:
            return path
        with _local(path.parent, "write to the cache"):
            path.parent.mkdir(parents=True, exist_ok=True)
        download(url, path, progress)
        if _version(url)[0] == version and path.stat().st_size == length:
            return path
        with contextlib.suppress(OSError):  # it changed during the download: these may be bytes of another version
            path.unlink()
    raise StorageError(f"{url} changed during each of {_TRIES} downloads. Wait until it is written, then try again.")


def download(url: str, local: Path, progress: Progress | None = None) -> None:
    """Downloads ``url`` to the local path ``local``, atomically."""
    with _local(local, "write"):
        handle, name = tempfile.mkstemp(prefix=_PARTIAL, dir=local.parent)
        os.close(handle)
    partial = Path(name)
    try:
        with _remote(url, "read") as (system, path):
            try:
                system.get_file(path, name, **({"callback": _callback(progress)} if progress else {}))
            except FileNotFoundError as error:
                if local.parent.is_dir():
                    raise
                raise StorageError(f"can't write {local}: its folder was removed.") from error
        with _local(local, "write"):
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            partial.chmod(0o644)
            partial.replace(local)
    finally:
        partial.unlink(missing_ok=True)


def upload(local: Path, url: str, new: bool = False) -> bool:
    """Uploads a local file to ``url``. Object stores show an object only when it is complete.

    Args:
        local: the file.
        url: where to.
        new: only if there is no such object, on stores that have conditional writes.

    Returns:
        False if there is one, and ``new`` is set.
    """
    with _remote(url, "write") as (system, path):
        try:
            system.put_file(str(local), path, **({"mode": "create"} if new else {}))
        except Exception as error:
            if not new or not (_is_changed(error, None) or _is_unsupported(error)):
                raise
            if _is_changed(error, None):
                return False
            system.put_file(str(local), path)
    return True


def output_folder(url: str, cache: Path) -> Path:
    """Returns the local folder in which the content of ``url`` is prepared before it is uploaded; it may not exist."""
    return cache / "outputs" / _digest(url.rstrip("/"))


def upload_folder(local: Path, url: str, last: Sequence[str] = ()) -> None:
    """Makes a remote folder equal to a local one. Files that the local one does not have are removed.

    Args:
        local: the folder.
        url: the remote folder, which need not exist.
        last: names of files without which the folder is incomplete. They are removed first and uploaded last, so that
            a folder that has them is complete.
    """
    there = set(names_below(url))
    here = [path.relative_to(local).as_posix() for path in sorted(local.rglob("*")) if path.is_file()]
    for name in last:
        if name in there:
            remove(join(url, name))
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda name: upload(local / name, join(url, name)), [n for n in here if n not in last]))
        list(pool.map(lambda name: remove(join(url, name)), sorted(there - {*here, *last, ""})))
    for name in last:
        if name in here:
            upload(local / name, join(url, name))


def read_bytes(url: str | Path) -> bytes:
    """Returns the content of a remote or local file."""
    if isinstance(url, Path) or not is_remote(url):
        with _local(Path(url), "read"):
            return Path(url).read_bytes()
    with _remote(url, "read") as (system, path):
        return bytes(system.cat_file(path))


def read_if_there(url: str) -> bytes | None:
    """Returns the content of a remote file; None if it does not exist."""
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


def read_version(url: str) -> tuple[bytes, str] | None:
    """Returns the content of a remote file and the name of this version of it; None if it does not exist."""
    try:
        with _remote(url, "read") as (system, path):
            kind = _kind(url)
            if kind == "s3fs":
                sync = importlib.import_module("fsspec.asyn").sync
                found: tuple[bytes, str] = sync(system.loop, _read_s3, system, path)
                return found
            if kind == "gcsfs":
                headers, data = system.call("GET", system.url(path))
                return bytes(data), str(headers["X-Goog-Generation"])
            data = bytes(system.cat_file(path))
            return data, _digest_of(data)
    except StorageError as error:
        if not is_missing(error):
            raise
        return None


def replace_version(url: str, data: bytes, version: str | None) -> bool:
    """Replaces a remote file if it still is the version that `read_version` named.

    The store compares and writes in one step. One that has no conditional writes is read again, then written.

    Args:
        url: the file.
        data: its new content.
        version: the version to replace; None if the file must not exist yet.

    Returns:
        Whether it was replaced. After a lost answer it may be False although it was: read it to find out.
    """
    kind = _kind(url)
    with _remote(url, "write") as (system, path):
        try:
            if kind == "s3fs":
                bucket, key, _ = system.split_path(path)
                condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
                system.call_s3("put_object", Bucket=bucket, Key=key, Body=data, **condition)
                return True
            if kind == "gcsfs":
                bucket, key, _ = system.split_path(path)
                address = f"{system._location}/upload/storage/v1/b/{bucket}/o"
                condition = {"uploadType": "media", "name": key, "ifGenerationMatch": version or "0"}
                system.call("POST", address, data=data, **condition)
                return True
            if version is None:
                system.pipe_file(path, data, mode="create")
                return True
        except Exception as error:
            if _is_changed(error, version):
                return False
            if not _is_unsupported(error):
                raise
    found = read_version(url)
    if (found[1] if found is not None else None) != version:
        return False
    write_bytes(url, data)
    return True


def remove_version(url: str, version: str) -> bool:
    """Removes a remote file if it still is the version that `read_version` named. See `replace_version`."""
    kind = _kind(url)
    with _remote(url, "remove") as (system, path):
        try:
            if kind == "s3fs":
                bucket, key, _ = system.split_path(path)
                system.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=version)
                return True
            if kind == "gcsfs":
                bucket, key, _ = system.split_path(path)
                system.call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=version)
                return True
        except Exception as error:
            if _is_changed(error, version):
                return False
            if not _is_unsupported(error):
                raise
    found = read_version(url)
    if found is None or found[1] != version:
        return False
    remove(url)
    return True


def exists(url: str | Path) -> bool:
    """Returns whether a file or folder exists."""
    if isinstance(url, Path) or not is_remote(url):
        return Path(url).exists()
    try:
        with _remote(url, "access") as (system, path):
            system.info(path)
    except StorageError as error:
        if not is_missing(error):
            raise
        return False
    return True


def is_missing(error: StorageError) -> bool:
    """Returns whether the error is a missing remote file. A missing local file does not count."""
    return isinstance(error, _MissingError)


def remove(url: str) -> None:
    """Removes a remote file, if it exists."""
    with _remote(url, "remove") as (system, path), contextlib.suppress(FileNotFoundError):
        system.rm_file(path)


def list_files(url_or_glob: str) -> list[str]:
    """Returns the files that match a pattern, or all files below a folder; sorted."""
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
        start = len(_file_system(above)[1].rstrip("/"))
    files = (name for name, info in found.items() if info.get("type") == "file" and not name.endswith("/"))
    return sorted(join(above, name[start:]) for name in files)


def names_below(url: str) -> list[str]:
    """Returns all files below a remote folder, as relative paths; sorted. For a file the relative path is ``""``."""
    with _remote(url, "list") as (system, path):
        path = path.rstrip("/")
        found = system.find(path)
    # Web consoles create empty objects named "photos/" to show a folder; they are not files.
    files = (name for name in found if name == path or (name.startswith(f"{path}/") and not name.endswith("/")))
    return sorted(name[len(path) :].lstrip("/") for name in files)


def list_versions(url: str) -> dict[str, tuple[str, int]]:
    """Returns for each file below a remote folder a text that changes with its content, and its length."""
    with _remote(url, "list") as (system, path):
        path = path.rstrip("/")
        found = system.find(path, detail=True)
    files = ((name, info) for name, info in found.items() if name.startswith(f"{path}/") and not name.endswith("/"))
    return {name[len(path) + 1 :]: _version_of(info) for name, info in sorted(files)}


def remove_stale(folder: Path) -> None:
    """Removes temporary files in ``folder`` that killed processes left more than a day ago.

    Another process may be writing the younger ones right now.
    """
    with contextlib.suppress(OSError):
        for path in folder.glob(_PARTIAL + 8 * "[a-z0-9_]"):  # as `tempfile` names them
            if path.is_file() and not path.is_symlink() and is_older(path, DAY):
                path.unlink(missing_ok=True)


def is_older(path: Path, seconds: float) -> bool:
    """Returns whether the local file or folder has not changed for so many seconds."""
    return time.time() - path.stat().st_mtime > seconds


# -- fsspec ---------------------------------------------------------------------------------------------------------


class _MissingError(StorageError):
    """A remote file does not exist."""


class _UnreachableError(StorageError):
    """The storage can't be reached. It may be a moment later."""

    status = UNAVAILABLE


@contextlib.contextmanager
def _remote(url: str, doing: str) -> Iterator[tuple[Any, str]]:
    """Yields the fsspec file system of ``url`` and the path in it, and explains the errors of its libraries.

    These errors have no common class, so all are caught: such a block contains only calls to the libraries.
    """
    try:
        faults.reach(faults.UPLOAD if doing in ("write", "remove") else faults.DOWNLOAD)
        yield _file_system(url)
    except (StorageError, faults.InjectedCrashError):
        raise
    except Exception as error:
        missing, unreachable = isinstance(error, FileNotFoundError), _is_unreachable(error)
        kind = _MissingError if missing else _UnreachableError if unreachable else StorageError
        raise kind(f"can't {doing} {url}: {_reason(url, error)}") from error


def _file_system(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0].lower()
    try:
        core = importlib.import_module("fsspec.core")
        # No cached listings: another machine writes there too.
        system, path = core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        package = _PACKAGES.get(scheme, "fsspec")
        raise StorageError(f"{url} needs the package {package}: pip install 'modelyard[cloud]'") from error
    except ValueError as error:
        raise StorageError(f"{url}: {scheme}:// is not supported. Use s3://, gs:// or a local path.") from error
    return system, str(path)


def _kind(url: str) -> str:
    """The package that reads ``url``; empty for other schemes than those of S3 and Google."""
    return _PACKAGES.get(url.partition("://")[0].lower(), "")


async def _read_s3(system: Any, path: str) -> tuple[bytes, str]:
    bucket, key, _ = system.split_path(path)
    found = await system._call_s3("get_object", Bucket=bucket, Key=key)
    async with found["Body"] as body:
        return bytes(await body.read()), str(found["ETag"])


def _is_changed(error: Exception, version: str | None) -> bool:
    """Whether a store refused a conditional request: the object is another version, or is being changed right now."""
    if isinstance(error, FileNotFoundError):  # the object, or the bucket
        return version is not None and not _is_no_bucket(error)
    return isinstance(error, FileExistsError) or _status(error) in (_CONFLICT, _PRECONDITION_FAILED)


def _is_unsupported(error: Exception) -> bool:
    """Whether a store has no conditional requests."""
    return _status(error) == _NOT_IMPLEMENTED or (isinstance(error, OSError) and error.errno == errno.ENOSYS)


def _status(error: Exception) -> Any:
    """The HTTP status behind an error of s3fs, if there is one."""
    response = getattr(error.__cause__ or error, "response", None)
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None


def _is_no_bucket(error: Exception) -> bool:
    return "specified bucket" in str(error).lower()


def _is_unreachable(error: Exception) -> bool:
    kind = type(error).__name__
    return "Connect" in kind or "Timeout" in kind or isinstance(error, TimeoutError | ConnectionError)


def _reason(url: str, error: Exception) -> str:
    kind, text = type(error).__name__, " ".join(str(error).split()).rstrip(".")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the local disk is full."
    if isinstance(error, FileNotFoundError):
        return f"{text}." if _is_no_bucket(error) else "it does not exist."
    if "Credential" in kind or "TokenRetrieval" in kind or "RefreshError" in kind:
        hint = "gcloud auth application-default login" if url.startswith("g") else "AWS_ACCESS_KEY_ID or ~/.aws"
        return f"there are no credentials for it ({text}). See {hint}."
    if isinstance(error, PermissionError):
        return f"permission denied ({text}). Check the credentials and their rights."
    if _is_unreachable(error):
        return f"the storage can't be reached ({text}). Check the network and the endpoint."
    return f"{text or kind}."


@contextlib.contextmanager
def _local(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"can't {doing} {path}: {error.strerror or error}.") from error


def _version(url: str) -> tuple[str, int]:
    """Returns a text that changes with the content of ``url``, and the length of the file."""
    with _remote(url, "read") as (system, path):
        info = system.info(path)
    if info.get("type") == "directory":
        raise StorageError(f"{url} is a folder, but must be a file.")
    return _version_of(info)


def _version_of(info: dict[str, Any]) -> tuple[str, int]:
    marks = [info.get(key) for key in ("ETag", "etag", "generation", "LastModified", "updated", "mtime", "created")]
    return repr([info.get("size"), *(str(mark) for mark in marks if mark is not None)]), int(info.get("size") or 0)


def _digest(text: str) -> str:
    return _digest_of(text.encode())


def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _file_name(url: str) -> str:
    """Returns the last part of a URL as a valid file name. Readers need its extension."""
    name = url.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^\w.+=,@-]", "_", name).lstrip(".") or "file"


def _callback(progress: Progress) -> Any:
    callbacks = importlib.import_module("fsspec.callbacks")
    return callbacks.Callback(hooks={"progress": lambda size, value, **_: progress(int(value or 0), int(size or 0))})
