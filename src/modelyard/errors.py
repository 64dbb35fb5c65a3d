"""Errors that a user can correct."""

from __future__ import annotations

import difflib
import errno
import signal
from collections.abc import Iterable
from dataclasses import dataclass

COMMAND_LINE = "command line"
"""Where a problem is: in what was typed."""


MAY_PASS = frozenset({
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOTCONN, errno.ECONNRESET,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
})  # fmt: skip
"""Errors of disks and networks that may be over in a moment."""
UNAVAILABLE = 74
"""The exit status (EX_IOERR) after such an error: a restart may help, and nobody needs to correct anything."""


class UserError(Exception):
    """An error that the user can correct. The command line prints it without a traceback and exits with a status."""

    status = 2

    @property
    def exit_status(self) -> int:
        """The status of a process that ends with it."""
        cause = self.__cause__
        passes = isinstance(cause, OSError) and cause.errno in MAY_PASS
        return UNAVAILABLE if passes and self.status == UserError.status else self.status


@dataclass(frozen=True)
class Problem:
    """One mistake in a config: its file and line, the key, what is wrong and what is expected."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.message}" if self.key else f"{self.where}: {self.message}"


_MOST_SHOWN = 100
"""Mistakes in one message. A file that is no config may have many thousands."""


class ConfigError(UserError):
    """All mistakes in a config."""

    heading = ""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        self.hints: list[str] = []
        super().__init__(self.problems)

    def add_hint(self, hint: str) -> None:
        """Adds a line at the end that may help."""
        self.hints.append(hint)

    def __str__(self) -> str:
        count = len(self.problems)
        heading = self.heading or f"{counted(count, 'mistake')} in the config:"
        shown = [f"  {problem}" for problem in self.problems[:_MOST_SHOWN]]
        more = [f"  … and {count - _MOST_SHOWN:,} more"] if count > _MOST_SHOWN else []
        return "\n".join([heading, *shown, *more, *self.hints])


class ChangedConfigError(ConfigError):
    """Options that can't change when a run is resumed."""

    heading = "these options can't change when a run is resumed; start a new run (another --model_dir) for them:"


class UntrustedPluginError(UserError):
    """Plugins that a file of somebody else names, and that the user has not trusted yet.

    Args:
        where: the file and line that names them.
        plugins: their names and files.
    """

    def __init__(self, where: str, plugins: Iterable[str]) -> None:
        self.where, self.plugins = where, tuple(plugins)
        self.hint = "with --trust (in Python: trust=True)"
        super().__init__(where, self.plugins)

    def __str__(self) -> str:
        one = len(self.plugins) == 1
        named = "a plugin" if one else "plugins"
        heading = f"{self.where} names {named} that you have not used before, or that changed since:"
        advice = (
            f"Importing {'it' if one else 'them'} would run {'its' if one else 'their'} code; nothing was imported. "
            f"Read {'it' if one else 'them'} first. To import {'it' if one else 'them'}, repeat this {self.hint}"
        )
        return "\n".join([heading, *(f"  {plugin}" for plugin in self.plugins), advice])


class UntrustedModelError(UntrustedPluginError):
    """A SavedModel, which is a program, that a file of somebody else names."""

    def __str__(self) -> str:
        return (
            f"{self.where} names a SavedModel that you have not used before, or that has changed:\n"
            f"  {self.plugins[0]}\nIt is a program that TensorFlow runs, and it can read and write files; nothing was "
            f"loaded. If you trust who made it, repeat this {self.hint}"
        )


class DamagedConfigError(ConfigError):
    """The config.yaml of a run that is not as the run wrote it."""

    heading = "the config of this run is not as it was written; it was edited, cut or damaged:"


class RunError(UserError):
    """A run folder that can't be used as asked."""


class DataError(UserError):
    """A dataset that can't be read or does not fit the model."""


class StorageError(RunError, DataError):
    """A file or folder in cloud storage that can't be read or written."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another model."""


class TrainingError(UserError):
    """Training that can't continue, such as a NaN loss."""


class ClusterError(UserError):
    """Processes that can't work together: different configs, an address in use, one that never started."""


class PeerLostError(ClusterError):
    """Another process of the run died or can't be reached. A restart resumes from the last checkpoint.

    The status is EX_TEMPFAIL: the process should be restarted.
    """

    status = 75


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal, after everything was saved.

    Args:
        number: the signal.
        step: the last step that was trained.
        model_dir: the run folder to resume.
    """

    def __init__(self, number: int, step: int, model_dir: str) -> None:
        self.signal = signal.Signals(number)
        self.step = step
        self.model_dir = model_dir
        super().__init__(
            f"stopped by {self.signal.name}; everything is saved in {model_dir}. To resume a run, call "
            f"modelyard.resume({model_dir!r}), with the dataset if it is arrays; to resume a matrix, call it again."
        )


def counted(number: int, name: str) -> str:
    """Returns a number with its noun: 1 step, 2 steps."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Returns the known names closest to ``name``, best first."""
    lowered = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), lowered, n=most, cutoff=0.6)
    return [lowered[match] for match in matches]


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns the message for an unknown name: the closest names, or else all of them."""
    names = sorted(known)
    near = nearest(name, names)
    if near:
        return f"there is no {kind} {name!r}. Did you mean {' or '.join(repr(n) for n in near)}?"
    listed = ", ".join(names) if len(names) <= 30 else f"{', '.join(names[:30])}, …"
    return f"there is no {kind} {name!r}. Known: {listed or 'none'}."
