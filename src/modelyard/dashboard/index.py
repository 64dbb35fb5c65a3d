"""The runs below some folders, kept in memory and brought up to date from their files.

Nothing else is stored. A run is read again when the time or the size of one of its files changes. One thread reads; it
rests while nobody looks.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.comparison.matrix_folder import FAILED, PLAN
from modelyard.dashboard.curves import MetricsReader
from modelyard.dashboard.remote import PAGES, RemoteFolder
from modelyard.dashboard.run_files import (
    LONGEST_TEXT,
    Row,
    read_end,
    read_object,
    read_row,
    signature,
)
from modelyard.run.directory import BIN, CONFIG, EVALUATOR, JOURNAL, LOGS, METRICS
from modelyard.run.manifest import read_journal
from modelyard.system.process import holders

log = logging.getLogger("modelyard")
_PAUSE = 1.0
"""Seconds between two looks at the runs that are running."""
_PARTS = 5
"""Of the others, every look takes such a part."""
_REST_SECONDS = 15.0
"""Without a request for so long, nobody looks at the pages."""
_RECENT_SECONDS = 60.0
_SETTLED_SECONDS = 2.0
"""A folder that changed later may change again within the same tick of the file system's clock."""
_STAMP = "%Y-%m-%d-%H_%M_%S"
_MOST_FOLDERS = 100_000
_DEEPEST = 20
_MOST_READERS = 100
_LARGEST_JOURNAL = 16 << 20


@dataclass
class FoundRun:
    """A run that was found.

    Args:
        id: what requests call it.
        path: its folder.
        name: its path below the folder that was given.
        group: the id of the matrix or search that it is a cell of; empty if there is none.
        seen: the signature of its files when they were read, and why its matrix says that it failed.
        row: what the table shows.
        version: grows with every change.
    """

    id: str
    path: str
    name: str
    group: str = ""
    seen: tuple[Any, ...] = ()
    row: Row = field(default_factory=dict)
    version: int = 0


@dataclass
class Group:
    """The folder of a matrix or a search."""

    id: str
    path: str
    name: str
    pages: tuple[str, ...] = ()
    running: bool = False
    failures: dict[str, str] = field(default_factory=dict)


@dataclass
class Deleted:
    """A run in a bin."""

    id: str
    path: str
    name: str


@dataclass
class _Listing:
    """The content of a folder that is no run."""

    changed: int
    folders: list[str]
    has_config: bool
    is_group: bool


