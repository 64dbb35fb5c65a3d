"""A process that runs one command after another, so that imports, the engine and compiled programs are shared.

Run as ``python -m modelyard.cli.worker JOBS ANSWERS FOLDER``, with the numbers of two pipes and, for those who list the
processes, the folder that it works for. Every line from JOBS is a command and its log; to ANSWERS goes a line for each
that has succeeded. After any other end of a command this process ends in the same way: what is left behind then is
gone with it.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import modelyard

_PROGRAM = str(Path(modelyard.__file__).with_name("__main__.py"))
"""The program of these commands, as runs record it."""


def main() -> None:
    """Runs the commands; never returns."""
    jobs, answers = int(sys.argv[1]), int(sys.argv[2])
    for pipe in (jobs, answers):  # the processes that a command starts must not keep them open
        os.set_inheritable(pipe, False)
    environ: dict[str, str] | None = None
    with open(jobs, encoding="utf-8") as lines:
        for line in lines:
            job = json.loads(line)
            _write_to(job["log"])
            with _state_kept(environ):
                status = _run(job["words"])
            environ = environ or dict(os.environ)
            if status or _has_leftovers():
                sys.exit(status)
            memory = psutil.Process().memory_info().rss
            os.write(answers, json.dumps({"memory": memory}).encode() + b"\n")
    # Nothing is lost, and the engines take a while to end.
    os._exit(0)


def _write_to(path: str) -> None:
    """Writes standard output and standard error to a log from now on, those of native code too."""
    _flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)


def _run(words: Sequence[str]) -> int:
    """Runs a command as `modelyard` does, and returns its exit status."""
    from modelyard.cli.app import main as command_line

    sys.argv = [_PROGRAM, *words]
    try:
        command_line()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return end.code or 0
    except BaseException:  # as the interpreter does at the end of a program
        traceback.print_exc()
        return 1
    finally:
        _flush()
    return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk takes no log
            continue


def _has_leftovers() -> bool:
    """Returns whether a command has left processes or threads behind, which would work beside the next one."""
    threads = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    children = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    return bool(threads or children)


@contextmanager
def _state_kept(environ: dict[str, str] | None) -> Iterator[None]:
    """Restores what belongs to the whole process after a command.

    Args:
        environ: the environment variables; None for the first command, which imports the engine: what is set then is
            the same for all commands of this process.
    """
    folder, arguments, hooks, numbers = Path.cwd(), sys.argv, (sys.excepthook, threading.excepthook), random.getstate()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    log = logging.getLogger("modelyard")
    logged = log.handlers[:], log.filters[:], log.level, log.propagate
    with warnings.catch_warnings():  # forgets which warnings were shown
        pass
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if environ is not None:
            os.environ.clear()
            os.environ.update(environ)
        os.chdir(folder)
        random.setstate(numbers)
        sys.argv, (sys.excepthook, threading.excepthook) = arguments, hooks
        log.handlers[:], log.filters[:], log.propagate = logged[0], logged[1], logged[3]
        log.setLevel(logged[2])
        _forget_models()
        gc.collect()


def _forget_models() -> None:
    """Drops what Keras keeps of models; its settings are those of a new process then."""
    keras: Any = sys.modules.get("keras")
    if keras is not None:
        keras.utils.clear_session(free_memory=False)


if __name__ == "__main__":
    main()
