"""The cluster in the environment: from ``TF_CONFIG`` or from SLURM's variables.

TensorFlow's tools, Kubernetes operators and Vertex AI set ``TF_CONFIG``:

    {"cluster": {"chief": ["host:port"], "worker": ["host:port", ...], "ps": [...], "evaluator": [...]},
     "task": {"type": "worker", "index": 0}, "model_dir": "...", "environment": "cloud"}

``master`` is another word for chief. Without a ``task``, the index of this process comes from ``JOB_COMPLETION_INDEX``,
which Kubernetes sets in the pods of an Indexed Job. A ``task`` without an index takes it as the index in its role.

SLURM's ``srun`` sets variables for its tasks. Task 0 is the chief, or worker 0 where there are no parameter servers.
``MODELYARD_PS`` is the number of parameter servers, which are the last tasks. With ``MODELYARD_EVALUATOR=1``, the very
last task evaluates.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from modelyard.cluster.description import CHIEF, EVALUATOR, PS, ROLES, WORKER, Cluster, Member
from modelyard.errors import ConfigError, Problem, unknown

TF_CONFIG, JOB_INDEX = "TF_CONFIG", "JOB_COMPLETION_INDEX"
_MASTER = "master"
_ADDRESS = re.compile(r"(?:(?:[\w-]{1,63}\.)*[\w-]{1,63}\.?|\[[0-9a-fA-F:.]+(?:%\w+)?\]):(\d{1,5})", re.ASCII)
_ENVIRONMENTS = ("local", "cloud", "google")
Wrong = Callable[[str, str], None]
"""Records a problem: key, message."""

SLURM = "SLURM"
PS_COUNT, EVALUATOR_COUNT = "MODELYARD_PS", "MODELYARD_EVALUATOR"
_POSITION = ("SLURM_NODEID", "SLURM_LOCALID")
_NUMBER = re.compile(r"[0-9]{1,18}")
_MAX_TASKS = 100_000
_FIRST_PORT, _PORTS = 20000, 12000
"""Below the ports that Linux assigns by itself (32768 and up)."""


def find_cluster(which: str = "auto", environ: Mapping[str, str] | None = None) -> Cluster:
    """Returns the cluster in the environment: ``TF_CONFIG``, else SLURM's variables, else this process alone.

    Args:
        which: the option ``cluster``; "none" ignores the environment.
        environ: the environment variables.

    Raises:
        ConfigError: if the variables are malformed.
    """
    if which == "none":
        return Cluster()
    environ = os.environ if environ is None else environ
    return from_tf_config(environ) or from_slurm(environ) or Cluster()


# -- TF_CONFIG --------------------------------------------------------------------------------------------------------


def from_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that ``TF_CONFIG`` describes; None if it is not set.

    Raises:
        ConfigError: with every problem in it.
    """
    text = environ.get(TF_CONFIG, "").strip()
    if not text:
        return None
    problems: list[Problem] = []
    cluster = _parse(text, environ.get(JOB_INDEX), lambda key, text: problems.append(Problem(TF_CONFIG, key, text)))
    if problems:
        raise ConfigError(problems)
    return cluster


def _parse(text: str, job_index: str | None, wrong: Wrong) -> Cluster:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        wrong("", f"is not JSON: {error}. It begins with {text[:40]!r}.")
        return Cluster()
    if not isinstance(given, dict):
        wrong("", f"must be a JSON object, not {type(given).__name__}.")
        return Cluster()
    cluster = given.get("cluster")
    addresses = _read_addresses({} if cluster is None else cluster, wrong)
    me = _task(given, addresses, job_index, wrong)
    model_dir = given.get("model_dir") or None
    if model_dir is not None and not isinstance(model_dir, str):
        wrong("model_dir", "must be a path or a URL.")
    environment = given.get("environment") or "local"
    if environment not in _ENVIRONMENTS:
        wrong("environment", unknown("environment", str(environment), _ENVIRONMENTS))
    return Cluster(me, addresses, TF_CONFIG, model_dir, str(environment))


