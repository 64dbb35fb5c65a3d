"""A run as a SLURM batch script: ``srun`` starts the processes, the script restarts them and requeues itself."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from pydantic import Field

from modelyard.launcher.job import Job, Memory, Resources, Word
from modelyard.launcher.template import fill_text

TEMPLATE = "slurm.sh"
NEEDED = ("COMMAND", "DIRECTIVES", "PS", "EVALUATOR")


class SlurmResources(Resources):
    """The resources of a SLURM job."""

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


def render(job: Job, resources: SlurmResources, template: str, where: str) -> str:
    """Returns the batch script.

    Args:
        job: the job.
        resources: its resources.
        template: a script with placeholders.
        where: the name of the template in messages.
    """
    python = resources.python or sys.executable
    values = {
        "DIRECTIVES": "\n".join(f"#SBATCH {line}" for line in _directives(job, resources)),
        "GRACE_SECS": str(resources.grace_secs),
        "MAX_RESTARTS": str(resources.max_restarts),
        "WORKDIR": shlex.quote(resources.workdir or str(Path.cwd())),
        "PS": str(job.ps),
        "EVALUATOR": str(int(job.evaluator)),
        "COMMAND": shlex.join([python, "-m", "modelyard", *job.words]),
        "NAME": shlex.quote(job.name),
    }
    return fill_text(template, values, NEEDED, where)


def submit_command(path: str, job: Job, resources: SlurmResources) -> list[str]:
    """Returns the command that submits the script."""
    return ["sbatch", path]


def _directives(job: Job, resources: SlurmResources) -> list[str]:
    """Returns the options of sbatch. Their values need no quotes, and have no % that SLURM would replace."""
    given = {
        "job-name": job.name,
        "ntasks": job.processes,
        "nodes": resources.nodes,
        "ntasks-per-node": resources.tasks_per_node,
        "cpus-per-task": resources.cpus,
        "gpus-per-task": resources.gpus or None,
        "mem": resources.memory and resources.memory.removesuffix("i"),  # SLURM's G is 1024 M
        "time": resources.time and _clock(resources.time),
        "partition": resources.partition,
        "account": resources.account,
        "qos": resources.qos,
        "constraint": resources.constraint,
        "output": f"{job.name}-%j.log",
    }
    return [f"--{key}={value}" for key, value in given.items() if value is not None]


def _clock(seconds: int) -> str:
    minutes = -(-seconds // 60)  # SLURM counts in minutes
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"
