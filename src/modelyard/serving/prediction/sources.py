"""The examples to predict: images or values in a user's files, with or without labels."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from modelyard.storage import cache_folder, list_files

log = logging.getLogger("modelyard")
_ARRAYS = ("image", "images", "x", "x_test", "x_validation", "x_val", "x_train")
_WILDCARDS = "*?["
COLUMNS = ("image_column", "label_column", "label_kind", "value_columns", *(
    name for name in FilesOptions.model_fields if name.startswith("record_")))  # fmt: skip
"""Options of columns and records. They may differ from training."""
Labelled = tuple[RawExamples, bool]
"""Examples, and whether they have labels of the run's classes."""


def open_sources(
    sources: Sequence[str], config: Config, classes: Sequence[str], columns: Mapping[str, Any], label: Feature
) -> Labelled:
    """Returns the examples at some paths, in order.

    Args:
        sources: image files, folders of them, patterns; or one .csv file, .npz file, or records.
        config: the config of the run; its dataset options are the defaults of ``columns``.
        classes: the classes of the run. Labels that are not among them are left out.
        columns: options of `COLUMNS`.
        label: shape and type of the run's labels.

    Raises:
        DataError: if there is nothing, or nothing that can be read.
    """
    known = config.options_of("dataset")
    own = known.model_dump() if isinstance(known, FilesOptions) else {}
    options = FilesOptions.model_validate({**own, **columns})
    for source in sources:
        if storage.is_remote(source):
            raise DataError(f"{source} is not on this machine; copy it here first.")
    paths = [Path(source).expanduser() for source in sources]
    if len(paths) == 1:
        (path,) = paths
        if path.name.lower().endswith(".csv"):
            return _csv_examples(path, options, classes)
        if path.name.lower().endswith(".npz"):
            return _npz_examples(path, label, classes)
        if holds_records(path):
            return _record_examples(path, options, classes, label, cache_folder(config.cache_dir))
    images = [image for path in paths for image in _find_images(path)]
    # Files that are named one by one have no labels; others may be in folders of the classes' names.
    named = not any(path.is_dir() or any(c in str(path) for c in _WILDCARDS) for path in paths)
    names = None if named else [Path(image).parent.name for image in images]
    return _with_class_names(FileExamples(Path(), images, np.zeros(len(images), np.int32)), names, classes)


def _find_images(path: Path) -> list[str]:
    """Returns the image files of a folder, a file or a pattern."""
    if path.is_dir():
        found = []
        for parent, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not is_hidden(name))
            found += [
                Path(parent, name).as_posix()
                for name in sorted(files)
                if name.lower().endswith(IMAGE_SUFFIXES) and not is_hidden(name)
            ]
        if not found:
            raise DataError(f"there are no images under {path}. Known endings: {', '.join(IMAGE_SUFFIXES)}.")
        return found
    if path.exists():
        return [path.as_posix()]
    if any(c in str(path) for c in _WILDCARDS):
        matches = [
            match for match in map(Path, list_files(str(path))) if not match.is_dir() and not is_hidden(match.name)
        ]
        if not matches:
            raise DataError(f"no file matches {path}.")
        return [match.as_posix() for match in matches]
    raise DataError(f"there is no file or folder {path}.")


def _csv_examples(path: Path, options: FilesOptions, classes: Sequence[str]) -> Labelled:
    (_, columns), *rows = csv_lines(path)
    if not rows:
        raise DataError(f"{path} holds no rows below its first line.")

    def column(name: str, option: str) -> int:
        if name not in columns:
            raise DataError(f"{path}:1: {unknown('column', name, columns)} Name the right one with --{option}.")
        return columns.index(name)

    label = columns.index(options.label_column) if options.label_column in columns else None
    names = None if label is None or options.label_kind != "class" else [row[label].strip() for _, row in rows]
    no_labels = np.zeros(len(rows), np.int32)
    examples: RawExamples
    if options.value_columns:
        if options.value_columns == ("all",):
            others = (options.label_column, options.split_column)
            values = [n for n, name in enumerate(columns) if name not in others]
        else:
            values = [column(name, "value_columns") for name in options.value_columns]
        table = [numbers_of([(columns[n], row[n]) for n in values], f"{path}:{line}") for line, row in rows]
        examples = ArrayExamples(np.stack(table), no_labels)
    else:
        image = column(options.image_column, "image_column")
        paths = [row[image].strip() for _, row in rows]
        missing = next((n for n, p in enumerate(paths) if not p or not is_there(path.parent / p)), None)
        if missing is not None:
            raise DataError(f"{path}:{rows[missing][0]}: there is no file {path.parent / paths[missing]}.")
        examples = FileExamples(path.parent, paths, no_labels)
    return _with_class_names(examples, names, classes, warn=True)


