"""A cluster from the variables of SLURM."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.cluster.description import Cluster, Member
from modelyard.cluster.environment import expand_counts, expand_nodes, find_cluster, from_slurm
from modelyard.errors import ConfigError


def step(rank: int = 0, nodes: str = "n[1-2]", counts: str = "2(x2)", tasks: int = 4, **extra: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": counts, **extra,
    }  # fmt: skip


def found(environ: dict[str, str]) -> Cluster:
    cluster = from_slurm(environ)
    assert cluster is not None
    return cluster


def refused(environ: dict[str, str]) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        from_slurm(environ)
    (problem,) = caught.value.problems
    assert problem.where == "SLURM"
    return problem.key, problem.message


def test_every_task_finds_its_own_index_and_the_same_cluster() -> None:
    clusters = [found(step(rank)) for rank in range(4)]
    assert [cluster.me for cluster in clusters] == [Member("worker", i) for i in range(4)]
    assert len({str(cluster.addresses) for cluster in clusters}) == 1
    hosts = clusters[0].addresses["worker"]
    assert [address.split(":")[0] for address in hosts] == ["n1", "n1", "n2", "n2"]
    assert len(set(hosts)) == 4
    assert [cluster.is_coordinator for cluster in clusters] == [True, False, False, False]
    assert find_cluster("auto", step()).source == "SLURM"


def test_outside_of_a_step_of_several_tasks_a_process_is_alone() -> None:
    batch_script = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert from_slurm({}) is None
    assert from_slurm(batch_script) is None
    assert from_slurm(step(tasks=1, nodes="n1", counts="1")) is None
    assert find_cluster("auto", batch_script).is_alone


def test_the_last_tasks_are_parameter_servers_and_the_evaluator() -> None:
    names = [str(found(step(rank, MODELYARD_PS="1", MODELYARD_EVALUATOR="1")).me) for rank in range(4)]
    assert names == ["the chief", "worker 0", "ps 0", "the evaluator"]
    assert [str(found(step(rank, MODELYARD_EVALUATOR="1")).me) for rank in (0, 3)] == ["worker 0", "the evaluator"]


@pytest.mark.parametrize(
    ("extra", "key", "message"),
    [
        ({"MODELYARD_PS": "3"}, "MODELYARD_PS", "leave 0 to train"),
        ({"MODELYARD_PS": "9"}, "MODELYARD_PS", "leave -6 to train"),
        ({"MODELYARD_EVALUATOR": "2"}, "MODELYARD_EVALUATOR", "one evaluator"),
        ({"MODELYARD_PS": "many"}, "MODELYARD_PS", "'many' is not a number"),
        ({"SLURM_STEP_NUM_TASKS": ""}, "SLURM_STEP_NUM_TASKS", "is not set"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID", "'x' is not a number"),
        ({"SLURM_PROCID": "4"}, "SLURM_STEP_NODELIST", "to 4 tasks with this one as 4"),
        ({"SLURM_STEP_NUM_TASKS": "5"}, "SLURM_STEP_NODELIST", "do not add up to 5 tasks"),
        ({"SLURM_STEP_NODELIST": "n1"}, "SLURM_STEP_NODELIST", "1 nodes"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST", "0 nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_NODELIST", "2 nodes with []"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID", "is not set"),
        ({"SLURM_JOB_ID": "9" * 5000}, "SLURM_JOB_ID", "is not a number"),
    ],
)
def test_variables_that_make_no_sense_are_named(extra: dict[str, str], key: str, message: str) -> None:
    where, what = refused(step(**extra))
    assert where == key
    assert message in what


def test_the_nodes_of_the_job_are_taken_where_the_step_has_none() -> None:
    environ = step(SLURM_JOB_NODELIST="m[1-2]")
    del environ["SLURM_STEP_NODELIST"]
    assert found(environ).addresses["worker"][0].startswith("m1:")


def test_a_task_on_another_node_than_expected_from_its_rank_is_refused() -> None:
    assert found(step(1, SLURM_NODEID="0")).me == Member("worker", 1)
    assert found(step(2, SLURM_NODEID="1")).me == Member("worker", 2)
    for rank, node in ((1, "1"), (2, "0"), (0, "2")):
        key, message = refused(step(rank, SLURM_NODEID=node))
        assert key == "SLURM_NODEID"
        assert "--distribution=block" in message


# -- ports ----------------------------------------------------------------------------------------------------------


def ports(environ: dict[str, str]) -> list[int]:
    return [int(address.rpartition(":")[2]) for address in found(environ).addresses["worker"]]


def test_reserved_ports_are_used_where_they_are_enough() -> None:
    assert ports(step(SLURM_STEP_RESV_PORTS="12000-12003")) == [12000, 12001, 12000, 12001]
    assert ports(step(SLURM_STEP_RESV_PORTS="12000,12007")) == [12000, 12007, 12000, 12007]


@pytest.mark.parametrize("text", ["12000", "x", "12000-", "-5", "1-99999999999", "²"])
def test_reserved_ports_that_are_too_few_or_unreadable_are_ignored(text: str) -> None:
    assert ports(step(SLURM_STEP_RESV_PORTS=text)) == ports(step())


def test_steps_of_a_job_and_jobs_after_each_other_share_no_port() -> None:
    first = set(ports(step()))
    assert not first & set(ports(step(SLURM_STEP_ID="1")))
    assert not first & set(ports(step(SLURM_JOB_ID="78")))
    assert ports(step(SLURM_STEP_ID="interactive")) == ports(step())


@given(st.integers(0, 10**9), st.integers(0, 2**32), st.integers(2, 300) | st.just(6000))
@settings(deadline=None, max_examples=40)
def test_ports_are_always_ports(job: int, number: int, tasks: int) -> None:
    environ = step(nodes="n", counts=str(tasks), tasks=tasks, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(number))
    chosen = ports(environ)
    assert len(set(chosen)) == tasks
    assert min(chosen) >= 20000
    assert max(chosen) < 32768


# -- lists ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,7],login", ["node01", "node02", "node03", "node7", "login"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("r[1-2]-ib.x,z", ["r1-ib.x", "r2-ib.x", "z"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_lists_of_nodes_are_read_as_slurm_writes_them(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "n[", "n]", "n[1-2", "n[]", "n[a-b]", "n[3-1]", "n[1-]", "n[-1]", "n[1-2-3]", "n[[1]]", ",", "a,", "a,,b",
        "n[1-999999999]", "n[0-99999][0-99999]", "n[1-50000],m[1-60000]", "n[" + "9" * 5000 + "]", "n[²]",
    ],
)  # fmt: skip
def test_lists_that_can_not_be_read_are_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(text[:80])[:20])):
        expand_nodes(text)


@pytest.mark.parametrize(("text", "counts"), [("", []), ("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2", [1, 2])])
def test_counts_are_read_as_slurm_writes_them(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["x", "2(x)", "2(3)", "2(x3", "-1", "2(x999999)", "9" * 5000])
def test_counts_that_can_not_be_read_are_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        expand_counts(text)


def folded(prefix: str, width: int, numbers: list[int]) -> str:
    """As SLURM writes nodes: neighbours as a range."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return f"{prefix}[{','.join('-'.join(f'{n:0{width}d}' for n in r) for r in ranges)}]"


blocks = st.tuples(
    st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True),
    st.integers(1, 5),
    st.lists(st.integers(0, 3000), min_size=1, max_size=20, unique=True).map(sorted),
)


@given(st.lists(blocks, min_size=1, max_size=4))
@settings(deadline=None)
def test_what_is_folded_unfolds_again(parts: list[tuple[str, int, list[int]]]) -> None:
    text = ",".join(folded(*part) for part in parts)
    assert expand_nodes(text) == [f"{prefix}{n:0{width}d}" for prefix, width, numbers in parts for n in numbers]


@given(st.text(alphabet="n01-9,[]x() ", max_size=20))
@settings(deadline=None)
def test_any_text_gives_lists_or_a_config_error(text: str) -> None:
    for read in (expand_nodes, expand_counts):
        with contextlib.suppress(ConfigError):
            assert isinstance(read(text), list)
