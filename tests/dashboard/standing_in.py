"""A program that stands in for a run: it holds the folder as a run does, until it is told to stop."""

from __future__ import annotations

import fcntl
import signal
import sys
import time
from pathlib import Path

from modelyard.system.process import hold_pid_file


def main() -> None:
    """Called as ``standing_in.py resume RUN``."""
    _, verb, folder = sys.argv
    run = Path(folder)
    (run / "verb").write_text(verb)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if (run / "fails").exists():
        sys.exit("error: the data is not the data this run started with.")
    with open(run / ".lock", "a", encoding="utf-8") as lock, hold_pid_file(run / "runlogs" / "chief.pid"):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (run / "started").touch()
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
