"""Several processes that train together, started by hand with TF_CONFIG: they learn what one process learns."""

from __future__ import annotations

import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from cluster_processes import PARTS, cluster, largest_difference, rows, saved_steps
from conftest import on_engine
from modelyard.run.directory import open_run_folder
from modelyard.run.examples import read_example_values
from waiting import PATIENCE, wait_until

COMMON = [*PARTS, *on_engine(), "--threads", "1", "--dataset", "digits", "--peer_timeout_secs", "20"]


def words_of(line: str) -> list[str]:
    return line.split()


def train(tmp_path: Path, counts: dict[str, int], *words: str) -> dict[str, Path]:
    """Runs of the same config, each with another number of workers, all at the same time."""
    runs = {name: tmp_path / f"run-{name}" for name in counts}
    with ExitStack() as stack:
        started = {}
        for name, count in counts.items():
            started[name] = stack.enter_context(cluster(tmp_path / f"out-{name}", worker=count))
            streaming = ["--resident", "never"] if name.endswith("streaming") else []
            started[name].start_all("train-and-evaluate", *COMMON, *words, *streaming, "--model_dir", str(runs[name]))
        for each in started.values():
            statuses = each.wait()
            assert set(statuses.values()) == {0}, each.said()
            assert "[Gloo]" not in each.said()  # standard output is for results
    return runs


@pytest.mark.parametrize("others", [{"2-streaming": 2}, pytest.param({"4": 4}, marks=pytest.mark.slow)])
def test_one_two_and_four_workers_learn_the_same(tmp_path: Path, others: dict[str, int]) -> None:
    """Batch norm over all workers, every batch the global one; streaming workers read only their part."""
    options = words_of("--model tiny_norm --precision float64 --train_batch_size 32 --train_steps 30 --eval_every 10")
    options += ["--augment", "pad_and_crop(padding=1)", "--gradient_accumulation", "2", "--clip_norm", "1"]
    options += ["--ema_decay", "0.9", "--metrics", "top_k(k=3), f1, auc, log_loss"]
    runs = train(tmp_path, {"1": 1, **others}, *options)
    alone = rows(runs["1"], "validation")
    values = read_example_values(open_run_folder(runs["1"]), "validation")
    assert values is not None
    for name in others:
        there = read_example_values(open_run_folder(runs[name]), "validation")
        assert there is not None
        assert there.values.keys() == values.values.keys() == {"accuracy", "label", "loss"}
        for each, array in values.values.items():
            np.testing.assert_allclose(there.values[each], array, atol=1e-8)
        assert largest_difference(runs["1"], runs[name]) < 1e-9
        for mine, theirs in zip(alone, rows(runs[name], "validation"), strict=True):
            assert abs(mine["loss"] - theirs["loss"]) < 1e-9
            for metric in ("accuracy", "top_k_3", "f1", "auc"):
                assert mine[metric] == theirs[metric]
            assert mine["log_loss"] == pytest.approx(theirs["log_loss"], abs=1e-9)


@pytest.mark.slow
def test_two_workers_see_every_example_of_every_batch_once(tmp_path: Path) -> None:
    """`watcher` measures sums over the pixels it is given: another example, or one twice, would show."""
    options = words_of("--model watcher --precision float64 --train_batch_size 50 --train_steps 30 --log_every 1")
    runs = train(tmp_path, {"1": 1, "2": 2, "2-streaming": 2}, *options, "--augment", "pad_and_crop(padding=1)")
    for split, count in (("train", 30), ("validation", 2)):
        alone = rows(runs["1"], split)
        assert len(alone) == count
        for name in ("2", "2-streaming"):
            for mine, theirs in zip(alone, rows(runs[name], split), strict=True):
                for metric in ("pixels", "leaning", "squares"):
                    assert theirs[metric] == pytest.approx(mine[metric], rel=1e-12), (split, mine["step"])


