"""Sends the rows of a run to a tracking server, from a thread, so that a server never slows or stops training.

The rows of `metrics.jsonl` are what a server must have. When a run begins or resumes, and after an outage, the server
is asked for the last step that it has of each metric, and gets the rows after it: from memory, or else from the file.
So every step is there once, also after a kill, and memory stays bounded.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol
from urllib.parse import urlsplit

from modelyard.config.backend import is_installed
from modelyard.config.schema import Config
from modelyard.errors import Interrupted, UserError
from modelyard.loop.catalog import TrackerOptions
from modelyard.loop.hooks import Hook
from modelyard.loop.recording import Metrics
from modelyard.run.directory import RunDirectory, read_json, recorded_options
from modelyard.run.manifest import read_manifest
from modelyard.run.metrics import each_row
from modelyard.system.files import write_text

if TYPE_CHECKING:
    from modelyard.engine.base import Engine
    from modelyard.loop.run import Result
    from modelyard.loop.trainer import Trainer

log = logging.getLogger("modelyard")
ROWS_IN_MEMORY = 10_000
"""Rows that wait for a server. If there are more, they are read from metrics.jsonl when it answers again."""
ROWS_AT_ONCE = 100
SEND_EVERY = 2.0
"""Seconds in which rows are collected to be sent together."""
LONGEST_PAUSE = 30.0
INTERRUPTED_WAIT = 5.0
"""Seconds for the last rows after Ctrl-C or SIGTERM: a cluster kills what takes long."""
FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"
_NOT_METRICS = ("step", "split")


class Point(NamedTuple):
    """A value of a metric at a step."""

    split: str
    name: str
    step: int
    value: float
    seconds: float
    """Seconds of training, earlier starts of the run included."""

    @property
    def key(self) -> str:
        """Its name at the server: ``validation/loss``. MLflow does not allow all characters."""
        return re.sub(r"[^\w\-. :/]", "_", f"{self.split}/{self.name}")


class NotReadyError(Exception):
    """The run is not at the server yet: another process of it makes it."""


class Destination(Protocol):
    """A run at a tracking server. Its methods are called from one thread, and may raise any exception."""

    def open(self) -> dict[str, int]:
        """Finds the run, or makes it; returns the last step that the server has of each metric, by `Point.key`."""

    def send(self, points: Sequence[Point]) -> None:
        """Sends values. The steps of a metric ascend."""

    def close(self, status: str) -> None:
        """Ends the run with a status."""


class Sender:
    """Sends rows from a thread.

    Args:
        name: the name of the hook, for messages.
        destination: where to.
        file: metrics.jsonl, which has every row before `put` gets it; None if nothing writes it.
        limit: the largest number of rows in memory.
        every: seconds in which rows are collected.
        pause: seconds until the first new try after an error; then twice as long each time.
    """

    def __init__(
        self,
        name: str,
        destination: Destination,
        file: Path | None,
        *,
        limit: int = ROWS_IN_MEMORY,
        every: float = SEND_EVERY,
        pause: float = 1.0,
    ) -> None:
        self._name, self._destination, self._file = name, destination, file
        self._limit, self._every, self._pause = limit, every, pause
        self._changed = threading.Condition()
        self._rows: deque[Mapping[str, Any]] = deque()
        self._batch: list[Mapping[str, Any]] = []
        """Rows that are being sent; they stay here until the server has them."""
        self._behind = file is not None and file.exists()
        """Whether the file may have rows that are neither sent nor in memory."""
        self._dropped = 0
        self._sent: dict[str, int] | None = None
        self._status: str | None = None
        self._deadline = float("inf")
        self._last_error = ""
        self._done = False
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)

    def start(self) -> None:
        """Begins to send."""
        self._thread.start()

    def put(self, row: Mapping[str, Any]) -> None:
        """Adds a row; returns at once."""
        with self._changed:
            if len(self._rows) >= self._limit:
                if self._file is not None:
                    self._rows.clear()
                    self._behind = True
                else:
                    self._rows.popleft()
                    self._dropped += 1
            self._rows.append(dict(row))
            self._changed.notify()

    def waiting(self) -> int:
        """Returns the number of rows in memory that are not sent."""
        with self._changed:
            return len(self._rows) + len(self._batch)

    def finish(self, status: str, wait: float) -> bool:
        """Sends the last rows and ends the run at the server; returns whether it has everything.

        Args:
            status: of the run.
            wait: the seconds after which it gives up.
        """
        with self._changed:
            self._status, self._deadline = status, time.monotonic() + wait
            self._changed.notify()
        self._thread.join(wait + 0.5)
        if self._dropped:
            log.warning("%s: %d rows were lost: there was no answer for too long", self._name, self._dropped)
        if not self._done:
            reason = f" ({self._last_error})" if self._last_error else ""
            later = "A resume of the run sends the rest" if self._file is not None else "The rest is lost"
            log.warning("%s: not everything was sent within %g s%s. %s", self._name, wait, reason, later)
        return self._done

    # -- in the thread

    def _run(self) -> None:
        pause = self._pause
        while True:
            try:
                if self._sent is None:
                    self._sent = self._destination.open()
                self._send_what_waits()
                if self._last_error:
                    log.info("%s answers again; what was waiting is sent", self._name)
                    self._last_error, pause = "", self._pause
                if self._is_over():
                    self._destination.close(self._status or FAILED)
                    self._done = True
                    return
                self._wait_for_rows()
            except Exception as error:  # of the network, of the client, of the server
                self._sent = None  # the server may have what was sent, without having answered
                self._tell(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._status is not None, timeout=pause)
                    left = self._deadline - time.monotonic()
                if left <= 0:
                    return
                if self._status is not None:
                    time.sleep(min(pause, left, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE)

    def _tell(self, error: Exception) -> None:
        """Warns of the first error of an outage."""
        if isinstance(error, NotReadyError):
            return
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {without_password(lines[0]) if lines else 'no message'}"
        if not self._last_error:
            log.warning(
                "%s can't be reached; training continues, and what it misses is sent later: %s", *(self._name, text)
            )
        self._last_error = text

    def _is_over(self) -> bool:
        with self._changed:
            return self._status is not None and not self._rows and not self._behind

    def _wait_for_rows(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._behind or self._status is not None)
            self._changed.wait_for(lambda: self._status is not None, timeout=self._every)

    def _send_what_waits(self) -> None:
        while True:
            if not self._batch:
                with self._changed:
                    behind, self._behind = self._behind, False
                    if not behind:
                        self._batch = [self._rows.popleft() for _ in range(min(len(self._rows), ROWS_AT_ONCE))]
                if behind:
                    self._send_file()
                    continue
            if not self._batch:
                return
            self._send(self._batch)
            self._batch = []

    def _send_file(self) -> None:
        try:
            rows = each_row(self._file) if self._file is not None else iter(())
            while batch := list(islice(rows, ROWS_AT_ONCE)):
                self._send(batch)
        except BaseException:
            self._behind = True
            raise

    def _send(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Sends what the server does not have."""
        sent = self._sent if self._sent is not None else {}
        points = []
        for row in rows:
            for point in points_of(row):
                if point.step > sent.get(point.key, -1):
                    points.append(point)
                    sent[point.key] = point.step
        if points:
            self._destination.send(points)


