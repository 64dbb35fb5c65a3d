"""The command that every process of a cluster runs, and the run folder in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from modelyard import storage
from modelyard.errors import UserError

TRAIN, TRAIN_AND_EVALUATE, RESUME = "train", "train-and-evaluate", "resume"
LAUNCHABLE = (TRAIN_AND_EVALUATE, TRAIN, RESUME)
_OPTION = "--model_dir"


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
        raise UserError(
            f"{words[0]!r} can't be run by several processes. The command after -- must be one of: {listed}."
        )
    return list(words)


def with_model_dir(words: Sequence[str], model_dir: str | None) -> tuple[list[str], str | None]:
    """Returns the command with the run folder in it once, and that folder; None if there is no folder.

    Args:
        words: a valid command.
        model_dir: the run folder, if it was given beside the command.

    Raises:
        UserError: if different folders are given.
    """
    verb, *rest = words
    rest, folders = _take_option(rest)
    if verb == RESUME and rest and not rest[0].startswith("-"):
        folders.append(rest.pop(0))
    folders += [model_dir] if model_dir is not None else []
    if not folders:
        if verb == RESUME:
            raise UserError("resume needs the folder of a run right after it: modelyard launch … -- resume RUN")
        return list(words), None
    for other in folders[1:]:
        if not _is_same(folders[0], other):
            raise UserError(f"two run folders are given, {folders[0]} and {other}; all processes share one.")
    return [verb, *([folders[0]] if verb == RESUME else [_OPTION, folders[0]]), *rest], folders[0]


def _take_option(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns the words without --model_dir, and its values."""
    rest: list[str] = []
    values: list[str] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        name, equals, value = word.partition("=")
        if name.replace("-", "_") != _OPTION.replace("-", "_"):
            rest.append(word)
        elif equals:
            values.append(value)
        elif not pending:
            raise UserError(f"{word} needs a folder.")
        else:
            values.append(pending.pop(0))
    return rest, values


def _is_same(one: str, other: str) -> bool:
    if storage.is_remote(one) or storage.is_remote(other):
        return one.rstrip("/") == other.rstrip("/")
    return Path(one).expanduser().absolute() == Path(other).expanduser().absolute()


def option(words: Sequence[str], name: str) -> str | None:
    """Returns the value of an option in a command; the last one counts."""
    found = None
    for word, value in _options(words):
        if word.replace("-", "_") == name:
            found = value
    return found


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if equals:
                yield name, value
            elif index + 1 < len(words) and not words[index + 1].startswith("--"):
                yield name, words[index + 1]
