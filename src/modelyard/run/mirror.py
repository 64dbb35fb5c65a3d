"""Run folders on object stores: a run works in a local folder, and a mirror keeps the remote one up to date.

An object store shows single objects whole, but no folder at once. So ``state.json`` says that a checkpoint is there: it
is uploaded last and removed first, and it holds the checksums of the other files.
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

from modelyard import storage
from modelyard.errors import CheckpointError, StorageError
from modelyard.run.checkpoint import (
    DAMAGED,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    NewerFormatError,
    UnreadableError,
    is_folder_name,
    list_checkpoints,
    read_state,
)
from modelyard.run.directory import BEST, CHECKPOINTS, CONFIG, EVENTS, LOCK, LOGS, MANIFEST, METRICS, PROFILE
from modelyard.run.journal import JOURNAL, TITLE
from modelyard.run.remote_lock import RemoteLock, is_alive
from modelyard.system.files import explain, remove_folder, whole_folder
from modelyard.system.process import SUFFIX, holders

_SMALL = (CONFIG, MANIFEST, METRICS, EVENTS, LOGS, PROFILE)
"""Files and folders that are uploaded before any checkpoint, in this order: a folder with a config is a run."""
_BROUGHT = (CONFIG, MANIFEST, METRICS, EVENTS, LOGS)
_LOOKED_AT = (CONFIG, MANIFEST, METRICS)
_VIEW_SECONDS = 7 * storage.DAY
log = logging.getLogger("modelyard")


class Mirror:
    """Brings a remote run folder to a local one, and what changes there back.

    Args:
        url: the remote run folder.
        folder: the local one.
        cache: for copies of weights, when the folder is only looked at.
    """

    def __init__(self, url: str, folder: Path, cache: Path) -> None:
        self.url = url.rstrip("/")
        self.folder = folder
        self.cache = cache
        self.fetched = False  # whether the local folder is as the remote one was
        self._lock = RemoteLock(storage.join(self.url, LOCK), self.url)
        self._states: dict[str, bytes] = {}  # the state.json of every checkpoint that is there, by its folder
        self._sent: dict[str, tuple[int, int]] = {}  # length and time of the small files, as they are there
        self._journal_sent = 0

    def address(self, path: Path) -> str:
        """Where a path of the local folder is on the remote side."""
        return storage.join(self.url, *path.relative_to(self.folder).parts)

    def began(self) -> bool:
        """Whether there is a run."""
        return storage.exists(storage.join(self.url, CONFIG))

    def strangers(self) -> list[str]:
        """What is there beside a lock."""
        return [name or self.url for name in storage.names_below(self.url) if name != LOCK]

    def is_held(self) -> bool:
        """Whether a process is writing there now."""
        holder = self._lock.holder()
        return holder is not None and is_alive(holder)

    # -- a run that goes on ------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Takes the lock and makes the local folder like the remote one, of whose checkpoints only the newest comes.

        What the remote one does not have is dropped here: the remote one is the run.

        Raises:
            RunError: if another process writes there.
            CheckpointError: if there are checkpoints and all are damaged.
        """
        self._lock.acquire()
        try:
            names = self._names()
            self._states = self._committed(names)
            self._drop_what_was_cut_off(names)
            best = [name for name in self._states if name.startswith(f"{BEST}/")]
            kept = {name for name in best if self._bring_checkpoint(name)} | set(self._bring_newest(names))
            held = _logs_in_use(self.folder)
            self._forget_all_but(kept | held)
            for name in names:
                if PurePosixPath(name).parts[0] in _BROUGHT and name not in held:
                    self._bring(name)
                    self._sent[name] = _stamp(self.folder / name)
        except BaseException:
            with contextlib.suppress(Exception):
                self._lock.release()
            raise
        self.fetched = True

    def push(self, keep: int | None = None, final: bool = False) -> None:
        """Uploads what changed; of checkpoints, ``keep`` newest stay there.

        Storage that can't be reached for a while does not end a run: what is missing is uploaded the next time.

        Args:
            keep: how many checkpoints stay; None removes none.
            final: there is no next time, so that what fails is an error.
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
            log.warning("%s What is missing there is uploaded with the next checkpoint.", error)

    def close(self, failed: bool = False) -> None:
        """The last upload; then others may write.

        Args:
            failed: an error is under way, which says more than one from here.
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

    # -- looking at a run ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Brings what is small: config, manifest, metrics, and of every checkpoint its state."""
        names = self._names()
        self.fetched = True
        for name in _LOOKED_AT:
            if name in names:
                self._bring(name)
        for name, state in self._committed(names).items():
            (self.folder / name).mkdir(parents=True)
            (self.folder / name / STATE).write_bytes(state)

    def bring_weights(self, path: Path) -> None:
        """Brings the large files of a checkpoint whose state is here, through the cache."""
        for name in (WEIGHTS, OPTIMIZER):
            if not (path / name).exists():
                (path / name).symlink_to(storage.local_copy(self.address(path / name), self.cache))

    # -- beneath -------------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        """All files there. Keys of objects may be anything, so those that would lead out of a folder are left out."""
        names = storage.names_below(self.url)
        return [name for name in names if name and not {"", ".", ".."} & set(name.split("/")) and "\\" not in name]

    def _committed(self, names: list[str]) -> dict[str, bytes]:
        """The state.json of every checkpoint that is there, by its folder, oldest first."""
        folders = [name.rpartition("/")[0] for name in names if name.endswith(f"/{STATE}")]
        return {name: storage.read_bytes(self._at(name, STATE)) for name in folders if _is_checkpoint(name)}

    def _bring(self, name: str) -> None:
        target = self.folder / name
        with explain(target, "write"):
            target.parent.mkdir(parents=True, exist_ok=True)
        storage.download(self._at(name), target)

    def _bring_newest(self, names: list[str]) -> list[str]:
        """The newest checkpoint that is not damaged; damaged ones are uncommitted, so that they are passed over."""
        newest_first = sorted((n for n in self._states if n.startswith(f"{CHECKPOINTS}/")), key=_step, reverse=True)
        for name in newest_first:
            if self._bring_checkpoint(name):
                return [name]
        if newest_first or any(_is_set_aside(name) for name in names):  # now, or at an earlier start
            raise CheckpointError(
                f"all checkpoints in {self._at(CHECKPOINTS)} are damaged; there is nothing to go on from. "
                "Restore them from a copy, or start a new run with another --model_dir."
            )
        return []

    def _bring_checkpoint(self, name: str) -> bool:
        """Makes the local checkpoint the remote one. False if that is damaged; it is set aside then."""
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
        log.warning("%s is damaged: it was set aside and is passed over.", self._at(name))
        storage.write_bytes(self._at(name, f"{DAMAGED}{STATE}"), state)
        storage.remove(self._at(name, STATE))
        del self._states[name]
        return False

    def _forget_all_but(self, kept: set[str]) -> None:
        """Removes what the local folder has from an earlier run, the checkpoints and logs ``kept`` apart."""
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

    def _drop_what_was_cut_off(self, names: list[str]) -> None:
        """Removes files of checkpoints whose upload or removal was never finished."""
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
        known, checksums = _checksums(there), _checksums(state)
        changed = [file for file in (WEIGHTS, OPTIMIZER) if there is None or known.get(file) != checksums.get(file)]
        if there is not None and changed:  # other weights under the old state would be a damaged checkpoint
            self._uncommit(name)
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
            self._uncommit(name)
            for file in (WEIGHTS, OPTIMIZER):
                storage.remove(self._at(name, file))

    def _uncommit(self, name: str) -> None:
        storage.remove(self._at(name, STATE))
        self._states.pop(name, None)

    def _push_journal(self) -> None:
        """Adds the entries of this process to the journal beside the runs, which others may have added to meanwhile."""
        journal = self.folder.parent / JOURNAL
        if not journal.is_file() or journal.stat().st_size == self._journal_sent:
            return
        mine = journal.read_bytes()
        url = storage.join(storage.parent(self.url), JOURNAL)
        there = storage.read_if_there(url) or b""
        new = mine[self._journal_sent :]
        storage.write_bytes(url, there + (new.removeprefix(TITLE.encode()) if there else new))
        self._journal_sent = len(mine)

    def _at(self, *parts: str) -> str:
        return storage.join(self.url, *parts)


