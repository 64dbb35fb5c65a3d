"""Becomes a process of a cluster: binds itself to cores, sees to it that it dies with its launcher, runs the command.

Run as a file, by path: ``child.py LAUNCHER CORES WORD …``. It imports nothing of Modelyard, so that it is quick. What
it does can't be done between fork and exec in the launcher, which has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns: the command takes the place of this process."""
    launcher, cores, *words = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it died before that took effect
            sys.exit(1)
        if cores:
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
