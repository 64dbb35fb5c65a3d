"""One writer for a run folder on an object store: a lock object that contains its holder.

Object stores have no locks, but they create an object only if it does not exist: of several processes, one succeeds.
The holder renews its lock every minute. A lock that is not renewed is taken over, so the holder checks at every upload
that it still has it.
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
from modelyard.errors import RunError, StorageError
from modelyard.system.machine import pid_space

STALE_SECONDS = 300
"""A holder that has not renewed its lock for so long is considered dead."""
_RENEW_SECONDS = 60
_FIELDS = {"host": str, "pid": int, "time": float, "mark": str}
_marks: set[str] = set()  # of the locks that this process holds
log = logging.getLogger("modelyard")


class RemoteLock:
    """The lock object of a run folder.

    Args:
        url: the object.
        owner: the run folder, for messages.
    """

    def __init__(self, url: str, owner: str) -> None:
        self.url = url
        self.owner = owner
        self._mark = uuid.uuid4().hex
        self._stop = threading.Event()
        self._guard = threading.Lock()

    def acquire(self) -> None:
        """Makes this process the writer.

        Raises:
            RunError: if another process is the writer, or becomes it at the same moment.
        """
        holder = self.holder()
        if holder is not None:
            if is_alive(holder):
                raise self._in_use(holder)
            log.info("taking over from process %s on %s, which has ended", holder["pid"], holder["host"])
            self._remove_dead(holder)
        _marks.add(self._mark)
        try:
            storage.write_new(self.url, self._content())
            winner = self.holder()
            if winner is not None and winner["mark"] != self._mark:
                _marks.discard(self._mark)
                raise self._in_use(winner)
            self.check()
        except BaseException:  # it may have been written all the same
            with contextlib.suppress(Exception):
                self.release()
            raise
        self._stop.clear()
        threading.Thread(target=self._renew, name="run-lock", daemon=True).start()

    def check(self) -> None:
        """Checks that this process still holds the lock.

        Raises:
            RunError: if it does not.
        """
        holder = self.holder()
        if self._mark not in _marks or holder is None or holder["mark"] != self._mark:
            _marks.discard(self._mark)
            who = f"process {holder['pid']} on {holder['host']} took it" if holder else "someone removed it"
            raise RunError(
                f"this process lost its lock {self.url}: {who}. It uploads nothing more, so that two do not mix."
            )

    def renew(self) -> None:
        """Writes the current time into the lock, if this process still holds it."""
        with self._guard:
            self.check()
            storage.write_bytes(self.url, self._content())

    def release(self) -> None:
        """Lets others write. Where the object can't be removed, they wait until it is stale.

        Raises:
            RunError: if the lock was lost.
        """
        self._stop.set()
        with self._guard:  # a renewal under way would write it again
            if self._mark in _marks:
                try:
                    self.check()
                    storage.remove(self.url)
                except StorageError as error:
                    log.warning("%s Others have to wait for %s seconds, or delete it.", error, STALE_SECONDS)
                finally:
                    _marks.discard(self._mark)

    def holder(self) -> dict[str, Any] | None:
        """Returns the holder: host, pid, time, mark; None if there is none."""
        data = storage.read_if_there(self.url)
        if data is None:
            return None
        try:
            found = json.loads(data)
            holder = {key: convert(found[key]) for key, convert in _FIELDS.items()}
            return {**holder, "pid_space": str(found.get("pid_space", ""))}
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{self.url} is not a lock of Modelyard. If no process uses the run, delete it.") from None

    def _remove_dead(self, holder: dict[str, Any]) -> None:
        """Removes the lock of a dead process. A lock on that lock ensures that a new holder's is not removed."""
        claim = RemoteLock(f"{self.url}-{holder['mark']}", self.owner)
        claim.acquire()
        try:
            if self.holder() == holder:
                storage.remove(self.url)
        finally:
            claim.release()

    def _in_use(self, holder: dict[str, Any]) -> RunError:
        return RunError(
            f"{self.owner} is in use by process {holder['pid']} on {holder['host']}, "
            f"last seen {max(time.time() - holder['time'], 0):.0f} seconds ago. Wait for it to end, stop it, or "
            f"name another --model_dir. If you know that it is dead, delete {self.url}"
        )

    def _content(self) -> bytes:
        return json.dumps({**_here(), "pid": os.getpid(), "time": time.time(), "mark": self._mark}).encode()

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


def is_alive(holder: dict[str, Any]) -> bool:
    """Returns whether the holder of a lock may still be writing."""
    if time.time() - holder["time"] > STALE_SECONDS:
        return False
    if {key: holder[key] for key in ("host", "pid_space")} != _here():
        return True
    if holder["pid"] == os.getpid():  # an earlier process may have had the same number
        return holder["mark"] in _marks
    return bool(psutil.pid_exists(holder["pid"]))


def _here() -> dict[str, str]:
    return {"host": socket.gethostname(), "pid_space": pid_space()}
