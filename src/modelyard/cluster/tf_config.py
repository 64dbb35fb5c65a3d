"""`TF_CONFIG`: a cluster as TensorFlow's tools, Kubernetes operators and Vertex AI describe it.

    {"cluster": {"chief": ["host:port"], "worker": ["host:port", ...], "ps": [...], "evaluator": [...]},
     "task": {"type": "worker", "index": 0}, "model_dir": "...", "environment": "cloud"}

``master`` is another word for chief. Without a ``task``, the index of this process comes from ``JOB_COMPLETION_INDEX``,
which Kubernetes sets in the pods of an Indexed Job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from modelyard.cluster.description import CHIEF, EVALUATOR, PS, ROLES, WORKER, Cluster, Member
from modelyard.errors import ConfigError, Problem, unknown

TF_CONFIG, JOB_INDEX = "TF_CONFIG", "JOB_COMPLETION_INDEX"
_MASTER = "master"
_NUMBER = re.compile(r"[0-9]{1,9}")
_ADDRESS = re.compile(r"(?:(?:[\w-]{1,63}\.)*[\w-]{1,63}\.?|\[[0-9a-fA-F:.]+(?:%\w+)?\]):(\d{1,5})", re.ASCII)
_ENVIRONMENTS = ("local", "cloud", "google")


def from_tf_config(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that ``TF_CONFIG`` describes; None if it is not set.

    Raises:
        ConfigError: with every problem in it.
    """
    text = environ.get(TF_CONFIG, "").strip()
    if not text:
        return None
    problems: list[Problem] = []
    cluster = _read(text, environ.get(JOB_INDEX), problems)
    if problems:
        raise ConfigError(problems)
    return cluster


def _read(text: str, job_index: str | None, problems: list[Problem]) -> Cluster:
    def wrong(key: str, message: str) -> None:
        problems.append(Problem(TF_CONFIG, key, message))

    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        wrong("", f"is not JSON: {error}. It begins with {text[:40]!r}.")
        return Cluster()
    if not isinstance(given, dict):
        wrong("", f"must be a JSON object, not {type(given).__name__}.")
        return Cluster()
    cluster = given.get("cluster")
    addresses = _addresses({} if cluster is None else cluster, wrong)
    me = _task(given, addresses, job_index, wrong)
    model_dir = given.get("model_dir") or None
    if model_dir is not None and not isinstance(model_dir, str):
        wrong("model_dir", "must be a path or a URL.")
    environment = given.get("environment") or "local"
    if environment not in _ENVIRONMENTS:
        wrong("environment", unknown("environment", str(environment), _ENVIRONMENTS))
    return Cluster(me, addresses, TF_CONFIG, model_dir, str(environment))


def _addresses(given: Any, wrong: Any) -> dict[str, tuple[str, ...]]:
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
    check_addresses(addresses, wrong)
    return addresses


def check_addresses(addresses: dict[str, tuple[str, ...]], wrong: Any) -> None:
    """Calls ``wrong(key, message)`` for every problem."""
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
    for role, most in ((CHIEF, 1), (EVALUATOR, 1)):
        if len(addresses.get(role, ())) > most:
            wrong(f"cluster.{role}", f"lists {len(addresses[role])} processes; at most one {role} is supported.")
    if addresses and not addresses.get(CHIEF) and not addresses.get(WORKER):
        wrong("cluster", f"has {_counted(addresses)}, and none that trains; list a chief or workers.")
    elif addresses.get(PS):
        if not addresses.get(CHIEF):
            wrong("cluster.ps", "parameter servers need a chief that coordinates; list one.")
        if not addresses.get(WORKER):
            wrong("cluster.ps", "parameter servers need workers that train; list at least one.")


def _task(given: dict[str, Any], addresses: dict[str, tuple[str, ...]], job_index: str | None, wrong: Any) -> Member:
    task = given.get("task")
    if task in (None, {}) and job_index is not None and addresses:
        return _numbered(addresses, job_index, wrong)
    task = {} if task is None else task
    if not isinstance(task, dict):
        wrong("task", 'must be an object such as {"type": "worker", "index": 0}.')
        return Member(CHIEF, 0)
    if not task:
        if addresses:
            wrong("task", f"is missing. It must name this process of the cluster ({_counted(addresses)}).")
        return Member(CHIEF, 0)
    role = CHIEF if task.get("type") == _MASTER else task.get("type")
    index = task.get("index", 0)
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


def _numbered(addresses: dict[str, tuple[str, ...]], text: str, wrong: Any) -> Member:
    """Returns the process with an index, counted over all roles in order."""
    everyone = [Member(role, i) for role in ROLES for i in range(len(addresses.get(role, ())))]
    if _NUMBER.fullmatch(text) and int(text) < len(everyone):
        return everyone[int(text)]
    wrong("task", f"is missing, and {JOB_INDEX} is {text!r}, which is not the index of one of {_counted(addresses)}.")
    return Member(CHIEF, 0)


def _counted(addresses: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{len(hosts)} {role}" for role, hosts in addresses.items()) or "no processes"
