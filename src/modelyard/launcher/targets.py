"""The targets of a job: SLURM, Kubernetes and Vertex AI. Each has its resources, and writes its script or manifest."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from modelyard.cluster.description import CHIEF, EVALUATOR, PS, WORKER
from modelyard.cluster.secret import SECRET, SECRET_FILE, new_secret
from modelyard.config.calls import validation_message
from modelyard.config.yaml_file import Value, config_path, read_flat
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, nearest
from modelyard.launcher.job import Job, option
from modelyard.launcher.template import fill_text, fill_yaml, shipped_template, without_repeated_documents
from modelyard.storage import is_remote

_UNITS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1}


# -- types of resources ---------------------------------------------------------------------------------------------


def _seconds(value: Any) -> int:
    """Reads ``1d12h``, ``90m``, or SLURM's form: ``1-12:00:00``, ``12:00:00``."""
    hint = "write it as 12h, 90m, 1d12h or '1-12:00:00'"
    if not isinstance(value, str):  # YAML reads 12:00:00 as a number
        raise ValueError(f"{value!r} has no unit; {hint} (with the quotes).")
    text = value.strip().lower()
    total = 0
    if clock := re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5]?[0-9]):([0-5]?[0-9])", text):
        total = sum(int(part or 0) * unit for part, unit in zip(clock.groups(), (86400, 3600, 60, 1), strict=True))
    elif re.fullmatch(r"(?:[0-9]{1,6}\s*(?:min|[dhms])\s*)+", text):
        total = sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9]+)\s*(min|[dhms])", text))
    if total <= 0:
        raise ValueError(f"{value!r} is not a duration; {hint}.")
    return total


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Seconds = Annotated[int, BeforeValidator(_seconds)]
Word = Annotated[str, BeforeValidator(_text), Field(pattern=r"^[A-Za-z0-9_.,:/@+=-]+$", max_length=500)]
"""Names, paths and URLs, without characters that are special to a shell, YAML or SLURM."""
Memory = Annotated[str, BeforeValidator(_text), Field(pattern=r"^[1-9][0-9]{0,8}(K|M|G|T|Ki|Mi|Gi|Ti)$")]
"""``16G`` or ``16Gi``."""
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Folder = Annotated[str, Field(pattern=r"^/[A-Za-z0-9_./-]+$", max_length=500)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Target(BaseModel):
    """A target, with the resources that a job requests from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: ClassVar[str]
    template: ClassVar[str]
    """The template that comes with Modelyard."""
    cells_template: ClassVar[str | None] = None
    """That for the cells of a matrix, if it can run them."""
    ending: ClassVar[str]
    """The ending of the file that is written."""
    has_secret: ClassVar[bool]
    """Whether the file has the secret of the run in it, so that only its owner may read it."""

    gpus: int = Field(0, ge=0, le=64, description="GPUs per process")
    time: Seconds | None = Field(None, description="how long the job may run, such as 12h")
    max_restarts: int = Field(10, ge=0, le=1000, description="how often crashed processes are restarted")
    parallel: int | None = Field(None, ge=1, description="cells of a matrix that run at a time (default: all that fit)")

    @property
    def runs_folder(self) -> str | None:
        """The folder for runs without a model_dir, if all processes can reach it."""
        return None

    @property
    def sees_this_folder(self) -> bool:
        """Whether the processes start in this folder, with this Python."""
        return False

    def render(self, job: Job, template: str, where: str) -> str:
        """Fills a template and returns the script or manifest of a job. Messages call the template ``where``."""
        raise NotImplementedError

    def submit_command(self, path: str, job: Job) -> list[str]:
        """Returns the command that submits the script or manifest at ``path``."""
        raise NotImplementedError


def deserves_gpu(role: str, job: Job) -> bool:
    """Returns whether a role computes: a chief with parameter servers only coordinates, and servers hold variables."""
    return not job.ps or role in (WORKER, EVALUATOR)


def read_resources(
    kind: type[Target], file: str | Path | Mapping[str, Any] | None, options: Mapping[str, Any]
) -> Target:
    """Reads the resources in a YAML file of ``key: value`` lines, or in a mapping. Options take precedence.

    Raises:
        ConfigError: with every problem.
    """
    problems: list[Problem] = []
    values: dict[str, Value] = {}
    if isinstance(file, Mapping):
        values = {key: Value(value, "resources") for key, value in file.items()}
    elif file is not None:
        values = read_flat(config_path(str(file)), problems)
    values |= {key: Value(value, COMMAND_LINE) for key, value in options.items() if value is not None}
    known = kind.model_fields
    for key, value in values.items():
        if key not in known:
            near = nearest(key, known)
            hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Known: {', '.join(sorted(known))}."
            problems.append(Problem(value.where, key, f"{kind.name} has no such resource. {hint}"))
    plain = {key: value.value for key, value in values.items() if key in known and value.value is not None}
    try:
        target = kind(**plain)
    except ValidationError as error:
        for detail in error.errors():
            key = str(detail["loc"][0]) if detail["loc"] else ""
            where = values[key].where if key in values else f"resources of {kind.name}"
            if detail["type"] == "missing":
                text = "must be given, as an option or in --resources FILE."
            elif detail["type"] == "string_pattern_mismatch":
                is_memory = "Ki" in detail["ctx"]["pattern"]
                text = f"{plain[key]!r} {'is not a size such as 16G' if is_memory else 'contains invalid characters'}."
            else:
                text = validation_message(detail, plain.get(key))
            problems.append(Problem(where, key, text))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return target


# -- SLURM ----------------------------------------------------------------------------------------------------------


class Slurm(Target):
    """A batch script: ``srun`` starts the processes, the script restarts them and requeues itself."""

    name = "slurm"
    template = cells_template = "slurm.sh"
    ending = ".slurm.sh"
    has_secret = False  # the script makes one

    nodes: int | None = Field(None, ge=1, le=100_000, description="number of machines (default: as few as SLURM needs)")
    tasks_per_node: int | None = Field(None, ge=1, le=4096, description="processes per machine, at most")
    cpus: int | None = Field(None, ge=1, le=4096, description="cores per process")
    memory: Memory | None = Field(None, description="memory per machine, such as 64G")
    partition: Word | None = Field(None, description="partition (queue)")
    account: Word | None = Field(None, description="account to charge")
    qos: Word | None = Field(None, description="quality of service")
    constraint: Word | None = Field(None, description="features that the machines must have")
    grace_secs: int = Field(120, ge=10, le=65535, description="how long before its time limit the run saves")
    python: Word | None = Field(None, description="Python on the machines (default: this one)")
    workdir: str | None = Field(
        None, pattern=r"^[^\x00]+$", description="working directory of the processes (default: this folder)"
    )

    @property
    def runs_folder(self) -> str:
        """The folder for runs without a model_dir."""
        return f"{self.workdir or Path.cwd()}/runs"

    @property
    def sees_this_folder(self) -> bool:
        """Whether the processes start in this folder, with this Python."""
        return self.python is None and self.workdir is None

    def render(self, job: Job, template: str, where: str) -> str:
        """Returns the batch script."""
        groups = self._groups(job)
        only = ' --only "$SLURM_ARRAY_TASK_ID"' if job.cells else ""
        values = {
            "DIRECTIVES": "\n".join(f"#SBATCH {line}" for line in self._directives(job, groups)),
            "GRACE_SECS": str(self.grace_secs),
            "MAX_RESTARTS": str(self.max_restarts),
            "WORKDIR": shlex.quote(self.workdir or str(Path.cwd())),
            "PS": str(job.ps),
            "EVALUATOR": str(int(job.evaluator)),
            "GROUPS": f"--het-group=0-{len(groups) - 1} " if len(groups) > 1 else "",
            "COMMAND": shlex.join([self.python or sys.executable, "-m", "modelyard", *job.words]) + only,
            "NAME": shlex.quote(job.name),
        }
        needed = ("COMMAND", "DIRECTIVES", "PS", "EVALUATOR", *(("GROUPS",) if len(groups) > 1 else ()))
        return fill_text(template, values, needed, where)

    def submit_command(self, path: str, job: Job) -> list[str]:
        """Returns the command that submits the script."""
        return ["sbatch", path]

    def _groups(self, job: Job) -> list[dict[str, Any]]:
        """Returns the options that differ between groups of processes, in the order of their ranks.

        All tasks of a job are equal. Where only some roles get GPUs, the job is a heterogeneous one: each role is a
        component with machines of its own.
        """
        where = {"nodes": self.nodes, "ntasks-per-node": self.tasks_per_node}
        if not (self.gpus and job.ps):
            return [{"ntasks": job.processes, **where, "gpus-per-task": self.gpus or None}]
        gpus = {role: {"gpus-per-task": self.gpus} if deserves_gpu(role, job) else {} for role in job.roles}
        return [
            {"ntasks": count, **(where if role == WORKER else {}), **gpus[role]} for role, count in job.roles.items()
        ]

    def _directives(self, job: Job, groups: list[dict[str, Any]]) -> list[str]:
        """Returns the options of sbatch. Their values need no quotes, and have no % that SLURM would replace."""
        limit = "" if self.parallel is None else f"%{self.parallel}"
        of_array = {"array": f"0-{job.cells - 1}{limit}"} if job.cells else {}
        of_job = {"job-name": job.name, "output": f"{job.name}-{'%A_%a' if job.cells else '%j'}.log", **of_array}
        of_all = {
            "cpus-per-task": self.cpus,
            "mem": self.memory and self.memory.removesuffix("i"),  # SLURM's G is 1024 M
            "time": self.time and _clock(self.time),
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
        }
        lines: list[str] = []
        for number, group in enumerate(groups):
            given = (of_job if number == 0 else {}) | group | of_all
            lines += ["hetjob"] if number else []
            lines += [f"--{key}={value}" for key, value in given.items() if value is not None]
        return lines


def _clock(seconds: int) -> str:
    minutes = -(-seconds // 60)  # SLURM counts in minutes
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


# -- containers -----------------------------------------------------------------------------------------------------


class ContainerTarget(Target):
    """A target that runs the processes in containers."""

    image: Word = Field(description="the container image, with modelyard and your code in it")
    start_timeout_secs: int = Field(
        1800, ge=1, le=10**6, description="how long processes wait for each other: machines and images start slowly"
    )

    @property
    def placeholders(self) -> dict[str, Any]:
        """The resources, as placeholders of a template."""
        return {key.upper(): value for key, value in self.model_dump().items()}

    @property
    def command(self) -> list[str]:
        """A command that runs its arguments, and again after a lost peer: that is quicker than a new container."""
        values = {"MAX_RESTARTS": str(self.max_restarts)}
        return ["sh", "-c", fill_text(shipped_template("container.sh"), values, values, "container.sh"), "restarting"]

    def arguments(self, job: Job) -> list[str]:
        """Returns the command of each process, with a longer start timeout unless the user sets one."""
        words = list(job.words)
        if option(words, "start_timeout_secs") is None:
            words += ["--start_timeout_secs", str(self.start_timeout_secs)]
        return ["modelyard", *words]


class Kubernetes(ContainerTarget):
    """An Indexed Job, with a headless Service that gives its pods stable names.

    All pods of a Job are equal. Where only some roles get GPUs, each role is a Job of its own.
    """

    name = "kubernetes"
    template = "kubernetes.yaml"
    cells_template = "kubernetes_cells.yaml"
    ending = ".kubernetes.yaml"
    has_secret = True

    namespace: Label | None = Field(None, description="namespace of the job (default: that of kubectl's context)")
    cpus: float | None = Field(None, gt=0, le=4096, description="cores per process")
    memory: Memory | None = Field(None, description="memory per process, such as 16Gi")
    gpu_resource: Word = Field("nvidia.com/gpu", description="the cluster's name for a GPU")
    claim: Label | None = Field(None, description="PersistentVolumeClaim (ReadWriteMany) for the run folders")
    mount: Folder = Field("/runs", description="where the claim is mounted")
    data_claim: Label | None = Field(None, description="PersistentVolumeClaim with data, mounted read-only")
    data_mount: Folder = Field("/data", description="where the data is mounted")
    service_account: Label | None = Field(None, description="service account of the pods, also for cloud storage")
    secret: Label | None = Field(None, description="Secret whose entries become environment variables")
    pull_secret: Label | None = Field(None, description="Secret for the registry of the image")
    node_selector: dict[Word, Word] = Field({}, description="labels that the machines must have")
    env: dict[Variable, str] = Field({}, description="environment variables")
    user: int = Field(1000, ge=1, le=2**31 - 1, description="user and group id of the processes")
    port: int = Field(2222, ge=1024, le=65535, description="port on which each process listens")
    grace_secs: int = Field(120, ge=1, le=65535, description="how long a pod may take to save when it is evicted")

    @property
    def runs_folder(self) -> str | None:
        """The folder of the claim, if there is one."""
        return self.mount.rstrip("/") if self.claim else None

    def render(self, job: Job, template: str, where: str) -> str:
        """Returns the manifest."""
        self._check_model_dir(job)
        if job.cells:
            own = _host_name(job.name)
            needed = ["ARGS", "COMMAND", "ENV", "JOB", "CELLS"]
            return fill_yaml(template, self._values_of_cells(job, own), needed, where)
        if not (self.gpus and job.ps):
            name = _host_name(job.name)
            jobs = {"": (name, job.processes)}
            hosts = (f"{name}-{index}.{name}:{self.port}" for index in range(job.processes))
            addresses = {role: [next(hosts) for _ in range(count)] for role, count in job.roles.items()}
        else:
            name = _host_name(job.name, room=16)
            jobs = {role: (f"{name}-{role}", count) for role, count in job.roles.items()}
            addresses = {
                role: [f"{own}-{index}.{name}:{self.port}" for index in range(count)]
                for role, (own, count) in jobs.items()
            }
        needed = ["ARGS", "CLUSTER_SECRET", "COMMAND", "ENV", "NAME", "PROCESSES", "PORT"]
        needed += ["JOB"] if len(jobs) > 1 else []
        shared = {"NAME": name, "CLUSTER_SECRET": new_secret()}
        texts = [
            fill_yaml(template, shared | self._values(job, name, role, own, count, addresses), needed, where)
            for role, (own, count) in jobs.items()
        ]
        return without_repeated_documents(texts)

    def _values(
        self, job: Job, name: str, role: str, own: str, count: int, addresses: dict[str, list[str]]
    ) -> dict[str, Any]:
        """Returns the values for a Job called ``own``: of one role, or of all if it is empty."""
        cluster: dict[str, Any] = {"cluster": addresses} | ({"task": {"type": role}} if role else {})
        env = {"TF_CONFIG": json.dumps(cluster), "HOME": "/tmp", "PYTHONUNBUFFERED": "1"} | self.env
        gpus = self.gpus if deserves_gpu(role, job) else 0
        # Kubernetes writes K in lower case.
        memory = {"memory": re.sub("K$", "k", self.memory)} if self.memory else {}
        volumes, mounts = self._volumes(gpus)
        return self.placeholders | {
            "JOB": own,
            "LABELS": {"app.kubernetes.io/name": "modelyard", "app.kubernetes.io/instance": name},
            "PROCESSES": count,
            "TIME_SECS": self.time,
            "MOUNT_TOKEN": self.service_account is not None,
            "PULL_SECRETS": [{"name": self.pull_secret}] if self.pull_secret else [],
            "COMMAND": [_escaped(word) for word in self.command],
            "ARGS": [_escaped(word) for word in self.arguments(job)],
            "ENV": [*self._secret(name), *({"name": key, "value": _escaped(value)} for key, value in env.items())],
            "ENV_FROM": [{"secretRef": {"name": self.secret}}] if self.secret else [],
            "REQUESTS": ({"cpu": f"{self.cpus:g}"} if self.cpus else {}) | memory,
            "LIMITS": memory | ({self.gpu_resource: str(gpus)} if gpus else {}),
            "MOUNTS": mounts,
            "VOLUMES": volumes,
        }

    def _values_of_cells(self, job: Job, name: str) -> dict[str, Any]:
        """Returns the values for the Job of a matrix."""
        values = self._values(job, name, "", name, job.cells, {})
        env = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1"} | self.env
        return values | {
            "CELLS": job.cells,
            "PARALLEL": min(self.parallel or job.cells, job.cells),
            # Kubernetes replaces the name of the variable.
            "ARGS": ["modelyard", *map(_escaped, job.words), "--only", "$(JOB_COMPLETION_INDEX)"],
            "ENV": [{"name": key, "value": _escaped(value)} for key, value in env.items()],
        }

    def submit_command(self, path: str, job: Job) -> list[str]:
        """Returns the command that submits the manifest."""
        return ["kubectl", "create", "-f", path]

    def _secret(self, name: str) -> list[dict[str, Any]]:
        """Returns the variable with the run's secret, from the Secret of the manifest, unless the user sets it."""
        if SECRET in self.env or SECRET_FILE in self.env:
            return []
        return [{"name": SECRET, "valueFrom": {"secretKeyRef": {"name": name, "key": SECRET}}}]

    def _volumes(self, gpus: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        volumes: list[dict[str, Any]] = []
        mounts: list[dict[str, Any]] = []
        if self.claim:
            volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}})
            mounts.append({"name": "runs", "mountPath": self.mount})
        if self.data_claim:
            claim = {"claimName": self.data_claim, "readOnly": True}
            volumes.append({"name": "data", "persistentVolumeClaim": claim})
            mounts.append({"name": "data", "mountPath": self.data_mount, "readOnly": True})
        if gpus > 1:  # NCCL communicates through it; a container has 64 MB
            volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
            mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
        return volumes, mounts

    def _check_model_dir(self, job: Job) -> None:
        folder, key = job.model_dir, "output" if job.cells else "model_dir"
        mount = self.mount.rstrip("/")
        inside = self.claim is not None and folder.startswith(f"{mount}/") and ".." not in folder.split("/")
        if inside or (is_remote(folder) and not job.cells):
            return
        if job.cells:  # its folder can't be a URL
            where = f"in {mount}, where the claim is mounted" if self.claim else "on a claim: set claim in --resources"
            message = f"{folder!r} is inside the pod and would be lost with it. Give a folder {where}."
            raise ConfigError([Problem(COMMAND_LINE, key, message)])
        other = (
            f", or a folder in {mount}, where the claim is mounted" if self.claim else ", or set claim in --resources"
        )
        message = f"{folder!r} is inside the pod and would be lost with it. Give a URL such as gs://bucket/runs/mine"
        raise ConfigError([Problem(COMMAND_LINE, key, f"{message}{other}.")])


