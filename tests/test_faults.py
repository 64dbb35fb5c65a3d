"""The fault injector: what may be written, when a fault happens, and that it happens once."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelyard import faults, storage
from modelyard.cli.app import main
from modelyard.distributed.process_group import describe_error
from modelyard.errors import UNAVAILABLE, ConfigError, DataError, StorageError
from modelyard.system.untrusted import read_regular

LOGS = Path("run/runlogs")
REACH = """
import sys
from pathlib import Path
from modelyard import faults
with faults.injected(Path("run/runlogs"), sys.argv[1]):
    for count in range(1, 6):
        print(count, flush=True)
        faults.reach("save")
"""


def reached(process: str = "chief", **environ: str) -> tuple[int, int]:
    """The exit status of a process that reaches a place five times, and how often it did."""
    words = [sys.executable, "-c", REACH, process]
    done = subprocess.run(words, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    return done.returncode, len(done.stdout.split())


def hits(place: str, count: int) -> list[int]:
    """At which of so many counts something is raised."""
    found = []
    for number in range(1, count + 1):
        try:
            faults.reach(place)
        except (OSError, faults.InjectedCrashError):
            found.append(number)
    return found


def test_the_examples_of_the_docs_are_read() -> None:
    text = "kill@step=100, hang@worker=1, enospc@save=3, eio@read=0.01:seed=7, slow@save=5s, kill@time=2min:ps-0:always"
    kill, hang, full, read, slow, late = faults.parse(text)
    assert (kill.kind, kill.place, kill.number, kill.happens_once) == ("kill", "step", 100, True)
    assert (hang.place, hang.number, hang.processes) == ("step", 1, ("worker-1",))
    assert (full.kind, full.number) == ("enospc", 3)
    assert (read.chance, read.seed, read.happens_once) == (0.01, 7, False)
    assert (slow.seconds, slow.number, slow.happens_once) == (5.0, None, False)
    assert (late.seconds, late.processes, late.happens_once) == (120.0, ("ps-0",), False)
    assert faults.parse(" , ") == []


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("kil@step=3", "there is no fault 'kil'. Did you mean 'kill'?"),
        ("kill@stop=3", "there is no place 'stop'. Did you mean 'step'?"),
        ("eio@save", "is not a fault."),
        ("enospc@read=1", "Places of enospc: save, file, download."),
        ("crash@time=5s", "there is no crash at time. Places of crash: step"),
        ("kill@step=0", "'0' must be a step from 1 on, or a probability such as 0.01."),
        ("eio@read=1.5", "'1.5' must be a count"),
        ("eio@read=-1", "'-1' must be a count"),
        ("slow@save=5", "'5' must be a time such as 5s, 200ms or 2min."),
        ("slow@save=99999999999s", "must be a time such as"),
        ("kill@step=5:wroker-1", "'wroker-1' must be always, seed=NUMBER, run=NAME, or a process"),
        ("hang@ps=0", "Give a time instead: hang@time=30s:ps-0."),
        ("\x1b[31mred", r"'\x1b[31mred': is not a fault."),
    ],
)
def test_a_bad_value_is_one_error_with_status_2(
    entry: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(faults.VARIABLE, f"kill@step=5, {entry}")
    with pytest.raises(SystemExit) as ended:
        main(["models"])
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert "1 mistake in the environment: MODELYARD_FAULTS: " in said
    assert message in said
    assert "A fault is FAULT@PLACE=WHEN" in said
    assert "\x1b[31mred" not in said


def test_all_mistakes_are_named_and_twice_is_one() -> None:
    with pytest.raises(ConfigError) as raised:
        faults.parse("nap@step=1, kill@step=2, kill@step=x, kill@step=2")
    assert [problem.key for problem in raised.value.problems] == ["nap@step=1", "kill@step=x", "kill@step=2"]


def test_without_the_variable_nothing_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    monkeypatch.setattr(faults._Plan, "reach", None)
    monkeypatch.setattr(faults._Plan, "trained", None)
    faults.load()
    faults.reach("read")
    faults.trained(0, 100)
    assert faults.next_step(0) is None


def test_a_kill_happens_once_in_each_process_of_a_run() -> None:
    kill = {faults.VARIABLE: "kill@save=3"}
    assert reached(**kill) == (-signal.SIGKILL, 3)
    assert reached(**kill) == (0, 5)
    assert reached("worker-1", **kill) == (-signal.SIGKILL, 3)
    assert reached(MODELYARD_FAULTS="kill@save=4") == (-signal.SIGKILL, 4), "another fault"
    always = {faults.VARIABLE: "kill@save=3:always"}
    assert reached(**always) == reached(**always) == (-signal.SIGKILL, 3)
    (Path("run") / "runlogs" / ".chief.faults").unlink()
    assert reached(**kill) == (-signal.SIGKILL, 3), "a new run"


def test_kills_with_a_probability_let_the_run_end() -> None:
    ends = [reached(MODELYARD_FAULTS="kill@save=0.5") for _ in range(6)]
    assert ends[0][0] == -signal.SIGKILL
    assert ends[-1] == (0, 5)


def test_a_hang_freezes_the_process() -> None:
    words = [sys.executable, "-c", REACH, "chief"]
    environ = {**os.environ, faults.VARIABLE: "hang@save=2"}
    with subprocess.Popen(words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
        finally:
            process.kill()


def test_a_timed_kill_needs_no_place() -> None:
    words = [sys.executable, "-c", REACH.replace('faults.reach("save")', "__import__('time').sleep(60)"), "ps-0"]
    environ = {**os.environ, faults.VARIABLE: "kill@time=50ms:ps-0"}
    assert subprocess.run(words, env=environ, stdout=subprocess.DEVNULL, check=False).returncode == -signal.SIGKILL


def test_faults_with_a_probability_are_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(text: str, process: str = "chief") -> list[int]:
        monkeypatch.setenv(faults.VARIABLE, text)
        with faults.injected(LOGS, process):
            return hits("read", 2000)

    first = found("eio@read=0.01")
    faults.memory(LOGS, "chief").unlink()
    assert found("eio@read=0.01") == first, "a new run"
    assert found("eio@read=0.01") != first, "else a restart would fail at the same request, for ever"
    assert 5 < len(first) < 50
    assert found("eio@read=0.01:seed=1") != first
    assert found("eio@read=0.01", "worker-1") != first
    assert found("eio@read=1.0") == list(range(1, 2001))


def test_only_the_named_process_and_run_have_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def happens(text: str, process: str) -> bool:
        monkeypatch.setenv(faults.VARIABLE, text + ":always")
        with faults.injected(LOGS, process):
            return hits("save", 1) == [1]

    assert happens("crash@save=1", "worker-0")
    assert happens("crash@save=1:worker", "worker-0")
    assert happens("crash@save=1:chief:worker-0", "worker-0")
    assert not happens("crash@save=1:worker-1", "worker-0")
    assert not happens("crash@save=1", "launch"), "it only starts others"
    assert happens("crash@save=1:matrix", "matrix")
    assert happens("crash@save=1:run=run", "chief")
    assert not happens("crash@save=1:run=other", "chief")


def test_what_happens_once_needs_a_run_to_remember_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a command that is started again would meet it for ever."""
    monkeypatch.setattr(faults, "_plan", None)
    for text, found in (
        ("eio@read=2", []),
        ("crash@read=1.0", []),
        ("eio@read=2:always", [2]),
        ("eio@read=1.0", [1, 2]),
    ):
        monkeypatch.setenv(faults.VARIABLE, text)
        faults.load()
        assert hits("read", 2) == found


