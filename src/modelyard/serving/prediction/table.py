"""A table of predictions: its columns for each task, CSV and JSON lines, and metrics of the rows that have labels."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.serving.servable import Outputs

PATH, TRUTH, LABEL, ERROR = "path", "truth", "label", "error"


def output_type(outputs: Outputs) -> str:
    """Returns the type of a task's predictions, by their names: class, labels (multi-label), values or other."""
    if "class" in outputs and "probabilities" in outputs:
        return "class"
    if "labels" in outputs and "probabilities" in outputs:
        return "labels"
    return "values" if "values" in outputs else "other"


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


# -- metrics of labelled rows -----------------------------------------------------------------------------------------


class TableMetrics:
    """Metrics and a confusion matrix, updated batch by batch.

    Args:
        classes: names of the classes.
        output: class, labels or values; see `output_type`.
    """

    def __init__(self, classes: Sequence[str], output: str) -> None:
        self.classes, self.output = tuple(classes), output
        self.confusion = np.zeros((len(self.classes), len(self.classes)), np.int64)
        self.examples = 0
        self._sums: NDArray[np.float64] = np.zeros(5)
        self._flags = np.zeros((3, len(self.classes)), np.int64)
        self._exact = 0

    def add(self, labels: NDArray[Any], outputs: Outputs) -> None:
        """Adds the examples of a batch."""
        self.examples += len(labels)
        if self.output == "class":
            np.add.at(self.confusion, (labels.astype(np.int64), outputs["class"].astype(np.int64)), 1)
        elif self.output == "labels":
            predicted, actual = outputs["labels"].astype(bool), labels.astype(bool)
            self._exact += int((predicted == actual).all(axis=1).sum())
            self._flags += np.stack(
                [(predicted & actual).sum(0), (predicted & ~actual).sum(0), (~predicted & actual).sum(0)]
            )
        elif self.output == "values":
            actual = labels.astype(np.float64).reshape(-1)
            error = outputs["values"].astype(np.float64).reshape(-1) - actual
            self._sums += [len(actual), np.abs(error).sum(), (error**2).sum(), actual.sum(), (actual**2).sum()]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics; none without examples."""
        if not self.examples:
            return {}
        if self.output == "class":
            return {"accuracy": float(np.trace(self.confusion) / self.examples)}
        if self.output == "labels":
            hits, false, missed = self._flags
            f1 = 2 * hits / np.maximum(2 * hits + false + missed, 1)
            return {"exact_match": self._exact / self.examples, "macro_f1": float(f1.mean())}
        if self.output == "values":
            count, absolute, squared, total, squares = self._sums
            variance = squares - total**2 / count
            r2 = {"r2": float(1 - squared / variance)} if variance > 0 else {}
            return {"mae": float(absolute / count), "rmse": float(np.sqrt(squared / count)), **r2}
        return {}

    def by_class(self) -> list[dict[str, Any]]:
        """Returns examples, precision and recall of each class; None where the denominator is 0."""
        rows = []
        for number, name in enumerate(self.classes):
            hits = int(self.confusion[number, number])
            actual, predicted = int(self.confusion[number].sum()), int(self.confusion[:, number].sum())
            precision, recall = (hits / whole if whole else None for whole in (predicted, actual))
            rows.append({"class": name, "examples": actual, "precision": precision, "recall": recall})
        return rows

    def as_json(self) -> dict[str, Any]:
        """Returns everything, for the file beside the table."""
        found: dict[str, Any] = {"examples": self.examples, **self.metrics()}
        if self.output == "class":
            found |= {"classes": list(self.classes), "confusion": self.confusion.tolist(), "by_class": self.by_class()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts so far."""
        return {
            "kind": self.output,
            "examples": self.examples,
            "exact": self._exact,
            "confusion": self.confusion.tolist(),
            "sums": self._sums.tolist(),
            "flags": self._flags.tolist(),
        }

    @classmethod
    def from_state_dict(cls, classes: Sequence[str], state: Mapping[str, Any]) -> TableMetrics:
        """Returns metrics that continue from the counts of `state_dict`.

        Raises:
            ValueError: if those were of other classes.
        """
        made = cls(classes, str(state["kind"]))
        made.examples, made._exact = int(state["examples"]), int(state["exact"])
        made.confusion = np.array(state["confusion"], np.int64).reshape(made.confusion.shape)
        made._flags = np.array(state["flags"], np.int64).reshape(made._flags.shape)
        made._sums = np.array(state["sums"], np.float64)
        return made