@pytest.mark.slow
@pytest.mark.parametrize("synchronised", [True, False])
def test_workers_agree_in_float32_over_the_first_steps(tmp_path: Path, synchronised: bool) -> None:
    options = words_of("--model tiny_norm --train_batch_size 32 --train_steps 10 --learning_rate 0.01 --optimizer sgd")
    runs = train(tmp_path, {"1": 1, "2": 2, "4": 4}, *options, *([] if synchronised else ["--no_sync_batch_norm"]))
    if synchronised:
        for name in ("2", "4"):
            assert largest_difference(runs["1"], runs[name]) < 1e-4
            mine, theirs = rows(runs["1"], "validation")[-1], rows(runs[name], "validation")[-1]
            assert abs(mine["loss"] - theirs["loss"]) < 1e-5
    else:  # statistics of other groups of examples: something else is learned, on purpose
        assert largest_difference(runs["1"], runs["2"]) > 1e-6


@pytest.mark.parametrize("victim", [pytest.param("worker-0", marks=pytest.mark.slow), "worker-1"])
def test_sigterm_to_any_of_them_saves_at_the_same_step_and_all_leave(tmp_path: Path, victim: str) -> None:
    words = [
        "train-and-evaluate",
        *COMMON,
        "--model",
        "tiny_norm",
        "--train_steps",
        "100000",
        "--save_every",
        "40 steps",
    ]
    run = tmp_path / "run"
    with cluster(tmp_path / "out", worker=2) as both:
        both.start_all(*words, "--model_dir", str(run))
        wait_until(lambda: max(saved_steps(run), default=0) > 0, what="a checkpoint")
        both.processes[victim].send_signal(signal.SIGTERM)
        assert set(both.wait().values()) == {128 + signal.SIGTERM}, both.said()
        stopped = [line for line in both.said().splitlines() if line.startswith("stopped at step")]
    assert len(stopped) == 2
    assert len(set(stopped)) == 1, stopped
    assert f"stopped at step {max(saved_steps(run))}." in stopped[0]


@pytest.mark.parametrize(
    ("victim", "number"),
    [pytest.param("worker-1", signal.SIGKILL, marks=pytest.mark.slow), ("worker-0", signal.SIGSTOP)],
)
def test_a_worker_that_is_gone_is_an_error_within_the_bound(
    tmp_path: Path, victim: str, number: signal.Signals
) -> None:
    words = ["train", *COMMON, "--model", "tiny_norm", "--train_steps", "100000", "--save_every", "40 steps"]
    words += ["--peer_timeout_secs", "8"]
    run = tmp_path / "run"
    with cluster(tmp_path / "out", worker=2) as both:
        both.start_all(*words, "--model_dir", str(run))
        wait_until(lambda: max(saved_steps(run), default=0) > 0, what="a checkpoint")
        both.processes[victim].send_signal(number)
        other = "worker-0" if victim == "worker-1" else "worker-1"
        assert both.processes[other].wait(PATIENCE) == 75, both.said()
        how = "closed the connection unexpectedly" if number == signal.SIGKILL else "has been silent for 8 s"
        assert how in both.output(other).read_text()
        assert victim.replace("-", " ") in both.output(other).read_text()


def test_workers_that_were_started_differently_report_the_difference(tmp_path: Path) -> None:
    words = ["train", *COMMON, "--model", "tiny_norm", "--model_dir", str(tmp_path / "run")]
    with cluster(tmp_path / "out", worker=2) as both:
        both.start("worker", 0, *words)
        both.start("worker", 1, *words, "--learning_rate", "0.5")
        assert set(both.wait().values()) == {2}, both.said()
        for name in both.processes:
            assert "learning_rate: 0.5, where the coordinator has 0.001" in both.output(name).read_text()


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_is_explained_to_all(tmp_path: Path) -> None:
    words = ["train", *COMMON, "--model", "tiny_norm", "--model_dir"]
    with cluster(tmp_path / "out", worker=2) as both:
        both.start("worker", 0, *words, str(tmp_path / "here"))
        both.start("worker", 1, *words, str(tmp_path / "there"))
        assert set(both.wait().values()) == {2}, both.said()
        for name in both.processes:
            assert "is not the folder that worker 0 writes to" in both.output(name).read_text()


