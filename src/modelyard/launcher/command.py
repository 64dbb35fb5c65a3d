"""The command that every process of a cluster is given, and the run folder in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from modelyard import storage
from modelyard.errors import UserError

TRAIN, TRAIN_AND_EVALUATE, RESUME = "train", "train-and-evaluate", "resume"
LAUNCHABLE = (TRAIN, TRAIN_AND_EVALUATE, RESUME)
_OPTION = "--model_dir"


def checked(words: Sequence[str]) -> list[str]:
    """The words of a command that can be launched.

    Raises:
        UserError: if it is another.
    """
    if not words:
        raise UserError(
            "launch what? Write the command after --: modelyard launch --workers 2 -- train --dataset digits"
        )
    if words[0] not in LAUNCHABLE:
        listed = ", ".join(LAUNCHABLE)
        raise UserError(f"{words[0]!r} can't be run by several processes. Write one of these first after --: {listed}.")
    return list(words)


def with_model_dir(words: Sequence[str], model_dir: str | None) -> tuple[list[str], str | None]:
    """The command with the run folder in it once, and that folder; None if it is named nowhere.

    Args:
        words: a command that was `checked`.
        model_dir: the run folder, where it was said beside the command.

    Raises:
        UserError: if different folders are named.
    """
    verb, *rest = words
    rest, inside = _take_option(rest)
    if verb == RESUME and rest and not rest[0].startswith("-"):
        inside.append(rest.pop(0))
    named = [*inside, *([model_dir] if model_dir is not None else [])]
    if not named:
        if verb == RESUME:
            raise UserError("resume which run? Write its folder right after it: modelyard launch … -- resume RUN")
        return list(words), None
    for other in named[1:]:
        if not _is_same(named[0], other):
            raise UserError(f"two run folders are named, {named[0]} and {other}; all processes share one.")
    return [verb, *([named[0]] if verb == RESUME else [_OPTION, named[0]]), *rest], named[0]


def _take_option(words: list[str]) -> tuple[list[str], list[str]]:
    """The words without the option for the run folder, and its values."""
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
            raise UserError(f"{word} names no folder.")
        else:
            values.append(pending.pop(0))
    return rest, values


def _is_same(one: str, other: str) -> bool:
    if storage.is_remote(one) or storage.is_remote(other):
        return one.rstrip("/") == other.rstrip("/")
    return Path(one).expanduser().absolute() == Path(other).expanduser().absolute()
