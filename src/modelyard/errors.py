"""What went wrong, in words for the person who can put it right."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable
from dataclasses import dataclass

COMMAND_LINE = "command line"
"""Where a problem is: in what was typed."""


class UserError(Exception):
    """A mistake the user can mend. The command line prints it without a traceback and exits with ``status``."""

    status = 2


@dataclass(frozen=True)
class Problem:
    """One mistake in a config: where it stands, which key, what is wrong, what would be right."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.message}" if self.key else f"{self.where}: {self.message}"


class ConfigError(UserError):
    """Every mistake that was found in a config, at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        self.hints: list[str] = []
        super().__init__(self.problems)

    def add_hint(self, hint: str) -> None:
        """Adds a line that may help."""
        self.hints.append(hint)

    def heading(self) -> str:
        """The first line."""
        count = len(self.problems)
        return f"{count} mistake{'s' if count != 1 else ''} in the config:"

    def __str__(self) -> str:
        return "\n".join([self.heading(), *(f"  {problem}" for problem in self.problems), *self.hints])


class ChangedConfigError(ConfigError):
    """Options that can't change when a run is gone on with."""

    def heading(self) -> str:
        """The first line."""
        return "these options can't change when a run goes on; start a new run (another --model_dir) for them:"


class RunError(UserError):
    """A run folder that can't be used as asked."""


class DataError(UserError):
    """A dataset that can't be read or does not fit the model."""


class StorageError(RunError, DataError):
    """A file or folder, of data or of a run, that cloud storage does not give or take."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another model."""


class TrainingError(UserError):
    """Training that can't go on, such as a loss that is not a number."""


class ClusterError(UserError):
    """Processes that can't work together: different configs, an address in use, one that never came."""


class PeerLostError(ClusterError):
    """Another process of the run died or can't be reached. Started again, the run goes on from its last checkpoint.

    The status is that of a failure that passes (EX_TEMPFAIL): whoever started the process should start it again.
    """

    status = 75


class Interrupted(KeyboardInterrupt):
    """Training was stopped by a signal, after everything was saved.

    Args:
        number: the signal.
        step: how far training was.
        model_dir: the run folder to go on with.
    """

    def __init__(self, number: int, step: int, model_dir: str) -> None:
        self.signal = signal.Signals(number)
        self.step = step
        self.model_dir = model_dir
        super().__init__(f"{self.signal.name} at step {step}")


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names closest to ``name``, best first."""
    lowered = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), lowered, n=most, cutoff=0.6)
    return [lowered[match] for match in matches]


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A sentence for a name nobody knows: the near ones, or all when there are few."""
    names = sorted(known)
    near = nearest(name, names)
    if near:
        return f"there is no {kind} {name!r}. Did you mean {' or '.join(repr(n) for n in near)}?"
    listed = ", ".join(names) if len(names) <= 30 else f"{', '.join(names[:30])}, …"
    return f"there is no {kind} {name!r}. Known: {listed or 'none'}."
