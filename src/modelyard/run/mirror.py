"""Run folders on object stores: a run works in a local folder, and a mirror uploads what changes.

An object store shows single objects whole, but no folder at once. A checkpoint exists if its ``state.json`` does: it is
uploaded last and removed first, and it contains the checksums of the other files.

Every part of the remote folder has one process that writes it: who has the run's lock writes config, metrics, logs and
checkpoints; who has the lock of evaluation writes ``best/`` and, if it is an evaluator, ``evaluator/``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
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
    is_resumable,
    list_checkpoints,
    read_checkpoint,
    read_state,
)
from modelyard.run.directory import (
    BEST,
    CHECKPOINTS,
    CONFIG,
    EVALUATION_LOCK,
    EVALUATOR,
    EVENTS,
    EXAMPLES,
    JOURNAL,
    LOCK,
    LOGS,
    MANIFEST,
    METRICS,
    PROFILE,
    SPLITS,
    TRACKERS,
)
from modelyard.run.manifest import JOURNAL_TITLE
from modelyard.run.remote_lock import HeldError, RemoteLock, is_alive
from modelyard.system.files import explain, remove_folder, whole_folder
from modelyard.system.process import SUFFIX, holders, host_file

_SMALL = (CONFIG, MANIFEST, METRICS, SPLITS, EVENTS, LOGS, PROFILE, EXAMPLES, TRACKERS)
"""Files and folders that are uploaded before any checkpoint, in this order: a folder with a config is a run."""
_TO_RESUME = (CONFIG, MANIFEST, METRICS, SPLITS, EVENTS, LOGS, EXAMPLES, TRACKERS)
_TO_READ = (CONFIG, MANIFEST, METRICS, f"{EVALUATOR}/{METRICS}")
_TO_EVALUATE = (CONFIG, MANIFEST, METRICS)
_REFRESH_SECONDS = 5.0
"""How often an evaluator looks for new checkpoints: a look is a few requests, which cost."""
_COPY_SECONDS = 7 * storage.DAY
log = logging.getLogger("modelyard")


class Mirror:
    """Downloads a remote run folder, and uploads what changes in the local one.

    Args:
        url: the remote run folder.
        folder: the local one.
        cache: for copies of weights, if the run is only read.
        evaluator: this process evaluates a run that another one trains.
    """

    def __init__(self, url: str, folder: Path, cache: Path, evaluator: bool = False) -> None:
        self.url = url.rstrip("/")
        self.folder = folder
        self.cache = cache
        self.fetched = False  # whether the local folder equals the remote one
        self._is_evaluator = evaluator
        self._lock = RemoteLock(storage.join(self.url, LOCK), self.url)
        self._evaluation_lock = RemoteLock(storage.join(self.url, EVALUATION_LOCK), f"the evaluation of {self.url}")
        self._held: list[RemoteLock] = []
        self._kinds: list[str] = []  # of the checkpoints that this process writes
        self._states: dict[str, bytes] = {}  # the state.json of these checkpoints in the remote folder, by theirs
        self._sent: dict[str, tuple[int, int]] = {}  # length and time of the small files, as they were uploaded
        self._journal_sent = 0
        self._refreshed = -_REFRESH_SECONDS

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
        """Takes the lock and makes the local folder equal to the remote one, with only the newest state of the run.

        Local files that the remote folder does not have are removed: the remote folder is the run.

        Raises:
            RunError: if another process writes to it.
            CheckpointError: if there are checkpoints and all are damaged.
        """
        self._lock.acquire()
        self._held.append(self._lock)
        try:
            names = self._names()
            self._own(CHECKPOINTS, names)
            kept = set(self._download_newest(names))
            held = _logs_in_use(self.folder)
            self._clear_local(kept | held)
            best = self._read_states(BEST, names)
            self._show(BEST, best)
            self._download_newer_best(best, max(map(_step, kept), default=-1))
            for name in names:
                if PurePosixPath(name).parts[0] in _TO_RESUME and name not in held:
                    self._download(name)
                    self._sent[name] = _stamp(self.folder / name)
        except BaseException:
            with contextlib.suppress(Exception):
                self._release()
            raise
        self._kinds.append(CHECKPOINTS)
        self.fetched = True

    def take_evaluation(self) -> bool:
        """Takes the lock of evaluation and downloads the best models; False if another process has it."""
        if self._evaluation_lock in self._held:
            return True
        try:
            # A process renews its locks one after the other: the first of a dead one may be stale, this one not yet.
            self._evaluation_lock.acquire(dead=self._lock.replaced)
        except HeldError:
            return False
        self._held.append(self._evaluation_lock)
        try:
            names = self._names()
            self._own(BEST, names)
            kept = {name for name in list(self._states) if _kind(name) == BEST and self._download_checkpoint(name)}
            self._clear_checkpoints(BEST, kept)
            if self._is_evaluator:
                self._resume_evaluation(names)
        except BaseException:  # a best model that was not downloaded must not look as if it had been removed here
            self._held.remove(self._evaluation_lock)
            with contextlib.suppress(Exception):
                self._evaluation_lock.release()
            raise
        self._kinds.append(BEST)
        return True

    def _resume_evaluation(self, names: list[str]) -> None:
        """Makes the local files of an evaluator equal to the remote ones."""
        with explain(self.folder, "clear"):
            for path in (self.folder / EVALUATOR, self.folder.parent / JOURNAL):
                _remove(path)
        for name in names:
            if name.startswith(f"{EVALUATOR}/"):
                self._download(name)
                self._sent[name] = _stamp(self.folder / name)

    def who_evaluates(self) -> str:
        """The process that has the lock of evaluation, for messages; empty if there is none."""
        holder = self._evaluation_lock.holder()
        return f"process {holder['pid']} on {holder['host']}" if holder else ""

    def push(self, keep: int | None = None, final: bool = False) -> None:
        """Uploads what changed in the parts that this process writes.

        Storage that can't be reached for a while does not end a run: the next upload includes what is missing.

        Args:
            keep: how many of the newest checkpoints stay; None removes none.
            final: no upload follows, so failures are errors.
        """
        try:
            for lock in self._held:
                lock.renew()
            if self._is_evaluator:  # a row says that a model was evaluated, and kept if it is among the best
                self._push_checkpoints(keep)
                self._push_small_files((EVALUATOR,))
            else:
                self._push_small_files(_SMALL)
                self._push_checkpoints(keep)
            self._push_journal()
        except StorageError as error:
            if final:
                raise
            log.warning("%s The next %s uploads what is missing.", error, "one" if self._is_evaluator else "checkpoint")

    def close(self, failed: bool = False) -> None:
        """Uploads for the last time and releases the locks.

        Args:
            failed: another error is being raised; a failed upload is only logged.
        """
        try:
            try:
                if self._held and (self.folder / CONFIG).is_file():
                    self.push(final=True)
            finally:
                self._release()
        except Exception as error:
            if not failed:
                raise
            log.error("the last upload to %s failed: %s", self.url, error)

    def _release(self) -> None:
        with contextlib.ExitStack() as stack:
            for lock in self._held:
                stack.callback(lock.release)
            self._held = []

    # -- to evaluate a run -------------------------------------------------------------------------------------------

    def refresh(self, now: bool = False) -> None:
        """Downloads what an evaluator needs to know: config, manifest, metrics, and the state of every checkpoint.

        The weights of a checkpoint are downloaded when its turn comes.

        Args:
            now: look at once; by default, at most every few seconds.
        """
        if not now and time.monotonic() - self._refreshed < _REFRESH_SECONDS:
            return
        names = self._names()
        states = self._read_states(CHECKPOINTS, names)
        for name in _TO_EVALUATE:
            if name in names:
                self._download(name)
        self._show(CHECKPOINTS, states)
        self.fetched = True
        self._refreshed = time.monotonic()

    # -- to read a run -----------------------------------------------------------------------------------------------

    def fetch_small_files(self) -> None:
        """Downloads config, manifest, metrics, and the state of every checkpoint."""
        names = self._names()
        self.fetched = True
        for name in _TO_READ:
            if name in names:
                self._download(name)
        for kind in (BEST, CHECKPOINTS):
            for name, state in self._read_states(kind, names).items():
                (self.folder / name).mkdir(parents=True)
                (self.folder / name / STATE).write_bytes(state)

    def fetch_folder(self, path: Path) -> None:
        """Downloads the files of a folder that are not here yet."""
        below = f"{path.relative_to(self.folder).as_posix()}/"
        for name in self._names():
            if name.startswith(below) and not (self.folder / name).exists():
                self._download(name)

    def download_weights(self, path: Path) -> None:
        """Downloads the large files of a checkpoint. Through the cache, unless it is one of many to be evaluated."""
        for name in (WEIGHTS, OPTIMIZER):
            if not (path / name).exists():
                if self._is_evaluator:
                    storage.download(self.address(path / name), path / name)
                else:
                    (path / name).symlink_to(storage.local_copy(self.address(path / name), self.cache))

    # -- the steps of both -------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """All remote files. Keys of objects may be anything, so those that would lead out of a folder are left out."""
        names = storage.names_below(self.url)
        return [name for name in names if name and not {"", ".", ".."} & set(name.split("/")) and "\\" not in name]

    def _own(self, kind: str, names: list[str]) -> None:
        """Reads the remote checkpoints of a kind, of which this process is the writer. Incomplete ones are removed."""
        states = self._read_states(kind, names)
        self._remove_incomplete(kind, names, states)
        self._states = {name: state for name, state in self._states.items() if _kind(name) != kind} | states

    def _read_states(self, kind: str, names: list[str]) -> dict[str, bytes]:
        """The state.json of every remote checkpoint of a kind, by its folder, oldest first."""
        folders = [name.rpartition("/")[0] for name in names if name.endswith(f"/{STATE}")]
        found = {}
        for name in folders:
            if _is_checkpoint(name) and _kind(name) == kind:
                state = storage.read_if_there(self._at(name, STATE))
                if state is not None:  # else another process has just removed it
                    found[name] = state
        return found

    def _show(self, kind: str, states: dict[str, bytes]) -> None:
        """Makes the local folder show which checkpoints of a kind there are, without their weights."""
        self._clear_checkpoints(kind, set(states))
        for name, state in states.items():
            path = self.folder / name
            if not (path / STATE).is_file() or (path / STATE).read_bytes() != state:
                with explain(path, "write"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                with whole_folder(path) as partial:
                    (partial / STATE).write_bytes(state)

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

    def _download_newer_best(self, states: Mapping[str, bytes], step: int) -> None:
        """Downloads the newest of the best models that the run can resume from, if it is of a step after ``step``."""
        for name in sorted(states, key=_step, reverse=True):
            try:
                resumable = _step(name) > step and is_resumable(read_state(self.folder / name))
            except DamagedError:  # the run says so when it looks for what to resume from
                continue
            if resumable and self._fetch(name, states[name]):
                return

    def _download_checkpoint(self, name: str) -> bool:
        """Makes the local checkpoint equal to the remote one. False if that is damaged; it is set aside then."""
        state = self._states[name]
        if self._fetch(name, state):
            return True
        remove_folder(self.folder / name)
        log.warning("%s is damaged: it was set aside and is skipped.", self._at(name))
        storage.write_bytes(self._at(name, f"{DAMAGED}{STATE}"), state)
        self._remove_state(name)
        return False

    def _fetch(self, name: str, state: bytes) -> bool:
        """Downloads a checkpoint that is not here yet; returns whether it is whole."""
        target = self.folder / name
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
        return _is_whole(target)

    def _clear_local(self, kept: set[str]) -> None:
        """Removes the local files of an earlier run, except the checkpoints and logs in ``kept``."""
        with explain(self.folder, "clear"):
            for path in self.folder.iterdir():
                if path.name in (CHECKPOINTS, LOGS):
                    for old in path.iterdir():
                        if f"{path.name}/{old.name}" not in kept:
                            _remove(old)
                elif path.name not in (LOCK, BEST):  # the first is held open by this process, the second comes later
                    _remove(path)
            _remove(self.folder.parent / JOURNAL)
            for name in (CHECKPOINTS, LOGS):
                (self.folder / name).mkdir(exist_ok=True)

    def _clear_checkpoints(self, kind: str, kept: set[str]) -> None:
        """Removes the local checkpoints of a kind that are not in ``kept``."""
        folder = self.folder / kind
        with explain(folder, "clear"):
            for old in folder.iterdir() if folder.is_dir() else ():
                if f"{kind}/{old.name}" not in kept:
                    _remove(old)

    def _remove_incomplete(self, kind: str, names: list[str], states: dict[str, bytes]) -> None:
        """Removes files of remote checkpoints whose upload or removal was never finished."""
        for name in names:
            folder = name.rpartition("/")[0]
            aside = f"{folder}/{DAMAGED}{STATE}" in names
            if _is_checkpoint(folder) and _kind(folder) == kind and folder not in states and not aside:
                storage.remove(self._at(name))

    def _push_small_files(self, parts: tuple[str, ...]) -> None:
        paths = [self.folder / name for name in parts]
        files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
        here = {file.relative_to(self.folder).as_posix(): file for file in files if _is_sent(file)}
        for name, file in here.items():
            stamp = _stamp(file)
            if self._sent.get(name) != stamp:
                self._write(name, file.read_bytes())  # read at once: it may grow meanwhile
                self._sent[name] = stamp
        for name in [name for name in self._sent if name not in here]:
            self._remove(name)
            del self._sent[name]

    def _push_checkpoints(self, keep: int | None) -> None:
        for kind in sorted(self._kinds):
            for path in list_checkpoints(self.folder / kind).values():
                self._push_checkpoint(f"{kind}/{path.name}", path)
        self._prune(keep)

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
            self._upload(path / file, f"{name}/{file}")
        self._write(f"{name}/{STATE}", state)
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
                self._remove(f"{name}/{file}")

    def _remove_state(self, name: str) -> None:
        """Removes state.json, without which the checkpoint does not exist."""
        self._remove(f"{name}/{STATE}")
        self._states.pop(name, None)

    # Before each change: a process that slept may have lost its lock since the last one, and another writes here now.

    def _write(self, name: str, data: bytes) -> None:
        self._confirm_locks()
        storage.write_bytes(self._at(name), data)

    def _upload(self, path: Path, name: str) -> None:
        self._confirm_locks()
        if not storage.upload(path, self._at(name), new=True):  # it is there: from a killed process, or from a new one
            for lock in self._held:
                lock.renew()
            storage.upload(path, self._at(name))

    def _remove(self, name: str) -> None:
        self._confirm_locks()
        storage.remove(self._at(name))

    def _confirm_locks(self) -> None:
        for lock in self._held:
            lock.confirm()

    def _push_journal(self) -> None:
        """Adds the entries of this process to the journal beside the runs, to which other runs may have added."""
        journal = self.folder.parent / JOURNAL
        if not journal.is_file() or journal.stat().st_size == self._journal_sent:
            return
        mine = journal.read_bytes()
        url = storage.join(storage.parent(self.url), JOURNAL)
        there = storage.read_if_there(url) or b""
        new = mine[self._journal_sent :]
        self._confirm_locks()
        storage.write_bytes(url, there + (new.removeprefix(JOURNAL_TITLE.encode()) if there else new))
        self._journal_sent = len(mine)

    def _at(self, *parts: str) -> str:
        return storage.join(self.url, *parts)


def working_folder(url: str, cache: Path, role: str = "") -> Path:
    """The local folder in which a run at ``url`` works; an evaluator has one of its own."""
    digest = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:24]
    return cache / "runs" / (f"{digest}-{role}" if role else digest) / _name(url)


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


def _kind(name: str) -> str:
    return name.partition("/")[0]


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
    used = set()
    for holder in holders(folder / LOGS):
        used |= {holder.path.name, host_file(holder.path).name, f"{holder.name}.log"}
    used = {f"{LOGS}/{name}" for name in used}
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
