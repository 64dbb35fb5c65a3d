"""`modelyard.load`: a run or an export as a Python object, which predicts arrays and files.

It predicts as `serve` does and reads what `predict` reads: the same engine, compiled once, and the same decoding.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from modelyard.config import Config
from modelyard.config.backend import keras_backend, select_engine
from modelyard.config.calls import Call
from modelyard.config.durations import RunLength
from modelyard.data.dataset import LABEL, SPLITS, TEST
from modelyard.data.decoded import dataset_to_predict
from modelyard.data.image_spec import UndecodableError
from modelyard.data.inputs import describe, spec_of
from modelyard.data.pipeline import Pipeline
from modelyard.data.raw_examples import ArrayExamples, RawExamples
from modelyard.engine.evaluation import standard_metrics_and
from modelyard.errors import DataError, UserError
from modelyard.loop import existing_run
from modelyard.loop.run import Result, best_of
from modelyard.registry import ENGINES
from modelyard.run.metrics import read_metrics
from modelyard.serving.exported_model import ExportedServable, OpenExport, is_export_at
from modelyard.serving.prediction.predict import open_examples, open_model
from modelyard.serving.prediction.table import TASK_OF_OUTPUT, Confusion, Scores, Table, output_type
from modelyard.serving.run_model import OpenRun, RunServable
from modelyard.serving.servable import Servable
from modelyard.system.text import aligned

if TYPE_CHECKING:
    import keras


class Rows(list[dict[str, Any]]):
    """Rows of a table, as dictionaries. It prints as a table."""

    def __str__(self) -> str:
        names = [*dict.fromkeys(name for row in self for name in row)]
        return aligned([names, *([row.get(name) for name in names] for row in self)]) if self else "no rows"

    def _repr_html_(self) -> str:
        """Returns the table for a notebook."""
        names = [*dict.fromkeys(name for row in self for name in row)]
        rows = [names, *([row.get(name, "") for name in names] for row in self)]
        cells = ("".join(f"<td>{html.escape(str(value))}</td>" for value in row) for row in rows)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    def to_pandas(self) -> Any:
        """Returns a data frame of pandas.

        Raises:
            UserError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas() needs pandas. Install it: pip install pandas") from error
        return pandas.DataFrame(list(self))


class Predicted(dict[str, NDArray[Any]]):
    """Predictions of `Run.predict`: arrays by name, with one value or row per example.

    Names are ``class``, ``label`` and ``probabilities`` for a classifier, ``labels`` and ``probabilities`` for
    multi-label, ``values`` for a regression, and those of the task for others.

    Args:
        outputs: the arrays.
        classes: names of the classes.
        paths: the file of each example, or its position.
        truth: the known labels; None if there are none.
        bad: why examples could not be read, by position.
        metrics: the metrics by name that `scores` has besides those of every run of the task.
    """

    def __init__(
        self,
        outputs: Mapping[str, NDArray[Any]],
        classes: Sequence[str],
        paths: Sequence[str],
        truth: NDArray[Any] | None,
        bad: Mapping[int, str],
        metrics: Sequence[Call] = (),
    ) -> None:
        super().__init__(outputs)
        self._metrics = tuple(metrics)
        self.classes, self.paths, self.truth, self.bad = tuple(classes), list(paths), truth, dict(bad)

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name} {values.dtype}{list(values.shape)}" for name, values in self.items())
        return f"<modelyard.Predicted: {arrays}>"

    def table(self, top: int = 1, probabilities: bool = False) -> Rows:
        """Returns the rows that `modelyard.predict` writes.

        Args:
            top: how many classes to list per example.
            probabilities: whether to add the probability of every class.
        """
        table = Table(
            self.classes, top=top, probabilities=probabilities, labelled=self.truth is not None, errors=bool(self.bad)
        )
        columns, rows = table.rows(self._numbers(), self.paths, self.truth, self.bad)
        return Rows(dict(zip(columns, row, strict=True)) for row in rows)

    def to_pandas(self, top: int = 1, probabilities: bool = False) -> Any:
        """Returns `table` as a data frame of pandas."""
        return self.table(top, probabilities).to_pandas()

    @cached_property
    def scores(self) -> Scores:
        """Metrics of the examples with labels; for classes also ``confusion``, whose rows are the labels.

        They are those of `Run.evaluate`, without the loss and the metrics of a task of your own.
        """
        if self.truth is None:
            raise DataError("these predictions have no labels to compare with: predict((x, y)) has.")
        good = np.array([n not in self.bad for n in range(len(self.truth))])
        predicted, labels = {name: values[good] for name, values in self._numbers().items()}, self.truth[good]
        metrics = standard_metrics_and(self._metrics, TASK_OF_OUTPUT[output_type(predicted)])
        metrics.add(predicted, {LABEL: labels})
        found = Scores({"examples": len(labels), **metrics.results()})
        if "class" not in predicted or predicted["class"].shape != labels.shape:
            return found
        confusion = Confusion(self.classes)
        confusion.add(labels, predicted["class"])
        return Scores({**found, **confusion.as_json()})

    def _numbers(self) -> dict[str, NDArray[Any]]:
        return {name: values for name, values in self.items() if name != "label"}


