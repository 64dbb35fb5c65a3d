"""Pid files that can be trusted."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import environment
from modelyard.errors import Interrupted, RunError
from modelyard.system.process import _Recorder, hold_pid_file, holders, host_file, log_to, read_holder
from waiting import PATIENCE

FILE = Path("worker-0.pid")
HOLDS = """
import sys, pathlib
from modelyard.system.process import hold_pid_file
with hold_pid_file(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(path: Path = FILE) -> Iterator[subprocess.Popen[str]]:
    """Holds the file until its input ends."""
    words = [sys.executable, "-c", HOLDS, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, env=environment(), **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_it_holds_the_pid_for_kill_and_beside_it_the_host_while_the_process_lives() -> None:
    with hold_pid_file(FILE):
        assert FILE.read_text().split() == [str(os.getpid())]
        assert host_file(FILE).read_text().splitlines()[0] == socket.gethostname()
        holder = read_holder(FILE)
        assert holder is not None
        assert (holder.name, holder.pid, holder.is_here) == ("worker-0", os.getpid(), True)
        assert str(holder) == f"worker-0 (process {os.getpid()})"
    assert list(Path().iterdir()) == []


def test_the_pid_file_of_an_earlier_version_has_a_holder() -> None:
    with another_process() as process:
        FILE.write_text(f"{process.pid}\nhost\npid:[1]\n")
        holder = read_holder(FILE)
        assert holder is not None
        assert (holder.pid, holder.host, holder.space) == (process.pid, "host", "pid:[1]")


def test_a_pid_file_of_a_killed_process_has_no_holder() -> None:
    with another_process() as process:
        assert [holder.pid for holder in holders(Path())] == [process.pid]
        process.kill()
        process.wait()
        assert FILE.exists()
        assert holders(Path()) == []
    with hold_pid_file(FILE):
        assert read_holder(FILE).pid == os.getpid()  # type: ignore[union-attr]


def test_two_processes_can_not_hold_it() -> None:
    with another_process() as process:
        expected = pytest.raises(RunError, match=f"running already: process {process.pid} on")
        with expected, hold_pid_file(FILE):
            pass
    assert FILE.exists()


def test_a_living_holder_is_signalled_and_a_stale_pid_never() -> None:
    with another_process() as process:
        holder = read_holder(FILE)
        assert holder is not None
        assert not replace(holder, host="elsewhere").signal(signal.SIGTERM)
        assert not replace(holder, space="pid:[1]").signal(signal.SIGTERM)
        assert not replace(holder, pid=os.getpid()).signal(signal.SIGTERM)
        assert process.poll() is None
        assert holder.signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == -signal.SIGTERM
        assert not holder.signal(signal.SIGTERM)


def test_a_pid_that_the_holder_has_not_yet_written_over_is_not_signalled() -> None:
    with another_process(), subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as innocent:
        FILE.write_text(f"{innocent.pid}\n")
        holder = read_holder(FILE)
        assert holder is not None
        assert holder.pid == innocent.pid
        assert not holder.signal(signal.SIGKILL)
        assert innocent.poll() is None
        innocent.kill()


@pytest.mark.parametrize("text", ["", "1\n", "x\n", "1\nhost\nspace\n", "-1\nhost\nspace\n", "\x00\xff\nhost\nspace\n"])
def test_nonsense_in_a_pid_file_is_no_holder(text: str) -> None:
    with another_process():
        FILE.write_text(text, encoding="latin-1")
        assert read_holder(FILE) is None


def test_a_full_disk_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunError, match="disk is full"), hold_pid_file(FILE):
        pass


def test_a_file_of_another_is_not_removed() -> None:
    with hold_pid_file(FILE):
        FILE.unlink()
        FILE.write_text("made anew")
    assert FILE.read_text() == "made anew"


LOGS = """
import logging, sys
from pathlib import Path
from modelyard.system.console import show_log
from modelyard.system.process import log_to
show_log()
with log_to(Path("logs"), "worker-0"):
    logging.getLogger("modelyard").info("once")
    logging.getLogger("modelyard").debug("in the file only")
    print("raw", file=sys.stderr)
logging.getLogger("modelyard").info("after")
"""


def test_a_log_that_is_standard_error_too_gets_every_line_once() -> None:
    Path("logs").mkdir()
    with open("logs/worker-0.log", "ab") as file:
        subprocess.run([sys.executable, "-c", LOGS], stderr=file, env=environment(), check=True, timeout=PATIENCE)
    lines = Path("logs/worker-0.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["once", "only", "raw", "after"]
    assert "INFO" in lines[0]


def test_a_log_elsewhere_is_shown_on_standard_error_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGS], capture_output=True, text=True, env=environment(), check=True, timeout=60
    )
    assert [line.split()[-1] for line in done.stderr.splitlines()] == ["once", "raw", "after"]
    assert [line.split()[-1] for line in Path("logs/worker-0.log").read_text().splitlines()] == ["once", "only"]


