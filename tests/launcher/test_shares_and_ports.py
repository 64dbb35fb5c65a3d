"""The cores, GPUs and ports of a machine are divided between processes; the command of a cluster."""

from __future__ import annotations

import json
import socket

import pytest

from modelyard.errors import UserError
from modelyard.launcher.job import check_command, with_model_dir
from modelyard.launcher.local import check_layout, process_specs
from modelyard.launcher.processes import available_gpus, divide_cores, divide_gpus, printable, reserved_ports


@pytest.mark.parametrize(
    ("cores", "processes", "shares"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([2, 4, 6, 8, 9], 2, [[2, 4], [6, 8, 9]]),
        ([0, 1], 2, [[0], [1]]),
        ([5, 7], 3, [[5], [7], [5]]),
        ([3], 1, [[3]]),
    ],
)
def test_cores_are_divided_evenly_and_every_process_gets_one(
    cores: list[int], processes: int, shares: list[list[int]]
) -> None:
    assert divide_cores(cores, processes) == shares


@pytest.mark.parametrize(
    ("gpus", "trainers", "divided", "left"),
    [
        (4, 2, [["0", "1"], ["2", "3"]], []),
        (5, 2, [["0", "1"], ["2", "3"]], ["4"]),
        (1, 2, [[], []], ["0"]),
        (0, 2, [[], []], []),
    ],
)
def test_every_trainer_gets_as_many_gpus(gpus: int, trainers: int, divided: list[list[str]], left: list[str]) -> None:
    assert divide_gpus([str(number) for number in range(gpus)], trainers) == (divided, left)


def test_only_visible_gpus_are_divided() -> None:
    assert available_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-1a,7"}) == ["3", "GPU-1a", "7"]
    assert available_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,2"}) == ["1"]
    assert available_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


ADDRESSES = {"chief": ("h:1",), "worker": ("h:2", "h:3"), "ps": ("h:4",), "evaluator": ("h:5",)}


def test_only_those_that_train_get_gpus_and_cores_and_the_evaluator_what_is_left() -> None:
    specs = {spec.name: spec for spec in process_specs(("train",), ADDRESSES, ["0", "1", "2"], [0, 1, 2, 3])}
    assert list(specs) == ["chief", "worker-0", "worker-1", "ps-0", "evaluator"]
    assert {name: spec.environ["CUDA_VISIBLE_DEVICES"] for name, spec in specs.items()} == {
        "chief": "-1", "worker-0": "0", "worker-1": "1", "ps-0": "-1", "evaluator": "2"
    }  # fmt: skip
    assert [spec.cores for spec in specs.values()] == [(), (0, 1), (2, 3), (), ()]
    assert [name for name, spec in specs.items() if spec.is_coordinator] == ["chief"]
    assert [name for name, spec in specs.items() if spec.is_awaited] == ["chief", "evaluator"]
    assert [name for name, spec in specs.items() if spec.restarts_alone] == ["worker-0", "worker-1", "evaluator"]
    config = json.loads(specs["worker-1"].environ["TF_CONFIG"])
    assert config == {
        "cluster": {role: list(hosts) for role, hosts in ADDRESSES.items()},
        "task": {"type": "worker", "index": 1},
    }


def test_without_parameter_servers_worker_0_coordinates_and_all_workers_restart_together() -> None:
    specs = process_specs(("train",), {"worker": ("h:1", "h:2")}, [], [])
    assert [(spec.name, spec.is_coordinator, spec.is_awaited, spec.restarts_alone) for spec in specs] == [
        ("worker-0", True, True, False),
        ("worker-1", False, False, False),
    ]
    # No GPU is known, so TensorFlow may use what it finds.
    assert all("CUDA_VISIBLE_DEVICES" not in spec.environ for spec in specs)


def test_too_few_gpus_are_given_to_no_trainer() -> None:
    specs = process_specs(("train",), {"worker": ("h:1", "h:2"), "evaluator": ("h:3",)}, ["0"], [])
    assert [spec.environ["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["-1", "-1", "0"]


def listen(address: str, *options: int) -> socket.socket:
    server = socket.socket()
    for option in options:
        server.setsockopt(socket.SOL_SOCKET, option, 1)
    host, port = address.split(":")
    try:
        server.bind((host, int(port)))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT], ids=["REUSEADDR", "REUSEPORT"])
def test_a_reserved_port_is_free_only_for_servers_that_share_it(option: int) -> None:
    with reserved_ports(2) as addresses:
        assert len(set(addresses)) == 2
        for address in addresses:
            with pytest.raises(OSError, match="in use"):
                listen(address)
            with listen(address, option):
                socket.create_connection(address.split(":"), timeout=5).close()  # type: ignore[arg-type]
            with listen(address, option):  # as a process that is started again does
                pass
        free = addresses[0]
    listen(free).close()


@pytest.mark.parametrize(
    ("words", "beside", "result", "folder"),
    [
        (["train"], "run", ["train", "--model_dir", "run"], "run"),
        (["train", "--xla"], None, ["train", "--xla"], None),
        (["train", "--model-dir=run", "--xla"], None, ["train", "--model_dir", "run", "--xla"], "run"),
        (["train", "--xla", "--model_dir", "run"], "./run", ["train", "--model_dir", "run", "--xla"], "run"),
        (["resume", "run", "--xla"], None, ["resume", "run", "--xla"], "run"),
        (["resume", "--xla"], "run", ["resume", "run", "--xla"], "run"),
        (["resume", "run"], "run", ["resume", "run"], "run"),
    ],
)
def test_the_run_folder_is_in_the_command_once(
    words: list[str], beside: str | None, result: list[str], folder: str | None
) -> None:
    assert with_model_dir(check_command(words), beside) == (result, folder)


@pytest.mark.parametrize(
    ("words", "beside", "text"),
    [
        ([], None, "no command to launch"),
        (["evaluate", "run"], None, "'evaluate' can't be run by several processes"),
        (["--xla", "train"], None, "the command is missing before --xla"),
        (["train", "--model_dir", "one"], "two", "two run folders are given, one and two"),
        (["resume", "one"], "two", "two run folders"),
        (["train", "--model_dir"], None, "--model_dir needs a value"),
        (["resume"], None, "resume needs the folder of a run"),
    ],
)
def test_a_command_that_can_not_be_launched_is_refused(words: list[str], beside: str | None, text: str) -> None:
    with pytest.raises(UserError, match=text):
        with_model_dir(check_command(words), beside)


@pytest.mark.parametrize(
    ("workers", "ps", "restarts", "text"),
    [
        (0, 0, 3, "--workers must be 1 or more, got 0"),
        (None, 1, 3, "need workers"),
        (1, -1, 3, "--ps must be 0 or more"),
        (1, 0, -1, "--max_restarts must be 0 or more"),
    ],
)
def test_an_impossible_layout_is_refused(workers: int | None, ps: int, restarts: int, text: str) -> None:
    with pytest.raises(UserError, match=text):
        check_layout(workers, ps, False, restarts)


def test_a_line_of_a_log_does_nothing_to_a_terminal() -> None:
    assert printable(b"\x1b[31mred\x1b[0m\x07 1%\r 2%\r") == " 2%"
    assert printable(b"\x1b[31mred\x1b[0m\x07\xff") == "red\ufffd"
