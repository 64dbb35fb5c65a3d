"""Scores of a table of predictions whose labels are known: those of `evaluate`, by the same code.

A run is evaluated while it predicts. An export has neither a loss nor metrics of its own task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modelyard.data.dataset import LABEL, TEST, Dataset
from modelyard.data.raw_examples import RawExamples
from modelyard.engine.evaluation import (
    FEATURE,
    PREDICTION,
    EvaluationSums,
    LabelledBatch,
    metrics_of,
    standard_metrics_and,
    values_to_measure,
    without_unread,
)
from modelyard.run.tensors import pack_tensors, unpack_tensors
from modelyard.serving.exported_model import ExportEngine, OpenExport
from modelyard.serving.prediction.table import Confusion, Scores
from modelyard.serving.run_model import OpenRun
from modelyard.serving.servable import Outputs

if TYPE_CHECKING:
    from modelyard.engine.base import Engine

_SUM, _VALUE, _USED = "sum/", "value/", "used"


class TableScores:
    """Metrics and confusion matrix, updated batch by batch. A file keeps the batches until the table is complete.

    Args:
        model: the run or export.
        engine: its engine.
        dataset: the dataset of the engine.
        examples: the examples with their labels.
        file: where batches are kept.
    """

    def __init__(
        self,
        model: OpenRun | OpenExport,
        engine: Engine | ExportEngine,
        dataset: Dataset,
        examples: RawExamples,
        file: Path,
    ) -> None:
        self._engine, self._examples, self._file = engine, examples, file
        self._evaluates = isinstance(model, OpenRun) and {*model.recorded_data().features} <= {*dataset.features}
        task = None if isinstance(engine, ExportEngine) else engine.task
        if isinstance(model, OpenExport):
            self._metrics = standard_metrics_and(model.config.metrics, model.info.task_type)
        elif task is not None:
            self._metrics = metrics_of(task, model.config.metrics)
        self._sums = EvaluationSums(task if self._evaluates else None, self._metrics, len(examples))
        self._confusion = Confusion(model.classes)
        self._new: list[bytes] = []
        self.bytes = 0

    def batches(self, first: int, bad: Mapping[int, str]) -> Iterator[tuple[Outputs, LabelledBatch]]:
        """Yields the predictions of each batch from the example ``first`` on, and what its scores are computed from.

        Args:
            first: the example to start with.
            bad: the examples that could not be read, by number.
        """
        if self._evaluates and not isinstance(self._engine, ExportEngine):
            yield from self._engine.predict_labelled(TEST, first, bad)
            return
        for outputs in self._engine.predict(TEST, first=first):
            rows = range(first, first + len(next(iter(outputs.values()))))
            values = values_to_measure(outputs, self._examples.labels[rows.start : rows.stop])
            used = np.array([n not in bad for n in rows])
            yield outputs, LabelledBatch({}, without_unread(values, self._metrics), used)
            first = rows.stop

    def add(self, batch: LabelledBatch) -> None:
        """Adds a batch, which `save` will write."""
        named = [(_SUM, batch.sums), (_VALUE, batch.examples), ("", {_USED: batch.used})]
        packed = pack_tensors({prefix + name: array for prefix, arrays in named for name, array in arrays.items()})
        self._new += [len(packed).to_bytes(8, "little"), packed]
        self._add(batch)

    def _add(self, batch: LabelledBatch) -> None:
        self._sums.add(batch.sums, batch.examples, batch.used)
        found, labels = (batch.examples.get(name) for name in (PREDICTION + "class", FEATURE + LABEL))
        if found is not None and labels is not None and found.shape == labels.shape:
            self._confusion.add(labels[batch.used], found[batch.used])

    def as_json(self) -> tuple[dict[str, float], Scores]:
        """Returns the metrics; and everything for the file beside the table."""
        metrics = self._sums.result().metrics
        matrix = self._confusion.as_json() if self._confusion.counts.any() else {}
        return metrics, Scores({"examples": self._sums.count, **metrics, **matrix})

    # -- for the next process -----------------------------------------------------------------------------------------

    def save(self) -> int:
        """Appends the new batches to the file, and returns its size."""
        with open(self._file, "ab") as file:
            file.truncate(self.bytes)
            file.writelines(self._new)
            self.bytes, self._new = file.tell(), []
        return self.bytes

    def load(self, size: int) -> None:
        """Adds the batches of an earlier process.

        Args:
            size: the bytes of the file that are complete.

        Raises:
            ValueError: if the file is shorter or damaged.
        """
        with open(self._file, "rb") as file:
            while file.tell() < size:
                packed = file.read(int.from_bytes(file.read(8), "little"))
                named = unpack_tensors(packed, str(self._file))
                sums, values = (
                    {name.removeprefix(prefix): array for name, array in named.items() if name.startswith(prefix)}
                    for prefix in (_SUM, _VALUE)
                )
                self._add(LabelledBatch(sums, values, named[_USED].astype(bool)))
            if file.tell() != size:
                raise ValueError(f"{self._file} is cut")
        self.bytes = size

    def discard(self) -> None:
        """Removes the file."""
        self._file.unlink(missing_ok=True)
