"""Run folders on object stores: a run works in a local folder, and a mirror uploads what changes.

An object store shows single objects whole, but no folder at once. A checkpoint exists if its ``state.json`` does: it is
uploaded last and removed first, and it contains the checksums of the other files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
import weakref
from pathlib import Path, PurePosixPath

from modelyard import faults, storage
from modelyard.errors import CheckpointError, StorageError
from modelyard.run.checkpoint import (
    DAMAGED,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    DamagedError,
    is_folder_name,
    list_checkpoints,
    read_checkpoint,
)
from modelyard.run.directory import BEST, CHECKPOINTS, CONFIG, EVENTS, JOURNAL, LOCK, LOGS, MANIFEST, METRICS, PROFILE
from modelyard.run.manifest import JOURNAL_TITLE
from modelyard.run.remote_lock import RemoteLock, is_alive
from modelyard.system.files import explain, remove_folder, whole_folder
from modelyard.system.process import SUFFIX, holders

_SMALL = (CONFIG, MANIFEST, METRICS, EVENTS, LOGS, PROFILE)
"""Files and folders that are uploaded before any checkpoint, in this order: a folder with a config is a run."""
_TO_RESUME = (CONFIG, MANIFEST, METRICS, EVENTS, LOGS)
_TO_READ = (CONFIG, MANIFEST, METRICS)
_COPY_SECONDS = 7 * storage.DAY
log = logging.getLogger("modelyard")


class Mirror:
    """Downloads a remote run folder, and uploads what changes in the local one.

    Args:
        url: the remote run folder.
        folder: the local one.
        cache: for copies of weights, if the run is only read.
    """

    def __init__(self, url: str, folder: Path, cache: Path) -> None:
        self.url = url.rstrip("/")
        self.folder = folder
        self.cache = cache
        self.fetched = False  # whether the local folder equals the remote one
        self._lock = RemoteLock(storage.join(self.url, LOCK), self.url)
        self._states: dict[str, bytes] = {}  # the state.json of every remote checkpoint, by its folder
        self._sent: dict[str, tuple[int, int]] = {}  # length and time of the small files, as they were uploaded
        self._journal_sent = 0

    def address(self, path: Path) -> str:
        """The URL of a path in the local folder."""
        return storage.join(self.url, *path.relative_to(self.folder).parts)

    def exists(self) -> bool:
        """Whether there is a run."""
        return storage.exists(storage.join(self.url, CONFIG))

    def unexpected_files(self) -> list[str]:
        """The remote files except locks."""
        return [name or self.url for name in storage.names_below(self.url) if not name.startswith(LOCK)]

    def is_held(self) -> bool:
        """Whether a process is writing to the remote folder now."""
        holder = self._lock.holder()
        return holder is not None and is_alive(holder)

    # -- to resume a run ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Takes the lock and makes the local folder equal to the remote one, with only its newest checkpoint.

        Local files that the remote folder does not have are removed: the remote folder is the run.

        Raises:
            RunError: if another process writes to it.
            CheckpointError: if there are checkpoints and all are damaged.
        """
        self._lock.acquire()
        try:
            names = self._names()
            self._states = self._read_states(names)
            self._remove_incomplete(names)
            best = [name for name in self._states if name.startswith(f"{BEST}/")]
            kept = {name for name in best if self._download_checkpoint(name)} | set(self._download_newest(names))
            held = _logs_in_use(self.folder)
            self._clear_local(kept | held)
            for name in names:
                if PurePosixPath(name).parts[0] in _TO_RESUME and name not in held:
                    self._download(name)
                    self._sent[name] = _stamp(self.folder / name)
        except BaseException:
            with contextlib.suppress(Exception):
                self._lock.release()
            raise
        self.fetched = True

    def push(self, keep: int | None = None, final: bool = False) -> None:
        """Uploads what changed.

        Storage that can't be reached for a while does not end a run: the next upload includes what is missing.

        Args:
            keep: how many of the newest checkpoints stay; None removes none.
            final: no upload follows, so failures are errors.
        """
        try:
            self._lock.renew()
            self._push_small_files()
            for kind in (BEST, CHECKPOINTS):
                for path in list_checkpoints(self.folder / kind).values():
                    self._push_checkpoint(f"{kind}/{path.name}", path)
            self._prune(keep)
            self._push_journal()
        except StorageError as error:
            if final:
                raise
            log.warning("%s The next checkpoint uploads what is missing.", error)

    def close(self, failed: bool = False) -> None:
        """Uploads for the last time and releases the lock.

        Args:
            failed: another error is being raised; a failed upload is only logged.
        """
        try:
            try:
                if (self.folder / CONFIG).is_file():
                    self.push(final=True)
            finally:
                self._lock.release()
        except Exception as error:
            if not failed:
                raise
            log.error("the last upload to %s failed: %s", self.url, error)

    # -- to read a run -----------------------------------------------------------------------------------------------

    def fetch_small_files(self) -> None:
        """Downloads config, manifest, metrics, and the state of every checkpoint."""
        names = self._names()
        self.fetched = True
        for name in _TO_READ:
            if name in names:
                self._download(name)
        for name, state in self._read_states(names).items():
            (self.folder / name).mkdir(parents=True)
            (self.folder / name / STATE).write_bytes(state)

    def download_weights(self, path: Path) -> None:
        """Downloads the large files of a checkpoint through the cache."""
        for name in (WEIGHTS, OPTIMIZER):
            if not (path / name).exists():
                (path / name).symlink_to(storage.local_copy(self.address(path / name), self.cache))

    # -- the steps of both -------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """All remote files. Keys of objects may be anything, so those that would lead out of a folder are left out."""
        names = storage.names_below(self.url)
        return [name for name in names if name and not {"", ".", ".."} & set(name.split("/")) and "\\" not in name]

    def _read_states(self, names: list[str]) -> dict[str, bytes]:
        """The state.json of every remote checkpoint, by its folder, oldest first."""
        folders = [name.rpartition("/")[0] for name in names if name.endswith(f"/{STATE}")]
        return {name: storage.read_bytes(self._at(name, STATE)) for name in folders if _is_checkpoint(name)}

    def _download(self, name: str) -> None:
        target = self.folder / name
        with explain(target, "write"):
            target.parent.mkdir(parents=True, exist_ok=True)
        storage.download(self._at(name), target)

    def _download_newest(self, names: list[str]) -> list[str]:
        """Downloads the newest checkpoint that is not damaged."""
        newest_first = sorted((n for n in self._states if n.startswith(f"{CHECKPOINTS}/")), key=_step, reverse=True)
        for name in newest_first:
            if self._download_checkpoint(name):
                return [name]
        if newest_first or any(_is_set_aside(name) for name in names):  # now, or at an earlier start
            raise CheckpointError(
                f"all checkpoints in {self._at(CHECKPOINTS)} are damaged; there is nothing to resume from. "
                "Restore them from a copy, or start a new run with another --model_dir."
            )
        return []

    def _download_checkpoint(self, name: str) -> bool:
        """Makes the local checkpoint equal to the remote one. False if that is damaged; it is set aside then."""
        target, state = self.folder / name, self._states[name]
        with explain(target / STATE, "read"):
            same = (target / STATE).is_file() and (target / STATE).read_bytes() == state
        if same and _is_whole(target):
            return True
        with whole_folder(target) as partial:
            (partial / STATE).write_bytes(state)
            for file in (WEIGHTS, OPTIMIZER):
                try:
                    storage.download(self._at(name, file), partial / file)
                except StorageError as error:
                    if not storage.is_missing(error):
                        raise
        if _is_whole(target):
            return True
        remove_folder(target)
        log.warning("%s is damaged: it was set aside and is skipped.", self._at(name))
        storage.write_bytes(self._at(name, f"{DAMAGED}{STATE}"), state)
        self._remove_state(name)
        return False

    def _clear_local(self, kept: set[str]) -> None:
        """Removes the local files of an earlier run, except the checkpoints and logs in ``kept``."""
        with explain(self.folder, "clear"):
            for path in self.folder.iterdir():
                if path.name in (CHECKPOINTS, BEST, LOGS):
                    for old in path.iterdir():
                        if f"{path.name}/{old.name}" not in kept:
                            _remove(old)
                elif path.name != LOCK:  # held open by this process
                    _remove(path)
            _remove(self.folder.parent / JOURNAL)
            for name in (CHECKPOINTS, LOGS):
                (self.folder / name).mkdir(exist_ok=True)

    def _remove_incomplete(self, names: list[str]) -> None:
        """Removes files of remote checkpoints whose upload or removal was never finished."""
        for name in names:
            folder = name.rpartition("/")[0]
            aside = f"{folder}/{DAMAGED}{STATE}" in names
            if _is_checkpoint(folder) and folder not in self._states and not aside:
                storage.remove(self._at(name))

    def _push_small_files(self) -> None:
        paths = [self.folder / name for name in _SMALL]
        files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
        here = {file.relative_to(self.folder).as_posix(): file for file in files if _is_sent(file)}
        for name, file in here.items():
            stamp = _stamp(file)
            if self._sent.get(name) != stamp:
                storage.write_bytes(self._at(name), file.read_bytes())  # read at once: it may grow meanwhile
                self._sent[name] = stamp
        for name in [name for name in self._sent if name not in here]:
            storage.remove(self._at(name))
            del self._sent[name]

    def _push_checkpoint(self, name: str, path: Path) -> None:
        state = (path / STATE).read_bytes()
        there = self._states.get(name)
        if there == state:
            return
        known, checksums = ({} if text is None else json.loads(text)["sha256"] for text in (there, state))
        changed = [file for file in (WEIGHTS, OPTIMIZER) if there is None or known.get(file) != checksums.get(file)]
        if there is not None and changed:  # other weights under the old state would be a damaged checkpoint
            self._remove_state(name)
        for file in changed:
            storage.upload(path / file, self._at(name, file))
        storage.write_bytes(self._at(name, STATE), state)
        self._states[name] = state

    def _prune(self, keep: int | None) -> None:
        best = {f"{BEST}/{path.name}" for path in list_checkpoints(self.folder / BEST).values()}
        gone = [name for name in self._states if name.startswith(f"{BEST}/") and name not in best]
        if keep is not None:
            saved = sorted((name for name in self._states if name.startswith(f"{CHECKPOINTS}/")), key=_step)
            gone += saved[:-keep]
        for name in gone:
            self._remove_state(name)
            for file in (WEIGHTS, OPTIMIZER):
                storage.remove(self._at(name, file))

    def _remove_state(self, name: str) -> None:
        """Removes state.json, without which the checkpoint does not exist."""
        storage.remove(self._at(name, STATE))
        self._states.pop(name, None)

    def _push_journal(self) -> None:
        """Adds the entries of this process to the journal beside the runs, to which other runs may have added."""
        journal = self.folder.parent / JOURNAL
        if not journal.is_file() or journal.stat().st_size == self._journal_sent:
            return
        mine = journal.read_bytes()
        url = storage.join(storage.parent(self.url), JOURNAL)
        there = storage.read_if_there(url) or b""
        new = mine[self._journal_sent :]
        storage.write_bytes(url, there + (new.removeprefix(JOURNAL_TITLE.encode()) if there else new))
        self._journal_sent = len(mine)

    def _at(self, *parts: str) -> str:
        return storage.join(self.url, *parts)


