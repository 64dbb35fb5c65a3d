"""CSV files: paths of images with labels, or columns of numbers with labels."""

from __future__ import annotations

import csv
import io
import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from modelyard.data.catalog import FilesOptions
from modelyard.data.dataset import TRAIN
from modelyard.data.raw_examples import PATH, ArrayExamples, FileExamples, RawExamples
from modelyard.data.sources.folder import SPLIT_NAMES, split_named
from modelyard.errors import DataError, unknown
from modelyard.system.untrusted import open_regular

_LONGEST_LINE = 1 << 24
_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class CsvRows:
    """The rows of one split. Labels are class names or numbers, examples are paths of images or values."""

    folder: Path
    class_names: list[str] = field(default_factory=list)
    targets: list[NDArray[np.float32]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    values: list[NDArray[np.float32]] = field(default_factory=list)
    extra: dict[str, list[str]] = field(default_factory=dict)
    unlabelled: str = ""
    """Why there are no labels, if the rows are to be predicted and have columns of labels."""

    def examples(self, labels: NDArray[Any] | None = None) -> RawExamples:
        """Returns the examples with these labels; by default all are 0."""
        if labels is None:
            labels = np.zeros(len(self.paths) or len(self.values), np.int32)
        examples: RawExamples
        if self.values:
            examples = ArrayExamples(np.stack(self.values), labels)
        else:
            examples = FileExamples(self.folder, self.paths, labels)
        examples.extra = {name: np.array(texts) for name, texts in self.extra.items()}
        return examples


def read_csv(
    path: Path,
    options: FilesOptions,
    split: str = TRAIN,
    *,
    split_group: str = "",
    to_predict: bool = False,
    named: Collection[str] = (),
    check_images: bool = True,
) -> dict[str, CsvRows]:
    """Reads the rows of each split.

    Args:
        path: the file; its first line names the columns.
        options: which columns hold what.
        split: the split of rows that name none.
        split_group: the column whose equal values stay in one split. It is no column of values, unless named as one.
        to_predict: whether all rows are of ``split``, and labels may be missing.
        named: options that are given for rows to predict. If ``label_column`` is one, its columns must exist.
        check_images: whether a missing image is an error.

    Raises:
        DataError: with the line, for a missing column, a missing image, or a value that is not a number.
    """
    found: dict[str, CsvRows] = {}
    lines = _lines(path)
    _, names = next(lines)
    columns = _columns(path, names, options, split_group, to_predict, "label_column" in named)
    for line, row in lines:
        where = f"{path}:{line}"
        text = row[columns.split].strip() if columns.split is not None and not to_predict else ""
        rows = found.setdefault(_split(text, where) if text else split, CsvRows(path.parent))
        if columns.group is not None:
            group = row[columns.group].strip()
            if not group and not to_predict:
                raise DataError(f"{where}: {split_group!r} is empty, by which split_group groups the examples.")
            rows.extra.setdefault(split_group, []).append(group)
        cells = [(names[n], row[n].strip()) for n in columns.labels]
        if columns.unlabelled or rows.unlabelled:
            rows.unlabelled = columns.unlabelled or rows.unlabelled
        elif cells or not to_predict:
            try:
                _add_labels(rows, cells, options.label_kind, where)
            except DataError as error:
                if not to_predict:
                    raise
                rows.unlabelled = str(error)
        if columns.image is None:
            rows.values.append(_numbers([(names[n], row[n]) for n in columns.values], where))
            continue
        image = row[columns.image].strip()
        if not image:
            raise DataError(f"{where}: there is no file (the path is empty).")
        # Path.is_file raises an error for names that are too long.
        if check_images and not os.path.isfile(path.parent / image):  # noqa: PTH113
            raise DataError(f"{where}: there is no file {path.parent / image}.")
        rows.paths.append(image)
    if not found:
        raise DataError(f"{path} holds no rows below its first line.")
    return found


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the line and the cells of each row, by the names of the columns.

    Raises:
        DataError: if the file can't be read.
    """
    lines = _lines(path)
    _, names = next(lines)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path}:1: two columns are named {twice[0]!r}.")
    for line, row in lines:
        yield line, dict(zip(names, row, strict=True))


def label_columns(options: FilesOptions, columns: Sequence[str] = ()) -> list[str]:
    """Returns the names of the label columns: one of class names, any number of others."""
    if options.label_kind == "class" or options.label_column in columns:
        return [options.label_column]
    return [name.strip() for name in options.label_column.split(",") if name.strip()]


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the names of the columns, then each row, with line numbers."""
    try:
        with io.TextIOWrapper(open_regular(path, DataError), newline="", encoding="utf-8-sig") as file:
            first = next(_whole_lines(path, file), "")
            file.seek(0)
            reader = csv.reader(_whole_lines(path, file), delimiter=max(",;\t", key=first.count), strict=True)
            names = [name.strip() for name in next(reader, [])]
            yield 1, names
            for row in filter(None, reader):
                if len(row) != len(names):
                    raise DataError(
                        f"{path}:{reader.line_num}: {len(row)} columns where the first line names {len(names)}."
                    )
                yield reader.line_num, row
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}.") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} can't be read as a CSV file in UTF-8: {error}.") from error