def points_of(row: Mapping[str, Any]) -> Iterator[Point]:
    """Yields the numbers in a row of metrics.jsonl."""
    split, step, seconds = str(row.get("split", "")), int(row.get("step", 0)), float(row.get("seconds") or 0.0)
    for name, value in row.items():
        if name not in _NOT_METRICS and isinstance(value, int | float) and not isinstance(value, bool):
            yield Point(split, name, step, float(value), seconds)


def without_password(text: str) -> str:
    """Removes the user and password from the URLs in a text."""
    return re.sub(r"(\w+://)[^/@\s]*@", r"\1", text)


def check_address(address: str, where: str, variables: str) -> None:
    """Checks an URL of a server.

    Args:
        address: the URL.
        where: the option or variable that it comes from.
        variables: the environment variables that hold user and password.

    Raises:
        UserError: if it has no host, or has a password, which would be in config.yaml.
    """
    try:
        parts = urlsplit(address)
        host, _, password = parts.hostname, parts.port, parts.password
    except ValueError:
        host, password = None, None
    shown = without_password(address)
    if not host:
        raise UserError(f"{where}: {shown!r} is not a valid URL of a server, such as http://localhost:5000.")
    if password is not None:
        raise UserError(f"{where}: {shown!r} has a password, which config.yaml would show. Set {variables} instead.")


class Memo:
    """The state of a tracker in the run folder: the id of its run, and what was sent. It survives a kill.

    Args:
        directory: the run folder.
        name: the name of the hook.
    """

    def __init__(self, directory: RunDirectory, name: str) -> None:
        self._path = directory.trackers / f"{name}.json"
        self._known = read_json(self._path)

    @property
    def run(self) -> str | None:
        """The id of the run at the server."""
        found = self._known.get("run")
        return found if isinstance(found, str) and re.fullmatch(r"[\w.-]{1,128}", found) else None

    @property
    def sent(self) -> dict[str, int]:
        """The last step that was sent of each metric."""
        sent = self._known.get("sent")
        return {str(k): v for k, v in sent.items() if isinstance(v, int)} if isinstance(sent, dict) else {}

    def write(self, **values: Any) -> None:
        """Changes some values."""
        if all(self._known.get(key) == value for key, value in values.items()):
            return
        self._known |= json.loads(json.dumps(values))  # the caller may change its own
        self._path.parent.mkdir(exist_ok=True)
        write_text(self._path, json.dumps(self._known) + "\n")


