"""Reports the activity of this process to its launcher, which shows it and notices processes that hang.

One JSON object per line goes into a pipe, whose number is in the environment. Without a launcher nothing is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

PIPE = "MODELYARD_ACTIVITY"
"""The environment variable with the number of the pipe."""
COMPILING, TRAINING = "compiling", "training"


@dataclass(frozen=True)
class Activity:
    """The activity of a process.

    Args:
        doing: in words, such as training.
        step: the last step that was trained.
        until: the last of the steps that are being trained.
        total: the last step of the run, if the process decides on it.
    """

    doing: str = "starting"
    step: int | None = None
    until: int | None = None
    total: int | None = None


def report(doing: str, step: int | None = None, until: int | None = None, total: int | None = None) -> None:
    """Tells the launcher what this process does from now on."""
    _write({"doing": doing, "step": step, "until": until, "total": total})


def report_silent(name: str) -> None:
    """Tells the launcher that a process of the run does not answer, by the name of its log."""
    _write({"silent": name})


def read_reports(lines: Iterable[bytes]) -> tuple[Activity | None, list[str]]:
    """Returns the last activity in lines from the pipe, if there is one, and the processes that do not answer."""
    activity, silent = None, []
    for line in lines:
        fields: Any = None
        with contextlib.suppress(ValueError):  # anything may be written there
            fields = json.loads(line)
        if not isinstance(fields, dict):
            continue
        numbers = {name: fields.get(name) for name in ("step", "until", "total")}
        if isinstance(fields.get("silent"), str):
            silent.append(fields["silent"])
        elif isinstance(fields.get("doing"), str) and all(n is None or type(n) is int for n in numbers.values()):
            activity = Activity(fields["doing"], **numbers)
    return activity, silent


def _write(fields: dict[str, object]) -> None:
    pipe = _pipe()
    if pipe is not None:
        with contextlib.suppress(OSError):  # the launcher is gone, or so busy that the pipe is full
            os.write(pipe, json.dumps(fields).encode() + b"\n")


@lru_cache(maxsize=1)
def _pipe() -> int | None:
    """Returns the pipe to the launcher. Processes that this one starts do not inherit it."""
    number = os.environ.pop(PIPE, "")
    with contextlib.suppress(OSError, ValueError):
        if stat.S_ISFIFO(os.fstat(int(number)).st_mode):
            os.set_inheritable(int(number), False)
            os.set_blocking(int(number), False)
            return int(number)
    return None
