"""Datasets in cloud storage: each file is copied to the cache once and read there.

Links to the copies form a tree with the shape of the remote folder. A tree never changes: if a remote file changes, a
new tree is created, and processes that read the old one are not disturbed.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path, PurePosixPath

from modelyard import storage
from modelyard.errors import DataError
from modelyard.system.console import bar
from modelyard.system.files import PARTIAL, explain, remove_partial

_THREADS = 8


def local_tree(url: str, cache: Path, referenced: Callable[[Path], list[str]] | None = None) -> Path:
    """Copies the file, folder or files of a pattern at ``url`` and returns the local path or pattern of the same shape.

    Args:
        url: a remote file, folder or pattern.
        cache: the folder for copies.
        referenced: for a single file, returns the paths in it, relative to its folder; they are copied, too.

    Raises:
        DataError: if there is nothing at ``url``, or it refers to files outside of its folder.
    """
    root, pattern = _split_pattern(url)
    names = storage.list_files(url)
    if names == [url]:
        with bar(f"copying {url}") as progress:
            copy = storage.local_copy(url, cache, progress)
        others = referenced(copy) if referenced is not None else []
        if not others:
            return copy
        root, pattern = storage.parent(url), PurePosixPath(url).name
        names = [url, *(f"{root}/{PurePosixPath(name)}" for name in others)]
    if not names:
        raise DataError(f"there is nothing at {url}.")
    folder = PurePosixPath(root).name.strip(".") or "files"  # messages show it
    copies = {f"{folder}/{name}": copy for name, copy in _copied(url, root, names, cache).items()}
    tree = _linked(copies, cache / "trees" / _digest(url)) / folder
    return tree / pattern if pattern else tree


def remote_names(url: str, local: Path, files: Sequence[Path]) -> list[str]:
    """Returns the URLs of files of a tree.

    Args:
        url: what `local_tree` copied.
        local: the path that it returned.
        files: files of that path or pattern.
    """
    root, pattern = _split_pattern(url)
    top = local.parents[pattern.count("/")] if pattern else local
    return [storage.join(root, file.relative_to(top).as_posix()) if file != top else root for file in files]


def _copied(url: str, root: str, names: list[str], cache: Path) -> dict[str, Path]:
    """Returns the copy of each file, by its path in ``root``. If one is outside of ``root``, nothing is copied."""
    wanted = {name[len(root) + 1 :]: name for name in names}
    for relative, name in wanted.items():
        if any(part in ("", ".", "..") for part in relative.split("/")):
            raise DataError(f"{name} is not inside {root}.")
    with bar(f"copying {url}", len(wanted)) as progress, ThreadPoolExecutor(_THREADS) as pool:
        copies = {}
        results = pool.map(lambda name: storage.local_copy(name, cache), wanted.values())
        for relative, copy in zip(wanted, results, strict=True):
            copies[relative] = copy
            progress(len(copies))
    return copies


def _linked(copies: Mapping[str, Path], folder: Path) -> Path:
    """Returns a tree in ``folder`` with a link for each file."""
    tree = folder / _digest("\n".join(f"{relative}\0{copy}" for relative, copy in sorted(copies.items())))
    with explain(folder, "write to the cache", DataError):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_partial(folder)
            if not tree.is_dir():
                partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))
                for relative, copy in copies.items():
                    (partial / relative).parent.mkdir(parents=True, exist_ok=True)
                    (partial / relative).symlink_to(copy)
                partial.chmod(0o755)
                partial.replace(tree)
    return tree


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _split_pattern(url: str) -> tuple[str, str]:
    """Returns the folder in which a pattern begins, and the pattern. A plain URL has no pattern."""
    parts = url.split("/")
    first = next((i for i, part in enumerate(parts) if i > 2 and any(c in part for c in "*?[")), None)
    return (url.rstrip("/"), "") if first is None else ("/".join(parts[:first]), "/".join(parts[first:]))