class Description(NamedTuple):
    """The description of a run at the server: name, options, tags."""

    run_id: str
    name: str
    options: dict[str, Any]
    tags: dict[str, str]
    commit: str | None


def describe_run(directory: RunDirectory, config: Config, run_id: str) -> Description:
    """Collects the options, and tags from the manifest."""
    manifest = read_manifest(directory)
    start = (manifest.get("starts") or [{}])[-1]
    tags = {"run_folder": directory.address, "run_id": run_id}
    tags["dataset_fingerprint"] = str((manifest.get("dataset") or {}).get("fingerprint", ""))
    tags |= {f"version.{name}": str(version) for name, version in (start.get("versions") or {}).items()}
    return Description(run_id, directory.name, recorded_options(config), tags, start.get("git_commit"))


class Tracker(Hook, ABC):
    """Sends metrics, options and the files of the result to a tracking server. A resumed run is the same run there."""

    options: TrackerOptions
    order = 40  # after metrics.jsonl has a row
    package: ClassVar[str]
    """The package that it needs, which is also the name of the extra."""

    def __init__(self, options: TrackerOptions) -> None:
        super().__init__(options)
        self._sender: Sender | None = None

    @abstractmethod
    def check(self) -> None:
        """Raises a `UserError` if the configuration is wrong. A server that does not answer is no reason."""

    @abstractmethod
    def destination(self, directory: RunDirectory, about: Description, creates: bool, seconds: float) -> Destination:
        """Makes the run at the server, without asking the server yet.

        Args:
            directory: the run folder.
            about: what the server shows.
            creates: whether this process makes the run there, if it is not there.
            seconds: the seconds that were trained so far.
        """

    @abstractmethod
    def send_files(self, directory: RunDirectory, exports: Sequence[str]) -> Iterator[str]:
        """Sends files of the result; yields the name of each that was sent."""

    @property
    def is_off(self) -> bool:
        """Whether the hook does nothing."""
        return False

    def check_run(self, config: Config, engine: Engine) -> None:
        """Checks the configuration."""
        self._check()

    def _check(self) -> None:
        if self.is_off:
            return
        if not is_installed(self.package):
            raise UserError(
                f"the hook {self.name} needs the package {self.package}. Install it: "
                f"pip install 'modelyard[{self.package}]'"
            )
        self.check()

    def on_begin(self, loop: Trainer) -> None:
        """Starts to send. Rows that an earlier start has not sent are sent first."""
        if not loop.trains:  # an evaluator has no other moment for it
            self._check()
        if self.is_off:
            return
        about = describe_run(loop.directory, loop.config, loop.run_id)
        destination = self.destination(loop.directory, about, loop.trains, loop.seconds)
        has_file = any(isinstance(hook, Metrics) for hook in loop.hooks)
        self._sender = Sender(self.name, destination, loop.directory.metrics if has_file else None)
        self._sender.start()

    def on_log(self, loop: Trainer, row: dict[str, Any]) -> None:
        """Hands a row over to the thread."""
        if self._sender is not None:
            self._sender.put(row)

    def on_evaluation(self, loop: Trainer, split: str, row: dict[str, Any]) -> None:
        """Hands a row over to the thread."""
        if self._sender is not None:
            self._sender.put(row)

    def on_end(self, loop: Trainer) -> None:
        """Waits a while until everything is sent."""
        sender, self._sender = self._sender, None
        if sender is None:
            return
        error = sys.exc_info()[1]
        interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
        status = KILLED if interrupted else FINISHED if error is None else FAILED
        sender.finish(status, min(self.options.wait, INTERRUPTED_WAIT) if interrupted else self.options.wait)

    def on_complete(self, config: Config, result: Result, directory: RunDirectory) -> None:
        """Sends config.yaml, the report if there is one, and the exports or their paths."""
        if self.is_off:
            return
        answered, over, errors = threading.Event(), threading.Event(), list[str]()

        def send() -> None:
            try:
                for _ in self.send_files(directory, result.exports):
                    answered.set()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {without_password(str(error))}")
            answered.set()
            over.set()

        threading.Thread(target=send, name=f"tracker {self.name}", daemon=True).start()
        if not answered.wait(self.options.wait):  # after the first file, large ones may take their time
            errors.append(f"no answer within {self.options.wait:g} s")
        else:
            over.wait()
        if errors:
            log.warning(
                "%s: the files of the result were not sent (%s). They are in %s",
                *(self.name, errors[0], directory.address),
            )


def result_files(directory: RunDirectory) -> list[Path]:
    """Returns the small files of a run that a server keeps."""
    names = (directory.config, directory.path / "report.html", directory.path / "report.json")
    return [path for path in names if path.is_file() and not path.is_symlink()]
