"""A table of predictions: its columns for each task, CSV and JSON lines, and the confusion matrix."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.models.metric_types import CLASSIFICATION, MULTI_LABEL, REGRESSION, Precision, Recall
from modelyard.serving.servable import Outputs
from modelyard.system.text import aligned

_MOST_CLASSES = 20
PATH, TRUTH, LABEL, ERROR = "path", "truth", "label", "error"


def output_type(outputs: Outputs) -> str:
    """Returns the type of a task's predictions, by their names: class, labels (multi-label), values or other."""
    if "class" in outputs and "probabilities" in outputs and outputs["class"].ndim == 1:
        return "class"
    if "labels" in outputs and "probabilities" in outputs:
        return "labels"
    return "values" if "values" in outputs else "other"


TASK_OF_OUTPUT = {"class": CLASSIFICATION, "labels": MULTI_LABEL, "values": REGRESSION, "other": ""}
"""The task of predictions, by `output_type`. It has the metrics."""


# -- rows ---------------------------------------------------------------------------------------------------------


class Table:
    """Converts predictions to rows.

    Args:
        classes: names of the classes, or of the values that are predicted.
        top: how many classes to list per example.
        probabilities: whether to add the probability of every class.
        labelled: whether the labels are known.
        errors: whether unreadable examples get a row with the reason.
    """

    def __init__(self, classes: Sequence[str], *, top: int, probabilities: bool, labelled: bool, errors: bool) -> None:
        self.classes, self.labelled, self.errors = tuple(classes), labelled, errors
        self.top, self.probabilities = min(max(top, 1), max(len(self.classes), 1)), probabilities

    def rows(
        self, outputs: Outputs, paths: Sequence[str], labels: NDArray[Any] | None, bad: Mapping[int, str]
    ) -> tuple[list[str], list[list[Any]]]:
        """Returns the names of the columns, and the rows of a batch, with one value per column.

        Args:
            outputs: the predictions.
            paths: the paths of the examples.
            labels: their true labels.
            bad: why examples could not be read, by their index in the batch.
        """
        predicted, output = [*self._predicted_columns(outputs)], output_type(outputs)
        columns = [PATH, *([TRUTH] if self.labelled else []), *(name for name, _ in predicted)]
        if self.errors:
            columns.append(ERROR)
        rows = []
        for index, path in enumerate(paths):
            row = [path]
            if self.labelled:
                row.append(self._label_cell(labels[index], output) if labels is not None else "")
            row += ["" if index in bad else values[index] for _, values in predicted]
            if self.errors:
                row.append(bad.get(index, ""))
            rows.append(row)
        return columns, rows

    def _label_cell(self, label: Any, output: str) -> Any:
        if output == "class":
            return self.classes[int(label)]
        if output == "labels":
            return self._joined_names(label)
        return np.asarray(label).tolist()

    def _joined_names(self, flags: Iterable[Any]) -> str:
        return "|".join(name for name, on in zip(self.classes, flags, strict=True) if on)

    def _predicted_columns(self, outputs: Outputs) -> Iterator[tuple[str, list[Any]]]:
        """Yields the name and the values of each predicted column of a batch."""
        output = output_type(outputs)
        if output == "class":
            probabilities = outputs["probabilities"]
            order = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.top]
            for rank in range(self.top):
                best, suffix = order[:, rank], f"_{rank + 1}" if rank else ""
                yield LABEL + suffix, [self.classes[number] for number in best.tolist()]
                best_probabilities = np.take_along_axis(probabilities, best[:, None], axis=1)[:, 0]
                yield "probability" + suffix, _rounded(best_probabilities)
        elif output == "labels":
            yield "labels", [self._joined_names(row) for row in outputs["labels"]]
        elif output == "values":
            values = outputs["values"].reshape(len(outputs["values"]), -1)
            count = values.shape[1]
            named = self.classes if len(self.classes) == count else range(1, count + 1)
            names = ["value"] if count == 1 else [f"value_{name}" for name in named]
            for column, name in enumerate(names):
                yield name, _rounded(values[:, column])
        else:
            for name, values in outputs.items():
                yield name, values.tolist()
        if self.probabilities and "probabilities" in outputs:
            for column, name in enumerate(self.classes):
                yield f"p({name})", _rounded(outputs["probabilities"][:, column])