def _read_addresses(given: Any, wrong: Wrong) -> dict[str, tuple[str, ...]]:
    if not isinstance(given, dict):
        wrong("cluster", f"must map roles to lists of host:port, not be {type(given).__name__}.")
        return {}
    addresses: dict[str, tuple[str, ...]] = {}
    for name, hosts in given.items():
        role = CHIEF if name == _MASTER else name
        if role not in ROLES:
            wrong(f"cluster.{name}", unknown("role", str(name), (*ROLES, _MASTER)))
        elif role in addresses:
            wrong(f"cluster.{name}", "chief and master are the same; give one of them.")
        elif not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            wrong(f"cluster.{name}", "must be a list of host:port.")
        elif hosts:
            addresses[role] = tuple(hosts)
    _check_addresses(addresses, wrong)
    return addresses


def _check_addresses(addresses: dict[str, tuple[str, ...]], wrong: Wrong) -> None:
    seen: dict[str, str] = {}
    for role, hosts in addresses.items():
        for index, address in enumerate(hosts):
            key = f"cluster.{role}[{index}]"
            match = _ADDRESS.fullmatch(address)
            if match is None or not 0 < int(match[1]) < 65536:
                wrong(key, f"{address!r} is not host:port (or [IPv6]:port).")
            elif address in seen:
                wrong(key, f"{address} is also the address of {seen[address]}; every process needs its own.")
            seen.setdefault(address, key)
    for role in (CHIEF, EVALUATOR):
        if len(addresses.get(role, ())) > 1:
            wrong(f"cluster.{role}", f"lists {len(addresses[role])} processes; at most one {role} is supported.")
    if addresses and not addresses.get(CHIEF) and not addresses.get(WORKER):
        wrong("cluster", f"has {_counted(addresses)}, and none that trains; list a chief or workers.")
    elif addresses.get(PS):
        if not addresses.get(CHIEF):
            wrong("cluster.ps", "parameter servers need a chief that coordinates; list one.")
        if not addresses.get(WORKER):
            wrong("cluster.ps", "parameter servers need workers that train; list at least one.")


def _task(given: dict[str, Any], addresses: dict[str, tuple[str, ...]], job_index: str | None, wrong: Wrong) -> Member:
    task = given.get("task")
    if task in (None, {}) and job_index is not None and addresses:
        members = Cluster(addresses=addresses).members
        if _NUMBER.fullmatch(job_index) and int(job_index) < len(members):
            return members[int(job_index)]
        message = f"is missing, and {JOB_INDEX} is {job_index!r}, which is not the index of one of"
        wrong("task", f"{message} {_counted(addresses)}.")
        return Member(CHIEF, 0)
    task = {} if task is None else task
    if not isinstance(task, dict):
        wrong("task", 'must be an object such as {"type": "worker", "index": 0}.')
        return Member(CHIEF, 0)
    if not task:
        if addresses:
            wrong("task", f"is missing. It must name this process of the cluster ({_counted(addresses)}).")
        return Member(CHIEF, 0)
    role = CHIEF if task.get("type") == _MASTER else task.get("type")
    index = task.get("index", 0 if job_index is None else job_index)
    if isinstance(index, str) and _NUMBER.fullmatch(index):
        index = int(index)
    if role not in ROLES:
        wrong("task.type", unknown("role", str(role), (*ROLES, _MASTER)) if role else "is missing.")
        return Member(CHIEF, 0)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        wrong("task.index", f"{index!r} is not an integer of 0 or more.")
        return Member(role, 0)
    count = len(addresses.get(role, ()))
    if addresses and role == EVALUATOR and not count:  # the old Estimator did not list it
        return Member(role, 0)
    if not addresses and role in (CHIEF, WORKER) and index == 0:  # alone
        return Member(CHIEF, 0)
    if index >= count:
        message = f"there is no {role} {index}: the cluster has {_counted(addresses)}."
        wrong("task.index" if count else "task.type", message)
    return Member(role, index)


def _counted(addresses: dict[str, tuple[str, ...]]) -> str:
    return Cluster(addresses=addresses).listed() or "no processes"


