"""Versions of the served model: where they come from, and how a new one replaces the old one between two requests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelyard.errors import RunError, UserError
from modelyard.run.checkpoint import list_best, list_checkpoints, list_saved, step_of
from modelyard.serving.exported_model import DESCRIPTION, SAVED_MODEL, ExportedServable, is_exported_version
from modelyard.serving.http.batching import Batcher, BatchingOptions
from modelyard.serving.run_model import RunServable, open_run
from modelyard.serving.servable import Servable
from modelyard.storage import is_remote

log = logging.getLogger("modelyard")

LOADING, AVAILABLE, UNLOADING, END = "LOADING", "AVAILABLE", "UNLOADING", "END"
_REPORTED_ENDED = 20
"""How many unloaded versions are still in the status."""
_LONGEST_PAUSE = 300.0
"""Seconds after which a version that could not be loaded is tried again, at most."""
_SEE_LOG = "the version can't be loaded; see the server's log."
"""All that clients are told: the reason may have paths of this machine."""

Found = dict[int, str]
"""Version numbers, each with a fingerprint that changes when its files do."""


# -- where versions come from -----------------------------------------------------------------------------------------


class VersionSource(ABC):
    """Versions of a model, by number. The highest is served."""

    @abstractmethod
    def find(self) -> Found:
        """Returns the complete versions."""

    @abstractmethod
    def load(self, version: int) -> Servable:
        """Loads a version; called in the thread that will predict.

        Raises:
            UserError: if it can't be loaded.
        """

    def explain_missing(self) -> str:
        """Returns an error message for when there is no version."""
        return "there is no version to serve."


class ExportSource(VersionSource):
    """Folders 1, 2, … as `modelyard export` writes them."""

    def __init__(self, folder: str | Path) -> None:
        if is_remote(str(folder)):
            raise RunError(f"{folder}: an export must be in a folder on this machine to be served. Copy it here first.")
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise RunError(f"{folder} does not exist, or is not a folder. `modelyard export` makes one.")

    def find(self) -> Found:
        """Returns the complete folders; folders that are being written or copied are skipped."""
        found: Found = {}
        try:
            folders = [path for path in self.folder.iterdir() if is_exported_version(path)]
        except OSError:  # removed, or a network file system that is away for a moment
            return found
        for path in folders:
            with contextlib.suppress(OSError):  # it is being removed
                found[int(path.name)] = _fingerprint(path)
        return found

    def load(self, version: int) -> Servable:
        """Loads the SavedModel in its folder."""
        return ExportedServable(self.folder / str(version))

    def explain_missing(self) -> str:
        """Names what is in the folder instead."""
        if is_exported_version(self.folder):
            return f"{self.folder} is one version of an export. Give the folder of all versions: {self.folder.parent}."
        others = sorted(path.name for path in self.folder.iterdir())[:10]
        found = f"found: {', '.join(others)}" if others else "it is empty"
        return (
            f"{self.folder} holds no version that can be served ({found}). A version is a folder named by a number, "
            f"with {SAVED_MODEL} and {DESCRIPTION}, as `modelyard export` writes it. Incomplete copies are skipped."
        )


def _fingerprint(folder: Path) -> str:
    """Returns names, sizes and times of the files in a folder, as text."""
    files = sorted((str(path.relative_to(folder)), path.stat()) for path in folder.rglob("*"))
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])


class RunSource(VersionSource):
    """The best checkpoint of a run, or the latest if there is no best one. Its version is its step.

    Args:
        model_dir: the run folder.
        checkpoint: best, latest or a step; None is best if there is one.
        options: options that change how the model is computed, such as engine.
        origin: where the options come from, for error messages.
    """

    def __init__(self, model_dir: str, checkpoint: str | None, options: dict[str, Any], origin: str) -> None:
        self._model_dir, self._options, self._origin = model_dir, options, origin
        run = open_run(model_dir, checkpoint, origin, **options)
        self.directory, self._step, self._path = run.directory, run.step, run.path
        self._which = checkpoint or ("best" if list_best(self.directory.best) else "latest")
        self._listed: list[int] = []

    def find(self) -> Found:
        """Returns the step to serve, chosen again when the list of checkpoints changes."""
        fixed = self.directory.mirror is not None or self._which not in ("best", "latest")
        if not fixed:
            best, is_best = self.directory.best, self._which == "best"
            checkpoints = list_checkpoints(best) if is_best else list_saved(self.directory.checkpoints, best)
            if checkpoints and list(checkpoints) != self._listed:
                chosen = list_best(best) if is_best else [checkpoints[max(checkpoints)]]
                if chosen:
                    self._path, self._step, self._listed = chosen[0], step_of(chosen[0]), list(checkpoints)
        try:
            return {self._step: _fingerprint(self._path)}
        except OSError:  # it is being replaced
            return {}

    def load(self, version: int) -> Servable:
        """Loads the run's model with the weights of that step."""
        return RunServable(open_run(self._model_dir, str(version), self._origin, **self._options))


# -- versions in memory ---------------------------------------------------------------------------------------------


@dataclass
class VersionStatus:
    """State of a version, in TensorFlow Serving's words."""

    state: str
    code: str = "OK"
    message: str = ""


@dataclass
class _Failure:
    """A version that could not be loaded.

    Args:
        files: their fingerprint.
        times: how often it has failed with these files.
        retry_at: when it is tried again, by `time.monotonic`, although its files are the same.
    """

    files: str
    times: int
    retry_at: float


def retry_pause(poll: float, times: int) -> float:
    """Returns the seconds until a version that has failed ``times`` times is tried again: twice as long each time."""
    return min(poll * 2.0 ** min(times, 30), _LONGEST_PAUSE)


