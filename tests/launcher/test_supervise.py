"""The supervisor of a cluster, with real processes."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from stand_ins import QUICK, script, starts, supervise

from modelyard.launcher.supervise import LaunchError, Stopped, Timeouts
from waiting import wait_until

WAITS = "signal.signal(signal.SIGTERM, leave); mark(f'{name}.up'); time.sleep(600)"
LOSES_A_PEER = "wait_for('lost'); time.sleep(0.05); sys.exit(75)"


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("modelyard"), "propagate", True)
    caplog.set_level(logging.INFO, logger="modelyard")


@pytest.fixture(autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    yield
    left = [pid for path in Path().glob("*.starts") for pid in map(int, path.read_text().split()) if is_running(pid)]
    assert left == []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def when(*names: str, number: signal.Signals = signal.SIGTERM, delay: float = 0.0) -> None:
    """Signals this process when all files are there."""

    def wait() -> None:
        wait_until(lambda: all(Path(name).exists() for name in names))
        time.sleep(delay)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


def test_work_is_done_when_the_coordinator_has_finished(capsys: pytest.CaptureFixture[str]) -> None:
    supervise(
        script("worker-0", "print('trained', file=sys.stderr); mark('end')", is_coordinator=True),
        script("worker-1", "print('followed'); wait_for('end')"),
    )
    assert set(capsys.readouterr().err.splitlines()) == {"worker-0 | trained", "worker-1 | followed"}
    assert Path("logs/worker-1.log").read_text() == "followed\n"


def test_the_first_failure_is_reported_and_not_those_it_caused(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LaunchError) as caught:
        supervise(
            script("worker-0", LOSES_A_PEER, is_coordinator=True),
            script("worker-1", "mark('left'); sys.exit(75)"),  # it may be quicker than one that is dying
            script(
                "worker-2", "wait_for('left'); time.sleep(0.3); print('no memory', flush=True); mark('lost'); die()"
            ),
            script("worker-3", "wait_for('lost'); time.sleep(0.3); sys.exit(1)"),
            max_restarts=0,
        )
    assert caught.value.status == 137
    assert "worker-2 was killed by SIGKILL" in str(caught.value)
    assert "no memory" in str(caught.value)
    assert "worker-3" not in str(caught.value)


def test_a_lost_peer_is_the_failure_only_where_nothing_else_happened() -> None:
    with pytest.raises(LaunchError, match="worker-1 exited with status 75") as caught:
        supervise(
            script("worker-0", "wait_for('lost'); time.sleep(0.2); sys.exit(75)", is_coordinator=True),
            script("worker-1", "mark('lost'); sys.exit(75)"),
            max_restarts=0,
        )
    assert caught.value.status == 75


def test_after_a_crash_all_are_restarted() -> None:
    supervise(
        script("worker-0", "if count == 1: mark('lost'); die()", is_coordinator=True),
        script("worker-1", "if count == 1: wait_for('lost'); sys.exit(75)"),
    )
    assert (len(starts("worker-0")), len(starts("worker-1"))) == (2, 2)


def test_restarts_without_progress_are_counted_and_wait_longer_each_time(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LaunchError, match="after 3 restarts without progress") as caught:
        supervise(script("worker-0", "sys.exit(7)", is_coordinator=True))
    assert len(starts("worker-0")) == 4
    assert caught.value.status == 7
    pauses = [
        record.args[0] for record in caplog.records if "restarting all processes in" in record.msg and record.args
    ]  # type: ignore[index]
    assert pauses == [0.01, 0.02, 0.02]
    assert [Timeouts().pause(failures) for failures in (1, 2, 3, 6, 7, 99)] == [1, 2, 4, 32, 60, 60]


def test_a_kill_from_outside_is_not_counted_and_waits_longer_each_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelyard.launcher.supervise.memory_kills", lambda: 7)
    supervise(script("worker-0", "if count < 5: die()", is_coordinator=True), max_restarts=1)
    assert len(starts("worker-0")) == 5
    assert "worker-0 was killed by SIGKILL from outside" in caplog.text
    assert "restart 1" not in caplog.text
    restarts = [record.args for record in caplog.records if record.msg.startswith("restarting all processes in")]
    assert [args[0] for args in restarts if args] == [0.01, 0.02, 0.02, 0.02]  # type: ignore[index]


@pytest.mark.parametrize(
    ("counts", "how"), [([0, 1, 2], "SIGKILL: out of memory"), ([None] * 4, "(from outside, or out of memory)")]
)
def test_a_kill_by_the_kernel_counts_and_so_does_one_that_nobody_knows(
    counts: list[int | None], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(counts)
    monkeypatch.setattr("modelyard.launcher.supervise.memory_kills", lambda: next(left))
    with pytest.raises(LaunchError, match="after 1 restarts without progress") as caught:
        supervise(script("worker-0", "die()", is_coordinator=True), max_restarts=1)
    assert how in str(caught.value)
    assert caught.value.status == 137
    assert len(starts("worker-0")) == 2


FAILS_AT_137 = """
first = {1: 120, 2: 131}.get(count, 0)
report(doing="training", step=first, until=first + 20, total=500)
print("ValueError: image 17 is broken", flush=True)
"""


def test_a_run_that_fails_at_the_same_step_twice_stops_and_says_so() -> None:
    Path("step").write_text("100")
    with pytest.raises(LaunchError, match="giving up: worker-1 has failed twice at steps 132 to 140") as caught:
        supervise(
            script("worker-0", "if count == 3: sys.exit()\nwait_for('lost'); sys.exit(75)", is_coordinator=True),
            script("worker-1", FAILS_AT_137 + "mark('lost'); sys.exit(1)"),
            max_restarts=9,
        )
    assert len(starts("worker-1")) == 2
    assert caught.value.status == 1
    assert "  ValueError: image 17 is broken" in str(caught.value)
    assert "start the same command: it resumes from step 100" in str(caught.value)


@pytest.mark.parametrize(
    "differs",
    [
        "(here / 'step').write_text(str(100 * count))",  # something was saved
        "report(doing='training', step=200 * count)",  # another step
        "print(f'Problem{count}Error: x', flush=True)",  # another error
        "if count > 1: sys.exit(2 + count)",  # another status
        "if count % 2: die()",  # killed from outside in between
        "sys.exit(74)",  # a disk or network that fails may be back soon
    ],
)
def test_two_different_failures_are_not_the_same(differs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.launcher.supervise.memory_kills", lambda: 0)
    code = "if count == 4: sys.exit()\n" + FAILS_AT_137.replace("120, 2: 131", "120, 2: 120, 3: 120")
    supervise(script("worker-0", f"{code}\n{differs}\nsys.exit(1)", is_coordinator=True), max_restarts=3)
    assert len(starts("worker-0")) == 4


def test_an_evaluator_that_fails_at_the_same_step_twice_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    wait = "while len((here / 'evaluator.starts').read_text().split()) < 2: time.sleep(0.01)\n"
    with pytest.raises(LaunchError, match="evaluator has failed twice at step 100") as caught:
        supervise(
            script("worker-0", f"wait_for('evaluator.starts')\n{wait}time.sleep(0.3)", is_coordinator=True),
            script("evaluator", "report(doing='evaluating', step=100); sys.exit(5)",
                   is_awaited=True, restarts_alone=True),
            max_restarts=9,
        )  # fmt: skip
    assert caught.value.status == 5
    assert len(starts("evaluator")) == 2


def test_a_process_that_does_not_answer_the_others_is_killed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its peers exit by themselves; it is frozen and would not."""
    supervise(
        script(
            "worker-0",
            "if count == 1: wait_for('worker-1.up'); report(silent='worker-1'); wait_for('never')",
            is_coordinator=True,
        ),
        script("worker-1", "if count == 1: mark('worker-1.up'); signal.pause()"),
        timeouts=replace(QUICK, peers=0.5),
    )
    assert "worker-1 was killed by SIGKILL by the launcher: it did not answer worker-0 any more" in caplog.text
    assert "restart 1, at most 3" in caplog.text


