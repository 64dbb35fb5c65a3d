"""Small programs that stand in for the processes of a cluster, and a supervisor for them."""

from __future__ import annotations

import sys
from pathlib import Path

from modelyard.launcher.processes import ProcessSpec
from modelyard.launcher.supervise import Supervisor, Timeouts

QUICK = Timeouts(poll=0.02, peers=5.0, coordinator=5.0, stop=5.0, finish=5.0, first_pause=0.01, longest_pause=0.02)

BEGIN = """
import json, os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["HERE"])
name = os.environ["NAME"]

def times():
    "The number of starts of this process, including this one."
    with open(here / f"{name}.starts", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return len((here / f"{name}.starts").read_text().split())

def wait_for(*names):
    deadline = time.monotonic() + 600
    while not all((here / each).exists() for each in names):
        if time.monotonic() > deadline:
            sys.exit("missing: " + ", ".join(names))
        time.sleep(0.01)

def mark(which):
    (here / which).touch()

def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(600)

def report(**fields):
    "As `modelyard.system.activity` does."
    os.write(int(os.environ["MODELYARD_ACTIVITY"]), json.dumps(fields).encode() + b"\\n")

def leave(number, frame):
    "As Modelyard does on SIGTERM."
    sys.exit(143)

count = times()
"""


def script(
    name: str, code: str, *, is_coordinator: bool = False, is_awaited: bool | None = None, restarts_alone: bool = False
) -> ProcessSpec:
    """A process that runs ``code`` in the current folder."""
    environ = {"HERE": str(Path.cwd()), "NAME": name}
    awaited = is_coordinator if is_awaited is None else is_awaited
    words = (sys.executable, "-S", "-c", BEGIN + code)
    return ProcessSpec(
        name, words, environ, is_coordinator=is_coordinator, is_awaited=awaited, restarts_alone=restarts_alone
    )


def supervise(*specs: ProcessSpec, max_restarts: int = 3, timeouts: Timeouts = QUICK) -> None:
    """Runs a supervisor to the end; progress is the number in the file ``step``."""
    Supervisor(lambda: list(specs), Path("logs"), saved_step, max_restarts, timeouts).run()


def saved_step() -> int:
    """The number in the file ``step``."""
    path = Path("step")
    return int(path.read_text() or 0) if path.exists() else 0


def starts(name: str) -> list[int]:
    """The pids of a process, start by start."""
    path = Path(f"{name}.starts")
    return [int(word) for word in path.read_text().split()] if path.exists() else []
