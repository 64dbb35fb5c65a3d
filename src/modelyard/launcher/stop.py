"""Stops a run: all its processes on this machine."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

from modelyard import storage
from modelyard.errors import RunError
from modelyard.launcher.local import LAUNCHER, local_folder
from modelyard.launcher.supervise import LaunchError
from modelyard.run.directory import RunDirectory
from modelyard.system.pid_file import Holder, holders

log = logging.getLogger("modelyard")
_LOOK_SECONDS = 0.1


def stop(
    model_dir: str,
    *,
    force: bool = False,
    timeout_secs: float = 60.0,
    cache_dir: str | None = None,
    waiting: Callable[[list[Holder]], None] | None = None,
) -> list[str]:
    """Stops the processes of a run, and waits until they are gone. They save first, unless forced.

    Args:
        model_dir: the run folder.
        force: kill them.
        timeout_secs: how long to wait.
        cache_dir: where a run folder on an object store is worked on; None is the usual place.
        waiting: is called with those that are waited for.

    Returns:
        The processes that were signalled; empty if nothing was running.

    Raises:
        RunError: if there is no such folder, or its processes are on another machine.
        LaunchError: if some are still there after ``timeout_secs``.

    Example:
        >>> modelyard.stop("runs/my_run")
    """
    folder = _logs(model_dir, cache_dir)
    running = holders(folder)
    if not running:
        return []
    number = signal.SIGKILL if force else signal.SIGTERM
    signalled = [holder for holder in _addressees(running, force) if holder.signal(number)]
    if not signalled and holders(folder):
        elsewhere = ", ".join(str(holder) for holder in running)
        raise RunError(f"{model_dir} is run by {elsewhere}, which can't be signalled from here: stop it there.")
    names = [str(holder) for holder in signalled]
    log.info("%s sent to %s", number.name, ", ".join(names))
    deadline = time.monotonic() + timeout_secs
    while running := holders(folder):
        if waiting is not None:
            waiting(running)
        if time.monotonic() > deadline:
            left = ", ".join(str(holder) for holder in running)
            hint = "" if force else " Wait longer (--timeout_secs), or kill them (--force)."
            raise LaunchError(f"after {timeout_secs:g} s there still is {left}.{hint}", status=1)
        time.sleep(_LOOK_SECONDS)
    return names


def _addressees(running: list[Holder], force: bool) -> list[Holder]:
    """The launcher, which stops the others; all where there is none, or where there is no time for that."""
    launchers = [holder for holder in running if holder.name == LAUNCHER]
    if force:  # first the launcher, which would start the others again
        return launchers + [holder for holder in running if holder.name != LAUNCHER]
    return launchers or running


def _logs(model_dir: str, cache_dir: str | None) -> Path:
    if storage.is_remote(model_dir):
        return RunDirectory(local_folder(model_dir, cache_dir)).logs
    for path in (Path(model_dir).expanduser(), Path("runs") / model_dir):
        if path.is_dir():
            return RunDirectory(path).logs
    raise RunError(f"{model_dir} does not exist. `modelyard runs` lists the runs.")
