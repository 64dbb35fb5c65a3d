"""The secret that all processes of a run have, so that no other program can join it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from modelyard.cluster.description import Cluster
from modelyard.errors import ConfigError, Problem

SECRET, SECRET_FILE = "MODELYARD_CLUSTER_SECRET", "MODELYARD_CLUSTER_SECRET_FILE"
_LEAST, _MOST = 16, 4096
"""Bounds of its length. Someone who pretends to be the coordinator can try short ones without the run."""


def new_secret() -> str:
    """Returns a new secret."""
    return secrets.token_hex(32)


def find_secret(cluster: Cluster, insecure: bool, environ: Mapping[str, str] | None = None) -> bytes:
    """Returns the secret in the environment; empty if there is none and the cluster may do without.

    Args:
        cluster: the processes of the run.
        insecure: whether it may do without, although processes are on other machines.
        environ: the environment variables.

    Raises:
        ConfigError: if it is missing, too short, or its file can't be read.
    """
    environ = os.environ if environ is None else environ
    given, file = environ.get(SECRET, "").strip().encode(), environ.get(SECRET_FILE, "").strip()
    name = SECRET if given or not file else SECRET_FILE
    if not given and file:
        try:
            with open(Path(file).expanduser(), "rb") as opened:
                given = opened.read(_MOST + 1).strip()
        except OSError as error:
            raise _wrong(name, f"{file!r} can't be read: {error.strerror or error}.") from error
        if not given:
            raise _wrong(name, f"{file!r} is empty.")
    if not given and not cluster.is_local and not insecure:
        raise _wrong(
            name,
            "is not set. This cluster has other machines, and without a secret, whoever reaches its ports can join the "
            "run. Make one (openssl rand -hex 32), and set it in the environment of every process, or the path of a "
            f"file with it as {SECRET_FILE}. --insecure_cluster does without, on a network that you trust.",
        )
    if given and not _LEAST <= len(given) <= _MOST:
        message = f"has {len(given)} characters; it needs {_LEAST} to {_MOST}. Make a new one: openssl rand -hex 32."
        raise _wrong(name, message.replace(f"{_MOST + 1} ", f"more than {_MOST} "))
    return given


def _wrong(name: str, message: str) -> ConfigError:
    return ConfigError([Problem("environment", name, message)])