def test_a_frozen_evaluator_is_killed_and_restarted_alone() -> None:
    supervise(
        script(
            "worker-0", "wait_for('evaluator.up'); report(silent='evaluator'); wait_for('again')", is_coordinator=True
        ),
        script("evaluator", "if count == 1: mark('evaluator.up'); signal.pause()\nmark('again')",
               is_awaited=True, restarts_alone=True),
    )  # fmt: skip
    assert (len(starts("worker-0")), len(starts("evaluator"))) == (1, 2)


def test_sigterm_before_a_process_can_handle_it_stops_all_too() -> None:
    with pytest.raises(Stopped) as caught:
        supervise(
            script("worker-0", WAITS, is_coordinator=True),
            script("worker-1", "wait_for('worker-0.up'); die(signal.SIGTERM)"),
        )
    assert caught.value.signal == signal.SIGTERM
    assert len(starts("worker-1")) == 1


def test_a_log_tells_what_the_processes_do_when_that_changes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {"worker-0, worker-1: joining": "told", "worker-0: training (step 60); worker-1: joining": "seen"}
    handler = logging.Handler()
    handler.emit = lambda record: [Path(mark).touch() for text, mark in expected.items() if text in record.getMessage()]  # type: ignore[method-assign, assignment, return-value]
    monkeypatch.setattr(logging.getLogger("modelyard"), "handlers", [handler])
    supervise(
        script(
            "worker-0",
            "report(doing='joining'); wait_for('told'); report(doing='training', step=30, total=600)\n"
            "report(doing='training', step=60, total=600); wait_for('seen')",
            is_coordinator=True,
        ),
        script("worker-1", "report(doing='joining'); wait_for('seen')"),
        timeouts=replace(QUICK, changes=0.0),
    )
    assert re.search(r"step 60 of 600 \(10%\)", caplog.text)
    assert caplog.text.count("worker-1: joining") < 5  # changes only


