"""What a cluster asks of a config, what its processes must have in common, and that they share one run folder."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from modelyard.cluster.description import Cluster, Member
from modelyard.config import Config, load_config
from modelyard.data.open_dataset import load_dataset
from modelyard.distributed import agreement
from modelyard.distributed import run as distributed_run
from modelyard.distributed.agreement import check_folder, config_in_cluster, form_group, mark_folder
from modelyard.distributed.coordinator import Coordinator
from modelyard.distributed.follower import Follower
from modelyard.errors import ClusterError, ConfigError
from modelyard.loop.hooks import stop_rules
from modelyard.run.checkpoint import Checkpoint, write_checkpoint
from modelyard.run.directory import RunDirectory
from modelyard.system.network import free_port, listen


def config(**options: Any) -> Config:
    return load_config(**{"model": "mlp", "dataset": "digits", "train_epochs": 1, **options})


def cluster(role: str = "worker", index: int = 0, model_dir: str | None = None, **counts: int) -> Cluster:
    counts = counts or {"worker": 2}
    addresses = {name: tuple(f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(n)) for name, n in counts.items()}
    return Cluster(Member(role, index), addresses, "TF_CONFIG", model_dir)


def problems(given: Config, where: Cluster) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        config_in_cluster(given, where)
    return {problem.key: problem.message for problem in caught.value.problems}


# -- the config -----------------------------------------------------------------------------------------------------


def test_alone_nothing_is_asked_for_and_nothing_changes() -> None:
    given = config(cpu_devices=2, hooks="+early_stop(patience=2)")
    assert config_in_cluster(given, Cluster()) == given


def test_the_run_folder_may_come_from_tf_config() -> None:
    for where in (cluster(model_dir="gs://b/run"), Cluster(source="TF_CONFIG", model_dir="gs://b/run")):
        assert config_in_cluster(config(), where).model_dir == "gs://b/run"


def test_the_same_run_folder_may_be_named_twice(tmp_path: Path) -> None:
    assert (
        config_in_cluster(config(model_dir="runs/x"), cluster(model_dir=str(tmp_path / "runs/x"))).model_dir == "runs/x"
    )
    assert config_in_cluster(config(model_dir="s3://b/x/"), cluster(model_dir="s3://b/x")).model_dir == "s3://b/x/"


@pytest.mark.parametrize("named", ["/elsewhere", "s3://b/x", "runs"])
def test_two_run_folders_that_contradict_each_other_are_refused(named: str) -> None:
    message = problems(config(model_dir="runs/x"), cluster(model_dir=named))["model_dir"]
    assert message == f"is 'runs/x' here and {named!r} in TF_CONFIG. Give it once, or the same in both."


def test_a_cluster_needs_a_run_folder() -> None:
    message = problems(config(), cluster(worker=3))["model_dir"]
    assert message.startswith("is missing: the 3 processes of this cluster (TF_CONFIG)")


def test_all_that_a_cluster_can_not_have_is_reported_at_once() -> None:
    where = cluster("chief", chief=1, worker=1, evaluator=1)
    found = problems(config(cpu_devices=2, hooks="+early_stop(patience=2),+stop_at(value=0.9)"), where)
    assert set(found) == {"model_dir", "cpu_devices", "hooks"}
    assert found["cpu_devices"].startswith("is 2; in a cluster every process is one CPU device")
    assert "early_stop and stop_at must see evaluations" in found["hooks"]


@pytest.mark.parametrize("role", ["chief", "worker", "evaluator"])
def test_with_an_evaluator_every_process_refuses_what_it_can_not_have(role: str) -> None:
    where = cluster(role, chief=1, worker=1, evaluator=1)
    found = problems(config(model_dir="s3://b/run", hooks="+stop_at(value=0.9)"), where)
    assert set(found) == {"hooks"}


def test_an_evaluator_that_is_not_listed_refuses_the_same() -> None:
    where = cluster("evaluator", chief=1)
    assert set(problems(config(model_dir="run", hooks="+stop_at(value=0.9)"), where)) == {"hooks"}


@pytest.mark.parametrize("listed", [0, 1])
def test_an_evaluator_may_watch_a_run_at_a_url(listed: int) -> None:
    given = config(model_dir="s3://b/run")
    assert config_in_cluster(given, cluster("evaluator", chief=1, evaluator=listed)) is given


def test_without_an_evaluator_hooks_may_stop_training() -> None:
    config_in_cluster(config(model_dir="run", hooks="+early_stop(patience=2)"), cluster())


# -- the group -------------------------------------------------------------------------------------------------------


def test_a_process_coordinates_or_follows() -> None:
    given = config(model_dir="run")
    assert isinstance(form_group(given, cluster(index=1), True, b""), Follower)
    with form_group(given, cluster(chief=1, evaluator=1, role="chief"), True, b"") as coordinator:
        assert isinstance(coordinator, Coordinator)
        assert coordinator.peer_timeout == given.peer_timeout_secs


def test_a_follower_whose_port_is_in_use_says_so_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.system.network._OWN_PORT_SECONDS", 0.1)
    where = cluster(index=1)
    with listen(where.address(where.me)), pytest.raises(ClusterError, match="is in use by another program"):
        form_group(config(model_dir="run"), where, True, b"")


@pytest.mark.parametrize("role", ["chief", "worker", "evaluator"])
def test_a_cluster_of_several_machines_needs_a_secret_on_every_process(role: str, tmp_path: Path) -> None:
    remote = {"chief": ("10.1.2.3:2222",), "worker": ("10.1.2.4:2222",), "evaluator": ("10.1.2.5:2222",)}
    given = config(model_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"MODELYARD_CLUSTER_SECRET: is not set.*openssl rand -hex 32"):
        distributed_run.run(given, True, Cluster(Member(role, 0), remote, "TF_CONFIG"))
    assert list(tmp_path.iterdir()) == []


def test_an_evaluator_listens_nowhere_so_its_port_may_be_in_use() -> None:
    where = cluster("evaluator", chief=1, evaluator=1)
    with listen(where.address(where.me)):
        assert isinstance(form_group(config(model_dir="run"), where, True, b""), Follower)


# -- what they have in common ---------------------------------------------------------------------------------------


def differences(coordinator: Config, other: Config, evaluates: tuple[bool, bool] = (True, True)) -> list[str]:
    where = cluster(chief=1, worker=1)
    cards = [
        agreement._start_info(given, where, flag) for given, flag in zip((coordinator, other), evaluates, strict=True)
    ]
    mine, theirs = (json.loads(json.dumps(start_info)) for start_info in cards)
    return agreement._differences(mine, theirs)


def test_the_same_command_line_makes_no_difference() -> None:
    assert differences(config(), config()) == []


def test_what_differs_is_named_with_both_values() -> None:
    found = differences(config(learning_rate=0.1, train_epochs=2), config(learning_rate=0.5))
    assert found == [
        "learning_rate: 0.5, where the coordinator has 0.1",
        "train_epochs: 1.0, where the coordinator has 2.0",
    ]


def test_what_belongs_to_a_machine_may_differ() -> None:
    own = config(data_dir="/a", cache_dir="/b", threads=3, model_dir="/mnt/x", runs_dir="/c", input_threads=4)
    assert differences(config(model_dir="/data/x"), own) == []


def test_train_and_train_and_evaluate_are_distinguished() -> None:
    found = differences(config(), config(), (True, False))
    assert found == ["one of them was started with `train`, the other with `train-and-evaluate`"]


def test_versions_code_and_addresses_are_compared() -> None:
    start_info = agreement._start_info(config(), cluster(chief=1, worker=1), True)
    other = json.loads(json.dumps(start_info))
    other["versions"]["keras"] = "2.0"
    other["code"]["modelyard's source"] = "0"
    other["cluster"]["worker"] = ["elsewhere:1"]
    found = agreement._differences(start_info, other)
    assert [line.split(":")[0] for line in found] == ["version of keras", "addresses of worker", "modelyard's source"]


def test_those_that_train_together_have_one_engine_whatever_each_machine_would_take() -> None:
    start_info = agreement._start_info(config(), cluster(chief=1, worker=1), True)
    other = {**json.loads(json.dumps(start_info)), "engine": "another"}
    found = agreement._differences(start_info, other)
    assert found == [f"engine another, where the coordinator has {start_info['engine']}; choose one with --engine"]
    evaluator = agreement._start_info(config(), cluster("evaluator", chief=1, evaluator=1), True)
    assert agreement._differences({**evaluator, "engine": "another"}, evaluator) == []


def test_an_evaluator_in_the_list_of_one_only_is_not_a_difference_of_addresses() -> None:
    listed = cluster("chief", chief=1, evaluator=1)
    unlisted = Cluster(Member("evaluator", 0), {"chief": listed.addresses["chief"]}, "TF_CONFIG")
    cards = [agreement._start_info(config(), where, True) for where in (listed, unlisted)]
    assert agreement._differences(*cards) == []


@pytest.mark.parametrize("start_info", [{}, {"options": []}, {"options": {}, "versions": 5}])
def test_start_info_of_another_kind_is_refused(start_info: dict[str, Any]) -> None:
    mine = agreement._start_info(config(), cluster(chief=1, worker=1), True)
    assert "it uses another protocol; are the versions of Modelyard the same?" in agreement._differences(
        mine, start_info
    )


# -- the run folder -------------------------------------------------------------------------------------------------


def test_the_coordinators_mark_is_found_in_the_folder_that_all_share(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    first, second = mark_folder(directory), mark_folder(directory)
    assert first != second
    check_folder(RunDirectory(tmp_path / "run"), second, "the chief")


@pytest.mark.parametrize("content", [None, b"", b"another mark", b"\xff\xfe"])
def test_another_folder_of_the_same_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setattr(agreement, "_FOLDER_SECONDS", 0.0)
    directory = RunDirectory(tmp_path / "run")
    if content is not None:
        directory.path.mkdir()
        directory.mark.write_bytes(content)
    with pytest.raises(ClusterError, match=r"run is not the folder that the chief writes to.*NFS"):
        check_folder(directory, "mark", "the chief")


def test_a_mark_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            directory.mark.write_text("mark")

    monkeypatch.setattr(agreement.time, "sleep", pause)
    check_folder(directory, "mark", "the chief")
    assert len(pauses) == 3


def test_object_stores_need_no_mark(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.mirror = object()  # type: ignore[assignment]
    assert mark_folder(directory) is None
    check_folder(directory, None, "the chief")


# -- what the coordinator sends -------------------------------------------------------------------------------------


class Recorder(Coordinator):
    """A coordinator whose followers come at once, and have nothing to say."""

    def __init__(self, found: dict[Member, dict[str, Any]] | None = None) -> None:
        self.cluster = cluster("chief", worker=1, ps=1, chief=1) if found is None else cluster(worker=2)
        self.facts: dict[str, Any] = {}
        self.found = found or {}

    def wait_until_ready(self) -> dict[Member, dict[str, Any]]:
        return self.found

    def wait_for_all(self, optional: Collection[str] = (), **facts: Any) -> None:
        self.facts = {"optional": tuple(optional), **facts}


@pytest.mark.parametrize(
    ("options", "threads"),
    [({"deterministic": True}, 3), ({"deterministic": True, "threads": 2}, 2), ({}, 0), ({"threads": 2}, 2)],
)
def test_all_processes_of_a_deterministic_run_have_the_threads_that_it_is_pinned_to(
    options: dict[str, Any], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed_run, "available_cores", lambda: 3)
    directory = RunDirectory(tmp_path)
    recorder = Recorder()
    given = config(model_dir=str(tmp_path), **options)
    distributed_run.Processes(recorder).join(directory, given, load_dataset(given))
    assert recorder.facts["threads"] == threads
    assert recorder.facts["optional"] == ()


@pytest.mark.parametrize(
    ("step", "loop_state", "options", "over"),
    [
        (20, {"total_steps": 20}, {}, True),
        (20, {"total_steps": 20}, {"train_steps": 40}, False),
        (10, {"total_steps": 20}, {}, False),
        (10, {"total_steps": 20, "stopped": "a hook", "stopped_under": "as now"}, {}, True),
        (10, {"total_steps": 20, "stopped": "a hook", "stopped_under": "as now"}, {"train_steps": 40}, False),
        (10, {"total_steps": 20, "stopped": "a hook", "stopped_under": ["another"]}, {}, False),
    ],
)
def test_a_run_is_over_when_it_has_what_the_config_asks_for_now(
    step: int, loop_state: dict[str, Any], options: dict[str, Any], over: bool, tmp_path: Path
) -> None:
    directory = RunDirectory(tmp_path)
    directory.create()
    given = config(**{"model_dir": str(tmp_path), "train_epochs": None, "train_steps": 20, **options})
    if loop_state.get("stopped_under") == "as now":
        loop_state = {**loop_state, "stopped_under": stop_rules(given)}
    weights = {"w": np.zeros(1, np.float32)}
    write_checkpoint(directory.checkpoints, Checkpoint(step, weights, {}, loop_state))
    recorder = Recorder()
    distributed_run.Processes(recorder).join(directory, given, load_dataset(given))
    assert recorder.facts["optional"] == (("evaluator",) if over else ())


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (["GPU", "GPU"], None),
        (["GPU"], r"worker 1 has \[GPU\], where worker 0 has \[GPU, GPU\]"),
        (["CPU", "CPU"], r"worker 1 has \[CPU, CPU\]"),
        (None, "worker 1 has null"),
    ],
)
def test_processes_that_train_together_need_as_many_devices_of_a_kind(
    theirs: list[str] | None, said: str | None
) -> None:
    engine: Any = SimpleNamespace(devices=[f"/job:worker/replica:0/task:0/device:GPU:{i}" for i in range(2)])
    recorder = Recorder({Member("worker", 1): {"devices": theirs}})
    if said is None:
        distributed_run.Processes(recorder).check_devices(engine)
        return
    with pytest.raises(ClusterError, match=said):
        distributed_run.Processes(recorder).check_devices(engine)
