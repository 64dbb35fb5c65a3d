"""`modelyard predict`: predicts a user's files into a table. After a kill, the same command resumes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from modelyard import storage
from modelyard.config.schema import split_group_of
from modelyard.data.catalog import FilesOptions
from modelyard.data.dataset import ID, IMAGE, LABEL, TEST, Feature
from modelyard.data.decoded import examples_of
from modelyard.data.image_spec import ImageSpec, UndecodableError
from modelyard.data.inputs import checked_arrays, describe, is_one_image, spec_of
from modelyard.data.preprocess import with_example_preprocessing
from modelyard.data.raw_examples import ArrayExamples, FileExamples, RawExamples
from modelyard.data.sources.arrays import frame_columns, has_names, is_frame, read_given
from modelyard.data.sources.csv_file import label_columns
from modelyard.data.sources.files import FilesToPredict, read_to_predict, targets_of
from modelyard.data.sources.named_inputs import image_paths, read_named_inputs
from modelyard.data.sources.remote import local_tree
from modelyard.engine.evaluation import LabelledBatch
from modelyard.errors import DataError, RunError, UserError, unknown
from modelyard.loop.existing_run import check_data_of_run
from modelyard.run.checkpoint import STATE
from modelyard.serving.exported_model import OpenExport, is_export_at
from modelyard.serving.prediction.scores import TableScores
from modelyard.serving.prediction.table import FORMATS, Scores, Table
from modelyard.serving.run_model import OpenRun, open_run
from modelyard.serving.servable import Outputs
from modelyard.system.files import PARTIAL, explain, write_text

log = logging.getLogger("modelyard")
_COLUMNS = ("image_column", "label_column", "label_kind", "value_columns", *(
    name for name in FilesOptions.model_fields if name.startswith("record_")))  # fmt: skip
"""Options of columns and records. They may differ from training."""
_Labelled = tuple[RawExamples, bool]
"""Examples, and whether they have labels of the run's classes."""
_SAVE_PROGRESS_SECONDS = 2.0
_KEY_OPTIONS = (
    *("engine", "precision", "test_time_augmentation", "test_time_augmentation_below"),
    *("preprocess", "metrics", "plugins", "component_options"),
)
"""Options that change predictions. Options of speed and memory may differ when a table is resumed."""


@dataclass(frozen=True)
class Predictions:
    """The result of `predict`.

    Args:
        path: the table.
        examples: the number of its rows.
        step: the step of the checkpoint.
        skipped: how many examples could not be read.
        metrics: those of `evaluate`, if the examples have labels; else empty. An export has no loss.
        scores: the same, and for classes the confusion matrix, precision and recall.
    """

    path: str
    examples: int
    step: int
    skipped: int
    metrics: dict[str, float]
    scores: Scores

    def __str__(self) -> str:
        skipped = f", {self.skipped} of them not readable" if self.skipped else ""
        text = f"{self.examples:,} predictions by the model of step {self.step} in {self.path}{skipped}"
        return f"{text}\n{self.scores}" if self.scores else text