class Run:
    """A run at one of its checkpoints, or an export. Make one with `modelyard.load`."""

    def __init__(self, opened: OpenRun | OpenExport, options: Mapping[str, Any]) -> None:
        self._opened, self._options = opened, dict(options)

    def __repr__(self) -> str:
        return f"<modelyard.Run {self.path}: {self.info}>"

    @property
    def info(self) -> str:
        """The model and the data, in words."""
        opened = self._opened
        about = opened.info if isinstance(opened, OpenExport) else opened.config
        return f"{about.model} on {Path(about.dataset).name}, step {opened.step}"

    @property
    def path(self) -> str:
        """The path or URL of the run, or of the exported version."""
        return self._opened.address

    @property
    def step(self) -> int:
        """The step of the model."""
        return self._opened.step

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the probabilities."""
        return tuple(self._opened.classes)

    @property
    def config(self) -> Config:
        """The config of the run."""
        return self._run("config").config

    @property
    def metrics(self) -> Rows:
        """The rows of metrics.jsonl: training, validation and test, in the order they were measured."""
        directory = self._run("metrics").directory
        return Rows([*read_metrics(directory.metrics), *read_metrics(directory.evaluations)])

    def curve(self, metric: str = "loss", split: str = "validation") -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Returns the steps at which a metric was measured, and its values: ``pyplot.plot(*run.curve("accuracy"))``.

        Raises:
            DataError: if it was never measured on that split.
        """
        measured = self.metrics
        rows = [row for row in measured if row.get("split") == split and row.get(metric) is not None]
        if not rows:
            known = sorted({f"{key} ({row.get('split')})" for row in measured for key in row if _is_metric(row, key)})
            raise DataError(f"there is no {metric} of {split} in this run. It has: {', '.join(known) or 'none'}.")
        return np.array([row["step"] for row in rows]), np.array([row[metric] for row in rows], np.float64)

    @cached_property
    def model(self) -> keras.Model:
        """The Keras model, with the weights that are evaluated. A classifier returns logits.

        Its inputs are examples after the run's own preprocessing; the built-in models take raw images.
        """
        run = self._run("model")
        select_engine(run.config.engine)
        from modelyard.compat.keras import session_of
        from modelyard.engine.network import averaged_weights, name_weights
        from modelyard.models.choose_task import task_for

        recorded = run.recorded_data()
        with session_of(run.config):
            model = task_for(run.config, recorded.data, recorded.label).checked_network()
        weights = averaged_weights(run.config, run.checkpoint.weights, run.checkpoint.optimizer)
        for name, variable in name_weights(model).items():
            variable.assign(weights[name])
        return model

    def predict(self, data: Any, *, on_bad: Literal["fail", "skip"] = "fail", **columns: Any) -> Predicted:
        """Predicts arrays or files, in order.

        Args:
            data: an array of examples or one example; (x, y), to compare with labels; a data frame; or what
                `modelyard.predict` takes: a path or a list of paths of images, folders, a .csv or .npz file, records.
                For a model of several inputs, {name: array} in place of the array.
            on_bad: whether an unreadable file is an error (fail), or has its reason in ``bad`` (skip).
            **columns: options of columns and records, such as image_column.

        Example:
            >>> run = modelyard.load("runs/first")
            >>> run.predict(images)["label"]
        """
        examples, labelled = open_examples(self._opened, (data,), columns)
        model, size = self._servable, len(examples)
        # Sizes are powers of two, so that few are compiled.
        batch_size = min(1 << (size - 1).bit_length(), self._opened.config.eval_batch_size)
        batch_size = -(-batch_size // model.batch_multiple) * model.batch_multiple
        dataset = dataset_to_predict(examples, self.classes, model.info.inputs, skip_bad=on_bad == "skip")
        resident = "auto" if isinstance(examples, ArrayExamples) else "never"
        config = self._opened.config.model_copy(update={"resident": resident})
        pipeline = Pipeline(config, dataset, RunLength(size, batch_size, 1))
        found = []
        try:
            for batch, weights in pipeline.evaluation(TEST, batch_size):
                count = int(weights.sum())
                outputs = model.predict({name: np.array(batch[name]) for name in model.info.inputs})
                found.append({name: values[:count] for name, values in outputs.items()})
        except UndecodableError as error:
            raise DataError(f"{error} With on_bad='skip', the others are predicted.") from error
        finally:
            pipeline.close()
        outputs = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
        paths = [examples.name(number) for number in range(size)]
        truth = examples.labels if labelled else None
        return Predicted(outputs, self.classes, paths, truth, dataset.bad, self._opened.config.metrics)

    def evaluate(self, data: Any = "validation", **columns: Any) -> Result:
        """Evaluates the model, every example counted once.

        Args:
            data: a split of the run's data; or examples with labels: (x, y), a data frame, a folder per class, ….
            **columns: options of columns and records, such as label_column.

        Example:
            >>> modelyard.load("runs/first").evaluate((x_test, y_test)).metrics["accuracy"]
        """
        run = self._run("evaluate")
        if isinstance(data, str) and data in SPLITS:
            return existing_run.evaluate(self.path, checkpoint=self.step, split=data, **self._options)
        examples, labelled = open_examples(run, (data,), columns)
        if not labelled:
            raise DataError("these examples have no labels to evaluate with. Give (x, y), or a folder per class.")
        return evaluate_examples(run, examples)

    # -- parts --------------------------------------------------------------------------------------------------------

    @cached_property
    def _servable(self) -> Servable:
        """The model that predicts, with its compiled functions."""
        if isinstance(self._opened, OpenExport):
            return ExportedServable(self._opened.path)
        return RunServable(self._opened)

    def _run(self, what: str) -> OpenRun:
        if isinstance(self._opened, OpenExport):
            raise UserError(f"{self.path} is an export, which has no {what}: load the run. An export can predict.")
        return self._opened


def evaluate_examples(run: OpenRun, examples: RawExamples) -> Result:
    """Evaluates a run on labelled examples; the split of the result is "given"."""
    engine, _ = run.engine(examples, labelled=True)
    try:
        metrics = engine.evaluate(TEST)
    except KeyError as error:  # in the task or the user's own code
        name = error.args[0] if error.args else None
        if not isinstance(name, str) or name not in run.features:
            raise
        missing = describe({name: spec_of(run.features[name])})
        raise DataError(
            f"the loss or a metric reads {missing}, which is not given. Give it beside the inputs."
        ) from error
    finally:
        engine.close()
    return Result(run.address, run.step, "given", metrics, run.step, best=best_of(run.directory))


def load(model_dir: str | os.PathLike[str], checkpoint: str | int | None = None, **options: Any) -> Run:
    """Opens a run, or the newest version of an exported SavedModel, to use it from Python.

    Args:
        model_dir: the run folder, or the folder of an export; or its URL; or the result of a run.
        checkpoint: best, latest or a step; by default best if there is one.
        **options: options that change how it is computed, such as eval_batch_size; ``dataset``, if the run was trained
            on arrays and its splits are to be evaluated. By default, the engine is that of Keras in this process.

    Raises:
        UserError: if there is no run, or no such checkpoint.

    Example:
        >>> run = modelyard.load("runs/first")
        >>> run.predict(images)["probabilities"]
        >>> run.model.summary()
    """
    model_dir = os.fspath(model_dir)
    backend = keras_backend()
    if backend in ENGINES.names() and not is_export_at(model_dir):
        options = {"engine": backend, **options}
    return Run(open_model(model_dir, checkpoint, "Python", options), options)


def _is_metric(row: Mapping[str, Any], key: str) -> bool:
    return isinstance(row[key], float) and key not in ("epoch", "seconds", "examples_per_second")
