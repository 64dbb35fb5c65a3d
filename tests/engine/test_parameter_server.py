"""Asynchronous training: real TensorFlow servers on loopback, a chief in a process of its own, workers that die."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelyard
from conftest import TESTS, environment
from modelyard.config.durations import RunLength
from modelyard.data.open_dataset import load_dataset
from modelyard.engine.catalog import parameter_server_problems
from modelyard.loop.run import build
from waiting import PATIENCE

pytestmark = pytest.mark.tensorflow_only("parameter servers")
OPTIONS: dict[str, Any] = {"model": "mlp", "dataset": "digits", "train_steps": 400, "train_batch_size": 32}
AUGMENT = "pad_and_crop(padding=1), flip_left_right"


class Processes:
    """A chief, two workers and two parameter servers."""

    def __init__(self) -> None:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
        chief, *others = (f"127.0.0.1:{s.getsockname()[1]}" for s in sockets)
        for each in sockets:
            each.close()
        self.spec = {"chief": [chief], "worker": others[:2], "ps": others[2:]}
        self.running: dict[tuple[str, int], subprocess.Popen[str]] = {}
        for role, addresses in self.spec.items():
            for index in range(len(addresses)):
                self.start(role, index)
        for role, index in self.running:
            if role != "chief":
                self.wait_for(role, index)

    def start(self, role: str, index: int) -> None:
        self.running[role, index] = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ps_process.py")), role, str(index), json.dumps(self.spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(PYTHONPATH=f"{TESTS}:{TESTS.parent / 'src'}"),
        )

    def wait_for(self, role: str, index: int, what: str | None = None) -> dict[str, Any]:
        """The next line that a process says; with ``what``, that it logs, beginning with these words."""
        while True:
            process = self.running[role, index]
            patience = threading.Timer(PATIENCE, process.kill)
            patience.start()
            line = process.stdout.readline()  # type: ignore[union-attr]
            patience.cancel()
            assert line, f"{role} {index} ended with {process.wait()}, or said nothing for {PATIENCE} s"
            said: dict[str, Any] = json.loads(line)
            if what is None and "log" not in said:
                return said
            if what is not None and said.get("log", "").startswith(what):
                return said

    def kill(self, role: str, index: int) -> None:
        self.running[role, index].kill()
        self.running[role, index].wait()

    def ask(self, call: str, **arguments: Any) -> None:
        chief = self.running["chief", 0]
        assert chief.stdin is not None
        chief.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        chief.stdin.flush()

    def answer(self) -> Any:
        said = self.wait_for("chief", 0)
        assert "result" in said, said
        return said["result"]

    def call(self, call: str, **arguments: Any) -> Any:
        self.ask(call, **arguments)
        return self.answer()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    for each in started.running.values():
        each.kill()
        each.wait()


def synchronous(**options: Any) -> Any:
    """An engine in this process, which computes one step after the other."""
    from modelyard.engine.tensorflow import TensorFlowEngine

    config = modelyard.load_config(**{**OPTIONS, **options})
    data = load_dataset(config)
    engine = TensorFlowEngine(config)
    run = RunLength(data.size("train"), config.train_batch_size, config.train_steps or 0)
    build(engine, config, data, run)
    return engine


def load(path: Path) -> Any:
    from modelyard.engine.base import State

    with np.load(path) as held:
        return State(*[{key[2:]: held[key] for key in held if key.startswith(f"{part}:")} for part in "wo"])


def test_two_workers_learn_digits_and_the_chief_counts_their_steps(
    two_devices: None, processes: Processes, tmp_path: Path
) -> None:
    rates = {"learning_rate": 3e-3, "learning_rate_schedule": "cosine", "warmup": "10 steps"}
    processes.call("build", **OPTIONS, **rates)
    table = processes.call("train", step=0, count=400)
    assert {len(column) for column in table.values()} == {400}
    np.testing.assert_allclose(table["learning_rate"], expected_rates(**rates), rtol=1e-5, atol=1e-8)
    assert np.mean(table["loss"][-20:]) < 0.2 * np.mean(table["loss"][:5])
    assert processes.call("evaluate", split="test")["accuracy"] >= 0.95
    processes.call("save", path=str(tmp_path / "state.npz"))
    assert load(tmp_path / "state.npz").optimizer["iteration"] == 400


def expected_rates(**rates: Any) -> list[float]:
    from modelyard.models.schedules import build_schedule

    config = modelyard.load_config(**OPTIONS, **rates)
    schedule = build_schedule(config, RunLength(load_dataset(config).size("train"), 32, 400))
    return [float(schedule(step)) for step in range(400)]


def test_variables_are_spread_over_the_servers_by_their_bytes(processes: Processes) -> None:
    processes.call("build", **OPTIONS)
    placed = processes.call("placement")
    held = {"/job:ps/replica:0/task:0/device:CPU:0": 0, "/job:ps/replica:0/task:1/device:CPU:0": 0}
    for device, size in placed.values():
        held[device] += size
    first, second = held.values()
    assert min(first, second) > 0.3 * (first + second), placed
    for name, (device, _) in placed.items():
        owner = name.rpartition("/")[0]
        if owner in placed:
            assert placed[owner][0] == device, f"{name} is not with its variable"


@pytest.mark.parametrize("resident", ["always", "never"])
def test_one_step_at_a_time_is_synchronous_training(
    two_devices: None, processes: Processes, tmp_path: Path, resident: str
) -> None:
    options = {
        **OPTIONS,
        "model": "tiny_dropout",
        "precision": "float64",
        "augment": AUGMENT,
        "resident": resident,
        "clip_norm": 0.5,
        "l2_regularization": 1e-3,
        "gradient_accumulation": 2,
        "optimizer": "adamw",
    }
    alone = synchronous(**options)
    expected = alone.train(0, 6)
    processes.call("build", **options)
    tables = [processes.call("train", step=step, count=1) for step in range(6)]
    for name, values in expected.items():
        np.testing.assert_allclose([table[name][0] for table in tables], values, rtol=1e-9)
    processes.call("save", path=str(tmp_path / "state.npz"))
    state, wanted = load(tmp_path / "state.npz"), alone.state()
    for mine, others in ((state.weights, wanted.weights), (state.optimizer, wanted.optimizer)):
        assert list(mine) == list(others)
        for name in mine:
            np.testing.assert_allclose(mine[name], others[name], atol=1e-9)


@pytest.mark.parametrize("resident", ["always", "never"])
@pytest.mark.slow
def test_workers_see_the_same_global_batches(two_devices: None, processes: Processes, resident: str) -> None:
    options = {**OPTIONS, "model": "watcher", "precision": "float64", "augment": AUGMENT, "resident": resident}
    expected = synchronous(**options).train(3, 60)  # over the end of an epoch
    processes.call("build", **options)
    table = processes.call("train", step=3, count=60)
    for name in ("pixels", "leaning", "squares"):
        np.testing.assert_allclose(table[name], expected[name], rtol=1e-13)


def test_a_state_goes_from_one_engine_to_the_other_and_back(
    two_devices: None, processes: Processes, tmp_path: Path
) -> None:
    options = {**OPTIONS, "model": "tiny_norm", "eval_batch_size": 50}
    alone = synchronous(**options)
    alone.train(0, 30)
    before = alone.state()
    kept = {f"w:{k}": v for k, v in before.weights.items()} | {f"o:{k}": v for k, v in before.optimizer.items()}
    np.savez(tmp_path / "one.npz", **kept)
    processes.call("build", **options)
    processes.call("load", path=str(tmp_path / "one.npz"))
    assert processes.call("evaluate", split="test") == pytest.approx(alone.evaluate("test"), abs=1e-6)
    processes.call("train", step=30, count=50)
    there = processes.call("evaluate", split="test")
    processes.call("save", path=str(tmp_path / "two.npz"))
    alone.load(load(tmp_path / "two.npz"))
    assert alone.evaluate("test") == pytest.approx(there, abs=1e-6)
    assert alone.state().optimizer["iteration"] == 80


@pytest.mark.slow
def test_workers_that_die_and_come_back_cost_no_step(processes: Processes, tmp_path: Path) -> None:
    processes.call("build", **OPTIONS)
    step = 0
    for killed in (1, 0):  # the second time, only the one that came back is left
        processes.ask("train", step=step, count=200, under_way=40)
        assert processes.wait_for("chief", 0) == {"under_way": 40}
        processes.kill("worker", killed)
        processes.wait_for("chief", 0, f"worker {killed} was lost")
        table = processes.answer()
        assert {len(column) for column in table.values()} == {200}
        step += 200
        processes.call("evaluate", split="validation")  # a function that the dead worker was not told of
        processes.start("worker", killed)
        processes.wait_for("worker", killed)
        processes.wait_for("chief", 0, f"worker {killed} is back")
    assert processes.call("evaluate", split="test")["accuracy"] > 0.9
    processes.call("save", path=str(tmp_path / "state.npz"))
    assert load(tmp_path / "state.npz").optimizer["iteration"] == 400


@pytest.mark.slow
def test_waiting_for_workers_that_do_not_answer_can_be_ended(processes: Processes) -> None:
    processes.call("build", **OPTIONS)
    processes.call("train", step=0, count=1)  # workers are told of a function when it is made, and that can't be ended
    workers = [processes.running["worker", index] for index in range(2)]
    for worker in workers:
        worker.send_signal(signal.SIGSTOP)
    try:
        processes.ask("train", step=1, count=20, under_way=5, abort="worker 1 is silent.")
        assert processes.wait_for("chief", 0) == {"under_way": 5}
        said = processes.wait_for("chief", 0)
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
    assert said == {"error": "PeerLostError", "message": "worker 1 is silent.", "status": 75}


@pytest.mark.parametrize(
    "option",
    [
        {"deterministic": True},
        {"scale_learning_rate": True},
        {"precision": "float16"},
        {"ema_decay": 0.9},
        {"xla": True},
        {"num_gpus": 2},
        {"num_gpus": "all"},
    ],
)
def test_options_that_workers_at_their_own_pace_cannot_have_are_refused(option: dict[str, Any]) -> None:
    assert parameter_server_problems(modelyard.load_config(**OPTIONS)) == []
    (problem,) = parameter_server_problems(modelyard.load_config(**OPTIONS, **option))
    assert problem.key == next(iter(option))


@pytest.mark.slow  # TensorFlow may hang here, in one run of many: then the heartbeat of a crew ends a real run
def test_a_lost_parameter_server_ends_the_run_soon_and_the_others_end_when_told(processes: Processes) -> None:
    """The last one: the cluster is of no use after it."""
    processes.call("build", **OPTIONS)
    processes.ask("train", step=0, count=5000, under_way=40)
    processes.wait_for("chief", 0)
    processes.kill("ps", 1)
    said = processes.wait_for("chief", 0)
    assert (said["error"], said["status"]) == ("PeerLostError", 75)
    assert f"parameter server 1 at {processes.spec['ps'][1]} was lost" in said["message"]
    for key in (("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)):
        process = processes.running[key]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE) == 0, key