def test_the_process_of_a_role_can_not_be_started_twice() -> None:
    expected = pytest.raises(RunError, match=r"worker-0 of .* is running already")
    with another_process(FILE.absolute()), expected, log_to(Path().absolute(), "worker-0"):
        pass
    assert not any(isinstance(handler, logging.FileHandler) for handler in logging.getLogger("modelyard").handlers)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_log_on_a_full_disk_hides_no_error(tmp_path: Path) -> None:
    log = logging.getLogger("modelyard")
    with log_to(tmp_path, "chief"):
        handler = next(one.handler for one in log.filters if isinstance(one, _Recorder))
        assert isinstance(handler, logging.FileHandler)
        handler.stream.close()
        handler.stream = open("/dev/full", "w")  # noqa: SIM115 - the handler closes it
        log.info("does not fit")


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        ("", ["a warning"]),  # Python's default
        ("logging.basicConfig(level=logging.WARNING, format='%(message)s')", ["a warning"]),
        ("logging.basicConfig(level=logging.INFO, format='%(message)s')", ["info", "a warning", "outside"]),
        ("logging.getLogger('modelyard').setLevel(logging.ERROR)", []),
        ("logging.getLogger('modelyard').addHandler(logging.StreamHandler())", ["a warning"]),
    ],
)
def test_a_run_leaves_the_level_of_the_log_to_the_program(tmp_path: Path, before: str, shown: list[str]) -> None:
    program = (
        f"import logging, sys\nfrom pathlib import Path\n{before}\n"
        "from modelyard.system.process import log_to\n"
        "log = logging.getLogger('modelyard')\nlevel = log.level\n"
        "with log_to(Path(sys.argv[1]), 'chief'), log_to(Path(sys.argv[1]), 'evaluator'):\n"
        "    log.debug('debug'), log.info('info'), log.warning('a warning')\n"
        "log.info('outside')\nassert log.level == level and not log.filters"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, env=environment(), timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert done.stderr.splitlines() == shown
    for role in ("chief", "evaluator"):
        lines = (tmp_path / f"{role}.log").read_text().splitlines()
        assert [line.split()[-1] for line in lines] == ["debug", "info", "warning"]


def test_the_log_ends_with_the_error_that_ended_the_process(tmp_path: Path) -> None:
    with pytest.raises(RunError), log_to(tmp_path, "chief"):
        raise RunError("the loss became nan at step 2.")
    assert (tmp_path / "chief.log").read_text().splitlines()[-1].endswith("ERROR   the loss became nan at step 2.")
    with pytest.raises(KeyError), log_to(tmp_path, "chief"):
        raise KeyError("unexpected")
    text = (tmp_path / "chief.log").read_text()
    assert "ERROR   KeyError: 'unexpected'" in text
    assert "Traceback" in text, "of what is not the user's mistake"
    with pytest.raises(Interrupted), log_to(tmp_path, "chief"):
        raise Interrupted(signal.SIGTERM, 3, "run")
    assert (tmp_path / "chief.log").read_text() == text, "a run that was stopped has not failed"
