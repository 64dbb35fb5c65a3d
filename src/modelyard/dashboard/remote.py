"""Runs on an object store: a local copy of their small files, which is read like other folders.

Weights and events are not copied. Who listed the files knows which of them changed, so a look costs one listing and the
files that are new. The copy of a run's lock is locked while the run is.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO

from modelyard import storage
from modelyard.comparison.matrix_folder import FAILED, PLAN
from modelyard.errors import RunError, StorageError, UserError
from modelyard.run.checkpoint import STATE, is_folder_name
from modelyard.run.directory import BEST, CHECKPOINTS, CONFIG, EVALUATOR, JOURNAL, LOCK, LOGS, MANIFEST, METRICS
from modelyard.run.remote_lock import RemoteLock, is_alive
from modelyard.system.files import explain

PAGES = ("leaderboard.html", "search.html")
"""Pages that are written to the folder of a matrix or a search."""
REPORT = "report.html"
_COPIED = {CONFIG, MANIFEST, METRICS, JOURNAL, LOCK, PLAN, FAILED, REPORT, *PAGES}
_CHECKPOINT = re.compile(rf"(.*/|){CHECKPOINTS}/[^/]+/{re.escape(STATE)}", re.DOTALL)
_LARGEST = 64 << 20
_SECONDS = 20.0
"""Between two looks: a listing costs."""
_THREADS = 8
log = logging.getLogger("modelyard")


class RemoteFolder:
    """A local copy of what the pages read of the runs below a URL.

    Args:
        url: the folder.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        views = storage.cache_folder() / "views"
        with explain(views, "write to the cache"):
            views.mkdir(parents=True, exist_ok=True)
            self._place = tempfile.TemporaryDirectory(dir=views, ignore_cleanup_errors=True)
        name = self.url.rpartition("/")[2]
        self.path = Path(self._place.name, name if name not in ("", ".", "..") else "runs")
        self.path.mkdir()
        self.problem = ""
        self._versions: dict[str, str] = {}
        self._held: dict[str, IO[bytes]] = {}

    def watch(self, stopped: threading.Event, is_looked_at: Callable[[], bool]) -> None:
        """Copies what changed, again and again. Call it in a thread."""
        last = -_SECONDS
        while not stopped.is_set():
            if is_looked_at() and time.monotonic() - last > _SECONDS:
                try:
                    self.refresh()
                    self.problem = ""
                except (UserError, OSError) as error:
                    log.warning("%s", error)
                    self.problem = str(error)
                last = time.monotonic()
            stopped.wait(1.0)
        self.close()

    def refresh(self) -> None:
        """Copies what changed.

        Raises:
            StorageError: if the store can't be read.
        """
        there = {
            name: version
            for name, (version, size) in storage.list_versions(self.url).items()
            if _is_wanted(name) and size <= _LARGEST
        }
        wanted = set(_without_old_checkpoints(there))
        for name in self._versions.keys() - wanted:
            del self._versions[name]
            with contextlib.suppress(OSError):
                (self.path / name).unlink()
        new = [name for name in sorted(wanted) if self._versions.get(name) != there[name]]
        with ThreadPoolExecutor(_THREADS) as pool:
            for name in pool.map(self._copy, new):
                self._versions[name] = there[name]
        self._lock([name for name in wanted if PurePosixPath(name).name == LOCK])

    def close(self) -> None:
        """Removes the copy."""
        for file in self._held.values():
            file.close()
        self._held.clear()
        self._place.cleanup()

    def address(self, path: str) -> str:
        """Returns the URL of a path in the copy."""
        return storage.join(self.url, *Path(path).relative_to(self.path).parts)

    def _copy(self, name: str) -> str:
        target = self.path / name
        with explain(target, "write"):
            target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            try:
                storage.download(storage.join(self.url, name), target)
            except StorageError as error:
                if not storage.is_missing(error):  # it has just been removed
                    raise
        return name

    def _lock(self, names: list[str]) -> None:
        """Locks the copies of the locks that a living process holds, and no others."""
        held = set()
        for name in names:
            try:
                holder = RemoteLock(storage.join(self.url, name), self.url).holder()
            except StorageError:
                raise
            except RunError:  # of a run that was copied from a local folder
                continue
            if holder is not None and is_alive(holder):
                held.add(name)
        for name in self._held.keys() - held:
            self._held.pop(name).close()
        for name in held:
            if name in self._held:  # its copy may be another file by now
                self._held.pop(name).close()
            with contextlib.suppress(OSError):
                self._held[name] = open(self.path / name, "rb")  # noqa: SIM115 - locked until it is closed
                fcntl.flock(self._held[name], fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_wanted(name: str) -> bool:
    """Returns whether a file is copied. Keys of objects may be anything, also what would lead out of the folder."""
    parts = name.split("/")
    if {"", ".", ".."} & set(parts) or "\\" in name or "\0" in name:
        return False
    if parts[-1] in _COPIED and (len(parts) < 2 or parts[-2] not in (CHECKPOINTS, BEST)):
        return EVALUATOR not in parts[:-1] or parts[-2:] == [EVALUATOR, METRICS]
    if parts[-1] == "chief.log":
        return parts[-2:-1] == [LOGS]
    return parts[-1] == STATE and len(parts) > 2 and parts[-3] in (CHECKPOINTS, BEST) and is_folder_name(parts[-2])


def _without_old_checkpoints(names: Iterable[str]) -> list[str]:
    """Returns the names with the newest checkpoint of each run only, and all best models."""
    newest: dict[str, str] = {}
    kept = []
    for name in names:
        found = _CHECKPOINT.fullmatch(name)
        if found is None:
            kept.append(name)
        else:
            newest[found[1]] = max(newest.get(found[1], ""), name, key=lambda each: (len(each), each))
    return [*kept, *newest.values()]