def test_progress_resets_the_count() -> None:
    code = "(here / 'step').write_text(str(100 * count)) if count in (2, 4) else None; sys.exit(7 if count < 6 else 0)"
    supervise(script("worker-0", code, is_coordinator=True), max_restarts=2)
    assert len(starts("worker-0")) == 6


def test_a_user_error_stops_the_others_and_is_not_restarted() -> None:
    with pytest.raises(LaunchError, match="no such option") as caught:
        supervise(
            script("worker-0", WAITS, is_coordinator=True),
            script("worker-1", "wait_for('worker-0.up'); print('no such option', flush=True); sys.exit(2)"),
        )
    assert caught.value.status == 2
    assert len(starts("worker-0")) == len(starts("worker-1")) == 1


def test_a_user_error_after_a_lost_peer_is_still_a_user_error() -> None:
    with pytest.raises(LaunchError, match="worker-1 exited with status 2"):
        supervise(
            script("worker-0", "mark('lost'); sys.exit(75)", is_coordinator=True),
            script("worker-1", "wait_for('lost'); time.sleep(0.2); sys.exit(2)"),
        )
    assert len(starts("worker-0")) == 1


def test_processes_that_do_not_exit_after_a_crash_are_killed(caplog: pytest.LogCaptureFixture) -> None:
    supervise(
        script("worker-0", "if count == 1: wait_for('worker-1.up'); die()", is_coordinator=True),
        script(
            "worker-1",
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('worker-1.up')\nif count == 1: time.sleep(600)",
        ),
        timeouts=replace(QUICK, peers=0.3),
    )
    assert "worker-1 did not exit within 0.3 s; killed" in caplog.text
    assert len(starts("worker-1")) == 2


def test_with_parameter_servers_a_worker_is_restarted_alone() -> None:
    supervise(
        script("chief", "wait_for('back')", is_coordinator=True),
        script("worker-0", "mark('back') if count == 3 else die()", restarts_alone=True),
        script("ps-0", "wait_for('back')"),
    )
    assert [len(starts(name)) for name in ("chief", "worker-0", "ps-0")] == [1, 3, 1]


def test_with_parameter_servers_a_lost_server_restarts_all() -> None:
    supervise(
        script("chief", "if count == 1: wait_for('lost'); sys.exit(75)", is_coordinator=True),
        script("worker-0", "if count == 1: wait_for('lost'); sys.exit(75)", restarts_alone=True),
        script("ps-0", "if count == 1: mark('lost'); die()"),
    )
    assert [len(starts(name)) for name in ("chief", "worker-0", "ps-0")] == [2, 2, 2]


def test_a_worker_that_keeps_failing_ends_the_run_with_its_status() -> None:
    with pytest.raises(LaunchError, match="worker-0 exited with status 9") as caught:
        supervise(
            script("chief", WAITS, is_coordinator=True),
            script("worker-0", "wait_for('chief.up'); sys.exit(9)", restarts_alone=True),
            max_restarts=2,
        )
    assert caught.value.status == 9
    assert (len(starts("worker-0")), len(starts("chief"))) == (3, 1)


def test_the_failure_of_a_process_that_waits_for_its_restart_is_the_first() -> None:
    with pytest.raises(LaunchError, match="worker-0 was killed by SIGUSR1"):
        supervise(
            script("chief", "wait_for('lost'); time.sleep(0.2); sys.exit(75)", is_coordinator=True),
            script("worker-0", "mark('lost'); die(signal.SIGUSR1)", restarts_alone=True),
            max_restarts=1,
            timeouts=replace(QUICK, first_pause=30.0, longest_pause=0.5),
        )


def test_an_evaluator_is_restarted_alone_and_awaited() -> None:
    supervise(
        script("worker-0", "mark('end')", is_coordinator=True),
        script("evaluator", "wait_for('end'); time.sleep(0.1)\nif count < 3: die()\nmark('evaluated')",
               is_awaited=True, restarts_alone=True),
    )  # fmt: skip
    assert Path("evaluated").exists()
    assert (len(starts("worker-0")), len(starts("evaluator"))) == (1, 3)


