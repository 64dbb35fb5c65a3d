"""Where exports go: numbered folders, as TensorFlow Serving looks for them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from modelyard import storage
from modelyard.errors import RunError
from modelyard.run.directory import RunDirectory
from modelyard.system.files import PARTIAL, explain, remove_partial


def export_folder(directory: RunDirectory, form: str, output: str | None) -> Path:
    """The folder of the versions: as named, or one in the run folder.

    Raises:
        RunError: if nothing can be written there.
    """
    if output is not None and storage.is_remote(output):
        raise RunError(f"exports are written to a folder of this machine; {output} is none. Copy it there afterwards.")
    if output is None and directory.mirror is not None:
        raise RunError(f"{directory.address} is not on this machine. Name a folder for the export: --output FOLDER.")
    base = directory.export(form) if output is None else Path(output).expanduser()
    if base.exists() and not base.is_dir():
        raise RunError(f"{base} is a file; exports go into a folder. Name another one: --output FOLDER.")
    strange = _strangers(base)
    if strange:
        raise RunError(
            f"{base} holds other things than exports ({', '.join(strange[:3])}); nothing was changed. "
            "Name a folder of its own: --output FOLDER."
        )
    with explain(base, "make the folder"):
        base.mkdir(parents=True, exist_ok=True)
        if not os.access(base, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    return base


@contextlib.contextmanager
def tidied(base: Path) -> Iterator[None]:
    """Puts in order what a killed export left in ``base``, before the block; a version that it had moved is back.

    Exports into one folder may run side by side: each has a share of its lock, and who is alone tidies up.
    """
    with explain(base, "read"):
        handle = os.open(base, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # others are at work; or a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_partial(base)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def choose_version(base: Path, version: int | None, overwrite: bool) -> int:
    """The number of the new version: as named, else the next one; with ``overwrite`` the newest one again.

    Raises:
        RunError: if that version exists and is not to be overwritten.
    """
    there = versions(base)
    if version is None:
        return max(there, default=1) if overwrite else max(there, default=0) + 1
    if version < 1:
        raise RunError(f"versions are numbers from 1 on, not {version}.")
    if version in there and not overwrite:
        raise RunError(f"{base / str(version)} exists and was left as it is. Add --overwrite, or leave --version out.")
    return version


def versions(base: Path) -> list[int]:
    """The versions in a folder, oldest first."""
    if not base.is_dir():
        return []
    return sorted(int(path.name) for path in base.iterdir() if path.name.isascii() and path.name.isdecimal())


def _strangers(base: Path) -> list[str]:
    if not base.is_dir():
        return []
    with explain(base, "read"):
        names = sorted(path.name for path in base.iterdir())
    return [name for name in names if not (name.isascii() and name.isdecimal()) and not name.startswith(PARTIAL)]
