"""One writer for a run folder on an object store, as well as it can be had there: a small object that says who writes.

Object stores have no locks. The object is read, written and read back, so two processes that start within the same
instant may both believe they are alone; what they write is checked against the object again at every upload.
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

from modelyard import storage
from modelyard.errors import RunError, StorageError
from modelyard.system.machine import pid_space

STALE_SECONDS = 300
"""A holder that has not renewed its lock for so long is taken for dead."""
_RENEW_SECONDS = 60
_marks: set[str] = set()  # of the locks that this process holds
log = logging.getLogger("modelyard")


class RemoteLock:
    """The lock object of a run folder.

    Args:
        url: the object.
        owner: what it keeps to one writer, for messages.
    """

    def __init__(self, url: str, owner: str) -> None:
        self.url = url
        self.owner = owner
        self._mark = uuid.uuid4().hex
        self._held = False
        self._stop = threading.Event()
        self._guard = threading.Lock()

    def acquire(self) -> None:
        """Makes this process the writer.

        Raises:
            RunError: if another process is, and was alive a moment ago.
        """
        holder = self.holder()
        if holder is not None and is_alive(holder):
            raise RunError(
                f"{self.owner} is in use by process {holder['pid']} on {holder['host']}, "
                f"last seen {max(time.time() - holder['time'], 0):.0f} seconds ago. Wait for it to end, stop it, or "
                f"name another --model_dir. If you know that it is dead, delete {self.url}"
            )
        if holder is not None:
            log.info("taking over from process %s on %s, which is gone", holder["pid"], holder["host"])
        self._held = True
        _marks.add(self._mark)
        try:
            self._write()
            self.check()
        except BaseException:  # it may have been written all the same
            with contextlib.suppress(Exception):
                self.release()
            raise
        self._stop.clear()
        threading.Thread(target=self._renew, name="run-lock", daemon=True).start()

    def check(self) -> None:
        """Sees to it that the lock is still this process's.

        Raises:
            RunError: if it is not.
        """
        holder = self.holder()
        if not self._held or holder is None or holder["mark"] != self._mark:
            self._let_go()
            who = f"process {holder['pid']} on {holder['host']} took it" if holder else "someone removed it"
            raise RunError(
                f"this process lost its lock {self.url}: {who}. It uploads nothing more, so that two do not mix."
            )

    def renew(self) -> None:
        """Says that this process is alive, if the lock is still its own."""
        with self._guard:
            self.check()
            self._write()

    def release(self) -> None:
        """Lets others write. Where the object can't be removed, they wait until it is old.

        Raises:
            RunError: if the lock was lost.
        """
        self._stop.set()
        with self._guard:  # a renewal under way would bring it back
            if self._held:
                try:
                    self.check()
                    storage.remove(self.url)
                except StorageError as error:
                    log.warning("%s Others have to wait for %s seconds, or delete it.", error, STALE_SECONDS)
                finally:
                    self._let_go()

    def holder(self) -> dict[str, Any] | None:
        """Who holds it: host, pid, time, mark; None where nobody does."""
        data = storage.read_if_there(self.url)
        if data is None:
            return None
        try:
            found = json.loads(data)
            return {
                "host": str(found["host"]),
                "pid": int(found["pid"]),
                "time": float(found["time"]),
                "mark": str(found["mark"]),
                "pid_space": str(found.get("pid_space", "")),
            }
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{self.url} is not a lock of Modelyard. If nobody uses the run, delete it.") from None

    def _let_go(self) -> None:
        self._held = False
        _marks.discard(self._mark)

    def _write(self) -> None:
        mine = {**_here(), "pid": os.getpid(), "time": time.time(), "mark": self._mark}
        storage.write_bytes(self.url, json.dumps(mine).encode())

    def _renew(self) -> None:
        while not self._stop.wait(_RENEW_SECONDS):
            try:
                if self._held:
                    self.renew()
            except StorageError as error:  # it may pass; the next upload says more
                log.debug("the lock was not renewed: %s", error)
            except RunError as error:
                log.error("%s", error)
                return


def is_alive(holder: dict[str, Any]) -> bool:
    """Whether the holder of a lock may still be writing."""
    if time.time() - holder["time"] > STALE_SECONDS:
        return False
    if {key: holder[key] for key in ("host", "pid_space")} != _here():
        return True
    if holder["pid"] == os.getpid():  # an earlier process may have had the same number
        return holder["mark"] in _marks
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _here() -> dict[str, str]:
    return {"host": socket.gethostname(), "pid_space": pid_space()}
