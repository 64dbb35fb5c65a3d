"""Actions of the pages on a run: stop it, resume it, add a note, delete it into the bin, restore it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from modelyard.dashboard.index import Deleted, FoundRun, Group, Index, name_in_bin, original_name
from modelyard.dashboard.run_files import CHIEF_LOG, is_locked, open_plain
from modelyard.errors import RunError, UserError
from modelyard.run.directory import BIN, CONFIG, JOURNAL, LOCK, LOGS
from modelyard.run.manifest import NOTE_KINDS, log_note
from modelyard.system.files import explain
from modelyard.system.process import holders

LONGEST_NOTE = 10_000
"""Characters of a note."""
_STOP_SECONDS = 5.0
"""How long a request waits for the processes of a run to exit. The page shows when they did."""


class Actions:
    """Changes runs that the index found.

    Args:
        index: the runs.
        program: the program that resumes a run; by default Modelyard itself.
    """

    def __init__(self, index: Index, program: Sequence[str] | None = None) -> None:
        self.index = index
        self._program = [sys.executable, "-m", "modelyard"] if program is None else list(program)

    def stop(self, place: FoundRun | Group) -> str:
        """Stops a run, a matrix or a search as ``modelyard stop`` does, and returns what happened.

        Raises:
            UserError: if it runs elsewhere.
        """
        from modelyard.launcher.local import stop
        from modelyard.launcher.supervise import LaunchError

        self._refuse_remote(place)
        try:
            stopped = stop(place.path, timeout_secs=_STOP_SECONDS)
        except LaunchError:
            return "it is saving, then it stops"
        finally:
            self.index.wake()
        if not stopped and is_locked(place.path):
            raise RunError(f"{place.name} runs where it can't be signalled from here. Stop it there.")
        return "stopped" if stopped else "nothing was running"

    def resume(self, run: FoundRun) -> str:
        """Resumes a run as ``modelyard resume`` does, by a process that goes on without the dashboard.

        Raises:
            UserError: if it runs, or has nothing left to train.
        """
        self._refuse_running(run, "resumed")
        if run.row["state"] == "finished":
            raise RunError(f"{run.name} is finished. To train it longer: modelyard resume {run.path} --train_epochs 20")
        output = self._log(run)
        try:
            process = subprocess.Popen(
                [*self._program, "resume", run.path],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise RunError(f"{run.name} could not be resumed: {error.strerror or error}.") from error
        finally:
            os.close(output)
        threading.Thread(target=process.wait, daemon=True).start()  # until it ends, or the dashboard does
        self.index.wake()
        return f"started: process {process.pid}"

    def _log(self, run: FoundRun) -> int:
        """Opens the log of a run: there the process says why it ends, if it does."""
        path = Path(run.path, CHIEF_LOG)
        with explain(path, "write"):
            if path.parent.is_symlink():
                raise RunError(f"{path.parent} is a link, and a run writes to files of its own folder only.")
            path.parent.mkdir(exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def note(self, run: FoundRun, kind: str, text: str) -> str:
        """Adds a note to the journal beside a run.

        Raises:
            UserError: if it is no note.
        """
        if kind not in NOTE_KINDS:
            raise UserError(f"a note is a {', '.join(NOTE_KINDS)}, not {kind[:40]!r}.")
        self._refuse_remote(run)
        text = text.strip()
        if not text or len(text) > LONGEST_NOTE:
            raise UserError(f"a note has 1 to {LONGEST_NOTE:,} characters; this one has {len(text):,}.")
        folder, name = os.path.split(run.path)
        journal = Path(folder, JOURNAL)
        if journal.is_symlink() or (journal.exists() and not journal.is_file()):
            raise RunError(f"{journal} is no regular file.")
        log_note(journal, name, kind, text)
        return "noted in the journal"

    # -- the bin ----------------------------------------------------------------------------------------------------

    def delete(self, run: FoundRun) -> str:
        """Moves a run into the bin beside it.

        Raises:
            UserError: if it runs, or is a cell of a matrix that runs.
        """
        self._refuse_running(run, "deleted")
        folder, name = os.path.split(run.path)
        target = Path(folder, BIN, name_in_bin(name, datetime.now()))
        lock = open_plain(f"{run.path}/{LOCK}")
        try:
            if lock is not None:  # nothing starts in it meanwhile
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with explain(target, "move the run to"):
                if target.parent.is_symlink():
                    raise RunError(f"{target.parent} is a link; the bin must be a folder.")
                target.parent.mkdir(exist_ok=True)
                Path(run.path).rename(target)
        except BlockingIOError:
            raise RunError(f"{run.name} is running. Stop it before it is deleted.") from None
        finally:
            if lock is not None:
                os.close(lock)
        self.index.wake()
        return f"moved to {BIN}, from where it can be restored"

    def restore(self, deleted: Deleted) -> str:
        """Moves a run from the bin back to where it was.

        Raises:
            UserError: if there is another folder of its name now.
        """
        self._refuse_remote(deleted)
        folder, name = os.path.split(deleted.path)
        target = Path(folder).parent / original_name(name)
        with explain(target, "restore"):
            if target.exists() or target.is_symlink():
                raise RunError(f"{target} exists. Rename or delete it, then restore the run.")
            Path(deleted.path).rename(target)
        self.index.wake()
        return "restored"

    def _refuse_remote(self, place: FoundRun | Group | Deleted) -> None:
        if self.index.is_remote(place.path):
            url = self.index.address(place.path)
            raise RunError(
                f"{url} is on an object store, where the dashboard only reads. Use the commands with its URL."
            )

    def _refuse_running(self, run: FoundRun, done: str) -> None:
        self._refuse_remote(run)
        logs = Path(run.path, LOGS)
        if is_locked(run.path) or (not logs.is_symlink() and holders(logs)):
            raise RunError(f"{run.name} is running. Stop it before it is {done}.")
        if not Path(run.path, CONFIG).is_file():
            raise RunError(f"{run.name} is not there any more.")
        around = [group for group in self.index.groups.values() if run.path.startswith(f"{group.path}/")]
        group = next((group for group in around if holders(Path(group.path, LOGS))), None)
        if group is not None:
            raise RunError(f"{run.name} is a cell of {group.name}, which is running. Stop that before it is {done}.")
