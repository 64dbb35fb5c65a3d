"""Supervises the processes of a cluster: restarts them when one is lost, stops them together, and shows their logs.

Exit status 2 is an error that a person must correct, 75 a lost peer. A process that was signalled saves and exits with
143 or 130. Everything else is a crash, unless somebody has killed the process (`launcher/failures.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import RenderableType

from modelyard.errors import UserError
from modelyard.launcher.failures import (
    PEER_LOST,
    SAVED,
    STOPPED,
    USER_ERROR,
    Failure,
    describe_failure,
    memory_kills,
)
from modelyard.launcher.processes import Process, ProcessSpec
from modelyard.launcher.progress import Progress
from modelyard.system.console import visible

log = logging.getLogger("modelyard")
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchError(UserError):
    """A cluster that failed. The status is that of the process that failed first."""

    def __init__(self, message: str, status: int = USER_ERROR) -> None:
        super().__init__(message)
        self.status = status


class Stopped(Exception):  # noqa: N818 - not an error
    """The cluster received a signal and has stopped."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


@dataclass(frozen=True)
class Timeouts:
    """How long a supervisor waits, in seconds.

    Args:
        poll: the interval at which logs are read.
        peers: for the others to exit by themselves after one is lost.
        coordinator: for all to exit after the coordinator is signalled; then all others are signalled.
        stop: for all to exit after that; then they are killed.
        finish: for the others to exit by themselves after the coordinator has finished.
        first_pause: before the first restart; every further pause is twice as long.
        longest_pause: the longest pause before a restart.
        changes: the least time between two lines about what the processes do, where there is no table.
    """

    poll: float = 0.25
    peers: float = 30.0
    coordinator: float = 20.0
    stop: float = 120.0
    finish: float = 30.0
    first_pause: float = 1.0
    longest_pause: float = 60.0
    changes: float = 5.0

    def pause(self, failures: int) -> float:
        """Returns the pause before a restart after so many failures in a row."""
        return min(self.first_pause * 2.0 ** min(failures - 1, 30), self.longest_pause)


@dataclass
class _Attempts:
    """Counts failures in a row without progress: crashes, and kills from outside, of which any number is allowed."""

    most: int
    step: int
    crashes: int = 0
    kills: int = 0
    last: Failure | None = None

    def failed(self, failure: Failure) -> None:
        """Counts a failure.

        Raises:
            LaunchError: if there may not be another attempt.
        """
        if failure.saved > self.step:
            self.step, self.crashes, self.kills, self.last = failure.saved, 0, 0, None
        if not failure.counts and self.most:
            self.kills += 1
            self.last = None
            return
        self.crashes += 1
        last, self.last = self.last, failure
        if self.crashes > self.most:
            why = f"after {self.most} restarts without progress" if self.most else "restarts are not allowed"
            raise LaunchError(f"giving up ({why}). {failure.report}", failure.exit_status)
        if last is not None and failure.repeats(last):
            raise LaunchError(
                f"giving up: {failure.name} has failed twice at {failure.common_steps(last)}, and nothing was saved in "
                f"between. Another restart would fail there, too. {failure.report}\n"
                f"Correct the cause, then start the same command: it resumes from step {failure.saved}.",
                failure.exit_status,
            )

    @property
    def failures(self) -> int:
        """All failures in a row."""
        return self.crashes + self.kills

    def restarting(self, seconds: float) -> str:
        """Returns what is shown while a process waits for its restart."""
        number = "" if self.last is None else f" ({self.crashes} of {self.most})"
        return f"restarting{number} in {max(seconds, 0):.0f} s"

    def __str__(self) -> str:
        if self.last is None:
            return "not counted, since it was killed from outside"
        return f"restart {self.crashes}, at most {self.most} in a row without progress"