def predict(
    model_dir: str | os.PathLike[str],
    *sources: Any,
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
    """Predicts the examples of files, in order, and writes a table.

    Args:
        model_dir: the run folder, or the folder of an exported SavedModel; or the result of a run. This and the other
            paths may be URLs.
        *sources: images, folders or glob patterns; or one .csv file, .npz file, or records; or one array of examples,
            (x, y) or data frame. `modelyard.load` predicts arrays without writing a table.
        checkpoint: best, latest or a step; by default best if there is one.
        split: predict this split of the run's own data instead of files.
        output: the .csv or .jsonl file to write.
        top: how many classes to list per example.
        probabilities: add the probability of every class.
        overwrite: replace an existing output.
        on_bad: whether an unreadable example is an error (fail), or gets a row with the reason (skip).
        source: where the options come from, for error messages.
        **options: options that change how it is computed, such as eval_batch_size or engine.

    Example:
        >>> modelyard.predict("runs/first", "photos/", output="photos.csv", top=3).examples
    """
    model_dir = os.fspath(model_dir)
    target = storage.absolute(str(output)) if storage.is_remote(str(output)) else str(Path(output).expanduser())
    if Path(target).suffix.lower() not in FORMATS:
        raise UserError(f"the output {target} must end in {', '.join(FORMATS)}.")
    if not storage.is_remote(target) and not Path(target).parent.is_dir():
        raise UserError(f"there is no folder {Path(target).parent} for the output.")
    if bool(sources) == (split is not None):
        named = " ".join(str(each) if isinstance(each, str | Path) else "arrays" for each in sources)
        found = f"got both --split {split} and {named}" if sources else "nothing to predict"
        raise UserError(f"{found}. Give either files or a folder, or --split for a split of the run's own data.")
    columns = {key: options.pop(key) for key in _COLUMNS if options.get(key) is not None}
    run = open_model(model_dir, checkpoint, source, options)
    _refuse_existing(target, overwrite)
    if split is not None and isinstance(run, OpenExport):
        raise UserError(f"{run.address} is an export: it has no --split. Name the run folder instead.")
    if split is not None and isinstance(run, OpenRun):
        examples, labelled = _split_examples(run, split)
    else:
        examples, labelled = open_examples(run, sources, columns)
    # Files are streamed; arrays are in memory already.
    run.config = run.config.model_copy(update={"resident": "auto" if hasattr(examples, "images") else "never"})
    table = Table(run.classes, top=top, probabilities=probabilities, labelled=labelled, errors=on_bad == "skip")
    return _TableWriter(run, examples, table, target, overwrite).run()


def _refuse_existing(target: str, overwrite: bool) -> None:
    if not overwrite and storage.exists(target if storage.is_remote(target) else Path(target)):
        raise UserError(f"{target} exists. Name another --output, or replace it with --overwrite.")


# -- the model and the examples ------------------------------------------------------------------------------------


def open_model(
    model_dir: str | Path, checkpoint: str | int | None, source: str, options: dict[str, Any]
) -> OpenRun | OpenExport:
    """Opens a checkpoint of a run, or an exported model."""
    if not is_export_at(model_dir):
        return open_run(model_dir, checkpoint, source, **options)
    if checkpoint is not None:
        raise UserError(f"{model_dir} is an export: it has no --checkpoint. Name the run folder instead.")
    return OpenExport(model_dir, options, source)


def _split_examples(run: OpenRun, split: str) -> _Labelled:
    from modelyard.data.decoded import raw_examples_of
    from modelyard.data.open_dataset import open_dataset

    dataset = open_dataset(run.config)
    check_data_of_run(run.directory, run.config, with_example_preprocessing(dataset, run.config.preprocess))
    dataset.size(split)
    # All features, since loss and metrics may read more than predictions.
    features = (IMAGE,) if run.takes_image_only else [name for name in run.features if name not in (ID, LABEL)]
    return raw_examples_of(dataset, features)[split], True


def open_examples(run: OpenRun | OpenExport, sources: Sequence[Any], columns: Mapping[str, Any]) -> _Labelled:
    """Returns the examples of a user, in order.

    Args:
        run: the model. Its dataset options are the defaults of ``columns``. Labels of files unlike its own are left
            out.
        sources: image files, folders of them, patterns; or one .csv file, .npz file, or records; or one array of
            examples, pair (x, y), data frame or list of paths.
        columns: options of `_COLUMNS`.

    Raises:
        DataError: if there is nothing, or nothing that can be read.
    """
    known, classes = run.config.options_of("dataset"), run.classes
    own = known.model_dump() if isinstance(known, FilesOptions) else {}
    if own.get("label_kind", "class") == "class":  # the run was trained on arrays or a dataset of its own
        own["label_kind"] = _label_kind(run.label)
    options = FilesOptions.model_validate({**own, **columns})
    paths = _paths(sources)
    if paths is None:
        found = _given(run, sources[0], options, [*columns])
    elif not run.takes_image_only and not is_one_image(run.inputs):
        found = _named_files(run, paths, options)
    else:
        group = run.config.split_group
        column = "" if group is None else split_group_of(group)[0]
        found = read_to_predict(paths, options, storage.cache_folder(run.config.cache_dir), column, [*columns])
        if isinstance(found.examples, ArrayExamples) and options.image_size is None:
            _check_size(found.examples.images, run.inputs[IMAGE])
    examples, labels = found.examples, found.labels
    if not len(examples):
        raise DataError("there are no examples to predict.")
    if labels is None:
        if found.unlabelled:
            log.warning("labels are left out: %s", found.unlabelled)
        return examples, False
    if isinstance(labels, np.ndarray):
        if found.columns and sorted(found.columns) == sorted(classes):  # columns are found by their names
            examples.labels = labels = labels[:, [found.columns.index(name) for name in classes]]
        problem = _label_mismatch(labels, run.label, len(classes))
    else:
        numbers = {name: number for number, name in enumerate(classes)}
        wrong = next((name for name in labels if name not in numbers), None)
        problem = None if wrong is None else unknown("class", wrong, classes)
        if problem is None:
            examples.labels = np.array([numbers[name] for name in labels], np.int32)
    if problem is None:
        return examples, True
    if paths is None and not isinstance(examples, FileExamples):  # a data frame of paths is a table
        raise DataError(f"these labels do not fit the run: {problem}")
    if not found.from_folders:  # folders may have other names for other reasons
        log.warning("labels are left out: %s", problem)
    examples.labels = np.zeros(len(examples), np.int32)
    return examples, False


def _paths(sources: Sequence[Any]) -> list[str] | None:
    """Returns the paths that are given, one by one or as a list; None if something else is given."""
    flat = sources[0] if len(sources) == 1 and isinstance(sources[0], list) else sources
    if all(isinstance(each, str | Path) for each in flat):
        return [*map(str, flat)]
    if len(sources) > 1:
        raise UserError("several things to predict are given, and not all are paths. Give one array of all examples.")
    return None


def _named_files(run: OpenRun | OpenExport, paths: list[str], options: FilesOptions) -> FilesToPredict:
    """Returns the examples of one file with a column or an array per input."""
    if len(paths) > 1:
        raise DataError(
            f"the model takes {describe(run.inputs)}. Give one file that has all inputs: .npz, .csv, .jsonl."
        )
    path = Path(paths[0]).expanduser()
    if storage.is_remote(paths[0]):
        cache = storage.cache_folder(run.config.cache_dir)
        path = local_tree(paths[0], cache, lambda table: image_paths(table, options))
    examples, labels = read_named_inputs(path, run.inputs, options)
    if isinstance(labels, list) and (run.label.shape or "float" in run.label.dtype):  # numbers, not class names
        try:
            labels = np.array([json.loads(text) for text in labels], np.float64)
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{path}: the labels are not numbers or JSON lists of one shape: {error}") from error
        examples.labels = labels
    return FilesToPredict(examples, labels)


def _given(run: OpenRun | OpenExport, data: Any, options: FilesOptions, named: Collection[str]) -> FilesToPredict:
    """Returns examples that a Python program gives, with ``named`` options of columns."""
    if is_frame(data) and options.image_column in data.columns and is_one_image(run.inputs):
        return _files_of_frame(data, options, "label_column" in named)
    inputs = run.inputs
    data = data if is_one_image(inputs) else frame_columns(data, inputs)
    named = () if options.value_columns == ("all",) else options.value_columns
    values, labels = read_given(data, run.value_columns or named)
    if not isinstance(values, Mapping):  # an array without a name
        values = {next(iter(inputs)) if len(inputs) == 1 and not has_names(data) else IMAGE: values}
    own = {name: feature for name, feature in run.features.items() if name not in (ID, LABEL)}
    # Loss and metrics may read more than predictions.
    given = {name: spec_of(feature) for name, feature in own.items() if name in values and name not in inputs}
    if options.image_size is not None and IMAGE in inputs and IMAGE in values:
        inputs = {**inputs, IMAGE: _of_any_size(inputs[IMAGE], np.asarray(values[IMAGE]))}
    arrays = checked_arrays(values, {**inputs, **given}, [ID])
    count = len(next(iter(arrays.values())))
    if labels is not None and len(labels) != count:
        raise DataError(f"there are {count} examples but {len(labels)} labels.")
    if labels is not None and labels.ndim == 2 and labels.shape[1:] == (1,) and not run.label.shape:
        labels = labels[:, 0]  # as in training
    numbers = labels is not None and labels.dtype.kind not in "USb"
    examples = examples_of(arrays, labels if numbers else None)
    return FilesToPredict(examples, labels if labels is None or numbers else labels.astype(str).tolist())


def _files_of_frame(frame: Any, options: FilesOptions, labelled: bool) -> FilesToPredict:
    """Returns the image files in a column of a data frame, and the labels in others; ``labelled``: they must exist."""
    names = [str(name) for name in frame[options.image_column]]
    columns = label_columns(options, [*frame.columns])
    missing = next((name for name in columns if name not in frame.columns), None)
    if missing is not None and labelled:
        raise DataError(f"{unknown('column', missing, map(str, frame.columns))} Name the right one with label_column.")
    examples = FileExamples(Path(), names, np.zeros(len(names), np.int32))
    if missing is not None:
        return FilesToPredict(examples, None)
    if options.label_kind == "class":
        return FilesToPredict(examples, [str(name) for name in frame[columns[0]]])
    try:
        labels = np.stack([np.asarray(frame[name], np.float32) for name in columns], axis=1)
    except (ValueError, TypeError) as error:
        raise DataError(f"a label column of the data frame is not numbers: {error}") from error
    examples.labels = targets_of(labels, options)
    return FilesToPredict(examples, examples.labels, columns=tuple(columns))


def _label_kind(label: Feature) -> Literal["class", "numbers", "flags"]:
    """Returns the `label_kind` of the labels that a run was trained on."""
    if label.dtype.startswith("float"):
        return "numbers"
    return "flags" if len(label.shape) == 1 else "class"


def _check_size(images: NDArray[Any], spec: ImageSpec) -> None:
    """Refuses images of another size if the run did not resize its own: arrays are what the model sees.

    Raises:
        DataError: with both sizes.
    """
    if len(spec.shape) == 3 and images.ndim == 4 and images.shape[1:3] != spec.shape[:2]:
        found, wanted = ("×".join(map(str, size)) for size in (images.shape[1:3], spec.shape[:2]))
        raise DataError(
            f"the images in the array are {found}, the model takes {wanted}. Arrays are only resized if the run "
            "resized its training images (--image_size). Resize them first, or give image files."
        )


def _of_any_size(spec: ImageSpec, images: NDArray[Any]) -> ImageSpec:
    """Returns the spec of images that will be resized, as the run resized its own."""
    size = images.shape[1:3] if images.ndim == 4 or (images.ndim == 3 and spec.shape[2] == 1) else images.shape[:2]
    return replace(spec, shape=(*size, *spec.shape[2:])) if len(spec.shape) == 3 and images.ndim > 2 else spec


def _label_mismatch(labels: NDArray[np.generic], label: Feature, classes: int) -> str | None:
    """Returns how ``labels`` differ from those of a run with ``classes`` classes; None if they do not."""
    if labels.shape[1:] != label.shape:
        return f"each has shape {labels.shape[1:]}, those of the run {label.shape}"
    if labels.dtype.kind not in "biuf":
        return f"they are {labels.dtype}, those of the run {label.dtype}"
    numbers = labels.astype(np.float64)
    if np.dtype(label.dtype).kind == "f":
        return None if np.isfinite(numbers).all() else "some are not finite"
    if len(label.shape) > 1:  # a map, whose pixels may have labels that are no class
        return None
    most = 1 if label.shape else classes - 1
    wrong = ~((numbers >= 0) & (numbers <= most) & (numbers == np.trunc(numbers)))
    if not wrong.any():
        return None
    found = f"there is a {numbers[wrong][0]:g}"
    return f"{found}, and flags are 0 or 1" if label.shape else f"{found}, and the run has {classes} classes"


# -- the table ----------------------------------------------------------------------------------------------------


class _TableWriter:
    """Predicts examples into one table.

    Args:
        model: the run with its checkpoint, or the export.
        examples: the examples to predict.
        table: converts predictions to rows.
        target: the file to write, or its URL. A table at a URL is written in the cache, and uploaded when complete.
        overwrite: replace an existing one.
    """

    def __init__(
        self, model: OpenRun | OpenExport, examples: RawExamples, table: Table, target: str, overwrite: bool
    ) -> None:
        self.model, self.examples, self.table, self.address = model, examples, table, target
        self.target, self.is_remote = Path(target), storage.is_remote(target)
        if self.is_remote:
            folder = storage.output_folder(target, storage.cache_folder(model.config.cache_dir))
            with explain(folder, "write to the cache"):
                folder.mkdir(parents=True, exist_ok=True)
            self.target = folder / self.target.name
        self.overwrite = overwrite
        self.partial = self.target.with_name(PARTIAL + self.target.name)
        self.progress = self.target.with_name(PARTIAL + self.target.name + ".json")
        self.measured = self.target.with_name(PARTIAL + self.target.name + ".scores")
        self.key = self._key()
        self.scores: TableScores | None = None
        self.skipped, self._saved_at = 0, 0.0

    def _key(self) -> str:
        """Returns a hash of everything that the table depends on."""
        path = self.model.path
        weights: object = path.stat().st_mtime_ns
        if storage.is_remote(self.model.address) and (path / STATE).is_file():  # what is downloaded is new each time
            weights = (path / STATE).read_bytes()
        options = [(name, getattr(self.model.config, name)) for name in _KEY_OPTIONS]
        kernels = os.environ.get("TF_ENABLE_ONEDNN_OPTS")  # they decide the last digit
        parts = (self.model.address, self.model.path.name, weights, self.examples.fingerprint(), options, kernels)
        columns = (self.table.top, self.table.probabilities, self.table.errors, self.table.labelled)
        return hashlib.sha256(repr((parts, columns)).encode()).hexdigest()

    def run(self) -> Predictions:
        """Writes the table, or the rest of it.

        Raises:
            RunError: if another process writes it.
        """
        with self._locked() as file:
            return self._run(file)

    def _run(self, file: BinaryIO) -> Predictions:
        from modelyard.system.console import bar

        labelled = self.table.labelled
        engine, dataset = self.model.engine(self.examples, labelled=labelled, skip_bad=self.table.errors)
        unreadable: dict[int, str] = getattr(dataset.stored, "bad", {})

        def new_scores() -> TableScores | None:
            return TableScores(self.model, engine, dataset, self.examples, self.measured) if labelled else None

        size, rows = len(self.examples), self._resume(file, new_scores)
        predicted: Iterator[tuple[Outputs, LabelledBatch | None]]
        if self.scores is None:
            predicted = ((outputs, None) for outputs in engine.predict(TEST, first=rows))
        else:
            predicted = self.scores.batches(rows, unreadable)
        try:
            with (
                bar("predicting", size) as show_progress,
                explain(self.target, "write"),
                ThreadPoolExecutor(1) as pool,  # writes one batch while the next is computed
            ):
                written: Future[None] | None = None
                for outputs, batch in predicted:
                    if written is not None:
                        written.result()
                    written = pool.submit(self._write, file, outputs, batch, rows, unreadable)
                    rows += len(next(iter(outputs.values())))
                    show_progress(rows)
                if written is not None:
                    written.result()
                file.flush()
                os.fsync(file.fileno())
        except UndecodableError as error:
            raise DataError(f"{error} With --on_bad skip, such a file gets a row with the reason.") from error
        finally:
            engine.close()
        metrics, scores = ({}, Scores()) if self.scores is None else self.scores.as_json()
        finite = {name: not isinstance(value, float) or math.isfinite(value) for name, value in scores.items()}
        numbers = {name: value if finite[name] else None for name, value in scores.items()}  # JSON has no NaN
        text = json.dumps(numbers) + "\n" if scores else None
        if self.is_remote:
            self._save_progress(file, rows)  # if the upload fails, the next start has nothing else to do
            self._upload(text)
        else:
            self._replace(text)
        if self.skipped:
            log.warning("%d of %d examples could not be read; see the column error", self.skipped, size)
        return Predictions(self.address, rows, self.model.step, self.skipped, metrics, scores)

    def _replace(self, metrics: str | None) -> None:
        """Renames the complete table; its metrics are there before it."""
        metrics_file = self.target.with_suffix(".metrics.json")
        if metrics is not None:
            write_text(metrics_file, metrics)
        with explain(self.target, "write"):
            if metrics is None and self.target.exists():  # the metrics of the table that is replaced
                metrics_file.unlink(missing_ok=True)
            self.partial.replace(self.target)
            self.progress.unlink(missing_ok=True)
            self.measured.unlink(missing_ok=True)

    def _upload(self, metrics: str | None) -> None:
        """Uploads the complete table after its metrics."""
        metrics_url = self.address[: -len(self.target.suffix)] + ".metrics.json"
        if metrics is not None:
            storage.write_bytes(metrics_url, metrics.encode())
        elif self.overwrite:
            storage.remove(metrics_url)
        if not storage.upload(self.partial, self.address, new=not self.overwrite):
            _refuse_existing(self.address, overwrite=False)
        with explain(self.partial, "remove"):
            self.partial.unlink()
            self.progress.unlink(missing_ok=True)
            self.measured.unlink(missing_ok=True)

    def _write(
        self, file: BinaryIO, outputs: Outputs, batch: LabelledBatch | None, first: int, unreadable: dict[int, str]
    ) -> None:
        """Writes the rows of one batch, and saves the progress every two seconds."""
        rows = first + len(next(iter(outputs.values())))
        bad = {n - first: unreadable.pop(n) for n in range(first, rows) if n in unreadable}
        self.skipped += len(bad)
        file.write(self._lines(outputs, first, rows, bad))
        if batch is not None and self.scores is not None:
            self.scores.add(batch)
        if time.monotonic() - self._saved_at > _SAVE_PROGRESS_SECONDS:
            self._save_progress(file, rows)
            self._saved_at = time.monotonic()

    def _lines(self, outputs: Outputs, first: int, end: int, bad: dict[int, str]) -> bytes:
        """Returns the rows of a batch, after the header if it is the first batch."""
        paths = [self.examples.name(n) for n in range(first, end)]
        labels = self.examples.labels[first:end] if self.table.labelled else None
        columns, rows = self.table.rows(outputs, paths, labels, bad)
        return FORMATS[self.target.suffix.lower()](columns, rows, not first)

    # -- resuming ---------------------------------------------------------------------------------------------------

    def _resume(self, file: BinaryIO, new_scores: Callable[[], TableScores | None]) -> int:
        """Returns how many rows an earlier process has written; 0 if anything that matters has changed.

        Args:
            file: the unfinished table, which is cut to them.
            new_scores: makes scores of no rows yet; None without labels.
        """
        self.scores = new_scores()
        try:
            saved = json.loads(self.progress.read_text(encoding="utf-8"))
            rows, size, self.skipped = int(saved["rows"]), int(saved["bytes"]), int(saved["skipped"])
            same = saved["key"] == self.key and os.fstat(file.fileno()).st_size >= size
            if same and self.scores is not None:
                self.scores.load(int(saved["scores"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, UserError):
            same = False
        if not same:
            self.progress.unlink(missing_ok=True)
            self.measured.unlink(missing_ok=True)
            rows, size, self.skipped, self.scores = 0, 0, 0, new_scores()
        with explain(self.partial, "write"):
            file.truncate(size)
        if same:
            log.info("resuming after %d of %d examples", rows, len(self.examples))
        return rows

    @contextlib.contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Opens the unfinished table as the only process. The lock ends with the process."""
        with explain(self.target, "write"):
            file = self._open()
        try:
            _refuse_existing(self.address, self.overwrite)  # the process that had the lock has finished it
            yield file
        finally:
            with contextlib.suppress(OSError):
                if _is_open_file(file, self.partial) and not os.fstat(file.fileno()).st_size:
                    self.partial.unlink()  # nothing was predicted
            file.close()

    def _open(self) -> BinaryIO:
        while True:
            file = open(self.partial, "ab")  # noqa: SIM115 - closed by `_locked`
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                message = f"another process is writing {self.address}. Wait until it ends, or name another --output."
                raise RunError(message) from None
            except OSError:  # some network file systems have no locks
                return file
            if _is_open_file(file, self.partial):
                return file
            file.close()  # it was finished in between: the file is the table now

    def _save_progress(self, file: BinaryIO, rows: int) -> None:
        """Saves how far the table is, for the next process."""
        file.flush()
        os.fsync(file.fileno())
        scores = 0 if self.scores is None else self.scores.save()
        saved = {"key": self.key, "rows": rows, "bytes": file.tell(), "skipped": self.skipped, "scores": scores}
        write_text(self.progress, json.dumps(saved))


def _is_open_file(file: BinaryIO, path: Path) -> bool:
    """Returns whether ``path`` is still the file that was opened."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
