"""Why a process ended, whether that counts against the restarts, and whether another start would fail the same way."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from modelyard.errors import UNAVAILABLE, PeerLostError, UserError
from modelyard.launcher.processes import Process, describe_status
from modelyard.system.activity import Activity

USER_ERROR, PEER_LOST = UserError.status, PeerLostError.status
SAVED = {128 + signal.SIGTERM: signal.SIGTERM, 128 + signal.SIGINT: signal.SIGINT}
"""Statuses after a signal that the process has handled."""
STOPPED = SAVED | {-signal.SIGTERM: signal.SIGTERM, -signal.SIGINT: signal.SIGINT}
"""Statuses after a signal that asks a process to exit; in its first moments, it can't handle one."""

_ERROR = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))\b")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Failure:
    """The end of a process whose work was not done.

    Args:
        name: the process.
        status: its exit status, or minus a signal.
        how: in words, such as: exited with status 1.
        report: ``how``, with the end of its log.
        counts: whether the failure counts against the restarts. A kill from outside does not.
        error: the class of the error at the end of its log, if any.
        steps: the first and the last step that it may have failed at; None before the first step.
        saved: the newest checkpoint.
    """

    name: str
    status: int
    how: str
    report: str
    counts: bool
    error: str
    steps: tuple[int, int] | None
    saved: int

    @property
    def exit_status(self) -> int:
        """Its status as a shell reports it."""
        return self.status if self.status >= 0 else 128 - self.status

    def repeats(self, last: Failure | None) -> bool:
        """Returns whether this is the last failure once more: same process, error, step, and nothing new is saved."""
        if last is None or not (self.counts and last.counts) or self.steps is None or last.steps is None:
            return False
        if self.status == UNAVAILABLE:  # a disk or network failed, and may be back soon
            return False
        same = (self.name, self.status, self.error, self.saved) == (last.name, last.status, last.error, last.saved)
        return same and self.steps[0] <= last.steps[1] and last.steps[0] <= self.steps[1]

    def common_steps(self, last: Failure) -> str:
        """Returns the steps at which both failed, as text."""
        assert self.steps is not None
        assert last.steps is not None
        first, final = max(self.steps[0], last.steps[0]), min(self.steps[1], last.steps[1])
        return f"step {first}" if first == final else f"steps {first} to {final}"


def describe_failure(process: Process, saved: int, out_of_memory: bool | None) -> Failure:
    """Returns how an ended process failed.

    Args:
        process: the process.
        saved: the newest checkpoint.
        out_of_memory: whether the kernel has killed processes for lack of memory meanwhile; None if it does not tell.
    """
    status = process.status or 0
    how, counts = f"exited with {describe_status(status)}", True
    if process.why_killed:
        how = f"was {describe_status(status)} by the launcher: {process.why_killed}"
    elif status == -signal.SIGKILL:
        how = f"was {describe_status(status)}"
        if out_of_memory is None:
            how += " (from outside, or out of memory)"
        elif out_of_memory:
            how += ": out of memory"
        else:
            how, counts = f"{how} from outside (not for lack of memory)", False
    elif status < 0:
        how = f"was {describe_status(status)}"
    lines = process.last_lines
    if lines:
        text = "\n".join([f"{process.spec.name} {how}. The end of {process.log}:", *(f"  {line}" for line in lines)])
    else:
        text = f"{process.spec.name} {how}, and wrote nothing to {process.log}."
    return Failure(process.spec.name, status, how, text, counts, _error(lines), _steps(process.activity), saved)


def _steps(activity: Activity) -> tuple[int, int] | None:
    if activity.step is None:
        return None
    return (activity.step, activity.step) if activity.until is None else (activity.step + 1, activity.until)


def _error(lines: list[str]) -> str:
    """Returns the class of the last error in the end of a log."""
    found = (match[1] for line in reversed(lines) if (match := _ERROR.match(line)))
    return next(found, "")


# -- out of memory ----------------------------------------------------------------------------------------------------


def memory_kills(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int | None:
    """Returns how many processes the kernel has killed for lack of memory; None if it does not tell.

    The count of this process's control group is exact. That of the machine may include processes of others.
    """
    paths = [*_cgroup_counts(proc, cgroups), proc / "vmstat"]
    for path in paths:
        try:
            counts = dict(line.split(" ", 1) for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _cgroup_counts(proc: Path, cgroups: Path) -> list[Path]:
    """Returns the files with the count for the control group of this process, and for the groups above it."""
    try:
        lines = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return []
    found = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if "memory" in controllers.split(","):  # version 1
            groups, name = cgroups / "memory", "memory.oom_control"
        elif not controllers:  # version 2
            groups, name = cgroups, "memory.events"
        else:
            continue
        own = groups / path.strip("/")
        inside = [own, *own.parents]
        found += [folder / name for folder in inside[: inside.index(groups) + 1]] if groups in inside else []
    return found
