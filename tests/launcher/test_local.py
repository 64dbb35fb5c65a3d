"""The commands `launch` and `stop`, with a small script instead of training."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import modelyard
from conftest import COMMAND, environment
from modelyard.errors import UserError
from modelyard.launcher.processes import Process, ProcessSpec
from modelyard.launcher.progress import Progress
from waiting import PATIENCE, wait_until

PROGRAM = """
import os, sys
if sys.argv[1] == "launch":
    import modelyard
    modelyard.main()
import json, pathlib, signal, time
from modelyard.system.process import log_to

run = pathlib.Path(sys.argv[sys.argv.index("--model_dir") + 1])
config = json.loads(os.environ["TF_CONFIG"])
name = config["task"]["type"] + "-" + str(config["task"]["index"])

def leave(*_):
    (run / "stop").touch()
    sys.exit(143)

signal.signal(signal.SIGTERM, leave)
with log_to(run / "runlogs", name):
    facts = {"pid": os.getpid(), "tf_config": config, "cores": sorted(os.sched_getaffinity(0)), "words": sys.argv[1:]}
    (run / f"{name}.json").write_text(json.dumps(facts))
    print(f"{name} is up", file=sys.stderr)
    print(f"the result of {name}")
    while "--forever" in os.environ.get("HOW", "") and not (run / "stop").exists():
        time.sleep(0.01)
    if (run / "stop").exists():
        sys.exit(143)
"""
TRAIN = ("--", "train", "--model", "mlp")


@pytest.fixture(autouse=True)
def _program() -> None:
    Path("program.py").write_text(PROGRAM)


@pytest.fixture
def launched() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the program as a launcher; it is killed when the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, how: str = "--forever") -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            [sys.executable, "program.py", "launch", *words], text=True, env=environment(HOW=how), **pipes
        )  # type: ignore[call-overload]
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
    for path in Path("run").glob("*.json"):  # if they still run, the test has failed; they must not stay
        pid = json.loads(path.read_text())["pid"]
        with contextlib.suppress(OSError):
            if b"program.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    for process in started:
        process.communicate()


def facts(*names: str) -> list[dict[str, Any]]:
    """Waits for the files of these processes and reads them."""
    paths = [Path("run") / f"{name}.json" for name in names]
    wait_until(lambda: all(path.exists() and path.read_text().endswith("}") for path in paths))
    return [json.loads(path.read_text()) for path in paths]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def stop(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [*COMMAND, "stop", *words], capture_output=True, text=True, env=environment(), timeout=PATIENCE, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def test_every_process_gets_the_command_a_role_and_its_cores(launched: Callable[..., subprocess.Popen[str]]) -> None:
    process = launched("--workers", "2", "--ps", "1", "--model-dir", "run", *TRAIN, how="")
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert out == "the result of chief-0\n"
    lines = errors.splitlines()
    for name, member in (("chief", "chief-0"), ("worker-0", "worker-0"), ("worker-1", "worker-1"), ("ps-0", "ps-0")):
        assert f"{name:<8} | {member} is up" in lines
        assert f"{member} is up" in Path(f"run/runlogs/{name}.log").read_text()
    chief, *workers, server = facts("chief-0", "worker-0", "worker-1", "ps-0")
    assert {role: len(hosts) for role, hosts in chief["tf_config"]["cluster"].items()} == {
        "chief": 1,
        "worker": 2,
        "ps": 1,
    }
    assert chief["tf_config"]["cluster"] == server["tf_config"]["cluster"]
    assert chief["words"] == ["train", "--model_dir", "run", "--model", "mlp"] == workers[0]["words"]
    everyone = sorted(os.sched_getaffinity(0))
    assert chief["cores"] == server["cores"] == everyone
    if len(everyone) > 1:
        assert sorted(workers[0]["cores"] + workers[1]["cores"]) == everyone
    assert list(Path("run/runlogs").glob("*.pid")) == []


def test_processes_can_be_left_unbound(launched: Callable[..., subprocess.Popen[str]]) -> None:
    process = launched("--workers", "2", "--no-pin", "--model_dir", "run", *TRAIN, how="")
    process.communicate(timeout=PATIENCE)
    assert [each["cores"] for each in facts("worker-0", "worker-1")] == [sorted(os.sched_getaffinity(0))] * 2


def test_without_a_run_folder_all_share_a_new_one(launched: Callable[..., subprocess.Popen[str]]) -> None:
    process = launched("--workers", "2", *TRAIN, how="")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-mlp-digits")
    assert {path.name for path in folder.glob("*.json")} == {"worker-0.json", "worker-1.json"}


def test_stop_stops_the_launcher_which_prints_how_to_resume(launched: Callable[..., subprocess.Popen[str]]) -> None:
    process = launched("--workers", "2", "--model_dir", "run", *TRAIN)
    facts("worker-0", "worker-1")
    output = stop("run")
    assert f"launch (process {process.pid}) stopped" in output
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert "launch --workers 2 --model_dir run -- train --model mlp" in errors
    assert "Traceback" not in errors
    assert "nothing is running in run" in stop("run")


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_with_130(launched: Callable[..., subprocess.Popen[str]]) -> None:
    process = launched("--model_dir", "run", *TRAIN)
    facts("worker-0")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "stopped; no step was trained" in errors


def test_a_killed_launcher_leaves_no_process_behind(launched: Callable[..., subprocess.Popen[str]]) -> None:
    process = launched("--workers", "2", "--evaluator", "--model_dir", "run", *TRAIN)
    pids = [each["pid"] for each in facts("worker-0", "worker-1", "evaluator-0")]
    assert all(map(is_running, pids))
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_running, pids)))
    assert "nothing is running" in stop("run")
    process = launched("--workers", "2", "--model_dir", "run", *TRAIN, how="")
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_force_kills_launcher_and_processes(launched: Callable[..., subprocess.Popen[str]]) -> None:
    process = launched("--workers", "2", "--model_dir", "run", *TRAIN)
    pids = [each["pid"] for each in facts("worker-0", "worker-1")]
    assert "killed" in stop("run", "--force")
    assert process.wait(timeout=PATIENCE) == -signal.SIGKILL
    wait_until(lambda: not any(map(is_running, pids)))


def test_two_launchers_can_not_share_a_run(launched: Callable[..., subprocess.Popen[str]]) -> None:
    first = launched("--model_dir", "run", *TRAIN)
    facts("worker-0")
    second = launched("--model_dir", "run", *TRAIN)
    _, errors = second.communicate(timeout=PATIENCE)
    assert second.returncode == 2
    assert f"is running already: process {first.pid}" in errors
    assert first.poll() is None


def test_stop_without_a_launcher_signals_the_processes_and_reports_those_that_do_not_exit() -> None:
    Path("run/runlogs").mkdir(parents=True)
    waits = """