# -- SLURM ------------------------------------------------------------------------------------------------------------


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
        message = f"{len(nodes)} nodes with {per_node} tasks do not add up to {tasks} tasks with this one as {rank}."
        raise _slurm_error("SLURM_STEP_NODELIST", message)
    addresses = _slurm_addresses(environ, nodes, per_node)
    ps, evaluators = (_number(environ, name, 0) for name in (PS_COUNT, EVALUATOR_COUNT))
    chiefs = 1 if ps else 0
    workers = tasks - chiefs - ps - evaluators
    if workers < 1 or evaluators > 1:
        message = f"with {PS_COUNT}={ps} and {EVALUATOR_COUNT}={evaluators}, {tasks} tasks leave {workers} to train."
        if evaluators > 1:
            raise _slurm_error(EVALUATOR_COUNT, f"{message} At most one evaluator is supported.")
        raise _slurm_error(PS_COUNT, f"{message} Request more tasks.")
    counts = {CHIEF: chiefs, WORKER: workers, PS: ps, EVALUATOR: evaluators}
    remaining = iter(addresses)
    by_role = {role: tuple(itertools.islice(remaining, counts[role])) for role in ROLES if counts[role]}
    return Cluster(Cluster(addresses=by_role).members[rank], by_role, SLURM)


def _slurm_addresses(environ: Mapping[str, str], nodes: list[str], per_node: list[int]) -> list[str]:
    """Returns one host:port per task."""
    tasks = sum(per_node)
    positions = [(node, local) for node, count in enumerate(per_node) for local in range(count)]
    if environ.get("SLURM_DISTRIBUTION", "").startswith("cyclic"):  # round-robin, not node by node
        positions.sort(key=lambda position: position[1])
    rank = _number(environ, "SLURM_PROCID")
    known = tuple(_number(environ, name, position) for name, position in zip(_POSITION, positions[rank], strict=True))
    if known != positions[rank]:
        raise _slurm_error(
            "SLURM_NODEID",
            f"task {rank} is number {known[1]} on node {known[0]}, and not where the expected distribution puts it. "
            "Start with srun --distribution=block.",
        )
    reserved = _expand_ranges(environ.get("SLURM_STEP_RESV_PORTS", ""))
    if len(reserved) >= max(per_node):
        return [f"{nodes[node]}:{reserved[local]}" for node, local in positions]
    job = _number(environ, "SLURM_JOB_ID")
    step = environ["SLURM_STEP_ID"]
    # Every task has its own port, also on different nodes: two names may be one machine.
    span = min(tasks, _PORTS // 2)
    first = _FIRST_PORT + (job * 64 + (int(step) if _NUMBER.fullmatch(step) else 0) * span) % (_PORTS - span)
    return [f"{nodes[node]}:{first + number % span}" for number, (node, _) in enumerate(positions)]


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not _NUMBER.fullmatch(text):
        raise _slurm_error(name, f"{text!r} is not a number." if text else "is not set.")
    return int(text)


def expand_counts(text: str) -> list[int]:
    """Reads ``2(x3),1`` as 2, 2, 2, 1."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None or int(match[2] or 1) > _MAX_TASKS:
            raise _slurm_error("SLURM_STEP_TASKS_PER_NODE", f"{text!r} can't be read.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodes(text: str) -> list[str]:
    """Reads ``node[01-03,7],login`` as node01, node02, node03, node7, login."""
    patterns = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    readable, names = ",".join(patterns) == text, list[str]()
    for pattern in patterns:
        parts = re.split(r"\[(.*?)\]", pattern)  # the ranges are at odd indices
        choices = [_expand_ranges(part) if index % 2 else [part] for index, part in enumerate(parts)]
        count = math.prod(map(len, choices))
        readable = readable and 0 < count <= _MAX_TASKS - len(names)
        if readable:
            names += ["".join(chosen) for chosen in itertools.product(*choices)]
    if not readable:
        raise _slurm_error("SLURM_STEP_NODELIST", f"{text[:80]!r} can't be read as a list of nodes.")
    return names


def _expand_ranges(text: str) -> list[str]:
    """Reads ``01-03,7`` as 01, 02, 03, 7; none if it can't be read."""
    numbers: list[str] = []
    for part in text.split(","):
        bounds = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", part)
        if bounds is None:
            return []
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        if not 0 <= last - first < _MAX_TASKS:
            return []
        numbers += [f"{number:0{len(bounds[1])}d}" for number in range(first, last + 1)]
    return numbers


def _slurm_error(variable: str, message: str) -> ConfigError:
    return ConfigError([Problem(SLURM, variable, message)])
