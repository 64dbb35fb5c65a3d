"""Submits a run to SLURM, Kubernetes or Vertex AI: writes a script or manifest, and calls their own tool."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelyard.errors import COMMAND_LINE, ConfigError, Problem, RunError, UserError, unknown
from modelyard.launcher.job import Job, is_launchable, make_job
from modelyard.launcher.targets import TARGETS, Target, read_resources
from modelyard.launcher.template import read_template, shipped_template
from modelyard.system.files import write_text


@dataclass(frozen=True)
class Submission:
    """A script or manifest, and whether it was submitted.

    Args:
        name: the name of the job.
        text: the script or manifest.
        path: the file that it was written to; None for a dry run.
        command: the shell command that submits it.
        submitted: whether that was run.
        answer: its output.
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
    check: Callable[[Job, Target], Job] | None = None,
    matrix: Callable[[str | None, Target], Job] | None = None,
    **options: Any,
) -> Submission:
    """Writes a script or manifest for a run of several processes, and submits it if the target's tool is installed.

    Args:
        target: slurm, kubernetes or vertex.
        words: the command and its options, the same for every process.
        workers: the number of processes that train.
        ps: the number of parameter servers; with them, a chief coordinates.
        evaluator: whether a separate process evaluates.
        name: the name of the job; by default the last part of ``--model_dir``.
        resources: a YAML file with the resources of the job, or its values.
        template: a file to use instead of the template that comes with Modelyard.
        output: the file to write; by default named after the job.
        dry_run: whether to write and submit nothing.
        force: whether to replace an existing file.
        check: called with the job and its target before anything is written; returns the job to submit, and raises if
            the command is wrong.
        matrix: returns the job of a matrix, from its name and the target; then ``words`` are not used.
        **options: single resources, which take precedence over the file.

    Example:
        >>> words = ["train", "--model_dir", "runs/mine"]
        >>> submit("slurm", words, workers=2, partition="long", dry_run=True).command
        'sbatch mine.slurm.sh'

    Raises:
        ConfigError: with every problem.
        RunError: if the file exists, or the tool fails.
    """
    chosen = read_resources(_target(target), resources, options)
    if matrix is not None:
        if chosen.cells_template is None:
            raise UserError(f"{target} can't run the cells of a matrix. Use slurm or kubernetes, or matrix --on ray.")
        several = {"workers": workers > 1, "ps": ps > 0, "evaluator": evaluator}
        wrong = [Problem(COMMAND_LINE, key, "has no effect here: every cell is one process.") for key in several]
        if any(several.values()):
            raise ConfigError([problem for problem in wrong if several[problem.key]])
        job = matrix(name, chosen)
    elif chosen.parallel is not None:
        raise ConfigError([Problem(f"resources of {target}", "parallel", "is for a matrix; a run is one job.")])
    else:
        job = make_job(words, name, workers, ps, evaluator, chosen.runs_folder)
    if check is not None and matrix is None:
        job = check(job, chosen)
    if template is None:
        shipped = chosen.cells_template if job.cells and chosen.cells_template else chosen.template
        text = chosen.render(job, shipped_template(shipped), shipped)
    else:
        text = chosen.render(job, read_template(template), str(template))
    path = Path(output) if output is not None else Path(f"{job.name}{chosen.ending}")
    command = chosen.submit_command(str(path), job)
    typed = shlex.join(command)
    if dry_run:
        return Submission(job.name, text, None, typed)
    if path.exists() and not force:
        raise RunError(f"{path} exists. Choose another file with --output, or replace it with --force.")
    write_text(path, text, 0o600 if chosen.has_secret else 0o644)
    if shutil.which(command[0]) is None:
        return Submission(job.name, text, path, typed)
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        reason = done.stderr.strip() or f"it exited with status {done.returncode}"
        raise RunError(f"{command[0]} failed: {reason}\n{path} is written; try again with: {typed}")
    return Submission(job.name, text, path, typed, submitted=True, answer=done.stdout.strip())


def template_text(target: str, of_matrix: bool = False) -> str:
    """Returns the template that comes with Modelyard, to be changed and passed as ``template``."""
    kind = _target(target)
    return shipped_template(kind.cells_template if of_matrix and kind.cells_template else kind.template)


def _target(name: str) -> type[Target]:
    if is_launchable(name):
        raise UserError(f"the target is missing: {', '.join(TARGETS)}. Such as: modelyard submit slurm … -- {name} …")
    if name not in TARGETS:
        raise UserError(unknown("submit target", name, TARGETS))
    return TARGETS[name]
