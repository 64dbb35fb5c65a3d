"""CSV files: paths of images with labels, or columns of numbers with labels."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelyard.data.catalog import FilesOptions
from modelyard.data.dataset import TRAIN
from modelyard.data.sources.folder import SPLIT_NAMES
from modelyard.errors import DataError, unknown

_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class CsvRows:
    """The rows of one split: names of classes or numbers as labels, and paths of images or values."""

    labels: list[str] = field(default_factory=list)
    targets: list[NDArray[np.float32]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    values: list[NDArray[np.float32]] = field(default_factory=list)


def named_images(path: Path, options: FilesOptions) -> list[str]:
    """The images that ``path`` names, there or not."""
    every = read_csv(path, options.model_copy(update={"split_column": ""}), look=False)
    return [image for rows in every.values() for image in rows.paths]


def read_csv(path: Path, options: FilesOptions, split: str = TRAIN, look: bool = True) -> dict[str, CsvRows]:
    """The rows of ``path`` by split.

    Args:
        path: the file; its first line names the columns.
        options: which columns hold what.
        split: the split of rows that name none.
        look: whether the images must be there.

    Raises:
        DataError: with the line, for a missing column, a missing file, a value that is no number.
    """
    found: dict[str, CsvRows] = {}
    lines = csv_lines(path)
    _, columns = next(lines)
    wanted = _columns(path, columns, options)
    for number, row in lines:
        _add_row(row, found, wanted, split, f"{path}:{number}", path.parent if look else None)
    if not found:
        raise DataError(f"{path} holds no rows below its first line.")
    return found


def is_there(path: Path) -> bool:
    """Whether ``path`` is a file; what no file system takes for a name is none."""
    return os.path.isfile(path)  # noqa: PTH113  Path.is_file raises for names that are too long


def csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The names of the columns of a CSV file, then its rows, each with the number of its line.

    Raises:
        DataError: if it can't be read, or a row has not as many values as there are columns.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True)
            columns = [name.strip() for name in next(reader, [])]
            yield 1, columns
            for row in filter(None, reader):
                if len(row) != len(columns):
                    raise DataError(
                        f"{path}:{reader.line_num}: {len(row)} columns where the first line names {len(columns)}."
                    )
                yield reader.line_num, row
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}.") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} can't be read as a CSV file in UTF-8: {error}.") from error


@dataclass(frozen=True)
class _Columns:
    names: Sequence[str]
    labels: list[int]
    label_kind: str
    image: int | None
    split: int | None
    values: list[int]


def _columns(path: Path, columns: Sequence[str], options: FilesOptions) -> _Columns:
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise DataError(f"{path}:1: two columns are named {twice[0]!r}.")

    def place(name: str, option: str) -> int:
        if name not in columns:
            values = " Columns of numbers instead of images: --value_columns all." if option == "image_column" else ""
            raise DataError(
                f"{path}:1: {unknown('column', name, columns)} Name the right one with --{option}.{values}"
                if columns
                else f"{path} is empty; its first line must name the columns."
            )
        return columns.index(name)

    labels = [place(name, "label_column") for name in label_columns(options, columns)]
    split = None
    if options.split_column in columns and options.split_column:  # tables of pandas have a column without a name
        split = columns.index(options.split_column)
    elif options.split_column not in ("", FilesOptions.model_fields["split_column"].default):
        split = place(options.split_column, "split_column")
    if not options.value_columns:
        return _Columns(columns, labels, options.label_kind, place(options.image_column, "image_column"), split, [])
    if options.value_columns == ("all",):
        values = [i for i in range(len(columns)) if i not in (*labels, split)]
    else:
        values = [place(name, "value_columns") for name in options.value_columns]
        told = [columns[i] for i in values if i in (*labels, split)]
        if told:
            kind = "the label" if columns.index(told[0]) in labels else "the split"
            raise DataError(
                f"{path}:1: the column {told[0]!r} is {kind}; as one of --value_columns it tells the answer. Leave "
                "it out there, or name another --label_column."
            )
    if not values:
        raise DataError(f"{path}:1: there are no columns of values beside the label.")
    return _Columns(columns, labels, options.label_kind, None, split, values)


def label_columns(options: FilesOptions, columns: Sequence[str] = ()) -> list[str]:
    """The names of the columns of labels: one of classes, any number of others."""
    if options.label_kind == "class" or options.label_column in columns:
        return [options.label_column]
    return [name.strip() for name in options.label_column.split(",") if name.strip()]


def _add_row(
    row: list[str], found: dict[str, CsvRows], columns: _Columns, split: str, where: str, folder: Path | None
) -> None:
    if columns.split is not None and row[columns.split].strip():
        named = row[columns.split].strip().lower()
        known = [name for names in SPLIT_NAMES.values() for name in names]
        if named not in known:
            raise DataError(f"{where}: {unknown('split', named, known)}")
        split = next(s for s, names in SPLIT_NAMES.items() if named in names)
    rows = found.setdefault(split, CsvRows())
    _add_label(
        [(columns.names[column], row[column].strip()) for column in columns.labels], rows, columns.label_kind, where
    )
    if columns.image is not None:
        image = row[columns.image].strip()
        if not image:
            raise DataError(f"{where}: there is no file (the path is empty).")
        if folder is not None and not is_there(folder / image):
            raise DataError(f"{where}: there is no file {folder / image}.")
        rows.paths.append(image)
        return
    rows.values.append(numbers_of([(columns.names[column], row[column]) for column in columns.values], where))


def _add_label(cells: list[tuple[str, str]], rows: CsvRows, kind: str, where: str) -> None:
    texts = [text for _, text in cells]
    if not all(texts):
        raise DataError(f"{where}: the label is empty.")
    if kind == "class":
        rows.labels.append(texts[0])
        return
    numbers = numbers_of(cells, where)
    if kind == "flags" and not np.isin(numbers, (0, 1)).all():
        wrong = texts[int(np.flatnonzero(~np.isin(numbers, (0, 1)))[0])]
        raise DataError(f"{where}: the label {wrong!r} must be 0 or 1 (--label_kind flags).")
    rows.targets.append(numbers)


def numbers_of(cells: Sequence[tuple[str, str]], where: str) -> NDArray[np.float32]:
    """The values of some cells, each with the name of its column.

    Raises:
        DataError: if one is no finite number.
    """
    values = np.empty(len(cells), np.float32)
    for number, (column, text) in enumerate(cells):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not abs(value) <= _LARGEST:
            raise DataError(f"{where}: {text!r} in the column {column!r} is not a finite number.")
        values[number] = value
    return values