def _rounded(values: NDArray[Any]) -> list[float]:
    """Rounds to the digits of a float32."""
    return [float(f"{value:.7g}") for value in values.tolist()]


# -- file formats -------------------------------------------------------------------------------------------------


def encode_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]], header: bool) -> bytes:
    """Returns rows as lines of a CSV file, after a line with the columns if ``header``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(columns)
    writer.writerows([json.dumps(value) if isinstance(value, list) else value for value in row] for row in rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


def encode_json_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]], header: bool) -> bytes:
    """Returns rows as one JSON object per line; top classes and probabilities are nested. There is no header."""
    del header
    lines = (json.dumps(_nested(columns, row), ensure_ascii=False) + "\n" for row in rows)
    return "".join(lines).encode("utf-8", "surrogateescape")


def _nested(columns: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in zip(columns, row, strict=True):
        stem, _, number = name.rpartition("_")
        if name.startswith("p(") and name.endswith(")"):
            nested.setdefault("probabilities", {})[name[2:-1]] = value
        elif stem in (LABEL, "probability") and number.isdigit():
            others = nested.setdefault("top", [{LABEL: nested[LABEL], "probability": nested["probability"]}])
            if stem == LABEL:
                others.append({})
            others[-1][stem] = value
        elif value != "" or name not in (TRUTH, ERROR):
            nested[name] = value
    return nested


FORMATS = {".csv": encode_csv, ".jsonl": encode_json_lines, ".json": encode_json_lines}
"""The function that encodes rows, by the suffix of the output file."""


# -- as text ----------------------------------------------------------------------------------------------------------


class Scores(dict[str, Any]):
    """Metrics by name; of classes also ``confusion``, whose rows are the labels, and ``by_class``. Prints as tables."""

    def __str__(self) -> str:
        names = [name for name, value in self.items() if isinstance(value, int | float)]
        text = [aligned([name, self[name]] for name in names)]
        if "confusion" in self and len(self["classes"]) <= _MOST_CLASSES:
            rows = zip(self["classes"], self["confusion"], strict=True)
            matrix = aligned([["", *self["classes"]], *([name, *counts] for name, counts in rows)])
            text += ["", "labels (rows) and predictions (columns)", matrix]
        return "\n".join(text)


# -- classes ----------------------------------------------------------------------------------------------------------


class Confusion:
    """A confusion matrix, updated batch by batch.

    Args:
        classes: names of the classes.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = tuple(classes)
        self.counts = np.zeros((len(self.classes), len(self.classes)), np.int64)

    def add(self, labels: NDArray[Any], found: NDArray[Any]) -> None:
        """Adds examples: their classes, and those that are predicted."""
        used = (labels >= 0) & (labels < len(self.classes))  # pixels of a map may have no class
        np.add.at(self.counts, (labels[used].astype(np.int64), found[used].astype(np.int64)), 1)

    def as_json(self) -> dict[str, Any]:
        """Returns classes, matrix, and the examples, precision and recall of each class; None for 0 / 0."""
        hits, found, true = self.counts.diagonal(), self.counts.sum(axis=0), self.counts.sum(axis=1)
        precision, recall = (_quotients(*metric.ratio(hits, found, true)) for metric in (Precision, Recall))
        rows = zip(self.classes, true.tolist(), precision, recall, strict=True)
        by_class = [dict(zip(("class", "examples", "precision", "recall"), row, strict=True)) for row in rows]
        return {"classes": list(self.classes), "confusion": self.counts.tolist(), "by_class": by_class}


def _quotients(above: NDArray[Any], below: NDArray[Any]) -> list[float | None]:
    return [n / d if d else None for n, d in zip(above.tolist(), below.tolist(), strict=True)]