def test_steps_end_where_a_fault_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "crash@step=30, crash@step=70:worker-1")
    with faults.injected(LOGS, "worker-0"):
        assert [faults.next_step(step) for step in (0, 29, 30, 70)] == [30, 30, 70, None]
        faults.trained(0, 29)
        with pytest.raises(faults.InjectedCrashError, match="crash@step=30"):
            faults.trained(29, 5)
        faults.trained(29, 100)  # once; step 70 is another's
    monkeypatch.setenv(faults.VARIABLE, "crash@step=0.01")
    with faults.injected(LOGS, "chief"):
        step = faults.next_step(0)
        assert step is not None
        faults.trained(0, step - 1)
        with pytest.raises(faults.InjectedCrashError):
            faults.trained(step - 1, 1)


def test_the_log_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    monkeypatch.setenv(faults.VARIABLE, "eio@save=2, slow@save=1ms")
    with faults.injected(LOGS, "chief"):
        faults.announce()
        hits("save", 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        "FAULTS ARE ON: eio@save=2, slow@save=1ms; this process is chief",
        "FAULT INJECTED: slow@save=1ms, at save 1",
        "FAULT INJECTED: eio@save=2, at save 2",
    ]


def test_a_failed_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    path = tmp_path / "file"
    path.write_bytes(b"here")
    monkeypatch.setenv(faults.VARIABLE, "eio@read=1, eio@read=2, eio@read=3")
    with faults.injected(LOGS, "chief"):
        assert read_regular(path, 100, DataError) == b"here"
    monkeypatch.setenv(faults.VARIABLE, "eio@read=1.0")
    with faults.injected(LOGS, "chief"), pytest.raises(OSError, match="eio@read") as raised:
        read_regular(path, 100, DataError)
    assert raised.value.errno == errno.EIO
    monkeypatch.setattr(time, "sleep", None)
    with pytest.raises(FileNotFoundError):  # does not come back
        read_regular(tmp_path / "missing", 100, DataError)


def test_a_lost_network_is_storage_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "network@upload=1, network@download=1, enospc@download=2, crash@upload=2")
    with faults.injected(LOGS, "chief"):
        with pytest.raises(StorageError, match=re.escape("can't write memory://a: the storage can't be")) as raised:
            storage.write_bytes("memory://a", b"1")
        assert raised.value.exit_status == UNAVAILABLE
        assert not describe_error(raised.value)["final"], "the processes of a cluster are restarted"
        with pytest.raises(faults.InjectedCrashError):
            storage.write_bytes("memory://a", b"1")
        storage.write_bytes("memory://a", b"1")
        with pytest.raises(StorageError, match="the storage can't be reached"):
            storage.read_bytes("memory://a")
        with pytest.raises(StorageError, match="the local disk is full") as raised:
            storage.read_bytes("memory://a")
        assert raised.value.exit_status == 2
        assert describe_error(raised.value)["final"]
        assert storage.read_bytes("memory://a") == b"1"
