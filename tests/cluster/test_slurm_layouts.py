"""The distribution of SLURM's tasks: variables as SLURM 22.05 set them in real job steps."""

from __future__ import annotations

import pytest

from modelyard.cluster.environment import from_slurm
from modelyard.errors import ConfigError

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[0-1]"}


def task(rank: int, node: int, local: int, per_node: str, tasks: int, **more: str) -> dict[str, str]:
    place = {"SLURM_PROCID": rank, "SLURM_NODEID": node, "SLURM_LOCALID": local, "SLURM_STEP_NUM_TASKS": tasks}
    return {**STEP, **{key: str(value) for key, value in place.items()}, "SLURM_STEP_TASKS_PER_NODE": per_node, **more}


def hosts(environ: dict[str, str]) -> list[str]:
    cluster = from_slurm(environ)
    assert cluster is not None
    return [address.split(":")[0] for address in cluster.addresses["worker"]]


def test_tasks_fill_one_node_after_the_other() -> None:
    for rank, (node, local) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        environ = task(rank, node, local, "2(x2)", 4)
        assert hosts(environ) == ["node0", "node0", "node1", "node1"]


def test_tasks_dealt_out_in_turns_are_found_where_they_are() -> None:
    for rank, (node, local) in enumerate([(0, 0), (1, 0), (0, 1)]):
        environ = task(rank, node, local, "2,1", 3, SLURM_DISTRIBUTION="cyclic")
        assert hosts(environ) == ["node0", "node1", "node0"]


def test_an_unknown_layout_is_refused_and_not_guessed() -> None:
    environ = task(1, 1, 0, "2,1", 3, SLURM_DISTRIBUTION="arbitrary")
    with pytest.raises(ConfigError, match="--distribution=block"):
        from_slurm(environ)


def test_every_task_has_its_own_port_and_every_step_others() -> None:
    first, second = (from_slurm(task(0, 0, 0, "2(x2)", 4, SLURM_STEP_ID=step)) for step in "01")
    assert first is not None
    assert second is not None
    ports = [{address.split(":")[1] for address in cluster.addresses["worker"]} for cluster in (first, second)]
    assert len(ports[0]) == len(ports[1]) == 4
    assert ports[0].isdisjoint(ports[1])


def test_all_tasks_agree_on_all_addresses() -> None:
    seen = {str(from_slurm(task(r, r // 2, r % 2, "2(x2)", 4)).addresses) for r in range(4)}  # type: ignore[union-attr]
    assert len(seen) == 1