def _npz_examples(path: Path, label: Feature, classes: Sequence[str]) -> Labelled:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(f"{path} is a single array (.npy); save it with numpy.savez(path, x=…).")
        with loaded as file:
            name = next((name for name in _ARRAYS if name in file.files), file.files[0] if file.files else "")
            if len(file.files) > 1 and name not in _ARRAYS:
                raise DataError(f"{path} must hold images named x or image; it holds: {', '.join(file.files)}.")
            images: NDArray[Any] = np.asarray(file[name]) if name else np.empty(0)
            label_name = "label" if name in ("image", "images") else "y" + name[1:]
            labels = np.asarray(file[label_name]) if label_name in file.files else None
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}.") from error
    except UNREADABLE as error:
        raise DataError(f"{path} can't be read as an .npz file of plain arrays: {error}") from error
    if images.ndim < 2 or not len(images):
        raise DataError(f"{path}: {name or 'its array'} has shape {images.shape}; examples are needed.")
    if images.ndim == 3:
        images = images[..., None]
    if labels is None:
        return ArrayExamples(images, np.zeros(len(images), np.int32)), False
    if len(labels) != len(images):
        raise DataError(f"{path}: {len(images)} examples but {len(labels)} labels.")
    return _with_own_labels(ArrayExamples(images, labels), label, classes)


def _record_examples(
    path: Path, options: FilesOptions, classes: Sequence[str], label: Feature, cache: Path
) -> Labelled:
    from modelyard.data.records.items import RecordExamples, describe_record
    from modelyard.system.console import late_bar

    features, paths = feature_map(options), matching(str(path))
    labelled = any(line.rpartition(": ")[0] == features.label for line in describe_record(paths[0], cache))
    if not labelled:
        features = replace(features, label=None)
    with late_bar("indexing records") as progress:
        examples = RecordExamples(paths, features, cache, progress=progress)
    if not labelled:
        return examples, False
    if examples.class_names is not None:
        names = [examples.class_names[n] for n in examples.labels]
        return _with_class_names(examples, names, classes, warn=True)
    return _with_own_labels(examples, label, classes)


# -- labels -------------------------------------------------------------------------------------------------------


def _with_class_names(
    examples: RawExamples, names: Sequence[str] | None, classes: Sequence[str], warn: bool = False
) -> Labelled:
    """Labels the examples, if all ``names`` are classes of the run.

    Args:
        examples: the examples.
        names: the class name of each example; None if there are none.
        classes: the classes of the run.
        warn: whether to log a name that is no class. Folders may have other names for other reasons.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    wrong = next((name for name in names or () if name not in numbers), None)
    if names is None or wrong is not None:
        if warn and wrong is not None:
            log.warning("labels are left out: %s", unknown("class", wrong, list(classes)))
        return examples, False
    examples.labels = np.array([numbers[name] for name in names], np.int32)
    return examples, True


def _with_own_labels(examples: RawExamples, label: Feature, classes: Sequence[str]) -> Labelled:
    """Keeps the labels of the examples, if the run could have been trained with them."""
    wrong = _label_mismatch(examples.labels, label, len(classes))
    if wrong is None:
        return examples, True
    log.warning("labels are left out: %s", wrong)
    examples.labels = np.zeros(len(examples), np.int32)
    return examples, False


def _label_mismatch(labels: NDArray[np.generic], label: Feature, classes: int) -> str | None:
    """Returns how ``labels`` differ from those of a run with ``classes`` classes; None if they do not."""
    if labels.shape[1:] != label.shape:
        return f"each has shape {labels.shape[1:]}, those of the run {label.shape}"
    if labels.dtype.kind not in "biuf":
        return f"they are {labels.dtype}, those of the run {label.dtype}"
    numbers = labels.astype(np.float64)
    if np.dtype(label.dtype).kind == "f":
        return None if np.isfinite(numbers).all() else "some are not finite"
    most = 1 if label.shape else classes - 1
    wrong = ~((numbers >= 0) & (numbers <= most) & (numbers == np.trunc(numbers)))
    if not wrong.any():
        return None
    found = f"there is a {numbers[wrong][0]:g}"
    return f"{found}, and flags are 0 or 1" if label.shape else f"{found}, and the run has {classes} classes"
