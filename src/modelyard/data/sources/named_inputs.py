"""Files to predict with a model of several named inputs: .npz, .csv and .jsonl.

An .npz file has an array per input. A .csv file has a column per input: a number, or a JSON list such as [0.5, 1, 2]. A
.jsonl file has an object per line, with a number or a list per input. An image may be the path of a file, relative to
the table.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.data.catalog import FilesOptions
from modelyard.data.dataset import IMAGE
from modelyard.data.decoded import examples_of
from modelyard.data.inputs import Inputs, check_names, checked_arrays, describe
from modelyard.data.raw_examples import ExamplesWithInputs, FileExamples, RawExamples
from modelyard.data.sources.csv_file import read_rows
from modelyard.data.sources.npz import read_npz_inputs
from modelyard.errors import DataError
from modelyard.system.untrusted import open_regular

ENDINGS = (".npz", ".csv", ".jsonl")
_LONGEST_LINE = 1 << 26
_Cells = dict[str, list[Any]]
_Labels = list[str] | NDArray[Any] | None


def read_named_inputs(path: Path, inputs: Inputs, options: FilesOptions) -> tuple[RawExamples, _Labels]:
    """Reads examples and, if there are some, their labels: class names or an array.

    Args:
        path: the file.
        inputs: what the model takes.
        options: ``image_column`` and ``label_column`` are the names of image and label in a table.

    Raises:
        DataError: if an input is missing or does not fit.
    """
    if path.suffix.lower() == ".npz":
        arrays, labels = read_npz_inputs(path, [*inputs])
        try:
            checked = checked_arrays(arrays, inputs)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        count = len(next(iter(checked.values())))
        if labels is not None and (not labels.ndim or len(labels) != count):
            raise DataError(f"{path}: {count} examples but labels of shape {labels.shape}.")
        return examples_of(checked, labels), labels
    if path.suffix.lower() not in ENDINGS:
        raise DataError(
            f"{path} does not have all inputs: the model takes {describe(inputs)}. Give an {', '.join(ENDINGS[:-1])} "
            f"or {ENDINGS[-1]} file with an array or column per input."
        )
    rows = _rows(path)
    cells: _Cells = {name: [] for name in inputs}
    found: list[str] = []
    for where, row in rows:
        if options.image_column in row:
            row.setdefault(IMAGE, row[options.image_column])
        named = {name: row[name] for name in inputs if name in row}
        check_names(named, inputs, where=where)
        for name, value in named.items():
            cells[name].append(_value(value, name, where))
        if options.label_column in row:
            found.append(str(row[options.label_column]))
        if len(found) not in (0, len(cells[next(iter(inputs))])):
            raise DataError(f"{where}: some rows have a {options.label_column!r} and some have none.")
    if not any(cells.values()):
        raise DataError(f"{path} holds no rows.")
    return _examples(path, cells, inputs), found or None


def image_paths(path: Path, options: FilesOptions) -> list[str]:
    """Returns the paths of images in a table, relative to its folder; none if it has pixels."""
    if path.suffix.lower() not in (".csv", ".jsonl"):
        return []
    cells = [_value(row.get(IMAGE, row.get(options.image_column)), IMAGE, where) for where, row in _rows(path)]
    return list(dict.fromkeys(cells)) if all(isinstance(each, str) for each in cells) else []


def _rows(path: Path) -> Any:
    return _csv_rows(path) if path.suffix.lower() == ".csv" else _json_rows(path)


def _csv_rows(path: Path) -> Any:
    for line, row in read_rows(path):
        yield f"{path}:{line}", row


def _json_rows(path: Path) -> Any:
    try:
        with open_regular(path, DataError) as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                where = f"{path}:{number}"
                if len(line) == _LONGEST_LINE:
                    raise DataError(f"{where}: the line has more than {_LONGEST_LINE:,} bytes.")
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{where} is not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise DataError(f"{where} must be a JSON object with a value per input.")
                yield where, row
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}.") from error
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}.") from error


def _value(value: Any, name: str, where: str) -> Any:
    """Returns a cell as a path, a number or nested lists."""
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
    if isinstance(value, str) and name != IMAGE:
        raise DataError(f"{where}: {value!r} in {name!r} is not a number, and not a JSON list of numbers.")
    return value


def _examples(path: Path, cells: _Cells, inputs: Inputs) -> RawExamples:
    images = cells.get(IMAGE, ())
    are_files = bool(images) and all(isinstance(each, str) for each in images)
    arrays = {}
    for name, values in cells.items():
        if name == IMAGE and are_files:
            continue
        try:
            arrays[name] = np.array(values, np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise DataError(f"{path}: the values of {name!r} are not numbers of one shape: {error}") from error
    try:
        arrays = checked_arrays(arrays, {name: inputs[name] for name in arrays})
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if not are_files:
        return examples_of(arrays)
    missing = next((each for each in images if not os.path.isfile(path.parent / each)), None)  # noqa: PTH113 - long names
    if missing is not None:
        raise DataError(f"{path}: there is no file {path.parent / missing}.")
    files = FileExamples(path.parent, list(images), np.zeros(len(images), np.int32))
    return ExamplesWithInputs(arrays, files)
