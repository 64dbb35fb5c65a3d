"""A job to submit: its command, its processes, and the resources that it requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from modelyard.cluster.description import CHIEF, EVALUATOR, PS, WORKER
from modelyard.config.wording import sentence
from modelyard.config.yaml_file import Value, read_flat
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, nearest, unknown
from modelyard.launcher.command import LAUNCHABLE, RESUME, TRAIN_AND_EVALUATE, option
from modelyard.launcher.template import fill_text, shipped_template

_ALIASES = dict.fromkeys(("train_and_evaluate", "train_and_eval", "train-and-eval"), TRAIN_AND_EVALUATE)
_MAX_PROCESSES = 4096
_UNITS = {"d": 86400, "h": 3600, "m": 60, "min": 60, "s": 1}


@dataclass(frozen=True)
class Job:
    """A run to submit.

    Args:
        name: the name of the job and its files: letters, digits, dots, dashes and underscores.
        words: the command of ``modelyard`` and its options, the same for every process.
        workers: the number of processes that train.
        ps: the number of parameter servers; with them, a chief coordinates.
        evaluator: whether a separate process evaluates.
    """

    name: str
    words: tuple[str, ...]
    workers: int = 1
    ps: int = 0
    evaluator: bool = False

    @property
    def roles(self) -> dict[str, int]:
        """The number of processes of each role, in the order of their indexes."""
        counts = {CHIEF: int(self.ps > 0), WORKER: self.workers, PS: self.ps, EVALUATOR: int(self.evaluator)}
        return {role: count for role, count in counts.items() if count}

    @property
    def processes(self) -> int:
        """The number of processes."""
        return sum(self.roles.values())

    @property
    def model_dir(self) -> str | None:
        """The run folder in the command."""
        if self.words[0] == RESUME:
            return next((word for word in self.words[1:2] if not word.startswith("-")), None)
        return option(self.words, "model_dir")


def make_job(words: Sequence[str], name: str | None, workers: int, ps: int, evaluator: bool, runs: str | None) -> Job:
    """Checks and returns a job.

    Args:
        words: the command and its options.
        name: the name of the job; by default the last part of the run folder.
        workers: the number of processes that train.
        ps: the number of parameter servers.
        evaluator: whether a separate process evaluates.
        runs: the folder for the run folder of a run without ``--model_dir``; None if there is none.

    Raises:
        ConfigError: with every problem.
    """
    problems: list[Problem] = []

    def wrong(key: str, message: str) -> None:
        problems.append(Problem(COMMAND_LINE, key, message))

    words = [_ALIASES.get(words[0], words[0]), *words[1:]] if words else []
    if not words:
        wrong("", f"the command is missing. Give it after --, such as: -- {TRAIN_AND_EVALUATE} --model_dir runs/mine")
    elif words[0] not in LAUNCHABLE:
        wrong("", unknown("command to submit", words[0], LAUNCHABLE))
    for word in words:
        if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in word):
            wrong("", f"{word!r} contains bytes that are not text and can't be passed on.")
    for key, value, least in (("workers", workers, 1), ("ps", ps, 0)):
        if not least <= value <= _MAX_PROCESSES:
            wrong(key, f"must be {least} to {_MAX_PROCESSES}, got {value}.")
    if problems:
        raise ConfigError(problems)
    job = Job("", tuple(words), workers, ps, evaluator)
    if name is None and job.model_dir:
        name = (
            re.sub(r"[^A-Za-z0-9._-]+", "-", job.model_dir.rstrip("/").rsplit("/", 1)[-1]).strip("._-")[:100] or "run"
        )
    if not job.model_dir and words[0] == RESUME:
        wrong("resume", "needs the folder of a run right after it: resume RUN")
    elif not job.model_dir and (name is None or runs is None):
        more = " or --name, which also names the run" if runs is not None else ""
        wrong("model_dir", f"is missing: all processes and their restarts use the same folder. Give --model_dir{more}.")
    elif not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", name or ""):
        wrong("name", f"{name!r} must be letters, digits, dots, dashes and underscores, at most 100 characters.")
    if problems:
        raise ConfigError(problems)
    if not job.model_dir:
        words = [*words, "--model_dir", f"{runs}/{name}"]
    return Job(str(name), tuple(words), workers, ps, evaluator)


# -- resources ------------------------------------------------------------------------------------------------------


def _seconds(value: Any) -> int:
    """Reads ``1d12h``, ``90m``, or SLURM's form: ``1-12:00:00``, ``12:00:00``."""
    hint = "write it as 12h, 90m, 1d12h or '1-12:00:00'"
    if not isinstance(value, str):  # YAML reads 12:00:00 as a number
        raise ValueError(f"{value!r} has no unit; {hint} (with the quotes).")
    text = value.strip().lower()
    parts = re.findall(r"([0-9]{1,6})\s*(min|[dhms])\s*", text)
    clock = re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5]?[0-9]):([0-5]?[0-9])", text)
    total = 0
    if clock:
        total = sum(int(part or 0) * unit for part, unit in zip(clock.groups(), (86400, 3600, 60, 1), strict=True))
    elif parts and re.fullmatch(r"(?:[0-9]{1,6}\s*(?:min|[dhms])\s*)+", text):
        total = sum(int(number) * _UNITS[unit] for number, unit in parts)
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


