"""Jobs on a real SLURM with two nodes on this machine: requeued, at the time limit, killed, cancelled, failed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, install, slurm_cluster

from conftest import COMMAND, TESTS, environment
from waiting import PATIENCE

pytestmark = pytest.mark.slow

STEPS = 12_000
OPTIONS = (
    "train-and-evaluate --model mlp --hidden_units 16 --dataset digits --deterministic --threads 1 "
    f"--train_batch_size 32 --train_steps {STEPS} --eval_every 1000 --save_every 100 --keep_best 2"
).split()
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    reason = install()
    if reason:
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as cluster:
        paths = [str(TESTS.parent / "src"), str(TESTS)]
        cluster.environment |= environment(
            PYTHONPATH=os.pathsep.join(paths), SLURM_CONF=cluster.environment["SLURM_CONF"]
        )
        yield cluster


@pytest.fixture
def slurm_with_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A node for each role, with two GPUs that only SLURM believes in."""
    reason = install()
    if reason:
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=4, gpus=2) as cluster:
        cluster.environment |= environment(
            PYTHONPATH=str(TESTS.parent / "src"), SLURM_CONF=cluster.environment["SLURM_CONF"]
        )
        yield cluster


STANDS_IN = """
import json, os, signal, sys, time
from pathlib import Path
from modelyard.cluster.environment import find_cluster

found = find_cluster()
run = Path(os.environ["RUN"])
start = os.environ.get("SLURM_RESTART_COUNT", "0")
facts = {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "node": os.environ["SLURMD_NODENAME"]}
facts["addresses"] = found.addresses
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
(run / f"{found.me.file_name}.{start}.partial").write_text(json.dumps(facts))
(run / f"{found.me.file_name}.{start}.partial").rename(run / f"{found.me.file_name}.{start}.json")
while start == "0":
    time.sleep(0.1)
"""


def test_gpus_are_dealt_by_role_and_such_a_job_is_requeued_as_a_whole(
    slurm_with_gpus: SlurmCluster, tmp_path: Path
) -> None:
    slurm, folder = slurm_with_gpus, tmp_path / "facts"
    folder.mkdir()
    slurm.environment["RUN"] = str(folder)
    (tmp_path / "stand_in.py").write_text(STANDS_IN)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/stand_in.py\n")
    python.chmod(0o755)
    (tmp_path / "resources.yaml").write_text(f"gpus: 1\npython: {python}\n")
    shape = ["--ps", "1", "--evaluator", "--resources", str(tmp_path / "resources.yaml")]
    job = submit(slurm, tmp_path / "jobs" / "run", *shape, options=["train"])
    names = ("chief", "worker-0", "worker-1", "ps-0", "evaluator")

    def reports(start: int) -> dict[str, dict[str, object]]:
        paths = {name: folder / f"{name}.{start}.json" for name in names}

        def are_there() -> bool:
            nonlocal hurried
            if start and time.monotonic() - hurried > 5:  # SLURM would wait two minutes, and then for other jobs
                slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
                hurried = time.monotonic()
            return all(path.exists() for path in paths.values())

        hurried = time.monotonic()
        slurm.wait(f"start {start}", are_there, 120)
        return {name: json.loads(path.read_text()) for name, path in paths.items()}

    found = reports(0)
    assert {name: facts["gpus"] for name, facts in found.items()} == {
        "chief": "-1",
        "worker-0": "0",
        "worker-1": "1",
        "ps-0": "-1",
        "evaluator": "0",
    }
    for name, facts in found.items():
        role, _, index = name.partition("-")
        addresses = facts["addresses"]
        assert isinstance(addresses, dict)
        assert addresses[role][int(index or 0)].startswith(f"{facts['node']}:")
    slurm.ask("scancel", "--batch", "--signal=USR1", job)  # as SLURM does shortly before the time limit
    assert reports(1).keys() == found.keys()
    assert slurm.wait_for_job(job, ENDED, 300) == "COMPLETED"


def submit(slurm: SlurmCluster, folder: Path, *words: str, options: list[str] = OPTIONS) -> str:
    """Submits a run of two workers; the number of its job."""
    folder.parent.mkdir(exist_ok=True, parents=True)
    command = [*COMMAND, "submit", "slurm", "--json", "--workers", "2", *words, "--", *options]
    done = subprocess.run(
        [*command, "--model_dir", str(folder)],
        cwd=folder.parent,
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["submitted"] is True
    return str(answer["answer"].split()[-1])


def log_of(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.parent.glob("*.log"))


def newest_step(folder: Path) -> int:
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=-1)


def end(slurm: SlurmCluster, job: str, folder: Path) -> str:
    state = slurm.wait_for_job(job, ENDED, 300)
    print(state, *(line for line in log_of(folder).splitlines() if "examples/s" not in line), sep="\n")
    return state


def final_state(folder: Path) -> dict[str, bytes]:
    last = folder / "checkpoints" / f"step-{STEPS:08d}"
    return {name: (last / name).read_bytes() for name in ("weights.safetensors", "optimizer.safetensors")}


def rows(folder: Path) -> list[dict[str, object]]:
    kept = ("step", "epoch", "split", "loss", "accuracy", "learning_rate")
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in kept if key in row} for row in found]


