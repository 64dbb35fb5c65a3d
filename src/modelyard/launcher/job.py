"""The command that every process of a cluster runs, the run folder in it, and a job to submit."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from modelyard import storage
from modelyard.cluster.description import CHIEF, EVALUATOR, PS, WORKER
from modelyard.errors import COMMAND_LINE, ConfigError, Problem, UserError, nearest, unknown

TRAIN, TRAIN_AND_EVALUATE, RESUME = "train", "train-and-evaluate", "resume"
LAUNCHABLE = (TRAIN_AND_EVALUATE, TRAIN, RESUME)
_ALIASES = dict.fromkeys(("train_and_evaluate", "train_and_eval", "train-and-eval"), TRAIN_AND_EVALUATE)
MATRIX, TUNE = "matrix", "tune"
_MAX_PROCESSES = 4096
_JOB_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")


# -- the command ----------------------------------------------------------------------------------------------------


def check_command(words: Sequence[str]) -> list[str]:
    """Returns the command if several processes can run it.

    Raises:
        UserError: if they can't.
    """
    if not words:
        raise UserError(
            "there is no command to launch. Write it after --: modelyard launch --workers 2 -- train --dataset digits"
        )
    if words[0] not in LAUNCHABLE:
        listed = ", ".join(LAUNCHABLE)
        if words[0].startswith("-"):
            raise UserError(
                f"the command is missing before {words[0]}. After -- comes one of {listed}; then its options."
            )
        near = nearest(words[0], LAUNCHABLE, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"{words[0]!r} can't be run by several processes. The command after -- must be one of: {listed}.{hint}"
        )
    return list(words)


def is_launchable(word: str) -> bool:
    """Returns whether a word is a command that several processes can run, by today's name or an old one."""
    return word in LAUNCHABLE or word in _ALIASES


def named_files(words: Sequence[str]) -> list[str]:
    """Returns the files with options that a command names."""
    named = [option(words, name) for name in ("config_file", "hyperparameter_file", "recipe")]
    return [name for name in named if name and name.endswith((".yaml", ".yml"))]


def with_model_dir(words: Sequence[str], model_dir: str | None) -> tuple[list[str], str | None]:
    """Returns the command with the run folder in it once, and that folder; None if there is no folder.

    ``model_dir`` is the run folder, if it was given beside the command.

    Raises:
        UserError: if different folders are given.
    """
    verb, *rest = words
    folders, rest = _split_option(rest, "model_dir")
    if verb == RESUME and rest and not rest[0].startswith("-"):
        folders.append(rest.pop(0))
    folders += [model_dir] if model_dir is not None else []
    if not folders:
        if verb == RESUME:
            raise UserError("resume needs the folder of a run right after it: modelyard launch … -- resume RUN")
        return list(words), None
    for other in folders[1:]:
        if not storage.is_same(folders[0], other):
            raise UserError(f"two run folders are given, {folders[0]} and {other}; all processes share one.")
    return [verb, *([folders[0]] if verb == RESUME else ["--model_dir", folders[0]]), *rest], folders[0]


def option(words: Sequence[str], name: str) -> str | None:
    """Returns the value of an option in a command; the last one counts."""
    values, _ = _split_option(words, name)
    return values[-1] if values else None


def _split_option(words: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Returns the values of an option in a command, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest="values", action="append", default=[])
    try:
        found, rest = parser.parse_known_args(words)
    except argparse.ArgumentError:
        raise UserError(f"--{name} needs a value.") from None
    return found.values, rest


def role_counts(workers: int, ps: int, evaluator: bool) -> dict[str, int]:
    """Returns the number of processes of each role that has any. With parameter servers, a chief coordinates."""
    counts = {CHIEF: int(ps > 0), WORKER: workers, PS: ps, EVALUATOR: int(evaluator)}
    return {role: count for role, count in counts.items() if count}


# -- a job ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A run or a matrix to submit: the name of the job and its files, the command of every process, their number.

    Args:
        name: the name.
        words: the command; of a matrix without the number of the cell.
        workers: the number of processes that train a run.
        ps: the number of parameter servers.
        evaluator: whether a separate process evaluates.
        cells: the number of cells of a matrix, each a task of the job; 0 for a run.
        folder: the folder of a matrix.
    """

    name: str
    words: tuple[str, ...]
    workers: int = 1
    ps: int = 0
    evaluator: bool = False
    cells: int = 0
    folder: str = ""

    @property
    def roles(self) -> dict[str, int]:
        """The number of processes of each role, in the order of their indexes."""
        return role_counts(self.workers, self.ps, self.evaluator)

    @property
    def processes(self) -> int:
        """The number of processes."""
        return sum(self.roles.values())

    @property
    def model_dir(self) -> str:
        """The run folder in the command, or the folder of a matrix; empty if there is none."""
        if self.cells:
            return self.folder
        if self.words[0] == RESUME:
            return next((word for word in self.words[1:2] if not word.startswith("-")), "")
        return option(self.words, "model_dir") or ""


def make_matrix_job(words: Sequence[str], name: str | None, folder: str, cells: int) -> Job:
    """Returns the job of a matrix. By default, its name is the last part of the folder.

    Raises:
        ConfigError: if the name is wrong.
    """
    name = name if name is not None else _name_of(folder)
    if not _JOB_NAME.fullmatch(name):
        raise ConfigError([Problem(COMMAND_LINE, "name", _wrong_name(name))])
    return Job(name, tuple(words), cells=cells, folder=folder)


def _name_of(folder: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.rstrip("/").rsplit("/", 1)[-1]).strip("._-")[:100] or "run"


def _wrong_name(name: str) -> str:
    return f"{name!r} must be letters, digits, dots, dashes and underscores, at most 100 characters."


def make_job(words: Sequence[str], name: str | None, workers: int, ps: int, evaluator: bool, runs: str | None) -> Job:
    """Checks and returns a job. By default, its name is the last part of the run folder.

    ``runs`` is the folder for the run folder of a run without ``--model_dir``; None if there is none.

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
    folder = Job("", tuple(words)).model_dir
    if name is None and folder:
        name = _name_of(folder)
    if not folder and words[0] == RESUME:
        wrong("resume", "needs the folder of a run right after it: resume RUN")
    elif not folder and (name is None or runs is None):
        more = " or --name, which also names the run" if runs is not None else ""
        wrong("model_dir", f"is missing: all processes and their restarts use the same folder. Give --model_dir{more}.")
    elif not _JOB_NAME.fullmatch(name or ""):
        wrong("name", _wrong_name(name or ""))
    if problems:
        raise ConfigError(problems)
    if not folder:
        words = [*words, "--model_dir", f"{runs}/{name}"]
    return Job(str(name), tuple(words), workers, ps, evaluator)
