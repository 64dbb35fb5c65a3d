"""One writer for a run folder on an object store: a lock object that contains its holder.

Object stores have no locks, but they change an object only if it still is the version that was read: of several
processes that take, renew or remove a lock at the same moment, one succeeds. The holder renews its lock every minute.
A lock that is not renewed is taken over, and the old holder, should it wake up, can neither overwrite nor remove it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from typing import Any

import psutil

from modelyard import storage
from modelyard.errors import PeerLostError, RunError, StorageError
from modelyard.system.machine import pid_space

STALE_SECONDS = 300
"""A holder that has not renewed its lock for so long is considered dead."""
_RENEW_SECONDS = 60
_TRIES = 10
_FIELDS = {"host": str, "pid": int, "time": float, "mark": str}
_marks: set[str] = set()  # of the locks that this process holds
log = logging.getLogger("modelyard")

Holder = dict[str, Any]
"""host, pid, pid_space, time and mark of a process that holds a lock."""


class HeldError(RunError):
    """Another process holds the lock. It may be dead: then a restart succeeds when the lock is stale."""

    status = PeerLostError.status


class RemoteLock:
    """A lock object of a run folder.

    Args:
        url: the object.
        owner: what it protects, for messages.
    """

    def __init__(self, url: str, owner: str) -> None:
        self.url = url
        self.owner = owner
        self.replaced: Holder | None = None
        """The dead holder from whom the lock was taken over."""
        self._mark = uuid.uuid4().hex
        self._stop = threading.Event()
        self._guard = threading.RLock()
        self._renewed = 0.0

    def acquire(self, dead: Holder | None = None) -> None:
        """Makes this process the writer.

        Args:
            dead: a process that is known to have ended, although it may have renewed this lock a moment ago.

        Raises:
            HeldError: if another process is the writer, or becomes it at the same moment.
        """
        _marks.add(self._mark)
        try:
            self._take(dead)
        except BaseException:  # it may have been written all the same
            with contextlib.suppress(Exception):
                self.release()
            _marks.discard(self._mark)
            raise
        self._stop.clear()
        threading.Thread(target=self._renew, name="run-lock", daemon=True).start()

    def _take(self, dead: Holder | None) -> None:
        for _ in range(_TRIES):
            holder, version = self._read()
            if holder is not None and holder["mark"] == self._mark:  # written by a request whose answer was lost
                self._renewed = holder["time"]
                return
            if holder is not None and is_alive(holder) and not _is_same_process(holder, dead):
                raise self._in_use(holder)
            if self._write(version):
                self.replaced = holder
                if holder is not None:
                    log.info("took over from process %s on %s, which has ended", holder["pid"], holder["host"])
                return
        raise HeldError(f"{self.url} is changed by other processes again and again. Wait a moment, then try again.")

    def confirm(self) -> None:
        """Ensures before a change of the run that no other process can have taken the lock over meanwhile.

        Raises:
            RunError: if one has.
        """
        if self._mark not in _marks or not 0 <= time.time() - self._renewed < _RENEW_SECONDS:
            self.renew()

    def renew(self) -> None:
        """Writes the current time into the lock, if this process still holds it.

        Raises:
            RunError: if it does not.
        """
        with self._guard:
            for _ in range(_TRIES):
                if self._write(self._own_version()):
                    return
            raise StorageError(f"can't renew {self.url}: the store refuses to replace it, although nobody changed it.")

    def release(self) -> None:
        """Lets others write. Where the object can't be removed, they wait until it is stale.

        Raises:
            RunError: if the lock was lost.
        """
        self._stop.set()
        with self._guard:  # a renewal under way would write it again
            if self._mark in _marks:
                try:
                    for _ in range(_TRIES):
                        if storage.remove_version(self.url, self._own_version()):
                            break
                except StorageError as error:
                    log.warning("%s Others have to wait for %s seconds, or delete it.", error, STALE_SECONDS)
                finally:
                    _marks.discard(self._mark)

    def holder(self) -> Holder | None:
        """Returns the holder; None if there is none."""
        return self._read()[0]

    def _read(self) -> tuple[Holder | None, str | None]:
        """The holder, and the version of the object that names it."""
        found = storage.read_version(self.url)
        if found is None:
            return None, None
        data, version = found
        try:
            fields = json.loads(data)
            holder = {key: convert(fields[key]) for key, convert in _FIELDS.items()}
            return {**holder, "pid_space": str(fields.get("pid_space", ""))}, version
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RunError(f"{self.url} is not a lock of Modelyard. If no process uses the run, delete it.") from None

    def _own_version(self) -> str:
        """The version of the object, which names this process as its holder.

        Raises:
            RunError: if it does not.
        """
        holder, version = self._read()
        if self._mark in _marks and holder is not None and version is not None and holder["mark"] == self._mark:
            return version
        _marks.discard(self._mark)
        who = f"process {holder['pid']} on {holder['host']} took it" if holder else "someone removed it"
        nothing_more = "It uploads nothing more, so that two do not mix."
        raise RunError(f"this process lost its lock {self.url}: {who}. {nothing_more}")

    def _write(self, version: str | None) -> bool:
        now = time.time()  # before the request, which may take long
        content = json.dumps({**_here(), "pid": os.getpid(), "time": now, "mark": self._mark}).encode()
        if not storage.replace_version(self.url, content, version):
            return False
        self._renewed = now
        return True

    def _in_use(self, holder: Holder) -> HeldError:
        return HeldError(
            f"{self.owner} is in use by process {holder['pid']} on {holder['host']}, "
            f"last seen {max(time.time() - holder['time'], 0):.0f} seconds ago. Wait for it to end, stop it, or "
            f"name another --model_dir. If you know that it is dead, delete {self.url}"
        )

    def _renew(self) -> None:
        while not self._stop.wait(_RENEW_SECONDS):
            try:
                if self._mark in _marks:
                    self.renew()
            except StorageError as error:  # it may pass; the next upload reports it
                log.debug("the lock was not renewed: %s", error)
            except RunError as error:
                log.error("%s", error)
                return


def is_alive(holder: Holder) -> bool:
    """Returns whether the holder of a lock may still be writing."""
    if time.time() - holder["time"] > STALE_SECONDS:
        return False
    if {key: holder[key] for key in ("host", "pid_space")} != _here():
        return True
    if holder["pid"] == os.getpid():  # an earlier process may have had the same number
        return holder["mark"] in _marks
    return bool(psutil.pid_exists(holder["pid"]))


def _is_same_process(holder: Holder, other: Holder | None) -> bool:
    return other is not None and all(holder[key] == other[key] for key in ("host", "pid_space", "pid"))


def _here() -> dict[str, str]:
    return {"host": socket.gethostname(), "pid_space": pid_space()}