@pytest.fixture(scope="module")
def undisturbed(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert end(slurm, submit(slurm, folder), folder) == "COMPLETED"  # on one node
    return folder


def test_a_job_that_is_requeued_warned_and_killed_ends_with_the_same_weights(
    slurm: SlurmCluster, undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    resources = tmp_path / "cluster.yaml"
    resources.write_text("nodes: 2\ntasks_per_node: 1\n")
    job = submit(slurm, folder, "--resources", str(resources))

    def reach(step: int) -> None:
        slurm.wait(f"step {step}", lambda: newest_step(folder) >= step or _ended(slurm, job), 200)
        assert newest_step(folder) < STEPS, log_of(folder)

    reach(1000)
    slurm.ask("scontrol", "requeue", job)
    slurm.wait_for_restart(job, 1)
    reach(2500)
    slurm.ask("scancel", "--batch", "--signal=USR1", job)  # as SLURM does shortly before the time limit
    slurm.wait_for_restart(job, 2)
    reach(4000)
    os.kill(_process(folder, "worker 1"), signal.SIGKILL)
    assert end(slurm, job, folder) == "COMPLETED"
    log = log_of(folder)
    assert "worker 1 (127.0.0.2:" in log
    assert log.count("the time limit is reached and the run is saved: requeueing") == 1
    assert re.search(r"task 1 on .* was killed by SIGKILL from outside", log)
    assert "a task was killed from outside: restart in 2 s" in log
    assert log.count("stopped at step") >= 2  # whichever process the signal reached first
    assert final_state(folder) == final_state(undisturbed)
    assert rows(folder) == rows(undisturbed)


def test_a_job_at_its_time_limit_is_requeued_and_resumes(
    slurm: SlurmCluster, undisturbed: Path, tmp_path: Path
) -> None:
    """SLURM checks time limits every half a minute: 10 to 40 s after the start of this job."""
    folder = tmp_path / "run"
    resources = tmp_path / "cluster.yaml"
    resources.write_text("time: 1m\ngrace_secs: 20\nnodes: 2\n")
    job = submit(slurm, folder, "--resources", str(resources))
    slurm.wait("the end of its time", lambda: slurm.job(job)["Restarts"] == "1" or _ended(slurm, job), 200)
    if slurm.job(job)["JobState"] == "COMPLETED":
        pytest.skip("this machine finished before the time limit")
    slurm.wait_for_restart(job, 1)
    slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    assert end(slurm, job, folder) == "COMPLETED"
    assert "the time limit is reached and the run is saved: requeueing" in log_of(folder)
    assert final_state(folder) == final_state(undisturbed)


def test_a_frozen_process_is_killed_and_the_job_goes_on(slurm: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = submit(slurm, folder, options=[*OPTIONS, "--peer_timeout_secs", "8"])
    slurm.wait("some steps", lambda: newest_step(folder) >= 300, 200)
    os.kill(_process(folder, "worker 1"), signal.SIGSTOP)
    assert end(slurm, job, folder) == "COMPLETED"
    assert "has been silent for 8 s" in log_of(folder)
    assert "status 137: restart 1 of 10" in log_of(folder)


def test_a_cancelled_job_saves_and_is_not_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = submit(slurm, folder)
    slurm.wait("some steps", lambda: newest_step(folder) >= 300, 200)
    slurm.ask("scancel", job)
    assert end(slurm, job, folder) == "CANCELLED"
    assert slurm.job(job)["Restarts"] == "0"
    stopped = re.search(r"stopped at step (\d+)", log_of(folder))
    assert stopped is not None
    assert newest_step(folder) == int(stopped[1]) < STEPS


def test_the_last_task_evaluates_if_there_is_an_evaluator(slurm: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    few = [word if word != str(STEPS) else "1000" for word in OPTIONS]
    job = submit(slurm, folder, "--evaluator", options=few)
    assert end(slurm, job, folder) == "COMPLETED"
    assert "evaluator" in {path.stem for path in (folder / "runlogs").iterdir()}
    assert len(list((folder / "best").iterdir())) > 0


def test_a_user_error_fails_the_job_at_once(slurm: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = submit(slurm, folder, options=["train", "--dataset", "nowhere.csv"])
    assert end(slurm, job, folder) == "FAILED"
    assert slurm.job(job)["ExitCode"] == "2:0"
    assert "restart 1" not in log_of(folder)
    assert "nowhere.csv" in log_of(folder)


@pytest.mark.parametrize("layout", ["block", "cyclic"])
def test_all_tasks_see_the_same_cluster(slurm: SlurmCluster, layout: str) -> None:
    code = "from modelyard.cluster.environment import find_cluster; found = find_cluster(); "
    code += "print(found.me.file_name, found.addresses, found.source, sep='|')"
    counts = ["--export=ALL,MODELYARD_PS=1,MODELYARD_EVALUATOR=1", "-N2", "--ntasks-per-node=3", "-n6"]
    words = ["srun", *counts, f"--distribution={layout}", sys.executable, "-c", code]
    done = subprocess.run(words, env=slurm.environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert {me for me, _, _ in lines} == {"chief", "worker-0", "worker-1", "worker-2", "ps-0", "evaluator"}
    assert len({addresses for _, addresses, _ in lines}) == 1
    assert {source for _, _, source in lines} == {"SLURM"}


def _ended(slurm: SlurmCluster, job: str) -> bool:
    return slurm.job(job)["JobState"] in ENDED


def _process(folder: Path, member: str) -> int:
    """The process that trains as a member: only it has this run folder and this number in its environment."""
    rank = member.rsplit(" ", 1)[1]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            values = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if (
            str(folder).encode() in words
            and words[0] == sys.executable.encode()
            and f"SLURM_PROCID={rank}".encode() in values
        ):
            return int(process.name)
    raise AssertionError(f"no process of {member}")
