"""Atomic writes, to a temporary name beside the target, which is then replaced by a rename; and patient reads."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from modelyard import faults
from modelyard.errors import MAY_PASS, RunError, UserError

PARTIAL = ".partial-"
"""The prefix of unfinished files and folders. The next process that opens the run removes them."""

_OLD = "old-"
PAUSES = (0.2, 1.0, 5.0)
"""Seconds before a file is read or written again after an error that may pass."""
T = TypeVar("T")
log = logging.getLogger("modelyard")


@contextlib.contextmanager
def explain(path: Path, doing: str, kind: type[UserError] = RunError) -> Iterator[None]:
    """Raises errors of the file system as ``kind``, with a message: full disk, read-only, not allowed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise kind(
                f"the disk is full: can't {doing} {path}. Existing files are unchanged. Make space, then start again."
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            hint = "Check its permissions." if doing == "read" else "Name a folder you may write to."
            raise kind(f"can't {doing} {path}: {error.strerror}. {hint}") from error
        raise kind(f"can't {doing} {path}: {error.strerror or error}.") from error


def retried(path: Path, action: Callable[..., T], *arguments: Any) -> T:
    """Returns what ``action`` returns. After an error that may pass, as on a network disk, it is called again.

    Raises:
        OSError: the last error, or the `UserError` that explains it.
    """
    tries = 0
    while True:
        try:
            return action(*arguments)
        except (OSError, UserError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if tries == len(PAUSES) or not isinstance(cause, OSError) or cause.errno not in MAY_PASS:
                raise
            pause, tries = PAUSES[tries], tries + 1
            what = error if cause is not error else f"can't access {path}: {cause.strerror or cause}."
            log.warning("%s Next try in %g s (%d of %d)", what, pause, tries, len(PAUSES))
            time.sleep(pause)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces the content of ``path`` atomically; ``mode`` says who may read it."""
    with explain(path, "write"), whole_file(path, mode) as file:
        file.write(text.encode())


@contextlib.contextmanager
def whole_file(path: Path, mode: int = 0o644, synced: bool = True) -> Iterator[BinaryIO]:
    """Yields a file to write, which becomes ``path`` at the end of the block. After an error, it is removed.

    Args:
        path: the file.
        mode: its permissions.
        synced: whether to wait until the disk has it. Without, it is whole after a kill, but not after a power cut.
    """
    handle, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            faults.reach(faults.FILE)
            if synced:
                os.fsync(file.fileno())
        Path(name).chmod(mode)
        faults.reach(faults.FILE)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    if synced:
        sync_folder(path.parent)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields a folder to fill, which becomes ``target`` at the end of the block. After an error, it is removed.

    An older folder of that name is replaced.
    """
    with explain(target, "write"):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=target.parent))
        aside: Path | None = None
        try:
            folder.chmod(0o755)
            yield folder
            _sync_all(folder)
            aside = _move_aside(target) if target.exists() else None
            faults.reach(faults.FILE)
            folder.replace(target)
            if aside is not None:
                faults.reach(faults.FILE)
                shutil.rmtree(aside, ignore_errors=True)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            if aside is not None and not target.exists():
                (aside / target.name).replace(target)
                aside.rmdir()
            raise
        sync_folder(target.parent)


def _sync_all(folder: Path) -> None:
    """Waits until the disk has a folder with all its files: all at once, since each may take it a tenth of a second."""
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(sync_folder, folder)]
        for path in folder.rglob("*"):
            if path.is_file():
                faults.reach(faults.FILE)
            waiting.append(pool.submit(sync_folder if path.is_dir() else _sync_file, path))
        for done in waiting:
            done.result()


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def remove_folder(path: Path) -> None:
    """Removes a folder atomically."""
    with explain(path, "remove"):
        gone = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=path.parent))
        faults.reach(faults.FILE)
        path.replace(gone / "gone")
        faults.reach(faults.FILE)
        shutil.rmtree(gone, ignore_errors=True)


def _move_aside(target: Path) -> Path:
    """Moves ``target`` aside for a new one. If that never comes, `remove_partial` moves the old one back."""
    aside = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{_OLD}", dir=target.parent))
    faults.reach(faults.FILE)
    target.replace(aside / target.name)
    return aside


def remove_partial(folder: Path) -> None:
    """Removes unfinished files and folders of a killed process from ``folder``."""
    if not folder.is_dir():
        return
    with explain(folder, "remove unfinished files in"):
        for aside in folder.glob(f"{PARTIAL}{_OLD}*"):
            for old in aside.iterdir():
                if not (folder / old.name).exists():
                    faults.reach(faults.FILE)
                    old.replace(folder / old.name)
        for path in folder.glob(f"{PARTIAL}*"):
            faults.reach(faults.FILE)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()


def sync_folder(folder: Path) -> None:
    """Syncs renames in ``folder`` to the disk, if the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