def working_folder(url: str, cache: Path) -> Path:
    """The local folder in which a run at ``url`` works."""
    return cache / "runs" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:24] / _name(url)


def look_at(url: str, cache: Path) -> Mirror:
    """A mirror of a remote run to look at, in a local folder that vanishes with it and disturbs nobody."""
    with explain(cache, "write to the cache"):
        (cache / "views").mkdir(parents=True, exist_ok=True)
        _remove_old_views(cache / "views")
        top = Path(tempfile.mkdtemp(dir=cache / "views"))
    mirror = Mirror(url, top / _name(url), cache)
    weakref.finalize(mirror, shutil.rmtree, top, ignore_errors=True)
    mirror.folder.mkdir()
    mirror.look()
    return mirror


def _remove_old_views(views: Path) -> None:
    """Those of processes that were killed. A living one may keep a view for long, so they get days."""
    for view in views.iterdir():
        with contextlib.suppress(OSError):
            if storage.is_older(view, _VIEW_SECONDS):
                shutil.rmtree(view, ignore_errors=True)


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
    """Logs and pid files of the launcher and of other processes of the run, which work in the same folder."""
    return {f"{LOGS}/{holder.name}{suffix}" for holder in holders(folder / LOGS) for suffix in (".log", SUFFIX)}


def _is_sent(file: Path) -> bool:
    return file.is_file() and file.suffix != SUFFIX and not file.name.startswith(".")


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _is_whole(path: Path) -> bool:
    """Whether the files of a checkpoint are those its state speaks of.

    Raises:
        NewerFormatError: if a newer Modelyard wrote it, so that this one can't tell.
        UnreadableError: if the file system does not give a file, which says nothing about the checkpoint.
    """
    try:
        checksums = read_state(path)["sha256"]
    except (NewerFormatError, UnreadableError):
        raise
    except CheckpointError:
        return False
    files = [path / file for file in (WEIGHTS, OPTIMIZER)]
    return all(file.is_file() and _sha256(file) == checksums.get(file.name) for file in files)


def _sha256(path: Path) -> str:
    with explain(path, "read"), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksums(state: bytes | None) -> dict[str, str]:
    return dict(json.loads(state)["sha256"]) if state is not None else {}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
