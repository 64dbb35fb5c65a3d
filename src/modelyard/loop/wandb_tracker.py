"""The hook `wandb`: a run of Modelyard is one run in Weights & Biases, however often it is resumed.

W&B has one row of history per step, in ascending order. So the values of a step are sent together, when the next step
has some; those of the last step when the run ends. Values of a step that is already there change the summary only.

What is logged is buffered by a process of W&B, and is lost if the run is killed. What counts is therefore what W&B has
(online), or what is in its files (offline), and not what was handed over.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from glob import escape
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.data.dataset import TEST
from modelyard.errors import RunError, UserError
from modelyard.loop.catalog import WandbOptions
from modelyard.loop.tracking import (
    FINISHED,
    Description,
    Memo,
    Point,
    Tracker,
    check_address,
    result_files,
)
from modelyard.run.directory import RunDirectory
from modelyard.system.untrusted import open_regular

_BLOCK = 32768
_FILE_HEADER, _RECORD_HEADER = 7, struct.Struct("<IHB")  # checksum, length, and whether it is whole or a part
_WHOLE, _FIRST, _LAST = 1, 2, 4
_FLUSH_SECONDS = 1.0
_FILES = _CONFIG_ENTRY = "modelyard"


class Wandb(Tracker):
    """Sends metrics, options and results to Weights & Biases. Only one process can: the one that trains."""

    options: WandbOptions
    package = "wandb"

    @property
    def mode(self) -> str:
        """The mode: online, offline or disabled."""
        return self.options.mode or os.environ.get("WANDB_MODE") or "online"

    @property
    def is_off(self) -> bool:
        """Whether W&B is turned off."""
        return self.mode == "disabled"

    def check(self) -> None:
        """Checks the mode, the address and that there is an API key."""
        if self.mode not in ("online", "offline"):
            raise UserError(f"WANDB_MODE must be online, offline or disabled, got {self.mode!r}.")
        if "WANDB_BASE_URL" in os.environ:
            check_address(os.environ["WANDB_BASE_URL"], "WANDB_BASE_URL", "WANDB_API_KEY")
        if self.mode == "online":
            import wandb

            try:
                has_key = wandb.login(prompt=False, verify=False)  # a server that does not answer is no mistake
            except Exception as error:
                raise UserError(f"the hook {self.name} can't log in to W&B: {error}") from error
            if not has_key:
                raise UserError(
                    f"the hook {self.name} has no API key of W&B. Run `wandb login`, set WANDB_API_KEY, or write to "
                    f"files for now: {self.name}(mode=offline)"
                )

    def destination(self, directory: RunDirectory, about: Description, creates: bool, seconds: float) -> WandbRun:
        """Makes the run."""
        return WandbRun(self.options, self.mode, Memo(directory, self.name), about, _folder(directory))

    def send_files(self, directory: RunDirectory, exports: Sequence[str]) -> Iterator[str]:
        """Sends small files; exports as an artifact, or their paths in the summary."""
        memo = Memo(directory, self.name)
        if memo.run is None:
            raise UserError("W&B has no run yet")
        run = _init(self.options, self.mode, memo.run, _folder(directory))
        try:
            for path in result_files(directory):
                copy = Path(run.dir) / _FILES / path.name  # beside it, W&B has a config.yaml of its own
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
                run.save(str(copy), base_path=run.dir, policy="now")
                yield path.name
            if exports:
                run.summary["exports"] = list(exports)
            for export in exports if self.options.artifacts else ():
                if not storage.is_remote(export):
                    import wandb

                    artifact = wandb.Artifact(_artifact_name(directory.name, Path(export)), type="model")
                    artifact.add_dir(export)
                    run.log_artifact(artifact)
        finally:
            run.finish()


class WandbRun:
    """A run in W&B.

    Args:
        options: of the hook.
        mode: online or offline.
        memo: remembers the id of the run, and what was handed over.
        about: what W&B shows.
        folder: for W&B's own files.
    """

    def __init__(self, options: WandbOptions, mode: str, memo: Memo, about: Description, folder: Path) -> None:
        self._options, self._mode, self._memo, self._about, self._folder = options, mode, memo, about, folder
        self._run: Any = None
        self._held: tuple[int, dict[str, float]] | None = None
        """The last step and its values: more may come."""
        self._last = -1
        self._sent: dict[str, int] = {}

    def open(self) -> dict[str, int]:
        """Starts W&B's process for this run; returns the last step of each metric that is not lost."""
        self._held = None
        run_id = self._memo.run or os.environ.get("WANDB_RUN_ID") or self._about.run_id
        sent = steps_in_files(self._folder, run_id) or self._memo.sent
        if self._run is None:
            self._memo.write(run=run_id)
            self._run = _init(self._options, self._mode, run_id, self._folder, self._about.name)
            self._run.config.update(self._about.options, allow_val_change=True)
            self._run.config.update({_CONFIG_ENTRY: self._about.tags}, allow_val_change=True)
        self._last = max(sent.values(), default=-1)
        if self._mode == "online":
            self._last = int(self._run.step) - 1
            sent = {key: min(step, self._last) for key, step in self._memo.sent.items()}
        self._sent = dict(sent)
        return sent

    def send(self, points: Sequence[Point]) -> None:
        """Hands values over. The last step waits for more values."""
        for point in points:
            if point.split == TEST:  # of the best model, which is an earlier step
                self._run.summary.update({point.key: point.value, f"{TEST}/step": point.step})
            elif point.step <= self._last:
                self._run.summary.update({point.key: point.value})
            else:
                if self._held is not None and self._held[0] < point.step:
                    self._hand_over()
                step, values = self._held or (point.step, {})
                self._held = step, {**values, point.key: point.value}
        self._memo.write(sent=self._sent)

    def close(self, status: str) -> None:
        """Ends W&B's process. The last step of a run that was interrupted may get more values when it is resumed."""
        if status == FINISHED:
            self._hand_over()
            self._memo.write(sent=self._sent)
        self._run.finish(exit_code=0 if status == FINISHED else 1)

    def _hand_over(self) -> None:
        if self._held is not None:
            (step, values), self._held = self._held, None
            self._run.log(values, step=step, commit=True)  # else W&B waits for the next step, too
            self._last = step
            self._sent |= dict.fromkeys(values, step)