def _host_name(name: str, room: int = 6) -> str:
    """Returns the name of a job as a valid host name, with room for the index of a pod."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    text = text if text[:1].isalpha() else f"run-{text}"  # the name of a Service begins with a letter
    return text[: 63 - room].rstrip("-")


def _escaped(text: str) -> str:
    """Escapes a text: Kubernetes replaces $(NAME) in arguments and variables; $$ is a dollar sign."""
    return text.replace("$", "$$")


class VertexAI(ContainerTarget):
    """A custom job: a pool of machines for each role. Vertex AI sets ``TF_CONFIG`` itself."""

    name = "vertex"
    template = "vertex.yaml"
    ending = ".vertex.yaml"
    has_secret = True

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

    def render(self, job: Job, template: str, where: str) -> str:
        """Returns the spec of the job, as ``gcloud ai custom-jobs create --config`` reads it."""
        problems = []
        if not is_remote(job.model_dir) and not job.model_dir.startswith("/gcs/"):
            message = f"{job.model_dir!r} would be lost with the machine. Give a URL such as gs://bucket/runs/mine."
            problems.append(Problem(COMMAND_LINE, "model_dir", message))
        if bool(self.gpus) != bool(self.accelerator):
            key, other = ("accelerator", "gpus") if self.gpus else ("gpus", "accelerator")
            problems.append(Problem("resources of vertex", key, f"must be given with {other}."))
        if problems:
            raise ConfigError(problems)
        timeout = f"{self.time}s" if self.time else None
        values = self.placeholders | {"POOLS": self._pools(job), "TIMEOUT": timeout}
        return fill_yaml(template, values, ("POOLS",), where)

    def submit_command(self, path: str, job: Job) -> list[str]:
        """Returns the command that submits the spec."""
        words = ["gcloud", "ai", "custom-jobs", "create", f"--display-name={job.name}", f"--region={self.region}"]
        return [*words, *([f"--project={self.project}"] if self.project else []), f"--config={path}"]

    def _pools(self, job: Job) -> list[dict[str, Any]]:
        """Returns the pools. Their order gives their roles to Vertex AI, and the first is one process, its chief.

        Without parameter servers the chief trains too, so it is one of the workers.
        """
        counts = {CHIEF: 1, WORKER: job.workers - (not job.ps), PS: job.ps, EVALUATOR: int(job.evaluator)}
        secret = {"name": SECRET, "value": new_secret()}
        pools = [self._pool(job, role, count, secret) if count else {} for role, count in counts.items()]
        while not pools[-1]:
            pools.pop()
        return pools

    def _pool(self, job: Job, role: str, count: int, secret: dict[str, str]) -> dict[str, Any]:
        machine: dict[str, Any] = {"machineType": self.machine_type}
        if not deserves_gpu(role, job):
            machine["machineType"] = self.ps_machine_type or self.machine_type
        elif self.gpus:
            machine |= {"acceleratorType": self.accelerator, "acceleratorCount": self.gpus}
        return {
            "machineSpec": machine,
            "replicaCount": count,
            "diskSpec": {"bootDiskType": "pd-ssd", "bootDiskSizeGb": self.disk_gb},
            "containerSpec": {
                "imageUri": self.image,
                "command": self.command,
                "args": self.arguments(job),
                "env": [secret],
            },
        }


TARGETS: dict[str, type[Target]] = {target.name: target for target in (Slurm, Kubernetes, VertexAI)}
