"""What to predict: images or values in a user's files, with labels or without."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard import storage
from modelyard.config.schema import Config
from modelyard.data.catalog import FilesOptions
from modelyard.data.dataset import Feature
from modelyard.data.image_spec import IMAGE_SUFFIXES
from modelyard.data.raw_examples import ArrayExamples, FileExamples, RawExamples
from modelyard.data.sources.csv_file import csv_lines, is_there, numbers_of
from modelyard.data.sources.files import feature_map, holds_records, matching
from modelyard.data.sources.folder import is_hidden
from modelyard.data.sources.npz import UNREADABLE
from modelyard.errors import DataError, unknown
from modelyard.serving.prediction.truth import why_no_truth
from modelyard.storage import cache_folder, list_files

log = logging.getLogger("modelyard")
_IMAGES = ("image", "images", "x", "x_test", "x_validation", "x_val", "x_train")
_PATTERN = "*?["
COLUMNS = ("image_column", "label_column", "label_kind", "value_columns", *(
    name for name in FilesOptions.model_fields if name.startswith("record_")))  # fmt: skip
"""Options that say where tables and records hold what; they may be other ones than in training."""


@dataclass(frozen=True)
class ToPredict:
    """The examples, and whether their labels are of the run's classes."""

    items: RawExamples
    labelled: bool


def open_sources(
    sources: Sequence[str], config: Config, classes: Sequence[str], columns: Mapping[str, Any], label: Feature
) -> ToPredict:
    """The examples at some paths, in their order.

    Args:
        sources: image files, folders of them, patterns; or one .csv file, .npz file, or records.
        config: of the run: how it reads files of columns and records.
        classes: of the run; labels of these names, where there are any, are taken for the truth.
        columns: options of `COLUMNS` that are other than in training.
        label: of an example of the run: labels unlike it are left out.

    Raises:
        DataError: if there is nothing, or nothing that can be read.
    """
    known = config.options_of("dataset")
    own = known.model_dump() if isinstance(known, FilesOptions) else {}
    options = FilesOptions.model_validate({**own, **columns})
    for source in sources:
        if storage.is_remote(source):
            raise DataError(f"{source} is not on this machine; copy it here first.")
    places = [Path(source).expanduser() for source in sources]
    if len(places) == 1:
        alone = places[0]
        name = alone.name.lower()
        if name.endswith(".csv"):
            return _of_csv(alone, options, classes)
        if name.endswith(".npz"):
            return _of_npz(alone, label, classes)
        if holds_records(alone):
            return _of_records(alone, options, classes, label, cache_folder(config.cache_dir))
    paths = [path for place in places for path in _images(place)]
    return _with_labels(FileExamples(Path(), paths, np.zeros(len(paths), np.int32)), _parents(paths, places), classes)


def _images(place: Path) -> list[str]:
    """The image files that a path means."""
    if place.is_dir():
        found = []
        for parent, folders, files in os.walk(place):
            folders[:] = sorted(name for name in folders if not is_hidden(name))
            found += [
                Path(parent, name).as_posix()
                for name in sorted(files)
                if name.lower().endswith(IMAGE_SUFFIXES) and not is_hidden(name)
            ]
        if not found:
            raise DataError(f"there are no images under {place}. Known endings: {', '.join(IMAGE_SUFFIXES)}.")
        return found
    if place.exists():
        return [place.as_posix()]
    if any(c in str(place) for c in _PATTERN):
        matches = [path for path in map(Path, list_files(str(place))) if not path.is_dir() and not is_hidden(path.name)]
        if not matches:
            raise DataError(f"no file matches {place}.")
        return [path.as_posix() for path in matches]
    raise DataError(f"there is no file or folder {place}.")


def _parents(paths: Sequence[str], places: Sequence[Path]) -> list[str] | None:
    """The names of the folders that the images are in; None where files were named one by one."""
    if not any(place.is_dir() or any(c in str(place) for c in _PATTERN) for place in places):
        return None
    return [Path(path).parent.name for path in paths]