def _whole_lines(path: Path, file: TextIO) -> Iterator[str]:
    """Yields the lines of a file. None is so long that it fills the memory."""
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE and not line.endswith(("\n", "\r")):
            raise DataError(f"{path}:{number}: the line has more than {_LONGEST_LINE:,} characters.")
        yield line


@dataclass(frozen=True)
class _Columns:
    """Column numbers. Examples are either image paths or values."""

    labels: list[int]
    split: int | None
    group: int | None
    image: int | None
    values: list[int]
    unlabelled: str = ""


def _columns(
    path: Path,
    names: Sequence[str],
    options: FilesOptions,
    split_group: str,
    to_predict: bool,
    needs_labels: bool = False,
) -> _Columns:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{path}:1: two columns are named {twice[0]!r}.")

    def number(name: str, option: str) -> int:
        if name not in names:
            values = " Columns of numbers instead of images: --value_columns all." if option == "image_column" else ""
            raise DataError(
                f"{path}:1: {unknown('column', name, names)} Name the right one with --{option}.{values}"
                if names
                else f"{path} is empty; its first line must name the columns."
            )
        return names.index(name)

    wanted = label_columns(options, names)
    missing = [name for name in wanted if name not in names]
    if to_predict and not needs_labels:
        wanted = [name for name in wanted if name in names]
    labels = [number(name, "label_column") for name in wanted]
    unlabelled = f"{path}:1: there is no column {missing[0]!r}." if missing and labels else ""
    split = None
    if options.split_column in names and options.split_column:  # pandas writes a column without a name
        split = names.index(options.split_column)
    elif not to_predict and options.split_column not in ("", FilesOptions.model_fields["split_column"].default):
        split = number(options.split_column, "split_column")
    group = names.index(split_group) if split_group in names else None
    if group is None and not to_predict and split_group not in ("", PATH if not options.value_columns else ""):
        group = number(split_group, "split_group")
    if not options.value_columns:
        return _Columns(labels, split, group, number(options.image_column, "image_column"), [], unlabelled)
    if options.value_columns == ("all",):
        values = [i for i in range(len(names)) if i not in (*labels, split, group)]
    else:
        values = [number(name, "value_columns") for name in options.value_columns]
        leaks = [i for i in values if i in (*labels, split) and not to_predict]
        if leaks:
            raise DataError(
                f"{path}:1: the column {names[leaks[0]]!r} is {'the label' if leaks[0] in labels else 'the split'}; as "
                "one of --value_columns it gives the answer away. Leave it out there, or name another --label_column."
            )
    if not values:
        raise DataError(f"{path}:1: there are no columns of values beside the label.")
    return _Columns(labels, split, group, None, values, unlabelled)


def _split(named: str, where: str) -> str:
    split = split_named(named)
    if split is None:
        raise DataError(f"{where}: {unknown('split', named, [n for names in SPLIT_NAMES.values() for n in names])}")
    return split


def _add_labels(rows: CsvRows, cells: list[tuple[str, str]], kind: str, where: str) -> None:
    if not all(text for _, text in cells):
        raise DataError(f"{where}: the label is empty.")
    if kind == "class":
        rows.class_names += [text for _, text in cells]
    else:
        numbers = _numbers(cells, where)
        wrong = np.flatnonzero(~np.isin(numbers, (0, 1)))
        if kind == "flags" and len(wrong):
            raise DataError(f"{where}: the label {cells[wrong[0]][1]!r} must be 0 or 1 (--label_kind flags).")
        rows.targets.append(numbers)


def _numbers(cells: Sequence[tuple[str, str]], where: str) -> NDArray[np.float32]:
    """Returns the numbers in some cells, each given with the name of its column."""
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
