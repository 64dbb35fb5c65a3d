"""TF_CONFIG: its contents, and an error for each mistake."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.cluster.description import Cluster, Member
from modelyard.cluster.environment import find_cluster, from_tf_config
from modelyard.errors import ConfigError

TWO = {"chief": ["a:1"], "worker": ["b:2", "c:3"]}


def read(config: Any, job_index: str | None = None) -> Cluster:
    text = config if isinstance(config, str) else json.dumps(config)
    environ = {"TF_CONFIG": text} | ({} if job_index is None else {"JOB_COMPLETION_INDEX": job_index})
    cluster = from_tf_config(environ)
    assert cluster is not None
    return cluster


def problems(config: Any, job_index: str | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        read(config, job_index)
    assert all(problem.where == "TF_CONFIG" for problem in caught.value.problems)
    return {problem.key: problem.message for problem in caught.value.problems}


def task(role: Any, index: Any = 0) -> dict[str, Any]:
    return {"type": role, "index": index}


def test_without_tf_config_this_process_is_alone() -> None:
    assert from_tf_config({}) is None
    assert from_tf_config({"TF_CONFIG": "  "}) is None
    cluster = find_cluster("auto", {})
    assert cluster.is_alone
    assert cluster.is_coordinator


def test_cluster_none_looks_at_nothing() -> None:
    assert find_cluster("none", {"TF_CONFIG": "{"}).is_alone


def test_a_cluster_is_read_with_everything_in_it() -> None:
    evaluator = {**TWO, "evaluator": ["d:4"]}
    cluster = read({"cluster": evaluator, "task": task("worker", 1), "model_dir": "gs://b/run", "environment": "cloud"})
    assert cluster.me == Member("worker", 1)
    assert cluster.model_dir == "gs://b/run"
    assert cluster.environment == "cloud"
    assert cluster.source == "TF_CONFIG"
    assert cluster.coordinator == Member("chief", 0)
    assert [str(member) for member in cluster.members] == ["the chief", "worker 0", "worker 1", "the evaluator"]
    assert [member.file_name for member in cluster.trainers] == ["chief", "worker-0", "worker-1"]
    assert cluster.address(cluster.me) == "c:3"
    assert cluster.has_evaluator
    assert cluster.mode == "synchronous"


def test_tf_config_goes_before_slurm() -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "nonsense"}
    text = json.dumps({"cluster": TWO, "task": task("chief")})
    assert find_cluster("auto", {**slurm, "TF_CONFIG": text}).source == "TF_CONFIG"


def test_master_is_another_word_for_chief() -> None:
    cluster = read({"cluster": {"master": ["a:1"], "worker": ["b:2"]}, "task": task("master")})
    assert cluster.me == cluster.coordinator == Member("chief", 0)


def test_without_a_chief_worker_0_coordinates() -> None:
    cluster = read({"cluster": {"worker": ["b:2", "c:3"]}, "task": task("worker")})
    assert cluster.is_coordinator
    assert cluster.trainers == [Member("worker", 0), Member("worker", 1)]


def test_with_parameter_servers_the_chief_does_not_train() -> None:
    cluster = read({"cluster": {**TWO, "ps": ["d:4"]}, "task": task("ps")})
    assert cluster.mode == "parameter servers"
    assert cluster.trainers == [Member("worker", 0), Member("worker", 1)]


def test_an_index_may_be_a_string_or_left_out() -> None:
    assert read({"cluster": TWO, "task": task("worker", "1")}).me == Member("worker", 1)
    assert read({"cluster": TWO, "task": {"type": "worker"}}).me == Member("worker", 0)


def test_an_evaluator_need_not_be_listed_in_its_own_cluster() -> None:
    cluster = read({"cluster": TWO, "task": task("evaluator")})
    assert cluster.me == Member("evaluator", 0)
    assert not cluster.is_alone
    assert not cluster.has_evaluator


@pytest.mark.parametrize("role", ["chief", "master", "worker"])
def test_a_task_without_a_cluster_is_a_process_alone_that_coordinates(role: str) -> None:
    for config in ({"task": task(role)}, {"cluster": {}, "task": task(role)}, {"cluster": None, "task": task(role)}):
        cluster = read(config)
        assert cluster.is_alone
        assert cluster.is_coordinator


@pytest.mark.parametrize("config", ["{}", '{"task": {}}', '{"cluster": {}, "task": null, "job": {"x": 1}}'])
def test_an_empty_tf_config_is_a_process_alone(config: str) -> None:
    assert read(config).is_alone
    assert read(config, "3").is_alone


@pytest.mark.parametrize(("role", "index"), [("evaluator", 0), ("ps", 0), ("worker", 1)])
def test_a_task_that_needs_others_is_refused_without_a_cluster(role: str, index: int) -> None:
    assert "the cluster has no processes" in problems({"task": task(role, index)})["task.type"]


@pytest.mark.parametrize("number", range(4))
def test_the_index_of_a_kubernetes_job_selects_a_task(number: int) -> None:
    names = ["the chief", "worker 0", "worker 1", "the evaluator"]
    for config in ({"cluster": {"evaluator": ["d:4"], **TWO}}, {"cluster": {**TWO, "evaluator": ["d:4"]}, "task": {}}):
        assert str(read(config, str(number)).me) == names[number]


@pytest.mark.parametrize("number", ["3", "-1", "one", "", "9" * 5000, "²"])
def test_a_number_that_no_process_has_is_refused(number: str) -> None:
    message = problems({"cluster": TWO}, number)["task"]
    assert "JOB_COMPLETION_INDEX" in message
    assert "1 chief, 2 worker" in message


def test_a_task_goes_before_the_number_of_a_job() -> None:
    assert read({"cluster": TWO, "task": task("worker", 1)}, "0").me == Member("worker", 1)


@pytest.mark.parametrize("text", ["{", "chief", "{'cluster': 1}", '{"a": ' + "1" * 5000 + "}", "[" * 100_000])
def test_what_is_not_json_is_shown(text: str) -> None:
    message = problems(text)[""]
    assert "is not JSON" in message
    assert repr(text[:40]) in message


@pytest.mark.parametrize("config", ["[]", "1", '"chief"', "null", "true"])
def test_what_is_no_object_is_refused(config: str) -> None:
    assert "must be a JSON object" in problems(config)[""]


@pytest.mark.parametrize("cluster", [[], 0, "", False, "a:1", ["a:1"]])
def test_a_cluster_that_is_no_object_is_refused(cluster: Any) -> None:
    assert "must map roles to lists" in problems({"cluster": cluster, "task": task("chief")})["cluster"]


@pytest.mark.parametrize(
    "address",
    [
        "", "a", "a:", ":1", "a:0", "a:65536", "a:-1", "a:one", "a:" + "1" * 5000, "a:٣", "http://a:1", "a b:1", " a:1",
        "a..b:1", "a" * 64 + ":1", "a\u0000:1", "::1", "::1:80", "[::1]", "[::1]:", "[a]:1:2", "ä:1", "a:1\n",
    ],
)  # fmt: skip
def test_an_invalid_address_is_named_by_its_key(address: str) -> None:
    message = problems({"cluster": {"worker": ["b:2", address]}, "task": task("worker")})["cluster.worker[1]"]
    assert f"{address!r} is not host:port" in message


@pytest.mark.parametrize("address", ["localhost:1", "10.0.0.1:65535", "[::1]:80", "[fe80::1%eth0]:80", "a-b_c.d.:80"])
def test_names_and_both_kinds_of_ip_addresses_are_taken(address: str) -> None:
    assert read({"cluster": {"worker": [address]}, "task": task("worker")}).addresses == {"worker": (address,)}


def test_an_address_given_twice_is_named_with_both_keys() -> None:
    found = problems({"cluster": {"chief": ["a:1"], "worker": ["b:2", "a:1"]}, "task": task("chief")})
    assert found == {
        "cluster.worker[1]": "a:1 is also the address of cluster.chief[0]; every process needs its own.",
    }


@pytest.mark.parametrize("hosts", ["a:1", {"0": "a:1"}, [1], [["a:1"]], None, 1])
def test_hosts_that_are_no_list_of_text_are_refused(hosts: Any) -> None:
    assert "must be a list" in problems({"cluster": {"worker": hosts}, "task": task("worker")})["cluster.worker"]


def test_an_unknown_role_comes_with_the_near_one() -> None:
    found = problems({"cluster": {**TWO, "wroker": ["d:4"]}, "task": task("chief")})
    assert "Did you mean 'worker'" in found["cluster.wroker"]


@pytest.mark.parametrize(
    ("cluster", "key", "message"),
    [
        ({"chief": ["a:1"], "master": ["b:2"]}, "cluster.master", "chief and master are the same"),
        ({"chief": ["a:1", "b:2"]}, "cluster.chief", "lists 2 processes; at most one chief"),
        ({**TWO, "evaluator": ["d:4", "e:5"]}, "cluster.evaluator", "at most one evaluator"),
        ({"worker": ["b:2"], "ps": ["d:4"]}, "cluster.ps", "need a chief"),
        ({"chief": ["a:1"], "ps": ["d:4"]}, "cluster.ps", "need workers"),
        ({"ps": ["d:4"]}, "cluster", "none that trains"),
        ({"evaluator": ["d:4"]}, "cluster", "none that trains"),
    ],
)
def test_a_cluster_that_can_not_train_is_refused(cluster: dict[str, list[str]], key: str, message: str) -> None:
    assert message in problems({"cluster": cluster, "task": task("chief")})[key]


@pytest.mark.parametrize(
    ("given", "key", "message"),
    [
        (None, "task", "is missing. It must name this process of the cluster (1 chief, 2 workers)"),
        ({}, "task", "is missing"),
        ([], "task", "must be an object"),
        ("worker", "task", "must be an object"),
        (0, "task", "must be an object"),
        ({"index": 0}, "task.type", "is missing"),
        (task("boss"), "task.type", "there is no role 'boss'"),
        (task(["worker"]), "task.type", "there is no role"),
        (task("worker", 2), "task.index", "there is no worker 2: the cluster has 1 chief, 2 worker"),
        (task("chief", 1), "task.index", "there is no chief 1"),
        (task("ps"), "task.type", "there is no ps 0"),
        (task("worker", -1), "task.index", "-1 is not an integer of 0 or more"),
        (task("worker", 1.0), "task.index", "1.0 is not"),
        (task("worker", True), "task.index", "True is not"),
        (task("worker", None), "task.index", "None is not"),
        (task("worker", "x"), "task.index", "'x' is not"),
        (task("worker", "9" * 5000), "task.index", "is not an integer"),
    ],
)
def test_a_task_that_is_not_in_the_cluster_is_refused(given: Any, key: str, message: str) -> None:
    assert message in problems({"cluster": TWO, "task": given})[key]


def test_model_dir_and_environment_are_checked() -> None:
    found = problems({"model_dir": 5, "environment": "clout"})
    assert found["model_dir"] == "must be a path or a URL."
    assert "Did you mean 'cloud'" in found["environment"]


def test_all_mistakes_are_reported_at_once() -> None:
    cluster = {"boss": ["x:1"], "worker": ["a", "b:2"], "ps": ["b:2"]}
    found = problems({"cluster": cluster, "task": task("worker", 7), "environment": "mars", "model_dir": ["x"]})
    assert set(found) == {
        "cluster.boss", "cluster.worker[0]", "cluster.ps[0]", "cluster.ps", "task.index", "environment", "model_dir"
    }  # fmt: skip


def sensible(environ: dict[str, str]) -> None:
    """Reading gives a cluster in which this process has its place, or a ConfigError; nothing else."""
    cluster = None
    with contextlib.suppress(ConfigError):
        cluster = from_tf_config(environ)
    if cluster is not None and not cluster.is_alone:
        assert cluster.address(cluster.coordinator)
        assert cluster.me in cluster.members or cluster.me.role == "evaluator"
        assert cluster.describe()
    elif cluster is not None:
        assert cluster.is_coordinator


words = st.sampled_from(
    [
        "cluster",
        "task",
        "type",
        "index",
        "chief",
        "master",
        "worker",
        "ps",
        "evaluator",
        "model_dir",
        "environment",
        "a:1",
    ]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
hosts = st.lists(st.sampled_from(["a:1", "b:2", "c:3", "d:4", "e"]) | anything, max_size=3)
roles = st.sampled_from(["chief", "master", "worker", "ps", "evaluator", "x"])
likely = st.fixed_dictionaries(
    {},
    optional={
        "cluster": st.dictionaries(roles, hosts, max_size=4) | anything,
        "task": st.fixed_dictionaries({}, optional={"type": roles | anything, "index": st.integers(-1, 3) | anything}),
        "model_dir": anything,
        "environment": anything,
    },
)


@settings(deadline=None, max_examples=200)
@given(st.text() | anything.map(json.dumps) | likely.map(json.dumps), st.none() | st.text(max_size=3))
def test_any_text_gives_a_cluster_or_a_config_error(text: str, job_index: str | None) -> None:
    sensible({"TF_CONFIG": text} | ({} if job_index is None else {"JOB_COMPLETION_INDEX": job_index}))
