"""What predictions are worth where the truth is known: metrics and a confusion matrix, from the rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Scores:
    """Counts rows.

    Args:
        classes: their names.
        kind: class, labels or values: what the task predicts.
    """

    def __init__(self, classes: Sequence[str], kind: str) -> None:
        self.classes, self.kind = tuple(classes), kind
        self.confusion = np.zeros((len(self.classes), len(self.classes)), np.int64)
        self.examples = 0
        self._sums: NDArray[np.float64] = np.zeros(5)
        self._flags = np.zeros((3, len(self.classes)), np.int64)
        self._exact = 0

    def add(self, truth: NDArray[Any], found: dict[str, NDArray[Any]]) -> None:
        """Counts the examples of a batch."""
        self.examples += len(truth)
        if self.kind == "class":
            np.add.at(self.confusion, (truth.astype(np.int64), found["class"].astype(np.int64)), 1)
        elif self.kind == "labels":
            said, right = found["labels"].astype(bool), truth.astype(bool)
            self._exact += int((said == right).all(axis=1).sum())
            self._flags += np.stack([(said & right).sum(0), (said & ~right).sum(0), (~said & right).sum(0)])
        elif self.kind == "values":
            real = truth.astype(np.float64).reshape(-1)
            error = found["values"].astype(np.float64).reshape(-1) - real
            self._sums += [len(real), np.abs(error).sum(), (error**2).sum(), real.sum(), (real**2).sum()]

    def metrics(self) -> dict[str, float]:
        """The metrics, none where nothing was counted."""
        if not self.examples:
            return {}
        if self.kind == "class":
            return {"accuracy": float(np.trace(self.confusion) / self.examples)}
        if self.kind == "labels":
            hits, false, missed = self._flags
            f1 = 2 * hits / np.maximum(2 * hits + false + missed, 1)
            return {"exact_match": self._exact / self.examples, "macro_f1": float(f1.mean())}
        if self.kind == "values":
            count, absolute, squared, total, squares = self._sums
            spread = squares - total**2 / count
            r2 = {"r2": float(1 - squared / spread)} if spread > 0 else {}
            return {"mae": float(absolute / count), "rmse": float(np.sqrt(squared / count)), **r2}
        return {}

    def by_class(self) -> list[dict[str, Any]]:
        """Of each class: examples, precision and recall; None where there is nothing to divide by."""
        rows = []
        for number, name in enumerate(self.classes):
            hits = int(self.confusion[number, number])
            real, said = int(self.confusion[number].sum()), int(self.confusion[:, number].sum())
            precision, recall = (hits / whole if whole else None for whole in (said, real))
            rows.append({"class": name, "examples": real, "precision": precision, "recall": recall})
        return rows

    def state(self) -> dict[str, Any]:
        """What was counted so far."""
        arrays = {"confusion": self.confusion, "sums": self._sums, "flags": self._flags}
        counts = {"kind": self.kind, "examples": self.examples, "exact": self._exact}
        return {**counts, **{name: array.tolist() for name, array in arrays.items()}}

    @classmethod
    def going_on(cls, classes: Sequence[str], state: Mapping[str, Any]) -> Scores:
        """Counts on from what `state` gave.

        Raises:
            ValueError: if that was of other classes.
        """
        made = cls(classes, str(state["kind"]))
        confusion = np.asarray(state["confusion"], np.int64).reshape(-1, len(made.classes))
        if confusion.shape != made.confusion.shape:
            raise ValueError("other classes")
        made.confusion[...] = confusion
        made._sums[...] = state["sums"]
        made._flags[...] = state["flags"]
        made.examples, made._exact = int(state["examples"]), int(state["exact"])
        return made

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        made: dict[str, Any] = {"examples": self.examples, **self.metrics()}
        if self.kind == "class":
            made |= {"classes": list(self.classes), "confusion": self.confusion.tolist(), "by_class": self.by_class()}
        return made