def test_a_mistake_of_the_coordinator_reaches_those_who_wait_for_it(tmp_path: Path) -> None:
    words = ["train", *COMMON, "--model", "tiny_norm", "--resume", "must", "--model_dir", str(tmp_path / "nothing")]
    with cluster(tmp_path / "out", worker=2) as both:
        both.start_all(*words)
        assert set(both.wait(PATIENCE).values()) == {2}, both.said()
        for name in both.processes:
            assert "there is no run in" in both.output(name).read_text()


@pytest.mark.slow
def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, cluster(tmp_path / "out", worker=2) as both:
        both.cluster["worker"][0] = f"127.0.0.1:{taken.getsockname()[1]}"
        both.start("worker", 0, "train", *COMMON, "--model_dir", str(tmp_path / "run"))
        assert set(both.wait(PATIENCE).values()) == {2}, both.said()
        assert f"{both.cluster['worker'][0]} is in use by another program" in both.output("worker-0").read_text()


def test_an_evaluator_evaluates_every_checkpoint_and_keeps_the_best(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train-and-evaluate", *COMMON, "--model", "tiny_norm", "--train_steps", "120", "--save_every", "30 steps"]
    words += ["--test_at_end", "--keep_checkpoints", "9", "--log_every", "1000"]
    with cluster(tmp_path / "out", worker=1, evaluator=1) as both:
        both.start_all(*words, "--model_dir", str(run))
        assert set(both.wait().values()) == {0}, both.said()
    assert rows(run, "validation") == []
    evaluated = rows(run / "evaluator", "validation")
    assert [row["step"] for row in evaluated] == saved_steps(run) == [0, 30, 60, 90, 120]
    best = max(evaluated, key=lambda row: row["accuracy"])
    assert [path.name for path in (run / "best").iterdir()] == [f"step-{best['step']:08d}"]
    assert [row["step"] for row in rows(run / "evaluator", "test")] == [best["step"]]
    values = read_example_values(open_run_folder(run), "validation")
    assert values is not None
    assert values.step == best["step"]
    assert values.values["accuracy"].mean(dtype=np.float64) == pytest.approx(best["accuracy"], abs=1e-12)


@pytest.mark.slow
def test_an_evaluator_resumes_a_finished_run_that_is_made_longer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["train-and-evaluate", *COMMON, "--model", "tiny_norm", "--save_every", "20 steps"]
    words += ["--keep_checkpoints", "9", "--model_dir", str(run), "--start_timeout_secs", "30"]
    for steps, again in ((20, False), (20, True), (40, False)):  # the second start finds everything done
        with cluster(tmp_path / f"out-{steps}-{again}", worker=1, evaluator=1) as both:
            both.start_all(*words, "--train_steps", str(steps))
            assert set(both.wait(PATIENCE).values()) == {0}, both.said()
    assert [row["step"] for row in rows(run / "evaluator", "validation")] == saved_steps(run) == [0, 20, 40]


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
    options = words_of("--model tiny_norm --precision float64 --train_batch_size 32")
    whole = train(tmp_path / "whole", {"1": 1}, *options, "--train_steps", "40")["1"]
    part = train(tmp_path, {"1": 1}, *options, "--train_steps", "20")["1"]
    with cluster(tmp_path / "out", worker=2) as both:
        both.start_all("resume", str(part), *PARTS, *on_engine(), "--threads", "1", "--train_steps", "40")
        assert set(both.wait().values()) == {0}, both.said()
    assert largest_difference(whole, part) < 1e-9