def _folder(directory: RunDirectory) -> Path:
    """The folder in which W&B makes its folder ``wandb``."""
    return Path(os.environ["WANDB_DIR"]) if os.environ.get("WANDB_DIR") else directory.trackers


def _init(options: WandbOptions, mode: str, run_id: str, folder: Path, name: str | None = None) -> Any:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    quiet = {"console": "off", "silent": True, "symlink": False, "x_disable_stats": True, "save_code": False}
    return wandb.init(
        id=run_id,
        project=options.project or os.environ.get("WANDB_PROJECT") or "modelyard",
        entity=options.entity,
        name=options.run_name or os.environ.get("WANDB_NAME") or name,
        dir=str(folder),
        mode="offline" if mode == "offline" else "online",
        resume="allow" if mode == "online" else None,
        reinit="create_new",  # a run of the user's own program goes on
        settings=wandb.Settings(**quiet, finish_timeout=options.wait, x_transaction_log_flush_interval=_FLUSH_SECONDS),
    )


def _artifact_name(run: str, export: Path) -> str:
    return re.sub(r"[^\w.-]", "-", f"{run}-{export.parent.name}")[:128]


# -- files of W&B ------------------------------------------------------------------------------------------------------


def steps_in_files(folder: Path, run_id: str) -> dict[str, int]:
    """Returns the last step of each metric of a run that W&B has written to files in ``folder``."""
    last: dict[str, int] = {}
    for path in sorted(folder.glob(f"wandb/*-{escape(run_id)}/run-*.wandb")):
        for step, names in history_in(path):
            for name in names:
                last[name] = max(step, last.get(name, -1))
    return last


def history_in(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the steps in a file of W&B with the names of their values. Ends where the file is cut off."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(path):
        try:
            record = Record.FromString(data)
        except DecodeError:
            return
        if record.WhichOneof("record_type") == "history":
            names = [item.nested_key[0] if item.nested_key else item.key for item in record.history.item]
            yield int(record.history.step.num), [name for name in names if "/" in name]


def _records(path: Path) -> Iterator[bytes]:
    """Yields the records of a file in LevelDB's log format: blocks with records, which may go on in the next block."""
    with open_regular(path, RunError) as file:
        data = file.read()
    offset, parts = _FILE_HEADER, b""
    while offset + _RECORD_HEADER.size <= len(data):
        if offset % _BLOCK > _BLOCK - _RECORD_HEADER.size:  # no room for a header: the rest of the block is empty
            offset += _BLOCK - offset % _BLOCK
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(data, offset)
        start, offset = offset + _RECORD_HEADER.size, offset + _RECORD_HEADER.size + length
        if kind == 0 or offset > len(data):
            return
        parts = data[start:offset] if kind in (_WHOLE, _FIRST) else parts + data[start:offset]
        if kind in (_WHOLE, _LAST):
            yield parts
