"""What Kubernetes and Vertex AI have in common: a process in a container, whose peers come when they come."""

from __future__ import annotations

from pydantic import Field

from modelyard.launcher.job import Job, option
from modelyard.launcher.resources import Resources, Word
from modelyard.launcher.template import fill_text, shipped

_SCRIPT = "container.sh"
_PATIENCE = "start_timeout_secs"


class ContainerResources(Resources):
    """What a job in containers asks for."""

    image: Word = Field(description="the container image, with modelyard and your code in it")
    start_timeout_secs: int = Field(
        1800, ge=1, le=10**6, description="how long processes wait for each other: machines and images take their time"
    )


def command(resources: ContainerResources) -> list[str]:
    """A command that runs its arguments, and again where they lost a peer: quicker than a new container."""
    values = {"MAX_RESTARTS": str(resources.max_restarts)}
    return ["sh", "-c", fill_text(shipped(_SCRIPT), values, values, _SCRIPT), "restarting"]


def arguments(job: Job, resources: ContainerResources) -> list[str]:
    """What each process runs; more patient than the default, unless the user says how patient."""
    words = list(job.words)
    if option(words, _PATIENCE) is None:
        words += [f"--{_PATIENCE}", str(resources.start_timeout_secs)]
    return ["modelyard", *words]