import signal, sys, time
from pathlib import Path
from modelyard.system.process import log_to
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with log_to(Path("run/runlogs"), sys.argv[1]):
    Path(f"{sys.argv[1]}.up").touch()
    time.sleep(60)
"""
    words = [sys.executable, "-c", waits]
    with (
        subprocess.Popen([*words, "worker-0"], env=environment()) as obedient,
        subprocess.Popen([*words, "worker-1", "ignores SIGTERM"], env=environment()) as stubborn,
    ):
        wait_until(lambda: Path("worker-0.up").exists() and Path("worker-1.up").exists())
        output = stop("run", "--timeout_secs", "0.5", code=1)
        assert obedient.wait(timeout=PATIENCE) == -signal.SIGTERM
        assert f"worker-1 (process {stubborn.pid}) did not exit within" in output
        assert "--force" in output
        assert "killed" in stop("run", "--force")
        assert stubborn.wait(timeout=PATIENCE) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--workers", "2", "--model_dir", "run", *TRAIN, "--learning_rat", "1"), "'learning_rate'"),
        (("--workers", "0", *TRAIN), "--workers must be 1 or more"),
        (("--ps", "2", *TRAIN), "need workers"),
        (("--workers", "2"), "no command to launch"),
        (("--workers", "2", "--", "evaluate", "run"), "'evaluate' can't be run by several processes"),
        (("--wokers", "2", *TRAIN), "No such option"),
        (("--workers", "2", "train", "--model", "mlp"), "launch --workers 2 -- train --model mlp"),
        (("--workers", "2", "--model", "mlp", *TRAIN[:2]), "--model is not an option of launch. Write it after --"),
        (("--workers", "2", "--", "--model", "mlp"), "the command is missing before --model"),
        ((*TRAIN, "--workers", "2"), "workers: is an option of launch. Write it before --."),
        (("--", "tran", "--model", "mlp"), "Did you mean 'train'?"),
        (("--workers", "2", *TRAIN, "--cluster", "none"), "every process would train alone"),
        (("--", "resume", "run"), "run does not exist"),
        (("--model_dir", "program.py", *TRAIN), "program.py is a file"),
    ],
)
def test_an_error_is_shown_once_before_anything_is_started(
    words: tuple[str, ...], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        modelyard.main(["launch", *words])
    assert caught.value.code == 2
    errors = capfd.readouterr().err
    assert text in errors
    assert "Traceback" not in errors
    assert not Path("run").exists()
    assert not Path("runs").exists()


def test_a_user_error_in_a_process_leaves_no_folder_behind() -> None:
    Path("empty.csv").write_text("path,label\n")  # only those who read it see that
    words = ["launch", "--model_dir", "run", "--", "train", "--dataset", "empty.csv"]
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, env=environment(), timeout=PATIENCE, check=False
    )
    assert done.returncode == 2
    assert done.stderr.rstrip().splitlines()[-1].startswith("  error:"), done.stderr
    assert "worker-0 exited with status 2" in done.stderr
    assert not Path("run").exists()


def test_the_library_raises_errors_that_say_what_to_do() -> None:
    for _ in range(2):  # the second time, the package of that name is loaded
        with pytest.raises(UserError, match="Give the run folder"):
            modelyard.launch(["train"], workers=2)
    with pytest.raises(UserError, match="does not exist"):
        modelyard.stop("nowhere")


def test_a_terminal_gets_a_table_of_the_processes() -> None:
    reports = 'os.write(int(os.environ[\'MODELYARD_ACTIVITY\']), b\'{"doing": "training", "step": 1200}\\n\')'
    code = f"import os, sys; {reports}; print('[bold] 1%', flush=True); sys.stdin.read()"
    spec = ProcessSpec("worker-0", (sys.executable, "-S", "-c", code), is_coordinator=True)
    process, progress, console = Process(spec, Path("logs"), lambda _: None), Progress(0), Console(file=io.StringIO())

    def show() -> str:
        process.read_log()
        progress.update([process], {})
        console.print(progress.table(), width=100)
        return console.file.getvalue()  # type: ignore[attr-defined]

    wait_until(lambda: re.search(rf"worker-0 │ +{process.pid} │ training \(step 1,200\) │", show()))
    process.reap()
    assert re.search(rf"worker-0 │ +{process.pid} │ done +│ \[bold\] 1%", show())
