"""Keeps the processes of a cluster going: starts them again when one is lost, stops them together.

A process that ends with 2 made a mistake that a person must mend, with 75 it lost a peer, with 143 or 130 it was told
to stop and has saved. Everything else is a crash.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from modelyard.errors import PeerLostError, UserError
from modelyard.launcher.processes import Failure, Process, Spec

log = logging.getLogger("modelyard")
MISTAKE, PEER_LOST = UserError.status, PeerLostError.status
STOPPED = {128 + signal.SIGTERM: signal.SIGTERM, 128 + signal.SIGINT: signal.SIGINT}

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchError(UserError):
    """A cluster that could not be kept going. The status is that of the process that failed first."""

    def __init__(self, message: str, status: int = MISTAKE) -> None:
        super().__init__(message)
        self.status = status


class Stopped(Exception):  # noqa: N818 - not an error
    """The cluster was told to stop, and is gone."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, in seconds.

    Args:
        look: between two looks at the logs.
        peers: for the others to end by themselves after one was lost.
        lead: for all to end after the lead was told to stop; then everyone is told.
        stop: for all to end after that; then they are killed.
        finish: for the others to end by themselves after the lead has ended well.
        first_pause: before the first new start; every further one is twice as long, up to ``longest_pause``.
        longest_pause: the longest.
    """

    look: float = 0.25
    peers: float = 30.0
    lead: float = 20.0
    stop: float = 120.0
    finish: float = 30.0
    first_pause: float = 1.0
    longest_pause: float = 60.0

    def pause(self, failures: int) -> float:
        """Before a new start after so many failures in a row."""
        return min(self.first_pause * 2.0 ** min(failures - 1, 30), self.longest_pause)


class View(Protocol):
    """Shows people the processes."""

    def lines(self, name: str, lines: list[str]) -> None:
        """Is called with new lines of the log of a process."""

    def show(self, processes: list[Process]) -> None:
        """Is called a few times a second, with all processes."""


@dataclass
class Tries:
    """How often something failed in a row without progress."""

    most: int
    step: int
    failures: int = 0

    def failed(self, step: int) -> bool:
        """Counts a failure at ``step``; whether there may be another try."""
        if step > self.step:
            self.step, self.failures = step, 0
        self.failures += 1
        return self.failures <= self.most


class Supervisor:
    """Runs a cluster to its end.

    Args:
        plan: the processes; called anew for every start of all of them. The lead is one of them.
        logs: the folder of their logs.
        newest_step: how far training is saved: what counts as progress.
        max_restarts: how often in a row to start again without progress.
        view: what people see.
        patience: how long to wait for what.
        output: where the standard output of the lead goes; None: where ours goes.
    """

    def __init__(
        self,
        plan: Callable[[], list[Spec]],
        logs: Path,
        newest_step: Callable[[], int],
        max_restarts: int,
        view: View,
        patience: Patience | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        self._plan = plan
        self._logs = logs
        self._newest_step = newest_step
        self._max_restarts = max_restarts
        self._view = view
        self._patience = patience or Patience()
        self._output = output
        self._events: queue.SimpleQueue[Process | signal.Signals] = queue.SimpleQueue()
        self._signals: list[signal.Signals] = []
        self._processes: dict[str, Process] = {}
        self._again: dict[str, tuple[float, Spec, Failure]] = {}  # to be started again alone, when, and why
        self._alone: dict[str, Tries] = {}
        self._given_up: list[Failure] = []

    def run(self) -> None:
        """Starts the cluster and returns when its work is done.

        Raises:
            LaunchError: if a process made a mistake, or failed too often.
            Stopped: after SIGTERM, SIGINT or SIGHUP to this process, or to one of the cluster.
        """
        tries = Tries(self._max_restarts, self._newest_step())
        with self._signals_heard():
            try:
                while (failure := self._round()) is not None:
                    if not tries.failed(self._newest_step()):
                        raise self._giving_up(failure, self._max_restarts)
                    pause = self._patience.pause(tries.failures)
                    log.warning("%s", failure)
                    log.warning("starting all again in %g s, from step %d (%s)", pause, tries.step, _count(tries))
                    self._rest(pause)
            finally:
                self._kill_all()
        if self._given_up:
            raise self._giving_up(self._given_up[0], self._max_restarts)

    # -- one start of everything ----------------------------------------------------------------------------------

    def _round(self) -> Failure | None:
        """Starts all. Returns when the work is done, or the failure after which all are to be started again."""
        self._processes, self._again, self._alone, self._given_up = {}, {}, {}, []
        for spec in self._plan():
            self._start(spec)
        while not self._is_done():
            ended = self._next(self._soonest())
            if self._signals:
                self._stop(self._signals[0])
                return None
            self._start_again()
            if ended is None or ended.reap() == 0:
                continue
            failure = self._failure(ended)
            if failure.status in STOPPED:
                self._stop(STOPPED[failure.status])
                return None
            if failure.status == MISTAKE:
                return self._end_of_round([failure])
            if ended.spec.restarts_alone:
                self._restart_alone(ended, failure)
            elif self._lead().status == 0:  # only the evaluator is waited for
                log.warning("%s", failure)
            else:
                return self._end_of_round([failure])
        self._finish()
        return None

    def _end_of_round(self, failures: list[Failure]) -> Failure | None:
        """One was lost: lets the others end, and finds out what came first."""
        mistaken = failures[0].status == MISTAKE
        failures = [failure for _, _, failure in self._again.values()] + failures
        self._again = {}
        if mistaken:
            self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + self._patience.peers
        while self._alive() and time.monotonic() < deadline:
            ended = self._next(deadline)
            if len(self._signals) > 1:
                break
            if ended is not None and ended.reap() != 0:
                failures.append(self._failure(ended))
        for process in self._alive():
            log.warning("%s did not end by itself in %g s; killed", process.spec.name, self._patience.peers)
        self._kill_all()
        for failure in failures:
            if failure.status == MISTAKE:
                raise LaunchError(str(failure), MISTAKE)
        if self._signals:
            raise Stopped(self._signals[0])
        for failure in failures:
            if failure.status in STOPPED:
                raise Stopped(STOPPED[failure.status])
        return next((failure for failure in failures if failure.status != PEER_LOST), failures[0])

    def _restart_alone(self, ended: Process, failure: Failure) -> None:
        """The others go on without it until it is back."""
        name = ended.spec.name
        step = self._newest_step()
        tries = self._alone.setdefault(name, Tries(self._max_restarts, step))
        if tries.failed(step):
            pause = self._patience.pause(tries.failures)
            log.warning("%s", failure)
            log.warning("starting %s again in %g s (%s)", name, pause, _count(tries))
            self._again[name] = (time.monotonic() + pause, ended.spec, failure)
        elif ended.spec.is_awaited:  # training is worth more than it
            log.error("%s; giving up on it, the others go on", failure)
            self._given_up.append(failure)
        else:
            raise self._giving_up(failure, self._max_restarts)

    def _is_done(self) -> bool:
        """Whether everyone whose work counts has ended well, or was given up."""
        lost = {failure.name for failure in self._given_up}
        awaited = [process for process in self._processes.values() if process.spec.is_awaited]
        return all(process.status == 0 or process.spec.name in lost for process in awaited)

    def _finish(self) -> None:
        """The work is done: the others were told so by the lead."""
        self._again = {}
        heard = len(self._signals)
        self._wait_for_all(self._patience.finish, heard)
        for process in self._alive():
            log.warning("%s has not ended with the others; stopping it", process.spec.name)
            process.signal(signal.SIGTERM)
        self._wait_for_all(self._patience.finish, heard)

    # -- stopping -------------------------------------------------------------------------------------------------

    def _stop(self, number: signal.Signals) -> None:
        """The lead makes all save at the same step; whoever does not end is told, then killed. A second signal kills.

        Raises:
            Stopped: when all are gone, unless the work was done just then.
        """
        log.info("%s: saving and stopping; once more to kill", number.name)
        heard = len(self._signals)
        self._again = {}
        if self._lead().is_alive:
            self._lead().signal(signal.SIGTERM)
            self._wait_for_all(self._patience.lead, heard, until_lead=True)
            if self._lead().status in STOPPED:  # it has told them; one that died of the signal could not
                self._wait_for_all(self._patience.lead, heard)
        self._signal_all(signal.SIGTERM)
        self._wait_for_all(self._patience.stop, heard)
        for process in self._alive():
            log.warning("%s killed: %s", process.spec.name, "as told" if len(self._signals) > heard else "too slow")
        self._kill_all()
        status = self._lead().status
        if self._is_done():
            return
        if status is not None and status not in (0, *STOPPED, -signal.SIGKILL, -signal.SIGTERM):
            log.warning("the lead may not have saved: %s", self._failure(self._lead()))
        raise Stopped(number)

    def _wait_for_all(self, seconds: float, heard: int, until_lead: bool = False) -> None:
        """Waits until all have ended, or only the lead, or more than ``heard`` signals have come."""
        deadline = time.monotonic() + seconds
        while self._alive() and time.monotonic() < deadline:
            if len(self._signals) > heard or (until_lead and not self._lead().is_alive):
                return
            ended = self._next(deadline)
            if ended is not None:
                ended.reap()

    def _rest(self, seconds: float) -> None:
        """The pause before all are started again."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._next(deadline)
            if self._signals:
                raise Stopped(self._signals[0])

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._alive():
            process.signal(number)

    def _kill_all(self) -> None:
        self._signal_all(signal.SIGKILL)
        for process in self._alive():
            process.reap()
        self._look()

    # -- small things ---------------------------------------------------------------------------------------------

    def _next(self, deadline: float) -> Process | None:
        """The next process that ends, if one does before the next look at the logs."""
        seconds = min(self._patience.look, max(deadline - time.monotonic(), 0.0))
        event: Process | signal.Signals | None
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            event = None
        self._look()
        # One of an earlier round may come late.
        known = isinstance(event, Process) and self._processes.get(event.spec.name) is event and event.is_alive
        return event if known and isinstance(event, Process) else None

    def _look(self) -> None:
        for process in self._processes.values():
            lines = process.read_log()
            if lines:
                self._view.lines(process.spec.name, lines)
        self._view.show(list(self._processes.values()))

    def _soonest(self) -> float:
        return min((when for when, _, _ in self._again.values()), default=time.monotonic() + self._patience.look)

    def _start(self, spec: Spec) -> None:
        self._processes[spec.name] = Process(spec, self._logs, self._events.put, self._output)

    def _start_again(self) -> None:
        for name, (when, spec, _) in list(self._again.items()):
            if time.monotonic() >= when:
                del self._again[name]
                self._start(spec)

    def _alive(self) -> list[Process]:
        return [process for process in self._processes.values() if process.is_alive]

    def _lead(self) -> Process:
        return next(process for process in self._processes.values() if process.spec.leads)

    def _failure(self, process: Process) -> Failure:
        status = process.reap()
        self._look()
        return Failure(process.spec.name, status, process.log, tuple(process.last_lines))

    def _giving_up(self, failure: Failure, restarts: int) -> LaunchError:
        tried = f"started again {restarts} times without progress" if restarts else "not to be started again"
        return LaunchError(f"giving up ({tried}). {failure}", failure.exit_status)

    @contextmanager
    def _signals_heard(self) -> Iterator[None]:
        """Signals stop the cluster; a library's caller in another thread has none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def hear(number: int, frame: Any) -> None:
            self._signals.append(signal.Signals(number))
            self._events.put(signal.Signals(number))  # SimpleQueue: may be called from inside its own get

        heard = [number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN]  # such as nohup's
        before = {number: signal.signal(number, hear) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _count(tries: Tries) -> str:
    return f"restart {tries.failures}, at most {tries.most} in a row without progress"
