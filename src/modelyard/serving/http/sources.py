"""Where the versions of a served model come from: the checkpoints of a run, or the folders of an export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from modelyard.errors import RunError
from modelyard.run.checkpoint import best_first, list_checkpoints, step_of
from modelyard.serving.servable import DESCRIPTION, SAVED_MODEL, Servable, is_version

Seen = dict[int, str]
"""The versions there are, each with what changes when its files do."""


class Source(ABC):
    """Versions of a model, by number; the highest is served."""

    @abstractmethod
    def versions(self) -> Seen:
        """Those that are whole."""

    @abstractmethod
    def load(self, version: int) -> Servable:
        """One of them; in the thread that will predict.

        Raises:
            UserError: if it can't be loaded.
        """

    @abstractmethod
    def missing(self) -> str:
        """A sentence for a person, where there is no version."""


class ExportSource(Source):
    """Folders 1, 2, … as `modelyard export` writes them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise RunError(f"{folder} does not exist, or is no folder. `modelyard export` makes one.")

    def versions(self) -> Seen:
        """Whole folders; those that are being written or copied are passed over."""
        found: Seen = {}
        try:
            folders = [path for path in self.folder.iterdir() if is_version(path)]
        except OSError:  # gone, or a network file system that is away for a moment
            return found
        for path in folders:
            try:
                files = sorted((str(p.relative_to(path)), p.stat()) for p in path.rglob("*"))
            except OSError:  # it is being removed
                continue
            found[int(path.name)] = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])
        return found

    def load(self, version: int) -> Servable:
        """The SavedModel in its folder."""
        from modelyard.serving.servable import ExportedServable

        return ExportedServable(self.folder / str(version))

    def missing(self) -> str:
        """What is in the folder instead."""
        if is_version(self.folder):
            return f"{self.folder} is one version of an export. Give the folder of all versions: {self.folder.parent}."
        others = sorted(path.name for path in self.folder.iterdir())[:10]
        why = f"there is {', '.join(others)}" if others else "it is empty"
        return (
            f"{self.folder} holds no version that can be served ({why}). A version is a folder named by a number, with "
            f"{SAVED_MODEL} and {DESCRIPTION}, as `modelyard export` writes it; one that is half copied is not served."
        )


class RunSource(Source):
    """The best checkpoint of a run, or the newest where none was chosen; its version is its step.

    Args:
        model_dir: the run folder.
        checkpoint: best, latest or a step; None is the best if there is one.
        options: how to compute, such as engine.
        origin: where the options come from, for error messages.
    """

    def __init__(self, model_dir: str, checkpoint: str | None, options: dict[str, Any], origin: str) -> None:
        from modelyard.serving.run_model import open_run

        self._model_dir, self._options, self._origin = model_dir, options, origin
        opened = open_run(model_dir, checkpoint, origin, **options)
        self.directory, self._step = opened.directory, opened.step
        self._which = checkpoint or ("best" if best_first(self.directory.best) else "latest")
        self._listed: list[int] = []

    def versions(self) -> Seen:
        """The one to serve; looked up anew when checkpoints come or go."""
        fixed = self.directory.mirror is not None or self._which not in ("best", "latest")
        if not fixed:
            folder = self.directory.best if self._which == "best" else self.directory.checkpoints
            there = list_checkpoints(folder)
            if there and list(there) != self._listed:
                winners = best_first(folder) if self._which == "best" else [there[max(there)]]
                if winners:
                    self._step, self._listed = step_of(winners[0]), list(there)
        return {self._step: self._which}

    def load(self, version: int) -> Servable:
        """The run's model with the weights of that step."""
        from modelyard.serving.run_model import open_run
        from modelyard.serving.servable import RunServable

        return RunServable(open_run(self._model_dir, str(version), self._origin, **self._options))

    def missing(self) -> str:
        """There is always one: without a checkpoint the run is not opened."""
        return f"{self.directory.address} has no checkpoint."