class Index:
    """The runs below some folders.

    Args:
        folders: absolute paths, and URLs on object stores.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.remotes = [RemoteFolder(folder) for folder in folders if storage.is_remote(folder)]
        local = [folder.rstrip("/") or "/" for folder in folders if not storage.is_remote(folder)]
        self.folders = [*local, *(str(remote.path) for remote in self.remotes)]
        self.runs: dict[str, FoundRun] = {}
        self.groups: dict[str, Group] = {}
        self.bin: dict[str, Deleted] = {}
        self.problem = ""
        self.is_complete = False
        self._version = 1
        self._gone: list[tuple[int, str]] = []
        self._listings: dict[str, _Listing] = {}
        self._readers: OrderedDict[str, list[MetricsReader]] = OrderedDict()
        self._journals: dict[str, tuple[tuple[int, int], dict[str, list[dict[str, str]]]]] = {}
        self._guard = threading.RLock()
        self._asked = time.monotonic()
        self._rests = False
        self._now = threading.Event()
        self._looks = 0

    # -- what requests ask ------------------------------------------------------------------------------------------

    def changes(self, since: int) -> dict[str, Any]:
        """Returns what changed after a version: rows of runs, and ids of those that are gone; and all groups."""
        self._asked = time.monotonic()
        if self._rests:
            self._now.set()
        with self._guard:
            changed = [run for run in self.runs.values() if run.version > since]
            base: dict[str, Any] = next((run.row["options"] for run in self.runs.values()), {})
            return {
                "version": self._version,
                "complete": self.is_complete,
                "problem": self.problem or next((one.problem for one in self.remotes if one.problem), ""),
                "base": base if changed else {},
                "runs": [{**_sent(run, base), "remote": self.is_remote(run.path)} for run in changed],
                "gone": [name for version, name in self._gone if version > since] if since else [],
                "groups": [
                    {"id": g.id, "name": g.name, "pages": g.pages, "running": g.running} for g in self.groups.values()
                ],
                "bin": [{"id": one.id, "name": one.name} for one in self.bin.values()],
            }

    def wake(self) -> None:
        """Lets all runs be read again at once."""
        self._looks = 0
        self._now.set()

    def is_remote(self, path: str) -> bool:
        """Returns whether a path is in the copy of a folder on an object store."""
        return any(path.startswith(f"{remote.path}/") or path == str(remote.path) for remote in self.remotes)

    def address(self, path: str) -> str:
        """Returns a path as the user knows it: in a copy of an object store, its URL."""
        for remote in self.remotes:
            if path.startswith(f"{remote.path}/") or path == str(remote.path):
                return remote.address(path)
        return path

    def readers(self, run: FoundRun) -> list[MetricsReader]:
        """Returns what reads the metrics of a run. The readers of the runs that were asked for last are kept."""
        with self._guard:
            found = self._readers.pop(run.id, None)
            if found is None:
                found = [MetricsReader(f"{run.path}/{METRICS}"), MetricsReader(f"{run.path}/{EVALUATOR}/{METRICS}")]
            self._readers[run.id] = found
            while len(self._readers) > _MOST_READERS:
                self._readers.popitem(last=False)
            return found

    def notes(self, run: FoundRun) -> list[dict[str, str]]:
        """Returns the entries of a run in the journal beside it."""
        folder, name = os.path.split(run.path)
        path = f"{folder}/{JOURNAL}"
        try:
            status = os.stat(path, follow_symlinks=False)
        except OSError:
            return []
        mark = (status.st_mtime_ns, status.st_size)
        known = self._journals.get(path)
        if known is None or known[0] != mark:
            text = read_end(path, _LARGEST_JOURNAL)[0].decode("utf-8", "replace")
            known = self._journals[path] = (mark, read_journal(text))
        entries = known[1].get(" ".join(name.split()), [])
        return [{**entry, "text": entry["text"][:LONGEST_TEXT]} for entry in entries[-200:]]

    # -- reading ----------------------------------------------------------------------------------------------------

    def watch(self, stopped: threading.Event) -> None:
        """Reads and keeps up to date, until ``stopped`` is set and `wake` is called. Call it in a thread."""
        for remote in self.remotes:
            threading.Thread(target=remote.watch, args=(stopped, lambda: not self._rests), daemon=True).start()
        while not stopped.is_set():
            try:
                self.refresh()
                self.problem = ""
            except Exception:  # one stranger's folder must not end the others
                log.exception("the runs could not be read")
                self.problem = "the runs could not be read; the log of the dashboard has the reason"
            self._rests = time.monotonic() - self._asked > _REST_SECONDS
            self._now.wait(None if self._rests else _PAUSE)
            self._now.clear()

    def refresh(self) -> None:
        """Looks for new runs, and reads those again whose files changed."""
        found: set[str] = set()
        groups: dict[str, Group] = {}
        deleted: dict[str, Deleted] = {}
        visited: set[str] = set()
        for top in self.folders:
            self._walk(top, top, "", 0, found, groups, deleted, visited)
        for name in self._listings.keys() - visited:
            del self._listings[name]
        with self._guard:
            self.groups, self.bin = groups, deleted
            for name in self.runs.keys() - found:
                self._remove(name)
        part, self._looks = self._looks % _PARTS, self._looks + 1
        recently = time.time() - _RECENT_SECONDS
        for number, run in enumerate(list(self.runs.values())):
            is_busy = run.row.get("state") == "running" or (run.row.get("changed") or 0) > recently
            if is_busy or self._looks == 1 or number % _PARTS == part:
                self._read(run)
        self.is_complete = True

    def _walk(
        self,
        top: str,
        path: str,
        group: str,
        depth: int,
        found: set[str],
        groups: dict[str, Group],
        deleted: dict[str, Deleted],
        visited: set[str],
    ) -> None:
        """Finds the runs in a folder and below, not inside of runs and not behind links."""
        key = _id(path)
        if key in self.runs:
            found.add(key)
            return
        if path in visited or len(visited) > _MOST_FOLDERS or depth > _DEEPEST:
            return
        visited.add(path)
        listing = self._list(path)
        if listing is None:
            return
        if listing.has_config:
            run = FoundRun(key, path, _name(top, path, self.folders), group)
            if self._read(run):
                found.add(key)
                return
        if listing.is_group:
            group = key
            groups[key] = self._group(key, path, _name(top, path, self.folders))
            with self._guard:
                self.groups = {**self.groups, key: groups[key]}
        for name in listing.folders:
            if name == BIN:
                self._list_bin(f"{path}/{BIN}", deleted)
            else:
                self._walk(top, f"{path}/{name}", group, depth + 1, found, groups, deleted, visited)

    def _list(self, path: str) -> _Listing | None:
        """Returns the content of a folder, which is listed again only if it changed."""
        try:
            changed = os.stat(path).st_mtime_ns
            known = self._listings.get(path)
            if known is not None and known.changed == changed:
                return known
            names: list[str] = []
            has_config = is_group = False
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name == CONFIG:
                        has_config = entry.is_file(follow_symlinks=False)
                    elif entry.name == PLAN:
                        is_group = entry.is_file(follow_symlinks=False)
                    elif (entry.name[0] != "." or entry.name == BIN) and entry.is_dir(follow_symlinks=False):
                        names.append(entry.name)
        except OSError:
            return None
        listing = _Listing(changed, sorted(names), has_config, is_group)
        if time.time_ns() - changed > _SETTLED_SECONDS * 1e9 and not has_config:
            self._listings[path] = listing
        else:
            self._listings.pop(path, None)
        return listing

    def _group(self, key: str, path: str, name: str) -> Group:
        pages = tuple(page for page in PAGES if is_plain(f"{path}/{page}"))
        logs = Path(path, LOGS)
        running = not logs.is_symlink() and bool(holders(logs))
        failures = {str(k): str(v)[:300] for k, v in list(read_object(f"{path}/{FAILED}").items())[:10_000]}
        return Group(key, path, name, pages, running, failures)

    def _list_bin(self, path: str, deleted: dict[str, Deleted]) -> None:
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(path)):
                one = f"{path}/{name}"
                if is_plain(f"{one}/{CONFIG}") and not os.path.islink(one):
                    deleted[_id(one)] = Deleted(
                        _id(one), one, _name("", f"{path[: -len(BIN)]}{original_name(name)}", self.folders)
                    )

    def _read(self, run: FoundRun) -> bool:
        """Reads a run if its files changed; False if it is none."""
        group = self.groups.get(run.group)
        failure = group.failures.get(os.path.basename(run.path)) if group is not None else None
        files = signature(run.path)
        seen = (files, failure)
        if seen == run.seen:
            return True
        row = read_row(run.path, files)
        with self._guard:
            if row is None:
                self._remove(run.id)
                return False
            if failure and row["state"] not in ("running", "finished"):
                row |= {"state": "failed", "reason": row["reason"] or failure}
            self._version += 1
            run.seen, run.row, run.version = seen, row, self._version
            self.runs[run.id] = run
        return True

    def _remove(self, name: str) -> None:
        if self.runs.pop(name, None) is not None:
            self._version += 1
            self._gone.append((self._version, name))
            del self._gone[:-10_000]
            self._readers.pop(name, None)


def _sent(run: FoundRun, base: dict[str, Any]) -> dict[str, Any]:
    """Returns a row as it is sent: of the options, those that are not as in ``base``."""
    options = run.row["options"]
    own = {key: value for key, value in options.items() if key not in base or base[key] != value}
    row = {key: value for key, value in run.row.items() if key not in ("options", "best")}
    without = [key for key in base if key not in options]
    best = run.row["best"]
    row["best_step"] = best["step"] if best else None
    return row | {"id": run.id, "name": run.name, "group": run.group, "options": own, "without": without}


def _id(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _name(top: str, path: str, folders: Sequence[str]) -> str:
    """Returns the path of a run below the folder that was given; with several folders, with that folder's name."""
    top = top or next((folder for folder in folders if path.startswith(f"{folder}/")), os.path.dirname(path))
    name = path[len(top) :].strip("/")
    first = os.path.basename(top)
    if not name or len(folders) > 1:
        name = f"{first}/{name}".rstrip("/")
    return name.encode("utf-8", "replace").decode()


def is_plain(path: str) -> bool:
    """Returns whether there is a regular file, not a link."""
    try:
        return stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        return False


def name_in_bin(name: str, now: datetime) -> str:
    """Returns the name of a run's folder in the bin: it begins with the time, so two of a name fit in."""
    return f"{now.strftime(_STAMP)}-{now.microsecond:06}--{name}"


def original_name(name: str) -> str:
    """Returns the name that a run in the bin had."""
    stamp, dashes, rest = name.partition("--")
    try:
        datetime.strptime(stamp.rpartition("-")[0], _STAMP)
    except ValueError:
        return name
    return rest if dashes and rest else name
