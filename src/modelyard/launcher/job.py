"""A run to submit: its name, the command that every process is given, and how many processes there are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from modelyard.cluster.description import CHIEF, EVALUATOR, PS, WORKER
from modelyard.config.resolve import COMMAND_LINE
from modelyard.errors import ConfigError, Problem, unknown

COMMANDS = ("train-and-evaluate", "train", "resume")
_ALIASES = {"train_and_evaluate": COMMANDS[0], "train_and_eval": COMMANDS[0], "train-and-eval": COMMANDS[0]}
_MOST = 4096


@dataclass(frozen=True)
class Job:
    """A run to submit.

    Args:
        name: of the job and its files; letters, digits, dots, dashes and underscores.
        words: the command of ``modelyard`` and its options, the same for every process.
        workers: processes that train.
        ps: parameter servers; with them, a chief comes along that coordinates.
        evaluator: whether a process of its own evaluates.
    """

    name: str
    words: tuple[str, ...]
    workers: int = 1
    ps: int = 0
    evaluator: bool = False

    @property
    def roles(self) -> dict[str, int]:
        """How many processes of each role, in the order of their numbers."""
        counts = {CHIEF: int(self.ps > 0), WORKER: self.workers, PS: self.ps, EVALUATOR: int(self.evaluator)}
        return {role: count for role, count in counts.items() if count}

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return sum(self.roles.values())

    @property
    def model_dir(self) -> str | None:
        """The run folder that the command names."""
        if self.words[0] == "resume":
            return next((word for word in self.words[1:2] if not word.startswith("-")), None)
        return option(self.words, "model_dir")


def make_job(words: Sequence[str], name: str | None, workers: int, ps: int, evaluator: bool, runs: str | None) -> Job:
    """Checks what was asked for.

    Args:
        words: the command and its options.
        name: of the job; the last part of the run folder if None.
        workers: processes that train.
        ps: parameter servers.
        evaluator: whether a process of its own evaluates.
        runs: the folder in which a run without ``--model_dir`` gets one by its name; None where there is none.

    Raises:
        ConfigError: with everything that is wrong.
    """
    problems: list[Problem] = []

    def wrong(key: str, message: str) -> None:
        problems.append(Problem(COMMAND_LINE, key, message))

    words = [_ALIASES.get(words[0], words[0]), *words[1:]] if words else []
    if not words:
        wrong("", f"what to run? Give the command after --, such as: -- {COMMANDS[0]} --model_dir runs/mine")
    elif words[0] not in COMMANDS:
        wrong("", unknown("command to submit", words[0], COMMANDS))
    for word in words:
        if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in word):
            wrong("", f"{word!r} holds bytes that are no text; it can't be passed on.")
    for key, value, least in (("workers", workers, 1), ("ps", ps, 0)):
        if not least <= value <= _MOST:
            wrong(key, f"must be {least} to {_MOST}, got {value}.")
    if problems:
        raise ConfigError(problems)
    job = Job("", tuple(words), workers, ps, evaluator)
    if name is None and job.model_dir:
        name = (
            re.sub(r"[^A-Za-z0-9._-]+", "-", job.model_dir.rstrip("/").rsplit("/", 1)[-1]).strip("._-")[:100] or "run"
        )
    if not job.model_dir and words[0] == "resume":
        wrong("resume", "which run? Give its folder right after it: resume RUN")
    elif not job.model_dir and (name is None or runs is None):
        more = " or a --name for the job, which becomes that of the run" if runs is not None else ""
        wrong("model_dir", f"is needed, since the processes and their restarts meet there. Give --model_dir{more}.")
    elif not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?", name or ""):
        wrong("name", f"{name!r} must be letters, digits, dots, dashes and underscores, at most 100.")
    if problems:
        raise ConfigError(problems)
    if not job.model_dir:
        words = [*words, "--model_dir", f"{runs}/{name}"]
    return Job(str(name), tuple(words), workers, ps, evaluator)


def option(words: Sequence[str], name: str) -> str | None:
    """The value of an option in a command line; the last one counts."""
    found = None
    for word, value in _options(words):
        if word.replace("-", "_") == name:
            found = value
    return found


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if equals:
                yield name, value
            elif place + 1 < len(words) and not words[place + 1].startswith("--"):
                yield name, words[place + 1]
