"""Runs a command as a process of a cluster: binds it to cores, lets signals reach it, has it die with its launcher.

Run as a file, by path: ``child.py LAUNCHER CORES COMMAND …``. It imports nothing of Modelyard, so that it is quick. The
launcher can't do this between fork and exec, because it has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Replaces this process by the command; never returns."""
    launcher, cores, *words = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it died before that took effect
            sys.exit(1)
        if cores:
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    # A shell has background jobs ignore Ctrl-C, and so their children; this one must react when it is signalled itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
