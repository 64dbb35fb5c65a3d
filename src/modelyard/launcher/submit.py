"""Hands a run to SLURM, Kubernetes or Vertex AI: writes what they read, and calls their own tool."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from modelyard.errors import RunError, UserError, unknown
from modelyard.launcher import kubernetes, slurm_script, vertex
from modelyard.launcher.job import make_job
from modelyard.launcher.resources import Resources, read_resources
from modelyard.launcher.template import read_template, shipped
from modelyard.system.files import write_text


@dataclass(frozen=True)
class _Target:
    module: ModuleType
    resources: type[Resources]
    ending: str


TARGETS = {
    "slurm": _Target(slurm_script, slurm_script.SlurmResources, ".slurm.sh"),
    "kubernetes": _Target(kubernetes, kubernetes.KubernetesResources, ".kubernetes.yaml"),
    "vertex": _Target(vertex, vertex.VertexResources, ".vertex.yaml"),
}


@dataclass(frozen=True)
class Submission:
    """What became of a submission.

    Args:
        name: of the job.
        text: the script or manifest.
        path: where it was written; None for a dry run.
        command: what hands it over, as one would type it.
        submitted: whether that was done.
        answer: what the tool said.
    """

    name: str
    text: str
    path: Path | None
    command: str
    submitted: bool = False
    answer: str = ""


def submit(
    target: str,
    words: Sequence[str],
    *,
    workers: int = 1,
    ps: int = 0,
    evaluator: bool = False,
    name: str | None = None,
    resources: str | Path | Mapping[str, Any] | None = None,
    template: str | Path | None = None,
    output: str | Path | None = None,
    dry_run: bool = False,
    force: bool = False,
    **options: Any,
) -> Submission:
    """Writes a script or manifest for a run of several processes, and hands it over where the target's tool is found.

    Args:
        target: slurm, kubernetes or vertex.
        words: the command and its options, the same for every process.
        workers: processes that train.
        ps: parameter servers; a chief comes along with them.
        evaluator: whether a process of its own evaluates.
        name: of the job; the last part of ``--model_dir`` if None.
        resources: a YAML file with what the job asks for, or its values.
        template: a file to use instead of the one that comes with Modelyard.
        output: the file to write; named after the job if None.
        dry_run: write and submit nothing.
        force: replace a file that exists.
        **options: single resources, which take precedence over the file.

    Example:
        >>> words = ["train", "--model_dir", "runs/mine"]
        >>> submit("slurm", words, workers=2, partition="long", dry_run=True).command
        'sbatch mine.slurm.sh'

    Raises:
        ConfigError: with everything that is wrong.
        RunError: if the file exists, or the tool refuses.
    """
    kind = _target(target)
    asked = read_resources(kind.resources, target, resources, options)
    job = make_job(words, name, workers, ps, evaluator, _runs_folder(asked))
    where = str(template) if template is not None else kind.module.TEMPLATE
    text = kind.module.render(job, asked, read_template(template) if template else template_text(target), where)
    path = Path(output) if output is not None else Path(f"{job.name}{kind.ending}")
    command: list[str] = kind.module.submit_command(str(path), job, asked)
    typed = shlex.join(command)
    if dry_run:
        return Submission(job.name, text, None, typed)
    if path.exists() and not force:
        raise RunError(f"{path} exists. Name another file with --output, or replace it with --force.")
    write_text(path, text)
    if shutil.which(command[0]) is None:
        return Submission(job.name, text, path, typed)
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        reason = done.stderr.strip() or f"it ended with status {done.returncode}"
        raise RunError(f"{command[0]} refused: {reason}\n{path} is written; try again with: {typed}")
    return Submission(job.name, text, path, typed, submitted=True, answer=done.stdout.strip())


def template_text(target: str) -> str:
    """The template that comes with Modelyard, to be changed and given back as ``template``."""
    return shipped(_target(target).module.TEMPLATE)


def _target(name: str) -> _Target:
    if name not in TARGETS:
        raise UserError(unknown("place to submit to", name, TARGETS))
    return TARGETS[name]


def _runs_folder(asked: Resources) -> str | None:
    """Where a run without a model_dir goes, if all its processes see that folder."""
    if isinstance(asked, slurm_script.SlurmResources):
        return f"{asked.workdir or Path.cwd()}/runs"
    if isinstance(asked, kubernetes.KubernetesResources) and asked.claim:
        return asked.mount.rstrip("/")
    return None
