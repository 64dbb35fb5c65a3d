"""Finds the cluster that this process was started in."""

from __future__ import annotations

import os
from collections.abc import Mapping

from modelyard.cluster.roles import Cluster
from modelyard.cluster.slurm import from_slurm
from modelyard.cluster.tf_config import from_tf_config


def find_cluster(which: str = "auto", environ: Mapping[str, str] | None = None) -> Cluster:
    """The cluster in the environment: ``TF_CONFIG``, else SLURM's variables, else this process alone.

    Args:
        which: the option ``cluster``; "none" looks at nothing.
        environ: the environment variables.

    Raises:
        ConfigError: with what is wrong with them.
    """
    if which == "none":
        return Cluster()
    environ = os.environ if environ is None else environ
    return from_tf_config(environ) or from_slurm(environ) or Cluster()