def _with_labels(
    items: RawExamples, names: Sequence[str] | None, classes: Sequence[str], said: bool = False
) -> ToPredict:
    """The items, with the truth where all of ``names`` are classes.

    Args:
        items: of the source.
        names: of the classes of the items.
        classes: of the run.
        said: whether the source says that these are labels; folders may be there for other reasons.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    strange = next((name for name in names or () if name not in numbers), None)
    if names is None or strange is not None:
        if said and strange is not None:
            log.warning("labels are left out: %s", unknown("class", strange, list(classes)))
        return ToPredict(items, labelled=False)
    items.labels = np.array([numbers[name] for name in names], np.int32)
    return ToPredict(items, labelled=True)


def _of_csv(path: Path, options: FilesOptions, classes: Sequence[str]) -> ToPredict:
    (_, columns), *rows = csv_lines(path)
    if not rows:
        raise DataError(f"{path} holds no rows below its first line.")

    def place(name: str, option: str) -> int:
        if name not in columns:
            raise DataError(f"{path}:1: {unknown('column', name, columns)} Name the right one with --{option}.")
        return columns.index(name)

    label = columns.index(options.label_column) if options.label_column in columns else None
    names = None if label is None or options.label_kind != "class" else [row[label].strip() for _, row in rows]
    labels = np.zeros(len(rows), np.int32)
    if not options.value_columns:
        image = place(options.image_column, "image_column")
        paths = [row[image].strip() for _, row in rows]
        missing = next((n for n, p in enumerate(paths) if not p or not is_there(path.parent / p)), None)
        if missing is not None:
            raise DataError(f"{path}:{rows[missing][0]}: there is no file {path.parent / paths[missing]}.")
        return _with_labels(FileExamples(path.parent, paths, labels), names, classes, said=True)
    if options.value_columns == ("all",):
        others = (options.label_column, options.split_column)
        values = [n for n, name in enumerate(columns) if name not in others]
    else:
        values = [place(name, "value_columns") for name in options.value_columns]
    table = np.stack([numbers_of([(columns[n], row[n]) for n in values], f"{path}:{line}") for line, row in rows])
    return _with_labels(ArrayExamples(table, labels), names, classes, said=True)


def _with_numbers(items: RawExamples, label: Feature, classes: Sequence[str]) -> ToPredict:
    """The items, with their own labels as the truth where those are such as the run has."""
    wrong = why_no_truth(items.labels, label, len(classes))
    if wrong is None:
        return ToPredict(items, labelled=True)
    log.warning("labels are left out: %s", wrong)
    items.labels = np.zeros(len(items), np.int32)
    return ToPredict(items, labelled=False)


def _of_npz(path: Path, label: Feature, classes: Sequence[str]) -> ToPredict:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(f"{path} is a single array (.npy); save it with numpy.savez(path, x=…).")
        with loaded as file:
            name = next((name for name in _IMAGES if name in file.files), file.files[0] if file.files else "")
            if len(file.files) > 1 and name not in _IMAGES:
                raise DataError(f"{path} must hold images named x or image; it holds: {', '.join(file.files)}.")
            images: NDArray[Any] = np.asarray(file[name]) if name else np.empty(0)
            twin = "label" if name in ("image", "images") else "y" + name[1:]
            labels = np.asarray(file[twin]) if twin in file.files else None
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}.") from error
    except UNREADABLE as error:
        raise DataError(f"{path} can't be read as an .npz file of plain arrays: {error}") from error
    if images.ndim < 2 or not len(images):
        raise DataError(f"{path}: {name or 'its array'} has shape {images.shape}; examples are needed.")
    if images.ndim == 3:
        images = images[..., None]
    if labels is not None and len(labels) != len(images):
        raise DataError(f"{path}: {len(images)} examples but {len(labels)} labels.")
    if labels is None:
        return ToPredict(ArrayExamples(images, np.zeros(len(images), np.int32)), labelled=False)
    return _with_numbers(ArrayExamples(images, labels), label, classes)


def _of_records(path: Path, options: FilesOptions, classes: Sequence[str], label: Feature, cache: Path) -> ToPredict:
    from dataclasses import replace

    from modelyard.data.records.items import RecordExamples, describe_record
    from modelyard.system.console import bar

    features, paths = feature_map(options), matching(str(path))
    labelled = any(line.rpartition(": ")[0] == features.label for line in describe_record(paths[0], cache))
    if not labelled:
        features = replace(features, label=None)
    with bar("indexing records") as progress:
        items = RecordExamples(paths, features, cache, progress=progress)
    if not labelled:
        return ToPredict(items, labelled=False)
    if items.class_names is not None:
        return _with_labels(items, [items.class_names[n] for n in items.labels], classes, said=True)
    return _with_numbers(items, label, classes)
