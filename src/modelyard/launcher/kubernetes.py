"""A run as a Kubernetes Indexed Job, with a headless Service that gives its pods stable names."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import Field

from modelyard.errors import COMMAND_LINE, ConfigError, Problem
from modelyard.launcher.job import ContainerResources, Job, Memory, Word, container_arguments, container_command
from modelyard.launcher.template import fill_yaml
from modelyard.storage import is_remote

TEMPLATE = "kubernetes.yaml"
NEEDED = ("ARGS", "COMMAND", "ENV", "NAME", "PROCESSES", "PORT")
DEFAULT_MOUNT = "/runs"
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Folder = Annotated[str, Field(pattern=r"^/[A-Za-z0-9_./-]+$", max_length=500)]


class KubernetesResources(ContainerResources):
    """The resources of a Kubernetes job."""

    namespace: Label | None = Field(None, description="namespace of the job (default: that of kubectl's context)")
    cpus: float | None = Field(None, gt=0, le=4096, description="cores per process")
    memory: Memory | None = Field(None, description="memory per process, such as 16Gi")
    gpu_resource: Word = Field("nvidia.com/gpu", description="the cluster's name for a GPU")
    claim: Label | None = Field(None, description="PersistentVolumeClaim (ReadWriteMany) for the run folders")
    mount: Folder = Field(DEFAULT_MOUNT, description="where the claim is mounted")
    data_claim: Label | None = Field(None, description="PersistentVolumeClaim with data, mounted read-only")
    data_mount: Folder = Field("/data", description="where the data is mounted")
    service_account: Label | None = Field(None, description="service account of the pods, also for cloud storage")
    secret: Label | None = Field(None, description="Secret whose entries become environment variables")
    pull_secret: Label | None = Field(None, description="Secret for the registry of the image")
    node_selector: dict[Word, Word] = Field({}, description="labels that the machines must have")
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        {}, description="environment variables"
    )
    user: int = Field(1000, ge=1, le=2**31 - 1, description="user and group id of the processes")
    port: int = Field(2222, ge=1024, le=65535, description="port on which each process listens")
    grace_secs: int = Field(120, ge=1, le=65535, description="how long a pod may take to save when it is evicted")


def render(job: Job, resources: KubernetesResources, template: str, where: str) -> str:
    """Returns the manifest.

    Args:
        job: the job.
        resources: its resources.
        template: YAML with placeholders.
        where: the name of the template in messages.
    """
    _check_model_dir(job, resources)
    name = job_name(job)
    env = {"TF_CONFIG": json.dumps({"cluster": addresses(job, resources)}), "HOME": "/tmp", "PYTHONUNBUFFERED": "1"}
    gpus = {resources.gpu_resource: str(resources.gpus)} if resources.gpus else {}
    memory = {"memory": _quantity(resources.memory)} if resources.memory else {}
    volumes, mounts = _volumes(resources)
    values: dict[str, Any] = {
        "NAME": name,
        "NAMESPACE": resources.namespace,
        "LABELS": {"app.kubernetes.io/name": "modelyard", "app.kubernetes.io/instance": name},
        "PORT": resources.port,
        "PROCESSES": job.processes,
        "TIME_SECS": resources.time,
        "MAX_RESTARTS": resources.max_restarts,
        "GRACE_SECS": resources.grace_secs,
        "SERVICE_ACCOUNT": resources.service_account,
        "MOUNT_TOKEN": resources.service_account is not None,
        "PULL_SECRETS": [{"name": resources.pull_secret}] if resources.pull_secret else [],
        "NODE_SELECTOR": dict(resources.node_selector),
        "USER": resources.user,
        "IMAGE": resources.image,
        "COMMAND": [_literal(word) for word in container_command(resources)],
        "ARGS": [_literal(word) for word in container_arguments(job, resources)],
        "ENV": [{"name": key, "value": _literal(value)} for key, value in (env | resources.env).items()],
        "ENV_FROM": [{"secretRef": {"name": resources.secret}}] if resources.secret else [],
        "REQUESTS": ({"cpu": f"{resources.cpus:g}"} if resources.cpus else {}) | memory,
        "LIMITS": memory | gpus,
        "MOUNTS": mounts,
        "VOLUMES": volumes,
    }
    return fill_yaml(template, values, NEEDED, where)


def submit_command(path: str, job: Job, resources: KubernetesResources) -> list[str]:
    """Returns the command that submits the manifest."""
    return ["kubectl", "create", "-f", path]


def job_name(job: Job) -> str:
    """Returns the name of the job as a valid host name, with room for the index of a pod."""
    text = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    return (text if text[:1].isalpha() else f"run-{text}")[:57].rstrip(
        "-"
    )  # the name of a Service begins with a letter


def addresses(job: Job, resources: KubernetesResources) -> dict[str, list[str]]:
    """Returns host:port of every process, by role, in the order of their indexes."""
    name = job_name(job)
    hosts = (f"{name}-{index}.{name}:{resources.port}" for index in range(job.processes))
    return {role: [next(hosts) for _ in range(count)] for role, count in job.roles.items()}


def _literal(text: str) -> str:
    """Escapes a text: Kubernetes replaces $(NAME) in arguments and variables; $$ is a dollar sign."""
    return text.replace("$", "$$")


def _quantity(memory: str) -> str:
    return memory if memory.endswith("i") or memory[-1] != "K" else memory[:-1] + "k"


def _volumes(resources: KubernetesResources) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []

    def add(name: str, volume: dict[str, Any], path: str, **more: Any) -> None:
        volumes.append({"name": name, **volume})
        mounts.append({"name": name, "mountPath": path, **more})

    if resources.claim:
        add("runs", {"persistentVolumeClaim": {"claimName": resources.claim}}, resources.mount)
    if resources.data_claim:
        claim = {"claimName": resources.data_claim, "readOnly": True}
        add("data", {"persistentVolumeClaim": claim}, resources.data_mount, readOnly=True)
    if resources.gpus > 1:  # NCCL communicates through it; a container has 64 MB
        add("shared-memory", {"emptyDir": {"medium": "Memory"}}, "/dev/shm")
    return volumes, mounts


def _check_model_dir(job: Job, resources: KubernetesResources) -> None:
    folder = job.model_dir or ""
    mount = resources.mount.rstrip("/")
    inside = resources.claim is not None and folder.startswith(f"{mount}/") and ".." not in folder.split("/")
    if is_remote(folder) or inside:
        return
    message = f"{folder!r} is inside the pod and would be lost with it. Give a URL such as gs://bucket/runs/mine"
    message += (
        f", or a folder in {mount}, where the claim is mounted."
        if resources.claim
        else ", or set claim in --resources."
    )
    raise ConfigError([Problem(COMMAND_LINE, "model_dir", message)])
