"""Checks that the processes of a run agree: on the config, versions, code and the run folder."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.cluster.description import EVALUATOR, PARAMETER_SERVERS, Cluster
from modelyard.config import Config
from modelyard.config.backend import choose_engine
from modelyard.config.yaml_file import inline
from modelyard.distributed.coordinator import Coordinator
from modelyard.distributed.follower import Follower
from modelyard.engine.catalog import parameter_server_problems
from modelyard.errors import ClusterError, ConfigError, Problem
from modelyard.loop.hooks import stopping_hook_problems
from modelyard.run.directory import RunDirectory
from modelyard.run.manifest import plugin_digests
from modelyard.system.files import write_text
from modelyard.system.machine import versions
from modelyard.system.network import check_free

log = logging.getLogger("modelyard")
_LOCAL_OPTIONS = (
    "model_dir", "runs_dir", "data_dir", "cache_dir", "gpu_id", "threads", "input_threads", "input_workers", "plugins",
    "config_file", "config_set", "hyperparameter_file", "hyperparameter_set",
)  # fmt: skip
"""Options that may differ between machines. Plugins are compared by their contents."""
_FOLDER_SECONDS = 35.0
"""How long a file may take to appear on other machines, where the file system caches its folders."""


def config_in_cluster(config: Config, cluster: Cluster, engine: str | None = None) -> Config:
    """Returns the config of this process, with the run folder that its cluster names.

    Args:
        config: the config.
        cluster: all processes of the run.
        engine: the engine that they use; by default what this machine would choose.

    Raises:
        ConfigError: if the two contradict each other, or the config is not supported in a cluster.
    """
    problems = []
    named = cluster.model_dir
    if named and config.model_dir and not storage.is_same(named, config.model_dir):
        message = f"is {config.model_dir!r} here and {named!r} in {cluster.source}. Give it once, or the same in both."
        problems.append(Problem(config.origin("model_dir"), "model_dir", message))
    elif named and not config.model_dir:
        config = config.model_copy(update={"model_dir": named})
    if not cluster.is_alone:
        if not config.model_dir:
            message = f"is missing: the {len(cluster.members)} processes of this cluster ({cluster.source}) need one"
            problems.append(Problem("config", "model_dir", f"{message} run folder that all of them can reach."))
        if config.cpu_devices > 1:
            message = f"is {config.cpu_devices}; in a cluster every process is one CPU device. Start more processes."
            problems.append(Problem(config.origin("cpu_devices"), "cpu_devices", message))
        engine = engine or choose_engine(config.engine)[0]
        if engine != "tensorflow" and cluster.mode != "synchronous":
            message = f"is {engine}; only TensorFlow supports parameter servers. Leave 'ps' out of {cluster.source}."
            problems.append(Problem(config.origin("engine"), "engine", message))
        if cluster.mode == PARAMETER_SERVERS:
            problems += parameter_server_problems(config)
    if cluster.has_evaluator or cluster.me.role == EVALUATOR:
        problems += stopping_hook_problems(config)
    if problems:
        raise ConfigError(problems)
    return config


def form_group(config: Config, cluster: Cluster, evaluates: bool, secret: bytes) -> Coordinator | Follower:
    """Returns the group of this process, which coordinates or follows.

    Args:
        config: the resolved config.
        cluster: all processes of the run.
        evaluates: whether the run is evaluated.
        secret: what all of them know; empty for none.

    Raises:
        ClusterError: if its address can't be used.
    """
    start_info = _start_info(config, cluster, evaluates)
    timeouts = config.start_timeout_secs, config.peer_timeout_secs
    if cluster.is_coordinator:
        return Coordinator(cluster, start_info, _differences, *timeouts, secret)
    if cluster.me.role != EVALUATOR:
        check_free(cluster.address(cluster.me))
    return Follower(cluster, start_info, *timeouts, secret)


def _start_info(config: Config, cluster: Cluster, evaluates: bool) -> dict[str, Any]:
    """Returns what all processes of a run must have in common."""
    plugins = {Path(name).name: digest for name, digest in plugin_digests(config).items()}
    return {
        "options": {key: value for key, value in config.flat().items() if key not in _LOCAL_OPTIONS},
        "versions": versions(),
        "code": {"modelyard's source": _source_digest(), **plugins},
        "cluster": {role: list(hosts) for role, hosts in cluster.addresses.items() if role != EVALUATOR},
        "evaluates": evaluates,
        # Each process chooses for its own machine; the evaluator's may differ from that of the processes that train.
        "engine": None if cluster.me.role == EVALUATOR else choose_engine(config.engine)[0],
    }


def _differences(coordinator: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Returns how a process differs from the coordinator, one line per difference."""
    lines = []
    for group, word in (("options", ""), ("versions", "version of "), ("cluster", "addresses of "), ("code", "")):
        mine, theirs = coordinator[group], other.get(group)
        if not isinstance(theirs, dict):
            return ["it uses another protocol; are the versions of Modelyard the same?"]
        for key in sorted(set(mine) | set(theirs)):
            if mine.get(key) != theirs.get(key):
                lines.append(
                    f"{word}{key}: {inline(theirs.get(key))}, where the coordinator has {inline(mine.get(key))}"
                )
    engines = coordinator["engine"], other.get("engine")
    if None not in engines and engines[0] != engines[1]:
        lines.append(f"engine {engines[1]}, where the coordinator has {engines[0]}; choose one with --engine")
    if coordinator["evaluates"] != other.get("evaluates"):
        lines.append("one of them was started with `train`, the other with `train-and-evaluate`")
    return lines


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """Returns the digest of all Python files of this package: all processes must run the same code."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# -- one run folder for all -----------------------------------------------------------------------------------------


def mark_folder(directory: RunDirectory) -> str | None:
    """Writes a token to the run folder for the others to find; returns None for object stores, which all can reach."""
    if directory.mirror is not None:
        return None
    token = secrets.token_hex(16)
    write_text(directory.mark, token)
    return token


def check_folder(directory: RunDirectory, token: str | None, coordinator: str) -> None:
    """Checks that this process sees the coordinator's run folder.

    Raises:
        ClusterError: if it is another folder of the same name.
    """
    deadline = time.monotonic() + _FOLDER_SECONDS
    while token is not None:
        try:
            if directory.mark.read_text(encoding="utf-8") == token:
                return
        except (OSError, UnicodeDecodeError):
            pass
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{directory.path.absolute()} is not the folder that {coordinator} writes to. All processes of a run "
                "need one folder that they share (NFS, a volume), or a URL (s3://, gs://) as --model_dir: all of "
                "them resume from what is saved there."
            )
        time.sleep(0.1)
