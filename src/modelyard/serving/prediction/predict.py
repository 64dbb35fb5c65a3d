"""`predict`: a model of a run, over a user's files, into a table. A killed one goes on where it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from modelyard import storage
from modelyard.data.dataset import TEST
from modelyard.data.images import UndecodableError
from modelyard.errors import DataError, UserError
from modelyard.serving.prediction.exported import OpenExport, is_export
from modelyard.serving.prediction.rows import FORMS, CsvForm, JsonForm, Table, kind_of
from modelyard.serving.prediction.scores import Scores
from modelyard.serving.prediction.sources import COLUMNS, ToPredict, open_sources
from modelyard.serving.run_model import OpenRun, open_run
from modelyard.system.files import PARTIAL, explain, write_text

log = logging.getLogger("modelyard")
_NOTE_EVERY = 2.0
"""Seconds between notes of how far it is."""
_DECIDING = ("engine", "precision", "test_time_augmentation", "preprocess", "plugins", "part_options")
"""Options that predictions depend on, beyond rounding: those of speed and memory may change when it goes on."""


@dataclass(frozen=True)
class Predictions:
    """What came out.

    Args:
        path: the table.
        examples: its rows.
        step: of the checkpoint.
        skipped: how many examples could not be read.
        metrics: where the truth is known, else none.
        scores: of these, everything there is: classes, confusion matrix, precision and recall.
    """

    path: str
    examples: int
    step: int
    skipped: int
    metrics: dict[str, float]
    scores: dict[str, Any]


def predict(
    model_dir: str | Path,
    *sources: str | Path,
    checkpoint: str | int | None = None,
    split: str | None = None,
    output: str | Path = "predictions.csv",
    top: int = 1,
    probabilities: bool = False,
    overwrite: bool = False,
    on_bad: Literal["fail", "skip"] = "fail",
    source: str = "Python",
    **options: Any,
) -> Predictions:
    """Predicts every example of some files, in order.

    Args:
        model_dir: the run folder, or one of an exported SavedModel.
        *sources: images, folders or patterns of them; or one .csv file, .npz file, or records.
        checkpoint: best, latest or a step; by default best if there is one.
        split: predict this split of the run's own data, instead of files.
        output: a .csv or .jsonl file to write.
        top: how many classes to list of each example.
        probabilities: also list the probability of every class.
        overwrite: whether an output that is there may be replaced.
        on_bad: whether what can't be read ends it, or gets a row that says why.
        source: where the options come from, for error messages.
        **options: options that change how it is computed, such as eval_batch_size or engine.

    Example:
        >>> modelyard.predict("runs/first", "photos/", output="photos.csv", top=3).examples
    """
    target = Path(output).expanduser()
    if target.suffix.lower() not in FORMS:
        raise UserError(f"the output {target} must end in {', '.join(FORMS)}.")
    if target.exists() and not overwrite:
        raise UserError(f"{target} exists. Name another --output, or replace it with --overwrite.")
    if not target.parent.is_dir():
        raise UserError(f"there is no folder {target.parent} for the output.")
    if bool(sources) == (split is not None):
        raise UserError(
            "what shall be predicted? Give files or a folder, or --split for a split of the run's own data."
        )
    columns = {key: options.pop(key) for key in COLUMNS if options.get(key) is not None}
    run = _opened(model_dir, checkpoint, split, source, options)
    if split is not None and isinstance(run, OpenRun):
        found = _of_split(run, split)
    else:
        found = open_sources([*map(str, sources)], run.config, run.classes, columns, run.label)
    if not len(found.items):
        raise DataError("there are no examples to predict.")
    # Files are read as they come; arrays are there already.
    run.config = run.config.model_copy(update={"resident": "auto" if hasattr(found.items, "images") else "never"})
    work = _Work(run, found, target, top, probabilities, on_bad == "skip")
    return work.done()


def _opened(
    model_dir: str | Path, checkpoint: str | int | None, split: str | None, source: str, options: dict[str, Any]
) -> OpenRun | OpenExport:
    """A checkpoint of a run, or an exported model."""
    folder = Path(model_dir).expanduser()
    if storage.is_remote(model_dir) or not is_export(folder):
        return open_run(model_dir, checkpoint, source, **options)
    if checkpoint is not None or split is not None:
        word = "checkpoint" if checkpoint is not None else "split"
        raise UserError(f"{folder} is an export: it has no --{word}. Name the run folder instead.")
    return OpenExport(folder, options, source)


def _of_split(run: OpenRun, split: str) -> ToPredict:
    from modelyard.data.decoded import raw_examples_of
    from modelyard.data.open_dataset import open_dataset

    dataset = open_dataset(run.config, run.config.validation_fraction)
    dataset.size(split)
    return ToPredict(raw_examples_of(dataset)[split], labelled=True)


class _Work:
    """One table on its way.

    Args:
        run: the run and its checkpoint.
        found: what to predict.
        target: the table.
        top: how many classes to list.
        everything: also all probabilities.
        skips: what can't be read gets a row.
    """

    def __init__(
        self, run: OpenRun | OpenExport, found: ToPredict, target: Path, top: int, everything: bool, skips: bool
    ) -> None:
        self.run, self.found, self.target = run, found, target
        self.top, self.everything, self.skips = top, everything, skips
        self.form: CsvForm | JsonForm = FORMS[target.suffix.lower()]()
        self.partial = target.with_name(PARTIAL + target.name)
        self.note = target.with_name(PARTIAL + target.name + ".json")
        self.key = self._key()
        self.scores: Scores | None = None
        self.table: Table | None = None
        self.skipped, self._told = 0, 0.0

    def _key(self) -> str:
        """Changes when anything that decides the table does."""
        weights = self.run.path.stat().st_mtime_ns
        options = [(name, getattr(self.run.config, name)) for name in _DECIDING]
        parts = (self.run.address, self.run.path.name, weights, self.found.items.fingerprint(), options)
        return hashlib.sha256(
            repr((*parts, self.top, self.everything, self.skips, self.found.labelled)).encode()
        ).hexdigest()

    def done(self) -> Predictions:
        """Writes the table, what is left of it."""
        from modelyard.system.console import bar

        engine, dataset = self.run.engine(self.found.items, labelled=self.found.labelled, skips=self.skips)
        unreadable: dict[int, str] = getattr(dataset.stored, "bad", {})
        size, rows = len(self.found.items), self._rows_so_far()
        try:
            with (
                self._open(rows) as file,
                bar("predicting", size) as progress,
                explain(self.target, "write"),
                ThreadPoolExecutor(1) as pool,  # writes one batch while the next is computed
            ):
                written: Future[None] | None = None
                for found in engine.predict(TEST, first=rows):
                    if written is not None:
                        written.result()
                    written = pool.submit(self._write, file, found, rows, unreadable)
                    rows += len(next(iter(found.values())))
                    progress(rows)
                if written is not None:
                    written.result()
                file.flush()
                os.fsync(file.fileno())
        except UndecodableError as error:
            raise DataError(f"{error} With --on_bad skip such a file gets a row that says why.") from error
        finally:
            engine.close()
        scores = self.scores.as_json() if self.scores is not None and self.found.labelled else {}
        metrics = self.scores.metrics() if self.scores is not None and self.found.labelled else {}
        beside = self.target.with_suffix(".metrics.json")
        if scores:  # first: with the table, all is done
            write_text(beside, json.dumps(scores) + "\n")
        with explain(self.target, "write"):
            if not scores and self.target.exists():  # of the table that is replaced
                beside.unlink(missing_ok=True)
            self.partial.replace(self.target)
            self.note.unlink(missing_ok=True)
        if self.skipped:
            log.warning("%d of %d examples could not be read; the column error says why", self.skipped, size)
        return Predictions(str(self.target), rows, self.run.step, self.skipped, metrics, scores)

    def _write(self, file: BinaryIO, found: dict[str, Any], first: int, unreadable: dict[int, str]) -> None:
        """The rows of one batch, and now and then how far it is."""
        rows = first + len(next(iter(found.values())))
        bad = {n - first: unreadable.pop(n) for n in range(first, rows) if n in unreadable}
        self.skipped += len(bad)
        file.write(self._lines(found, first, bad))
        if time.monotonic() - self._told > _NOTE_EVERY:
            self._note(file, rows)
            self._told = time.monotonic()

    def _lines(self, found: dict[str, Any], first: int, bad: dict[int, str]) -> bytes:
        """The rows of a batch, with the first line of the table before the first."""
        start = b""
        table = self._table_for(found)
        columns = table.columns(found)
        if not first:
            start = self.form.header(columns)
        count = len(next(iter(found.values())))
        paths = [self.found.items.name(n) for n in range(first, first + count)]
        truth = self.found.items.labels[first : first + count] if self.found.labelled else None
        if truth is not None and self.scores is not None:
            good = np.array([n not in bad for n in range(count)])
            self.scores.add(truth[good], {name: values[good] for name, values in found.items()})
        return start + self.form.lines(columns, table.rows(found, paths, truth, bad))

    def _table_for(self, found: dict[str, Any]) -> Table:
        if self.table is None:
            classes, kind = self.run.classes, kind_of(found)
            options = {"top": self.top, "everything": self.everything, "labelled": self.found.labelled}
            self.table = Table(classes, kind, **options, errors=self.skips)  # type: ignore[arg-type]
            if self.scores is None:
                self.scores = Scores(classes, kind)
        return self.table

    # -- going on ---------------------------------------------------------------------------------------------------

    def _rows_so_far(self) -> int:
        """How many rows an earlier start has written; none if it was about anything else."""
        try:
            note = json.loads(self.note.read_text(encoding="utf-8"))
            rows, size, self.skipped = int(note["rows"]), int(note["bytes"]), int(note["skipped"])
            same = note["key"] == self.key and self.partial.stat().st_size >= size
            if same:  # here, since there may be no rows left that would tell what was counted
                self.scores = Scores.going_on(self.run.classes, note["scores"])
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        if not same:
            self.note.unlink(missing_ok=True)
            self.skipped = 0
            return 0
        with explain(self.partial, "write"):
            os.truncate(self.partial, size)
        log.info("going on after %d of %d examples", rows, len(self.found.items))
        return rows

    @contextlib.contextmanager
    def _open(self, rows: int) -> Iterator[BinaryIO]:
        with explain(self.target, "write"):
            file = open(self.partial, "ab" if rows else "wb")  # noqa: SIM115
        with file:
            yield file

    def _note(self, file: BinaryIO, rows: int) -> None:
        """What is written so far is found by the next start."""
        file.flush()
        os.fsync(file.fileno())
        scores = self.scores.state() if self.scores is not None else None
        note = {"key": self.key, "rows": rows, "bytes": file.tell(), "skipped": self.skipped, "scores": scores}
        write_text(self.note, json.dumps(note))