class Supervisor:
    """Runs a cluster until its work is done.

    Args:
        make_specs: returns the processes, one of which is the coordinator; called for every start of all of them.
        logs: the folder of their logs.
        newest_step: returns the step of the newest checkpoint, which measures progress.
        max_restarts: how many restarts in a row are allowed without progress.
        timeouts: how long to wait.
        output: where the standard output of the run's result goes; by default where this process's goes.
        live: shows a table of the processes on the terminal; None prints their logs instead.
    """

    def __init__(
        self,
        make_specs: Callable[[], list[ProcessSpec]],
        logs: Path,
        newest_step: Callable[[], int],
        max_restarts: int,
        timeouts: Timeouts | None = None,
        output: IO[bytes] | None = None,
        live: Callable[[RenderableType], None] | None = None,
    ) -> None:
        self._make_specs = make_specs
        self._logs = logs
        self._newest_step = newest_step
        self._max_restarts = max_restarts
        self._timeouts = timeouts or Timeouts()
        self._output = output
        self._live = live
        self._events: queue.SimpleQueue[Process | signal.Signals] = queue.SimpleQueue()
        self._signals: list[signal.Signals] = []
        self._processes: dict[str, Process] = {}
        self._restarts: dict[Process, float] = {}  # when to restart processes that failed and are restarted alone
        self._attempts: dict[str, _Attempts] = {}  # of those
        self._given_up: dict[Process, LaunchError] = {}
        self._pausing: tuple[_Attempts, float] | None = None  # before all are restarted, and until when
        self._memory_kills = memory_kills()
        self._progress = Progress(self._timeouts.changes)

    def run(self) -> None:
        """Starts the cluster and returns when its work is done.

        Raises:
            LaunchError: if a process has an error that a restart would repeat, or failed too often.
            Stopped: after SIGTERM, SIGINT or SIGHUP to this process, or to one of the cluster.
        """
        attempts = _Attempts(self._max_restarts, self._newest_step())
        with self._signals_handled():
            try:
                while (failure := self._run_once()) is not None:
                    attempts.failed(failure)
                    pause = self._timeouts.pause(attempts.failures)
                    log.warning("%s", failure.report)
                    log.warning("restarting all processes in %g s, from step %d (%s)", pause, attempts.step, attempts)
                    self._pause(pause, attempts)
            finally:
                self._kill_all()
        if self._given_up:
            raise next(iter(self._given_up.values()))

    # -- one start of all processes -------------------------------------------------------------------------------

    def _run_once(self) -> Failure | None:
        """Starts all processes; returns None when the work is done, or the failure that makes all restart."""
        self._processes, self._restarts, self._attempts, self._given_up = {}, {}, {}, {}
        for spec in self._make_specs():
            self._start(spec)
        while not self._is_done():
            ended = self._next_exit(min(self._restarts.values(), default=math.inf))
            if self._signals:
                self._stop(self._signals[0])
                return None
            self._restart_due()
            if ended is None or ended.status == 0:
                continue
            if ended.status in STOPPED:
                self._stop(STOPPED[ended.status])
                return None
            if ended.status == USER_ERROR:
                return self._after_failure(ended)
            if ended.spec.restarts_alone:
                self._restart_alone(ended)
            elif self._coordinator().status == 0:  # only the evaluator is still awaited
                log.warning("%s", self._failure_of(ended).report)
            else:
                return self._after_failure(ended)
        self._finish()
        return None

    def _after_failure(self, first: Process) -> Failure:
        """Waits for the others to exit after a failure; returns the failure that came first."""
        failed = [*self._restarts, first]
        self._restarts = {}
        if first.status == USER_ERROR:
            self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + self._timeouts.peers
        while self._alive() and time.monotonic() < deadline:
            ended = self._next_exit(deadline)
            if len(self._signals) > 1:
                break
            if ended is not None and ended.status != 0:
                failed.append(ended)
        for process in self._alive():
            log.warning("%s did not exit within %g s; killed", process.spec.name, self._timeouts.peers)
        self._kill_all()
        for process in failed:
            if process.status == USER_ERROR:
                raise LaunchError(self._failure_of(process).report, USER_ERROR)
        if self._signals:
            raise Stopped(self._signals[0])
        for process in failed:
            if process.status in STOPPED:
                raise Stopped(STOPPED[process.status])
        return self._failure_of(next((process for process in failed if process.status != PEER_LOST), failed[0]))

    def _failure_of(self, process: Process) -> Failure:
        kills, before = memory_kills(), self._memory_kills
        self._memory_kills = kills
        grown = None if kills is None or before is None else kills > before
        return describe_failure(process, self._newest_step(), grown)

    def _restart_alone(self, ended: Process) -> None:
        """Restarts one process after a pause, while the others continue."""
        name, failure = ended.spec.name, self._failure_of(ended)
        attempts = self._attempts.setdefault(name, _Attempts(self._max_restarts, failure.saved))
        try:
            attempts.failed(failure)
        except LaunchError as error:
            if not ended.spec.is_awaited:
                raise
            log.error("%s; giving up on it, the others continue", failure.report)  # training is more important
            self._given_up[ended] = error
            return
        pause = self._timeouts.pause(attempts.failures)
        log.warning("%s", failure.report)
        log.warning("restarting %s in %g s (%s)", name, pause, attempts)
        self._restarts[ended] = time.monotonic() + pause

    def _is_done(self) -> bool:
        """Returns whether all awaited processes have finished, or were given up."""
        awaited = [process for process in self._processes.values() if process.spec.is_awaited]
        return all(process.status == 0 or process in self._given_up for process in awaited)

    def _finish(self) -> None:
        """Waits for the other processes, which the coordinator has informed that the work is done."""
        self._restarts = {}
        seen = len(self._signals)
        self._wait_for_all(self._timeouts.finish, seen)
        for process in self._alive():
            log.warning("%s has not exited with the others; stopping it", process.spec.name)
            process.signal(signal.SIGTERM)
        self._wait_for_all(self._timeouts.finish, seen)

    # -- stopping -------------------------------------------------------------------------------------------------

    def _stop(self, number: signal.Signals) -> None:
        """Signals the coordinator, which has all save at the same step; then the others. A second signal kills.

        Raises:
            Stopped: when all have exited, unless the work was done just then.
        """
        log.info("%s: saving and stopping; signal again to kill", number.name)
        seen = len(self._signals)
        self._restarts = {}
        coordinator = self._coordinator()
        if coordinator.is_alive:
            coordinator.signal(signal.SIGTERM)
            self._wait_for_all(self._timeouts.coordinator, seen, until_coordinator=True)
            if coordinator.status in SAVED:  # it has informed the others; one killed by the signal could not
                self._wait_for_all(self._timeouts.coordinator, seen)
        self._signal_all(signal.SIGTERM)
        self._wait_for_all(self._timeouts.stop, seen)
        why = "signalled again" if len(self._signals) > seen else "too slow"
        for process in self._alive():
            log.warning("%s killed: %s", process.spec.name, why)
        self._kill_all()
        if self._is_done():
            return
        if coordinator.status is not None and coordinator.status not in (0, *STOPPED, -signal.SIGKILL):
            log.warning("the coordinator may not have saved: %s", self._failure_of(coordinator).report)
        raise Stopped(number)

    def _wait_for_all(self, seconds: float, seen: int, until_coordinator: bool = False) -> None:
        """Waits until all have exited, or only the coordinator, or more than ``seen`` signals have arrived."""
        deadline = time.monotonic() + seconds
        while self._alive() and time.monotonic() < deadline:
            if len(self._signals) > seen or (until_coordinator and not self._coordinator().is_alive):
                return
            self._next_exit(deadline)

    def _pause(self, seconds: float, attempts: _Attempts) -> None:
        """Waits before all are restarted."""
        deadline = time.monotonic() + seconds
        self._pausing = attempts, deadline
        while time.monotonic() < deadline:
            self._next_exit(deadline)
            if self._signals:
                raise Stopped(self._signals[0])
        self._pausing = None

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._alive():
            process.signal(number)

    def _kill_all(self) -> None:
        self._signal_all(signal.SIGKILL)
        for process in self._alive():
            process.reap()
        self._show_logs()

    # -- processes and logs ---------------------------------------------------------------------------------------

    def _next_exit(self, deadline: float) -> Process | None:
        """Reaps and returns the next process that exits; None if none does before the logs are read again."""
        ended = None
        with contextlib.suppress(queue.Empty):
            event = self._events.get(timeout=min(self._timeouts.poll, max(deadline - time.monotonic(), 0.0)))
            if isinstance(event, Process) and event in self._alive():  # one of an earlier start may arrive late
                event.reap()
                ended = event
        self._show_logs()
        return ended

    def _show_logs(self) -> None:
        width = max((len(name) for name in self._processes), default=0)
        new = [f"{name:<{width}} | {visible(line)}\n" for name, p in self._processes.items() for line in p.read_log()]
        self._kill_silent()
        self._progress.update(self._processes.values(), self._waiting())
        with contextlib.suppress(OSError):  # a closed terminal or pipe must not stop training
            if self._live is not None and self._processes:
                self._live(self._progress.table())
                return
            if new:
                sys.stderr.write("".join(new))
                sys.stderr.flush()
            if changed := self._progress.changed():
                log.info("%s", changed)

    def _kill_silent(self) -> None:
        """Kills processes that others have given up on: one that is frozen would not exit."""
        for process in self._alive():
            for name in process.silent:
                other = self._processes.get(name)
                if other is not None and other.is_alive and other is not process:
                    log.warning("%s does not answer %s any more; killing it", name, process.spec.name)
                    other.kill(f"it did not answer {process.spec.name} any more")
            process.silent.clear()

    def _waiting(self) -> dict[str, str]:
        """Returns what is said of processes that wait for a restart, by name."""
        now, found = time.monotonic(), {}
        for ended, when in self._restarts.items():
            found[ended.spec.name] = self._attempts[ended.spec.name].restarting(when - now)
        if self._pausing is not None:
            attempts, when = self._pausing
            found |= dict.fromkeys(self._processes, attempts.restarting(when - now))
        return found

    def _start(self, spec: ProcessSpec) -> None:
        self._processes[spec.name] = Process(spec, self._logs, self._events.put, self._output)

    def _restart_due(self) -> None:
        for ended, when in list(self._restarts.items()):
            if time.monotonic() >= when:
                del self._restarts[ended]
                self._start(ended.spec)

    def _alive(self) -> list[Process]:
        return [process for process in self._processes.values() if process.is_alive]

    def _coordinator(self) -> Process:
        return next(process for process in self._processes.values() if process.spec.is_coordinator)

    @contextlib.contextmanager
    def _signals_handled(self) -> Iterator[None]:
        """Lets signals stop the cluster; in another thread than the main one, Python delivers none."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: Any) -> None:
            self._signals.append(signal.Signals(number))
            self._events.put(signal.Signals(number))  # SimpleQueue: may be called from inside its own get

        handled = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores
        before = {number: signal.signal(number, handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
