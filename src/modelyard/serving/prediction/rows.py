"""Predictions as rows of a table: what a row says for each kind of task, and how files hold rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
Found = Mapping[str, NDArray[Any]]
PATH, TRUTH, LABEL, ERROR = "path", "truth", "label", "error"


class Table:
    """Makes rows of predictions.

    Args:
        classes: their names; or of the values that are predicted.
        kind: class, labels, values or other: what the task predicts.
        top: how many classes to list.
        everything: also the probability of every class.
        labelled: whether the truth is known.
        errors: whether examples that can't be read get a row that says why.
    """

    def __init__(
        self, classes: Sequence[str], kind: str, *, top: int, everything: bool, labelled: bool, errors: bool
    ) -> None:
        self.classes, self.kind, self.labelled, self.errors = tuple(classes), kind, labelled, errors
        self.top, self.everything = min(max(top, 1), max(len(self.classes), 1)), everything

    def columns(self, found: Found) -> list[str]:
        """The names of the columns, for predictions such as these."""
        columns = [PATH, *([TRUTH] if self.labelled else [])]
        if self.kind == "class":
            columns += [LABEL, "probability"]
            columns += [f"{name}_{n}" for n in range(2, self.top + 1) for name in (LABEL, "probability")]
        elif self.kind == "labels":
            columns.append("labels")
        elif self.kind == "values":
            columns += self._value_names(found["values"])
        else:
            columns += list(found)
        if self.everything and "probabilities" in found:
            columns += [f"p({name})" for name in self.classes]
        return [*columns, *([ERROR] if self.errors else [])]

    def _value_names(self, values: NDArray[Any]) -> list[str]:
        if values.ndim == 1 or values.shape[1] == 1:
            return ["value"]
        named = self.classes if len(self.classes) == values.shape[1] else range(1, values.shape[1] + 1)
        return [f"value_{name}" for name in named]

    def rows(
        self, found: Found, paths: Sequence[str], truth: NDArray[Any] | None, bad: Mapping[int, str]
    ) -> Iterable[list[Any]]:
        """The rows of a batch, one value for each column.

        Args:
            found: what the task predicts.
            paths: of the examples.
            truth: their labels.
            bad: why some of them could not be read, by their place in the batch.
        """
        cells = [*self._cells(found)]
        width = len(cells)
        for place, path in enumerate(paths):
            row = [path]
            if self.labelled:
                row.append(self._truth(truth[place]) if truth is not None else "")
            if place in bad:
                row += [""] * width + [bad[place]]
            else:
                row += [cell[place] for cell in cells]
                if self.errors:
                    row.append("")
            yield row

    def _truth(self, label: Any) -> Any:
        if self.kind == "class":
            return self.classes[int(label)]
        if self.kind == "labels":
            return "|".join(name for name, on in zip(self.classes, label, strict=True) if on)
        return np.asarray(label).tolist()

    def _cells(self, found: Found) -> Iterable[list[Any]]:
        """The columns of a batch beside path and truth."""
        if self.kind == "class":
            probabilities = found["probabilities"]
            order = np.argsort(-probabilities, axis=1, kind="stable")[:, : self.top]
            for place in range(self.top):
                best = order[:, place]
                yield [self.classes[number] for number in best.tolist()]
                yield _short(np.take_along_axis(probabilities, best[:, None], axis=1)[:, 0])
        elif self.kind == "labels":
            yield ["|".join(name for name, on in zip(self.classes, row, strict=True) if on) for row in found["labels"]]
        elif self.kind == "values":
            values = found["values"].reshape(len(found["values"]), -1)
            for column in range(values.shape[1]):
                yield _short(values[:, column])
        else:
            for values in found.values():
                yield values.tolist()
        if self.everything and "probabilities" in found:
            for column in range(found["probabilities"].shape[1]):
                yield _short(found["probabilities"][:, column])


def _short(values: NDArray[Any]) -> list[float]:
    """As many digits as a 32-bit number has."""
    return [float(f"{value:.7g}") for value in values.tolist()]


def kind_of(found: Found) -> str:
    """What a task predicts, by the names it gives."""
    if "class" in found and "probabilities" in found:
        return "class"
    if "labels" in found and "probabilities" in found:
        return "labels"
    return "values" if "values" in found else "other"


class CsvForm:
    """Rows as lines of a CSV file."""

    def header(self, columns: Sequence[str]) -> bytes:
        """The first line."""
        return self.lines(columns, [columns])

    def lines(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
        """The lines of some rows."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [json.dumps(value) if isinstance(value, list) else value for value in row] for row in rows
        )
        return text.getvalue().encode("utf-8", "surrogateescape")


class JsonForm:
    """Rows as one JSON object a line; top classes and probabilities are nested."""

    def header(self, columns: Sequence[str]) -> bytes:
        """None."""
        return b""

    def lines(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
        """The lines of some rows."""
        return "".join(json.dumps(_nested(columns, row), ensure_ascii=False) + "\n" for row in rows).encode(
            "utf-8", "surrogateescape"
        )


def _nested(columns: Sequence[str], row: Sequence[Any]) -> Row:
    made: Row = {}
    for name, value in zip(columns, row, strict=True):
        stem, _, number = name.rpartition("_")
        if name.startswith("p(") and name.endswith(")"):
            made.setdefault("probabilities", {})[name[2:-1]] = value
        elif stem in (LABEL, "probability") and number.isdigit():
            others = made.setdefault("top", [{LABEL: made[LABEL], "probability": made["probability"]}])
            if stem == LABEL:
                others.append({})
            others[-1][stem] = value
        elif value != "" or name not in (TRUTH, ERROR):
            made[name] = value
    return made


FORMS: dict[str, Callable[[], CsvForm | JsonForm]] = {".csv": CsvForm, ".jsonl": JsonForm, ".json": JsonForm}
"""By the ending of the file."""