class LoadedVersion:
    """A loaded version and the number of requests that use it. Used in the event loop only.

    Args:
        number: its version number.
        servable: the model.
        batcher: its queue and thread.
    """

    def __init__(self, number: int, servable: Servable, batcher: Batcher) -> None:
        self.number, self.servable, self.batcher = number, servable, batcher
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[LoadedVersion]:
        """Keeps the version loaded while the block runs."""
        self._users += 1
        self._idle.clear()
        try:
            yield self
        finally:
            self._users -= 1
            if not self._users:
                self._idle.set()

    async def unload(self) -> None:
        """Waits until its requests are answered, then ends its thread."""
        await self._idle.wait()
        self.batcher.close()
        await asyncio.to_thread(self.batcher.join)


class ModelVersions:
    """The version that is served, and those that are being loaded or unloaded.

    Args:
        source: where versions come from.
        batching: how requests are batched.
        observe: called after every batch; see `Batcher`.
        poll: seconds between two checks for a new version.
    """

    def __init__(
        self,
        source: VersionSource,
        batching: BatchingOptions,
        observe: Callable[[int, int, float], None] | None = None,
        poll: float = 1.0,
    ) -> None:
        self.statuses: dict[int, VersionStatus] = {}
        self.current: LoadedVersion | None = None
        self._source, self._batching, self._observe, self._poll = source, batching, observe, poll
        self._failed: dict[int, _Failure] = {}
        self._found_before: Found = {}
        self._unloading: set[asyncio.Task[None]] = set()

    def load_newest(self) -> None:
        """Loads the newest version that can be loaded, before any request is accepted.

        Raises:
            UserError: if there is none.
        """
        found = self._source.find()
        if not found:
            raise RunError(self._source.explain_missing())
        for number in sorted(found, reverse=True):
            try:
                self.current = self._load(number)
                return
            except UserError as error:
                self._report_failure(number, found[number], error)
                if number == min(found):
                    raise

    async def watch(self) -> None:
        """Checks for new versions until it is cancelled."""
        while True:
            await asyncio.sleep(self._poll)
            try:
                await self.check()
            except Exception:  # the next check may succeed; the served version stays
                log.exception("checking for new versions failed")

    async def check(self) -> None:
        """Switches to a new version, if there is one whose files have not changed since the last check."""
        found = await asyncio.to_thread(self._source.find)
        before, self._found_before = self._found_before, found
        # A copy in progress grows from check to check.
        complete = [n for n, files in found.items() if before.get(n) == files and self._may_try(n, files)]
        serving = self.current.number if self.current else None
        # `export --overwrite` removes a version for a moment: that is no reason to go back to an older one.
        if serving is not None and (serving in found or serving in before):
            complete.append(serving)
        if not complete or max(complete) == serving:
            return
        number = max(complete)
        try:
            new = await asyncio.to_thread(self._load, number)
        except Exception as error:
            self._report_failure(number, found[number], error)
            return
        old, self.current = self.current, new  # from here on every request gets the new one
        log.info("version %d replaces version %s", number, serving)
        if old is not None:
            task = asyncio.create_task(self._unload(old))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

    async def close(self) -> None:
        """Answers the waiting requests, then ends all threads."""
        if self.current is not None:
            await self.current.unload()
        for task in list(self._unloading):
            await task

    def _load(self, number: int) -> LoadedVersion:
        log.info("version %d: loading", number)
        self.statuses[number] = VersionStatus(LOADING)
        began = time.monotonic()
        batcher = Batcher(lambda: self._source.load(number), self._batching, self._observe)
        servable = batcher.start().result()
        seconds, sizes = time.monotonic() - began, ", ".join(map(str, batcher.sizes))
        log.info("version %d: loaded and warmed up for batches of %s in %.1f s", number, sizes, seconds)
        self.statuses[number] = VersionStatus(AVAILABLE)
        gc.freeze()
        return LoadedVersion(number, servable, batcher)

    def _report_failure(self, number: int, files: str, error: BaseException) -> None:
        kept = "" if self.current is None else f"; version {self.current.number} stays"
        before = self._failed.get(number)
        times = before.times + 1 if before is not None and before.files == files else 1
        pause = retry_pause(self._poll, times)
        self._failed[number] = _Failure(files, times, time.monotonic() + pause)
        reason = str(error) or type(error).__name__
        again = f"It is tried again in {pause:.0f} s, or when its files change."
        log.error("version %d can't be served%s: %s %s", number, kept, reason, again)
        self.statuses[number] = VersionStatus(END, "INTERNAL", _SEE_LOG)
        self._drop_old_statuses()

    def _may_try(self, number: int, files: str) -> bool:
        """Returns whether a version has not failed yet, has other files than then, or may be tried again."""
        failure = self._failed.get(number)
        return failure is None or failure.files != files or time.monotonic() >= failure.retry_at

    async def _unload(self, version: LoadedVersion) -> None:
        self.statuses[version.number] = VersionStatus(UNLOADING)
        await version.unload()
        self.statuses[version.number] = VersionStatus(END)
        log.info("version %d has answered its last request and is unloaded", version.number)
        del version
        await asyncio.to_thread(_collect_and_freeze)
        self._drop_old_statuses()

    def _drop_old_statuses(self) -> None:
        ended = [number for number, status in self.statuses.items() if status.state == END]
        for number in ended[:-_REPORTED_ENDED]:
            del self.statuses[number]


def _collect_and_freeze() -> None:
    """Frees an unloaded model, then excludes all other objects from garbage collection.

    JSON makes thousands of lists per request, and each collection would visit the millions of objects of a framework.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