def test_an_evaluator_that_keeps_failing_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    wait = "while len((here / 'evaluator.starts').read_text().split()) < 2: time.sleep(0.01)\n"
    with pytest.raises(LaunchError, match="evaluator exited with status 5") as caught:
        supervise(
            script(
                "worker-0",
                "wait_for('evaluator.starts')\n" + wait + "time.sleep(0.3); mark('trained')",
                is_coordinator=True,
            ),
            script("evaluator", "sys.exit(5)", is_awaited=True, restarts_alone=True),
            max_restarts=1,
        )
    assert caught.value.status == 5
    assert Path("trained").exists()


def test_leftovers_are_stopped_when_the_work_is_done(caplog: pytest.LogCaptureFixture) -> None:
    supervise(
        script("worker-0", "wait_for('worker-1.up', 'worker-2.up')", is_coordinator=True),
        script("worker-1", WAITS),
        script("worker-2", "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('worker-2.up'); time.sleep(600)"),
        timeouts=replace(QUICK, finish=0.3),
    )
    assert "worker-1 has not exited with the others" in caplog.text


def test_a_signal_goes_to_the_coordinator_only_which_stops_the_others() -> None:
    when("worker-0.up", "worker-1.up")
    with pytest.raises(Stopped) as caught:
        supervise(
            script("worker-0", "def save(*_): mark('saved'); leave(0, 0)\n" + WAITS.replace("leave", "save"),
                   is_coordinator=True),
            script("worker-1", "signal.signal(signal.SIGTERM, lambda *_: mark('signalled')); mark('worker-1.up')\n"
                   "wait_for('saved'); sys.exit(143)"),
        )  # fmt: skip
    assert caught.value.signal == signal.SIGTERM
    assert Path("saved").exists()
    assert not Path("signalled").exists()


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_does_not_reach_the_processes_and_stops_them_as_sigterm_does() -> None:
    when("worker-0.up", number=signal.SIGINT)
    with pytest.raises(Stopped) as caught:
        supervise(script("worker-0", WAITS, is_coordinator=True))
    assert caught.value.signal == signal.SIGINT


@pytest.mark.usefixtures("ctrl_c")
def test_a_process_reacts_to_signals_that_its_launcher_ignores() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        supervise(
            script(
                "worker-0",
                "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
                "usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
                "if usual and not blocked: mark('reacts')",
                is_coordinator=True,
            )
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    assert Path("reacts").exists()


def test_others_are_signalled_too_and_killed_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    when("worker-0.up", "worker-1.up", "worker-2.up")
    with pytest.raises(Stopped):
        supervise(
            script("worker-0", WAITS, is_coordinator=True),
            script(
                "worker-1",
                "def signalled(*_): mark('signalled'); sys.exit(143)\n" + WAITS.replace("leave", "signalled"),
            ),
            script("worker-2", "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('worker-2.up'); time.sleep(600)"),
            timeouts=replace(QUICK, coordinator=0.2, stop=0.5),
        )
    assert Path("signalled").exists()
    assert "worker-2 killed: too slow" in caplog.text


def test_a_second_signal_kills(caplog: pytest.LogCaptureFixture) -> None:
    when("worker-0.up")
    when("worker-0.up", delay=0.3)
    with pytest.raises(Stopped):
        supervise(
            script(
                "worker-0",
                "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark('worker-0.up'); time.sleep(600)",
                is_coordinator=True,
            )
        )
    assert "worker-0 killed: signalled again" in caplog.text


def test_a_process_that_was_signalled_stops_all_without_a_restart() -> None:
    with pytest.raises(Stopped):
        supervise(
            script(
                "worker-0",
                "def save(*_): mark('saved'); leave(0, 0)\n" + WAITS.replace("leave", "save"),
                is_coordinator=True,
            ),
            script("worker-1", "wait_for('worker-0.up'); sys.exit(143)"),
        )
    assert Path("saved").exists()
    assert len(starts("worker-0")) == 1


def test_a_signal_in_the_pause_before_a_restart_ends_it() -> None:
    when("worker-0.starts", delay=0.5)
    with pytest.raises(Stopped):
        supervise(
            script("worker-0", "sys.exit(1)", is_coordinator=True),
            timeouts=replace(QUICK, first_pause=30.0, longest_pause=30.0),
        )
    assert len(starts("worker-0")) == 1


def test_children_of_a_process_are_killed_with_it() -> None:
    code = """
import subprocess
other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
with open(here / "orphan.starts", "w") as file:
    file.write(str(other.pid))
"""
    supervise(script("worker-0", code, is_coordinator=True))
    (orphan,) = starts("orphan")
    wait_until(lambda: not is_running(orphan))  # init reaps it