def working_folder(url: str, cache: Path) -> Path:
    """The local folder in which a run at ``url`` works."""
    return cache / "runs" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:24] / _name(url)


def open_mirror(url: str, cache: Path) -> Mirror:
    """A mirror to read a remote run, in a local folder of its own that is removed with it."""
    copies = cache / "views"
    with explain(cache, "write to the cache"):
        copies.mkdir(parents=True, exist_ok=True)
        for old in copies.iterdir():  # of killed processes; a living one may use its copy for days
            with contextlib.suppress(OSError):
                if storage.is_older(old, _COPY_SECONDS):
                    shutil.rmtree(old, ignore_errors=True)
        top = Path(tempfile.mkdtemp(dir=copies))
    mirror = Mirror(url, top / _name(url), cache)
    weakref.finalize(mirror, shutil.rmtree, top, ignore_errors=True)
    mirror.folder.mkdir()
    mirror.fetch_small_files()
    return mirror


def _name(url: str) -> str:
    name = url.rstrip("/").rpartition("/")[2]
    return "run" if name in ("", ".", "..") else name


def _is_checkpoint(name: str) -> bool:
    kind, _, folder = name.partition("/")
    return kind in (CHECKPOINTS, BEST) and is_folder_name(folder)


def _is_set_aside(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder.startswith(f"{CHECKPOINTS}/") and _is_checkpoint(folder) and file == f"{DAMAGED}{STATE}"


def _step(name: str) -> int:
    return int(name.rpartition("-")[2])


def _logs_in_use(folder: Path) -> set[str]:
    """Logs and pid files of the launcher and of other processes of the run, which work in the same folder.

    Also what must outlive a kill: which faults were injected.
    """
    used = {f"{LOGS}/{holder.name}{suffix}" for holder in holders(folder / LOGS) for suffix in (".log", SUFFIX)}
    return used | {f"{LOGS}/{path.name}" for path in (folder / LOGS).glob(f"*{faults.SUFFIX}")}


def _is_sent(file: Path) -> bool:
    return file.is_file() and file.suffix != SUFFIX and not file.name.startswith(".")


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _is_whole(path: Path) -> bool:
    """Whether the checkpoint is complete and undamaged."""
    try:
        read_checkpoint(path)
    except DamagedError:
        return False
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
