"""Datasets in cloud storage: their files are brought to the cache, once, and read from there.

The copies are put together to a tree of links, shaped like the remote folder. A tree never changes: when something at
the URL does, there is a new one, and who reads the old one reads on.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path, PurePosixPath

from modelyard import storage
from modelyard.errors import DataError
from modelyard.system.console import bar
from modelyard.system.files import PARTIAL, explain, remove_partial

_AT_ONCE = 8


def local_tree(url: str, cache: Path, beside: Callable[[Path], list[str]] | None = None) -> Path:
    """The file, the folder or the files of a pattern at ``url``, as a local path or pattern of the same shape.

    Args:
        url: what is wanted.
        cache: the folder for copies.
        beside: for a single file, the files it refers to, as paths from where it is; they are brought too.

    Raises:
        DataError: if there is nothing at ``url``, or it names files elsewhere.
    """
    fixed, pattern = _fixed_part(url)
    names = storage.list_files(url)
    if names == [url]:
        with bar(f"bringing {url}") as progress:
            copy = storage.local_copy(url, cache, progress)
        others = beside(copy) if beside is not None else []
        if not others:
            return copy
        fixed, pattern = storage.parent(url), PurePosixPath(url).name
        names = [url, *(f"{fixed}/{PurePosixPath(name)}" for name in others)]
    if not names:
        raise DataError(f"there is nothing at {url}.")
    copies = {f"{_name(fixed)}/{name}": copy for name, copy in _brought(url, fixed, names, cache).items()}
    top = _linked(copies, cache / "trees" / _digest(url)) / _name(fixed)
    return top / pattern if pattern else top


def _brought(url: str, fixed: str, names: list[str], cache: Path) -> dict[str, Path]:
    """The copy of each file, by its path from ``fixed``; nothing is brought if one of them is not inside."""
    wanted = {name[len(fixed) + 1 :]: name for name in names}
    for relative, name in wanted.items():
        if any(part in ("", ".", "..") for part in relative.split("/")):
            raise DataError(f"{name} is not inside {fixed}.")
    with bar(f"bringing {url}", len(wanted)) as progress, ThreadPoolExecutor(_AT_ONCE) as pool:
        copies = {}
        coming = pool.map(lambda name: storage.local_copy(name, cache), wanted.values())
        for relative, copy in zip(wanted, coming, strict=True):
            copies[relative] = copy
            progress(len(copies))
    return copies


def _linked(copies: Mapping[str, Path], place: Path) -> Path:
    """A folder in ``place`` with a link for each file."""
    tree = place / _digest("\n".join(f"{relative}\0{copy}" for relative, copy in sorted(copies.items())))
    with explain(place, "write to the cache", DataError):
        place.mkdir(parents=True, exist_ok=True)
        with open(place / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_partial(place)
            if not tree.is_dir():
                partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=place))
                for relative, copy in copies.items():
                    (partial / relative).parent.mkdir(parents=True, exist_ok=True)
                    (partial / relative).symlink_to(copy)
                partial.chmod(0o755)
                partial.replace(tree)
    return tree


def _name(url: str) -> str:
    """The last part of a URL as the name of a folder, for messages."""
    return PurePosixPath(url).name.strip(".") or "files"


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _fixed_part(url: str) -> tuple[str, str]:
    """The folder in which a pattern begins, and the pattern; of a plain URL, itself and nothing."""
    parts = url.split("/")
    place = next((i for i, part in enumerate(parts) if i > 2 and any(c in part for c in "*?[")), None)
    return (url.rstrip("/"), "") if place is None else ("/".join(parts[:place]), "/".join(parts[place:]))
