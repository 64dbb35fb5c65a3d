"""Evaluators wherever they are: not in the cluster, at a URL, late, killed. Nothing is evaluated twice, or never."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster_processes import PARTS, ClusterOfProcesses, cluster, rows, saved_steps
from conftest import COMMAND, environment, on_engine
from modelyard import storage
from modelyard.cluster.description import Cluster, Member
from modelyard.config import load_config
from modelyard.distributed.evaluator import CheckpointEvaluator
from modelyard.errors import ConfigError, StorageError
from modelyard.loop.run import _evaluates_elsewhere
from modelyard.run.checkpoint import Checkpoint, write_checkpoint
from modelyard.run.directory import EVALUATION_LOCK, RunDirectory, remote_run_folder, write_config
from object_store import BUCKET, object_store
from waiting import PATIENCE, wait_until

WORDS = [
    "train-and-evaluate", *PARTS, *on_engine(), "--threads", "1", "--dataset", "digits", "--peer_timeout_secs", "60",
    "--model", "tiny_norm", "--train_steps", "120", "--save_every", "30 steps", "--test_at_end", "--deterministic",
    "--keep_checkpoints", "9", "--log_every", "1000",
]  # fmt: skip
STEPS = [0, 30, 60, 90, 120]


def has_evaluated(run: Path, count: int) -> bool:
    file = run / "evaluator" / "metrics.jsonl"
    return file.is_file() and file.read_bytes().count(b"\n") >= count


def is_taken(run: Path) -> bool:
    file = run / EVALUATION_LOCK
    return file.is_file() and file.read_text() != ""


def finish(processes: ClusterOfProcesses) -> None:
    assert set(processes.wait(PATIENCE).values()) == {0}, processes.said()


def check(run: Path) -> None:
    """All checkpoints were evaluated, each once, by the evaluator; the best was kept and tested."""
    assert rows(run, "validation") == []
    evaluated = rows(run / "evaluator", "validation")
    assert [row["step"] for row in evaluated] == saved_steps(run) == STEPS
    best = max(evaluated, key=lambda row: row["accuracy"])
    assert [path.name for path in (run / "best").iterdir()] == [f"step-{best['step']:08d}"]
    assert [row["step"] for row in rows(run / "evaluator", "test")] == [best["step"]]


def test_an_evaluator_that_the_cluster_does_not_list_evaluates_and_may_be_killed(tmp_path: Path) -> None:
    """The form of Estimator and of Kubeflow's operator. It needs no connection to the others."""
    run = tmp_path / "run"
    with cluster(tmp_path / "out", chief=1, worker=1) as all_of_them:
        all_of_them.start("evaluator", 0, *WORDS, "--model_dir", str(run))
        wait_until(lambda: is_taken(run), "the evaluator's lock", all_of_them.processes["evaluator-0"])
        all_of_them.start_all(*WORDS, "--model_dir", str(run))
        wait_until(lambda: has_evaluated(run, 1), "an evaluation", all_of_them.processes["evaluator-0"])
        all_of_them.processes["evaluator-0"].send_signal(signal.SIGKILL)
        all_of_them.processes["evaluator-0"].wait(PATIENCE)
        all_of_them.start("evaluator", 0, *WORDS, "--model_dir", str(run))
        finish(all_of_them)
    check(run)


def test_an_evaluator_that_comes_after_the_chief_leaves_the_evaluation_to_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*WORDS, "--eval_every", "30 steps", "--model_dir", str(run)]
    with cluster(tmp_path / "out", chief=1) as both:  # for itself, it is a run of one process
        both.start("chief", 0, *words)
        wait_until(lambda: is_taken(run), "the chief's lock", both.processes["chief-0"])
        both.processes["chief-0"].send_signal(signal.SIGSTOP)
        both.start("evaluator", 0, *words)
        waits = "evaluates this run. This evaluator waits"
        wait_until(lambda: waits in both.output("evaluator-0").read_text(), waits, both.processes["evaluator-0"])
        both.processes["chief-0"].send_signal(signal.SIGCONT)
        finish(both)
    by_chief, by_evaluator = rows(run, "validation"), rows(run / "evaluator", "validation")
    steps = [row["step"] for row in [*by_evaluator, *by_chief]]
    assert sorted(steps) == STEPS  # the chief does not evaluate the model of step 0
    assert len(rows(run, "test")) + len(rows(run / "evaluator", "test")) == 1


