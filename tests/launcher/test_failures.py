"""What a process tells its launcher, how failures are told apart, and what is shown of a run."""

from __future__ import annotations

import io
import os
import queue
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from conftest import environment
from modelyard.launcher.failures import memory_kills
from modelyard.launcher.processes import Process, ProcessSpec
from modelyard.launcher.progress import Progress
from modelyard.system.activity import PIPE, Activity, read_reports
from waiting import PATIENCE

REPORTS = """
import os, subprocess, sys
from modelyard.system.activity import report, report_silent
pipe = int(os.environ["MODELYARD_ACTIVITY"])
report("training", 120, 140, 500)
report_silent("worker-1")
assert "MODELYARD_ACTIVITY" not in os.environ
child = f"import os; os.fstat({pipe})"
assert subprocess.run([sys.executable, "-S", "-c", child], stderr=subprocess.DEVNULL).returncode == 1
"""


def test_a_process_tells_its_launcher_what_it_does_and_who_is_silent() -> None:
    process = Process(ProcessSpec("worker-0", (sys.executable, "-c", REPORTS)), Path("logs"), lambda _: None)
    assert process.reap() == 0, process.log.read_text()
    process.read_log()
    assert process.activity == Activity("training", 120, 140, 500)
    assert process.silent == ["worker-1"]


def test_the_end_of_a_process_is_noticed_without_waitid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "waitid", raising=False)  # as on macOS before Python 3.13
    ended: queue.Queue[Process] = queue.Queue()
    process = Process(
        ProcessSpec("worker-0", (sys.executable, "-S", "-c", "import sys; sys.exit(3)")), Path("logs"), ended.put
    )
    assert ended.get(timeout=PATIENCE) is process
    assert process.reap() == 3


@pytest.mark.parametrize("number", ["", "x", "999", "1"])  # 1 is open, and not a pipe of a launcher
def test_without_a_launcher_nothing_is_written(number: str) -> None:
    code = "from modelyard.system.activity import report; report('training', 5)"
    with open("out", "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(**{PIPE: number}), stdout=out, stderr=subprocess.PIPE,
            check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert Path("out").read_bytes() == b""


def test_a_launcher_that_does_not_read_does_not_block_a_process() -> None:
    ends = os.pipe()
    code = "from modelyard.system.activity import report\nfor step in range(5000): report('training', step)"
    variables = environment(**{PIPE: str(ends[1])})
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, pass_fds=[ends[1]], check=False, timeout=PATIENCE
    )
    for end in ends:
        os.close(end)
    assert done.returncode == 0


def test_anything_else_in_the_pipe_is_ignored() -> None:
    lines = [
        b"",
        b"\xff",
        b"[]",
        b"5",
        b"{}",
        b'{"doing": "x", "step": "y"}',
        b'{"doing": "training", "step": 3}',
        b"{",
    ]
    assert read_reports(lines) == (Activity("training", 3), [])


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "groups/a/memory.events": "low 0\noom 4\noom_kill 3\n"}, 3),
        ({"proc/self/cgroup": "0::/\n", "groups/memory.events": "oom_kill 2\n", "proc/vmstat": "oom_kill 9\n"}, 2),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/x\n0::/\n",
                "groups/memory/x/memory.oom_control": "under_oom 0\noom_kill 5\n",
            },
            5,
        ),
        ({"proc/self/cgroup": "0::/../..\n", "proc/vmstat": "pgfault 7\noom_kill 8\n"}, 8),
        ({"proc/vmstat": "pgfault 7\n"}, None),
        ({}, None),
    ],
)
def test_the_kernel_tells_how_many_processes_it_has_killed_for_lack_of_memory(
    files: dict[str, str], count: int | None
) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    assert memory_kills(Path("proc"), Path("groups")) == count


def test_speed_and_time_left_are_those_of_training() -> None:
    process = Process(ProcessSpec("chief", (sys.executable, "-S", "-c", ""), is_coordinator=True), Path("logs"), print)
    process.reap()
    now = 1000.0
    progress = Progress(0, lambda: now)
    told = []
    for seconds, activity in [
        (0, Activity("joining")),
        (100, Activity("compiling", 400, None, 10_000)),
        (200, Activity("training", 1_000, 1_100, 10_000)),
        (10, Activity("training", 2_000, 2_100, 10_000)),
        (10, Activity("evaluating", 2_000, None, 10_000)),
        (0, Activity("training", 400, None, 10_000)),  # restarted
        (4, Activity("training", 410, None, 10_000)),
    ]:
        now += seconds
        process.activity = activity
        progress.update([process], {})
        told.append(progress.summary())
    assert told == [
        "",
        "step 400 of 10,000 (4%)",
        "step 1,000 of 10,000 (10%)",
        "step 2,000 of 10,000 (20%), 100 steps/s, 80 s left",
        "step 2,000 of 10,000 (20%), 50 steps/s, 3 min left",
        "step 400 of 10,000 (4%)",
        "step 410 of 10,000 (4%), 2.5 steps/s, 1 h 4 min left",
    ]


def test_the_table_says_who_has_reported_nothing_for_long() -> None:
    process = Process(
        ProcessSpec("worker-1", (sys.executable, "-S", "-c", "import time; time.sleep(600)")), Path("logs"), print
    )
    now = 0.0
    progress, console = Progress(0, lambda: now), Console(file=io.StringIO(), width=100)
    try:
        for seconds, activity in [(0, Activity("compiling")), (100, Activity("training", 5)), (9, None), (14, None)]:
            now += seconds
            process.activity = activity or process.activity
            progress.update([process], {})
            console.print(progress.table())
    finally:
        process.kill("the test is over")
        process.reap()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("compiling ") == 1
    assert shown.count("training (step 5) ") == 2
    assert shown.count("training (step 5), no news for 23 s") == 1
