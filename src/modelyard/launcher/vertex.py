"""A run as a Vertex AI custom job: a pool of machines for each role. Vertex AI sets ``TF_CONFIG`` itself."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from modelyard.cluster.description import CHIEF, EVALUATOR, PS, WORKER
from modelyard.errors import COMMAND_LINE, ConfigError, Problem
from modelyard.launcher.job import ContainerResources, Job, Word, container_arguments, container_command
from modelyard.launcher.template import fill_yaml
from modelyard.storage import is_remote

TEMPLATE = "vertex.yaml"
NEEDED = ("POOLS",)


class VertexResources(ContainerResources):
    """The resources of a Vertex AI job."""

    region: Word = Field(description="region of the job, such as europe-west4")
    project: Word | None = Field(None, description="Google Cloud project (default: that of gcloud)")
    machine_type: Word = Field(
        "n1-standard-8", description="machine type of the processes that train, and of the evaluator"
    )
    ps_machine_type: Word | None = Field(
        None, description="machine type of chief and parameter servers (default: machine_type)"
    )
    accelerator: Word | None = Field(None, description="type of the GPUs, such as NVIDIA_TESLA_T4")
    disk_gb: int = Field(100, ge=10, le=64_000, description="disk size per machine")
    service_account: Word | None = Field(None, description="service account of the job")
    network: Word | None = Field(None, description="VPC network of the job")


def render(job: Job, resources: VertexResources, template: str, where: str) -> str:
    """Returns the spec of the job, as ``gcloud ai custom-jobs create --config`` reads it.

    Args:
        job: the job.
        resources: its resources.
        template: YAML with placeholders.
        where: the name of the template in messages.
    """
    problems = []
    if not is_remote(job.model_dir or "") and not (job.model_dir or "").startswith("/gcs/"):
        message = f"{job.model_dir!r} would be lost with the machine. Give a URL such as gs://bucket/runs/mine."
        problems.append(Problem(COMMAND_LINE, "model_dir", message))
    if bool(resources.gpus) != bool(resources.accelerator):
        key, other = ("accelerator", "gpus") if resources.gpus else ("gpus", "accelerator")
        problems.append(Problem("resources of vertex", key, f"must be given with {other}."))
    if problems:
        raise ConfigError(problems)
    values = {
        "POOLS": [_pool(job, resources, role, count) if count else {} for role, count in _counts(job)],
        "TIMEOUT": f"{resources.time}s" if resources.time else None,
        "SERVICE_ACCOUNT": resources.service_account,
        "NETWORK": resources.network,
    }
    return fill_yaml(template, values, NEEDED, where)


def submit_command(path: str, job: Job, resources: VertexResources) -> list[str]:
    """Returns the command that submits the spec."""
    words = ["gcloud", "ai", "custom-jobs", "create", f"--display-name={job.name}", f"--region={resources.region}"]
    return [*words, *([f"--project={resources.project}"] if resources.project else []), f"--config={path}"]


def _counts(job: Job) -> list[tuple[str, int]]:
    """Returns the pools. Their order gives their roles to Vertex AI, and the first is one process, its chief.

    Without parameter servers the chief trains too, so it is one of the workers.
    """
    workers = job.workers if job.ps else job.workers - 1
    pools = [(CHIEF, 1), (WORKER, workers), (PS, job.ps), (EVALUATOR, int(job.evaluator))]
    while not pools[-1][1]:
        pools.pop()
    return pools


def _pool(job: Job, resources: VertexResources, role: str, count: int) -> dict[str, Any]:
    computes = role in (WORKER, EVALUATOR) or (role == CHIEF and not job.ps)
    machine: dict[str, Any] = {"machineType": resources.machine_type}
    if not computes:
        machine["machineType"] = resources.ps_machine_type or resources.machine_type
    elif resources.gpus:
        machine |= {"acceleratorType": resources.accelerator, "acceleratorCount": resources.gpus}
    return {
        "machineSpec": machine,
        "replicaCount": count,
        "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": resources.disk_gb},
        "containerSpec": {
            "imageUri": resources.image,
            "command": container_command(resources),
            "args": container_arguments(job, resources),
        },
    }