def test_a_chief_whose_hooks_need_evaluations_says_so_if_an_evaluator_has_them(tmp_path: Path) -> None:
    config, evaluator, chief = load_config(hooks="+stop_at(value=0.9)"), RunDirectory(tmp_path), RunDirectory(tmp_path)
    assert evaluator.take_evaluation()
    for evaluates in (True, False):  # `train` evaluates nothing
        if evaluates:
            with pytest.raises(ConfigError, match="stop_at must see evaluations in the process that trains"):
                _evaluates_elsewhere(config, evaluates, Cluster(), chief)
        else:
            assert not _evaluates_elsewhere(config, evaluates, Cluster(), chief)
    evaluator.unlock()
    assert not _evaluates_elsewhere(config, True, Cluster(), chief)


def test_storage_that_fails_for_a_while_does_not_end_an_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setattr("modelyard.distributed.evaluator._POLL_SECONDS", 0)
    monkeypatch.setattr("modelyard.run.mirror._REFRESH_SECONDS", 0)
    url = "memory://failing/run"
    options = {"model": "mlp", "dataset": "digits", "train_steps": 20, "model_dir": url}
    config = load_config(**options, cache_dir=str(tmp_path / "cache"))
    outside = Cluster(Member("evaluator", 0), {"chief": ("127.0.0.1:1",)}, "TF_CONFIG")
    chief = remote_run_folder(url, tmp_path / "chief")
    chief.create()
    with chief:
        for step in (10, 20):
            write_checkpoint(chief.checkpoints, Checkpoint(step, {"w": np.ones(2)}, {}, {}))
        write_config(chief, config)
        chief.push()
        evaluator = CheckpointEvaluator(config, outside, None)
        with evaluator.joined():
            found = evaluator._checkpoints()
            for name in ("names_below", "download"):  # while it looks for checkpoints, and while it reads one
                with monkeypatch.context() as patch:
                    patch.setattr(storage, name, unreachable)
                    assert [next(found) for _ in range(3)] == [None] * 3
                evaluated = next(checkpoint for checkpoint in found if checkpoint is not None)
                assert evaluated.step == (10 if name == "names_below" else 20)
                metrics = evaluator.directory.of_evaluator().metrics
                with open(metrics, "a") as file:
                    file.write(json.dumps({"step": evaluated.step, "split": "validation"}) + "\n")
            assert list(found) == []
    assert caplog.text.count("can't be reached. The evaluator tries again until it can.") == 2
    assert [row["step"] for row in remote_rows(f"{url}/evaluator/metrics.jsonl")] == [10, 20]


def unreachable(*_: Any, **__: Any) -> None:
    raise StorageError("the storage can't be reached.")


@pytest.mark.slow
def test_a_launched_evaluator_at_a_url_is_killed_and_ends_as_at_a_path(tmp_path: Path) -> None:
    """Chief, worker and evaluator for real; the store is moto's S3."""
    here = tmp_path / "run"
    layout = ["launch", "--workers", "2", "--evaluator", "--model_dir"]
    with object_store():
        there, cache = f"s3://{BUCKET}/runs/one", tmp_path / "cache"
        env = environment(MODELYARD_CACHE=str(cache))
        started = [
            subprocess.Popen(
                [*COMMAND, *layout, where, "--", *WORDS], env=env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for where in (there, str(here))
        ]  # fmt: skip
        try:
            (pid_file,) = wait_until(
                lambda: [path for path in cache.glob("runs/*/one/runlogs/evaluator.pid") if path.read_text()],
                "the evaluator", started[0],
            )  # fmt: skip
            wait_until(lambda: storage.exists(f"{there}/evaluator/metrics.jsonl"), "an evaluation", started[0])
            os.kill(int(pid_file.read_text().split()[0]), signal.SIGKILL)
            said = [process.communicate(timeout=PATIENCE)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.communicate()
        assert [process.returncode for process in started] == [0, 0], said
        check(here)
        assert [same(row) for row in remote_rows(f"{there}/evaluator/metrics.jsonl")] == [
            same(row) for row in map(json.loads, (here / "evaluator" / "metrics.jsonl").read_text().splitlines())
        ]
        assert not [row for row in remote_rows(f"{there}/metrics.jsonl") if row["split"] == "validation"]
        for name in ("weights.safetensors", "optimizer.safetensors"):
            (best,) = here.glob(f"best/*/{name}")
            assert storage.read_bytes(f"{there}/{best.relative_to(here).as_posix()}") == best.read_bytes()
        names = storage.names_below(there)
        assert sum(name.startswith("best/") for name in names) == 3
        assert any(name.startswith("evaluator/events/validation/") for name in names)
        assert not [name for name in names if name.startswith(".lock")]


def remote_rows(url: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in storage.read_bytes(url).splitlines()]


def same(row: dict[str, Any]) -> dict[str, Any]:
    """What two runs of the same config have in common."""
    return {name: value for name, value in row.items() if name != "seconds"}
