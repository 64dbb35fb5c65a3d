"""Shows the activity of the processes of a cluster: a table for a terminal, and a line after a change for a log."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from rich.table import Column, Table
from rich.text import Text

from modelyard.launcher.processes import Process, describe_status
from modelyard.system.activity import COMPILING, TRAINING, Activity

_TIMESTAMP = re.compile(r"^\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d+ [A-Z]+ +")
"""Date, fractions of seconds and level are left out of the table: the line needs the room."""
_WINDOW_SECONDS = 30.0
"""The speed is that of the last seconds."""
_QUIET_SECONDS = 10.0
"""A process that trains reports every half second. After so long without a report, the table says so."""
DONE = "done"


class Progress:
    """Follows what the processes report.

    Args:
        changes: the least time between two changes that are told, in seconds.
        clock: the time in seconds.
    """

    def __init__(self, changes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._changes, self._clock = changes, clock
        self._processes: list[Process] = []
        self._waiting: Mapping[str, str] = {}
        self._steps: deque[tuple[float, int]] = deque()
        self._news: dict[str, tuple[Activity, float]] = {}
        self._told: dict[str, str] = {}
        self._told_at = -changes

    def update(self, processes: Iterable[Process], waiting: Mapping[str, str]) -> None:
        """Takes what the processes are doing now; ``waiting`` has those that wait for a restart, by name."""
        self._processes, self._waiting = list(processes), waiting
        activity, now = self._leader(), self._clock()
        for process in self._processes:
            if self._news.get(process.spec.name, (None,))[0] != process.activity:
                self._news[process.spec.name] = process.activity, now
        if activity.doing == COMPILING or (self._steps and (activity.step or 0) < self._steps[-1][1]):
            self._steps.clear()  # compiling is not speed, and another start is not slowness
        if (
            activity.step is not None
            and activity.doing != COMPILING
            and (not self._steps or activity.step > self._steps[-1][1])
        ):
            self._steps.append((now, activity.step))
        while len(self._steps) > 2 and now - self._steps[0][0] > _WINDOW_SECONDS:
            self._steps.popleft()

    def table(self) -> Table:
        """Returns a table of the processes: name, pid, what each does, last line of the log."""
        last = Column("last line", no_wrap=True, overflow="ellipsis", ratio=1)
        doing = Column("doing", no_wrap=True)
        table = Table("process", Column("pid", justify="right"), doing, last, expand=True, title_justify="left")
        table.title = self.summary() or None
        for process in self._processes:
            text = self._doing(process) + self._quiet(process)
            style = "bold green" if text == DONE else "green" if process.is_alive else "red"
            lines = process.last_lines
            line = _TIMESTAMP.sub(r"\1  ", lines[-1]) if lines else ""
            table.add_row(process.spec.name, str(process.pid), Text(text, style=style), Text(line))
        return table

    def summary(self) -> str:
        """Returns step, total, speed and time left; empty before the first step is known."""
        activity = self._leader()
        if activity.step is None:
            return ""
        if activity.total is None:
            return f"step {activity.step:,}"
        text = f"step {activity.step:,} of {activity.total:,} ({activity.step / max(activity.total, 1):.0%})"
        seconds, steps = self._pace()
        if seconds > 0 and steps > 0:
            left = (activity.total - activity.step) * seconds / steps
            text += f", {_rounded(steps / seconds)} steps/s, {_duration(left)} left"
        return text

    def changed(self) -> str:
        """Returns what the processes do, if that has changed and the last change was told long enough ago."""
        if self._waiting or any(process.status for process in self._processes):  # the log tells what failed
            return ""
        now = {process.spec.name: self._word(process) for process in self._processes}
        if now == self._told or self._clock() - self._told_at < self._changes:
            return ""
        self._told, self._told_at = now, self._clock()
        who: dict[str, list[str]] = {}
        for process in self._processes:
            who.setdefault(self._doing(process), []).append(process.spec.name)
        listed = "; ".join(f"{', '.join(names)}: {doing}" for doing, names in who.items())
        return f"{listed} – {self.summary()}" if self.summary() else listed

    def _leader(self) -> Activity:
        return next((process.activity for process in self._processes if process.spec.is_coordinator), Activity())

    def _pace(self) -> tuple[float, int]:
        if len(self._steps) < 2:
            return 0.0, 0
        (began, first), (_, last) = self._steps[0], self._steps[-1]
        return self._clock() - began, last - first

    def _doing(self, process: Process) -> str:
        word, step = self._word(process), process.activity.step
        return word if step is None or not process.is_alive else f"{word} (step {step:,})"

    def _quiet(self, process: Process) -> str:
        """Returns for how long a process that trains has reported nothing; it or another may be frozen."""
        activity, since = self._news.get(process.spec.name, (process.activity, self._clock()))
        seconds = self._clock() - since
        return f", no news for {_duration(seconds)}" if activity.doing == TRAINING and seconds > _QUIET_SECONDS else ""

    def _word(self, process: Process) -> str:
        """Returns what a process does, without numbers."""
        if process.spec.name in self._waiting:
            return self._waiting[process.spec.name]
        if process.status is None:
            return process.activity.doing
        return DONE if process.status == 0 else describe_status(process.status)


def _rounded(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _duration(seconds: float) -> str:
    """Returns a time as ``2 h 5 min``, ``3 min`` or ``40 s``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if hours else f"{minutes} min"
    return f"{hours / 24:.1f} days"
