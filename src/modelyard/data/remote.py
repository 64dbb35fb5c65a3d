"""Datasets in cloud storage: their files are brought to the cache, once, and read from there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path, PurePosixPath

from modelyard import storage
from modelyard.errors import DataError
from modelyard.run.console import bar

_AT_ONCE = 8


def local_tree(url: str, cache: Path) -> Path:
    """The file, the folder or the files of a pattern at ``url``, as a local path or pattern of the same shape.

    Raises:
        DataError: if there is nothing at ``url``.
    """
    fixed, pattern = _fixed_part(url)
    names = storage.list_files(url)
    if names == [url]:
        return storage.local_copy(url, cache)
    if not names:
        raise DataError(f"there is nothing at {url}.")
    root = cache / "trees" / sha256(fixed.encode()).hexdigest()[:24] / PurePosixPath(fixed).name

    def bring(name: str) -> None:
        relative = PurePosixPath(name[len(fixed) :].lstrip("/"))
        if relative.is_absolute() or ".." in relative.parts:
            raise DataError(f"{name} is not inside {fixed}.")
        copy = storage.local_copy(name, cache)
        target = root / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or not target.samefile(copy):
            target.unlink(missing_ok=True)
            target.symlink_to(copy)

    with bar(f"bringing {url}", len(names)) as progress, ThreadPoolExecutor(_AT_ONCE) as pool:
        for done, _ in enumerate(pool.map(bring, names), start=1):
            progress(done)
    return root / pattern if pattern else root


def _fixed_part(url: str) -> tuple[str, str]:
    """The folder in which a pattern begins, and the pattern; of a plain URL, itself and nothing."""
    parts = url.split("/")
    place = next((i for i, part in enumerate(parts) if i > 2 and any(c in part for c in "*?[")), None)
    return (url.rstrip("/"), "") if place is None else ("/".join(parts[:place]), "/".join(parts[place:]))