class Resources(BaseModel):
    """The resources that every target has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: int = Field(0, ge=0, le=64, description="GPUs per process")
    time: Seconds | None = Field(None, description="how long the job may run, such as 12h")
    max_restarts: int = Field(10, ge=0, le=1000, description="how often crashed processes are restarted")


AnyResources = TypeVar("AnyResources", bound=Resources)


def read_resources(
    schema: type[AnyResources], target: str, file: str | Path | Mapping[str, Any] | None, options: Mapping[str, Any]
) -> AnyResources:
    """Reads the resources of a file; options take precedence over it.

    Args:
        schema: the resources of the target.
        target: its name, for messages.
        file: a YAML file of ``key: value`` lines, or such values.
        options: single resources; None values are ignored.

    Raises:
        ConfigError: with every problem.
    """
    problems: list[Problem] = []
    values: dict[str, Value] = {}
    if isinstance(file, Mapping):
        values = {key: Value(value, "resources") for key, value in file.items()}
    elif file is not None:
        values = read_flat(Path(file), problems)
    values |= {key: Value(value, COMMAND_LINE) for key, value in options.items() if value is not None}
    known = schema.model_fields
    for key, value in values.items():
        if key not in known:
            near = nearest(key, known)
            hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Known: {', '.join(sorted(known))}."
            problems.append(Problem(value.where, key, f"{target} has no such resource. {hint}"))
    plain = {key: value.value for key, value in values.items() if key in known and value.value is not None}
    try:
        resources = schema(**plain)
    except ValidationError as error:
        for detail in error.errors():
            key = str(detail["loc"][0]) if detail["loc"] else ""
            where = values[key].where if key in values else f"resources of {target}"
            text = "must be given, as an option or in --resources FILE." if detail["type"] == "missing" else None
            problems.append(Problem(where, key, text or _sentence(detail, plain.get(key))))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return resources


def _sentence(detail: Mapping[str, Any], given: Any) -> str:
    if detail["type"] == "string_pattern_mismatch":
        memory = "Ki" in detail["ctx"]["pattern"]
        return f"{given!r} {'is not a size such as 16G' if memory else 'contains invalid characters'}."
    return sentence(detail, given)


# -- containers -----------------------------------------------------------------------------------------------------


class ContainerResources(Resources):
    """The resources of a job in containers."""

    image: Word = Field(description="the container image, with modelyard and your code in it")
    start_timeout_secs: int = Field(
        1800, ge=1, le=10**6, description="how long processes wait for each other: machines and images start slowly"
    )


def container_command(resources: ContainerResources) -> list[str]:
    """Returns a command that runs its arguments, and again after a lost peer: that is quicker than a new container."""
    values = {"MAX_RESTARTS": str(resources.max_restarts)}
    return ["sh", "-c", fill_text(shipped_template("container.sh"), values, values, "container.sh"), "restarting"]


def container_arguments(job: Job, resources: ContainerResources) -> list[str]:
    """Returns the command of each process, with a longer start timeout unless the user sets one."""
    words = list(job.words)
    if option(words, "start_timeout_secs") is None:
        words += ["--start_timeout_secs", str(resources.start_timeout_secs)]
    return ["modelyard", *words]
