"""A cluster from the environment variables that SLURM's ``srun`` sets for its tasks.

Task 0 is the chief, or worker 0 where there are no parameter servers. ``MODELYARD_PS`` is
the number of parameter servers, which are the last tasks. With ``MODELYARD_EVALUATOR=1``, the very last task evaluates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from modelyard.cluster.description import CHIEF, EVALUATOR, PS, WORKER, Cluster, Member
from modelyard.errors import ConfigError, Problem

SLURM = "SLURM"
PS_COUNT, EVALUATOR_COUNT = "MODELYARD_PS", "MODELYARD_EVALUATOR"
_POSITION = ("SLURM_NODEID", "SLURM_LOCALID")
_NUMBER = re.compile(r"[0-9]{1,18}")
_MAX_TASKS = 100_000
_FIRST_PORT, _PORTS = 20000, 12000
"""Below the ports that Linux assigns by itself (32768 and up)."""


def from_slurm(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster of a job step with several tasks; None elsewhere, including the batch script itself.

    Raises:
        ConfigError: if the variables contradict each other.
    """
    if not environ.get("SLURM_STEP_ID") or "SLURM_PROCID" not in environ:
        return None
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS")
    if tasks < 2:
        return None
    rank = _number(environ, "SLURM_PROCID")
    nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    per_node = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(nodes) != len(per_node) or sum(per_node) != tasks or rank >= tasks:
        raise ConfigError(
            [
                Problem(
                    SLURM,
                    "SLURM_STEP_NODELIST",
                    f"{len(nodes)} nodes with {per_node} tasks do not add up to {tasks} tasks with this one as {rank}.",
                )
            ]
        )
    addresses = _addresses(environ, nodes, per_node)
    ps, evaluators = (_number(environ, name, 0) for name in (PS_COUNT, EVALUATOR_COUNT))
    chiefs = 1 if ps else 0
    workers = tasks - chiefs - ps - evaluators
    if workers < 1 or evaluators > 1:
        message = f"with {PS_COUNT}={ps} and {EVALUATOR_COUNT}={evaluators}, {tasks} tasks leave {workers} to train."
        key, hint = (
            (EVALUATOR_COUNT, "At most one evaluator is supported.")
            if evaluators > 1
            else (PS_COUNT, "Request more tasks.")
        )
        raise ConfigError([Problem(SLURM, key, f"{message} {hint}")])
    members = [Member(CHIEF, 0)] * chiefs + [Member(WORKER, i) for i in range(workers)]
    members += [Member(PS, i) for i in range(ps)] + [Member(EVALUATOR, 0)] * evaluators
    placed = list(zip(members, addresses, strict=True))
    by_role = {role: tuple(a for m, a in placed if m.role == role) for role in dict.fromkeys(m.role for m in members)}
    return Cluster(members[rank], by_role, SLURM)


def _addresses(environ: Mapping[str, str], nodes: list[str], per_node: list[int]) -> list[str]:
    """Returns one host:port per task."""
    tasks = sum(per_node)
    positions = _positions(environ, per_node)
    rank = _number(environ, "SLURM_PROCID")
    known = tuple(_number(environ, name, position) for name, position in zip(_POSITION, positions[rank], strict=True))
    if known != positions[rank]:
        message = (
            f"task {rank} is number {known[1]} on node {known[0]}, and not where the expected distribution puts it."
        )
        raise ConfigError([Problem(SLURM, "SLURM_NODEID", f"{message} Start with srun --distribution=block.")])
    reserved = _ports(environ.get("SLURM_STEP_RESV_PORTS", ""))
    if len(reserved) >= max(per_node):
        return [f"{nodes[node]}:{reserved[local]}" for node, local in positions]
    job = _number(environ, "SLURM_JOB_ID")
    step = environ["SLURM_STEP_ID"]
    # Every task has its own port, also on different nodes: two names may be one machine.
    span = min(tasks, _PORTS // 2)
    first = _FIRST_PORT + (job * 64 + (int(step) if _NUMBER.fullmatch(step) else 0) * span) % (_PORTS - span)
    return [f"{nodes[node]}:{first + number % span}" for number, (node, _) in enumerate(positions)]


def _positions(environ: Mapping[str, str], per_node: list[int]) -> list[tuple[int, int]]:
    """Returns the node of each task and its index there: node by node, or round-robin (``cyclic``)."""
    block = [(node, local) for node, count in enumerate(per_node) for local in range(count)]
    cyclic = re.match("cyclic", environ.get("SLURM_DISTRIBUTION", ""))
    return sorted(block, key=lambda position: position[1]) if cyclic else block


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not _NUMBER.fullmatch(text):
        raise ConfigError([Problem(SLURM, name, f"{text!r} is not a number." if text else "is not set.")])
    return int(text)


def _ports(text: str) -> list[int]:
    """Reads ``12000-12003`` or ``12000,12002``."""
    ports: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if match is None:
            return []
        ports += range(int(match[1]), int(match[2] or match[1]) + 1)
    return ports


def expand_counts(text: str) -> list[int]:
    """Reads ``2(x3),1`` as 2, 2, 2, 1."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None or int(match[2] or 1) > _MAX_TASKS:
            raise ConfigError([Problem(SLURM, "SLURM_STEP_TASKS_PER_NODE", f"{text!r} can't be read.")])
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodes(text: str) -> list[str]:
    """Reads ``node[01-03,7],login`` as node01, node02, node03, node7, login."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    names = [name for part in parts for name in _expand(part)] if ",".join(parts) == text else []
    if text and not 0 < len(names) <= _MAX_TASKS:
        raise _unreadable(text)
    return names


def _expand(name: str) -> list[str]:
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", name)
    if match is None:
        return [name]
    before, ranges, after = match.groups()
    middles: list[str] = []
    for part in ranges.split(","):
        bounds = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if bounds is None:
            raise _unreadable(name)
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        if not 0 <= last - first < _MAX_TASKS:
            raise _unreadable(name)
        middles += [f"{number:0{len(bounds[1])}d}" for number in range(first, last + 1)]
    rests = _expand(after)
    if len(middles) * len(rests) > _MAX_TASKS:
        raise _unreadable(name)
    return [before + middle + rest for middle in middles for rest in rests]


def _unreadable(text: str) -> ConfigError:
    return ConfigError([Problem(SLURM, "SLURM_STEP_NODELIST", f"{text[:80]!r} can't be read as a list of nodes.")])
